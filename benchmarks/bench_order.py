"""The order: shuffles, the indices of a GPT dataset, and blends, against megatron-core.

Each run is a fresh process; ours and theirs alternate:

1. a shuffle of 100 M numbers, as both sides draw it for the shuffle index;
2. the sum of lengths, document index, sample index and shuffle index of 100 M documents of 600
   tokens on average, at sequence length 4,096, for one epoch and for 3.5 epochs: time and memory;
3. blends of 8 to 4,096 datasets: 10 M samples by weights, 1 M samples that use up all datasets, and
   smaller blends with nearly equal weights.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import LOWER, Report, Row, alternate, file_field, finish, number_of_runs, parser

SIZE = 100_000_000
QUICK_SIZE = 300_000
SEQUENCE_LENGTH = 4096
MAX_LENGTH = 1200  # lengths are uniform in [1, 1200): 600 on average

FILL_BYTES = 28  # per number, or per document and epoch: the larger peak, rounded up

SHUFFLE_BAR, INDICES_BAR, MEMORY_BAR = 5, 5, 1
BLEND_SIZE, QUICK_BLEND_SIZE = 10_000_000, 50_000
EXHAUSTIVE_SIZE = 1_000_000  # theirs takes 20 us a sample of 4,096 datasets
BLEND_BARS = {8: 1.5, 64: 4, 512: 20, 4096: 60}  # by the number of datasets
EXHAUSTIVE_BARS = {64: 3, 512: 3, 4096: 3}
NEARLY_EQUAL_BARS = {1000: 1, 4096: 1}
NEARLY_EQUAL_SIZES = (100_000, 1_000_000)
MEMORY_SHARE = 1.1  # of what is returned, and of the lengths that are read

NOTES = [
    "Each run is a fresh process; imports, reading the lengths and hashing the results are not "
    "timed. Both sides' results (for the shuffle also the generator's state) had the same hash in "
    "every run.",
    "Shuffle: `gpt_dataset._build_shuffle_index(n, n, RandomState)` against "
    "`_native.shuffled_ranges([(0, n, 1)], uint32, RandomState)`.",
    "Just before each timed part, another process fills memory and ends, so that neither side "
    "waits for the host of this virtual machine to provide pages (0.9 s for 400 MB, on either "
    "side).",
    "Indices: megatron-core's own `GPTDataset` constructor, without a cache on disk, against "
    "`plan_gpt` and `build_gpt_indices`, including the sum of the lengths. Lengths are uniform in "
    "[1, 1200), in memory; sequence length 4,096. Ours uses two threads, theirs has one.",
    "Memory: growth of the peak resident memory (VmHWM) over imports and inputs, results "
    "included. The range of sequences (int32), which theirs needs, counts as an input, although "
    'its users keep it in memory. "Returned": the size of our results plus 10 %; the lengths are '
    "inputs.",
    "Blends: `_native.blend_by_weights` and `blend_by_sizes` against Megatron-LM's "
    "`build_blending_indices` and `build_exhaustive_blending_indices` into arrays of zeros, as its "
    "`BlendedDataset` calls them. Weights are random, uniform in [0.001, 1.001), with the sum 1; "
    "sizes are proportional to such weights. Nearly equal weights differ by at most "
    "0.1 %. Ours takes a thread for each core, theirs has one; in the rows of one core, ours has "
    "one too.",
]


def main() -> None:
    options = _options()
    runs = number_of_runs(options)
    size = QUICK_SIZE if options.quick else SIZE
    report = Report("The order: shuffle and indices", NOTES, runs)
    blend_size = QUICK_BLEND_SIZE if options.quick else BLEND_SIZE
    if "blends" in options.only:
        report.rows += blend_rows(blend_size, runs)
    if "shuffle" in options.only:
        report.rows += shuffle_rows(size, runs)
    if "indices" in options.only:
        with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
            lengths = Path(folder) / "lengths.npy"
            num_tokens = write_lengths(lengths, size)
            for epochs in [1] if options.one_epoch else [1, 3.5]:
                report.rows += indices_rows(lengths, size, num_tokens, epochs, runs)
    finish(report, options)


def _options() -> Any:
    options = parser(__doc__ or "")
    options.add_argument(
        "--one-epoch", action="store_true", help="skip 3.5 epochs, which is slow and takes 9 GiB"
    )
    parts = ["blends", "shuffle", "indices"]
    options.add_argument("--only", nargs="+", choices=parts, default=parts)
    return options.parse_args()


def blend_rows(size: int, runs: int) -> list[Row]:
    rows = []
    for exhausts, bars in ((False, BLEND_BARS), (True, EXHAUSTIVE_BARS)):
        size = min(size, EXHAUSTIVE_SIZE) if exhausts else size
        for count, bar in bars.items():
            kind = "exhaustive blend" if exhausts else "blend"
            name = f"{kind} of {_count(size)} samples of {count:,} datasets"
            task = {"datasets": count, "exhausts": exhausts, "size": size}
            results = _measure_blend(task, runs)
            rows += _blend_time_rows(name, results, bar)
            rows.append(_memory_limit_row(f"{name}: peak memory", results))
    for count, bar in NEARLY_EQUAL_BARS.items():
        for smaller in sorted({min(size, each) for each in NEARLY_EQUAL_SIZES}):
            name = f"blend of {_count(smaller)} samples of {count:,} nearly equal datasets"
            task = {"datasets": count, "exhausts": False, "size": smaller, "nearly_equal": True}
            rows += _blend_time_rows(name, _measure_blend(task, runs), bar)
    return rows


def _measure_blend(task: dict[str, Any], runs: int) -> dict[str, list[dict[str, Any]]]:
    fill_mib = _fill_mib(task["size"])
    return measure({"work": "blend", **task, "fill_mib": fill_mib}, runs, one_core=True)


def _blend_time_rows(name: str, results: dict[str, list[dict[str, Any]]], bar: float) -> list[Row]:
    alone = {"ours": results["ours, one core"], "theirs": results["theirs"]}
    return [
        _row(name, results, "seconds", "s", bar),
        _row(f"{name}, one core", alone, "seconds", "s", None),
    ]


def _memory_limit_row(name: str, results: dict[str, list[dict[str, Any]]]) -> Row:
    ours = [run["peak_mib"] for run in results["ours"]]
    limits = [MEMORY_SHARE * run["returned_mib"] for run in results["ours"]]
    return Row.compare(f"{name}, returned", ours, limits, "MiB", better=LOWER, bar=1)


def write_lengths(path: Path, size: int) -> int:
    """Writes random lengths and returns their sum."""
    lengths = np.random.default_rng(0).integers(1, MAX_LENGTH, size, dtype=np.int32)
    np.save(path, lengths)
    return int(lengths.sum(dtype=np.int64))


def shuffle_rows(size: int, runs: int) -> list[Row]:
    results = measure({"work": "shuffle", "size": size, "fill_mib": _fill_mib(size)}, runs)
    return [_row(f"shuffle of {_count(size)} numbers", results, "seconds", "s", SHUFFLE_BAR)]


def indices_rows(lengths: Path, size: int, num_tokens: int, epochs: float, runs: int) -> list[Row]:
    """Time and peak memory. One epoch is requested as in Megatron-LM: without a sample count."""
    num_samples = None if epochs == 1 else int(epochs * num_tokens) // SEQUENCE_LENGTH
    task = {
        "work": "indices",
        "lengths": str(lengths),
        "num_samples": num_samples,
        "sequence_length": SEQUENCE_LENGTH,
        "fill_mib": _fill_mib(int(size * epochs)),
    }
    results = measure(task, runs)
    plural = "epoch" if epochs == 1 else "epochs"
    name = f"three indices of {_count(size)} documents, {epochs:g} {plural}"
    return [
        _row(f"{name}: time", results, "seconds", "s", INDICES_BAR),
        _row(f"{name}: peak memory", results, "peak_mib", "MiB", MEMORY_BAR),
        _memory_limit_row(f"{name}: peak memory", results),
    ]


def measure(
    task: dict[str, Any], runs: int, *, one_core: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """The runs of each side, and ours on one core; raises RuntimeError if the results differ."""
    print(", ".join(f"{key} {value}" for key, value in task.items()), flush=True)
    tasks = {"ours": {"side": "ours"}, "theirs": {"side": "theirs"}}
    if one_core:
        tasks["ours, one core"] = {"side": "ours", "one_core": True}
    results = alternate(
        runs, {name: lambda more=more: _run({**task, **more}) for name, more in tasks.items()}
    )
    digests = {result["digest"] for side in results.values() for result in side}
    if len(digests) != 1:
        raise RuntimeError(f"the results differ: {results}")
    return results


def _run(task: dict[str, Any]) -> dict[str, Any]:
    program = Path(__file__).with_name("order_work.py")
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(task)], check=True, stdout=subprocess.PIPE
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _row(
    name: str, results: dict[str, list[dict[str, Any]]], key: str, unit: str, bar: float | None
) -> Row:
    ours, theirs = ([run[key] for run in results[side]] for side in ("ours", "theirs"))
    return Row.compare(name, ours, theirs, unit, better=LOWER, bar=bar)


def _fill_mib(count: int) -> int:
    """The memory to fill before a run, in MiB: at most half of the memory available now."""
    available_kib = int(file_field("/proc/meminfo", "MemAvailable").split()[0])
    return max(1, min(count * FILL_BYTES // 2**20, available_kib // 2048))


def _count(size: int) -> str:
    return f"{size // 10**6} M" if size >= 10**6 else f"{size:,}"


if __name__ == "__main__":
    main()
