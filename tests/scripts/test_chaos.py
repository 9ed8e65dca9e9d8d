"""A sample of the preemption table: real signals, real runs. The whole table is the script's."""

import json

from scripts import chaos


def test_a_sample_of_the_preemptions_is_survived(tmp_path, monkeypatch, capsys):
    """TERM to both of two ranks while a checkpoint is written."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ways = list(chaos.MOMENTS)
    number = ways.index("save") + 3 * len(ways)
    chaos.write_corpus(tmp_path)
    whole = tmp_path / "whole"
    chaos.subprocess.run(chaos.training(whole, 2), check=True, capture_output=True)
    trial = chaos.preempt(tmp_path / "stopped", whole, 2, number)
    assert (trial.fault, trial.wrong) == ("SIGTERM in save, all", "")
    # the comparison bites
    path = tmp_path / "whole.jsonl"
    first, *rest = path.read_text().splitlines()
    changed = json.dumps({**json.loads(first), "lm_loss": 1.0})
    path.write_text("\n".join([changed, *rest]))
    assert chaos.losses(whole) != chaos.losses(tmp_path / "stopped")
