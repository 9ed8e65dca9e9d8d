"""A sample of the preemption table: real signals, real runs. The whole table is the script's."""

import json

from scripts import chaos


def test_a_sample_of_the_preemptions_is_survived(tmp_path, monkeypatch, capsys):
    """USR1 to one of two ranks while data is built, TERM to both while a checkpoint is written."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ways = list(chaos.MOMENTS)
    numbers = [ways.index("data building"), ways.index("save") + 3 * len(ways)]
    chaos.write_corpus(tmp_path)
    whole = tmp_path / "whole"
    chaos.subprocess.run(chaos.training(whole, 2), check=True, capture_output=True)
    trials = [chaos.preempt(tmp_path / str(n), whole, 2, n) for n in numbers]
    assert [trial.wrong for trial in trials] == ["", ""]
    assert [trial.fault for trial in trials] == [
        "SIGUSR1 in data building, one",
        "SIGTERM in save, all",
    ]
    # the comparison bites
    path = tmp_path / "whole.jsonl"
    first, *rest = path.read_text().splitlines()
    changed = json.dumps({**json.loads(first), "lm_loss": 1.0})
    path.write_text("\n".join([changed, *rest]))
    assert chaos.losses(whole) != chaos.losses(tmp_path / str(numbers[0]))
