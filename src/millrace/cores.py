"""The number of cores to work with."""

from __future__ import annotations

import math
import os
from pathlib import PurePosixPath


def available_cores() -> int:
    """The number of cores that this process may use, by CPU affinity and control groups.

    A container with 2 CPUs on a machine with 128 has 2.
    """
    count = len(os.sched_getaffinity(0))
    return min(count, quota_of_cgroups() or count)


def quota_of_cgroups(folder: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int | None:
    """The lowest CPU quota of this process's control groups and their parents, rounded up, or None.

    Args:
        folder: Mount point of the control groups, of version 1, 2 or both.
        own: File that lists the groups of this process.
    """
    try:
        with open(own) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except (OSError, ValueError):
        return None  # not Linux, or not readable
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
            for group in (path, *PurePosixPath(path).parents):  # a container may only see the last
                quotas += _quota(os.path.join(folder, mount, str(group).lstrip("/")), files)
    return max(math.ceil(min(quotas)), 1) if quotas else None


def _quota(group: str, files: list[str]) -> list[float]:
    """A group's quota in cores; empty if it has none: "max", -1, or no such file."""
    texts: list[str] = []
    try:
        for file in files:
            with open(os.path.join(group, file)) as stream:
                texts += stream.read().split()
        quota, period = map(int, texts)
    except (OSError, ValueError):
        return []
    return [quota / period] if quota > 0 and period > 0 else []
