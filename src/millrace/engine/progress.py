"""A progress bar on a terminal, plain lines in a log."""

import contextlib
import sys
import time
from datetime import timedelta

from millrace.checks import printable_lines

_TERMINAL_INTERVAL = 0.2  # seconds between updates
_LOG_INTERVAL = 10.0
_BAR_WIDTH = 24
_CLEAR = "\r\x1b[K"  # erases the line


class Progress:
    """Shows the share of a job that is done and the time left; leaving the block clears the bar.

    Output that cannot be written is dropped: a job does not fail because its terminal is gone.

    Args:
        label: Name of the job.
        total: Amount of work, in the unit of `update`; None: unknown, so the elapsed time is shown.
        enabled: Whether anything is shown, on stderr.
    """

    def __init__(self, label: str, total: int | None = None, *, enabled: bool = True) -> None:
        self._label, self._total = label, total
        # In a process without stderr, sys.stderr is None.
        self._stream = sys.stderr if enabled else None
        self._is_terminal = self._stream is not None and self._stream.isatty()
        self._interval = _TERMINAL_INTERVAL if self._is_terminal else _LOG_INTERVAL
        self._start = self._last = time.monotonic()
        self.num_done = 0  # of `count`

    def update(self, done: int, detail: str = "") -> None:
        """Shows the amount of work done, if the last time was long enough ago."""
        now = time.monotonic()
        if self._stream is None or now - self._last < self._interval:
            return
        self._last, elapsed = now, now - self._start
        bar, text = "", f"{detail}  {timedelta(seconds=round(elapsed))}"
        if self._total is not None:
            share = min(done / max(self._total, 1), 1.0)
            seconds = elapsed * (1 - share) / share if share > 0 else None
            left = "?" if seconds is None else timedelta(seconds=round(seconds))
            text = f"{share:4.0%}  {detail}  {left} left"
            bar = f"[{'#' * round(share * _BAR_WIDTH):.<{_BAR_WIDTH}}] "
        if self._is_terminal:
            self._write(f"{_CLEAR}{self._label} {bar}{text}")
        else:
            self._write(f"{self._label} {text}\n")

    def skip(self, amount: int) -> None:
        """Takes work that an earlier run has done from the total, for the time left."""
        if self._total is not None:
            self._total = max(self._total - amount, 0)

    def count(self, done: int, total: int) -> None:
        """Shows "`done` of `total`"; a callback for work counted in items."""
        self._total, self.num_done = total, done
        self.update(done, f"{done:,} of {total:,}")

    def note(self, text: str) -> None:
        """Shows a line that stays."""
        self._write(f"{_CLEAR * self._is_terminal}{printable_lines(text)}\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_terminal:
            self._write(_CLEAR)
