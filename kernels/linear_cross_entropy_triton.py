"""The output loss on GPUs in bf16 and fp16: launches the Triton kernels, then torch's products.

Same methods as `kernels.linear_cross_entropy.TorchLogits`, which has the formulas and takes over
for what is not here (softcap, entropy, float32). The kernels, which `linear_cross_entropy_kernels`
describes, leave a chunk's gradient of logits in memory; torch's products make dhidden of it and add
to dweight in float32. Imports torch and kernels' files named so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu import (
    INTERPRETED,
    TensorDescriptor,
    capability,
    cdiv,
    launch,
    multiprocessors,
    upcast,
    use_triton,
)
from kernels.linear_cross_entropy import (
    LossTerms,
    Slot,
    TokenGradient,
    TokenStats,
    TorchLogits,
)
from kernels.linear_cross_entropy_kernels import (
    dlogits_kernel,
    exponentials_kernel,
    finish_kernel,
    statistics_kernel,
)
from kernels.wide_product import add_product

ALIGN = 8  # row lengths in elements that 16-byte copies and descriptors can take
GRADIENT_BYTES = 256 << 20  # gradient columns that exist at once where logits are recomputed

@dataclass(frozen=True)
class Tiling:
    """How a GEMM kernel is cut: BM tokens, BN entries, BK of the hidden size at a time."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


# Found by compiling ahead of time and looking at spills: tests/kernels/test_compiled.py.
AMPERE = {
    "statistics": Tiling(128, 128, 64, 8, 3),
    "exponentials": Tiling(128, 256, 64, 8, 3),
    "dlogits": Tiling(128, 256, 64, 8, 3),
}
HOPPER = {
    "statistics": Tiling(128, 256, 64, 8, 3),
    "exponentials": Tiling(128, 256, 64, 8, 4),
    "dlogits": Tiling(128, 256, 64, 8, 4),
}
BLACKWELL = {
    "statistics": Tiling(128, 128, 64, 8, 4),
    "exponentials": Tiling(128, 256, 64, 8, 4),
    "dlogits": Tiling(128, 256, 64, 8, 4),
}
SMALL = {name: Tiling(16, 32, 16, 4, 2) for name in AMPERE}  # the interpreter's


def tilings(x: Tensor) -> dict[str, Tiling]:
    if INTERPRETED:
        return SMALL
    major = capability(x)[0]
    return AMPERE if major == 8 else HOPPER if major == 9 else BLACKWELL


@dataclass
class TileSlot(Slot):
    """A Slot whose `shift` is [tiles, n], with the targets' logits beside it."""

    found: Tensor | None = None


class TritonLogits(TorchLogits):
    """`TorchLogits` by Triton kernels. weight [v, h] with unit inner stride."""

    def __init__(self, weight: Tensor, bias: Tensor | None, terms: LossTerms) -> None:
        super().__init__(weight, bias, terms)
        self.tilings = tilings(weight)
        self.row_length = cdiv(self.rows, ALIGN) * ALIGN

    def statistics(self, hidden: Tensor, target: Tensor, *, entropy: bool = False) -> TokenStats:
        if entropy or not self.rows:
            return super().statistics(hidden, target, entropy=entropy)
        tiling, n = self.tilings["statistics"], len(hidden)
        tiles, down = cdiv(self.rows, tiling.bn), cdiv(n, tiling.bm)
        per_split = cdiv(tiles, min(tiles, cdiv(4 * multiprocessors(hidden), down)))
        splits = cdiv(tiles, per_split)
        stats = self._planes(splits, n)
        arguments, constants = self._matrices(hidden, self.weight, self.bias, tiling)
        launch(
            statistics_kernel, (down, splits),
            **arguments, target=target, stats=stats, tiles_per_split=per_split,
            LINEAR=self.terms.label_smoothing > 0, **constants,
        )  # fmt: skip
        return self._combined(stats)

    def slot(self, tokens: int) -> TileSlot:
        size = tokens * self.row_length
        return TileSlot(torch.empty(size, dtype=self.weight.dtype, device=self.weight.device))

    def exponentials(self, hidden: Tensor, target: Tensor, slot: TileSlot) -> TokenStats:
        if not self.rows:
            return super().exponentials(hidden, target, slot)
        tiling, n = self.tilings["exponentials"], len(hidden)
        tiles = cdiv(self.rows, tiling.bn)
        stats = self._planes(tiles, n)
        e = slot.matrix(n, self.row_length)[:, : self.rows]
        arguments, constants = self._matrices(hidden, self.weight, self.bias, tiling)
        launch(
            exponentials_kernel, (cdiv(n, tiling.bm) * tiles,),
            **arguments, target=target, e=e, stats=stats, e_row=self.row_length,
            LINEAR=self.terms.label_smoothing > 0, **constants,
        )  # fmt: skip
        result = self._combined(stats)
        slot.shift, slot.found = stats[0], result.target
        return result

    def gradient(
        self, slot: TileSlot, hidden: Tensor, target: Tensor, tokens: TokenGradient, *,
        dhidden, dweight, dbias, fresh=False,
    ) -> None:  # fmt: skip
        if not self.rows:
            return super().gradient(
                slot, hidden, target, tokens, dhidden=dhidden, dweight=dweight, dbias=dbias
            )
        n, tile = len(hidden), self.tilings["exponentials"].bn
        e = slot.matrix(n, self.row_length)[:, : self.rows]
        bm, bn = 16, min(tile, 256)
        launch(
            finish_kernel, (cdiv(n, bm), cdiv(self.rows, bn)),
            e=e, target=target, top=slot.shift, found=slot.found, tokens=self._tokens(tokens),
            n=n, v=self.rows, e_row=self.row_length,
            SMOOTH=self.terms.label_smoothing > 0, TILE=tile, BM=bm, BN=bn,
        )  # fmt: skip
        if dhidden is not None:
            torch.mm(e, self.weight, out=dhidden)
        _add_weight_gradients(e, hidden, dweight, dbias, fresh)

    def recomputed_gradient(
        self, hidden: Tensor, target: Tensor, tokens: TokenGradient, *,
        dhidden, dweight, dbias, fresh=False,
    ) -> None:  # fmt: skip
        if tokens.entropy_weight is not None or not self.rows:
            return super().recomputed_gradient(
                hidden, target, tokens, dhidden=dhidden, dweight=dweight, dbias=dbias, fresh=fresh
            )
        n, tiling = len(hidden), self.tilings["dlogits"]
        itemsize = self.weight.dtype.itemsize
        step = GRADIENT_BYTES // (max(n, 1) * itemsize) // ALIGN * ALIGN
        step = min(max(step, tiling.bn), self.row_length)
        memory = torch.empty(n, step, dtype=self.weight.dtype, device=self.weight.device)
        factors, summed = self._tokens(tokens), self._zero_sum(dhidden)
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            part, out = self.weight[start:stop], memory[:, : stop - start]
            bias = None if self.bias is None else self.bias[start:stop]
            arguments, constants = self._matrices(hidden, part, bias, tiling)
            launch(
                dlogits_kernel, (cdiv(n, tiling.bm) * cdiv(stop - start, tiling.bn),),
                **arguments, target=target, tokens=factors, out=out, first=start, out_row=step,
                SMOOTH=self.terms.label_smoothing > 0, **constants,
            )  # fmt: skip
            if summed is not None:
                add_product(summed, out, part)
            rows = (None if x is None else x[start:stop] for x in (dweight, dbias))
            _add_weight_gradients(out, hidden, *rows, fresh)
        if summed is not dhidden:
            dhidden.copy_(summed)

    # ---- pieces ---------------------------------------------------------------------------------

    def _planes(self, parts: int, n: int) -> Tensor:
        """[4, parts, n]: largest, sum of exponentials, target's logit, sum of logits."""
        return torch.empty(4, parts, n, dtype=torch.float32, device=self.weight.device)

    def _combined(self, stats: Tensor) -> TokenStats:
        """The tiles' (or splits') shares put together, in a fixed order."""
        top = stats[0].amax(0)
        total = (stats[1] * (stats[0] - top).exp()).sum(0)
        found = stats[2].sum(0)
        linear = stats[3].sum(0) if self.terms.label_smoothing else None
        return TokenStats(top + total.log(), self._score(found, linear), found, top)

    def _tokens(self, tokens: TokenGradient) -> Tensor:
        """[4, n]: lse, a, b, c of `TokenGradient.factors`."""
        a, b, c = tokens.factors(self.terms)
        return torch.stack([tokens.lse, a, b, torch.zeros_like(a) if c is None else c])

    def _matrices(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling
    ) -> tuple[dict, dict]:
        """What the GEMM kernels have in common: (arguments, constants and launch options)."""
        hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        h = self.hidden_size
        tma = _fits_descriptor(hidden) and _fits_descriptor(weight)
        arguments = {
            "hidden": _tiled(hidden, tiling.bm, tiling.bk, tma),
            "weight": _tiled(weight, tiling.bn, tiling.bk, tma),
            "bias": self.weight if bias is None else bias,
            "n": len(hidden),
            "v": len(weight),
            "h": h,
            "hidden_row": hidden.stride(0),
            "weight_row": weight.stride(0),
        }
        constants = {
            "BM": tiling.bm,
            "BN": tiling.bn,
            "BK": tiling.bk,
            "TMA": tma,
            "EVEN": h % tiling.bk == 0,
            "BIAS": bias is not None,
            "UPCAST": upcast(weight),
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }
        return arguments, constants


def _fits_descriptor(x: Tensor) -> bool:
    """Hopper's copy engine wants rows and base on multiples of 16 bytes."""
    hopper = INTERPRETED or capability(x)[0] >= 9
    return hopper and x.stride(0) * x.dtype.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


def _tiled(x: Tensor, rows: int, columns: int, tma: bool):
    """x as a kernel takes it: by descriptor in tiles [rows, columns], or by pointer."""
    return TensorDescriptor.from_tensor(x, [rows, columns]) if tma else x


def _add_weight_gradients(
    gradient: Tensor, hidden: Tensor, dweight: Tensor | None, dbias: Tensor | None, fresh: bool
) -> None:
    if dweight is not None:
        add_product(dweight, gradient.t(), hidden, fresh)
    if dbias is not None:
        dbias += gradient.sum(0, dtype=dbias.dtype)


def local_logits(weight: Tensor, bias: Tensor | None, terms: LossTerms) -> TorchLogits:
    """The fastest form that computes this loss on the weight's device."""
    low = weight.dtype in (torch.bfloat16, torch.float16)
    if use_triton(weight) and low and terms.softcap is None and weight.stride(1) == 1:
        return TritonLogits(weight, bias, terms)
    return TorchLogits(weight, bias, terms)
