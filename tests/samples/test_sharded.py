"""ShardedDataset: sample n is sequence n of the folder, wherever a dataset is taken."""

import functools
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from millrace import (
    BlendedDataset,
    ConfigError,
    DataError,
    GPTDataset,
    IndexedDataset,
    Loader,
    ResumeError,
    ShardedDataset,
    ViewChangeWarning,
    _native,
)
from millrace.feed import BatchForm
from millrace.samples.fields import ALL_FIELDS, FIELDS, SampleOptions
from tests.conftest import write_documents as write_pair
from tests.feed.helpers import FORKS, is_true_in_child
from tests.kernels import reference
from tests.shard_folders import (
    make_sequences,
    write_documents,
    write_like_the_script,
    write_sequences,
)
from tests.store.pairs import output_of

ACCESS = ("mmap", "file")


@pytest.fixture
def sequences() -> NDArray[Any]:
    return make_sequences(23, 8)


@pytest.fixture
def folder(tmp_path: Path, sequences: NDArray[Any]) -> Path:
    """23 sequences of 8 tokens in four shards."""
    write_sequences(tmp_path / "out", sequences, num_shards=4)
    return tmp_path / "out"


def rows_of(tokens: NDArray[Any], **options: Any) -> dict[str, NDArray[Any]]:
    """Batches of sequences by the slow model: labels shifted by one, the last one masked."""
    count, length = tokens.shape
    options = {"sequence_length": length, "add_extra_token": False, **options}
    ends = length * np.arange(1, count + 1)
    arrays = reference.fill_rows(tokens.astype(np.int64).ravel(), ends, SampleOptions(**options))
    return dict(zip(FIELDS, arrays, strict=True))


def assert_equal(actual: Any, expected: Any) -> None:
    assert [*actual] == [*expected]
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32])
def test_sample_n_is_sequence_n(tmp_path: Path, access: Any, dtype: Any) -> None:
    sequences = make_sequences(23, 8, dtype)
    write_sequences(tmp_path / "out", sequences, num_shards=4)
    for path in (tmp_path / "out").glob("*.idx"):
        path.unlink()  # they are not read
    dataset = ShardedDataset(tmp_path / "out", access=access)
    assert len(dataset) == 23
    assert dataset.prefix == str(tmp_path / "out")
    assert dataset.file_dtype == (np.int32 if dtype == np.uint32 else dtype)
    stored = dataset.file_dtype
    assert repr(dataset.dataset) == f"Shards('{dataset.prefix}': 184 tokens, {stored})"
    assert dataset.metadata.shard_sizes == [6, 6, 6, 5]
    assert_equal(dataset.batch(np.arange(23)), rows_of(sequences))
    numbers = [22, 0, 5, 6, 5, 11, 12, 17, 18]
    assert_equal(dataset.batch(numbers), rows_of(sequences[numbers]))
    assert_equal(dataset.batch([]), rows_of(sequences[:0]))
    tokens, ends = dataset.tokens([3, 20]).tokens, dataset.tokens([3, 20]).ends
    assert tokens.tolist() == [*sequences[3].tolist(), *sequences[20].tolist()]
    assert ends.tolist() == [8, 16]
    assert dataset[-1]["tokens"].tolist() == sequences[-1].tolist()
    spans = dataset.spans([7, 3])
    assert [column.tolist() for column in spans] == [[7, 3], [0, 0], [8, 8], [0, 1, 2]]


@settings(max_examples=40, deadline=None)
@given(
    total=st.integers(1, 40),
    seq_len=st.sampled_from((1, 2, 8, 33)),
    num_shards=st.integers(1, 6),
    eod=st.integers(0, 5),
    flags=st.tuples(st.booleans(), st.booleans()),
    access=st.sampled_from(ACCESS),
    data=st.data(),
)
def test_random_folders(
    tmp_path_factory: pytest.TempPathFactory,
    total: int,
    seq_len: int,
    num_shards: int,
    eod: int,
    flags: tuple[bool, bool],
    access: Any,
    data: Any,
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    sequences = make_sequences(total, seq_len, np.uint16, seed=total) % 9
    options = {"eod_token": eod, "reset_position_ids": flags[0], "eod_mask_loss": flags[1]}
    write_sequences(folder, sequences, num_shards)
    dataset = ShardedDataset(folder, access=access, **options)  # type: ignore[arg-type]
    numbers = data.draw(st.lists(st.integers(0, total - 1), max_size=12))
    assert_equal(dataset.batch(numbers), rows_of(sequences[numbers], **options))
    # The same as a GPT dataset with an order in Python over all shards' tokens in one file.
    write_pair(folder / "whole", sequences)
    own = SampleOptions(sequence_length=seq_len, add_extra_token=False, **options)  # type: ignore[arg-type]
    whole = GPTDataset(IndexedDataset(folder / "whole"), order=dataset.order, options=own)
    form = BatchForm(fields=ALL_FIELDS)
    assert_equal(dataset.batch(numbers, form), whole.batch(numbers, form))
    shutil.rmtree(folder)


def test_the_extra_token_is_the_last_label(folder: Path, sequences: NDArray[Any]) -> None:
    batch = ShardedDataset(folder, add_extra_token=True).batch([0, 22])
    assert_equal(ShardedDataset(folder, SampleOptions(sequence_length=7)).batch([0, 22]), batch)
    assert batch["tokens"].tolist() == sequences[[0, 22], :-1].tolist()
    assert batch["labels"].tolist() == sequences[[0, 22], 1:].tolist()
    assert batch["loss_mask"].tolist() == [[1.0] * 7] * 2


def test_a_folder_of_the_common_script(tmp_path: Path, sequences: NDArray[Any]) -> None:
    write_like_the_script(tmp_path / "out", sequences, num_shards=5)
    assert_equal(ShardedDataset(tmp_path / "out").batch(np.arange(23)), rows_of(sequences))
    write_like_the_script(tmp_path / "narrow", sequences.astype(np.uint16))
    dataset = ShardedDataset(tmp_path / "narrow", dtype="uint16")
    assert_equal(dataset.batch(np.arange(23)), rows_of(sequences))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": SampleOptions(sequence_length=8)}, r"have 8 tokens\. Give sequence_length 8"),
        (
            {"options": SampleOptions(sequence_length=7, add_extra_token=False)},
            r"have 8 tokens\. Give sequence_length 8 without",
        ),
        ({"options": SampleOptions(sequence_length=7), "eod_token": 3}, "one of the two"),
        ({"options": {"sequence_length": 8}}, "must be SampleOptions"),
        ({"reset_position_ids": True}, "give eod_token"),
        ({"access": "ram"}, "access must be one of mmap, file"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardedDataset(folder, **options)


def test_a_folder_of_documents_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "out", [[[1, 2, 3], [4]], [[5, 6]]])
    with pytest.raises(ConfigError) as caught:
        ShardedDataset(tmp_path / "out")
    assert "3 documents of different lengths" in str(caught.value)
    assert f"IndexedDataset('{tmp_path}/out/shard_0000')" in str(caught.value)
    assert IndexedDataset(tmp_path / "out/shard_0001")[0].tolist() == [5, 6]


def test_a_folder_without_sequences_is_refused(tmp_path: Path) -> None:
    write_sequences(tmp_path / "empty", make_sequences(0, 8))
    with pytest.raises(DataError, match="has no sequences"):
        ShardedDataset(tmp_path / "empty")


# ---- files that change ----


@pytest.mark.parametrize("access", ACCESS)
def test_an_open_folder_keeps_its_shards(
    folder: Path, sequences: NDArray[Any], access: Any
) -> None:
    dataset = ShardedDataset(folder, access=access)
    pickled = pickle.dumps(dataset)
    assert_equal(pickle.loads(pickled).batch([4, 19]), rows_of(sequences[[4, 19]]))
    shutil.rmtree(folder)
    assert_equal(dataset.batch(np.arange(23)), rows_of(sequences))
    with pytest.raises(DataError):
        pickle.loads(pickled)
    write_sequences(folder, sequences + 1, num_shards=4)
    with pytest.raises(DataError, match="holds other data than the dataset that was pickled"):
        pickle.loads(pickled)
    shutil.rmtree(folder)
    write_sequences(folder, sequences, num_shards=2)  # the same sequences, divided differently
    assert_equal(pickle.loads(pickled).batch([4, 19]), rows_of(sequences[[4, 19]]))


def test_a_pickle_does_not_open_where_the_metadata_were_changed(tmp_path: Path) -> None:
    """The same files, read as sequences of another length, would be other samples."""
    write_sequences(tmp_path / "out", make_sequences(12, 8), num_shards=2)
    path = tmp_path / "out" / "metadata.json"
    text = path.read_text()
    pickled = pickle.dumps(ShardedDataset(tmp_path / "out"))
    longer = {"seq_len": 16, "total_sequences": 6, "shard_sizes": [3, 3], "domain_stats": {"a": 6}}
    path.write_text(json.dumps(json.loads(text) | longer))
    with pytest.raises(DataError, match="holds other data than the dataset that was pickled"):
        pickle.loads(pickled)
    path.write_text(text)
    assert len(pickle.loads(pickled)) == 12


@pytest.mark.parametrize("access", ACCESS)
def test_the_folder_of_a_cut_shard_is_named_when_it_is_pickled(folder: Path, access: Any) -> None:
    dataset = ShardedDataset(folder, access=access)
    os.truncate(folder / "shard_0001.bin", 0)
    with pytest.raises(DataError, match=rf"{folder}.*(shorter|cut short)"):
        pickle.dumps(dataset)


_FEW_DESCRIPTORS = """
import resource, sys
import numpy as np
from millrace import Loader, ShardedDataset

resource.setrlimit(resource.RLIMIT_NOFILE, (110, 110))
dataset = ShardedDataset(sys.argv[1], access=sys.argv[2])
with Loader(dataset, micro_batch_size=10, threads=8, prefetch=8) as loader:
    tokens = np.concatenate([batch["tokens"] for batch in loader])
print(np.array_equal(tokens, np.fromfile(sys.argv[3], np.int64).reshape(tokens.shape)))
"""


@pytest.mark.parametrize("access", ACCESS)
def test_many_shards_are_read_with_few_descriptors(tmp_path: Path, access: str) -> None:
    sequences = make_sequences(300, 8)
    write_sequences(tmp_path / "out", sequences, num_shards=150)
    sequences.astype(np.int64).tofile(tmp_path / "expected")
    arguments = tmp_path / "out", access, tmp_path / "expected"
    assert output_of(_FEW_DESCRIPTORS, *arguments) == "True\n"


# ---- a full citizen ----


def test_the_state_tells_data_apart(folder: Path, sequences: NDArray[Any]) -> None:
    loader = Loader(ShardedDataset(folder), micro_batch_size=2)
    next(loader)
    state = loader.state_dict()
    copy = folder.parent / "copy"
    write_sequences(copy, sequences, num_shards=2)
    same = Loader(ShardedDataset(copy), micro_batch_size=1)
    same.load_state_dict(state)
    assert next(same)["tokens"].tolist() == sequences[[2]].tolist()
    masked = Loader(ShardedDataset(copy, eod_token=0, eod_mask_loss=True), micro_batch_size=2)
    with pytest.warns(ViewChangeWarning, match="eod_mask_loss"):
        masked.load_state_dict(state)
    for name, other in {
        "content": sequences[::-1],
        "num_samples": sequences[:-1],
        "sequence_length": sequences.reshape(-1, 4),
    }.items():
        write_sequences(folder.parent / name, np.ascontiguousarray(other))
        with pytest.raises(ResumeError, match=name):
            Loader(ShardedDataset(folder.parent / name), micro_batch_size=2).load_state_dict(state)
    shorter = ShardedDataset(folder, add_extra_token=True)
    with pytest.raises(ResumeError, match="add_extra_token"):
        Loader(shorter, micro_batch_size=2).load_state_dict(state)


def test_a_blend_reads_it_in_one_call_of_the_core(
    folder: Path, sequences: NDArray[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path / "text", [np.arange(100, 180)])
    options = SampleOptions(sequence_length=8, add_extra_token=False)
    gpt = GPTDataset(IndexedDataset(tmp_path / "text"), seed=1, options=options)
    sharded = ShardedDataset(folder, options)
    blend = BlendedDataset([sharded, gpt], [0.5, 0.5], 20)
    calls = []

    def counted(name: str, function: Any, *arguments: Any) -> Any:
        calls.append(name)
        return function(*arguments)

    for name in ("gather_samples", "gather_tokens"):
        call = functools.partial(counted, name, getattr(_native, name))
        monkeypatch.setattr(_native, name, call)
    for dataset in (blend, BlendedDataset([blend])):  # also a blend in a blend
        calls.clear()
        dataset.batch(np.arange(20))
        dataset.tokens(np.arange(20))
        assert calls == ["gather_samples", "gather_tokens"]


@FORKS
@pytest.mark.parametrize("access", ACCESS)
def test_a_forked_process_reads_it(folder: Path, sequences: NDArray[Any], access: Any) -> None:
    dataset, expected = ShardedDataset(folder, access=access), sequences[[0, 22]]
    dataset.batch([3])
    assert is_true_in_child(lambda: np.array_equal(dataset.batch([0, 22])["tokens"], expected))
