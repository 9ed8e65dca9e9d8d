"""The passes of the vocabulary-parallel output loss: chunks, collectives, gradients.

Imports core.comm and kernels.linear_cross_entropy (which holds the formulas). The public functions,
their options and their checks are in `core.tensor_parallel.output_loss`.

Every pass walks over the same chunks of tokens. With sequence parallelism a chunk is gathered from
all ranks just before it is used (the next one is on its way meanwhile) and its gradient is
scattered just after, so the whole hidden [n, h] exists on no rank. Such a chunk is one strip of
consecutive tokens per rank; `strips` is t then, else 1, and token vectors are cut to match.

Read in this order: `LossJob`, `chunks`, `Gradients`, `Recomputed` (modes "one-shot"), and
`GradientsInForward` (modes "pipelined" and "split").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from core.comm import (
    Group,
    Pending,
    all_gather,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from kernels.linear_cross_entropy import (
    LossTerms,
    TokenGradient,
    TokenStats,
    accumulation_dtype,
)
from kernels.linear_cross_entropy_triton import local_logits

TAG = "output_loss"


@dataclass(frozen=True)
class LossJob:
    """Everything about one loss that is not differentiated. n tokens in all, n/strips of them here.

    target      [n] int64, my row of the weight, or -1
    weights     [n] what each token's loss is multiplied with; 0 where it is ignored
    rows        my rows of the real vocabulary; the weight's further rows are padding
    chunk       tokens of a strip that are worked on at once
    strips      t with sequence parallelism, else 1
    reduced     the loss is one number
    entropy     every token's entropy is wanted beside its loss
    grad_scale  the gradient that will come from above, where gradients are formed in forward
    accumulate  [v/t, h] buffer to which dweight is added, instead of being returned, or a function
                called when dweight is made, that returns it and whether it is to be overwritten
    defer       takes over the function that does so (mode "split")
    """

    terms: LossTerms
    group: Group
    target: Tensor
    weights: Tensor
    rows: int
    chunk: int
    strips: int = 1
    reduced: bool = True
    entropy: bool = False
    grad_scale: float | Tensor = 1.0
    accumulate: Tensor | Callable[[], tuple[Tensor, bool]] | None = None
    defer: Callable[[Callable[[], None]], None] | None = None

    def take(self, vector: Tensor, a: int, b: int) -> Tensor:
        """The tokens of chunk a … b out of a vector of all n."""
        return vector.view(self.strips, -1)[:, a:b].reshape(-1)

    def put(self, vector: Tensor, a: int, b: int, values: Tensor) -> None:
        vector.view(self.strips, -1)[:, a:b] = values.view(self.strips, -1)

    def logits(self, weight: Tensor, bias: Tensor | None):
        bias = None if bias is None else bias[: self.rows]
        return local_logits(weight[: self.rows], bias, self.terms)

    def token_loss(self, lse: Tensor) -> Tensor:
        """The part of a token's loss that follows from its log-sum-exp over all ranks."""
        return lse + self.terms.z_loss * lse.square() if self.terms.z_loss else lse


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """weights * values, and 0 where the weight is 0, whatever the value."""
    return torch.where(weights == 0, 0, weights * values)


def chunks(job: LossJob, hidden: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(a, b, hidden [strips (b - a), h]): tokens a … b of every strip.  hidden [n / strips, h]"""
    n = len(hidden)
    bounds = [(a, min(a + job.chunk, n)) for a in range(0, n, job.chunk)]
    if job.strips == 1:
        for a, b in bounds:
            yield a, b, hidden[a:b]
        return
    coming = None
    for k, (a, b) in enumerate(bounds):
        here = coming or _start_gather(job, hidden[a:b])
        coming = _start_gather(job, hidden[slice(*bounds[k + 1])]) if b < n else None
        yield a, b, here.wait()


def _start_gather(job: LossJob, strip: Tensor) -> Pending:
    return start_all_gather(strip, job.group, tag=f"{TAG}.hidden")


def buffer_for(
    weight: Tensor, accumulate: Tensor | Callable[[], tuple[Tensor, bool]]
) -> tuple[Tensor, bool]:
    """(where dweight goes, whether it is to be overwritten), once it is known to fit."""
    buffer, fresh = accumulate() if callable(accumulate) else (accumulate, False)
    wanted = accumulation_dtype(weight.dtype)
    if buffer.shape != weight.shape or buffer.dtype != wanted:
        raise ValueError(
            f"accumulate is {buffer.dtype} {tuple(buffer.shape)}; dweight is added up in "
            f"{wanted} {tuple(weight.shape)}"
        )
    return buffer, fresh


class Gradients:
    """dhidden, dweight and dbias of one loss, filled chunk by chunk; None where not wanted.

    dhidden  [n / strips, h]  summed over the ranks while the next chunk is computed
    dweight  [v/t, h]         in the accumulation type, or the buffer it is to be added to; `fresh`
                              while nothing is in it
    dbias    [v/t]
    """

    def __init__(
        self, job: LossJob, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple
    ) -> None:
        self.job = job
        dtype = accumulation_dtype(weight.dtype)
        self.dhidden = hidden.new_empty(hidden.shape) if wanted[0] else None
        self.dweight = self.dbias = None
        self.fresh = wanted[1]
        if wanted[1] and job.accumulate is not None:
            self.dweight, self.fresh = buffer_for(weight, job.accumulate)
        elif wanted[1]:
            self.dweight = weight.new_empty(weight.shape, dtype=dtype)
        if wanted[2]:
            self.dbias = bias.new_zeros(bias.shape, dtype=dtype)
        self.pending: Pending | None = None

    def space(self, a: int, b: int) -> dict[str, Tensor | bool | None]:
        """Where the kernels write chunk a … b, as keyword arguments."""
        rows, dhidden = self.job.rows, self.dhidden
        if dhidden is not None and self.job.strips == 1:
            dhidden = dhidden[a:b]
        elif dhidden is not None:
            dhidden = dhidden.new_empty(self.job.strips * (b - a), dhidden.shape[1])
        dweight = None if self.dweight is None else self.dweight[:rows]
        dbias = None if self.dbias is None else self.dbias[:rows]
        fresh, self.fresh = self.fresh, False
        if fresh:
            self.dweight[rows:].zero_()  # padding
        return {"dhidden": dhidden, "dweight": dweight, "dbias": dbias, "fresh": fresh}

    def start_sum(self, a: int, b: int, part: Tensor | None) -> None:
        """Sum my part of dhidden over the ranks."""
        if part is None:
            return
        if self.pending is not None:
            self.pending.wait()
        group, tag = self.job.group, f"{TAG}.hidden.grad"
        if self.job.strips == 1:
            self.pending = start_all_reduce_(part, group, tag=tag)
        else:
            self.pending = start_reduce_scatter(part, group, out=self.dhidden[a:b], tag=tag)

    def finish(
        self, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dhidden, dweight, dbias) in the parameters' types; dweight None if it went elsewhere."""
        if self.pending is not None:
            self.pending.wait()
        if self.fresh:  # there was no token
            self.dweight.zero_()
        dweight = None if self.job.accumulate is not None else self.dweight
        return (
            self.dhidden,
            None if dweight is None else dweight.to(weight.dtype),
            None if self.dbias is None else self.dbias.to(bias.dtype),
        )


# ---- mode "one-shot": statistics, one collective, and the logits once more in backward -----------


def local_statistics(
    job: LossJob, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> TokenStats:
    """My rows' share of all n tokens."""
    logits = job.logits(weight, bias)
    fields = ["lse", "score", "top", "target"] + ["mean"] * job.entropy
    whole = {name: torch.empty_like(job.weights) for name in fields}
    for a, b, part in chunks(job, hidden):
        stats = logits.statistics(part, job.take(job.target, a, b), entropy=job.entropy)
        for name in fields:
            job.put(whole[name], a, b, getattr(stats, name))
    return TokenStats(**whole)


def loss_from_statistics(
    job: LossJob, stats: TokenStats
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(loss, entropy or None, lse) from every rank's share: one collective, in a fixed order.

    It carries the log-sum-exp of every token, and of the scores one number (a reduced loss) or one
    per token; the entropy adds one per token.
    """
    n = len(stats.lse)
    score = stats.score
    if job.reduced:
        score = weighted(job.weights, score).sum(dtype=torch.float64).to(score.dtype).view(1)
    parts = [stats.lse, score] + ([stats.mean] if job.entropy else [])
    if n:
        every = all_gather(torch.cat(parts), job.group, tag=f"{TAG}.statistics")
    else:
        every = torch.cat(parts)
    every = every.view(job.group.size if n else 1, -1)
    local_lse, score, mean = every.split([n, len(score), every.shape[1] - n - len(score)], dim=1)
    lse = torch.logsumexp(local_lse, 0)
    if job.reduced:
        total = weighted(job.weights, job.token_loss(lse)).sum(dtype=torch.float64)
        loss = (total - score.sum(dtype=torch.float64)).to(lse.dtype)
    else:
        loss = weighted(job.weights, job.token_loss(lse) - score.sum(0))
    entropy = lse - ((local_lse - lse).exp() * mean).sum(0) if job.entropy else None
    return loss, entropy, lse


def recomputed_gradients(
    job: LossJob,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: TokenGradient,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dhidden, dweight, dbias) with nothing kept from forward but a few numbers per token."""
    logits = job.logits(weight, bias)
    gradients = Gradients(job, hidden, weight, bias, wanted)
    for a, b, part in chunks(job, hidden):
        space = gradients.space(a, b)
        mine = tokens.map(lambda vector, a=a, b=b: job.take(vector, a, b))
        logits.recomputed_gradient(part, job.take(job.target, a, b), mine, **space)
        gradients.start_sum(a, b, space["dhidden"])
    return gradients.finish(weight, bias)


class Recomputed(Function):
    """forward   (loss, entropy or None), from the statistics alone: one product, one collective
    backward  logits again, then dhidden and dweight: three products"""

    @staticmethod
    def forward(ctx, hidden, weight, bias, job: LossJob):
        stats = local_statistics(job, hidden, weight, bias)
        loss, entropy, lse = loss_from_statistics(job, stats)
        ctx.save_for_backward(hidden, weight, bias, lse, entropy)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return loss, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, dentropy):
        hidden, weight, bias, lse, entropy = ctx.saved_tensors
        job = ctx.job
        scale = torch.zeros_like(lse) if dloss is None else dloss * job.weights
        tokens = TokenGradient(lse, scale)
        if dentropy is not None:
            tokens = TokenGradient(lse, scale, entropy, dentropy.contiguous())
        wanted = ctx.needs_input_grad[:3]
        return *recomputed_gradients(job, hidden, weight, bias, tokens, wanted), None


# ---- modes "pipelined" and "split": gradients in forward -----------------------------------------


@dataclass
class _Flight:
    """A chunk between its two halves: its statistics are on the way between the ranks."""

    a: int
    b: int
    hidden: Tensor
    target: Tensor
    slot: object
    gathering: Pending


class _Pipeline:
    """Loss and gradients in one walk: chunk k's statistics travel while chunk k + 1 is multiplied.

    The sum of the scores, one number, rides with the last chunk.
    """

    def __init__(self, job: LossJob, hidden, weight, bias, wanted: tuple[bool, bool, bool]) -> None:
        self.job = job
        self.logits = job.logits(weight, bias)
        self.gradients = Gradients(job, hidden, weight, bias, wanted)
        self.lse = torch.empty_like(job.weights)
        self.score = job.weights.new_zeros((), dtype=torch.float64)
        self.total = torch.zeros_like(self.score)

    def run(self, hidden: Tensor) -> Tensor:
        """The loss; `gradients` and `lse` are complete afterwards."""
        job = self.job
        tokens = min(job.chunk, len(hidden)) * job.strips
        several = job.group.size > 1 and len(hidden) > job.chunk
        slots = [self.logits.slot(tokens) for _ in range(2 if several else 1)]
        flying: deque[_Flight] = deque()
        for a, b, part in chunks(job, hidden):
            slots.append(slots.pop(0))
            flying.append(self.start(a, b, part, slots[-1], last=b == len(hidden)))
            if len(flying) == len(slots):
                self.finish(flying.popleft())
        while flying:
            self.finish(flying.popleft())
        return (self.total - self.score).to(self.lse.dtype)

    def start(self, a: int, b: int, hidden: Tensor, slot, last: bool) -> _Flight:
        job = self.job
        target = job.take(job.target, a, b)
        stats = self.logits.exponentials(hidden, target, slot)
        weights = job.take(job.weights, a, b)
        self.score += weighted(weights, stats.score).sum(dtype=torch.float64)
        message = stats.lse
        if last:
            message = torch.cat([message, self.score.to(message.dtype).view(1)])
        gathering = start_all_gather(message, job.group, tag=f"{TAG}.statistics")
        return _Flight(a, b, hidden, target, slot, gathering)

    def finish(self, chunk: _Flight) -> None:
        job, a, b = self.job, chunk.a, chunk.b
        n = len(chunk.target)
        every = chunk.gathering.wait().view(job.group.size, -1)
        if every.shape[1] > n:
            self.score = every[:, n].sum(dtype=torch.float64)
        lse = torch.logsumexp(every[:, :n], 0)
        weights = job.take(job.weights, a, b)
        self.total += weighted(weights, job.token_loss(lse)).sum(dtype=torch.float64)
        job.put(self.lse, a, b, lse)
        space = self.gradients.space(a, b)
        tokens = TokenGradient(lse, weights * job.grad_scale)
        self.logits.gradient(chunk.slot, chunk.hidden, chunk.target, tokens, **space)
        self.gradients.start_sum(a, b, space["dhidden"])


class GradientsInForward(Function):
    """forward   the loss and, since the tokens' weights are known, every gradient: three products
    backward  hands them out, times what comes from above over `grad_scale`

    Split: dweight is left for later, by `defer` if there is one, from logits computed again.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, job: LossJob, split: bool):
        wanted = ctx.needs_input_grad[:3]
        now = (wanted[0], wanted[1] and not split, wanted[2])
        pipeline = _Pipeline(job, hidden, weight, bias, now)
        loss = pipeline.run(hidden)
        ctx.gradients = pipeline.gradients.finish(weight, bias)
        ctx.job, ctx.split = job, split and wanted[1]
        if ctx.split:
            ctx.save_for_backward(hidden, weight, bias, pipeline.lse)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        if ctx.gradients is None:
            raise RuntimeError(
                "this loss handed out its gradients already; for more than one backward through "
                'it (retain_graph=True) use mode="one-shot"'
            )
        # The references go, so that autograd can take the tensors over instead of copying them.
        gradients, ctx.gradients = ctx.gradients, None
        job = ctx.job
        ratio = upstream / job.grad_scale
        if job.accumulate is not None and not ctx.split and ctx.needs_input_grad[1]:
            _require_one(ratio, job.grad_scale)
        elif ratio.is_cuda or float(ratio) != 1:
            gradients = tuple(None if g is None else g.mul_(ratio) for g in gradients)
        if ctx.split:
            dhidden, _, dbias = gradients
            gradients = (dhidden, GradientsInForward.weight_gradient(ctx, upstream), dbias)
        return *gradients, None, None

    @staticmethod
    def weight_gradient(ctx, upstream: Tensor) -> Tensor | None:
        hidden, weight, bias, lse = ctx.saved_tensors
        job = ctx.job
        tokens = TokenGradient(lse, job.weights * upstream)

        @torch.no_grad()
        def work() -> Tensor | None:
            only = (False, True, False)
            return recomputed_gradients(job, hidden, weight, bias, tokens, only)[1]

        if job.defer is None:
            return work()
        job.defer(work)
        return None


def _require_one(ratio: Tensor, grad_scale: float | Tensor) -> None:
    """dweight is in the buffer already: it cannot be scaled any more."""
    if ratio.is_cuda:
        torch._assert_async(ratio == 1, "the output loss got another gradient than its grad_scale")
    elif float(ratio) != 1:
        raise RuntimeError(
            "the output loss added its weight gradient to `accumulate` in forward, for a gradient "
            f"of {float(grad_scale):g} from above; backward brought {float(ratio * grad_scale):g}. "
            'Pass grad_scale= in forward, multiply `weights` instead, or use mode="one-shot"'
        )
