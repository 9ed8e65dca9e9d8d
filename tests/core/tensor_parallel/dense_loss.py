"""The dense float64 loss that the vocabulary-parallel one is held against, and what ranks run."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.tensor_parallel.output_loss import vocab_parallel_linear_cross_entropy


@dataclass(frozen=True)
class Case:
    """One loss: operands in `dtype`, made from `seed`, the same on every rank."""

    dtype: torch.dtype = torch.float64
    mode: str = "pipelined"
    reduction: str = "sum"
    shape: tuple[int, ...] = (4, 3)  # s, b
    hidden_size: int = 24
    vocab_size: int = 37
    ignored: str = "some"  # some, none, all
    bias: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    sequence_parallel: bool = False
    logit_scale: float = 1.0
    chunk: int | None = 5
    cuts: tuple[int, ...] | None = None  # vocabulary boundaries, uneven shards
    above: float | None = None  # the gradient from above, random if None
    seed: int = 0

    def operands(self) -> dict[str, Tensor]:
        make = torch.Generator().manual_seed(self.seed)
        n, h, v = self.shape, self.hidden_size, self.vocab_size
        target = torch.randint(0, v, n, generator=make)
        if self.ignored != "none" and target.numel() > 1:
            target.view(-1)[torch.rand(target.numel(), generator=make) < 0.4] = -100
            target.view(-1)[0] = -100
        if self.ignored == "all":
            target.fill_(-100)
        hidden = torch.randn(*n, h, generator=make, dtype=torch.float64) * self.logit_scale
        above = torch.rand(n if self.reduction == "none" else (), generator=make).double()
        if self.above is not None:
            above.fill_(self.above)
        return {
            "hidden": hidden.to(self.dtype),
            "weight": (torch.randn(v, h, generator=make, dtype=torch.float64)).to(self.dtype),
            "bias": torch.randn(v, generator=make, dtype=torch.float64).to(self.dtype),
            "target": target,
            "weights": torch.rand(n, generator=make, dtype=torch.float64),
            "above": above,
        }

    def with_(self, **changes) -> "Case":
        return replace(self, **changes)


def dense(case: Case, operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss and gradients in float64 by autograd, from the operands as rounded to their type."""
    hidden, weight, bias = (
        operands[k].detach().double().clone().requires_grad_() for k in ("hidden", "weight", "bias")
    )
    target, weights = operands["target"], operands["weights"]
    logits = hidden @ weight.T
    if case.bias:
        logits = logits + bias
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    log_p = torch.log_softmax(logits, -1)
    keep = target != -100
    chosen = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    eps = case.label_smoothing
    token = -(1 - eps) * chosen - eps * log_p.mean(-1)
    token = token + case.z_loss * torch.logsumexp(logits, -1) ** 2
    weights = torch.where(keep, weights, 0)
    loss = token * weights
    if case.reduction != "none":
        loss = loss.sum()
    if case.reduction == "mean" and weights.any():
        loss = loss / weights.sum()
    wanted = [hidden, weight] + [bias] * case.bias
    grads = torch.autograd.grad(loss, wanted, operands["above"])
    return dict(zip(["loss", "dhidden", "dweight", "dbias"], [loss.detach(), *grads]))


def vocab_cut(case: Case, group) -> tuple[tuple[int, int], int]:
    """(my range, rows of weight I hold): equal shards padded at the end, or the case's cuts."""
    if case.cuts is not None:
        start, end = case.cuts[group.rank], case.cuts[group.rank + 1]
        return (start, end), end - start
    each = -(-case.vocab_size // group.size)
    return (group.rank * each, (group.rank + 1) * each), each


def padded(full: Tensor, start: int, end: int) -> Tensor:
    """Rows start … end; those past the end of `full` hold a value that must never be seen."""
    rows = torch.full((end - start, *full.shape[1:]), 1e3, dtype=full.dtype)
    real = full[start:end]
    rows[: len(real)] = real
    return rows


def sharded(group, case: Case) -> dict[str, Tensor]:
    """This rank's loss and gradients, and the ledger's (op, tag, elements) of what it sent."""
    data = case.operands()
    (start, end), _ = vocab_cut(case, group)
    hidden = data["hidden"]
    if case.sequence_parallel:
        hidden = hidden.chunk(group.size)[group.rank]
    hidden = hidden.clone().requires_grad_()
    weight = padded(data["weight"], start, end).requires_grad_()
    bias = padded(data["bias"], start, end).requires_grad_() if case.bias else None
    group.ledger.clear()
    loss = vocab_parallel_linear_cross_entropy(
        hidden,
        weight,
        data["target"],
        bias=bias,
        weights=data["weights"],
        label_smoothing=case.label_smoothing,
        z_loss=case.z_loss,
        softcap=case.softcap,
        sequence_parallel=case.sequence_parallel,
        vocab_range=None if case.cuts is None else (start, end),
        vocab_size=case.vocab_size,
        reduction=case.reduction,
        mode=case.mode,
        chunk=case.chunk,
        tp_group=group,
    )
    loss.backward(data["above"].to(loss.dtype))
    sent = [(e.op, e.tag, e.numel) for e in group.ledger.events()]
    dbias = bias.grad if case.bias else None
    return {
        "loss": loss.detach(),
        "dhidden": hidden.grad,
        "dweight": weight.grad,
        "dbias": dbias,
        "sent": sent,
    }


def sharded_each(group, cases: list[Case]) -> list[dict[str, Tensor]]:
    return [sharded(group, case) for case in cases]


def assemble(case: Case, per_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole's loss and gradients from the ranks'; what must agree between ranks is checked."""
    first = per_rank[0]
    for other in per_rank[1:]:
        assert torch.equal(other["loss"], first["loss"])
    if case.sequence_parallel:
        dhidden = torch.cat([r["dhidden"] for r in per_rank])
    else:
        dhidden = first["dhidden"]
        assert all(torch.equal(r["dhidden"], dhidden) for r in per_rank)
    whole = {"loss": first["loss"], "dhidden": dhidden}
    for name in ["dweight"] + ["dbias"] * case.bias:
        rows = torch.cat([r[name] for r in per_rank])
        assert not rows[case.vocab_size :].any(), "padding rows got a gradient"
        whole[name] = rows[: case.vocab_size]
    return whole


def error(got: Tensor, exact: Tensor) -> float:
    """|got - exact| / |exact|; what is exactly zero must be got as zero."""
    scale = exact.norm()
    difference = (got.detach().double() - exact).norm()
    return float(difference / scale) if scale else float(difference)
