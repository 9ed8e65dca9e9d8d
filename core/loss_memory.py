"""What the output layer and its loss take at most, seen as it is allocated: `LossMemory`.

Inside, every result of a torch operation that lies in memory of its own counts from then on until
nobody holds it any more; the loss's input, the last hidden states, counts with it. So whatever the
loss's mode, this is what it really holds: chunks of logits, the gradients it makes, what it keeps
for backward. Memory that a library takes within one operation is not seen. Imports torch only.

A stage that has one (core/pipeline_parallel/stage.py) enters it around its loss and around its
backward, whose first part is the loss's: it ends with the hidden states' gradient.
Neighbours: saved_activations.py (all that autograd keeps), memory_report.py (which asks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LossMemory(TorchDispatchMode):
    """elsewhere   tells tensors that may be made meanwhile and are others': memory for gradients"""

    def __init__(self, elsewhere: Callable[[], Iterable[Tensor]] = tuple) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self._most = 0
        self._latest: dict[int, int] = {}
        self._counts = False
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; True would import the compiler, 100 MiB and some seconds."""
        return False

    @property
    def most(self) -> int:
        """Bytes held at once so far."""
        self._weigh()
        return self._most

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is counted here."""
        self._weigh()
        self._let_go()
        return tensor.untyped_storage()._cdata in self._held

    @contextmanager
    def forward(self, hidden: Tensor) -> Iterator[None]:
        """Around what makes the loss of `hidden`."""
        if hidden.requires_grad:
            hidden.register_hook(self._stop)
        self._hold(hidden)
        with self._counting():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward that begins with the loss's."""
        with self._counting():
            yield

    def of(self, work: Callable[[], object]) -> Callable[[], object]:
        """`work`, which the loss has left for later, to be seen when it is done."""
        return partial(self._do, work)

    def _do(self, work: Callable[[], object]) -> object:
        with self._counting():
            return work()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        self._counts = True
        try:
            with self:
                yield
        finally:
            self._counts = False

    def _stop(self, gradient: Tensor) -> None:
        self._counts = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._counts:
            self._weigh()
        made = func(*args, **(kwargs or {}))
        if self._counts:
            self._let_go()
            given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
            for x in _tensors(made):
                if x.untyped_storage()._cdata not in given:
                    self._hold(x)
        return made

    def _hold(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self._held.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._latest = {key: size for key, (_, size) in self._held.items()}

    def _weigh(self) -> None:
        """What was held after the last result; by now it is known whose that is."""
        if not self._latest:
            return
        for x in self._elsewhere():
            key = x.untyped_storage()._cdata
            self._held.pop(key, None)
            self._latest.pop(key, None)
        self._most = max(self._most, sum(self._latest.values()))
        self._latest = {}

    def _let_go(self) -> None:
        for key, (memory, _) in list(self._held.items()):
            if memory.expired():
                del self._held[key]


def _tensors(tree: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
