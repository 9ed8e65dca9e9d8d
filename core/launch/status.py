"""What became of a run: `status.json` beside its checkpoints, for whoever decides what comes next.

Rank 0 writes `running` when all ranks have met and the outcome last of all, after the checkpoint.
A batch script reads this and not the exit code, which srun and torchrun change on the way; a run
that is no longer there and still `running` was killed. Pure: standard library only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "status.json"
OUTCOMES = ("running", "complete", "stopped", "failed")


@dataclass(frozen=True)
class Status:
    """One run of a job.

    outcome   running; complete; stopped: all is saved and a restart goes on; failed
    reason    the signal, the limit or the failure's headline
    step      the last step that began
    job       SLURM's job id, and how often SLURM has restarted it
    """

    outcome: str
    reason: str = ""
    step: int | None = None
    ranks: int = 1
    job: str = ""
    restart: int = 0
    time: float = field(default_factory=time.time)

    @classmethod
    def here(cls, outcome: str, environ: Mapping[str, str], **facts: object) -> Status:
        """A status with this process's job id and restart count."""
        restart = environ.get("SLURM_RESTART_COUNT", "0")
        return cls(outcome, job=environ.get("SLURM_JOB_ID", ""), restart=int(restart), **facts)

    def write(self, folder: str | Path) -> None:
        """Replaces the status in `folder`, made if need be, at once."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{FILE}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(temporary, folder / FILE)


def read_status(folder: str | Path) -> Status | None:
    """The status in a folder; None if there is none that can be read."""
    try:
        return Status(**json.loads((Path(folder) / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
