"""A trace in the instant order, both ways, in a run of 10^13 tokens in 4,096 sources, and a plan.

The other column is the limit.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet  # noqa: F401  # the imports are not timed
import yaml
from common import LOWER, Report, Row, finish, number_of_runs, parser

from millrace.inspect import Trace, find_documents, format_sample
from millrace.provenance import OriginsWriter
from millrace.store.writer import write_index

NUM_TOKENS = 10**13 // 4096  # of each source
LIMIT = 100.0  # ms
NAME = "s0005"  # of the source with an index

NOTES = [
    "Sparse token files of equal size (uint16), random weights, sequence length 4,096, as many "
    "samples as 10^13 tokens make. One source has an index and origins of 10^7 documents, of 244 "
    "tokens each. The start (from the YAML file) is timed alone, without a limit here. Each other "
    "row is the first thing that a new trace does: the source is opened for it.",
    "The plan: `millrace plan` of a run of 1.5 * 10^13 tokens and 20 phases, each of which has new "
    "weights for all sources, or for 100 of them; in a fresh process, without the imports.",
]
PLAN_LIMITS = {"ms": 1000.0, "MB": 10.0}


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    runs = number_of_runs(options)
    num_sources, num_documents = (64, 10**5) if options.quick else (4096, 10**7)
    report = Report("The trace and the plan", NOTES, runs, peer="limit")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        write_run(Path(folder), num_sources, num_documents)
        times: dict[str, list[float]] = {}
        for run in range(runs):
            for name, seconds in measure(Path(folder) / "run.yaml", run, num_documents).items():
                times.setdefault(name, []).append(seconds * 1e3)
        plans = {count: plan_run(Path(folder), count, runs) for count in (num_sources, 100)}
    for name, values in times.items():
        bar = None if name.startswith("start") else 1
        report.rows.append(Row.compare(name, values, [LIMIT], "ms", better=LOWER, bar=bar))
    for count, results in plans.items():
        for unit, limit in PLAN_LIMITS.items():
            name, values = f"plan, {count} new weights a phase", [one[unit] for one in results]
            bar = 1 if count == 100 else None  # a phase need not repeat what stays
            report.rows.append(Row.compare(name, values, [limit], unit, better=LOWER, bar=bar))
    finish(report, options)


def write_run(folder: Path, num_sources: int, num_documents: int) -> None:
    sources = {}
    weights = np.random.default_rng(0).random(num_sources) + 0.1
    for number, weight in enumerate(weights.tolist()):
        name = f"s{number:04}"
        sources[name] = {"prefix": str(folder / name), "weight": weight}
        with open(folder / f"{name}.bin", "wb") as file:
            file.truncate(2 * (NUM_TOKENS + number))  # files of one size would be compared
    lengths = np.full(num_documents, NUM_TOKENS // num_documents)
    lengths[-1] += NUM_TOKENS + int(NAME[1:]) - lengths.sum()
    ones, step = np.ones(num_documents, np.int64), 10**5
    starts = range(0, num_documents, step)
    entries = ((lengths[at : at + step], ones[at : at + step], None) for at in starts)
    write_index(str(folder / NAME), np.uint16, entries)
    with OriginsWriter(folder / NAME) as origins:
        for at in starts:
            numbers = np.arange(at, at + step)
            ids = [f"doc-{number}" for number in numbers.tolist()]
            origins.add(["data/web.jsonl"], np.zeros(step, int), numbers + 1, 1000 * numbers, ids)
    run = {"order": "instant", "seq-length": 4096, "global-batch-size": 512, "dtype": "uint16"}
    counts = {"num-samples": [num_sources * NUM_TOKENS // 4096, 0, 0]}
    (folder / "run.yaml").write_text(yaml.safe_dump({**run, **counts, "sources": sources}))


def plan_run(folder: Path, count: int, runs: int) -> list[dict[str, float]]:
    """Milliseconds and megabytes of the plan of a run with 20 phases."""
    run = yaml.safe_load((folder / "run.yaml").read_text())
    random, names = np.random.default_rng(1), [*run["sources"]]
    step = 15 * 10**12 // 4096 // 20 // 512 * 512
    phases = []
    for number in range(20):
        chosen = random.choice(names, min(count, len(names)), replace=False).tolist()
        phases.append(
            {"until": (number + 1) * step, "weights": {n: random.random() for n in chosen}}
        )
    del phases[-1]["until"]
    small = {**run, "sources": {NAME: run["sources"][NAME]}}
    (folder / "small.yaml").write_text(yaml.safe_dump(small))
    counts = {"num-samples": [20 * step, 0, 0], "phases": phases}
    (folder / "plan.yaml").write_text(yaml.safe_dump({**run, **counts}))
    program = Path(__file__).with_name("plan_work.py")
    command = [sys.executable, str(program), str(folder / "small.yaml"), str(folder / "plan.yaml")]
    return [json.loads(subprocess.check_output(command)) for _ in range(runs)]


def measure(run: Path, seed: int, num_documents: int) -> dict[str, float]:
    """Seconds of each step, at another place in each run."""
    random, times = np.random.default_rng(seed), {}

    def timed(name: str, act: Any) -> Any:
        start = time.perf_counter()
        value = act()
        times[name] = time.perf_counter() - start
        return value

    def fresh() -> Trace:
        trace = Trace.of(run)
        trace._dataset.order  # noqa: B018
        return trace

    document = int(random.integers(num_documents))
    trace = timed("start, not the trace", fresh)
    visits = timed("document to samples", lambda: [*trace.visits(NAME, document)])
    sample = visits[0].sample
    trace = fresh()
    timed("sample to documents, as text", lambda: format_sample(trace.sample(sample)))
    trace = fresh()
    line = [f"web.jsonl:{document + 1}"]
    documents = timed("line to document", lambda: [*find_documents(trace, line, source=NAME)])
    assert documents[0][1] == document
    assert any(part.document == document for part in trace.sample(sample).parts)
    return times


if __name__ == "__main__":
    main()
