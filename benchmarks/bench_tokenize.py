"""Tokenising: text to token files, against Megatron-LM's two scripts, datatrove and the encoder.

    .venv/bin/python benchmarks/bench_tokenize.py --megatron CHECKOUT --megatron-python PYTHON \\
        --datatrove-python PYTHON

Every run is a whole process. The peers need environments of their own; without an option, the
environment variables MEGATRON_LM, MEGATRON_PYTHON and DATATROVE_PYTHON name them. A peer that is
missing is named in the notes.
"""

import argparse
import functools
import gzip
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tokenize_work as work
from common import HIGHER, LOWER, Report, Row, alternate, finish, number_of_runs, parser
from processes import run

WORKERS = (1, 2)
INPUT_BYTES, QUICK_BYTES = 300_000_000, 4_000_000
# A job starts in about a second: a third of the time for 300 MB, and none of that for terabytes.
LONG = 4
# Slow peers read the first part of the input, and their start is left out, in their favour.
PART_BYTES, QUICK_PART_BYTES = 30_000_000, 500_000
START_BYTES = 10_000
BARS = {
    "long preprocess_data.py": 45,
    "preprocess_data_fast.py": 1.2,
    "datatrove": 20,
    "long encode_batch": 0.70,
    "gzip": 0.60,
    "zstd": 0.60,
    "long Parquet": 1.0,
    "memory": 3,
}

NOTES = [
    "Whole processes, from start to end, JSONL to `.bin` and `.idx` with EOD; page cache warm. "
    "Rates are MB of JSONL per second; for compressed and Parquet inputs, of the JSONL that they "
    "were made from.",
    "preprocess_data.py and datatrove read the first {part:.0f} MB, and their start (the time for "
    "10 kB) is left out, in their favour. datatrove: `JsonlReader` and `DocumentTokenizer`, "
    "without shuffling, one file and one thread per worker.",
    "preprocess_data_fast.py has no worker processes but threads: as many as we have workers. "
    "Its imports take some seconds; a row without a bar leaves them out. "
    "(It gives empty documents an EOD, and so writes other bytes than preprocess_data.py.)",
    "encode_batch: the same encoder in as many processes, each on one thread as in our workers, on "
    "texts in memory, in batches of 1 MB. The start, reading, checking and writing are the "
    "difference.",
    "1.2 GB: the 300 MB four times, for our job and for encode_batch; preprocess_data.py's rate is "
    "the same in both rows.",
    "Memory: the peak of the sum of proportional set sizes of the process tree, sampled every "
    "50 ms.",
]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Files and peers of a measurement.

    Attributes:
        folder: A temporary folder.
        source: The input.
        long: The input, several times.
        part: The part of it that slow peers read.
        start: A few documents, to measure the start of slow peers.
        tokenizer: A tokenizer.json.
        model: The same in a `transformers` folder.
        megatron: Checkout of Megatron-LM; None: missing.
        megatron_python: Interpreter of its environment.
        datatrove_python: Interpreter that has datatrove; None: missing.
    """

    folder: Path
    source: Path
    long: Path
    part: Path
    start: Path
    tokenizer: Path
    model: Path
    megatron: Path | None
    megatron_python: str
    datatrove_python: str | None


def main() -> None:
    add = (arguments := parser(__doc__ or "")).add_argument
    variable = os.environ.get
    add("--megatron", default=variable("MEGATRON_LM"), metavar="DIR", help="its checkout")
    add("--megatron-python", default=variable("MEGATRON_PYTHON", "python3"), metavar="FILE")
    add("--datatrove-python", default=variable("DATATROVE_PYTHON"), metavar="FILE")
    work.add_inputs(arguments)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setup, notes = prepare(Path(folder), options)
        runs = number_of_runs(options)
        report = Report("Tokenising", notes, runs, peer="the other")
        for workers in WORKERS:
            report.rows += rows(setup, workers, runs)
        report.rows += memory_rows(setup, runs)
        finish(report, options)


def prepare(folder: Path, options: argparse.Namespace) -> tuple[Setup, list[str]]:
    """Writes the inputs; returns them and the notes."""
    size = QUICK_BYTES if options.quick else INPUT_BYTES
    source, tokenizer = work.write_inputs(folder, options, size)
    work.repeat_input(source, folder / "long.jsonl", LONG)
    part_bytes = QUICK_PART_BYTES if options.quick else PART_BYTES
    work.write_part(source, folder / "part.jsonl", part_bytes)
    work.write_part(source, folder / "start.jsonl", START_BYTES)
    work.write_transformers_folder(tokenizer, folder / "model")
    text = "the corpus and " if options.corpus.is_dir() else ""
    notes = [
        f"The input: {source.stat().st_size / 1e6:.0f} MB of {text}Python sources of the standard "
        "library and of installed packages, each text once, in random order. Encoders cache words, "
        f"so repeated text would be faster on both sides. Vocabulary: {tokenizer.name}.",
        *(note.format(part=part_bytes / 1e6) for note in NOTES),
    ]
    if not options.megatron:
        notes.append("Missing in this run: Megatron-LM's scripts.")
    if not options.datatrove_python:
        notes.append("Missing in this run: datatrove.")
    setup = Setup(
        folder=folder,
        source=source,
        long=folder / "long.jsonl",
        part=folder / "part.jsonl",
        start=folder / "start.jsonl",
        tokenizer=tokenizer,
        model=folder / "model",
        megatron=Path(options.megatron) if options.megatron else None,
        megatron_python=options.megatron_python,
        datatrove_python=options.datatrove_python,
    )
    return setup, notes


# ---- rates ----


def rows(setup: Setup, workers: int, runs: int) -> list[Row]:
    """The rows of rates with this number of workers."""
    others = other_inputs(setup)
    sides: dict[str, Callable[[], float]] = {
        "ours": functools.partial(our_rate, setup, setup.source, workers),
        "long ours": functools.partial(our_rate, setup, setup.long, workers),
        "encode_batch": functools.partial(encode_rate, setup, setup.source, workers),
        "long encode_batch": functools.partial(encode_rate, setup, setup.long, workers),
    }
    for name, path in others.items():
        sides[name] = functools.partial(our_rate, setup, path, workers)
    if setup.megatron:
        sides["preprocess_data.py"] = functools.partial(megatron_rate, setup, workers)
        fast = functools.partial(megatron_fast_rate, setup, workers)
        sides["preprocess_data_fast.py"] = functools.partial(fast, has_start=True)
        sides["preprocess_data_fast.py without its start"] = functools.partial(
            fast, has_start=False
        )
    if setup.datatrove_python:
        sides["datatrove"] = functools.partial(datatrove_rate, setup, workers)
    results = alternate(runs, sides)
    if setup.megatron:
        results["long preprocess_data.py"] = results["preprocess_data.py"]
    plural = "worker" if workers == 1 else "workers"
    rows = []
    for name, result in results.items():
        is_long = name.startswith("long ")
        ours, plain_name = ("long ours", name[5:]) if is_long else ("ours", name)
        if plain_name == "ours":
            continue
        is_format = name in others
        pair = (result, results[ours]) if is_format else (results[ours], result)
        label = f"{workers} {plural}" + (", 1.2 GB: " if is_long else ": ")
        label += f"{plain_name} over JSONL" if is_format else plain_name
        rows.append(Row.compare(label, *pair, "MB/s", better=HIGHER, bar=BARS.get(name)))
    return rows


def other_inputs(setup: Setup) -> dict[str, Path]:
    """The input in other formats, written once."""
    paths = {
        "gzip": setup.folder / "input.jsonl.gz",
        "zstd": setup.folder / "input.jsonl.zst",
        "Parquet": setup.folder / "input.parquet",
        "long Parquet": setup.folder / "long.parquet",
    }
    if not paths["gzip"].exists():
        data = setup.source.read_bytes()
        paths["gzip"].write_bytes(gzip.compress(data, 6))
        paths["zstd"].write_bytes(work.zstd().compress(data))
        work.write_parquet(setup.source, paths["Parquet"])
        work.write_parquet(setup.long, paths["long Parquet"])
    return paths


def new_folder(setup: Setup) -> Path:
    folder = setup.folder / "output"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6


def our_rate(setup: Setup, path: Path, workers: int) -> float:
    prefix = new_folder(setup) / "out"
    command = work.millrace_command([path], prefix, setup.tokenizer, workers)
    is_long = path.name.startswith("long")
    return megabytes(setup.long if is_long else setup.source) / run(command).seconds


def encode_rate(setup: Setup, path: Path, workers: int) -> float:
    return megabytes(path) / work.encode_seconds(setup.tokenizer, path, workers)


def megatron_rate(setup: Setup, workers: int) -> float:
    """Of the part, without the start."""
    seconds = [
        run(megatron_command(setup, "preprocess_data.py", path, "--workers", str(workers)))
        for path in (setup.start, setup.part)
    ]
    return megabytes(setup.part) / without_start(seconds[1].seconds, seconds[0].seconds)


def without_start(seconds: float, start: float) -> float:
    return max(seconds - start, 0.01)  # small sizes (--quick) may end before


def megatron_fast_rate(setup: Setup, workers: int, has_start: bool) -> float:
    paths = (setup.source,) if has_start else (setup.start, setup.source)
    environment = {"RAYON_NUM_THREADS": str(workers)}
    seconds = [
        run(
            megatron_command(setup, "preprocess_data_fast.py", path, "--use-gigatoken"), environment
        ).seconds
        for path in paths
    ]
    return megabytes(setup.source) / without_start(seconds[-1], 0 if has_start else seconds[0])


def megatron_command(setup: Setup, script: str, path: Path, *options: str) -> list[str]:
    assert setup.megatron is not None
    prefix = new_folder(setup) / "out"
    script_path = setup.megatron / "tools" / script
    return work.megatron_command(
        script_path, setup.megatron_python, path, prefix, setup.model, *options
    )


def datatrove_rate(setup: Setup, workers: int) -> float:
    """Of the part, without the start."""
    assert setup.datatrove_python is not None
    seconds = []
    for path in (setup.start, setup.part):
        output = new_folder(setup)
        work.write_parts(path, output / "in", workers)
        arguments = output / "in", output / "out", setup.tokenizer, workers
        command = work.datatrove_command(setup.datatrove_python, *arguments)
        seconds.append(run(command, work.ONE_THREAD).seconds)
    return megabytes(setup.part) / without_start(seconds[1], seconds[0])


# ---- memory ----


def memory_rows(setup: Setup, runs: int) -> list[Row]:
    if not setup.megatron:
        return []
    sides = {
        "ours": functools.partial(our_memory, setup),
        "theirs": functools.partial(megatron_fast_memory, setup),
    }
    results = alternate(runs, sides)
    name = "peak memory, 2 workers: preprocess_data_fast.py"
    return [
        Row.compare(
            name, results["ours"], results["theirs"], "MiB", better=LOWER, bar=BARS["memory"]
        )
    ]


def our_memory(setup: Setup) -> float:
    command = work.millrace_command([setup.source], new_folder(setup) / "out", setup.tokenizer, 2)
    return run(command, has_memory=True).peak_mib


def megatron_fast_memory(setup: Setup) -> float:
    command = megatron_command(setup, "preprocess_data_fast.py", setup.source, "--use-gigatoken")
    return run(command, {"RAYON_NUM_THREADS": "2"}, has_memory=True).peak_mib


if __name__ == "__main__":
    main()
