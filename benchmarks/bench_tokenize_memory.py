"""Tokenising 20 GB: the peak memory of the process tree. Takes minutes, and 25 GB of disk."""

import os
import shutil
import tempfile
from pathlib import Path

import tokenize_work as work
from common import LOWER, Report, Row, finish, parser
from processes import run

WORKERS = (1, 2)
FILE_BYTES, QUICK_FILE_BYTES = 200_000_000, 2_000_000
INPUT_BYTES, QUICK_INPUT_BYTES = 20_000_000_000, 20_000_000
LIMIT = 1e9 / 2**20  # MiB; the bar
DISK_FACTOR = 1.25  # bytes of journal and output, for each byte of input

NOTES = [
    "One file of 200 MB under 100 names (hard links), all of which are read: 20 GB of JSONL, one "
    "run. Journal and output take as much disk as without the repetition.",
    "Peak of the sum of proportional set sizes of the process tree, sampled every 50 ms. The other "
    "side is the limit, 1 GB.",
]


def main() -> None:
    arguments = parser(__doc__ or "")
    work.add_inputs(arguments)
    options = arguments.parse_args()
    file_bytes = QUICK_FILE_BYTES if options.quick else FILE_BYTES
    input_bytes = QUICK_INPUT_BYTES if options.quick else INPUT_BYTES
    report = Report("Tokenising 20 GB", NOTES, 1, peer="the limit")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if shutil.disk_usage(folder).free < DISK_FACTOR * input_bytes:
            raise SystemExit(f"{folder} has no room for {DISK_FACTOR * input_bytes / 1e9:.0f} GB")
        inputs = folder / "inputs"
        inputs.mkdir()
        first, tokenizer = work.write_inputs(folder, options, file_bytes)
        for number in range(input_bytes // file_bytes):
            os.link(first, inputs / f"{number:03}.jsonl")
        for workers in WORKERS:
            output = folder / "output"
            output.mkdir()
            command = work.millrace_command([inputs], output / "out", tokenizer, workers)
            cost = run(command, has_memory=True)
            rate = input_bytes / 1e6 / cost.seconds
            print(f"{workers} workers: {cost.peak_mib:.0f} MiB, {rate:.0f} MB/s", flush=True)
            plural = "worker" if workers == 1 else "workers"
            row = f"peak memory, {workers} {plural}, {rate:.0f} MB/s"
            report.rows.append(
                Row.compare(row, [cost.peak_mib], [LIMIT], "MiB", better=LOWER, bar=1.0)
            )
            shutil.rmtree(output)
        finish(report, options)


if __name__ == "__main__":
    main()
