"""How many cores there are to work with."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

_CGROUPS = "/sys/fs/cgroup"
_OWN_CGROUPS = "/proc/self/cgroup"


def available_cores() -> int:
    """The cores that this process may use (not all that the machine has).

    That is its CPU affinity, or what the quotas of its control groups give if that is less: a
    container with 2 CPUs on a machine with 128 has 2.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return min(count, quota_of_cgroups() or count)


def quota_of_cgroups(folder: str = _CGROUPS, own: str = _OWN_CGROUPS) -> int | None:
    """The least CPU quota of this process's control groups and all above them, rounded up.

    Args:
        folder: where they are mounted, of version 1, 2 or both.
        own: says which of them this process is in.

    Returns:
        at least 1; None where there is no quota.
    """
    try:
        with open(own) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except (OSError, ValueError):
        return None  # no Linux, or nothing that we may see
    quotas: list[float] = []
    for line in lines:
        if len(line) != 3:
            continue
        _, controllers, path = line
        if controllers == "":  # version 2, alone or beside version 1
            mounts, files = ("", "unified"), ["cpu.max"]
        elif "cpu" in controllers.split(","):
            mounts, files = ("cpu", controllers), ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        for mount in mounts:
            for group in _upwards(os.path.join(folder, mount), path):
                quotas += _quota([text for file in files for text in _texts(group, file)])
    return max(math.ceil(min(quotas)), 1) if quotas else None


def _upwards(root: str, path: str) -> Iterator[str]:
    """A group's folder and those above it; a container may see only the last of them."""
    while path not in ("", "/"):
        yield os.path.join(root, path.lstrip("/"))
        path = os.path.dirname(path)
    yield root


def _texts(folder: str, file: str) -> list[str]:
    try:
        with open(os.path.join(folder, file)) as opened:
            return opened.read().split()
    except OSError:
        return []


def _quota(texts: list[str]) -> list[float]:
    """Microseconds of CPU in a period of so many: as cores. "max" and -1 are no quota."""
    try:
        quota, period = (int(text) for text in texts)
    except ValueError:
        return []
    return [quota / period] if quota > 0 and period > 0 else []
