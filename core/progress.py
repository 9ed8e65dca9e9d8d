"""A progress bar in the last line of a terminal, and lines that scroll above it.

Standard library only. core/metrics.py owns one; whether stderr is a terminal worth drawing on is
the caller's decision (core/launch.py knows batch jobs and dumb terminals).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TextIO

REDRAW_SECONDS = 0.1
BAR_WIDTH = 12


class ProgressBar:
    """One redrawn line: share done, step/total, time left, a text (cut where the line ends).

    ` 42% █████░░░░░░░ 42/100 | 1:23 left | loss 3.21`
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done` of `total` steps were made by earlier runs; the time left is this run's pace."""
        self._total, self._first, self._done = total, done, done
        self._stream, self._clock = stream, clock
        self._start = clock()
        self._drawn_at = -REDRAW_SECONDS
        self._line = ""

    def update(self, done: int, text: str) -> None:
        """Shows `done` steps; redraws at most ten times a second, and always the last step."""
        self._done = done
        now = self._clock()
        if now - self._drawn_at < REDRAW_SECONDS and done < self._total:
            return
        self._drawn_at = now
        self._line = self._draw(text, now)
        self._write(self._line)

    def print_above(self, write: Callable[[], None]) -> None:
        """Clears the bar, lets `write` print whole lines, draws the bar again."""
        self._write("")
        write()
        self._write(self._line)

    def close(self) -> None:
        """Leaves the terminal with the bar gone and the cursor at the start of its line."""
        self._write("")
        self._line = ""

    def _draw(self, text: str, now: float) -> str:
        share = self._done / max(self._total, 1)
        filled = int(share * BAR_WIDTH)
        bar = "█" * filled + "░" * (BAR_WIDTH - filled)
        line = f"{share:4.0%} {bar} {self._done}/{self._total} | "
        made = self._done - self._first
        if made > 0:
            left = (now - self._start) / made * (self._total - self._done)
            line += f"{clock_text(left)} left | "
        return (line + text)[: self._columns() - 1]  # a full line would wrap

    def _columns(self) -> int:
        try:  # a pseudo-terminal may not know its size and say 0
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _write(self, line: str) -> None:
        self._stream.write("\r\x1b[K" + line)
        self._stream.flush()


def clock_text(seconds: float) -> str:
    """
    >>> clock_text(59.6), clock_text(3725), clock_text(200_000)
    ('1:00', '1:02:05', '2d 7:33:20')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
