"""How many cores and how much memory this process may use."""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator

# The files that limit a control group, of version 2 and of version 1.
_LIMITS = {
    "cpu": (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
    "memory": (("memory.max",), ("memory.limit_in_bytes",)),
}


def available_cores() -> int:
    """The number of cores that this process may use, by CPU affinity and control groups."""
    count = len(os.sched_getaffinity(0))
    return min(count, quota_of_cgroups() or count)


def available_memory(folder: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int:
    """Bytes of memory that this process may use, by free memory and control groups' limits."""
    with open("/proc/meminfo") as file:
        sizes = dict(line.split(":", 1) for line in file)
    free = int(sizes["MemAvailable"].split()[0]) * 1024
    return min([free, *itertools.chain(*_limits("memory", folder, own))])


def quota_of_cgroups(folder: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int | None:
    """The lowest CPU quota of this process's control groups and their parents, rounded up, or None.

    Args:
        folder: Mount point of the control groups, of version 1, 2 or both.
        own: File that lists the groups of this process.
    """
    limits = [pair for pair in _limits("cpu", folder, own) if len(pair) == 2 and min(pair) > 0]
    return math.ceil(min(quota / period for quota, period in limits)) if limits else None


def _limits(controller: str, folder: str, own: str) -> Iterator[list[int]]:
    """The numbers in the limiting files of each control group of this process, if it has them."""
    try:
        lines = _text(own).splitlines()
    except (OSError, ValueError):  # not Linux, or not readable
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        # Of version 2, alone or beside version 1, a line names no controllers.
        mounts = (controller, controllers) if controllers else ("", "unified")
        if controllers and controller not in controllers.split(","):
            continue
        parts = path.strip("/").split("/")  # of a group, and a container may only see a parent
        parents = ["/".join(parts[:count]) for count in range(len(parts) + 1)]
        for mount, group, names in itertools.product(mounts, parents, _LIMITS[controller]):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                texts = [_text(folder, mount, group, name) for name in names]
                yield [int(number) for text in texts for number in text.split()]


def _text(*parts: str) -> str:
    with open(os.path.join(*parts)) as file:
        return file.read()
