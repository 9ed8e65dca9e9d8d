"""The vocabulary-parallel output loss against one dense float64 reference, over gloo ranks."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from core.comm import Group
from core.tensor_parallel.output_loss import (
    choose_mode,
    vocab_parallel_accuracy,
    vocab_parallel_entropy,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_log_probs,
)
from core.tensor_parallel.output_loss_operands import OutputLayer, default_chunk
from tests.core.tensor_parallel.dense_loss import (
    Case,
    assemble,
    dense,
    error,
    sharded,
    sharded_each,
)

BAR = {torch.float64: 1e-12, torch.float32: 5e-6}
OPTIONS = [
    {},
    {"bias": True, "label_smoothing": 0.1, "z_loss": 1e-3},
    {"softcap": 4.0, "bias": True},
    {"softcap": 4.0, "label_smoothing": 0.2, "z_loss": 1e-2},
    {"logit_scale": 20.0, "z_loss": 1e-3},  # |logit| to 100 and more
    {"ignored": "none", "reduction": "mean", "label_smoothing": 0.1},
    {"shape": (1, 1), "ignored": "none"},
]


def compare(ranks, size: int, cases: list[Case], bar: float | None = None) -> None:
    results = ranks.run(sharded_each, cases, size=size)
    for i, case in enumerate(cases):
        exact = dense(case, case.operands())
        got = assemble(case, [mine[i] for mine in results])
        for name, value in got.items():
            limit = bar or BAR[case.dtype]
            assert error(value, exact[name]) <= limit, (name, case)


def test_the_comparison_bites():
    case = Case(reduction="mean", ignored="some")
    exact = dense(case, case.operands())
    got = assemble(case, [sharded(Group.single("tp"), case)])
    for name in got:
        assert error(got[name] * (1 + 1e-2), exact[name]) > 5e-3
        assert error(got[name], exact[name]) < 1e-12


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["pipelined", "one-shot", "split"])
def test_equals_dense(ranks, size, mode):
    """Vocabulary 37 does not divide by 2, 3 or 4: the last shard has padding rows of value 1000."""
    cases = [
        Case(dtype=dtype, mode=mode, **options)
        for options in OPTIONS
        for dtype in (torch.float64, torch.float32)
    ]
    compare(ranks, size, cases)


@pytest.mark.parametrize("mode", ["pipelined", "one-shot", "split"])
def test_sequence_parallel_equals_dense(ranks, mode):
    """Chunks of one strip per rank: 6 positions on 2 ranks in chunks of 2 x 2 tokens and a rest."""
    cases = [
        Case(mode=mode, shape=(6, 3), sequence_parallel=True, chunk=4, **options)
        for options in OPTIONS[:6]
    ]
    compare(ranks, 2, cases)
    compare(ranks, 3, [case.with_(chunk=None) for case in cases[:2]])


@pytest.mark.parametrize("mode", ["pipelined", "one-shot"])
def test_uneven_shards(ranks, mode):
    """Shards of 1, 30 and 6 rows, and one rank that holds nothing but padding."""
    uneven = Case(mode=mode, cuts=(0, 1, 31, 37), label_smoothing=0.1, bias=True)
    compare(ranks, 3, [uneven])
    only_padding = Case(mode=mode, vocab_size=9, label_smoothing=0.1, bias=True)  # 3 + 3 + 3 + 0
    capped, cut = only_padding.with_(softcap=3.0), only_padding.with_(cuts=(0, 4, 4, 9, 9))
    compare(ranks, 4, [only_padding, capped, cut])
    plain = Case(mode=mode, vocab_size=9)  # without smoothing the gradient takes another path
    compare(ranks, 4, [plain, plain.with_(softcap=3.0, bias=True)])
    if mode == "one-shot":
        compare(ranks, 4, [plain.with_(reduction="none")])


@pytest.mark.parametrize("size", [1, 2])
def test_gradient_from_above_per_token(ranks, size):
    """Liger-Kernel#968: the backward of an unreduced loss used the first token's gradient for all,
    so a masked first token zeroed every gradient."""
    case = Case(mode="one-shot", reduction="none", bias=True, label_smoothing=0.1, z_loss=1e-3)
    assert case.operands()["target"].view(-1)[0] == -100
    compare(ranks, size, [case, case.with_(sequence_parallel=True), case.with_(softcap=2.0)])


@pytest.mark.parametrize("size", [1, 2])
def test_all_tokens_ignored(ranks, size):
    """torchtune#2341: a batch that is masked throughout gave NaN. Loss 0, gradients exactly 0."""
    modes = ["pipelined", "one-shot", "split"]
    cases = [
        Case(dtype=torch.float32, mode=mode, reduction=reduction, ignored="all", logit_scale=20.0)
        for mode in modes
        for reduction in ("mean", "sum")
    ]
    for result in ranks.run(sharded_each, cases, size=size):
        for got in result:
            assert all(not got[k].any() for k in ("loss", "dhidden", "dweight"))


def test_low_precision_is_one_rounding_away():
    """bf16 gradients err no more than 1.1 times the exact ones rounded to bf16, also with many
    tokens and few classes (Liger-Kernel#512: chunks were summed in bf16)."""
    for vocab_size in (32, 512):
        for mode in ("pipelined", "one-shot"):
            case = Case(
                dtype=torch.bfloat16, mode=mode, shape=(2048, 1), hidden_size=64,
                vocab_size=vocab_size, chunk=128, above=1.0,
            )  # fmt: skip
            exact = dense(case, case.operands())
            got = assemble(case, [sharded(Group.single("tp"), case)])
            assert error(got["loss"], exact["loss"]) < 1e-6
            for name in ("dhidden", "dweight"):
                best = error(exact[name].bfloat16(), exact[name])
                assert error(got[name], exact[name]) <= 1.1 * best


@given(
    tokens=st.integers(1, 9),
    vocab_size=st.integers(1, 12),
    padding=st.integers(0, 3),
    chunk=st.integers(1, 10),
    mode=st.sampled_from(["pipelined", "one-shot", "split"]),
    label_smoothing=st.sampled_from([0.0, 0.3]),
    softcap=st.sampled_from([None, 2.0]),
    ignored=st.sampled_from(["some", "none", "all"]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_any_size(tokens, padding, **options):
    """One token, one entry, one token a chunk, chunks larger than the batch, padding rows."""
    case = Case(shape=(tokens, 1), hidden_size=3, bias=True, z_loss=1e-2, **options)
    exact = dense(case, case.operands())
    cuts = (0, case.vocab_size + padding)
    got = assemble(case, [sharded(Group.single("tp"), case.with_(cuts=cuts))])
    for name, value in got.items():
        assert (value - exact[name]).norm() <= 1e-12 * (1 + exact[name].norm()), name


def test_chunks_of_nearly_one_size():
    """1000 tokens of 50,304 float32 logits in 28 MiB: 145 at most, so 7 of 143."""
    weight = torch.empty(50304, 1)
    assert default_chunk("pipelined", 50304, weight, 1) == 145
    assert default_chunk("pipelined", 25152, weight, 2) == 145  # two buffers of half the width
    assert default_chunk("pipelined", None, weight, 2) == 128
    layer = OutputLayer.of(torch.empty(1000, 1), weight, None, None, False, None, None)
    assert layer.strip_chunk(None, "pipelined") == 143
    assert layer.strip_chunk(7, "pipelined") == 7


# ---- what is sent --------------------------------------------------------------------------------


def sent(ranks, case: Case, size: int = 2) -> list[tuple[str, str, int]]:
    results = ranks.run(sharded, case, size=size)
    assert all(r["sent"] == results[0]["sent"] for r in results)
    return results[0]["sent"]


def test_wire(ranks):
    """n = 12 tokens, h = 24, 2 ranks. Megatron sends 3 all-reduces of n for the same loss."""
    case = Case(dtype=torch.float32)
    gather, hidden = ("all_gather", "output_loss.statistics"), "output_loss.hidden.grad"
    one_shot = sent(ranks, case.with_(mode="one-shot"))
    assert one_shot == [(*gather, 2 * 13), *[("all_reduce", hidden, n * 24) for n in (5, 5, 2)]]
    per_token = sent(ranks, case.with_(mode="one-shot", reduction="none", label_smoothing=0.1))
    assert per_token[0] == (*gather, 2 * 24)
    pipelined = sent(ranks, case.with_(label_smoothing=0.1, z_loss=0.1))
    assert [e for e in pipelined if e[0] == "all_gather"] == [
        (*gather, 2 * 5), (*gather, 2 * 5), (*gather, 2 * 3),
    ]  # fmt: skip
    assert sum(e[2] for e in pipelined if e[1] == hidden) == 12 * 24


def test_wire_of_sequence_parallel(ranks):
    """Hidden is gathered, its gradient scattered, chunk by chunk: 2 x 2 tokens each."""
    case = Case(dtype=torch.float32, sequence_parallel=True, chunk=4)
    events = sent(ranks, case)
    tags = [(op, tag.removeprefix("output_loss.")) for op, tag, _ in events]
    assert tags == [
        ("all_gather", "hidden"), ("all_gather", "hidden"), ("all_gather", "statistics"),
        ("all_gather", "hidden"), ("all_gather", "statistics"), ("reduce_scatter", "hidden.grad"),
        ("all_gather", "statistics"), ("reduce_scatter", "hidden.grad"),
        ("reduce_scatter", "hidden.grad"),
    ]  # fmt: skip
    assert max(numel for _, tag, numel in events if "hidden" in tag) == 4 * 24


def test_nothing_is_sent_alone():
    group = Group.single("tp")
    assert sharded(group, Case())["sent"] == [] and group.ledger.events() == []


def run_twice(world, case):
    return sharded(world, case), sharded(world, case)


def test_two_runs_are_bitwise_equal(ranks):
    case = Case(dtype=torch.float32, bias=True, z_loss=1e-3)
    for first, second in ranks.run(run_twice, case, size=3):
        for name in ("loss", "dhidden", "dweight", "dbias"):
            assert torch.equal(first[name], second[name])


# ---- memory --------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Elements of the largest new tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x._base is None:
                self.numel = max(self.numel, x.numel())
        return out


def test_logits_never_exist():
    """1024 tokens x 4096 entries would be 4.2 million logits."""
    torch.manual_seed(0)
    hidden = torch.randn(1024, 8, requires_grad=True)
    weight = torch.randn(4096, 8, requires_grad=True)
    target = torch.randint(0, 4096, (1024,))
    for kwargs, most in [
        ({"chunk": 128}, 128 * 4096),
        ({"chunk": 128, "mode": "one-shot"}, 128 * 4096),
        ({"chunk": 128, "reduction": "none"}, 128 * 4096),
    ]:
        with LargestTensor() as largest:
            loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, **kwargs)
            loss.sum().backward()
        assert largest.numel <= most
    with LargestTensor() as largest:
        log_p, entropy = vocab_parallel_log_probs(hidden, weight, target, entropy=True, chunk=128)
        (log_p + entropy).sum().backward()
        vocab_parallel_accuracy(hidden, weight, target, chunk=128)
    assert largest.numel <= 128 * 4096


# ---- value without gradient, buffers, later weight gradients -------------------------------------


def test_value_without_gradient():
    """Liger-Kernel#507: the loss was 0 when the input did not require a gradient."""
    case = Case(label_smoothing=0.1, z_loss=1e-2, reduction="mean")
    data = case.operands()
    exact = dense(case, data)["loss"].detach()
    kwargs = {"weights": data["weights"], "label_smoothing": 0.1, "z_loss": 1e-2, "chunk": 5}
    operands = data["hidden"], data["weight"], data["target"]
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            assert error(vocab_parallel_linear_cross_entropy(*operands, **kwargs), exact) < 1e-12
    trained = data["hidden"].clone().requires_grad_(), *operands[1:]
    with torch.no_grad():
        assert error(vocab_parallel_linear_cross_entropy(*trained, **kwargs), exact) < 1e-12


@pytest.mark.parametrize("mode", ["pipelined", "one-shot", "split"])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_operands(mode, frozen):
    case = Case()
    data = case.operands()
    exact = dense(case, data)
    operands = {k: data[k].requires_grad_(k != frozen) for k in ("hidden", "weight")}
    loss = vocab_parallel_linear_cross_entropy(
        **operands, target=data["target"], weights=data["weights"], reduction="sum", mode=mode
    )
    loss.backward(data["above"])
    trained = "weight" if frozen == "hidden" else "hidden"
    assert operands[frozen].grad is None
    assert error(operands[trained].grad, exact["d" + trained]) < 1e-12


@pytest.mark.parametrize("mode", ["pipelined", "one-shot", "split"])
def test_weight_gradient_into_a_buffer(mode):
    """dweight is added to what the buffer holds; a loss scale is known through grad_scale.

    A function is asked for the buffer when dweight is made: in forward, or not before backward.
    """
    case = Case(dtype=torch.bfloat16)
    data = case.operands()
    data["above"] = torch.tensor(8.0, dtype=torch.float64)
    exact = dense(case, data)
    hidden, weight = (data[k].clone().requires_grad_() for k in ("hidden", "weight"))
    buffer, asked = torch.ones(weight.shape), []
    loss = vocab_parallel_linear_cross_entropy(
        hidden, weight, data["target"], weights=data["weights"], reduction="sum", mode=mode,
        grad_scale=8.0, accumulate=lambda: asked.append(mode) or (buffer, False),
    )  # fmt: skip
    assert asked == ([mode] if mode == "pipelined" else [])
    assert error(loss, exact["loss"]) < 1e-6
    loss.backward(torch.tensor(8.0))
    assert weight.grad is None
    assert error(buffer - 1, exact["dweight"]) < 1e-6  # float32: never rounded to bf16
    assert error(hidden.grad, exact["dhidden"]) < 4e-3


@pytest.mark.parametrize("mode", ["pipelined", "one-shot", "split"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_the_first_gradient_of_a_step_overwrites(mode, tokens):
    """A buffer with anything in it, padding rows included; later chunks are added."""
    case = Case(shape=(tokens, 1), chunk=2, ignored="none", reduction="sum")
    data = case.operands()
    hidden, weight = data["hidden"].requires_grad_(), data["weight"]
    weight = torch.nn.functional.pad(weight, (0, 0, 0, 3), value=1000.0).requires_grad_()
    buffer = torch.full_like(weight, torch.nan)
    loss = vocab_parallel_linear_cross_entropy(
        hidden, weight, data["target"], weights=data["weights"], reduction="sum", mode=mode,
        vocab_size=case.vocab_size, vocab_range=(0, len(weight)), chunk=2,
        accumulate=lambda: (buffer, True),
    )  # fmt: skip
    loss.backward()
    assert not buffer[case.vocab_size :].any()
    if tokens:
        data["above"] = torch.ones((), dtype=torch.float64)
        assert error(buffer[: case.vocab_size], dense(case, data)["dweight"]) < 1e-12
    else:
        assert not buffer.any()


def test_a_buffer_filled_in_forward_takes_no_other_gradient():
    data = Case().operands()
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(
        hidden, weight, data["target"], accumulate=torch.zeros_like(weight), mode="pipelined"
    )
    with pytest.raises(RuntimeError, match=r"gradient of 1 from above; backward brought 0\.5"):
        (loss * 0.5).backward()


def test_second_backward_is_refused_by_name():
    data = Case().operands()
    hidden = data["hidden"].requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(hidden, data["weight"], data["target"])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one-shot"):
        loss.backward()


def test_weight_gradient_later():
    """Mode split: backward gives dhidden, and the weight gradient when its turn comes."""
    case = Case()
    data = case.operands()
    exact = dense(case, data)
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    buffer, later = torch.zeros_like(weight), []
    loss = vocab_parallel_linear_cross_entropy(
        hidden, weight, data["target"], weights=data["weights"], reduction="sum",
        accumulate=buffer, defer=later.append,
    )  # fmt: skip
    loss.backward(data["above"])
    assert error(hidden.grad, exact["dhidden"]) < 1e-12 and not buffer.any()
    later.pop()()
    assert error(buffer, exact["dweight"]) < 1e-12


def test_backward_on_another_thread():
    """On a GPU autograd runs backward on a thread of its own; nothing may hang on the first one."""
    case = Case(mode="one-shot", reduction="none")
    data = case.operands()
    hidden = data["hidden"].requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(
        hidden, data["weight"], data["target"], weights=data["weights"], reduction="none"
    )
    thread = threading.Thread(target=lambda: loss.backward(data["above"]))
    thread.start()
    thread.join()
    assert error(hidden.grad, dense(case, data)["dhidden"]) < 1e-12


def test_strided_operands():
    data = Case().operands()
    hidden, weight = data["hidden"], data["weight"]
    wide = torch.zeros(*hidden.shape[:2], 48, dtype=hidden.dtype)
    wide[..., ::2] = hidden
    columns = weight.T.contiguous().T
    plain, strided = (
        vocab_parallel_linear_cross_entropy(h, w, data["target"])
        for h, w in ((hidden, weight), (wide[..., ::2].requires_grad_(), columns))
    )
    assert error(strided.detach(), plain) < 1e-14
    strided.backward()


@pytest.mark.parametrize("mode", ["pipelined", "one-shot"])
def test_empty_batch(mode):
    hidden = torch.zeros(0, 3, 8, requires_grad=True)
    weight = torch.randn(10, 8, requires_grad=True)
    target = torch.zeros(0, 3, dtype=torch.long)
    for reduction in ("mean", "sum"):
        loss = vocab_parallel_linear_cross_entropy(
            hidden, weight, target, reduction=reduction, mode=mode
        )
        loss.backward()
        assert loss == 0 and not weight.grad.any() and hidden.grad.shape == hidden.shape
    loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, reduction="none")
    assert loss.shape == (0, 3)


# ---- log probabilities, entropy, accuracy --------------------------------------------------------


def chosen_and_spread(world, case: Case):
    data = case.operands()
    each = -(-case.vocab_size // world.size)
    rows = slice(world.rank * each, (world.rank + 1) * each)
    padding = (0, 0, 0, each - len(data["weight"][rows]))
    weight = torch.nn.functional.pad(data["weight"][rows], padding).requires_grad_()
    hidden = data["hidden"].clone().requires_grad_()
    options = {
        "vocab_size": case.vocab_size, "chunk": 5, "softcap": case.softcap, "tp_group": world,
    }  # fmt: skip
    log_p, spread = vocab_parallel_log_probs(
        hidden, weight, data["target"], entropy=True, **options
    )
    (log_p * data["weights"] + spread * data["weights"].square()).sum().backward()
    alone = vocab_parallel_entropy(hidden, weight, **options)
    right = vocab_parallel_accuracy(
        hidden, weight, data["target"], reduction="none", vocab_size=case.vocab_size, tp_group=world
    )
    assert torch.equal(alone, spread)
    return log_p.detach(), spread.detach(), hidden.grad, weight.grad, right


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_log_probs_entropy_and_accuracy(ranks, size, softcap):
    case = Case(softcap=softcap)
    data = case.operands()
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    logits = hidden @ weight.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    full = torch.log_softmax(logits, -1)
    keep = data["target"] != -100
    log_p = full.gather(-1, data["target"].clamp(min=0).unsqueeze(-1)).squeeze(-1) * keep
    spread = -(full.exp() * full).sum(-1)
    (log_p * data["weights"] + spread * data["weights"].square()).sum().backward()
    right = (full.argmax(-1) == data["target"]).double()
    results = ranks.run(chosen_and_spread, case, size=size)
    for got_log_p, got_spread, dhidden, _, got_right in results:
        assert error(got_log_p, log_p.detach()) < 1e-12
        assert error(got_spread, spread.detach()) < 1e-12
        assert error(dhidden, hidden.grad) < 1e-12
        assert torch.equal(got_right, right)
    dweight = torch.cat([r[3] for r in results])[: case.vocab_size]
    assert error(dweight, weight.grad) < 1e-12


def test_accuracy_of_a_known_answer():
    weight = torch.eye(4)
    hidden = torch.tensor([[9.0, 0, 0, 0], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]])
    target = torch.tensor([0, 1, 3, -100])
    assert vocab_parallel_accuracy(hidden, weight, target) == pytest.approx(2 / 3)
    weights = torch.tensor([1.0, 0.0, 3.0, 5.0])
    assert vocab_parallel_accuracy(hidden, weight, target, weights=weights) == pytest.approx(0.25)
    assert vocab_parallel_accuracy(hidden, weight, target, reduction="sum") == 2


# ---- refusals ------------------------------------------------------------------------------------


def test_mode_that_auto_takes():
    assert choose_mode("auto", "sum")[0] == "pipelined"
    assert choose_mode("auto", "none")[0] == "one-shot"
    assert choose_mode("auto", "mean", needs_grad=False)[0] == "one-shot"
    assert choose_mode("auto", "sum", deferred=True)[0] == "split"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden": torch.zeros(2, 3, dtype=torch.long)}, "floating-point"),
        ({"hidden": torch.zeros(2, 3, dtype=torch.float64)}, "float64 but weight is torch.float32"),
        ({"hidden": torch.zeros(2, 5)}, r"hidden \(2, 5\) ends with hidden size"),
        ({"target": torch.tensor([0, 1, 2])}, r"target is \(3,\)"),
        ({"target": torch.zeros(2)}, "vocabulary numbers"),
        ({"target": torch.tensor([0, 7])}, r"target\[1\] is 7; the vocabulary has entries 0 to 6"),
        ({"target": torch.tensor([-1, 0])}, r"target\[0\] is -1"),
        ({"target": torch.tensor([0, 6]), "vocab_size": 6}, r"target\[1\] is 6"),
        ({"label_smoothing": 1.0}, r"must be in \[0, 1\)"),
        ({"label_smoothing": -0.1}, r"must be in \[0, 1\)"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"softcap": 0.0}, "softcap"),
        ({"bias": torch.zeros(3)}, r"bias is \(3,\), weight has 7 rows"),
        ({"weights": torch.zeros(3)}, r"weights are \(3,\)"),
        ({"reduction": "avg"}, "reduction 'avg'"),
        ({"mode": "fast"}, "mode 'fast'"),
        ({"chunk": 0}, "chunk is 0"),
        ({"vocab_size": 8}, "vocab_size is 8"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_range": (0, 6)}, "6 rows, weight has 7"),
        ({"accumulate": torch.zeros(7, 2)}, r"accumulate is torch.float32 \(7, 2\)"),
        ({"accumulate": torch.zeros(7, 3, dtype=torch.bfloat16)}, "accumulate is torch.bfloat16"),
        ({"defer": print}, "defer needs accumulate"),
        ({"defer": print, "mode": "pipelined"}, 'defer is for mode "split"'),
        ({"tp_group": "tp"}, "a group must be"),
    ],
)
def test_bad_input(changes, message):
    arguments = {
        "hidden": torch.zeros(2, 3), "weight": torch.zeros(7, 3), "target": torch.tensor([0, 1]),
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message):
        vocab_parallel_linear_cross_entropy(**{**arguments, **changes})


def test_per_token_loss_cannot_be_pipelined():
    hidden = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match='reduction "none"'):
        vocab_parallel_linear_cross_entropy(
            hidden, torch.zeros(7, 3), torch.tensor([0, 1]), reduction="none", mode="pipelined"
        )
