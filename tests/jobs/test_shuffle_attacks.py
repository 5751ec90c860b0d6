"""Faults that were found by attacks on the shuffle job."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError, DataError, MillraceError
from millrace.jobs import shuffle
from millrace.jobs.shuffling import documents, sequences
from millrace.jobs.shuffling.documents import document_items
from millrace.jobs.shuffling.probe import read_rates
from millrace.jobs.shuffling.sequences import sequence_items
from millrace.store import IndexedDataset, IndexedDatasetBuilder
from tests.jobs.shuffle_cases import weighted


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An input of 100 sequences of 10 tokens."""
    (tmp_path / "input" / "a").mkdir(parents=True)
    np.arange(1000, dtype=np.uint32).tofile(tmp_path / "input" / "a" / "x.bin")
    return tmp_path / "input"


def run(source: Path, output: Any, **options: Any) -> Any:
    return shuffle(source, output, **{"seq_len": 10, "num_shards": 3, "workers": 1, **options})


# ---- arguments ----


@pytest.mark.parametrize("name", ["plan", "permutation", "engine"])
def test_arrays_are_not_names(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is array.*; one of"):
        run(source, tmp_path / "output", **{name: np.array(["auto", "local"])})


def test_an_empty_path_is_not_the_current_folder(source: Path) -> None:
    with pytest.raises(ConfigError, match="output_dir is empty"):
        run(source, "")


def test_output_folders_that_cannot_be_made(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"link to .*nowhere, which does not exist"):
        run(source, tmp_path / "link")
    with pytest.raises(ConfigError, match="/proc/x cannot be made: No such file"):
        run(source, "/proc/x")


@pytest.mark.parametrize("weight", [1e10, 1e16])
def test_weights_that_no_disk_has_room_for(source: Path, tmp_path: Path, weight: float) -> None:
    """Before the permutation of so many items is measured, which takes years."""
    with pytest.raises(MillraceError, match=r"No space left for the output: it has .* TB"):
        shuffle(None, tmp_path / "output", input_list=[(weight, source)], seq_len=10)
    assert not (tmp_path / "output").exists()


# ---- threads ----


@pytest.mark.parametrize("plan", ["gather", "scatter"])
def test_jobs_in_threads_of_a_process(tmp_path: Path, plan: str) -> None:
    """With one worker each, so that all of them work in this process."""
    sizes = [20_000, 35_000, 50_000, 65_000]
    for domain, count in enumerate(sizes):
        (tmp_path / str(domain)).mkdir()
        tokens = np.arange(count * 10, dtype=np.uint32) + (domain << 24)
        tokens.tofile(tmp_path / str(domain) / "x.bin")

    def has_every_sequence(domain: int, number: int) -> bool:
        count, output = sizes[domain], tmp_path / f"{domain}.{number}"
        run(tmp_path / str(domain), output, plan=plan, num_shards=9, memory=30_000_000)
        shards = [np.fromfile(path, np.uint32) for path in sorted(output.glob("*.bin"))]
        sequences = np.arange(count * 10, dtype=np.uint32).reshape(count, 10) + (domain << 24)
        expected = np.empty_like(sequences)
        expected[np.random.default_rng(42).permutation(count)] = sequences
        return np.array_equal(np.concatenate(shards), expected.reshape(-1))

    with ThreadPoolExecutor(len(sizes)) as pool:
        results = pool.map(has_every_sequence, [0, 1, 2, 3] * 3, range(12))
        assert all(results)


# ---- EOD tokens ----


@pytest.mark.parametrize("page", [1, 2, 5])
@pytest.mark.parametrize("most", [1, 9, 1000])
def test_tables_of_eod_tokens_with_many_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: int, most: int
) -> None:
    monkeypatch.setattr(sequences, "_LEAST_PAGE", page)
    monkeypatch.setattr(sequences, "_PAGES", 1 << 30)
    monkeypatch.setattr(sequences, "_EODS", most)
    random = np.random.default_rng([page, most])
    for case, carry in enumerate([False, True] * 4):
        streams = []
        for number in range(3):
            stream: list[int] = []
            prefix = tmp_path / str(case) / "web" / str(number)
            prefix.parent.mkdir(parents=True, exist_ok=True)
            with IndexedDatasetBuilder(prefix) as builder:
                for size in random.choice([0, 1, 2, 30], random.integers(0, 40)).tolist():
                    tokens = random.integers(0, 1000, size).tolist()
                    builder.add_document(tokens)
                    stream += [*tokens, 1000] if tokens else []
            streams.append(stream)
        if carry:
            streams = [[token for stream in streams for token in stream]]
        seq_len = int(random.integers(1, 12))
        units = [
            stream[start : start + seq_len]
            for stream in streams
            for start in range(0, len(stream) - seq_len + 1, seq_len)
        ]
        expected = [units[number] for number in weighted(len(units), Fraction("2.5"))]
        inputs = [(2.5, str(tmp_path / str(case) / "web"))]
        items = sequence_items(inputs, seq_len=seq_len, carry=carry, eod=1000, folder=tmp_path)
        for share in (0.05, 1.0):
            numbers = np.flatnonzero(random.random(items.num_items) < share)
            buffer = np.zeros((len(numbers), seq_len), items.dtype)
            items.read(numbers, buffer.reshape(-1), np.arange(len(numbers)) * seq_len)
            assert buffer.tolist() == [expected[number] for number in numbers.tolist()]


def test_short_documents_with_eod_tokens_take_little_memory(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "web", np.uint16) as builder:
        builder.add_documents(np.ones(2_000_000, np.uint16), np.ones(2_000_000, np.int32))
    inputs = [(1, str(tmp_path / "web"))]
    items = sequence_items(inputs, seq_len=4000, eod=2, folder=tmp_path)
    buffer = np.zeros(1000 * 4000, np.uint16)
    tracemalloc.start()
    try:
        items.read(np.arange(1000), buffer, np.arange(1000) * 4000)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert np.array_equal(buffer, np.tile([1, 2], 2_000_000))


# ---- files ----


def test_a_pipe_in_place_of_a_file(source: Path, tmp_path: Path) -> None:
    """It has no writer: to open it would take forever."""
    items = sequence_items(source, seq_len=10, folder=tmp_path)
    path = source / "a" / "x.bin"
    path.unlink()
    os.mkfifo(path)
    errors = []

    def read() -> None:
        with pytest.raises(DataError, match="changed while the job ran") as error:
            items.read(np.arange(1), np.zeros(10, np.uint32), np.zeros(1, np.int64))
        errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert errors


# ---- documents of many sequences ----


@pytest.mark.parametrize("most", [1, 2, 7, 1000])
def test_indices_are_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(documents, "_MOST_SEQUENCES", most)
    random = np.random.default_rng(most)
    with IndexedDatasetBuilder(tmp_path / "web", multimodal=True) as builder:
        for count in [0, 0, *random.choice([0, 1, 2, 20], 40).tolist(), 0]:
            lengths = random.integers(0, 4, count)
            tokens = random.integers(0, 100, lengths.sum())
            builder.add_document(tokens, lengths, (lengths + 1).tolist())
    shuffle(
        None, tmp_path / "out", input_list=[(2.5, tmp_path / "web")], documents=True, num_shards=3
    )
    with IndexedDataset(tmp_path / "web") as source:
        ends = source.document_indices[:].tolist()
        units = [
            [(source[number].tolist(), source.sequence_modes[number]) for number in range(*pair)]
            for pair in itertools.pairwise(ends)
        ]
    items = [units[number] for number in weighted(len(units), Fraction("2.5"))]
    places = np.random.default_rng(42).permutation(len(items)).tolist()
    expected = [item for _, item in sorted(zip(places, items, strict=True))]
    actual = []
    for shard in range(3):
        with IndexedDataset(tmp_path / "out" / f"shard_{shard:04}") as dataset:
            for pair in itertools.pairwise(dataset.document_indices[:].tolist()):
                modes = dataset.sequence_modes
                actual.append([(dataset[n].tolist(), modes[n]) for n in range(*pair)])
    assert actual == expected


def test_documents_of_many_sequences_take_little_memory(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "web", np.uint16) as builder:
        for _ in range(1000):
            builder.add_document(np.ones(2000, np.uint16), np.ones(2000, np.int32))
    items = document_items([(1, str(tmp_path / "web"))], folder=tmp_path)
    np.ones(2_000_000, np.uint16).tofile(tmp_path / "shard.bin")
    tracemalloc.start()
    try:
        items.write_index(str(tmp_path / "shard"), np.arange, 0, 1000)
        assert tracemalloc.get_traced_memory()[1] < 15_000_000
    finally:
        tracemalloc.stop()


# ---- an output that is there ----


@pytest.mark.parametrize("name", ["shard_0001.bin", "shard_0001.idx", "metadata.json"])
@pytest.mark.parametrize("has_documents", [False, True])
def test_a_damaged_output_is_not_the_output(tmp_path: Path, name: str, has_documents: bool) -> None:
    with IndexedDatasetBuilder(tmp_path / "web") as builder:
        builder.add_documents(np.arange(1000), np.full(100, 10))
    options = {"input_list": [(1, tmp_path / "web")], "num_shards": 3, "seq_len": 10}
    options["documents"] = has_documents
    output = tmp_path / "output"
    for damage in ("cut", "gone"):
        shuffle(None, output, **options)
        assert shuffle(None, output, **options).plan == "none"
        if damage == "cut":
            os.truncate(output / name, 40)
        else:
            (output / name).unlink()
        with pytest.raises(ConfigError, match=r"output is not empty"):
            shuffle(None, output, **options)
        shutil.rmtree(output)


# ---- the probe ----


def test_a_probe_of_tiny_sequences_takes_little_memory(tmp_path: Path) -> None:
    np.zeros(8_000_000, np.uint16).tofile(tmp_path / "web.bin")
    items = sequence_items(
        [(1, str(tmp_path / "web.bin"))], seq_len=1, dtype="uint16", folder=tmp_path
    )
    tracemalloc.start()
    try:
        read_rates(items, mean=2, size=16_000_000)
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()
