"""Runs the benchmarks, one after the other, and writes RESULTS.md.

    .venv/bin/python benchmarks/run.py                  all benchmarks
    .venv/bin/python benchmarks/run.py --only feed      one benchmark; keeps the others' results
    .venv/bin/python benchmarks/run.py --quick          small sizes; writes nothing

Each bench_NAME.py writes its rows to results/NAME.json; RESULTS.md shows every file there.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from common import Report, table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE / "RESULTS.md"

INTRODUCTION = """# Benchmarks

Written by `benchmarks/run.py`; do not edit. Each section compares millrace with megatron-core or
other peers in one run, on the machine and at the time given there. Cells show the median of the
runs and, in parentheses, the minimum and the maximum. The ratio is computed from the medians: how
many times better millrace is; below 1 the peer is better. The bar is the target of the ratio.
"""


def main() -> None:
    options = _options()
    for name in options.only:
        print(f"== {name}", flush=True)
        run(name, options)
    if not options.quick:
        PAGE.write_text(page())
        print(f"\nwrote {PAGE}")


def names() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs the benchmarks and writes RESULTS.md.")
    parser.add_argument("--only", type=_list, default=names(), help=f"some of {','.join(names())}")
    parser.add_argument("--runs", type=int, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="small sizes; writes nothing")
    return parser.parse_args()


def _list(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = sorted(set(chosen) - set(names()))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown benchmark {', '.join(unknown)}")
    return chosen


def run(name: str, options: argparse.Namespace) -> None:
    command = [sys.executable, str(HERE / f"bench_{name}.py")]
    if options.runs:
        command += ["--runs", str(options.runs)]
    command += ["--quick"] if options.quick else ["--json", str(RESULTS / f"{name}.json")]
    subprocess.run(command, check=True)


def page() -> str:
    reports = [Report.load(RESULTS / f"{name}.json") for name in names() if _has_run(name)]
    return "\n".join([INTRODUCTION, *map(section, reports)])


def _has_run(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def section(report: Report) -> str:
    """One benchmark: title, date, machine, table, notes."""
    machine = "; ".join(f"{name} {value}" for name, value in report.machine.items())
    notes = "\n".join(f"- {note}" for note in report.notes)
    return (
        f"## {report.title}\n\n"
        f"{report.date}, {report.runs} runs of each side, in alternation. {machine}.\n\n"
        f"{table(report.rows, report.peer, markdown=True)}\n\n{notes}\n"
    )


if __name__ == "__main__":
    main()
