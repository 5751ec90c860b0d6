"""ShardedDataset: sample n is sequence n of the folder, wherever a dataset is taken."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from millrace import (
    BlendedDataset,
    ConfigError,
    CyclicSampler,
    DataError,
    GPTDataset,
    IndexedDataset,
    Loader,
    LossRanges,
    ResumeError,
    ShardedDataset,
    TransformedDataset,
    ViewChangeWarning,
    _native,
)
from millrace.feed import BatchForm
from millrace.options import SampleOptions
from millrace.samples.fields import ALL_FIELDS
from millrace.testing import assert_resumes
from tests.conftest import write_documents as write_pair
from tests.shard_folders import (
    make_sequences,
    write_documents,
    write_like_the_script,
    write_sequences,
)

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
    """Batches of sequences, by the plain rule: labels shifted by one, the last one masked."""
    eod = options.get("eod_token")
    tokens = tokens.astype(np.int64)
    labels = np.roll(tokens, -1, axis=1)
    labels[:, -1] = 0
    loss_mask = np.ones(tokens.shape, np.float32)
    position_ids = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    if options.get("eod_mask_loss"):
        loss_mask[tokens == eod] = 0
    loss_mask[:, -1] = 0
    if options.get("reset_position_ids"):
        for row, ids in zip(tokens, position_ids, strict=True):
            for place in np.flatnonzero(row[:-1] == eod):
                ids[place + 1 :] = np.arange(len(row) - place - 1)
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
    }


def assert_equal(actual: Any, expected: Any) -> None:
    assert [*actual] == [*expected]
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32])
def test_sample_n_is_sequence_n(tmp_path: Path, access: Any, dtype: Any) -> None:
    sequences = make_sequences(23, 8, dtype)
    write_sequences(tmp_path / "out", sequences, num_shards=4)
    dataset = ShardedDataset(tmp_path / "out", access=access)
    assert len(dataset) == 23
    assert dataset.file_dtype == (np.int32 if dtype == np.uint32 else dtype)
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
    assert batch["tokens"].tolist() == sequences[[0, 22], :-1].tolist()
    assert batch["labels"].tolist() == sequences[[0, 22], 1:].tolist()
    assert batch["loss_mask"].tolist() == [[1.0] * 7] * 2


def test_a_folder_of_the_common_script(tmp_path: Path, sequences: NDArray[Any]) -> None:
    write_like_the_script(tmp_path / "out", sequences, num_shards=5)
    assert_equal(ShardedDataset(tmp_path / "out").batch(np.arange(23)), rows_of(sequences))
    write_like_the_script(tmp_path / "narrow", sequences.astype(np.uint16))
    with pytest.raises(DataError, match=r"has 128 bytes; 8 sequences of 8 tokens \(uint32\)"):
        ShardedDataset(tmp_path / "narrow")
    dataset = ShardedDataset(tmp_path / "narrow", dtype="uint16")
    assert_equal(dataset.batch(np.arange(23)), rows_of(sequences))


def test_no_index_is_read(folder: Path, sequences: NDArray[Any]) -> None:
    for path in folder.glob("*.idx"):
        path.unlink()
    assert_equal(ShardedDataset(folder).batch([1, 9]), rows_of(sequences[[1, 9]]))


# ---- what is refused ----


def test_numbers_outside_are_refused(folder: Path) -> None:
    dataset = ShardedDataset(folder)
    for numbers in ([-1], [23], [0, 2**40]):
        with pytest.raises(IndexError, match="the dataset has 0 to 22"):
            dataset.batch(numbers)
        with pytest.raises(IndexError, match="the dataset has 0 to 22"):
            dataset.tokens(numbers)
    with pytest.raises(IndexError, match="there is no sample 23"):
        dataset[23]
    with pytest.raises(ConfigError, match="a whole number"):
        dataset.batch([0.5])


def test_options_that_do_not_fit_are_refused(folder: Path) -> None:
    for options in (
        SampleOptions(sequence_length=8),
        SampleOptions(sequence_length=7, add_extra_token=False),
    ):
        with pytest.raises(ConfigError, match=r"have 8 tokens\. Give sequence_length 8 without"):
            ShardedDataset(folder, options)
    ShardedDataset(folder, SampleOptions(sequence_length=7))
    with pytest.raises(ConfigError, match="one of the two"):
        ShardedDataset(folder, SampleOptions(sequence_length=7), eod_token=3)
    with pytest.raises(ConfigError, match="must be SampleOptions"):
        ShardedDataset(folder, {"sequence_length": 8})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give eod_token"):
        ShardedDataset(folder, reset_position_ids=True)
    with pytest.raises(ConfigError, match="access is 'ram'"):
        ShardedDataset(folder, access="ram")  # type: ignore[arg-type]


def test_a_folder_of_documents_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "out", [[[1, 2, 3], [4]], [[5, 6]]])
    with pytest.raises(ConfigError) as caught:
        ShardedDataset(tmp_path / "out")
    assert "3 documents of different lengths" in str(caught.value)
    assert f"IndexedDataset('{tmp_path}/out/shard_0000')" in str(caught.value)
    assert IndexedDataset(tmp_path / "out/shard_0001")[0].tolist() == [5, 6]


def test_missing_folders_and_shards_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="the folder does not exist"):
        ShardedDataset(folder / "nothing")
    (folder / "shard_0002.bin").unlink()
    with pytest.raises(
        DataError, match=r"shard_0002\.bin is missing: restore it, or shuffle again"
    ):
        ShardedDataset(folder)


def test_a_folder_without_sequences_is_refused(tmp_path: Path) -> None:
    write_sequences(tmp_path / "out", make_sequences(0, 8))
    with pytest.raises(DataError, match="has no sequences"):
        ShardedDataset(tmp_path / "out")


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
    with pytest.raises(DataError, match="holds other data than the shards that were pickled"):
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
    with pytest.raises(DataError, match="holds other data than the shards that were pickled"):
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
    command = [sys.executable, "-c", _FEW_DESCRIPTORS, tmp_path / "out", access]
    result = subprocess.run(
        [*command, tmp_path / "expected"], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


# ---- a full citizen ----


def read_in_child(dataset: ShardedDataset, queue: Any) -> None:
    queue.put(dataset.batch([0, 22])["tokens"].tolist())


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_other_processes_read_it(folder: Path, sequences: NDArray[Any], method: str) -> None:
    dataset = ShardedDataset(folder)
    dataset.batch([3])
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=read_in_child, args=(dataset, queue))
    child.start()
    assert queue.get(timeout=60) == sequences[[0, 22]].tolist()
    child.join()


@pytest.mark.parametrize("access", ACCESS)
def test_it_resumes_at_any_step(folder: Path, access: Any) -> None:
    dataset = ShardedDataset(folder, access=access)
    assert assert_resumes(lambda: Loader(dataset, micro_batch_size=3)) == 7


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
    parts = [sharded, gpt]
    expected = [
        parts[d][int(n)]
        for d, n in zip(blend.dataset_index, blend.dataset_sample_index, strict=True)
    ]
    calls = []
    for name in ("gather_samples", "gather_tokens"):
        call = functools.partial(_counted, calls, name, getattr(_native, name))
        monkeypatch.setattr(_native, name, call)
    for dataset in (blend, BlendedDataset([blend])):  # also a blend in a blend
        calls.clear()
        batch = dataset.batch(np.arange(20))
        for row, sample in enumerate(expected):
            for name, array in sample.items():
                np.testing.assert_array_equal(batch[name][row], array)
        tokens = dataset.tokens(np.arange(20)).tokens
        assert tokens.tolist() == np.concatenate([one["tokens"] for one in expected]).tolist()
        assert calls == ["gather_samples", "gather_tokens"]


def _counted(calls: list[str], name: str, function: Any, *arguments: Any) -> Any:
    calls.append(name)
    return function(*arguments)


def test_it_blends_with_datasets_of_other_options(
    folder: Path, sequences: NDArray[Any], tmp_path: Path
) -> None:
    write_pair(tmp_path / "text", [np.arange(100, 181)])
    gpt = GPTDataset(IndexedDataset(tmp_path / "text"), seed=1, sequence_length=8)
    blend = BlendedDataset([ShardedDataset(folder), gpt], [0.5, 0.5], 20)
    batch = blend.batch(np.arange(20))
    rows = np.flatnonzero(blend.dataset_index == 0)
    assert batch["tokens"][rows].tolist() == sequences[: len(rows)].tolist()
    assert np.all(batch["loss_mask"][rows, -1] == 0)
    assert np.all(batch["loss_mask"][blend.dataset_index == 1] == 1)


def test_ranks_and_the_cyclic_sampler_draw_each_sequence_once(
    folder: Path, sequences: NDArray[Any]
) -> None:
    dataset = ShardedDataset(folder)
    tokens = []
    for rank in range(2):
        sampler = CyclicSampler(
            len(dataset), micro_batch_size=1, data_parallel_rank=rank, data_parallel_size=2
        )
        with Loader(dataset, sampler=sampler) as loader:
            tokens += [next(loader)["tokens"][0].tolist() for _ in range(11)]
    assert len({tuple(row) for row in tokens}) == 22
    assert {tuple(row) for row in tokens} <= {tuple(row) for row in sequences.tolist()}


def test_ids_outside_the_vocabulary_are_named(folder: Path, sequences: NDArray[Any]) -> None:
    bad = sequences.copy()
    bad[13, 5] = 77
    write_sequences(folder, bad, num_shards=4)
    form = BatchForm(vocab_size=60)
    for access in ACCESS:
        dataset = ShardedDataset(folder, access=access)
        dataset.batch([12, 14], form)
        with pytest.raises(DataError, match=r"sample 13: .*token id 77 is outside"):
            dataset.batch([12, 13], form)


def test_transforms_take_it(folder: Path, sequences: NDArray[Any]) -> None:
    dataset = ShardedDataset(folder)
    masked = TransformedDataset(dataset, [LossRanges(dataset, [(4, 2, 5)])])
    batch = masked.batch([3, 4])
    assert batch["tokens"].tolist() == sequences[[3, 4]].tolist()
    assert batch["loss_mask"].tolist() == [[1] * 7 + [0], [1, 0, 0, 0, 1, 1, 1, 0]]


def test_it_is_named_by_its_folder(folder: Path) -> None:
    assert ShardedDataset(folder).prefix == str(folder)
    assert repr(ShardedDataset(folder).dataset) == (
        f"Shards('{folder}': 4 shards, 23 sequences of 8 tokens, uint32)"
    )
