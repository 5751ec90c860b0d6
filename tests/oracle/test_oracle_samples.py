"""Rare samples beside Megatron-LM's; those of random data: test_oracle_indices."""

from pathlib import Path
from typing import Any

import numpy as np
import oracle_megatron as megatron
import pytest
from tests.conftest import write_documents
from tests.shard_folders import make_sequences, write_sequences

import millrace
from millrace import ShardedDataset
from millrace.feed import BatchForm
from millrace.shards import shard_prefix


def both(
    prefix: Path, cache: Path, **options: Any
) -> tuple[millrace.GPTDataset, megatron.GPTDataset]:
    case = megatron.Case(prefix=prefix, **options)
    return case.ours(), case.theirs(cache)


def test_a_file_may_hold_minus_one(tmp_path: Path) -> None:
    """-1 is Megatron-LM's pad id without a pad token; here these tokens are not padding."""
    document = [5, -1, 6, -1, -1, 7, 8, 9, 5]
    with millrace.IndexedDatasetBuilder(tmp_path / "data", np.int32) as builder:
        builder.add_document(document)
    ours, theirs = both(tmp_path / "data", tmp_path / "cache", sequences=(0, 1), sequence_length=8)
    megatron.assert_same_samples(ours, theirs, [0])
    assert ours[0]["tokens"].tolist() == [5, 0, 6, 0, 0, 7, 8, 9]
    assert ours[0]["loss_mask"].tolist() == [0, 1, 0, 0, 1, 1, 1, 1]
    kept = millrace.GPTDataset(
        millrace.IndexedDataset(tmp_path / "data"), sequence_length=8, seed=0, eod_token=0
    )[0]
    assert kept["tokens"].tolist() == document[:-1]
    assert kept["labels"].tolist() == document[1:]
    assert kept["loss_mask"].tolist() == [1] * 8


def test_loss_masks_do_not_depend_on_which_sample_was_first(tmp_path: Path) -> None:
    """In Megatron-LM they do: it keeps the first sample's mask, with zeros for the padding."""
    with millrace.IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_document([1, 2, 3, 9, 9, 9, 4, 5, 6, 7, 8, 1, 2])  # 9 is the pad
    ours, theirs = both(
        tmp_path / "data", tmp_path / "cache", sequences=(0, 1), sequence_length=6, pad=9
    )
    padded = ours.indices.shuffle_index.tolist().index(0)
    other, masked = 1 - padded, [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert ours[padded]["loss_mask"].tolist() == masked
    assert ours[other]["loss_mask"].tolist() == [1.0] * 6
    assert theirs[padded]["loss_mask"].tolist() == masked
    assert theirs[other]["loss_mask"].tolist() == masked  # of the first sample
    assert megatron.fresh_sample(theirs, other)["loss_mask"].tolist() == [1.0] * 6


@pytest.mark.parametrize("seed", range(12))
def test_parts_and_attention_masks_are_those_of_documents_that_end_with_eod(
    seed: int, tmp_path: Path
) -> None:
    random = np.random.default_rng(seed)
    eod = 9
    documents = [[*random.integers(0, eod, n), eod] for n in random.integers(0, 12, 9)]
    write_documents(tmp_path / "data", [*documents, [1] * 20 + [eod]])
    ours, theirs = both(
        tmp_path / "data",
        tmp_path / "cache",
        sequences=(0, 10),
        sequence_length=(1, 2, 5, 12)[seed % 4],
        eod=eod,
        reset_position_ids=True,
        add_extra_token=bool(seed % 3),
        has_attention_mask=True,
    )
    fields = ("position_ids", "attention_mask", "cu_seqlens")
    batch = ours.batch(range(len(theirs)), BatchForm(fields=fields))
    for number, mask in enumerate(batch["attention_mask"]):
        sample = megatron.fresh_sample(theirs, number)
        assert np.array_equal(mask, sample["attention_mask"])
    starts = np.flatnonzero(batch["position_ids"] == 0)
    assert np.array_equal(batch["cu_seqlens"], [*starts, batch["position_ids"].size])


@pytest.mark.parametrize("seed", range(12))
def test_samples_of_shards_are_those_of_a_gpt_dataset_without_the_extra_token(
    tmp_path: Path, seed: int
) -> None:
    random = np.random.default_rng([14, seed])
    total, seq_len, num_shards = (int(n) for n in random.integers((6, 2, 1), (40, 33, 5)))
    dtype = (np.uint16, np.uint32, np.int32)[seed % 3]
    sequences = make_sequences(total, seq_len, dtype, seed)
    sequences[:, 0] = np.arange(total)  # so that a sample shows its sequence
    write_sequences(tmp_path / "out", sequences, num_shards)
    eod, flags = int(random.integers(50)), random.integers(0, 2, 2).astype(bool).tolist()
    ours = ShardedDataset(
        tmp_path / "out", eod_token=eod, reset_position_ids=flags[0], eod_mask_loss=flags[1]
    )
    config = megatron.config_of(
        tmp_path / "cache",
        sequence_length=seq_len,
        random_seed=seed,
        tokenizer=megatron.Tokenizer(eod=eod, pad_id=None),
        reset_position_ids=flags[0],
        eod_mask_loss=flags[1],
        add_extra_token_to_sequence=False,
    )
    seen = []
    for number, size in enumerate(ours.metadata.shard_sizes):
        prefix = Path(shard_prefix(tmp_path / "out", number))
        theirs = megatron.gpt_dataset(prefix, config, (0, size), None)
        assert len(theirs) == size
        for place in range(size):
            expected = theirs[place]
            seen.append(int(expected["tokens"][0]))
            actual = ours[seen[-1]]
            for name, array in actual.items():
                np.testing.assert_array_equal(array, np.asarray(expected[name]), err_msg=name)
    assert sorted(seen) == [*range(total)]
