"""Shared code of the benchmarks: alternating runs, medians, rows, tables, the machine's data.

Each `bench_*.py` builds a `Report` and passes it to `finish`, which prints it and, with --json,
writes it for `run.py`.
"""

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import statistics
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

DEFAULT_RUNS = 5
QUICK_RUNS = 2
LOWER, HIGHER = "lower", "higher"  # which of two values is better

_PACKAGES = ("millrace", "numpy", "torch", "megatron-core")


@dataclass(frozen=True)
class Spread:
    """The median, minimum and maximum of several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: Label of the row; results of different runs are compared by it.
        ours: Spread of our runs.
        peer: Spread of the peer's runs.
        unit: Unit of both.
        ratio: How many times better our median is than the peer's.
        bar: Target of the ratio; None: no target.
    """

    name: str
    ours: Spread
    peer: Spread
    unit: str
    ratio: float
    bar: float | None

    @classmethod
    def compare(
        cls,
        name: str,
        ours: Sequence[float],
        peer: Sequence[float],
        unit: str,
        *,
        better: str,
        bar: float | None = None,
    ) -> "Row":
        mine, theirs = Spread.of(ours), Spread.of(peer)
        pair = (theirs, mine) if better == LOWER else (mine, theirs)
        ratio = pair[0].median / pair[1].median if pair[1].median else float("inf")
        return cls(name, mine, theirs, unit, ratio, bar)

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return "-"
        return "met" if self.ratio >= self.bar else "NOT MET"


@dataclass
class Report:
    """The rows of one benchmark, with notes on the method and the machine.

    Attributes:
        title: Title.
        notes: Sentences about the method.
        runs: Number of runs of each side.
        rows: The comparisons.
        machine: Conditions of the measurement.
        date: Time of the measurement.
        peer: Name of the column of the other side.
    """

    title: str
    notes: list[str]
    runs: int
    rows: list[Row] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=lambda: machine())
    date: str = field(default_factory=lambda: _now())
    peer: str = "megatron-core"

    @classmethod
    def load(cls, path: Path) -> "Report":
        data = json.loads(path.read_text())
        data["rows"] = [
            Row(**{**row, "ours": Spread(**row["ours"]), "peer": Spread(**row["peer"])})
            for row in data["rows"]
        ]
        return cls(**data)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    result = argparse.ArgumentParser(description=description.splitlines()[0])
    result.add_argument(
        "--runs", type=int, help=f"runs of each side (default {DEFAULT_RUNS}, or {QUICK_RUNS})"
    )
    result.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    result.add_argument("--json", type=Path, help="write the rows to this file")
    return result


def number_of_runs(options: argparse.Namespace) -> int:
    return options.runs or (QUICK_RUNS if options.quick else DEFAULT_RUNS)


def finish(report: Report, options: argparse.Namespace) -> None:
    """Prints the report, and writes it to the file of --json. Bars apply to the full sizes only."""
    if options.quick:
        report.rows = [dataclasses.replace(row, bar=None) for row in report.rows]
    print(f"\n{report.title}, {report.runs} runs of each side in alternation")
    print(table(report.rows, report.peer))
    if report.machine["compiled core"] != _core_digest():
        raise RuntimeError("millrace was rebuilt during the measurement; run it again")
    if options.json:
        report.save(options.json)


def alternate(runs: int, sides: dict[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Calls the sides in turn, once per run, so that passing noise affects all of them."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for run in range(runs):
        for name, measure in sides.items():
            print(f"  run {run + 1}/{runs}: {name}", flush=True)
            results[name].append(measure())
    return results


def best_of(results: dict[str, list[float]]) -> tuple[str, list[float]]:
    """The name and the runs of the side with the highest median."""
    return max(results.items(), key=lambda item: statistics.median(item[1]))


def table(rows: Sequence[Row], peer: str, *, markdown: bool = False) -> str:
    """The rows as a table: both medians (minimum to maximum), the ratio, the bar."""
    header = ["what", "unit", "millrace", peer, "ratio", "bar", "verdict"]
    cells = [_cells(row) for row in rows]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = [
        [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        for line in [header, rule, *cells]
    ]
    if markdown:
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _cells(row: Row) -> list[str]:
    bar = "-" if row.bar is None else f"{row.bar:.3g}x"
    measured = [_spread(row.ours), _spread(row.peer), f"{row.ratio:.2f}x"]
    return [row.name, row.unit, *measured, bar, row.verdict]


def _spread(spread: Spread) -> str:
    values = spread.median, spread.low, spread.high
    if spread.median >= 100:
        return "{:,.0f} ({:,.0f} to {:,.0f})".format(*values)
    return "{:.3g} ({:.3g} to {:.3g})".format(*values)


def machine() -> dict[str, str]:
    """The conditions of a measurement: processor, memory, kernel settings, versions, load."""
    return {
        "CPU": f"{file_field('/proc/cpuinfo', 'model name')}, {os.cpu_count()} cores",
        "memory": f"{int(file_field('/proc/meminfo', 'MemTotal').split()[0]) / 2**20:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "commit": _commit(),
        "compiled core": _core_digest(),
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
    }


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def file_field(path: str, name: str) -> str:
    """The value in the line "name: value" of a file under /proc."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0 unknown"


def memory_kib(name: str) -> int:
    """The process's VmRSS, or VmHWM (the peak), in KiB."""
    return int(file_field("/proc/self/status", name).split()[0])


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return "unknown"


def _commit() -> str:
    """The commit, followed by "+" if the sources differ from it."""
    here = Path(__file__).parent.parent
    git = ["git", "-C", str(here)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        return "none"
    changes = [*git, "status", "--porcelain", "src", "cpp", "CMakeLists.txt", "pyproject.toml"]
    changed = subprocess.run(changes, capture_output=True, text=True).stdout
    return head.stdout.strip() + ("+" if changed else "")


def _core_digest() -> str:
    """A digest of the compiled core, because the commit does not identify the build."""
    spec = importlib.util.find_spec("millrace._core")
    if spec is None or spec.origin is None:
        raise RuntimeError("millrace's compiled core is not installed")
    return hashlib.blake2b(Path(spec.origin).read_bytes(), digest_size=4).hexdigest()


@contextlib.contextmanager
def quiet_megatron() -> Iterator[None]:
    """Silences the messages of megatron-core that do not matter for a CPU run.

    Its import warns that Transformer Engine and Apex are not installed, and a dataset without a
    cache path logs that its indices were not saved. All other messages are shown.
    """
    logging.getLogger("megatron.core.datasets").addFilter(_drop_unsaved)
    for name in ("gpt_dataset", "blended_dataset"):
        logging.getLogger(f"megatron.core.datasets.{name}").addFilter(_drop_unsaved)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        yield


def _drop_unsaved(record: logging.LogRecord) -> bool:
    return "because path_to_cache is None" not in record.getMessage()


class Tokenizer:
    """The attributes of a tokenizer that Megatron-LM's dataset configuration reads."""

    vocab_size = 50304
    eod = 50256

    def __init__(self, pad: int | None = None) -> None:
        self.unique_identifiers: dict[str, Any] = {"class": type(self).__name__, "pad": pad}
        if pad is not None:
            self.pad = pad
