"""A user's schedule: read, checked, or refused with the place."""

import pytest

from core.pipeline_parallel.actions import ScheduleError
from core.pipeline_parallel.schedule_file import parse_schedule, read_schedule
from core.pipeline_parallel.schedules import build_plan, one_f_one_b

GOOD = """\
# 1F1B with the two warm-up forwards of rank 0 the other way round
F1@0 F0@0  B1@0 B0@0   # microbatch 1 goes first

F1@1 B1@1 F0@1 B0@1
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "mine.txt"
        path.write_text(text)
        return str(path)

    return write


def test_a_file_becomes_a_plan_with_its_own_order(written):
    plan = build_plan(written(GOOD), 2, 2)
    assert str(plan).splitlines()[1] == (
        "RA1@1~0 RA0@1~0 F1@1 B1@1 SG1@1~0 F0@1 ARM@1 B0@1 SG0@1~0 DRAIN@1"
    )
    forwards = build_plan(written(GOOD), 2, 2, forward_only=True)
    assert str(forwards).splitlines()[0] == "F1@0 SA1@0~1 F0@0 SA0@0~1"


def test_a_printed_plan_reads_back(written):
    assert build_plan(written(str(one_f_one_b(3, 4))), 3, 4) == build_plan("1f1b", 3, 4)
    complete = build_plan("interleaved", 2, 3, 2)
    assert build_plan(written(str(complete)), 2, 3, 2) == complete


def test_a_mistake_is_told_with_line_and_column():
    with pytest.raises(ScheduleError, match=r"^my\.txt:3:6: 'X0@1' is not an action"):
        parse_schedule("F0@0 B0@0\n# rank 1\nF0@1 X0@1", "my.txt")


@pytest.mark.parametrize(
    ("text", "sizes", "said"),
    [
        (GOOD, (4, 2, 1), "has 2 rows, --pipeline-model-parallel-size 4; they must be equal"),
        (GOOD, (2, 2, 2), "has 2 stages, pipeline-model-parallel-size x virtual stages = 4"),
        (GOOD, (2, 6, 1), "has 2 microbatches, and the run has 6; they must be equal"),
        ("F0@1 B0@1\nF0@0 B0@0", (2, 1, 1), "F0@1 in the row of rank 0; stage 1 is on rank 1 of 2"),
        ("F0@0\nF0@1", (2, 1, 1), "has forwards only; write B, or I and W, for each F"),
        ("", (2, 1, 1), "has 0 rows"),
        ("F0@0 B0@0 F1@0 B1@0\nF1@1 F0@1 B0@1 B1@1", (2, 2, 1), "deadlock: 2 of 2 ranks"),
        ("F0@0 SA0@0~1 B0@0\nRA0@1~0 F0@1 B0@1", (2, 1, 1), "order: B0@0 needs RG0@0~1"),
        ("F0@0 B0@0 B0@0", (1, 1, 1), "B0@0 comes twice"),
    ],
)
def test_a_file_that_does_not_fit_or_cannot_finish(written, text, sizes, said):
    path = written(text)
    for build in (read_schedule, build_plan):
        with pytest.raises(ScheduleError) as caught:
            build(path, *sizes)
        assert said in str(caught.value)
        assert str(caught.value).startswith(path)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_schedule(tmp_path / "none.txt", 2, 2)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_schedule(tmp_path / "binary", 2, 2)
