"""A look, now and then, at whether mapped files were cut short."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from millrace.order.spans import MappedFiles


class SizeWatch:
    """Checks the sizes of mapped files from time to time.

    If a whole page of a file is gone, reading it is an error anyway; a page of which a part is gone
    reads as zeros. A check takes 3 us a file, a tenth of a batch, so it is not done for every
    batch; a training step takes longer than `_PAUSE`, so every step is covered.
    """

    _PAUSE = 0.01  # seconds between checks, at least
    _SHARE = 200  # the pause is at least so many times as long as a check

    def __init__(self) -> None:
        self._next = 0.0

    def look(self, mapped_files: Callable[[], Iterable[MappedFiles]]) -> None:
        """Checks what `mapped_files` returns, if it is time to.

        Raises:
            DataError: A file has become shorter.
        """
        start = time.monotonic()
        if start < self._next:
            return
        for files in mapped_files():
            files.check_sizes()
        end = time.monotonic()
        self._next = end + max(self._PAUSE, self._SHARE * (end - start))

    def __reduce__(self) -> tuple[Any, ...]:
        return SizeWatch, ()  # another machine has another clock
