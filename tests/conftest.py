"""Fixtures and helpers that many tests share."""

import gc
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace import IndexedDataset, IndexedDatasetBuilder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # `nohup`, a shell's background jobs and some CI systems ignore Ctrl-C, which some tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = (
    "tests/trainers/",
    "tests/jobs/test_engine_ray.py",
    "tests/oracle/test_oracle_differential.py",
    "tests/jobs/test_tokenize_kills.py",
    "tests/store/test_fuzz.py",
    "tests/feed/test_laws.py::test_every_sample_comes_exactly_once",
    "tests/order/test_statistics.py::test_every_size_is_permuted",
)
"""Files, or single tests, that take long."""

WORDS = "the water that turns the mill runs down the race and over the wheel again".split()


def pytest_configure() -> None:
    """Flushes to the disk take milliseconds, and only a loss of power shows their effect: in the
    process of the tests they just need an open file. Commands that tests start do flush."""
    os.fsync = os.fstat


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Imported modules stay: collections of garbage, of 0.3 s with torch, need not look at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are left out are not imported either: trainers take seconds."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if config.option.markexpr == "not long" and path.startswith(LONG) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(LONG):
            item.add_marker(pytest.mark.long)


def write_documents(prefix: Path, documents: Sequence[Any], dtype: Any = np.uint16) -> None:
    """Writes a token file with one sequence per document."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., IndexedDataset]:
    """Makes an indexed dataset with random documents of the given lengths."""

    def make(
        lengths: Sequence[int] | NDArray[Any], *, name: str = "data", dtype: Any = np.uint16
    ) -> IndexedDataset:
        random = np.random.default_rng(len(lengths))
        documents = [random.integers(0, 100, length).astype(dtype) for length in lengths]
        write_documents(tmp_path / name, documents, dtype)
        return IndexedDataset(tmp_path / name)

    return make


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE tokenizer, trained for the tests."""
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    result = subprocess.run(mount, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a verb in this process, which must end with the status; returns what it prints."""

    def run(*words: object, status: int = 0) -> str:
        from millrace.cli import main

        capsys.readouterr()
        ended_with, text = main([*map(str, words)]), capsys.readouterr()
        assert ended_with == status, text.err
        return text.out + text.err

    return run


def results_of_processes(
    method: str, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]], num_each: int = 1
) -> list[Any]:
    """What processes put into a queue, their last argument; each must end with exit code 0."""
    context: Any = multiprocessing.get_context(method)
    out = context.Queue()
    processes = [context.Process(target=work, args=(*given, out)) for given in arguments]
    for process in processes:
        process.start()
    results = [out.get(timeout=200) for _ in range(num_each * len(processes))]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return results


def train_tokenizer(path: Path, special_tokens: Sequence[str] = ("<|endoftext|>",)) -> Path:
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    model.save(str(path))
    return path


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 0 to 39 words, some of them in other scripts."""
    random = np.random.default_rng(seed)
    words = [*WORDS, "水車", "ποταμός", "🌊", "naïve", "\n"]
    return [" ".join(random.choice(words, random.integers(0, 40))) for _ in range(count)]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    """Writes a JSONL file; the suffix of its name selects the compression."""
    data = "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    elif path.suffix == ".zst":
        from backports import zstd

        path.write_bytes(zstd.compress(data))
    else:
        path.write_bytes(data)
    return path
