"""Time and memory of whole processes, also under a limit of memory."""

import contextlib
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tokenize_work import ONE_THREAD

SAMPLE_SECONDS = 0.05  # between two looks at the memory
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cost:
    """Seconds, and the peak memory of the process and its descendants in MiB (0: not measured)."""

    seconds: float
    peak_mib: float


def run(
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    *,
    has_memory: bool = False,
    memory_limit: int | None = None,
) -> Cost:
    """Runs a command.

    Args:
        command: Command and arguments.
        environment: Environment variables to add.
        has_memory: Whether to measure the memory.
        memory_limit: Bytes that the command and its page cache may take, as a cgroup counts them.

    Raises:
        RuntimeError: A command that fails.
    """
    if memory_limit is not None:
        with memory_cgroup(memory_limit) as group:
            inside = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
            return run(
                ["sh", "-c", inside, str(group), *command], environment, has_memory=has_memory
            )
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    peaks = [0.0]
    sampler = threading.Thread(target=sample_memory, args=(process, peaks))
    if has_memory:
        sampler.start()
    errors = process.communicate()[1]
    seconds = time.perf_counter() - start
    if has_memory:
        sampler.join()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{errors[-2000:]}")
    return Cost(seconds, peaks[0])


def call(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a function of a module returns in a fresh process, where encoders have one thread."""
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with mock.patch.dict(os.environ, {**ONE_THREAD, "HF_HUB_OFFLINE": "1"}), executor:
        return executor.submit(work, *arguments, **options).result()


def sample_memory(process: subprocess.Popen[str], peaks: list[float]) -> None:
    """Keeps the largest sum of the tree's proportional set sizes, while the process runs."""
    while process.poll() is None:
        total = sum(proportional_kib(pid) for pid in tree(process.pid))
        peaks[0] = max(peaks[0], total / 1024)
        time.sleep(SAMPLE_SECONDS)


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    pids = [pid]
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                pids += tree(int(child))
    return pids


def proportional_kib(pid: int) -> int:
    """The memory of a process; pages that several processes map count in parts."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


# ---- a limit of memory ----


def has_memory_cgroups() -> bool:
    """Whether this process may limit the memory of another one."""
    try:
        with memory_cgroup(1 << 30):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A new control group, of version 1 or 2, whose processes and page cache stay below a limit."""
    is_first_version = (CGROUPS / "memory").is_dir()
    group = CGROUPS / ("memory" if is_first_version else "") / f"millrace-{os.getpid()}"
    name = "memory.limit_in_bytes" if is_first_version else "memory.max"
    group.mkdir()
    try:
        with open(group / name, "w") as file:  # fails if there is no such controller
            file.write(str(limit))
        yield group
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:  # its last process has not quite ended
                time.sleep(0.05)
