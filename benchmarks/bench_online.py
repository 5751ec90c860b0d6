"""Texts on the fly: documents per second, and seconds to the first batch.

    .venv/bin/python benchmarks/bench_online.py --first-bytes 10e9

Hugging Face is a side if `datasets` and torch are installed.
"""

import importlib.util
import itertools
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenize_work as work
from common import HIGHER, LOWER, Report, Row, alternate, finish, number_of_runs, parser
from processes import call

from millrace import Loader
from millrace.encoding import Tokenizer
from millrace.online import TextDataset, TextRows, open_rows
from millrace.tokenizing import tokenize

TEXT_BYTES, QUICK_TEXT_BYTES = 60_000_000, 1_000_000
FIRST_BYTES, QUICK_FIRST_BYTES = 1e9, 4e6
CACHE_TIMES = 60  # the texts, over and over: the start of the processes should not decide
CHARACTERS = 2900  # of a document
LENGTH = 1024  # tokens of a sample
PEER_COUNT = 3000  # documents of Hugging Face's
BARS = {"Hugging Face": 20, "encode_batch": 0.6}
LIMIT = 15.0  # seconds of 10 GB

NOTES = [
    "The texts of `bench_tokenize.py`, cut into {count:,} documents of 2,900 characters on "
    "average, log-normal, {size:.0f} MB of JSONL in the page cache. Samples of 1,024 tokens, cut "
    "or padded, shuffled. Every run is a fresh process, with one thread that encodes; in ours, the "
    "loader's thread reads the next rows, and fills batches, meanwhile.",
    "Ours: `TextDataset` and `Loader`, all documents once. Hugging Face: `load_dataset`, which is "
    "not timed, `shuffle`, `set_transform` with `encode_batch` of `tokenizers`, and a DataLoader "
    "with one worker; 3,000 documents after the first batch. encode_batch: our encoder alone, the "
    "same texts in memory, shuffled, too (neighbours share words), in batches of 64.",
    "First batch: from `open_rows` with an empty cache folder to the first batch of 8, of {first} "
    "GB (the same texts over and over) that are not in the page cache; the limit is for 10 GB. "
    "With a cache: the same of {cached:.0f} MB, against `millrace.tokenize` alone. About a "
    "second of it is the index of the rows.",
]


def main() -> None:
    add = (arguments := parser(__doc__ or "")).add_argument
    add("--first-bytes", type=float, metavar="N", help="size of the file of the first batch")
    work.add_inputs(arguments)
    options = arguments.parse_args()
    quick, runs = options.quick, number_of_runs(options)
    first_bytes = options.first_bytes or (QUICK_FIRST_BYTES if quick else FIRST_BYTES)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        size = QUICK_TEXT_BYTES if quick else TEXT_BYTES
        source, tokenizer = work.write_inputs(Path(name), options, size)
        documents = work.documents_of(source, CHARACTERS)
        path, several, big = (Path(name, f"{one}.jsonl") for one in ("rows", "several", "big"))
        path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
        size = path.stat().st_size
        work.repeat_input(path, several, CACHE_TIMES)
        work.repeat_input(path, big, max(round(first_bytes / size), 1))
        values = {"size": size / 1e6, "count": len(documents), "first": first_bytes / 1e9}
        values["cached"] = CACHE_TIMES * size / 1e6
        notes = [note.format(**values) for note in NOTES]
        report = Report("Texts on the fly", notes, runs, peer="the other")
        for micro_batch in (64, 8):
            report.rows += rate_rows(micro_batch, str(path), str(tokenizer), runs)
        report.rows += first_rows(str(several), str(big), str(tokenizer), runs)
        finish(report, options)


def rate_rows(size: int, path: str, tokenizer: str, runs: int) -> list[Row]:
    works: dict[str, Any] = {"ours": our_rate}
    if size == 64:
        works["encode_batch"] = encoder_rate
    if importlib.util.find_spec("datasets") and importlib.util.find_spec("torch"):
        works["Hugging Face"] = hugging_face_rate
    sides = {name: partial(call, one, path, tokenizer, size) for name, one in works.items()}
    results = alternate(runs, sides)
    compared = partial(Row.compare, ours=results.pop("ours"), unit="documents/s", better=HIGHER)
    return [
        compared(f"micro batch {size}: {name}", peer=values, bar=BARS[name])
        for name, values in results.items()
    ]


def our_rate(path: str, tokenizer: str, size: int) -> float:
    rows, encoder = open_rows(path, cache=os.path.dirname(path)), TextRows(Tokenizer(tokenizer))
    dataset = TextDataset(rows, encoder, seed=1, sequence_length=LENGTH)
    loader = Loader(dataset, micro_batch_size=size, drop_last=False)
    start = time.perf_counter()
    for _ in loader:
        pass
    return len(rows) / (time.perf_counter() - start)


def encoder_rate(path: str, tokenizer_path: str, size: int) -> float:
    texts, tokenizer = work.texts_of(path), Tokenizer(tokenizer_path)
    texts = [texts[number] for number in np.random.default_rng(1).permutation(len(texts))]
    tokenizer.encode_batch(["ready"])
    start = time.perf_counter()
    for first in range(0, len(texts), size):
        tokenizer.encode_batch(texts[first : first + size])
    return len(texts) / (time.perf_counter() - start)


def hugging_face_rate(path: str, tokenizer_path: str, size: int) -> float:
    import datasets
    import tokenizers
    import torch

    tokenizer = tokenizers.Tokenizer.from_file(tokenizer_path)
    tokenizer.enable_truncation(LENGTH + 1)
    tokenizer.enable_padding(length=LENGTH + 1)

    def transform(batch: dict[str, list[str]]) -> dict[str, Any]:
        encodings = tokenizer.encode_batch(batch["text"])
        ids = torch.tensor([one.ids for one in encodings])
        mask = torch.tensor([one.attention_mask for one in encodings], dtype=torch.float32)
        return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask[:, 1:]}

    cache = {"cache_dir": os.path.join(os.path.dirname(path), "hugging-face")}
    rows = datasets.load_dataset("json", data_files=path, split="train", **cache).shuffle(seed=1)
    rows.set_transform(transform)
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    batches = iter(torch.utils.data.DataLoader(rows, batch_size=size, **options))
    next(batches)
    start = time.perf_counter()
    count = sum(len(one["tokens"]) for one in itertools.islice(batches, PEER_COUNT // size))
    return count / (time.perf_counter() - start)


def first_rows(path: str, big: str, tokenizer: str, runs: int) -> list[Row]:
    def cold() -> Any:
        with open(big, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return call(first_seconds, big, tokenizer)

    sides: dict[str, Any] = {"job": partial(call, job_seconds, path, tokenizer), "cold": cold}
    sides["build"] = partial(call, first_seconds, path, tokenizer, has_cache=True)
    results, compared = alternate(runs, sides), partial(Row.compare, unit="s", better=LOWER)
    bar = 1 if os.path.getsize(big) > 9.9e9 else None
    name = "first batch, with a cache: the tokenising job alone"
    return [
        compared("first batch: limit", results["cold"], [LIMIT], bar=bar),
        compared(name, results["build"], results["job"], bar=0.95),
    ]


def first_seconds(path: str, tokenizer: str, has_cache: bool = False) -> float:
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
        start = time.perf_counter()
        rows, encoder = open_rows(path, cache=folder), TextRows(Tokenizer(tokenizer))
        cache = folder if has_cache else None
        dataset = TextDataset(rows, encoder, seed=1, sequence_length=LENGTH, cache=cache)
        next(Loader(dataset, micro_batch_size=8))
        return time.perf_counter() - start


def job_seconds(path: str, tokenizer: str) -> float:
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
        start = time.perf_counter()
        tokenize([path], f"{folder}/alone", Tokenizer(tokenizer), append_eod=True)
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
