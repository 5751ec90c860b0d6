"""The start of a run: from a configuration to the first batch, against megatron-core.

A blend of 512 datasets and 2 M samples. Each start is a fresh process; ours and theirs alternate:
with the caches of an earlier start, with trusted caches, and without caches.
"""

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import LOWER, Report, Row, alternate, finish, number_of_runs, parser

from millrace import IndexedDatasetBuilder

CACHED_BAR = 10

NOTES = [
    "512 token files of 500 to 3,000 documents of 600 tokens on average (uint16), random weights, "
    "2 M samples at sequence length 1,024, in the page cache. Timed: the configuration, the "
    "datasets and one micro batch of 8 as torch tensors. Ours uses a `Loader`; theirs a "
    "`BlendedMegatronDatasetBuilder` and a `DataLoader` without workers. 2 builder threads on "
    "both sides. Both sides' batches had the same hash in every run.",
    "Not timed: imports (theirs take some seconds), and the process group that Megatron-LM needs "
    "to build a cache.",
    'Cached: each side has a cache folder that an earlier start filled. "Trusted": ours with '
    "`trust_cache`, theirs with `fast_cache_load` and `defer_npy_index_mmap`. Without: an empty "
    "folder, which the start fills; ours flushes it to the disk.",
]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    runs = number_of_runs(options)
    count, num_samples = (16, 20_000) if options.quick else (512, 2_000_000)
    report = Report("The start of a run", NOTES, runs)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        data = Path(folder) / "data"
        data.mkdir()
        write_datasets(data, count)
        report.rows = rows(Path(folder), data, count, num_samples, runs)
    finish(report, options)


def write_datasets(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    for number in range(count):
        lengths = random.integers(1, 1200, random.integers(500, 3000))
        tokens = random.integers(0, 50304, int(lengths.sum()), dtype=np.uint16)
        with IndexedDatasetBuilder(folder / f"d{number:03}", np.uint16) as builder:
            builder.add_documents(tokens, lengths)


def rows(folder: Path, data: Path, count: int, num_samples: int, runs: int) -> list[Row]:
    store_numbers = itertools.count()

    def start(side: str, cache: Path, *, trusts: bool = False) -> dict[str, Any]:
        task = {
            "side": side,
            "folder": str(data),
            "cache": str(cache),
            "trusts": trusts,
            "num_samples": num_samples,
            "meeting": str(folder / f"meeting-{next(store_numbers)}"),
        }
        program = Path(__file__).with_name("start_work.py")
        done = subprocess.run(
            [sys.executable, str(program), json.dumps(task)], check=True, stdout=subprocess.PIPE
        )
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def start_without_cache(side: str) -> dict[str, Any]:
        shutil.rmtree(folder / f"new-{side}", ignore_errors=True)
        return start(side, folder / f"new-{side}")

    for side in ("ours", "theirs"):
        start(side, folder / side)
    kinds: dict[str, Any] = {
        "cached": (lambda side: start(side, folder / side), CACHED_BAR),
        "cached and trusted": (lambda side: start(side, folder / side, trusts=True), None),
        "without caches": (start_without_cache, None),
    }
    report_rows = []
    for kind, (work, bar) in kinds.items():
        print(kind, flush=True)
        results = alternate(
            runs, {side: lambda side=side, work=work: work(side) for side in ("ours", "theirs")}
        )
        digests = {result["digest"] for side in results.values() for result in side}
        if len(digests) != 1:
            raise RuntimeError(f"the first batches differ: {results}")
        ours, theirs = ([run["seconds"] * 1e3 for run in results[s]] for s in ("ours", "theirs"))
        name = f"first batch of {count} datasets, {kind}"
        report_rows.append(Row.compare(name, ours, theirs, "ms", better=LOWER, bar=bar))
    return report_rows


if __name__ == "__main__":
    main()
