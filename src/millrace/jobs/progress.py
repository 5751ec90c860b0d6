"""A progress bar on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import TextIO

_TERMINAL_INTERVAL = 0.2  # seconds between updates
_LOG_INTERVAL = 10.0
_BAR_WIDTH = 24


class Progress:
    """Shows how far a job is, its rate and the time left.

    A job does not end because nobody can read this: what cannot be written is left out.

    Args:
        label: what the job does.
        total: in the unit of `update`; None: nobody knows, and the time so far is shown.
        stream: where to write; None: stderr.
    """

    def __init__(self, label: str, total: int | None, stream: TextIO | None = None) -> None:
        self._label = label
        self._total = total
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._is_terminal = self._stream is not None and self._stream.isatty()
        self._interval = _TERMINAL_INTERVAL if self._is_terminal else _LOG_INTERVAL
        self._start = time.monotonic()
        self._last = self._start
        self._width = 0

    def update(self, done: int, detail: str = "") -> None:
        """Shows that `done` of the total is done, if it is time to."""
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            self._show(done, detail, now)

    def _show(self, done: int, detail: str, now: float) -> None:
        elapsed = now - self._start
        if self._total is None:
            bar, text = "", f"{detail}  {duration(elapsed)}"
        else:
            share = min(done / max(self._total, 1), 1.0)
            left = elapsed * (1 - share) / share if share > 0 else float("inf")
            full = round(share * _BAR_WIDTH)
            bar = f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}] "
            text = f"{share:4.0%}  {detail}  {duration(left)} left"
        if self._is_terminal:
            line = f"{self._label} {bar}{text}"
            self._write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._write(f"{self._label} {text}\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:  # as it is for a process without stderr
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_terminal and self._width:
            self._write("\r" + " " * self._width + "\r")


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
