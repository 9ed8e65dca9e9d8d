"""scripts/draw_schedule.py, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from core.pipeline_parallel.schedules import build_plan
from core.pipeline_parallel.simulate import Costs, simulate

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "draw_schedule.py"


def run(*arguments, cwd):
    command = [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_the_drawing_with_its_numbers(tmp_path):
    done = run("--pp", 4, "--microbatches", 8, "--schedule", "zb_h1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == dedent("""\
        0 0123...aA4bB5cC6dD7eEfFgGhH
        1 .012..a3bA4cB5dC6eD7fEgFhGH
        2 ..01.a2b3cA4dB5eC6fD7gEhFGH
        3 ...0a1b2c3dA4eB5fC6gD7hEFGH
        digit: forward   small letter: backward (input gradient)   capital: weight gradient
        span              27   closed form 27
        bubble            0.1111   closed form 0.1111
        live activations  4 4 4 4   closed form 4 4 4 4
    """)
    assert not list(tmp_path.iterdir())


def test_a_measured_run_is_drawn_below_the_plan_and_both_are_written(tmp_path):
    plan = build_plan("interleaved", 2, 4, 2)
    real = simulate(plan, Costs(stage=(0.5, 0.5, 0.5, 1)))
    stamps = [
        json.dumps({"rank": t.rank, "action": str(t.action), "start": t.start, "end": t.end})
        for t in real.events
    ]
    (tmp_path / "run.jsonl").write_text("\n".join(stamps))
    size = ("--pp", 2, "--microbatches", 4, "--chunks", 2)
    files = ("--measured", "run.jsonl", "--svg", "out.svg", "--trace", "out.json")
    done = run(*size, *files, "--actions", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    said = f"span {real.span:g} s, bubble {real.bubble:.4f}"
    assert f"plan: {said}" in done.stdout and f"measured: {said}" in done.stdout
    assert "closed form" not in done.stdout
    assert done.stdout.endswith(f"{plan}\n")
    assert (tmp_path / "out.svg").read_text().count("<g>") == 2 * 32
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert max(e.get("ts", 0) + e.get("dur", 0) for e in events) == real.span * 1e6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pp", 4, "--microbatches", 8, "--schedule", "zbh1"), "use gpipe, 1f1b, interleaved"),
        (("--pp", 1, "--microbatches", 8, "--chunks", 2), "needs --pipeline-model-parallel-size"),
        (("--pp", 2, "--microbatches", 8, "--forward", 0), "costs have to be above 0"),
        (("--pp", 2, "--microbatches", 8, "--measured", "none"), "none: the file cannot be read"),
        (("--pp", 2, "--microbatches", 8, "--svg", "no/such.svg"), "No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_other_views(tmp_path):
    size = ("--pp", 3, "--microbatches", 2)
    forwards = run(*size, "--forward-only", cwd=tmp_path).stdout
    assert forwards.startswith("0 01..\n1 .01.\n2 ..01\n") and "live" not in forwards
    scaled = run(*size, "--width", 36, "--link", 0.25, "--stage-costs", "1,1,2", cwd=tmp_path)
    assert {len(line) for line in scaled.stdout.splitlines()[:3]} == {38}
    blocking = run(*size, "--link", 1, "--blocking", "--actions", cwd=tmp_path).stdout
    overlapped = run(*size, "--link", 1, "--actions", cwd=tmp_path).stdout
    assert blocking != overlapped and blocking.splitlines()[-3:] == overlapped.splitlines()[-3:]


def test_it_needs_no_torch(tmp_path):
    code = (
        f"import sys, runpy; sys.argv = ['d', '--pp', '2', '--microbatches', '2']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        f"except SystemExit as end: assert not end.code\n"
        f"assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)
