"""Boxes of logical tensors: what a rank owns, what a file holds, what a reader wants.

Pure: standard library only. A `Box` is one (start, stop) per dimension; a checkpoint stores every
tensor as boxes that tile it exactly, so that any layout can be cut from any other by intersection.
`core.shard.Shard.box` says which box a tensor-parallel rank holds, `flat_boxes` turns a piece of
flat memory (sharded optimizer state) into boxes. Used by pieces.py, index.py and store.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, n) for n in shape)


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements; a scalar's box `()` has one."""
    return prod(lengths(box))


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index: `tensor[slices(box)]` is a view of it."""
    return tuple(slice(start, stop) for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The elements of both, None when there are none (`()` is the box of a scalar, not nothing).

    >>> intersect(((0, 4), (0, 8)), ((2, 6), (4, 9)))
    ((2, 4), (4, 8))
    """
    shared = tuple((max(p, q), min(r, s)) for (p, r), (q, s) in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def relative(box: Box, outer: Box) -> Box:
    """The same elements, counted from the first element of `outer`."""
    return tuple(
        (start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True)
    )


def moved(box: Box, origin: Sequence[int]) -> Box:
    """The box with `origin` added: the inverse of `relative`."""
    return tuple((start + o, stop + o) for (start, stop), o in zip(box, origin, strict=True))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes of elements [start, stop) of a row-major tensor, in order.

    Each is contiguous in that tensor's memory, and there are at most 2·dims − 1 of them.
    ValueError when the range does not lie inside the tensor.

    >>> flat_boxes((4, 3), 2, 10)
    [((0, 1), (2, 3)), ((1, 3), (0, 3)), ((3, 4), (0, 1))]
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"elements {start} to {stop} are outside a tensor of {prod(shape)}")
    if start == stop:
        return []
    if not shape:
        return [()]
    row, rest = prod(shape[1:]), shape[1:]
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return [((first, first + 1), *box) for box in flat_boxes(rest, head, tail)]
    found: list[Box] = []
    if head:
        found += [((first, first + 1), *box) for box in flat_boxes(rest, head, row)]
        first += 1
    if first < last:
        found.append(((first, last), *whole(rest)))
    if tail:
        found += [((last, last + 1), *box) for box in flat_boxes(rest, 0, tail)]
    return found


def flat_span(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """First and last + 1 flat index of a non-empty box in a row-major tensor of this shape."""
    first = last = 0
    for n, (start, stop) in zip(shape, box, strict=True):
        first, last = first * n + start, last * n + stop - 1
    return first, last + 1


def subtract(box: Box, other: Box) -> list[Box]:
    """What is left of `box` without the elements of `other`, as disjoint boxes."""
    shared = intersect(box, other)
    if shared is None:
        return [box]
    left: list[Box] = []
    for i, ((start, stop), (low, high)) in enumerate(zip(box, shared, strict=True)):
        before, after = shared[:i], box[i + 1 :]
        left += [(*before, cut, *after) for cut in ((start, low), (high, stop)) if cut[0] < cut[1]]
    return left


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that share an element, None when no two do.

    A sweep along the first dimension: each box is compared with those that still reach its start,
    so that many flat pieces cost little more than sorting them.
    """
    active: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: boxes[i][:1]):
        if boxes[i]:
            active = [j for j in active if boxes[j][0][1] > boxes[i][0][0]]
        for j in active:
            if intersect(boxes[i], boxes[j]) is not None:
                return min(i, j), max(i, j)
        active.append(i)
    return None


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why the boxes do not tile a tensor of this shape exactly; None when they do."""
    everything = whole(shape)
    for box in boxes:
        if len(box) != len(shape):
            return f"{show(box)} does not have the dimensions of the shape {tuple(shape)}"
        if any(not 0 <= a < b <= n for (a, b), n in zip(box, shape, strict=True)):
            return f"{show(box)} is empty or outside the shape {tuple(shape)}"
    if overlap := first_overlap(boxes):
        a, b = (show(boxes[i]) for i in overlap)
        return f"{a} and {b} overlap: some elements have two owners"
    covered, wanted = sum(map(volume, boxes)), volume(everything)
    if covered == wanted:
        return None
    left = [everything]
    for box in boxes:
        left = [rest for hole in left for rest in subtract(hole, box)]
    return f"{covered} of {wanted} elements have an owner; {show(left[0])} has none"


def show(box: Box) -> str:
    """The box as it would be typed: `[0:4, 8:16]`.

    >>> show(((0, 4), (8, 16)))
    '[0:4, 8:16]'
    """
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
