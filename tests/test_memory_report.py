"""The memory report: predicted before the first step, measured in the second, and they agree."""

import re

import pytest

from core.comm import Group
from core.memory_report import PLACE, shown, table
from tests.recipe import run_recipe

SIZE = ("--num-layers", 4, "--hidden-size", 128, "--seq-length", 128, "--vocab-size", 3000)
MEASURED = "measured in step 2 of this run"
FULL = ("--recompute-granularity", "full")
Columns = dict[str, dict[str, dict[str, float]]]  # column -> kind -> part -> MiB


def tables_of(text: str) -> dict[str, Columns]:
    """By title."""
    return {
        title: columns_of(lines.splitlines())
        for title, lines in re.findall(r"^memory in MiB, (.*)\n((?:  .*\n)+)", text, re.M)
    }


def columns_of(lines: list[str]) -> Columns:
    heads, kinds, *rows = lines
    names = re.split(r"\s{2,}", heads.strip())
    kinds = kinds.split()
    each = len(kinds) // len(names)
    found: Columns = {name: {kind: {} for kind in kinds[:each]} for name in names}
    for row in rows:
        part, cells = row[:18].strip(), row[18:].split()
        places = [(name, kind) for name in names for kind in kinds[:each]]
        if part == "process, at most":
            places = [place for place in places if place[1] == "measured"]
        for (name, kind), cell in zip(places, cells, strict=True):
            found[name][kind][part] = float(cell.replace(",", ""))
    return found


def printed(world: Group, *flags: object) -> str:
    return run_recipe(world, *SIZE, "--train-iters", 2, *flags)[1]


def check(text: str, *columns: str) -> Columns:
    """Both tables have these columns, and what was measured is what was predicted."""
    tables = tables_of(text)
    assert list(tables) == ["predicted", MEASURED]
    assert list(tables["predicted"]) == list(tables[MEASURED]) == list(columns)
    for name, kinds in tables[MEASURED].items():
        said, seen = kinds["predicted"], kinds["measured"]
        assert tables["predicted"][name]["predicted"] == said
        assert seen.pop("process, at most") > seen["sum"]
        assert 2 * seen["sum"] == pytest.approx(sum(seen.values()), abs=0.05)
        assert seen == pytest.approx(said, rel=0.02, abs=0.02)
    return tables[MEASURED]


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--bf16", "--loss-mode", "unfused"),
        (*FULL, "--loss-mode", "one-shot"),
        ("--optimizer", "sgd", "--loss-mode", "split"),
    ],
    ids=str,
)
def test_predicted_is_what_is_measured(flags):
    text = printed(Group.single("world"), *flags)
    found = check(text, "rank 0")["rank 0"]["measured"]
    parts = ("parameters", "gradients", "optimizer", "activations", "loss buffer")
    assert list(found) == [*parts, "sum"]
    assert all(found[part] > 0.3 for part in parts)
    assert text.index(MEASURED) > text.index("iteration        2/")


@pytest.mark.parametrize("again", [(), FULL], ids=str)
def test_each_end_of_a_pipeline(ranks, again):
    """The first rank holds most microbatches, the last one the loss. A tp rank is as its other."""
    layout = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
    text = ranks.run(printed, *layout, *again, size=4)[0]
    names = ("rank 0 (pp 0), most", "rank 2 (pp 1), least")
    if again:
        names = ("rank 2 (pp 1), most", "rank 0 (pp 0), least")
    found = {name[:6]: kinds["measured"] for name, kinds in check(text, *names).items()}
    assert found["rank 0"]["loss buffer"] == 0 < found["rank 2"]["loss buffer"]
    assert found["rank 2"]["activations"] < found["rank 0"]["activations"]


def test_what_waits_for_w_counts(ranks):
    """Inputs and output gradients of linears, from I to W: a second microbatch on the last rank."""
    flags = ("--pipeline-model-parallel-size", 2, "--pipeline-schedule", "zb_h1")
    kinds = tables_of(ranks.run(printed, *flags, size=2)[0])[MEASURED]
    for found in kinds.values():
        said, seen = found["predicted"]["activations"], found["measured"]["activations"]
        assert 0.8 * said < seen < 1.1 * said


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_every_sharding_strategy(ranks, strategy):
    """What passes is somebody else's: it is not the loss's, in which some of it is made."""
    text = ranks.run(printed, "--data-parallel-sharding-strategy", strategy, size=2)[0]
    found = check(text, "each of 2 ranks")["each of 2 ranks"]["measured"]
    assert ("passing" in found) == (strategy != "optim")


def traffic(world: Group) -> list[list[tuple]]:
    """(group, operation, bytes, tag) of steps 2 and 3, and of what is not theirs."""
    world.ledger.clear()
    printed(world, "--global-batch-size", 4, "--train-iters", 3)
    steps = [[], [], []]
    for e in world.ledger.events():
        if e.step in (2, 3) or e.at == PLACE:
            steps[0 if e.at == PLACE else e.step - 1].append((e.group, e.op, e.payload, e.tag))
    return steps


def test_what_the_report_sends_is_no_part_of_a_step(ranks):
    for report, second, third in ranks.run(traffic, size=2):
        assert [(group, tag.removesuffix(".length")) for group, _, _, tag in report] == [
            ("world", "startup.memory")
        ] * 2 + [("world", "memory.measured")] * 2
        assert second == third


def test_as_long_for_a_thousand_ranks():
    """One column each for most, least, and the loss, whatever the number of ranks."""
    ranks = [{"parameters": 10**9 - 10**6 * (n // 8), "loss buffer": 0} for n in range(1000)]
    ranks[990:] = [{"parameters": 9 * 10**8, "loss buffer": 10**7}] * 10
    assert shown(ranks) == {0: "most", 920: "least", 990: "loss"}
    lines = table([(f"rank {n}", {"predicted": ranks[n]}) for n in shown(ranks)])
    assert max(map(len, lines)) < 80
    assert shown(ranks[:16]) == {0: "each"}


def test_of_bert_the_masked_tokens_alone():
    """15 % of them, a few more or less; what its heads keep is not predicted."""
    flags = ("--num-layers", 2, "--train-iters", 2, "--micro-batch-size", 8)
    text = run_recipe(Group.single("world"), *SIZE, *flags, script="pretrain_bert")[1]
    kinds = tables_of(text)[MEASURED]["rank 0"]
    assert kinds["measured"]["loss buffer"] == pytest.approx(
        kinds["predicted"]["loss buffer"], rel=0.05
    )
