"""The order law in samples: tokens, labels, loss masks and position ids are Megatron-LM's."""

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

# Warns of a tokenizer whose pad token is its EOD; the pad becomes -1, which is tested here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The pad token id in the tokenizer collides with another special token id:UserWarning"
)

Split = megatron.Split
INTEGER_DTYPES = (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64)


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


@pytest.mark.parametrize("seed", range(250))
def test_samples_of_random_data_are_equal(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng([10, seed])
    dtype = INTEGER_DTYPES[seed % len(INTEGER_DTYPES)]
    lengths = megatron.random_lengths(random, 10_000 if seed % 10 == 0 else 300)
    lengths = np.append(lengths, np.int32(1 + random.integers(60)))
    # Few different tokens, so that EOD and pad are frequent; below 0 if the dtype allows it.
    lowest = -3 if np.dtype(dtype).kind == "i" else 0
    prefix = megatron.write_sequences(tmp_path / "data", lengths, random, dtype, (lowest, 12))
    num_tokens = int(lengths.sum())
    sequence_length = int(np.exp(random.uniform(0, min(6, np.log(num_tokens)))))
    eod, pad = (int(token) for token in random.integers(lowest, 14, 2))
    num_samples = int(random.choice([0.5, 1, 2.3]) * num_tokens / sequence_length)
    options: dict[str, Any] = {
        "sequences": (0, len(lengths)),
        "sequence_length": max(1, min(sequence_length, num_tokens - 1)),
        "seed": int(random.integers(2**32)),
        "num_samples": None if random.random() < 0.3 else num_samples,
        "eod": eod,
        "pad": [None, pad, pad, eod][random.integers(4)],
        "reset_position_ids": bool(random.integers(2)),
        "eod_mask_loss": bool(random.integers(2)),
        "add_extra_token": bool(random.integers(2)),
    }
    if num_tokens == 1:
        options["add_extra_token"] = False
    ours, theirs = both(prefix, tmp_path / "cache", **options)
    numbers = random.integers(0, len(ours), 12).tolist()
    megatron.assert_same_samples(ours, theirs, [0, len(ours) - 1, *numbers])


@pytest.mark.parametrize("seed", range(80))
def test_a_partial_last_validation_sample_is_padded_alike(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng([11, seed])
    lengths = np.maximum(megatron.random_lengths(random, 60), 1)  # empty ones: test_oracle_indices
    prefix = megatron.write_sequences(tmp_path / "data", lengths, random, np.int16, (-1, 6))
    num_tokens = int(lengths.sum())
    extra = bool(random.integers(2)) and num_tokens > 1
    sequence_length = int(random.integers(1, 2 * num_tokens + 2))
    eod = int(random.integers(-1, 6))
    ours, theirs = both(
        prefix,
        tmp_path / "cache",
        sequences=(0, len(lengths)),
        sequence_length=sequence_length,
        seed=seed,
        num_samples=[None, 1, 2][seed % 3],
        split=Split.valid,
        eod=eod,
        pad=[None, 3, eod][random.integers(3)],
        reset_position_ids=bool(random.integers(2)),
        eod_mask_loss=bool(random.integers(2)),
        add_extra_token=extra,
        drop_last=False,
    )
    megatron.assert_same_indices(ours, theirs)
    last = int(np.flatnonzero(ours.indices.shuffle_index == len(ours) - 1)[0])
    megatron.assert_same_samples(ours, theirs, [last, 0, len(ours) - 1, last])


def test_a_partial_sample_before_trailing_empty_documents_holds_all_tokens(tmp_path: Path) -> None:
    """Megatron-LM cannot build it: the end would be (empty document, offset -1)."""
    random = np.random.default_rng(13)
    lengths = [5, 0, 0, 0, 0, 0, 3]
    prefix = megatron.write_sequences(tmp_path / "data", lengths, random, np.uint16, (1, 9))
    dataset = millrace.IndexedDataset(prefix)
    found = 0
    for seed in range(20):
        ours = millrace.GPTDataset(
            dataset, sequence_length=5, seed=seed, drop_last_partial_sequence=False
        )
        found += lengths[ours.indices.document_index[-1]] == 0
        text = np.concatenate([dataset[number] for number in ours.indices.document_index])
        rows = {int(row): ours[number] for number, row in enumerate(ours.indices.shuffle_index)}
        assert len(rows) == 2
        assert rows[0]["tokens"].tolist() == text[:5].tolist()
        assert rows[0]["labels"].tolist() == text[1:6].tolist()
        assert rows[1]["tokens"].tolist() == [*text[5:].tolist(), 0, 0]
        assert rows[1]["labels"].tolist() == [*text[6:].tolist(), 0, 0, 0]
        assert rows[1]["loss_mask"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert found > 5


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
