"""The instant order: the start of a run of thousands of sources, and the feed.

The start against megatron-core's, each in a fresh process; the feed against our own loader in
Megatron-LM's order.
"""

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import HIGHER, LOWER, Report, Row, alternate, finish, number_of_runs, parser
from start_work import weights_of

from millrace import DatasetConfig, IndexedDatasetBuilder, InstantConfig, Loader, build_datasets

FEED_BAR, FAR_BAR = 0.8, 0.95
FAR = 10**15

NOTES = [
    "The start: 4,096 token files of 20 to 100 documents of 600 tokens on average (uint16), random "
    "weights, sequence length 1,024, in the page cache. Timed: the configuration (ours from a YAML "
    "file), the datasets and one micro batch of 8 as torch tensors; not the imports. Theirs has "
    "200,000 samples; ours has no end, and no cache.",
    "The feed: 60 token files of 40 M tokens in all, documents of 100 to 2,000 tokens, one thread, "
    "micro batches of 8, per second of CPU. The peer is our loader in Megatron-LM's order, its "
    "indices in memory; in the last row it is the instant order from sample 0 on.",
]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    runs = number_of_runs(options)
    count, documents, steps = (64, 100, 50) if options.quick else (4096, 800, 4000)
    report = Report("The instant order", NOTES, runs)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        write_files(folder / "many", count, documents=60, longest=1200)
        write_files(folder / "feed", 60, documents=documents, longest=2000)
        report.rows = start_rows(folder, count, runs) + feed_rows(folder / "feed", steps, runs)
    finish(report, options)


def write_files(folder: Path, count: int, *, documents: int, longest: int) -> None:
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        lengths = random.integers(20, longest, random.integers(documents // 2, documents * 3 // 2))
        tokens = random.integers(0, 50304, int(lengths.sum()), dtype=np.uint16)
        with IndexedDatasetBuilder(folder / f"d{number:04}", np.uint16) as builder:
            builder.add_documents(tokens, lengths)


def start_rows(folder: Path, count: int, runs: int) -> list[Row]:
    numbers = itertools.count()

    def start(side: str, cache: str, *, trusts: bool = False) -> float:
        task = {
            "side": side,
            "folder": str(folder / "many"),
            "cache": str(folder / cache),
            "trusts": trusts,
            "num_samples": 200_000,
            "meeting": str(folder / f"meeting-{next(numbers)}"),
        }
        program = Path(__file__).with_name("start_work.py")
        done = subprocess.run(
            [sys.executable, str(program), json.dumps(task)], check=True, stdout=subprocess.PIPE
        )
        seconds: float = json.loads(done.stdout.splitlines()[-1])["seconds"]
        return seconds

    def without_cache() -> float:
        shutil.rmtree(folder / "empty", ignore_errors=True)
        return start("theirs", "empty")

    start("theirs", "filled")
    sides: dict[str, Any] = {
        "ours": lambda: start("instant", "instant"),
        "without caches": without_cache,
        "with trusted caches": lambda: start("theirs", "filled", trusts=True),
    }
    seconds = alternate(runs, sides)
    return [
        Row.compare(
            f"first batch of {count} sources, theirs {kind}",
            [one * 1e3 for one in seconds["ours"]],
            [one * 1e3 for one in seconds[kind]],
            "ms",
            better=LOWER,
        )
        for kind in ("without caches", "with trusted caches")
    ]


def feed_rows(folder: Path, steps: int, runs: int) -> list[Row]:
    prefixes = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx"))
    weights = weights_of(len(prefixes))
    rows = []
    for length in (4096, 512):
        gpt = DatasetConfig(
            sequence_length=length,
            seed=1,
            num_samples=((steps + 20) * 8, 0, 0),
            blend=(prefixes, weights),
            split="1,0,0",
        )
        sources = {
            Path(prefix).name: {"prefix": prefix, "weight": weight}
            for prefix, weight in zip(prefixes, weights, strict=True)
        }
        instant = InstantConfig(sequence_length=length, seed=1, sources=sources, dtype="uint16")
        ours, peer = (build_datasets(config).train for config in (instant, gpt))
        for fields in (None, ("tokens", "labels", "cu_seqlens")):
            name = f"feed, {length} tokens, {'all' if fields is None else ', '.join(fields)}"
            sides: dict[str, Any] = {
                "ours": lambda ours=ours, fields=fields: rate(ours, 0, steps, fields),
                "peer": lambda peer=peer, fields=fields: rate(peer, 0, steps, fields),
            }
            rates = alternate(runs, sides)
            pair = rates["ours"], rates["peer"]
            rows.append(Row.compare(name, *pair, "samples/s", better=HIGHER, bar=FEED_BAR))
        far = alternate(
            runs,
            {
                "ours": lambda ours=ours: rate(ours, FAR, steps, None),
                "peer": lambda ours=ours: rate(ours, 0, steps, None),
            },
        )
        name = f"feed, {length} tokens, from sample 10^15 on"
        pair = far["ours"], far["peer"]
        rows.append(Row.compare(name, *pair, "samples/s", better=HIGHER, bar=FAR_BAR))
    return rows


def rate(dataset: Any, start: int, steps: int, fields: Any) -> float:
    """Samples per second of CPU."""
    loader = Loader(dataset, micro_batch_size=8, consumed_samples=start, prefetch=0, fields=fields)
    for _ in range(20):
        next(loader)
    before = time.process_time()
    for _ in range(steps):
        next(loader)
    return 8 * steps / (time.process_time() - before)


if __name__ == "__main__":
    main()
