"""How many cores and how much memory there are to work with."""

import contextlib
import math
import os
from collections.abc import Iterator


def available_cores() -> int:
    """The number of cores that this process may use, by CPU affinity and control groups.

    A container with 2 CPUs on a machine with 128 has 2.
    """
    count = len(os.sched_getaffinity(0))
    return min(count, quota_of_cgroups() or count)


def available_memory(folder: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int:
    """Bytes of memory that this process may use, by free memory and control groups' limits."""
    with open("/proc/meminfo") as file:
        sizes = dict(line.split(":", 1) for line in file)
    limits = [int(sizes["MemAvailable"].split()[0]) * 1024]
    for group, version in _groups(folder, own, "memory"):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        with contextlib.suppress(OSError, ValueError), open(os.path.join(group, name)) as stream:
            limits.append(int(stream.read()))  # a ValueError for "max"
    return min(limits)


def quota_of_cgroups(folder: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int | None:
    """The lowest CPU quota of this process's control groups and their parents, rounded up, or None.

    Args:
        folder: Mount point of the control groups, of version 1, 2 or both.
        own: File that lists the groups of this process.
    """
    quotas: list[float] = []
    for group, version in _groups(folder, own, "cpu"):
        files = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        quotas += _quota(group, files)
    return max(math.ceil(min(quotas)), 1) if quotas else None


def _groups(folder: str, own: str, controller: str) -> Iterator[tuple[str, int]]:
    """The folder and version of each control group of this process that may limit something."""
    try:
        with open(own) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except (OSError, ValueError):
        return  # not Linux, or not readable
    for line in lines:
        if len(line) != 3:
            continue
        _, controllers, path = line
        if controllers == "":  # version 2, alone or beside version 1
            mounts, version = ("", "unified"), 2
        elif controller in controllers.split(","):
            mounts, version = (controller, controllers), 1
        else:
            continue
        for mount in mounts:
            for group in _and_parents(path):  # a container may only see the last
                yield os.path.join(folder, mount, group.lstrip("/")), version


def _and_parents(path: str) -> Iterator[str]:
    """A path and all folders above it, up to the root."""
    while path.strip("/"):
        yield path
        path = os.path.dirname(path)
    yield "/"


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
