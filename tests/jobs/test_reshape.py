"""Merging, splitting and converting token files."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DataError, IndexedDataset, IndexedDatasetBuilder
from millrace.jobs import convert, converting, merge, split
from millrace.provenance import OriginsWriter
from millrace.run import DatasetConfig, InstantConfig, build_datasets
from millrace.shuffling import shuffle
from millrace.store import verify
from tests.conftest import write_documents


def write(prefix: Path, seed: int = 0, *, dtype: Any = np.uint16, modes: bool = False) -> None:
    """Documents of zero to three sequences of zero to six tokens."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, dtype, multimodal=modes) as builder:
        for _ in range(random.integers(1, 30)):
            lengths = random.integers(0, 7, random.integers(0, 4)).tolist()
            tokens = random.integers(0, 100, sum(lengths)).astype(dtype)
            kinds = random.integers(0, 3, len(lengths)).tolist() if modes else None
            builder.add_document(tokens, lengths, kinds)


def content(prefix: str | Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("options", [{"documents": 1}, {"documents": 4}, {"num_bytes": 30}])
@pytest.mark.parametrize("checksums", [False, True])
def test_merging_the_shards_of_a_split_restores_the_file(
    tmp_path: Path, modes: bool, options: dict[str, int], checksums: bool
) -> None:
    for seed in range(6):
        source = tmp_path / f"whole{seed}"
        write(source, seed, modes=modes)
        dataset = IndexedDataset(source)
        shards = split(str(source), str(tmp_path / f"s{seed}"), checksums=checksums, **options)
        for shard in shards:
            part = IndexedDataset(shard)
            assert part.num_documents == options.get("documents", part.num_documents) or (
                shard == shards[-1]
            )
            if "num_bytes" in options and part.num_documents > 1:
                assert part.reader.size <= options["num_bytes"]
            assert verify([shard])[0].problems == []
        assert shards[0].endswith("_00000")
        assert sum(IndexedDataset(s).num_documents for s in shards) == dataset.num_documents
        merge(shards, str(tmp_path / "again"), checksums=checksums)
        assert content(tmp_path / "again") == content(source)
        report = verify([tmp_path / "again"])[0]
        assert (report.problems, report.has_checksums) == ([], checksums)


def test_a_merge_may_replace_one_of_its_parts(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2)
    a, b = (IndexedDataset(tmp_path / name) for name in "ab")
    merged = merge([a.prefix, b.prefix], a.prefix)
    assert np.array_equal(merged.tokens, np.concatenate([a.tokens, b.tokens]))


def test_datasets_of_different_dtypes_or_modes_cannot_be_merged(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "wide", 1, dtype=np.int32)
    write(tmp_path / "modes", 1, modes=True)
    for other, message in [("wide", "holds int32, the new file uint16"), ("modes", "has modes")]:
        with pytest.raises(ConfigError, match=message):
            merge([str(tmp_path / "a"), str(tmp_path / other)], str(tmp_path / "all"))
    with pytest.raises(ConfigError, match="nothing to merge"):
        merge([], str(tmp_path / "all"))
    with pytest.raises(DataError, match="not found"):
        merge([str(tmp_path / "a"), str(tmp_path / "none")], str(tmp_path / "all"))
    assert not list(tmp_path.glob("all*"))


def test_a_dtype_can_be_changed_and_changed_back(tmp_path: Path) -> None:
    write(tmp_path / "a", 3)
    convert(str(tmp_path / "a"), str(tmp_path / "wide"), dtype=np.int32, checksums=True)
    wide = IndexedDataset(tmp_path / "wide")
    assert wide.dtype == np.int32
    assert np.array_equal(wide.tokens, IndexedDataset(tmp_path / "a").tokens)
    convert(str(tmp_path / "wide"), str(tmp_path / "back"), dtype=np.uint16)
    assert content(tmp_path / "back") == content(tmp_path / "a")
    write_documents(tmp_path / "big", [[1, 70_000]], np.int32)
    for target in ("small", "small.npy"):
        with pytest.raises(ConfigError, match=r"70000 .*does not fit uint16"):
            convert(str(tmp_path / "big"), str(tmp_path / target), dtype=np.uint16)
    assert not list(tmp_path.glob("small*"))


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_arrays_become_datasets_and_arrays_again(tmp_path: Path, suffix: str) -> None:
    tokens = np.array([5, 6, 0, 7, 0, 0, 8, 9], np.uint16)
    source, target = str(tmp_path / f"in{suffix}"), str(tmp_path / "data")
    (np.save if suffix == ".npy" else lambda path, array: array.tofile(path))(source, tokens)
    options: dict[str, Any] = {} if suffix == ".npy" else {"source_dtype": np.uint16}
    convert(source, target, **options)
    assert [s.tolist() for s in IndexedDataset(target)] == [tokens.tolist()]
    convert(source, target, document_end=0, **options)
    assert [s.tolist() for s in IndexedDataset(target)] == [[5, 6, 0], [7, 0], [0], [8, 9]]
    assert IndexedDataset(target).num_documents == 4
    back = str(tmp_path / f"back{suffix}")
    convert(target, back, dtype=np.int32)
    again = np.load(back) if suffix == ".npy" else np.fromfile(back, np.int32)
    assert again.dtype == np.int32
    assert np.array_equal(again, tokens)


def test_rows_become_documents(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.uint32).reshape(3, 4)
    np.save(tmp_path / "rows.npy", rows)
    convert(str(tmp_path / "rows.npy"), str(tmp_path / "data"))
    dataset = IndexedDataset(tmp_path / "data")
    assert dataset.dtype == np.int32  # the format has no uint32
    assert [s.tolist() for s in dataset] == rows.tolist()
    assert dataset.num_documents == 3


def test_documents_longer_than_a_chunk_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.random.default_rng(0).integers(0, 9, 200).astype(np.uint16)
    tokens[60:140] = 5
    np.save(tmp_path / "in.npy", tokens)
    convert(str(tmp_path / "in.npy"), str(tmp_path / "a"), document_end=0)
    monkeypatch.setattr(converting, "_CHUNK", 7)
    monkeypatch.setattr(converting, "_MAX_LENGTH", 1000)
    convert(str(tmp_path / "in.npy"), str(tmp_path / "b"), document_end=0)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, tokens=[1, 2])
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("a.npy", b"", {}, "not an array of tokens|cannot be read"),
        ("a.npy", b"garbage" * 9, {}, "not an array of tokens"),
        ("a.npy", archive(), {}, r"not an array of tokens.*zip archive \(.npz\), save"),
        ("a.bin", b"123", {"source_dtype": "u2"}, "not a multiple of 2"),
        ("a.bin", b"1234", {}, "--source-dtype"),
        ("a.bin", b"\0" * 8, {"source_dtype": "f4"}, "integers in one or two dimensions"),
        ("a", b"", {}, "not found"),
        ("none.npy", None, {}, "cannot be read"),
    ],
)
def test_a_source_that_is_not_an_array_of_tokens_is_refused(
    tmp_path: Path, name: str, data: bytes | None, options: dict[str, Any], message: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises((ConfigError, DataError), match=message):
        convert(str(tmp_path / name), str(tmp_path / "out"), **options)
    assert not list(tmp_path.glob("out*"))


# ---- damage, and leftovers ----


@pytest.mark.parametrize(
    ("table", "entry", "value"),
    [(12, 4, 2), (12, 4, 7), (12, 5, -1), (12, 9, 11), (12, 1, 2**62), (4, 5, 1), (4, 0, 8)],
)
def test_damaged_entries_are_not_copied(tmp_path: Path, table: int, entry: int, value: int) -> None:
    """Of documents, or of pointers: their table starts after so many bytes for each sequence."""
    write_documents(tmp_path / "bad", [[number] for number in range(10)], np.int32)
    with open(tmp_path / "bad.idx", "r+b") as file:
        file.seek(34 + 10 * table + 8 * entry)
        file.write(value.to_bytes(8, "little", signed=True))
    for work in (
        lambda: merge([tmp_path / "bad"], tmp_path / "out", checksums=True),
        lambda: split(tmp_path / "bad", tmp_path / "out", documents=3, checksums=True),
        lambda: split(tmp_path / "bad", tmp_path / "out", num_bytes=8),
        lambda: convert(tmp_path / "bad", tmp_path / "out", dtype=np.int64, checksums=True),
        lambda: convert(tmp_path / "bad", tmp_path / "out.npy"),
    ):
        with pytest.raises(DataError, match=r"The index is damaged|should start at byte"):
            work()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.bin", "bad.idx"]


def test_a_second_split_leaves_no_shard_of_the_first(tmp_path: Path) -> None:
    write_documents(tmp_path / "data", [[number] for number in range(10)], np.int32)
    split(tmp_path / "data", tmp_path / "shard", documents=1, checksums=True)
    others = ["shard_x.idx", "shard_000005.idx", "shard_00005_text.idx", "my_shard_00005.idx"]
    for name in others:
        (tmp_path / name).write_bytes(b"another file")
    assert len(list(tmp_path.glob("shard_0000[0-9].*"))) == 30
    shards = split(tmp_path / "data", tmp_path / "shard", documents=5, checksums=False)
    left = {path.name for path in tmp_path.glob("*shard*")}
    assert left == {f"shard_0000{n}.{suffix}" for n in (0, 1) for suffix in ("bin", "idx")} | {
        *others
    }
    assert len(merge(shards, tmp_path / "whole")) == 10


DYING_SPLIT = """
import os, sys
from millrace.jobs import split
fatal, left, data, shard = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
late = shard + "_00002.", shard + "_00003."
def hook(event, arguments):
    global left
    if event == fatal and str(arguments[0]).startswith(late):
        left -= 1
        if left < 0:
            os._exit(9)
sys.addaudithook(hook)
split(data, shard, documents=2)
"""


def die_splitting(*arguments: object) -> None:
    """Splits into shards of two documents, up to some event at shard 2 or 3."""
    command = [sys.executable, "-c", DYING_SPLIT, *map(str, arguments)]
    assert subprocess.run(command).returncode == 9


@pytest.mark.parametrize("step", range(8))
def test_a_killed_split_leaves_no_tokens_without_an_index(tmp_path: Path, step: int) -> None:
    """Another tool would take them for raw tokens, and the next split would not know them."""
    write_documents(tmp_path / "data", [[number] for number in range(4)], np.int32)
    split(tmp_path / "data", tmp_path / "shard", documents=1, checksums=True)
    die_splitting("os.remove", step, tmp_path / "data", tmp_path / "shard")
    names = {path.name for path in tmp_path.glob("shard*")}
    assert {f"{name[:-4]}.idx" for name in names if name.endswith(".bin")} <= names
    split(tmp_path / "data", tmp_path / "shard", documents=2)
    assert {path.name for path in tmp_path.glob("shard*")} == {
        f"shard_0000{number}.{suffix}"
        for number in (0, 1)
        for suffix in ("bin", "idx", "info.json")
    }


def test_a_split_refuses_to_lose_pairs_of_others(tmp_path: Path) -> None:
    """Of another verb, and without a sidecar; among the new shards, and beyond them."""
    write_documents(tmp_path / "data", [[number] for number in range(4)], np.int32)
    split(tmp_path / "data", tmp_path / "shard", documents=1)
    for number, checksums in ((1, True), (3, False)):
        pair = tmp_path / f"shard_{number:05}"
        merge([tmp_path / "data"], pair, checksums=checksums)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(ConfigError, match=f"or remove {pair}, .* Give another"):
            split(tmp_path / "data", tmp_path / "shard", documents=2)
        assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        for path in tmp_path.glob(f"{pair.name}.*"):
            path.unlink()


def test_a_split_does_not_remove_its_source(tmp_path: Path) -> None:
    write_documents(tmp_path / "shard_00007", [[1]], np.int32)
    split(tmp_path / "shard_00007", tmp_path / "shard", documents=1)
    assert len(IndexedDataset(tmp_path / "shard_00007")) == 1


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", [None, "int32"])
def test_an_eod_token_is_appended_to_documents_that_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: bool, dtype: str | None
) -> None:
    monkeypatch.setattr(converting, "_CHUNK", 40)
    eod = 70 if dtype is None else 70_000
    for seed in range(4):
        write(tmp_path / "a", seed, modes=modes)
        convert(tmp_path / "a", tmp_path / "b", append_eod=eod, dtype=dtype)
        source, target = IndexedDataset(tmp_path / "a"), IndexedDataset(tmp_path / "b")
        assert verify([target.prefix])[0].problems == []
        assert target.dtype == np.dtype(dtype or source.dtype)
        assert target.num_documents == source.num_documents
        assert len(target) == len(source)
        if modes:
            assert np.array_equal(target.sequence_modes, source.sequence_modes)
        for number in range(source.num_documents):
            tokens = source.document(number).tolist()
            end = [eod] if tokens and tokens[-1] != eod else []
            assert target.document(number).tolist() == tokens + end
        convert(tmp_path / "b", tmp_path / "c", append_eod=eod)
        assert content(tmp_path / "c") == content(tmp_path / "b")  # each document has it


def test_an_eod_token_and_origins_are_kept_together(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16, checksums=True) as builder:
        builder.add_documents([1, 2, 3], [2, 0, 1])
    with OriginsWriter(tmp_path / "a") as writer:
        writer.add(["web.jsonl"], [0, 0, 0], [1, 2, 3], [0, 9, 18], ["x", None, "z"])
    convert(tmp_path / "a", tmp_path / "b", append_eod=3)
    converted = IndexedDataset(tmp_path / "b")
    assert converted.tokens.tolist() == [1, 2, 3, 3]
    assert converted.origin(2) == IndexedDataset(tmp_path / "a").origin(2)
    convert(tmp_path / "a", tmp_path / "b", append_eod=3, origins=False)
    assert IndexedDataset(tmp_path / "b").origin(2) is None


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("b", {"append_eod": 70_000}, "70000.* uint16"),
        ("b", {"append_eod": 2**63}, "append_eod must be between"),
        ("b.npy", {"append_eod": 1}, "append_eod needs documents"),
    ],
)
def test_an_eod_token_that_cannot_be_appended_is_refused(
    tmp_path: Path, target: str, options: dict[str, Any], message: str
) -> None:
    write(tmp_path / "a")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "a", tmp_path / target, **options)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("earlier", [None, 3])  # documents per shard of an earlier split
def test_the_shards_of_a_killed_split_are_refused(tmp_path: Path, earlier: int | None) -> None:
    """They would hold a part of the documents, or some of them twice."""
    write_documents(tmp_path / "data", [[number] * 9 for number in range(12)], np.int32)
    folder, prefix = tmp_path / "shards", tmp_path / "shards" / "s"
    folder.mkdir()
    if earlier is not None:
        split(tmp_path / "data", prefix, documents=earlier)
    die_splitting("os.rename", 0, tmp_path / "data", prefix)
    shards = sorted(str(path)[:-4] for path in folder.glob("s_*.idx"))
    assert len(shards) == (2 if earlier is None else 4)
    sources = {str(number): {"prefix": shard} for number, shard in enumerate(shards)}
    common: dict[str, Any] = {"sequence_length": 4, "num_samples": (1, 0, 0), "seed": 1}
    for attempt in (
        lambda: merge(shards, tmp_path / "whole"),
        lambda: shuffle(folder, tmp_path / "out", seq_len=4, num_shards=1, seed=1, workers=1),
        lambda: build_datasets(DatasetConfig(blend=(shards, None), split="1,0,0", **common)),
        lambda: build_datasets(InstantConfig(sources=sources, alpha=1.0, **common)),
    ):
        with pytest.raises(DataError, match="Run the same split again"):
            attempt()
    assert all("Run the same" in report.problems[0] for report in verify(shards))
    shards = split(tmp_path / "data", prefix, documents=2)
    assert [report.problems for report in verify(shards)] == [[]] * 6
    assert content(merge(shards, tmp_path / "whole").prefix) == content(tmp_path / "data")
    merge(shards[1:3], tmp_path / "whole")  # selected on purpose
