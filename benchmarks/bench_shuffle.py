"""The global shuffle: against the usual script, the disk, memcpy and the budget of memory.

.venv/bin/python benchmarks/bench_shuffle.py [--folder DIR]
"""

import functools
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import HIGHER, LOWER, Report, Row, alternate, finish, number_of_runs, parser
from numpy.typing import NDArray
from processes import has_memory_cgroups, run

from millrace.jobs.benchmarking import drop_from_page_cache

SEQ_LEN, NUM_SHARDS, SEED = 4096, 64, 42
NUM_DOMAINS, FILES_PER_DOMAIN = 4, 4
INPUT_BYTES, QUICK_INPUT_BYTES = 2_000_000_000, 20_000_000
WORKERS = os.cpu_count() or 1
LIMITED = 3  # times the memory of the cgroup
BUDGETED = 10  # times the budget of memory
LEAST_BUDGET = 20_000_000  # bytes, for --quick
ALLOWANCE = 100e6  # bytes that the job may take beyond the budget
BLOCK = 8 << 20  # bytes of a sequential read or write
WRITE_BLOCK = 4 << 20  # bytes of a write past the page cache
BARS = {"cached": 4, "limited": 5, "scatter": 0.70, "memcpy": 0.50, "memory": 1.0}

NOTES = [
    "{size:.1f} GB of uint32 tokens in {files} files of {domains} domains, sequences of 4,096, 64 "
    "shards, {workers} workers or threads. Whole processes, from start to end; each side leaves "
    "its output on the disk (ours by fsync, the script by flushing its memory maps).",
    "The script (`shuffle_script.py`) is the usual one: threads over files, each file read whole, "
    "each sequence copied to its place in a memory-mapped shard under the lock of the shard.",
    "This disk: as many threads write as many bytes to 64 files, in blocks of 4 MB past the page "
    "cache, and do nothing else. Neither side of the first row can take less time than that.",
    "A cgroup of a third of the data (half of the files' sizes, one run): data and page cache of a "
    "run share that memory, and the input is dropped from the page cache before.",
    "Twice sequentially: as many threads read the input in blocks of 8 MB and write it with fsync, "
    "drop it from the page cache, and do the same with what they have written. Input cold on both "
    "sides.",
    "memcpy: `np.copyto` of as many bytes in memory, against the primitive of all plans: threads "
    "read all sequences from the page cache to their permuted places in memory.",
    "Memory: the peak of the sum of proportional set sizes of the process tree, sampled every "
    "50 ms, against a budget of a tenth of the data and 100 MB.",
]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Files of a measurement.

    Attributes:
        folder: A temporary folder.
        source: Folder of the domains.
        num_bytes: Bytes of the input.
    """

    folder: Path
    source: Path
    num_bytes: int


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--folder", metavar="DIR", help="where to write (a disk, not tmpfs)")
    options = arguments.parse_args()
    runs = number_of_runs(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        setup = prepare(Path(folder) / "all", QUICK_INPUT_BYTES if options.quick else INPUT_BYTES)
        size = setup.num_bytes / 1e9
        files = NUM_DOMAINS * FILES_PER_DOMAIN
        notes = [
            note.format(size=size, files=files, domains=NUM_DOMAINS, workers=WORKERS)
            for note in NOTES
        ]
        report = Report("Global shuffle", notes, runs, peer="the other")
        report.rows += cached_rows(setup, runs)
        if options.quick:
            report.notes.append("The cgroup is left out: its limit would be too small for Python.")
        elif has_memory_cgroups():
            half = prepare(Path(folder) / "half", setup.num_bytes // 2)
            report.rows.append(limited_row(half))
        else:
            report.notes.append("Missing in this run: cgroups of memory, which need root.")
        report.rows += [scatter_row(setup, runs), memcpy_row(setup, runs), memory_row(setup)]
        finish(report, options)


def prepare(folder: Path, num_bytes: int) -> Setup:
    """Writes the input: random tokens, in files of slightly different sizes."""
    generator = np.random.default_rng(SEED)
    source = folder / "input"
    num_tokens = num_bytes // 4 // NUM_DOMAINS // FILES_PER_DOMAIN
    for domain in range(NUM_DOMAINS):
        (source / f"domain_{domain}").mkdir(parents=True)
        for file in range(FILES_PER_DOMAIN):
            size = num_tokens + 1001 * domain + 37 * file
            tokens = generator.integers(0, 100_000, size, np.uint32)
            tokens.tofile(source / f"domain_{domain}" / f"part_{file}.bin")
    return Setup(
        folder=folder,
        source=source,
        num_bytes=sum(path.stat().st_size for path in input_files(source)),
    )


def input_files(source: Path) -> list[Path]:
    return sorted(source.glob("*/*.bin"))


def drop(folder: Path) -> None:
    drop_from_page_cache([str(path) for path in folder.rglob("*.bin")])


def warm(folder: Path) -> None:
    """Reads the input into the page cache."""
    for path in input_files(folder):
        path.read_bytes()


def gigabytes(setup: Setup) -> float:
    return setup.num_bytes / 1e9


# ---- commands ----


def our_command(setup: Setup, output: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "millrace", "shuffle", "--input-dir", str(setup.source)]
    command += ["--output-dir", str(output), "--seq-len", str(SEQ_LEN), "--seed", str(SEED)]
    return [*command, "--num-shards", str(NUM_SHARDS), "--num-workers", str(WORKERS), *options]


def script_command(setup: Setup, output: Path) -> list[str]:
    script = Path(__file__).with_name("shuffle_script.py")
    arguments = map(str, (setup.source, output, SEQ_LEN, NUM_SHARDS, WORKERS, SEED))
    return [sys.executable, str(script), *arguments]


def timed(
    setup: Setup,
    command: Callable[[Setup, Path], list[str]],
    *,
    is_cold: bool,
    memory_limit: int | None = None,
) -> float:
    """Rate of a command in GB of input per second."""
    output = setup.folder / "output"
    shutil.rmtree(output, ignore_errors=True)
    os.sync()  # what was written before is not part of this
    (drop if is_cold else warm)(setup.source)
    seconds = run(command(setup, output), memory_limit=memory_limit).seconds
    return gigabytes(setup) / seconds


# ---- rows ----


def cached_rows(setup: Setup, runs: int) -> list[Row]:
    results = alternate(
        runs,
        {
            "ours": functools.partial(timed, setup, our_command, is_cold=False),
            "the script": functools.partial(timed, setup, script_command, is_cold=False),
            "the disk": functools.partial(write_only, setup),
        },
    )
    shards = sorted((setup.folder / "output").glob("shard_*.bin"))
    expected = [path.read_bytes() for path in shards]
    timed(setup, our_command, is_cold=False)
    if [path.read_bytes() for path in shards] != expected:
        raise RuntimeError("the two sides wrote different shards")
    name, disk = "data in the page cache", results.pop("the disk")
    return [
        compare(f"{name}: the script", results, "cached"),
        Row.compare(
            f"{name}: the writes of this disk", results["ours"], disk, "GB/s", better=HIGHER
        ),
    ]


def write_only(setup: Setup) -> float:
    """Rate at which threads write as many bytes as the input has, in GB per second."""
    folder = setup.folder / "written"
    folder.mkdir()
    os.sync()
    num_blocks = max(setup.num_bytes // NUM_SHARDS // WRITE_BLOCK, 1)
    paths = [folder / f"{number}.bin" for number in range(NUM_SHARDS)]
    with mmap.mmap(-1, WRITE_BLOCK, mmap.MAP_PRIVATE) as block:  # it begins at a page
        block.write(os.urandom(WRITE_BLOCK))
        start = time.perf_counter()
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(functools.partial(write_blocks, block, num_blocks), paths))
        seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return num_blocks * WRITE_BLOCK * NUM_SHARDS / 1e9 / seconds


def write_blocks(block: mmap.mmap, count: int, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for _ in range(count):
        os.write(descriptor, block)
    os.fsync(descriptor)
    os.close(descriptor)


def limited_row(setup: Setup) -> Row:
    limit = setup.num_bytes // LIMITED
    ours = functools.partial(our_command_with, options=("--memory", str(limit * 3 // 4)))
    results = alternate(
        1,  # the script takes minutes
        {
            "ours": functools.partial(timed, setup, ours, is_cold=True, memory_limit=limit),
            "the script": functools.partial(
                timed, setup, script_command, is_cold=True, memory_limit=limit
            ),
        },
    )
    return compare("a cgroup of a third of the data, cold: the script", results, "limited")


def our_command_with(setup: Setup, output: Path, options: tuple[str, ...]) -> list[str]:
    return our_command(setup, output, *options)


def scatter_row(setup: Setup, runs: int) -> Row:
    options = ("--plan", "scatter", "--memory", str(budget_of(setup)))
    ours = functools.partial(our_command_with, options=options)
    results = alternate(
        runs,
        {
            "scatter": functools.partial(timed, setup, ours, is_cold=True),
            "twice sequentially": functools.partial(copy_twice, setup),
        },
    )
    return compare("scatter, cold: the same bytes twice sequentially", results, "scatter")


def copy_twice(setup: Setup) -> float:
    """Rate at which the input is read and written twice, in GB of input per second."""
    copies = [setup.folder / "copy_1", setup.folder / "copy_2"]
    for folder in copies:
        folder.mkdir()
    os.sync()
    drop(setup.source)
    start = time.perf_counter()
    paths = input_files(setup.source)
    with ThreadPoolExecutor(WORKERS) as pool:
        for folder in copies:
            targets = [folder / f"{number}.bin" for number in range(len(paths))]
            list(pool.map(copy, paths, targets))
            drop(folder)
            paths = targets
    seconds = time.perf_counter() - start
    for folder in copies:
        shutil.rmtree(folder)
    return gigabytes(setup) / seconds


def copy(source: Path, target: Path) -> None:
    buffer = bytearray(BLOCK)
    with open(source, "rb", buffering=0) as read, open(target, "wb", buffering=0) as written:
        while count := read.readinto(buffer):
            written.write(memoryview(buffer)[:count])
        os.fsync(written.fileno())


def memcpy_row(setup: Setup, runs: int) -> Row:
    from millrace.shuffling.domains import find_domains
    from millrace.shuffling.shuffle_items import SequenceItems

    found = find_domains(str(setup.source), dtype="uint32")
    items = SequenceItems(found, seq_len=SEQ_LEN, carry=False)
    places = np.random.default_rng(SEED).permutation(items.num_items)
    numbers = np.arange(items.num_items)
    buffer = np.ones(items.num_items * SEQ_LEN, np.uint32)  # its pages exist before the clock runs
    other = np.ones_like(buffer)
    warm(setup.source)

    def read(numbers: NDArray[np.int64]) -> None:
        items.read(numbers, buffer, places[numbers] * SEQ_LEN)

    def move() -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(read, np.array_split(numbers, 64)))
        return buffer.nbytes / 1e9 / (time.perf_counter() - start)

    def copy_memory() -> float:
        start = time.perf_counter()
        np.copyto(other, buffer)
        return buffer.nbytes / 1e9 / (time.perf_counter() - start)

    results = alternate(runs, {"in memory": move, "memcpy": copy_memory})
    return compare("in memory: memcpy of the same bytes", results, "memcpy")


def compare(name: str, results: dict[str, list[float]], bar: str) -> Row:
    ours, other = results.values()
    return Row.compare(name, ours, other, "GB/s", better=HIGHER, bar=BARS[bar])


def budget_of(setup: Setup) -> int:
    return max(setup.num_bytes // BUDGETED, LEAST_BUDGET)


def memory_row(setup: Setup) -> Row:
    budget = budget_of(setup)
    output = setup.folder / "output"
    peaks = []
    for plan in ("gather", "scatter"):
        shutil.rmtree(output, ignore_errors=True)
        command = our_command(setup, output, "--plan", plan, "--memory", str(budget))
        peaks.append(run(command, has_memory=True).peak_mib)
    limit = (budget + ALLOWANCE) / 2**20
    name = f"peak memory with a budget of {budget / 1e6:.0f} MB: the budget and 100 MB"
    return Row.compare(name, [max(peaks)], [limit], "MiB", better=LOWER, bar=BARS["memory"])


if __name__ == "__main__":
    main()
