"""How many cores there are to work with."""

from __future__ import annotations

import os


def available_cores() -> int:
    """The cores that this process may use (not all that the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
