"""Splits: shares, book-ends and rounding are Megatron-LM's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle_megatron as megatron
import pytest

import millrace

SPLITS = (
    "969,30,1",
    "98,2,0",
    "1,1,1",
    "100",
    "0,1",
    "0,0,1",
    "1,0,1",
    "0.1,0.2,0.7",
    "99.5, .5",
    "[8; 1; 1]",
)


@pytest.mark.parametrize("split", SPLITS)
def test_written_splits_have_megatrons_bookends(split: str) -> None:
    vector = megatron.parse_and_normalize_split(split)
    assert millrace.parse_split(split) == megatron.convert_split_vector_to_split_matrix(vector)


@pytest.mark.parametrize("seed", range(20))
def test_random_splits_have_megatrons_bookends_and_ranges(seed: int) -> None:
    random = np.random.default_rng([1, seed])
    for _ in range(50):
        split = megatron.random_split(random)
        matrix = megatron.convert_split_vector_to_split_matrix(
            megatron.parse_and_normalize_split(split)
        )
        assert millrace.parse_split(split) == matrix
        for count in (0, 1, 2, 5, int(random.integers(1, 10_000)), int(random.integers(2**31))):
            # The rule is part of BlendedMegatronDatasetBuilder._build_megatron_dataset_splits.
            expected = [
                ends if ends is None else tuple(round(end * float(count)) for end in ends)
                for ends in matrix
            ]
            assert millrace.split_ranges(count, split) == expected


@pytest.mark.parametrize("seed", range(15))
def test_the_builder_cuts_a_dataset_at_the_same_sequences(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng([2, seed])
    lengths = np.maximum(megatron.random_lengths(random, 500), 1)  # every split has tokens
    prefix = megatron.write_sequences(tmp_path / "data", lengths, random)
    split = megatron.random_split(random)
    ranges = millrace.split_ranges(len(lengths), split)
    if any(span is not None and span[0] == span[1] for span in ranges):
        split = "1,1,1" if len(lengths) > 2 else "1"  # Megatron-LM would loop for ever
        ranges = millrace.split_ranges(len(lengths), split)
    config = megatron.config_of(
        tmp_path / "cache", blend=([str(prefix)], None), split=split, sequence_length=4
    )
    sizes = random.integers(1, 100, 3).tolist()
    for theirs, span, size in zip(megatron.build(config, sizes), ranges, sizes, strict=True):
        assert (theirs is None) == (span is None)
        if theirs is not None and span is not None:
            np.testing.assert_array_equal(theirs.indices, np.arange(*span))
            ours = millrace.GPTDataset(
                millrace.IndexedDataset(prefix),
                sequence_length=4,
                seed=1234,
                num_samples=size,
                sequences=span,
            )
            megatron.assert_same_indices(ours, theirs)
