"""What the output layer and its loss hold of a microbatch, in bytes, by mode: `loss_bytes`.

Counted are the last hidden states and their gradient, logits, what the products need beside them,
and a dozen numbers per token; not what sums weight gradients, which is kept from step to step. With
n my tokens (n / t of them under sequence parallelism), c those of a chunk, v my rows, w the wide
type's bytes and e the operands':

    pipelined, split   2 n h e + a chunk's logits (two, where statistics travel) c v w
    one-shot           2 n h e + a tile of logits
    unfused            n h e + logits and their gradient, 2 n v e

core/loss_memory.py measures the same. Neighbours: output_loss_operands.py (how large a chunk is),
cross_entropy.py (unfused).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from core.tensor_parallel.cross_entropy import block_elements
from core.tensor_parallel.output_loss_operands import default_chunk, even_chunk
from kernels.gpu import use_triton
from kernels.linear_cross_entropy import TILE_BYTES, UPCAST_BYTES, accumulation_dtype
from kernels.linear_cross_entropy_triton import GRADIENT_BYTES

NUMBERS = 12  # per token: target, weight, log-sum-exp, …


@dataclass(frozen=True)
class LossShape:
    """tokens   of a microbatch, on all ranks together
    hidden      size
    vocabulary  entries in all; padded: with padding
    ranks       that the vocabulary is cut over
    strips      that the tokens are cut over: `ranks` under sequence parallelism, else 1
    """

    tokens: int
    hidden: int
    vocabulary: int
    padded: int
    ranks: int = 1
    strips: int = 1

    @property
    def rows(self) -> int:
        """Of the real vocabulary, on the first rank."""
        return min(self.vocabulary, self.padded // self.ranks)


def loss_bytes(shape: LossShape, mode: str, weight: Tensor) -> tuple[int, int]:
    """(kept from forward to backward, most at once), on the first of the ranks.

    weight  any tensor of the output layer's type and device
    """
    element, wide = weight.dtype.itemsize, accumulation_dtype(weight.dtype).itemsize
    states = shape.tokens // shape.strips * shape.hidden * element
    numbers = NUMBERS * wide * shape.tokens
    if mode == "unfused":
        return _unfused(shape, weight, states, numbers)
    columns = -(-shape.vocabulary // shape.ranks)
    mine = shape.tokens // shape.strips
    most = -(-default_chunk(mode, columns, weight, shape.ranks) // shape.strips)
    part = even_chunk(mine, most)
    several = mine > part
    logits = _logits(shape, mode, weight, part * shape.strips)
    if mode != "one-shot" and shape.ranks > 1 and several:
        logits *= 2
    work = _beside_logits(shape, mode, weight, part * shape.strips, several, logits)
    kept = states if mode in ("one-shot", "auto", "pipelined") else 2 * states
    return kept + numbers // 4, 2 * states + logits + work + numbers


def _logits(shape: LossShape, mode: str, weight: Tensor, chunk: int) -> int:
    wide = accumulation_dtype(weight.dtype).itemsize
    in_kernels = use_triton(weight) and weight.dtype.itemsize == 2
    whole = chunk * shape.rows * (weight.dtype.itemsize if in_kernels else wide)
    if mode != "one-shot":
        return whole
    tile = GRADIENT_BYTES if in_kernels else TILE_BYTES * (32 if weight.is_cuda else 1)
    return min(whole, max(tile, chunk * wide))


def _beside_logits(
    shape: LossShape, mode: str, weight: Tensor, chunk: int, several: bool, logits: int
) -> int:
    """Operands that products of a chunk need: gathered, cast up, scaled."""
    element, wide = weight.dtype.itemsize, accumulation_dtype(weight.dtype).itemsize
    states = chunk * shape.hidden
    found = 0
    if shape.strips > 1:  # hidden states of chunks at work and on their way, and their gradients
        in_flight = 2 if several and mode != "one-shot" else 1
        found += states * element * (in_flight + several + 1 + several)
    if weight.is_cuda:
        return found + (states * wide if element < wide else 0)
    if element == wide:
        return found + states * wide * (1 if mode == "split" else 2)
    # rows of the weight, cast up a piece at a time: the last piece goes when the next one is there
    rows = 2 * max(64, UPCAST_BYTES // (shape.hidden * wide))
    tile = min(rows, shape.rows, logits // (chunk * wide)) * shape.hidden * wide
    return found + 3 * states * wide + max(tile, states * wide)


def _unfused(
    shape: LossShape, weight: Tensor, states: int, numbers: int
) -> tuple[int, int]:
    """The logits are kept, and backward makes as many bytes of gradient. What a short type casts
    up: blocks in the cross entropy, and on a CPU the gradient, for the weight's."""
    element, wide = weight.dtype.itemsize, accumulation_dtype(weight.dtype).itemsize
    width = shape.padded // shape.ranks
    logits = shape.tokens * width * element
    block = min(shape.tokens * width, max(block_elements(weight.device), width)) * wide
    short = element < wide
    losses = logits + max(logits + (2 * block if short else 0), block)
    products = logits + (0 if shape.strips == 1 else 2 * shape.strips * states)
    if short and not weight.is_cuda:
        products += shape.tokens * width * wide
    return states + logits + numbers // 4, states + max(losses, products) + numbers
