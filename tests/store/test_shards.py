"""The metadata of a folder of shards: what does not add up is refused, with file and values."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from millrace import ConfigError, DataError, ShardedDataset
from millrace.shards import Shards
from millrace.shards.metadata import is_shards_folder, read_metadata
from tests.shard_folders import (
    make_sequences,
    write_documents,
    write_like_the_script,
    write_sequences,
)


def change(folder: Path, **values: Any) -> None:
    """Changes fields of the metadata; None removes one."""
    path = folder / "metadata.json"
    document = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def test_metadata_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = {"carry": True, "inputs": [{"domain": "web", "size": 2560}]}
    sequences = write_sequences(tmp_path / "sequences", make_sequences(10, 8), **written)
    documents = write_documents(tmp_path / "documents", [[[1, 2], [3]], [[4, 5, 6]]])
    assert (sequences.has_documents, documents.has_documents) == (False, True)
    assert sequences.token_dtype == np.int32
    for metadata, expected in (
        (sequences, {"seq_len": 8, "total_sequences": 10, "shard_sizes": [4, 3, 3], **written}),
        (documents, {"seq_len": None, "total_documents": 3, "shard_sizes": [2, 1]}),
    ):
        kind = "documents" if metadata.has_documents else "fast"
        folder = tmp_path / ("documents" if metadata.has_documents else "sequences")
        assert read_metadata(folder) == metadata
        document = json.loads((folder / "metadata.json").read_text())
        expected |= {"version": 2, "shuffle_type": f"global_permutation_{kind}"}
        assert document.items() >= expected.items()
        assert {"total_documents", "total_sequences"} - document.keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 1}, "has version 1; version 2 can be read"),
        ({"version": None}, "has version None"),
        ({"shuffle_type": "block_shuffle"}, "not 'block_shuffle'"),
        ({"seq_len": 0}, "seq_len must be a whole number between 1 and 2147483647, not 0"),
        ({"seq_len": 16}, "shard_0000.bin has 128 bytes; 4 sequences of 16 tokens"),
        ({"total_sequences": 11}, "the sum of shard_sizes: 10; total_sequences is 11"),
        ({"num_shards": 4}, "entries of shard_sizes: 3; num_shards is 4"),
        ({"num_shards": 0, "shard_sizes": []}, "num_shards must be a whole number between 1"),
        ({"shard_sizes": [3, 4, 3]}, "shard_0000.bin has 128 bytes; 3 sequences of 8 tokens"),
        ({"shard_sizes": [11, -4, 3]}, "shard_sizes[1] must be a whole number"),
        ({"domain_stats": {"a": 9 * 10**4299, "b": 9 * 10**4299}}, "domain_stats.a"),
        ({"domain_stats": {"web": 9}}, "the sum of domain_stats: 9; total_sequences is 10"),
        ({"dtype": "float32"}, "not 'float32'"),
        ({"dtype": "uint16"}, "take 64. It is too long, or of another dtype"),
    ],
)
def test_metadata_that_do_not_add_up(folder: Path, values: dict[str, Any], message: str) -> None:
    change(folder, **values)
    for read in (read_metadata, ShardedDataset):
        with pytest.raises(DataError) as caught:
            read(folder)
        assert message in str(caught.value)
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_not_metadata(folder: Path, content: bytes) -> None:
    (folder / "metadata.json").write_bytes(content)
    with pytest.raises(DataError, match=r"metadata\.json"):
        read_metadata(folder)


def test_folders_without_metadata(folder: Path) -> None:
    (folder / "metadata.json").unlink()
    for path in (folder, folder / "nothing", folder / "shard_0000.bin"):
        with pytest.raises(
            DataError, match=r"metadata\.json is missing: .* is not the output folder"
        ):
            read_metadata(path)


def test_missing_and_truncated_shards(folder: Path) -> None:
    path = folder / "shard_0001.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-4])
    with pytest.raises(DataError, match=r"shard_0001\.bin has 92 bytes; .* take 96. It is trunc"):
        read_metadata(folder)
    path.unlink()
    (folder / "shard_0002.bin").unlink()
    with pytest.raises(DataError, match=r"shard_0001\.bin is missing: restore it"):
        read_metadata(folder)
    path.mkdir()
    with pytest.raises(DataError, match=r"shard_0001\.bin"):
        Shards(folder)


def test_the_dtype_of_metadata_that_do_not_say_it(tmp_path: Path) -> None:
    write_like_the_script(tmp_path / "out", make_sequences(10, 8, np.uint16))
    metadata = read_metadata(tmp_path / "out", dtype="uint16")
    assert metadata.domain_stats == {"domain_A": 5, "domain_B": 5}
    assert (metadata.dtype, metadata.seed, metadata.permutation) == ("uint16", None, None)
    with pytest.raises(DataError, match="or of another dtype"):
        read_metadata(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"dtype must be one of .*, not 'float32'"):
        read_metadata(tmp_path / "out", dtype="float32")
    write_sequences(tmp_path / "ours", make_sequences(10, 8))
    assert read_metadata(tmp_path / "ours", dtype="uint32").dtype == "uint32"
    with pytest.raises(ConfigError, match=r"dtype is int32, but .* says 'uint32'"):
        read_metadata(tmp_path / "ours", dtype="int32")


def test_a_folder_is_told_from_a_path_prefix(folder: Path) -> None:
    assert is_shards_folder(folder)
    assert is_shards_folder(f"{folder}/")
    assert not is_shards_folder(folder / "shard_0000")
    assert not is_shards_folder(folder / "nothing")
    (folder / "shard_0000").mkdir()  # beside the pair of that name
    assert not is_shards_folder(folder / "shard_0000")


# ---- random damage ----

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 12),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 12), max_size=4),
    st.dictionaries(st.sampled_from(["web", "code", "shard_0000.bin"]), st.integers(-1, 12)),
    st.sampled_from(["uint16", "int32", "uint32", "int64", "global_permutation_documents"]),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "out"
    write_sequences(folder, make_sequences(10, 8, np.int32), distribution={"head": {"a": [1, 2]}})
    return folder


def samples_of(folder: Path) -> list[Any]:
    """All samples of a folder, as values that can be compared."""
    dataset = ShardedDataset(folder)
    batch = dataset.batch(np.arange(len(dataset)))
    return [array.tolist() for array in batch.values()]


def assert_refused_or_equal(whole: Path, text: bytes) -> None:
    path = whole / "metadata.json"
    before = path.read_bytes()
    expected = samples_of(whole)
    error = ""
    try:
        path.write_bytes(text)
        try:
            actual = samples_of(whole)
        except DataError as damage:
            error = str(damage)
    finally:
        path.write_bytes(before)
    # Metadata without a dtype mean uint32, which has the same bytes as int32.
    assert str(whole) in error if error else actual == expected


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_changed_values_are_refused_or_change_nothing(whole: Path, data: Any) -> None:
    document = json.loads((whole / "metadata.json").read_text())
    changed = copy.deepcopy(document)
    for name in data.draw(st.lists(st.sampled_from(sorted(document)), min_size=1, max_size=2)):
        inner = changed.get(name)
        if isinstance(inner, dict) and inner and data.draw(st.booleans()):
            inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(VALUES)
        elif isinstance(inner, list) and inner and data.draw(st.booleans()):
            inner[data.draw(st.integers(0, len(inner) - 1))] = data.draw(VALUES)
        elif data.draw(st.booleans()):
            changed.pop(name, None)
        else:
            changed[name] = data.draw(VALUES)
    assert_refused_or_equal(whole, json.dumps(changed).encode())


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_bytes_are_refused_or_change_nothing(whole: Path, data: Any) -> None:
    text = bytearray((whole / "metadata.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        kind = data.draw(st.sampled_from(("flip", "cut", "repeat")))
        if kind == "flip":
            text[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del text[place : place + data.draw(st.integers(1, 40))]
            text = text or bytearray(b" ")
        else:
            text[place:place] = text[place : place + data.draw(st.integers(1, 40))]
    assert_refused_or_equal(whole, bytes(text))
