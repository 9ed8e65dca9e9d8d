"""The output layer and its loss in one: cross entropy of `hidden @ weight.T`, vocabulary sharded.

The logits [n, v] exist whole on no rank, nor do this rank's [n, v/t]; what the ranks tell each
other about the loss is one number per token. Imports core.comm and kernels; the arguments are
checked in `output_loss_operands`, the passes over chunks of tokens are in `output_loss_passes`, the
formulas in `kernels.linear_cross_entropy`.

    hidden      [s, b, h]    the same on every rank; with sequence_parallel [s/t, b, h], my
                             positions. Any leading shape will do, [n, h] too
    weight      [v/t, h]     my rows of the vocabulary
    bias        [v/t]        likewise, or None
    target      [s, b]       vocabulary numbers, the same on every rank
    weights     [s, b]       what each token's loss counts (a loss mask), default 1
    forward     loss_i = lse_i - sum_j q_ij z_ij + z_loss lse_i^2, q the smoothed target
    dgrad       sum over the ranks of dlogits @ weight, or my positions of it
    wgrad       dlogits.T @ hidden

Three ways to spend products of the size of the logits (2 n h v/t floating-point operations each):

    mode        products  collectives of the loss    gradient from above    use
    pipelined   3         one per chunk, hidden      one known number       training
    one-shot    4         exactly one                any, also per token    everything else
    split       4         one per chunk, hidden      one number             dweight can wait

All move the same bytes: n + 1 numbers per rank for a reduced loss, 2 n for one loss per token.
(Three products, one collective and no stored logits at once is impossible: the weight gradient
cannot be rescaled per token afterwards.)

Options that several functions here have:

    ignore_index       targets with this value count 0
    softcap            logits are softcap * tanh(x / softcap)
    sequence_parallel  hidden holds my positions; it is gathered, and its gradient scattered, chunk
                       by chunk
    vocab_range        my rows (start, end) where the shards are not equal
    vocab_size         the real vocabulary; rows beyond it are padding and take no part
    chunk              tokens worked on at once; the default goes by memory
    check_target       an error names the first target out of range: always on a CPU; on a GPU only
                       if asked for, since it waits for the device
    tp_group           a Group, a torch ProcessGroup, or None for the default grid's
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from core.comm import all_gather
from core.tensor_parallel.output_loss_operands import OutputLayer
from core.tensor_parallel.output_loss_passes import (
    TAG,
    GradientsInForward,
    Recomputed,
    buffer_for,
    local_statistics,
)

MODES = ("auto", "pipelined", "one-shot", "split")
REDUCTIONS = ("mean", "sum", "none")


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    vocab_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
    reduction: str = "mean",
    mode: str = "auto",
    chunk: int | None = None,
    grad_scale: float | Tensor = 1.0,
    accumulate: Tensor | Callable[[], tuple[Tensor, bool]] | None = None,
    defer: Callable[[Callable[[], None]], None] | None = None,
    check_target: bool = False,
    tp_group=None,
) -> Tensor:
    """The loss as one number, or per token and shaped like target; the module's head has the table.

    label_smoothing  torch's: eps / V on every class (Megatron's alpha is eps (V - 1) / V)
    z_loss           lambda of lambda lse^2, added per token
    reduction        sum, none, or mean: over the weights of the tokens that are not ignored. If
                     all are, the loss is 0 and so is every gradient
    mode             auto, or one of the table's; `choose_mode` says which auto takes and why
    grad_scale       the gradient this loss will get from above (a loss scale), where it is known;
                     gradients are formed with it, the loss itself is not scaled
    accumulate       [v/t, h] float32 (or float64) buffer, such as weight.main_grad, to which
                     dweight is added; or a function that returns it then, and whether dweight is
                     to overwrite what it holds. weight gets no .grad. Mode pipelined adds in
                     forward, and its backward then refuses another gradient from above than
                     grad_scale
    defer            mode split: is handed the function that will add dweight to `accumulate`

    Low-precision operands give a float32 loss. Raises TypeError or ValueError for what cannot fit.
    """
    layer = OutputLayer.of(
        hidden, weight, bias, tp_group, sequence_parallel, vocab_range, vocab_size
    )
    terms = layer.terms(label_smoothing, z_loss, softcap)
    needs_grad = torch.is_grad_enabled() and layer.requires_grad
    mode, _ = choose_mode(mode, reduction, needs_grad, deferred=defer is not None)
    if torch.is_tensor(accumulate):
        buffer_for(weight, accumulate)
    if defer is not None and accumulate is None:
        raise ValueError("defer needs accumulate=, the buffer that dweight will be added to")
    target = layer.checked_target(target, ignore_index, check_target)
    job = layer.job(target, ignore_index, terms, mode, chunk, weights, reduction)
    job = replace(job, grad_scale=grad_scale, accumulate=accumulate, defer=defer)
    if mode == "one-shot":
        loss, _ = Recomputed.apply(layer.hidden, weight, bias, job)
    else:
        loss = GradientsInForward.apply(layer.hidden, weight, bias, job, mode == "split")
    return loss if job.reduced else loss.view(target.shape)


def choose_mode(
    mode: str, reduction: str, needs_grad: bool = True, deferred: bool = False
) -> tuple[str, str]:
    """(mode, why): what `mode` comes to; "auto" picks.

    >>> choose_mode("auto", "none")[0]
    'one-shot'
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is none of {', '.join(REDUCTIONS)}")
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    if deferred and mode not in ("auto", "split"):
        raise ValueError(f'defer is for mode "split", not {mode!r}')
    if not needs_grad:
        return "one-shot", "no gradient is wanted: one product, nothing is kept"
    if reduction == "none":
        if mode in ("pipelined", "split"):
            raise ValueError(
                f'mode {mode!r} forms gradients in forward, which reduction "none" does not allow; '
                'use mode "one-shot", or a reduced loss with weights='
            )
        return "one-shot", "each token's loss may get its own gradient from above"
    if mode != "auto":
        return mode, "asked for"
    if deferred:
        return "split", "the weight gradient is to be made later"
    return "pipelined", "the tokens' weights are known: gradients in forward, one product less"


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    entropy: bool = False,
    bias: Tensor | None = None,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    vocab_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
    chunk: int | None = None,
    check_target: bool = False,
    tp_group=None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log p of each target, shaped like target; 0 where it is ignored. Differentiable.

    With `entropy` the pair (log p, entropy of the token's distribution), at no further product.
    Memory is a chunk of logits and a few numbers per token; one collective of 2 (3) numbers each.
    """
    layer = OutputLayer.of(
        hidden, weight, bias, tp_group, sequence_parallel, vocab_range, vocab_size
    )
    target = layer.checked_target(target, ignore_index, check_target)
    terms = layer.terms(softcap=softcap)
    job = layer.job(target, ignore_index, terms, "one-shot", chunk, entropy=entropy)
    loss, spread = Recomputed.apply(layer.hidden, weight, bias, job)
    log_probs = -loss.view(target.shape)
    return (log_probs, spread.view(target.shape)) if entropy else log_probs


def vocab_parallel_entropy(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    vocab_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
    chunk: int | None = None,
    tp_group=None,
) -> Tensor:
    """-sum_j p_ij log p_ij of every token, [s, b]. Differentiable; memory as for log p."""
    layer = OutputLayer.of(
        hidden, weight, bias, tp_group, sequence_parallel, vocab_range, vocab_size
    )
    nobody = torch.full(layer.token_shape, -1, device=hidden.device)
    terms = layer.terms(softcap=softcap)
    job = layer.job(nobody, -1, terms, "one-shot", chunk, entropy=True)
    _, spread = Recomputed.apply(layer.hidden, weight, bias, job)
    return spread.view(layer.token_shape)


@torch.no_grad()
def vocab_parallel_accuracy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    ignore_index: int | None = -100,
    sequence_parallel: bool = False,
    vocab_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    check_target: bool = False,
    tp_group=None,
) -> Tensor:
    """Whether no logit is above the target's (a tie counts as right), as a weighted mean, sum or
    per token. One collective of 2 numbers per token; a softcap would change nothing."""
    layer = OutputLayer.of(
        hidden, weight, bias, tp_group, sequence_parallel, vocab_range, vocab_size
    )
    choose_mode("auto", reduction)
    target = layer.checked_target(target, ignore_index, check_target)
    job = layer.job(target, ignore_index, layer.terms(), "one-shot", chunk, weights, reduction)
    stats = local_statistics(job, layer.hidden, weight, bias)
    found = stats.target.masked_fill(job.target < 0, float("-inf"))
    every = all_gather(torch.stack([stats.top, found]), layer.group, tag=f"{TAG}.accuracy")
    top, found = every.view(layer.group.size, 2, -1).amax(0)
    right = torch.where(found >= top, job.weights, 0)
    return right.sum() if job.reduced else right.view(target.shape)
