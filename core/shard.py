"""`Shard`: everything anyone asks about a parameter, in one object that hangs on it.

Pure: standard library only. Initialisation, gradient sums, the norm, weight decay, the checkpoint
and the printed model all read `param.shard`; none of these facts is guessed from a name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """How one logical parameter is cut over the tensor-parallel ranks.

    shape     of the whole (logical) parameter, without padding
    dim       the dimension that is cut; None when every tp rank holds all of it
    padded    length of `dim` after padding (0: none): rows past shape[dim] are zero, and outside
              initialisation, softmax, gradient, norm, decay and checkpoint
    sum_over  axes besides dp over which gradients must be added: "tp" for parameters that see only
              this rank's tokens under sequence parallelism, "embed" for the tied embedding
    decay     whether weight decay applies (matrices yes, biases and norm gains no)
    vocabulary  has a row for every token: word table or output layer (--decoupled-lr)

    Every cut is one contiguous slice of `dim`: layers that hold several matrices (query, key and
    value; the gated MLP) choose their logical shape so that this is true.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    padded: int = 0
    sum_over: tuple[str, ...] = ()
    decay: bool = True
    vocabulary: bool = False

    def __post_init__(self) -> None:
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise ValueError(f"dim {self.dim} is outside the shape {self.shape}")
        if self.padded and (self.dim is None or self.padded < self.shape[self.dim]):
            raise ValueError(f"padded {self.padded} does not fit {self.shape}, dim {self.dim}")

    @property
    def full_length(self) -> int:
        """Length of the cut dimension with its padding."""
        if self.dim is None:
            raise ValueError(f"a replicated parameter of shape {self.shape} has no cut dimension")
        return self.padded or self.shape[self.dim]

    def local_shape(self, size: int) -> tuple[int, ...]:
        """What one of `size` tp ranks stores, padding included."""
        if self.dim is None:
            return self.shape
        if self.full_length % size:
            raise ValueError(
                f"dimension {self.dim} of a parameter of shape {self.shape} is {self.full_length} "
                f"long and does not divide by {size} tensor-parallel ranks"
            )
        return tuple(
            self.full_length // size if i == self.dim else n for i, n in enumerate(self.shape)
        )

    def bounds(self, rank: int, size: int) -> tuple[int, int]:
        """First and last + 1 global index along `dim` of rank's part, padding cut off."""
        if self.dim is None:
            raise ValueError(f"a replicated parameter of shape {self.shape} has no cut dimension")
        length = self.local_shape(size)[self.dim]
        end = self.shape[self.dim]
        return min(rank * length, end), min((rank + 1) * length, end)

    def box(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) per dimension of rank's part of the logical parameter.

        >>> Shard((10, 4), dim=0, padded=12).box(1, 2)
        ((6, 10), (0, 4))
        """
        if self.dim is None:
            return tuple((0, n) for n in self.shape)
        return tuple(
            self.bounds(rank, size) if i == self.dim else (0, n) for i, n in enumerate(self.shape)
        )

    def local_slices(self, rank: int, size: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(where in my tensor, where in the logical parameter) the real elements are."""
        box = self.box(rank, size)
        return (
            tuple(slice(0, stop - start) for start, stop in box),
            tuple(slice(start, stop) for start, stop in box),
        )


def shard_of(param: object) -> Shard:
    """The shard of a parameter; one without is a mistake in the layer that made it."""
    shard = getattr(param, "shard", None)
    if not isinstance(shard, Shard):
        raise TypeError(
            f"a parameter of shape {tuple(param.shape)} has no Shard: the layer that makes it must "
            "set param.shard = Shard(shape=…, dim=…)"
        )
    return shard
