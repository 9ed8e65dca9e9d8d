"""How many bytes autograd keeps for backward, now and at most: `SavedActivations`.

Inside, every tensor that an operation saves is seen when it is packed and let go when its node is.
A piece of memory counts once, however many tensors lie in it; parameters and what else is named as
`known` do not count, nor does what `elsewhere` says is counted elsewhere, nor memory that is given
up soon after (CheckpointWithoutOutput). Seen are the threads that run inside: on a CPU also the
graphs that a recomputation makes. Imports torch only.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

RECENT = 64  # saved tensors whose memory may still be given up


class _Kept:
    """A saved tensor, counted for as long as a graph holds this."""

    __slots__ = ("__weakref__", "key", "owner", "tensor")

    def __init__(self, owner: SavedActivations, tensor: Tensor, key: int) -> None:
        self.owner, self.tensor, self.key = owner, tensor, key

    def __del__(self) -> None:
        self.owner._let_go(self.key)


class SavedActivations(torch.autograd.graph.saved_tensors_hooks):
    """now, most   bytes kept, and the most that were kept at once
    at_change   is called whenever something is kept or let go
    """

    def __init__(
        self,
        known: Iterable[Tensor] = (),
        elsewhere: Callable[[Tensor], bool] = lambda tensor: False,
        at_change: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(self._pack, self._unpack)
        self.now = self.most = 0
        self._known = {t.untyped_storage()._cdata for t in known}
        self._elsewhere, self._at_change = elsewhere, at_change
        self._uses: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._recent: deque[weakref.ref[_Kept]] = deque(maxlen=RECENT)

    def __enter__(self) -> SavedActivations:
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> object:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or (not self._uses[key] and self._elsewhere(tensor)):
            return tensor
        if not self._uses[key]:
            self._sizes[key] = 0
        self._uses[key] += 1
        kept = _Kept(self, tensor.detach(), key)
        self._recent.append(weakref.ref(kept))
        for recent in self._recent:
            self._weigh(recent())
        self.most = max(self.most, self.now)
        self._at_change()
        return kept

    def keep(self, tensors: Iterable[object]) -> list[object]:
        """Counts what somebody keeps beside autograd, for as long as the result is held."""
        return [self._pack(x) for x in tensors if isinstance(x, Tensor)]

    def _weigh(self, kept: _Kept | None) -> None:
        if kept is not None:
            size = kept.tensor.untyped_storage().nbytes()
            self.now += size - self._sizes[kept.key]
            self._sizes[kept.key] = size

    @staticmethod
    def _unpack(kept: object) -> Tensor:
        return kept.tensor if isinstance(kept, _Kept) else kept

    def _let_go(self, key: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            self.now -= self._sizes.pop(key)
        self._at_change()
