"""verify of a folder of shards: every changed byte is found, every file is accounted for."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from millrace import IndexedDatasetBuilder
from millrace.shards import verify_shards
from millrace.shards.metadata import read_metadata, write_metadata
from tests.shard_folders import (
    make_sequences,
    write_documents,
    write_like_the_script,
    write_sequences,
)
from tests.store.pairs import flip


def remove_checksums(folder: Path) -> None:
    write_metadata(folder, replace(read_metadata(folder), checksums={}))


def test_a_whole_folder_has_no_problems(folder: Path) -> None:
    counts: list[int] = []
    report = verify_shards(folder, on_bytes=counts.append)
    assert (report.problems, report.notices) == ([], [])
    assert report.has_checksums
    assert report.prefix == str(folder)
    assert sum(counts) == sum(path.stat().st_size for path in folder.glob("shard_*"))
    for threads in (1, 7):
        assert verify_shards(f"{folder}/", threads=threads).problems == []


def test_every_flipped_bit_is_found(folder: Path) -> None:
    for path in sorted(folder.glob("shard_000[12].*")):
        whole = path.read_bytes()
        for place in range(0, len(whole), 9):
            flip(path, place)
            problems = verify_shards(folder, threads=1).problems
            assert any(f"{path} is damaged: its checksum is" in text for text in problems), place
            path.write_bytes(whole)
    assert verify_shards(folder).problems == []


def test_every_change_of_the_metadata_is_found(folder: Path) -> None:
    """Also one of a seed or a name, which nothing else in the folder contradicts."""
    path = folder / "metadata.json"
    text = path.read_bytes()
    for place in range(len(text)):
        flip(path, place)
        assert verify_shards(folder, threads=1).problems, place
        path.write_bytes(text)
    for changed in (
        text.replace(b'"seed": 7', b'"seed": 8'),
        text.replace(b'"web"', b'"wab"'),
        json.dumps(json.loads(text)).encode(),
        text + b"\n",
    ):
        path.write_bytes(changed)
        assert verify_shards(folder).problems == [
            f"{path} was changed since it was written: restore it, or shuffle again"
        ]
    path.write_bytes(text)
    assert verify_shards(folder).problems == []


def test_damage_in_an_index_is_found_without_checksums(folder: Path) -> None:
    remove_checksums(folder)
    assert not verify_shards(folder).has_checksums
    flip(folder / "shard_0001.idx", 34 + 4)  # the length of sequence 1
    (problem,) = verify_shards(folder).problems
    assert "sequence 2 has the length 8 and starts at byte 64; it should start at" in problem


def test_an_index_of_other_sequences_is_found(folder: Path) -> None:
    remove_checksums(folder)
    with IndexedDatasetBuilder(folder / "other", np.int32) as builder:
        builder.add_document(
            np.zeros(24, np.int32), lengths=[8, 8, 8]
        )  # one document of three sequences
    (folder / "other.idx").rename(folder / "shard_0002.idx")
    (folder / "other.bin").unlink()
    problems = verify_shards(folder).problems
    assert len(problems) == 1
    expected = "should have 3 of int32, each of 8 tokens"
    assert f"shard_0002.idx has 1 documents of int32; by metadata.json it {expected}" in problems[0]
    with IndexedDatasetBuilder(folder / "other", np.int32) as builder:
        builder.add_documents(np.zeros(24, np.int32), [8, 9, 7])
    (folder / "other.idx").rename(folder / "shard_0002.idx")
    assert expected in verify_shards(folder).problems[0]
    (folder / "shard_0002.idx").write_bytes(b"MMIDIDX")
    assert "truncated" in verify_shards(folder).problems[0]


def test_all_missing_and_truncated_files_are_named(folder: Path) -> None:
    (folder / "shard_0000.bin").unlink()
    (folder / "shard_0001.idx").unlink()
    (folder / "shard_0001.idx").symlink_to("nowhere")
    path = folder / "shard_0002.bin"
    path.write_bytes(path.read_bytes()[:-1])
    report = verify_shards(folder)
    for text in (
        "shard_0000.bin is missing: restore it",
        "shard_0001.idx is missing",
        "shard_0002.bin has 95 bytes; 3 sequences of 8 tokens (uint32) take 96",
        "shard_0002.bin is damaged: its checksum",
    ):
        assert sum(text in problem for problem in report.problems) == 1, text
    assert len(report.problems) == 4


def test_checksums_that_do_not_fit_the_folder(folder: Path) -> None:
    path = folder / "metadata.json"
    document = json.loads(path.read_text())
    document["checksums"] |= {"shard_0000.origins.parquet": "0" * 16, "../out": "0" * 16}
    path.write_text(json.dumps(document))
    problems = "\n".join(verify_shards(folder).problems)
    assert "shard_0000.origins.parquet is missing, although metadata.json" in problems
    assert "'../out', which is not a name of a file" in problems


def test_files_that_do_not_belong_to_the_folder_are_named(folder: Path) -> None:
    (folder / "shard_0003.bin").write_bytes(b"another shuffle")
    (folder / "README").write_text("what this is")
    (folder / "shuffle.journal").mkdir()
    report = verify_shards(folder)
    assert len(report.problems) == 1
    assert "shard_0003.bin is not one of the 3 shards" in report.problems[0]
    assert any("README does not belong" in text for text in report.notices)
    assert any("shuffle.journal is the journal" in text for text in report.notices)
    assert len(report.notices) == 2


def test_a_folder_of_the_common_script(tmp_path: Path) -> None:
    write_like_the_script(tmp_path / "out", make_sequences(10, 8, np.uint16))
    report = verify_shards(tmp_path / "out", dtype="uint16")
    assert (report.problems, report.notices) == ([], [])
    assert not report.has_checksums
    assert len(verify_shards(tmp_path / "out").problems) == 3
    assert "or of another dtype" in verify_shards(tmp_path / "out").problems[0]
    # Index files are checked if they are there.
    write_sequences(tmp_path / "other", make_sequences(10, 8, np.int32))
    (tmp_path / "other/shard_0000.idx").rename(tmp_path / "out/shard_0000.idx")
    problems = verify_shards(tmp_path / "out", dtype="uint16").problems
    assert "shard_0000.bin has 64 bytes, but its index ends at byte 128" in problems[0]


def test_a_folder_of_documents(tmp_path: Path) -> None:
    write_documents(tmp_path / "out", [[[1, 2, 3], [4]], [[5, 6]]])
    report = verify_shards(tmp_path / "out")
    assert (report.problems, report.notices) == ([], [])
    assert report.has_checksums
    remove_checksums(tmp_path / "out")
    flip(tmp_path / "out/shard_0000.idx", 34 + 8)  # the pointer of sequence 0
    assert "starts at byte 16" in verify_shards(tmp_path / "out").problems[0]
    write_documents(tmp_path / "out", [[[1, 2, 3], [4]], [[5, 6]]])
    with IndexedDatasetBuilder(tmp_path / "out/shard_0001", np.uint16) as builder:
        builder.add_document([5])
        builder.add_document([6])
    problems = verify_shards(tmp_path / "out").problems
    assert "shard_0001.idx has 2 documents of uint16; by metadata.json it should" in problems[0]
    (tmp_path / "out/shard_0001.bin").write_bytes(b"\5\0")
    assert any("truncated" in text for text in verify_shards(tmp_path / "out").problems)
    (tmp_path / "out/shard_0001.bin").unlink()
    problems = verify_shards(tmp_path / "out").problems
    assert any("shard_0001.bin is missing" in text for text in problems)
