"""--log-dir: what a rank prints goes into a file of its own as well. No torch."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO


class Tee:
    """A text stream that also writes to a log file; everything else is the stream's own.

    A log that cannot be written any more (disk full, folder gone) is told of once and let go: it is
    no reason to end a run.
    """

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log, self._failed = stream, log, False

    def write(self, text: str) -> int:
        self._try(lambda: self._log.write(text))
        return self._stream.write(text)

    def flush(self) -> None:
        self._try(self._log.flush)
        self._stream.flush()

    def _try(self, job: Callable[[], object]) -> None:
        try:
            if not self._failed:
                job()
        except OSError as error:
            self._failed = True
            self._stream.write(f"WARNING: {self._log.name} is not written: {error.strerror}\n")

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def tee_output(path: Path) -> None:
    """Appends stdout and stderr to the file until the interpreter ends. Raises OSError."""
    log = path.open("a", buffering=1, encoding="utf-8")
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)

    def restore() -> None:
        sys.stdout, sys.stderr = before
        with suppress(OSError):
            log.close()

    atexit.register(restore)
