"""Megatron-LM reads the shards of a folder, and makes the same samples of their sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle_megatron as megatron
import pytest
from tests.shard_folders import make_sequences, write_sequences

from millrace import ShardedDataset
from millrace.store import shard_prefix

# Warns of a tokenizer whose pad token is its EOD; the pad becomes -1.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The pad token id in the tokenizer collides with another special token id:UserWarning"
)


@pytest.mark.parametrize("seed", range(12))
def test_samples_are_those_of_a_gpt_dataset_without_the_extra_token(
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
        theirs: Any = megatron.gpt_dataset(prefix, config, (0, size), None, megatron.Split.train)
        assert len(theirs) == size
        for place in range(size):
            expected = theirs[place]
            seen.append(int(expected["tokens"][0]))
            actual = ours[seen[-1]]
            for name, array in actual.items():
                np.testing.assert_array_equal(array, np.asarray(expected[name]), err_msg=name)
    assert sorted(seen) == [*range(total)]
