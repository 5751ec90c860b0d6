"""verify: with checksums, every damaged byte is found and located."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DataError, IndexedDataset, IndexedDatasetBuilder
from millrace.store import info, publish, verify
from millrace.store.info import BlockHasher
from tests.store.pairs import flip


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten documents of 100 tokens of two bytes, in blocks of 256 bytes."""
    for module in ("millrace.store.info", "millrace.store.checking"):
        monkeypatch.setattr(f"{module}.BLOCK_SIZE", 256)
    with IndexedDatasetBuilder(
        tmp_path / "data", np.uint16, checksums=True, provenance={"from": "here"}
    ) as builder:
        for number in range(10):
            builder.add_document(np.full(100, number), lengths=[60, 40])
    return tmp_path / "data"


def test_a_whole_pair_has_no_problems(prefix: Path) -> None:
    report = verify([prefix])[0]
    assert report.problems == []
    assert report.has_checksums
    sidecar = IndexedDataset(prefix).info()
    assert sidecar is not None
    assert sidecar.provenance == {"from": "here"}
    for one in (prefix, str(prefix)):
        with pytest.raises(ConfigError, match="must be a list"):
            verify(one)  # type: ignore[arg-type]


def test_a_pair_that_is_replaced_meanwhile_is_the_one_that_was_opened(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_and_replace(*arguments: Any, **options: Any) -> Any:
        files = publish.open_pair(*arguments, **options)
        with IndexedDatasetBuilder(prefix, np.uint16, checksums=True) as builder:
            builder.add_document([1, 2, 3])
        return files

    monkeypatch.setattr("millrace.store.checking.open_pair", open_and_replace)
    assert verify([prefix])[0].problems == []


def test_every_flipped_bit_is_found(prefix: Path) -> None:
    for suffix in (".bin", ".idx"):
        path = Path(f"{prefix}{suffix}")
        whole = path.read_bytes()
        for place in range(0, len(whole), 7):
            flip(path, place)
            problems = verify([prefix], threads=1)[0].problems
            assert any(f"{suffix}: block {place // 256} " in text for text in problems), place
            path.write_bytes(whole)
    assert verify([prefix])[0].problems == []


def test_damage_is_located_by_block_sequence_and_document(prefix: Path) -> None:
    flip(Path(f"{prefix}.bin"), 700)  # in block 2: bytes 512 to 767, tokens 256 to 383
    assert verify([prefix])[0].problems == [
        f"{prefix}.bin: block 2 (bytes 512 to 767) is damaged: sequences 4 to 7, documents 2 to 3"
    ]
    flip(Path(f"{prefix}.idx"), 34 + 20 * 4 + 8 * 3)  # the pointer of sequence 3
    problems = "\n".join(verify([prefix])[0].problems)
    assert "sequence 3 has the length 40 and starts at byte" in problems


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{", ""),
        ('"version": 1', '"version": 2'),
        ('"provenance"', '"other"'),
        ("xxh3_64", "md5"),
        ('"block_size": 256', '"block_size": 512'),
        ('"idx"', '"other"'),
        ('"size": 2000', '"size": 2300'),
    ],
)
def test_a_damaged_sidecar_is_a_separate_problem(prefix: Path, old: str, new: str) -> None:
    path = Path(f"{prefix}.info.json")
    text = path.read_text()
    path.write_text(text.replace(old, new))
    assert path.read_text() != text
    (problem,) = verify([prefix])[0].problems
    assert "info.json" in problem
    with pytest.raises(DataError, match=r"info\.json"):
        IndexedDataset(prefix).info()


def test_checksums_do_not_depend_on_the_size_of_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "BLOCK_SIZE", 100)
    data = np.random.default_rng(0).integers(0, 256, 1234).astype(np.uint8)
    sums = []
    for size in (1, 7, 99, 100, 101, 250, 1234):
        hasher = BlockHasher()
        for start in range(0, len(data), size):
            hasher.update(data[start : start + size])
        sums.append(hasher.finish())
    assert all(other == sums[0] for other in sums)
    assert len(sums[0].blocks) == 13


def test_prefixes_that_no_file_can_have_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        builder.add_document([1, 2, 3])
    for name in ("folder.bin", "folder.idx", "folder.info.json"):
        (tmp_path / name).mkdir()
    unreadable = [f"{tmp_path}/none", f"{tmp_path}/folder"]
    prefixes = [*unreadable, f"{file}/x", "x" * 5000, "a\ud800", str(tmp_path / "data")]
    reports = verify(prefixes)
    assert [report.prefix for report in reports] == prefixes
    assert all(report.problems for report in reports[:-1])
    assert any("Is a directory" in problem for problem in reports[1].problems)
    assert not reports[-1].problems
    with pytest.raises(ConfigError, match=r"threads must be .* not 0"):
        verify(prefixes, threads=0)
    with pytest.raises(ConfigError, match=r"prefixes\[[0-9]\] must be a path, not"):
        verify([*prefixes, "a\0b"])
    with pytest.raises(ConfigError, match="must be a path"):
        verify(["a\0b"])
