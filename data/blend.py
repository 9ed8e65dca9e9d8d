"""Several data sets mixed by weight, with exact counts and without a table.

The sets are the leaves of a binary tree (Huffman's, so heavy sets are near the root). At a node
that m samples have passed through, round(m * w) of them went left, w being the left side's share:
this fixes for every m which way the m-th goes. So sample n is found by one walk down the tree,
nothing is stored for each sample, and no set is ever asked for more than it is used. After n
samples a set of weight w has had w * n of them, give or take 1 (2 at most, for many sets of very
different weights). Weights are exact fractions; 0.1 means one tenth.

A blend may change during a run: each phase starts at a sample number, and every set goes on where
the phases before it left off, so that nothing repeats.

Imports the standard library only, and data/index_format.py for its error.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from data.index_format import DataError

NOT_FINITE = ("nan", "inf", "infinity")


def parse_blend(words: Sequence[str]) -> tuple[list[str], list[Fraction] | None]:
    """The prefixes and weights of `--data-path`: PREFIX, WEIGHT PREFIX WEIGHT PREFIX ..., or PREFIX
    PREFIX ...

    Weights are None when none is given. A prefix that comes twice gets the sum of its weights.

    >>> parse_blend(["1", "a", "3", "b"])
    (['a', 'b'], [Fraction(1, 1), Fraction(3, 1)])
    """
    numbers = [_number(word) for word in words]
    if len(words) % 2 == 0 and all(number is not None for number in numbers[::2]):
        prefixes, weights = list(words[1::2]), numbers[::2]
        blend: dict[str, Fraction] = {}
        for prefix, weight in zip(prefixes, weights):
            blend[prefix] = blend.get(prefix, Fraction(0)) + weight
        check_weights(list(blend.values()), " ".join(words))
        return list(blend), list(blend.values())
    mixed = [word for word, number in zip(words, numbers) if number is not None]
    if mixed:
        endless = [word for word in words[::2] if word.lower().lstrip("+-") in NOT_FINITE]
        if endless:
            raise DataError(f"{' '.join(words)}: weight {endless[0]} is no finite number")
        raise DataError(
            f"{' '.join(words)}: {mixed[0]} stands where a prefix is expected; give WEIGHT PREFIX "
            "for every set, or prefixes alone"
        )
    return list(dict.fromkeys(words)), None


def check_weights(weights: Sequence[Fraction], source: str) -> None:
    """Raise DataError unless the weights can be a blend's: none negative, not all 0. Any sum will
    do."""
    if any(weight < 0 for weight in weights):
        raise DataError(f"{source}: weight {float(min(weights)):g} is negative; use 0 or more")
    if sum(weights) == 0:
        raise DataError(f"{source}: all weights are 0; at least one set must have a share")


def _number(word: str) -> Fraction | None:
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True)
class _Node:
    """An inner node of the tree: `left` and `right` are nodes or set numbers; left's share is part
    / whole."""

    left: _Node | int
    right: _Node | int
    part: int
    whole: int

    def gone_left(self, passed: int) -> int:
        """Of the first `passed` samples, how many went left: passed * part / whole, rounded half
        up."""
        return (2 * passed * self.part + self.whole) // (2 * self.whole)


class Blend:
    """Which sample of which set is sample n of the blend.

    >>> [Blend([Fraction(1), Fraction(3)]).locate(n) for n in range(5)]
    [(1, 0), (0, 0), (1, 1), (1, 2), (1, 3)]
    """

    def __init__(self, weights: Sequence[Fraction]):
        check_weights(weights, "blend")
        self._sets = len(weights)
        heap = [(Fraction(weight), i, i) for i, weight in enumerate(weights) if weight]
        heapq.heapify(heap)
        while len(heap) > 1:
            (light, _, left), (heavy, order, right) = heapq.heappop(heap), heapq.heappop(heap)
            share = light / (light + heavy)
            node = _Node(left, right, share.numerator, share.denominator)
            heapq.heappush(heap, (light + heavy, order, node))
        self._root = heap[0][2]

    def locate(self, n: int) -> tuple[int, int]:
        """(set, number of the sample within that set) of sample n."""
        node = self._root
        while isinstance(node, _Node):
            before = node.gone_left(n)
            if node.gone_left(n + 1) > before:
                node, n = node.left, before
            else:
                node, n = node.right, n - before
        return node, n

    def counts(self, n: int) -> list[int]:
        """How many of the first n samples each set gives."""
        counts = [0] * self._sets
        todo = [(self._root, n)]
        while todo:
            node, passed = todo.pop()
            if isinstance(node, _Node):
                left = node.gone_left(passed)
                todo += [(node.left, left), (node.right, passed - left)]
            else:
                counts[node] = passed
        return counts


class BlendedDataset:
    """Data sets mixed by weight; dataset[n] is a sample of one of them.

    datasets  anything with dataset[k] for k >= 0
    phases    [(first sample, weights), ...], the first at 0, rising; a phase ends where the next
              starts

    A set of weight 0 gives no sample in that phase. Sets keep their own count through all phases.
    """

    def __init__(self, datasets: Sequence, phases: Sequence[tuple[int, Sequence[Fraction]]]):
        starts = [start for start, _ in phases]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"phases start at samples {starts}; they must rise from 0")
        for start, weights in phases:
            if len(weights) != len(datasets):
                raise ValueError(
                    f"the phase at {start} has {len(weights)} weights for {len(datasets)} sets"
                )
        self.datasets = list(datasets)
        self._starts = starts
        self._blends = [Blend(weights) for _, weights in phases]
        self._used = [[0] * len(self.datasets)]
        for i in range(1, len(phases)):
            self._used.append(self.counts(starts[i]))

    def locate(self, n: int) -> tuple[int, int]:
        """(set, number of the sample within that set) of sample n."""
        if n < 0:
            raise IndexError(f"sample {n}: samples count from 0")
        phase = self._phase(n)
        which, k = self._blends[phase].locate(n - self._starts[phase])
        return which, self._used[phase][which] + k

    def counts(self, n: int) -> list[int]:
        """How many of the first n samples each set gives."""
        phase = self._phase(n - 1) if n else 0
        counts = self._blends[phase].counts(n - self._starts[phase])
        return [used + count for used, count in zip(self._used[phase], counts)]

    def __getitem__(self, n: int):
        which, k = self.locate(n)
        return self.datasets[which][k]

    def _phase(self, n: int) -> int:
        known = len(self._used)  # while the constructor still counts, later phases do not exist
        return max(i for i in range(known) if self._starts[i] <= n)
