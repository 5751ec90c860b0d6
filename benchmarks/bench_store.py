"""The store: reading, writing, opening and verifying token files, against megatron-core.

The page cache is warm; ours and theirs alternate: random reads, batched reads and slices of a
dataset of 1 M sequences; writing 1 M documents to disk and to memory; the index of 10 M sequences;
opening an index of 100 M sequences; checksums, also with a cold cache.
"""

import filecmp
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import store_work
import torch
from common import (
    HIGHER,
    LOWER,
    Report,
    Row,
    alternate,
    finish,
    number_of_runs,
    parser,
    quiet_megatron,
)
from store_work import CHUNK, MAX_LENGTH, VOCAB_SIZE, Documents

from millrace import IndexedDataset
from millrace.store import verify

with quiet_megatron():
    from megatron.core.datasets.indexed_dataset import IndexedDataset as TheirDataset

MEMCPY_BAR, CHUNKS_BAR = 0.5, 15
FINALIZE_BAR, FINALIZE_MEMORY_BAR = 20, 10
OPEN_LIMIT = 5.0  # ms
VERIFY_LIMIT, COLD_BAR = 2.0, 0.8  # GB/s; share of a plain read

BATCH = 1024  # sequences
RANDOM_LIMIT, CONTIGUOUS_LIMIT, LOOKUP_LIMIT = 1e5, 1e6, 1e6
POOL = 1000  # documents, which are written repeatedly

NOTES = [
    "Reading: 1 M sequences of 1 to 1,199 tokens, 600 on average (uint16, 1.2 GB), in the page "
    "cache, every page mapped beforehand on both sides. Random numbers are NumPy's, so `i` is a "
    'numpy.int64, except in rows with "Python int". "View" makes the array and reads no token; '
    '"copied" is `np.array(ds[i])`. Rows of a sequence, a slice or a document at a time have no '
    "bar: their own paths in C++ were 490 lines for what jobs and loaders do in bulk.",
    "Batches: `ds.read(ids)` of 1,024 random sequences returns one flat array and the start of "
    "each sequence. Theirs has no such call: `[ds[i] for i in ids]`, with `numpy.concatenate` "
    "(the same tokens in one array) or without (only views, no token is copied).",
    "memcpy: a C loop over the same pieces (cc -O2), into one mapped buffer that is reused, with "
    "offsets and counts computed beforehand. Ours looks them up, checks them and returns a new "
    "array each time.",
    'By file: `access="file"` and `mmap=False`. Theirs opens the file for every sequence.',
    '"Of the format\'s description": throughputs that a description of this format calls typical; '
    "the limit is the upper end of each range.",
    "Writing: 1 M documents of 600 tokens on average (uint16), each in one sequence. The same "
    "1,000 documents are repeated, in the call of preprocess_data.py, `add_document(ids, "
    "[length])`, or, for ours, in chunks of 10,000, `add_documents(ids, lengths)`. Opening and "
    "finalising are included. Both sides' files were compared: equal. Ours flushes its files to "
    'the disk (fsync) before it publishes them; theirs leaves 1.2 GB to the page cache. "fsync '
    'apart": without the time that ours spent in `os.fsync`, measured in the same runs; in '
    '/dev/shm that time is about 0. "Plain write": one `write` for the tokens of each chunk, and '
    "an fsync at the end.",
    "Finalising: fresh processes; sequences of one token (uint8). Only `finalize` is timed; memory "
    "is the growth of the peak resident size during adding and finalising. The lists of theirs are "
    "extended in one step, and all lengths of 1 are one shared Python object: real lengths would "
    "take 280 MB more. Both indices are equal.",
    "Opening: the median of 20 in each run, index in the page cache.",
    "Verifying: XXH3-64 of blocks of 4 MiB and the structure, 1 M sequences, 1.2 GB. Cold: both "
    "files were flushed and dropped from the page cache before each run of each side. The plain "
    "read reads the same files from start to end, 4 MiB at a time. (The disk's host may "
    "still have the files in memory, for either side.)",
]


@dataclass(frozen=True)
class Sizes:
    sequences: int = 1_000_000
    reads: int = 256 * BATCH
    file_reads: int = 32 * BATCH
    slices: int = 200_000  # sequences in all slices of a run
    documents: int = 1_000_000
    finalized: int = 10_000_000
    opened: tuple[int, int] = (100_000, 100_000_000)


QUICK = Sizes(20_000, 8 * BATCH, 2 * BATCH, 8_000, 20_000, 100_000, (1_000, 1_000_000))


def main() -> None:
    options = _options()
    runs = number_of_runs(options)
    sizes = QUICK if options.quick else Sizes()
    report = Report("The store: reading, writing and verifying token files", NOTES, runs)
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
            report.rows += PARTS[name](Path(folder), sizes, runs)
    finish(report, options)


def _options() -> Any:
    options = parser(__doc__ or "")
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    return options.parse_args()


# ---- reading ----


def reading_rows(folder: Path, sizes: Sizes, runs: int) -> list[Row]:
    prefix = str(folder / "tokens")
    write_dataset(prefix, sizes.sequences)
    ids = np.random.default_rng(2).integers(0, sizes.sequences, sizes.reads)
    ours, theirs = IndexedDataset(prefix), TheirDataset(prefix)
    our_file, their_file = IndexedDataset(prefix, access="file"), TheirDataset(prefix, mmap=False)
    for number in range(sizes.sequences):  # maps every page
        if not np.array_equal(ours[number], theirs[number]):
            raise RuntimeError(f"sequence {number} differs")
    return [
        *random_rows(ours, theirs, ids, runs),
        *file_rows(our_file, their_file, ids[: sizes.file_reads], runs),
        *batch_rows(ours, theirs, ids, runs),
        memcpy_row(ours, ids, runs, folder),
        *slice_rows(ours, theirs, sizes, runs),
        *description_rows(ours, ids, sizes, runs),
    ]


def write_dataset(prefix: str, count: int, checksums: bool = False) -> None:
    """Writes random sequences in chunks. Files just written are in the page cache."""
    random = np.random.default_rng(0)
    size = min(CHUNK, count)
    lengths = random.integers(1, MAX_LENGTH, size)
    tokens = random.integers(0, VOCAB_SIZE, int(lengths.sum()), dtype=np.uint16)
    store_work.write_chunks(prefix, tokens, lengths, count // size, checksums)


def view_each(dataset: Any, ids: Iterable[Any]) -> None:
    for i in ids:
        dataset[i]


def copy_each(dataset: Any, ids: Iterable[Any]) -> None:
    for i in ids:
        np.array(dataset[i])


def random_rows(ours: Any, theirs: Any, ids: np.ndarray, runs: int) -> list[Row]:
    def row(name: str, read: Callable[..., None], numbers: Sequence[Any], bar: float | None) -> Row:
        sides = (functools.partial(read, side, numbers) for side in (ours, theirs))
        return rate_row(f"random ds[i], {name}", *sides, len(ids), runs, bar)

    return [
        row("view", view_each, ids, None),
        row("view, Python int", view_each, ids.tolist(), None),
        row("copied", copy_each, ids, None),
    ]


def file_rows(ours: Any, theirs: Any, ids: np.ndarray, runs: int) -> list[Row]:
    sides = (functools.partial(view_each, side, ids) for side in (ours, theirs))
    batches = split(ids)
    return [
        rate_row("random ds[i], by file", *sides, len(ids), runs),
        rate_row(
            "batches, by file, against a list and concatenate",
            lambda: read_batches(ours, batches),
            lambda: concatenate_batches(theirs, batches),
            len(ids),
            runs,
        ),
    ]


def split(ids: np.ndarray) -> list[np.ndarray]:
    return [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]


def read_batches(dataset: IndexedDataset, batches: Sequence[np.ndarray]) -> None:
    for ids in batches:
        dataset.read(ids)


def concatenate_batches(dataset: Any, batches: Sequence[np.ndarray]) -> None:
    for ids in batches:
        np.concatenate([dataset[i] for i in ids])


def list_batches(dataset: Any, batches: Sequence[np.ndarray]) -> None:
    for ids in batches:
        [dataset[i] for i in ids]


def batch_rows(ours: Any, theirs: Any, ids: np.ndarray, runs: int) -> list[Row]:
    batches = split(ids)
    rates = measure_rates(
        {
            "ours": lambda: read_batches(ours, batches),
            "and concatenate": lambda: concatenate_batches(theirs, batches),
            "of views": lambda: list_batches(theirs, batches),
        },
        len(ids),
        runs,
    )
    return [
        Row.compare(
            f"batches of {BATCH}, against a list {name}",
            rates["ours"],
            rates[name],
            "sequences/s",
            better=HIGHER,
        )
        for name in ("and concatenate", "of views")
    ]


def memcpy_row(dataset: IndexedDataset, ids: np.ndarray, runs: int, folder: Path) -> Row:
    """GB/s, against a C loop over the same pieces."""
    copy, batches = store_work.compile_memcpy(folder), split(ids)
    source = dataset.tokens.ctypes.data
    pieces = [
        (dataset.sequence_pointers[batch], dataset.sequence_lengths[batch].astype(np.int64) * 2)
        for batch in batches
    ]
    out = np.zeros(max(int(counts.sum()) for _, counts in pieces), np.uint8)

    def copy_batches() -> None:
        for offsets, counts in pieces:
            copy(source, offsets.ctypes.data, counts.ctypes.data, len(counts), out.ctypes.data)

    copy_batches()
    last = dataset.read(batches[-1])[0].view(np.uint8)
    if not np.array_equal(last, out[: len(last)]):
        raise RuntimeError("memcpy's bytes differ from ours")
    sides = {"ours": lambda: read_batches(dataset, batches), "memcpy": copy_batches}
    gigabytes = sum(int(counts.sum()) for _, counts in pieces) / 1e9
    rates = measure_rates(sides, gigabytes, runs)
    name = f"batches of {BATCH}, against memcpy in C"
    return Row.compare(name, rates["ours"], rates["memcpy"], "GB/s", better=HIGHER, bar=MEMCPY_BAR)


def slice_rows(ours: Any, theirs: Any, sizes: Sizes, runs: int) -> list[Row]:
    def read(dataset: Any, starts: list[int], size: int) -> None:
        for start in starts:
            dataset[start : start + size]

    rows = []
    for size in (100, 1000):
        count = sizes.slices // size
        starts = np.random.default_rng(3).integers(0, sizes.sequences - size, count).tolist()
        sides = (functools.partial(read, side, starts, size) for side in (ours, theirs))
        rows.append(rate_row(f"ds[a:a + {size}]", *sides, count * size, runs, None))
    return rows


def description_rows(ours: IndexedDataset, ids: np.ndarray, sizes: Sizes, runs: int) -> list[Row]:
    """Our throughput against each figure of the format's description."""
    numbers, batches = ids.tolist(), split(np.arange(sizes.sequences))
    lengths, pointers = ours.sequence_lengths, ours.sequence_pointers

    def iterate() -> None:
        for _ in ours:
            pass

    def look_up() -> None:
        for number in numbers:
            pointers.item(number), lengths.item(number)

    cases: list[tuple[str, Callable[[], None], int, float]] = [
        ("random access, view", lambda: view_each(ours, ids), len(ids), RANDOM_LIMIT),
        ("random access, copied", lambda: copy_each(ours, ids), len(ids), RANDOM_LIMIT),
        ("contiguous access, view", iterate, sizes.sequences, CONTIGUOUS_LIMIT),
        (
            "contiguous access, copied",
            lambda: read_batches(ours, batches),
            sizes.sequences,
            CONTIGUOUS_LIMIT,
        ),
        ("index lookup", look_up, len(ids), LOOKUP_LIMIT),
    ]
    return [
        limit_row(
            f"{name}, against {limit:,.0f} of the format's description",
            measure_rates({name: work}, count, runs)[name],
            limit,
            "/s",
            better=HIGHER,
        )
        for name, work, count, limit in cases
    ]


# ---- writing ----


def writing_rows(folder: Path, sizes: Sizes, runs: int) -> list[Row]:
    rows = place_rows(folder, "disk", sizes.documents, runs)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-", dir="/dev/shm") as memory:
        return rows + place_rows(Path(memory), "/dev/shm", sizes.documents, runs)


def place_rows(folder: Path, place: str, count: int, runs: int) -> list[Row]:
    arrays = store_work.make_documents(POOL)
    inputs: dict[str, Documents] = {
        "lists": [(array.tolist(), [len(array)]) for array in arrays],
        "int64 arrays": [(array, [len(array)]) for array in arrays],
        "torch int64": [(torch.from_numpy(array), [len(array)]) for array in arrays],
    }
    chunk = np.concatenate(arrays * (CHUNK // POOL))
    chunk_lengths = np.array([len(array) for array in arrays] * (CHUNK // POOL))
    writers: dict[str, Callable[[str], None]] = {}
    for name, documents in inputs.items():
        for side in ("ours", "theirs"):
            write = getattr(store_work, f"write_{side}")
            writers[f"{side}, {name}"] = functools.partial(
                write, documents=documents, repeats=count // POOL
            )
    for dtype in ("int64", "uint16"):
        writers[f"ours, chunks, {dtype}"] = functools.partial(
            store_work.write_chunks,
            tokens=chunk.astype(dtype),
            lengths=chunk_lengths,
            repeats=count // CHUNK,
        )
    tokens = chunk.astype(np.uint16)
    writers["plain"] = functools.partial(
        store_work.write_plainly, tokens=tokens, repeats=count // CHUNK
    )
    check_same_files(folder, inputs, chunk, chunk_lengths)
    prefix = str(folder / "written")
    results = alternate(
        runs,
        {name: functools.partial(time_write, write, prefix) for name, write in writers.items()},
    )
    # The bars apply to lists, which preprocess_data.py passes. Chunks against arrays have no bar:
    # 15 times theirs would be twice as fast as a plain write of the same bytes.
    pairs: list[tuple[str, str, str, float | None]] = [
        (f"{name}, one by one", name, name, None) for name in inputs
    ]
    pairs += [
        (f"chunks of {dtype}, against {name}", f"chunks, {dtype}", name, bar)
        for dtype in ("int64", "uint16")
        for name, bar in (("lists", CHUNKS_BAR), ("int64 arrays", None))
    ]
    rows = []
    for title, our_name, their_name, bar in pairs:
        mine, other = results[f"ours, {our_name}"], results[f"theirs, {their_name}"]
        other_rates = [count / seconds for seconds, _ in other]
        rates = {"": [count / seconds for seconds, _ in mine]}
        if place == "disk":
            rates[", fsync apart"] = [count / (seconds - fsync) for seconds, fsync in mine]
        rows += [
            Row.compare(
                f"write to {place}: {title}{suffix}",
                our_rates,
                other_rates,
                "documents/s",
                better=HIGHER,
                bar=None if suffix else bar,
            )
            for suffix, our_rates in rates.items()
        ]
    limits = [count / seconds for seconds, _ in results["plain"]]
    rates = [count / seconds for seconds, _ in results["ours, chunks, uint16"]]
    name = f"write to {place}: chunks of uint16, against a plain write of the .bin"
    return [*rows, Row.compare(name, rates, limits, "documents/s", better=HIGHER, bar=None)]


def time_write(write: Callable[[str], None], prefix: str) -> tuple[float, float]:
    """(Total seconds, seconds in `os.fsync`); removes the files."""
    os.sync()  # so that no earlier writes are still on their way to the disk
    with store_work.timed_fsync() as fsyncs:
        start = time.perf_counter()
        write(prefix)
        seconds = time.perf_counter() - start
    remove(prefix)
    return seconds, sum(fsyncs)


def check_same_files(
    folder: Path, inputs: dict[str, Documents], chunk: np.ndarray, lengths: np.ndarray
) -> None:
    """Raises RuntimeError if the two sides write different bytes."""
    repeats = CHUNK // POOL
    expected, prefix = str(folder / "expected"), str(folder / "checked")
    store_work.write_theirs(expected, inputs["lists"], repeats)
    writers = [
        *(
            functools.partial(write, documents=documents, repeats=repeats)
            for documents in inputs.values()
            for write in (store_work.write_ours, store_work.write_theirs)
        ),
        *(
            functools.partial(
                store_work.write_chunks, tokens=chunk.astype(dtype), lengths=lengths, repeats=1
            )
            for dtype in ("int64", "uint16")
        ),
    ]
    for write in writers:
        write(prefix)
        for suffix in (".bin", ".idx"):
            if not filecmp.cmp(expected + suffix, prefix + suffix, shallow=False):
                raise RuntimeError(f"the written {suffix} files differ: {write}")
    remove(expected)
    remove(prefix)


def remove(prefix: str) -> None:
    for suffix in (".bin", ".idx", ".info.json"):
        Path(prefix + suffix).unlink(missing_ok=True)


# ---- finalising ----


def finalizing_rows(folder: Path, sizes: Sizes, runs: int) -> list[Row]:
    rows = finalize_rows(folder, "disk", sizes.finalized, runs)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-", dir="/dev/shm") as memory:
        return rows + finalize_rows(Path(memory), "/dev/shm", sizes.finalized, runs)


def finalize_rows(folder: Path, place: str, count: int, runs: int) -> list[Row]:
    def run(side: str) -> dict[str, Any]:
        prefix = str(folder / side)
        task = json.dumps({"side": side, "count": count, "prefix": prefix})
        command = [sys.executable, store_work.__file__, task]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        remove(prefix)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    results = alternate(runs, {side: functools.partial(run, side) for side in ("ours", "theirs")})
    if len({result["digest"] for side in results.values() for result in side}) != 1:
        raise RuntimeError("the indices differ")
    name = f"finalise {count // 10**6 or count / 10**6} M sequences, {place}"
    theirs = results["theirs"]

    def row(title: str, value: Callable[[dict[str, Any]], float], unit: str, bar: Any) -> Row:
        mine, other = map(value, results["ours"]), map(value, theirs)
        return Row.compare(f"{name}: {title}", list(mine), list(other), unit, better=LOWER, bar=bar)

    rows = [row("time", lambda result: result["seconds"], "s", FINALIZE_BAR)]
    if place == "disk":
        rows.append(
            row("time, fsync apart", lambda result: result["seconds"] - result["fsync"], "s", None)
        )
    return [*rows, row("memory", lambda result: result["peak_mib"], "MiB", FINALIZE_MEMORY_BAR)]


# ---- opening ----


def opening_rows(folder: Path, sizes: Sizes, runs: int) -> list[Row]:
    rows = []
    for count in sizes.opened:
        prefix = str(folder / "tiny")
        store_work.finalize_ours(prefix, count)()
        results = alternate(
            runs,
            {
                "ours": functools.partial(time_open, IndexedDataset, prefix),
                "theirs": functools.partial(time_open, TheirDataset, prefix),
            },
        )
        name = f"open {count:,} sequences"
        rows += [
            limit_row(f"{name}, against 5 ms", results["ours"], OPEN_LIMIT, "ms", better=LOWER),
            Row.compare(name, results["ours"], results["theirs"], "ms", better=LOWER),
        ]
        remove(prefix)
    return rows


def time_open(open_dataset: Callable[[str], Any], prefix: str, times: int = 20) -> float:
    """Median time of opening, in milliseconds."""
    results = []
    for _ in range(times):
        start = time.perf_counter()
        dataset = open_dataset(prefix)
        results.append(1e3 * (time.perf_counter() - start))
        del dataset
    return statistics.median(results)


# ---- verifying ----


def verifying_rows(folder: Path, sizes: Sizes, runs: int) -> list[Row]:
    prefix = str(folder / "tokens")
    write_dataset(prefix, sizes.sequences, checksums=True)
    paths = [prefix + ".idx", prefix + ".bin"]
    gigabytes = sum(os.path.getsize(path) for path in paths) / 1e9

    def check(threads: int | None) -> None:
        (report,) = verify([prefix], threads=threads)
        if report.problems or not report.has_checksums:
            raise RuntimeError(f"not verified: {report}")

    def cold(work: Callable[[], Any]) -> float:
        store_work.drop_from_cache(paths)
        return gigabytes / seconds_of(work)

    check(None)  # warms up
    sides = {
        "verify, warm, one thread": lambda: check(1),
        "verify, warm": lambda: check(None),
        "read, warm": lambda: store_work.read_plainly(paths),
    }
    warm = measure_rates(sides, gigabytes, runs)
    chilled = alternate(
        runs,
        {
            "verify, cold": lambda: cold(lambda: check(None)),
            "read, cold": lambda: cold(lambda: store_work.read_plainly(paths)),
        },
    )
    one = warm["verify, warm, one thread"]
    return [
        limit_row("verify, one thread, against 2 GB/s", one, VERIFY_LIMIT, "GB/s", better=HIGHER),
        Row.compare(
            f"verify, {os.cpu_count()} threads, against a plain read",
            warm["verify, warm"],
            warm["read, warm"],
            "GB/s",
            better=HIGHER,
        ),
        Row.compare(
            "verify cold files, against a plain read",
            chilled["verify, cold"],
            chilled["read, cold"],
            "GB/s",
            better=HIGHER,
            bar=COLD_BAR,
        ),
    ]


# ---- rows ----


def rate_row(
    name: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    count: float,
    runs: int,
    bar: float | None = None,
) -> Row:
    """A comparison in sequences per second."""
    print(name, flush=True)
    rates = measure_rates({"ours": ours, "theirs": theirs}, count, runs)
    return Row.compare(name, rates["ours"], rates["theirs"], "sequences/s", better=HIGHER, bar=bar)


def limit_row(name: str, ours: Sequence[float], limit: float, unit: str, *, better: str) -> Row:
    """Our runs against a fixed target."""
    return Row.compare(name, ours, [limit], unit, better=better, bar=1)


def measure_rates(
    sides: dict[str, Callable[[], Any]], count: float, runs: int
) -> dict[str, list[float]]:
    seconds = alternate(
        runs, {name: functools.partial(seconds_of, work) for name, work in sides.items()}
    )
    return {name: [count / value for value in values] for name, values in seconds.items()}


def seconds_of(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


PARTS = {
    "reading": reading_rows,
    "writing": writing_rows,
    "finalizing": finalizing_rows,
    "opening": opening_rows,
    "verifying": verifying_rows,
}


if __name__ == "__main__":
    main()
