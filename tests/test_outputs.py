"""Batches in the forms of trainers, beside the functions that these make them with."""

import ast
import importlib.util
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from millrace import BlendedDataset, ConfigError, DataError, IndexedDataset, Loader
from millrace.feed import BalancedSampler, GPTDataset, TransformedDataset
from millrace.order import PackedOrder
from millrace.outputs import (
    IGNORED,
    FinishedDataset,
    count_targets,
    document_starts,
    mask_blocks,
    megatron_packed,
    megatron_thd,
    padding_free,
    torchtitan,
)
from millrace.samples import TokenBatch
from millrace.torch import MapDataset, to_device, to_tensors
from millrace.torch.ranks import _checksums
from tests.conftest import write_documents

ROW = 16
Documents = list[list[list[int]]]  # of each sample, tokens


@st.composite
def samples(draw: st.DrawFn, row: int = ROW) -> Documents:
    """Samples of documents that fit a row."""
    all_samples = []
    for _ in range(draw(st.integers(1, 4))):
        room, documents = row, []
        for length in draw(st.lists(st.integers(1, row), min_size=1, max_size=8)):
            if length <= room:
                documents.append(
                    draw(st.lists(st.integers(1, 99), min_size=length, max_size=length))
                )
                room -= length
        all_samples.append(documents)
    return all_samples


def batch_of(documents: Documents, trained: Any = None) -> TokenBatch:
    flat = [one for sample in documents for one in sample]
    tokens = np.concatenate(flat)
    starts = np.cumsum([0, *map(len, flat)])[:-1]
    ends = np.cumsum([sum(map(len, sample)) for sample in documents])
    trained = None if trained is None else np.array(trained(tokens))
    return TokenBatch(tokens.astype(np.uint16), ends, trained, starts)


def is_even(tokens: Any) -> Any:
    return tokens % 2 == 0


def targets(documents: Documents, trained: Any = None) -> list[int]:
    """The tokens that are trained on: none of them is the first one of its document."""
    tokens = [token for sample in documents for one in sample for token in one[1:]]
    return [token for token in tokens if trained is None or trained(token)]


@given(documents=samples(), masked=st.booleans())
@settings(deadline=None, max_examples=300)
def test_all_forms_train_on_the_same_targets(documents: Documents, masked: bool) -> None:
    """Shifted by the model, over the whole row, or document by document."""
    trained = is_even if masked else None
    batch, expected = batch_of(documents, trained), targets(documents, trained)
    assert count_targets(batch) == len(expected)
    free = padding_free(batch)
    shifted = free["labels"][0]
    assert shifted[shifted != IGNORED].tolist() == expected
    for arrays in (megatron_packed(batch, sequence_length=ROW), megatron_thd(batch, multiple=4)):
        assert arrays["labels"][arrays["loss_mask"] == 1].tolist() == expected
    rows = torchtitan(batch, sequence_length=ROW)
    assert rows["labels"][rows["labels"] != IGNORED].tolist() == expected


@given(documents=samples(), masked=st.booleans())
@settings(deadline=None, max_examples=300)
def test_one_row_without_padding_is_that_of_the_collator_of_transformers(
    documents: Documents, masked: bool
) -> None:
    from transformers import DataCollatorWithFlattening

    flat = [one for sample in documents for one in sample]
    labels = [[token if not masked or is_even(token) else IGNORED for token in one] for one in flat]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    features = [{"input_ids": one, "labels": own} for one, own in zip(flat, labels, strict=True)]
    expected = collator(features, return_tensors="np")
    actual = padding_free(batch_of(documents, is_even if masked else None))
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        if isinstance(array, int):
            assert actual[name] == array
        else:
            np.testing.assert_array_equal(actual[name], array, strict=True)


@given(documents=samples())
@settings(deadline=None, max_examples=300)
def test_rows_of_megatron_have_the_bounds_of_their_documents(documents: Documents) -> None:
    batch = batch_of(documents)
    arrays = megatron_packed(batch, sequence_length=ROW, pad_token=7)
    for number, sample in enumerate(documents):
        tokens = np.concatenate(sample)
        padding = ROW - len(tokens)
        assert arrays["tokens"][number].tolist() == [*tokens, *[7] * padding]
        bounds = np.cumsum([0, *map(len, sample)])
        bounds[-1] = ROW  # padding belongs to the last document
        cu_seqlens = arrays["cu_seqlens"][number]
        assert cu_seqlens.tolist() == [*bounds, *[ROW] * (ROW + 1 - len(bounds))]
        assert arrays["max_seqlen"][number] == np.diff(bounds).max()
        positions = [place for length in np.diff(bounds) for place in range(length)]
        assert arrays["position_ids"][number].tolist() == positions
    dtypes = {"loss_mask": np.float32, "cu_seqlens": np.int32, "max_seqlen": np.int32}
    assert all(array.dtype == dtypes.get(name, np.int64) for name, array in arrays.items())


@given(documents=samples(), multiple=st.integers(1, 6))
@settings(deadline=None, max_examples=300)
def test_documents_are_padded_to_a_multiple(documents: Documents, multiple: int) -> None:
    flat = [one for sample in documents for one in sample]
    arrays = megatron_thd(batch_of(documents), multiple=multiple, pad_token=7)
    assert arrays["cu_seqlens"].tolist() == np.cumsum([0, *map(len, flat)]).tolist()
    bounds = arrays["cu_seqlens_padded"]
    assert np.all(bounds % multiple == 0)
    for one, start, stop in zip(flat, bounds[:-1], bounds[1:], strict=True):
        padding = stop - start - len(one)
        assert 0 <= padding < multiple
        assert arrays["tokens"][start:stop].tolist() == [*one, *[7] * padding]
        assert arrays["position_ids"][start:stop].tolist() == [*range(stop - start)]
        assert arrays["loss_mask"][start:stop].tolist() == [1] * (len(one) - 1) + [0] * (
            padding + 1
        )
        assert not arrays["padding_mask"][0, start : start + len(one)].any()
        assert arrays["padding_mask"][0, start + len(one) : stop].all()
    assert arrays["max_seqlen"] == np.diff(bounds).max()


@cache
def torchtitans_document_mask() -> Any:
    """The function of torchtitan alone: its module needs triton, which needs a GPU."""
    spec = importlib.util.find_spec("torchtitan")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "models" / "common" / "attention.py"
    tree = ast.parse(path.read_text())
    name = "get_document_mask_mod"
    tree.body = [one for one in tree.body if getattr(one, "name", "") == name]
    names: dict[str, Any] = {"torch": torch, "_mask_mod_signature": Any}
    exec(compile(tree, str(path), "exec"), names)
    return names[name]


@given(documents=samples())
@settings(deadline=None, max_examples=300)
def test_rows_of_torchtitan_have_its_documents(documents: Documents) -> None:
    document_mask = torchtitans_document_mask()
    batch = batch_of(documents)
    rows = torchtitan(batch, sequence_length=ROW)
    for number, sample in enumerate(documents):
        inputs = [token for one in sample for token in one[:-1]]
        padding = ROW - len(inputs)
        assert rows["input"][number].tolist() == [*inputs, *[0] * padding]
        positions = [place for one in sample for place in range(len(one) - 1)]
        assert rows["positions"][number].tolist() == [*positions, *range(padding)]
    mask = document_mask(torch.from_numpy(rows["positions"]))
    places = torch.arange(ROW)
    for number, sample in enumerate(documents):
        ids = [document for document, one in enumerate(sample) for _ in one[:-1]]
        ids += [len(sample)] * (ROW - len(ids))
        same = np.equal.outer(ids, ids)
        actual = mask(torch.tensor(number), torch.tensor(0), places[:, None], places[None])
        np.testing.assert_array_equal(actual.numpy(), same)


@given(documents=samples(row=256))
@settings(deadline=None, max_examples=300)
def test_blocks_of_flex_attention_are_those_that_torch_makes(documents: Documents) -> None:
    arrays = document_starts(batch_of(documents), sequence_length=256)
    ids = torch.from_numpy(arrays["document_ids"])
    for number, sample in enumerate(documents):
        expected = np.repeat(np.arange(len(sample)), list(map(len, sample)))
        padding = 256 - len(expected)
        assert ids[number].tolist() == [*expected, *[len(sample)] * padding]

    def mask(b: Any, _: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (ids[b, q] == ids[b, kv])

    for size in (1, 16, 128):
        theirs = create_block_mask(mask, len(ids), None, 256, 256, device="cpu", BLOCK_SIZE=size)
        for name, array in mask_blocks(arrays["starts"], size).items():
            tensor = torch.from_numpy(array)
            torch.testing.assert_close(tensor, getattr(theirs, name), check_stride=True)


def check_model(
    batch: TokenBatch, attention: str, *, vocabulary: int, device: str = "cpu", **tolerance: float
) -> None:
    """A model of transformers gives a packed row the logits of its documents one by one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False}
    config = LlamaConfig(**sizes, **heads, attn_implementation=attention)
    model, row = LlamaForCausalLM(config).eval().to(device), to_device(device)(padding_free(batch))
    assert batch.part_starts is not None
    with torch.no_grad():
        packed = model(input_ids=row["input_ids"], position_ids=row["position_ids"]).logits[0]
        each = np.split(batch.tokens.astype(np.int64), batch.part_starts[1:])
        documents = [torch.from_numpy(one[None]).to(device) for one in each]
        alone = torch.cat([model(input_ids=one).logits[0] for one in documents])
    torch.testing.assert_close(packed, alone, **tolerance)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_of_transformers_sees_each_document_alone(attention: str) -> None:
    documents = [[[3, 1, 4, 1, 5], [9], [2, 6, 5, 3]], [[5, 8, 9, 7]]]
    check_model(batch_of(documents), attention, vocabulary=50)


def test_packs_of_a_token_file_come_in_any_form(tmp_path: Any) -> None:
    documents = [list(range(1, length + 1)) for length in (3, 5, 8, 2, 6, 7, 1)]
    write_documents(tmp_path / "text", documents)
    data = IndexedDataset(tmp_path / "text")
    order = PackedOrder(data.sequence_lengths, 8, seed=3, num_samples=40)
    packs = GPTDataset(
        data, sequence_length=8, add_extra_token=False, order=order, boundaries="documents"
    )
    dataset = FinishedDataset(packs, partial(megatron_packed, sequence_length=8))
    first = next(Loader(dataset, micro_batch_size=2))
    assert count_targets(packs.spans(range(40))) == count_targets(packs.tokens(range(40)))
    rows = packs.batch([0, 1])
    for name in ("tokens", "labels", "loss_mask"):
        np.testing.assert_array_equal(rows[name], first[name])


def test_finished_batches_keep_what_the_loader_asks_for(tmp_path: Path) -> None:
    write_documents(tmp_path / "text", [[3, 1, 0, 4, 5, 0], [9, 2], [6] * 7])
    data = IndexedDataset(tmp_path / "text")
    options: Any = {"sequence_length": 8, "add_extra_token": False}
    for seed in range(4):
        order = PackedOrder(data.sequence_lengths, 8, seed=seed, num_samples=3)
        packs = GPTDataset(data, order=order, eod_token=0, **options)
        finished = FinishedDataset(packs, padding_free)
        # A sequence holds several documents that end with an EOD, and another one ends without it.
        assert np.count_nonzero(finished.batch([0, 1])["position_ids"] == 0) == 4
    assert finished.is_remote is packs.is_remote
    assert finished.look_ahead == packs.look_ahead
    sampler = BalancedSampler.of(finished, global_batch_size=3, micro_batch_size=1)
    assert sorted(sampler.sample_numbers(0)) == [0, 1, 2]
    checked = next(Loader(finished, micro_batch_size=1, vocab_size=10))
    assert checked.keys() == finished.batch([0]).keys()
    assert [*next(Loader(finished, micro_batch_size=1, fields=["seq_idx"]))] == ["seq_idx"]
    for wrong in ({"vocab_size": 5}, {"token_dtype": "int32"}, {"fields": ["loss_mask"]}):
        with pytest.raises((ConfigError, DataError), match=r"token id|leave out|no loss_mask"):
            [*Loader(finished, micro_batch_size=3, **wrong)]
    halves = FinishedDataset(packs, padding_free, micro_batch_size=2)
    for prepare in (dict, to_tensors, to_device("cpu")):
        parts = prepare(halves.batch([2, 0, 1]))
        for part, numbers in zip(parts["micro_batches"], ([2, 0], [1]), strict=True):
            for name, array in finished.batch(numbers).items():
                assert type(part[name]) is type(prepare({name: array})[name])
                np.testing.assert_array_equal(part[name], array)
    loader = Loader(halves, micro_batch_size=3, consumed_samples=3)
    assert [*_checksums(loader, 1)] == [*_checksums(loader, 1)]
    for one in (halves, finished):
        with pytest.raises(ConfigError, match="belongs to a whole batch"):
            MapDataset(one)[0]
    tensors = to_tensors(finished.batch([0]))
    assert type(tensors["max_length_q"]) is int
    with pytest.raises(ConfigError, match=r"max_length_q, max_length_k cannot be mixed"):
        BlendedDataset([finished, finished], [1, 1], 4)
    with pytest.raises(ConfigError, match="the output is None; a dict of arrays"):
        FinishedDataset(packs, lambda batch: None).batch([0])  # type: ignore[arg-type,return-value]
    padded = GPTDataset(data, order=order, pad_token=0, **options)
    wrong: Any = ((padded, padding_free), ([], padding_free), (packs, 3))
    for dataset, output in wrong:
        with pytest.raises(ConfigError, match=r"pad_token|give a dataset"):
            FinishedDataset(dataset, output)  # type: ignore[arg-type]


def test_a_blend_splits_its_documents_at_one_eod(tmp_path: Path) -> None:
    write_documents(tmp_path / "text", [[3, 1, 0, 4, 5, 0]] * 4)
    data = IndexedDataset(tmp_path / "text")
    order = PackedOrder(data.sequence_lengths, 6, seed=1)

    def finished(**options: Any) -> FinishedDataset:
        looks: list[Any] = [{"eod_token": 0}, {"eod_token": 0} | options]
        same: Any = {"sequence_length": 6, "add_extra_token": False, "order": order}
        packs = BlendedDataset([GPTDataset(data, **same, **look) for look in looks])
        return FinishedDataset(TransformedDataset(packs, []), padding_free)

    for options in ({}, {"eod_mask_loss": True}):
        loader = Loader(dataset := finished(**options), micro_batch_size=8)
        labels = next(loader)["labels"]
        num_targets = count_targets(dataset.documents(range(8)))
        assert num_targets == np.count_nonzero(labels != IGNORED) == 8 * 4
        metrics = loader.metrics()
        assert (metrics["tokens"], metrics["trained_share"]) == (48, 32 / 48)
        assert metrics["checksum"] > metrics[f"tokens/{tmp_path / 'text'}"] == 48
    for options in ({"boundaries": "documents"}, {"eod_token": 3}, {"pad_token": 9}):
        with pytest.raises(ConfigError, match=r"split at EOD .*same eod_token|no padding"):
            finished(**options)


def test_samples_that_fit_no_row_and_unknown_documents_are_refused() -> None:
    batch = batch_of([[[1] * 9], [[1]]])
    for output in (megatron_packed, torchtitan, document_starts):
        with pytest.raises(DataError, match=r"rows have 7"):
            output(batch, sequence_length=7)
        with pytest.raises(ConfigError, match="sequence_length must be"):
            output(batch, sequence_length=0)
    unknown = TokenBatch(np.ones(3, np.int64), np.array([3]))
    for use in (padding_free, count_targets):
        with pytest.raises(ConfigError, match=r"documents .* not known"):
            use(unknown)
    for wrong in ({"multiple": 0}, {"pad_token": None}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            megatron_thd(batch, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="multiple of 128"):
        mask_blocks(np.zeros((1, 100), np.int32))
