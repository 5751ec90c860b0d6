"""The order law: splits, the three indices of each, and samples at random are Megatron-LM's."""

import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import oracle_megatron as megatron
import pytest
from tests.kernels import reference

import millrace
from millrace.order import build_gpt_indices, plan_gpt

# Warns of a tokenizer whose pad token is its EOD; the pad becomes -1, which is tested here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The pad token id in the tokenizer collides with another special token id:UserWarning"
)
Case, Split = megatron.Case, megatron.Split
INTEGER_DTYPES = (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64)


def check(case: Case, cache: Path) -> str:
    """Compares indices and samples if Megatron-LM gives any; returns the outcome."""
    start, stop = case.sequences
    lengths = millrace.IndexedDataset(case.prefix).sequence_lengths
    num_tokens = int(lengths[start:stop].sum())
    if num_tokens == 0:
        with pytest.raises(millrace.ConfigError, match="0 tokens"):
            case.ours()  # Megatron-LM would loop for ever
        return "no tokens"
    try:
        theirs = case.theirs(cache)
    except AssertionError:
        # Its last offset is -1: the last document is empty, and cannot name the end of a partial
        # sample that includes the extra token.
        assert case.split is Split.valid
        assert case.add_extra_token
        assert not case.drop_last
        ours = case.ours()
        last = ours.indices.document_index[-1]
        assert lengths[last] == 0
        walk = lengths, ours.indices.document_index, case.sequence_length, len(ours)
        expected = reference.sample_index(*walk, allow_partial=True)
        np.testing.assert_array_equal(ours.indices.sample_index, expected, strict=True)
        assert ours.indices.sample_index.min() >= 0
        return "no name for the end"
    if len(theirs) == 0:
        with pytest.raises(millrace.ConfigError, match="leaves no sample"):
            case.ours()
        return "no sample"
    ours = case.ours()
    megatron.assert_same_indices(ours, theirs)
    numbers = np.random.default_rng(len(ours)).integers(0, len(ours), 8).tolist()
    last = int(np.flatnonzero(ours.indices.shuffle_index == len(ours) - 1)[0])  # may have padding
    megatron.assert_same_samples(ours, theirs, [last, 0, len(ours) - 1, *numbers, last])
    return "same"


def random_cases(random: np.random.Generator, folder: Path, max_sequences: int) -> list[Case]:
    """A file, and a case for each split with a share of it."""
    lengths = megatron.random_lengths(random, max_sequences)
    # Few different tokens, so that EOD and pad are frequent; below 0 if the dtype allows it.
    dtype = INTEGER_DTYPES[random.integers(len(INTEGER_DTYPES))]
    lowest = -3 if np.dtype(dtype).kind == "i" else 0
    prefix = megatron.write_sequences(folder / "data", lengths, random, dtype, (lowest, 12))
    eod, pad = (int(token) for token in random.integers(lowest, 14, 2))
    # Mostly several samples in a split; sometimes the sequence length exceeds its tokens.
    sequence_length = int(np.exp(random.uniform(0, min(7, max(0, np.log(lengths.sum()) - 1)))))
    extra = bool(random.integers(2))
    cases = []
    ranges = millrace.split_ranges(len(lengths), megatron.random_split(random))
    for split, sequences in zip(Split, ranges, strict=True):
        if sequences is None:
            continue
        num_tokens = int(lengths[slice(*sequences)].sum())
        epochs = random.choice([0, 0.3, 1, 1.1, 1.7, 1.95, 2, 2.5, 3, 4.05, 4.9, 5])
        num_samples = int(epochs * num_tokens / sequence_length)
        cases.append(
            Case(
                prefix=prefix,
                sequences=sequences,
                split=split,
                num_samples=None if random.random() < 0.15 else min(num_samples, 50_000),
                sequence_length=sequence_length,
                seed=int(random.choice([0, 1234, 2**32 - 1, random.integers(2**32)])),
                add_extra_token=extra,
                drop_last=bool(random.integers(2)),
                eod=eod,
                pad=[None, pad, pad, eod][random.integers(4)],
                reset_position_ids=bool(random.integers(2)),
                eod_mask_loss=bool(random.integers(2)),
            )
        )
    return cases


@pytest.mark.parametrize("first", range(0, 400, 20))
def test_random_data_are_equal(first: int, tmp_path: Path) -> None:
    """20 files, in most of whose cases Megatron-LM gives something to compare with."""
    outcomes = []
    for seed in range(first, first + 20):
        print("seed", seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        most = 10_000 if seed % 4 == 0 else 200
        for case in random_cases(np.random.default_rng([3, seed]), folder, most):
            outcomes.append(check(case, folder / "cache" / case.split.name))
    assert outcomes.count("same") > 0.5 * len(outcomes)


@pytest.mark.parametrize("num_epochs", [1, 2, 3, 5])
@pytest.mark.parametrize("extra", [False, True])
def test_the_final_epoch_is_cut_off_at_the_same_count(
    num_epochs: int, extra: bool, tmp_path: Path
) -> None:
    """Every sample count of an epoch: below 0.80 of it the final epoch is shuffled separately."""
    random = np.random.default_rng(5)
    prefix = megatron.write_sequences(tmp_path / "data", [7, 0, 13, 1, 29, 3, 11], random)
    num_tokens, sequence_length = 64, 4
    first = ((num_epochs - 1) * num_tokens - extra) // sequence_length
    cuts = set()
    last = (num_epochs * num_tokens - extra) // sequence_length
    for num_samples in range(max(first, 1), last + 1):
        case = Case(
            prefix=prefix,
            sequences=(0, 7),
            num_samples=num_samples,
            sequence_length=sequence_length,
            seed=num_samples,
            add_extra_token=extra,
        )
        assert check(case, tmp_path / f"cache-{num_samples}") == "same"
        cuts.add(case.ours().order.plan.num_samples_before_final_epoch is None)
    assert cuts == ({True} if num_epochs == 1 else {True, False})


@pytest.mark.parametrize("sequence_length", range(1, 14))
def test_every_sequence_length_of_a_small_file(sequence_length: int, tmp_path: Path) -> None:
    """Documents that end where samples end, and every kind of partial last sample."""
    random = np.random.default_rng(6)
    prefix = megatron.write_sequences(tmp_path / "data", [3, 0, 4, 1, 0, 5, 0], random)
    flags = (False, True)
    for number, (extra, drop_last, num_samples, seed) in enumerate(
        product(flags, flags, (None, 1, 2, 5), (0, 1))
    ):
        case = Case(
            prefix=prefix,
            sequences=(0, 7),
            split=Split.valid,
            num_samples=num_samples,
            sequence_length=sequence_length,
            seed=seed,
            add_extra_token=extra,
            drop_last=drop_last,
        )
        check(case, tmp_path / f"cache-{number}")


@pytest.mark.parametrize("extra", [False, True])
def test_more_than_2_to_the_31_tokens(extra: bool, tmp_path: Path) -> None:
    """Indices and samples of a sparse 4.4 GB file."""
    random = np.random.default_rng(7)
    lengths = random.integers(1, 2_000_001, 2200).astype(np.int32)
    lengths[[5, 900, 2199]] = 0
    assert lengths.sum(dtype=np.int64) > 2**31
    prefix = tmp_path / "data"
    with millrace.IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([], [0] * len(lengths))
    write_hole(prefix, lengths)
    num_samples = int(1.3 * lengths.sum(dtype=np.int64)) // 65_536
    for split in (Split.train, Split.valid):
        case = Case(
            prefix=prefix,
            sequences=(100, 2200) if split is Split.train else (0, 2200),
            split=split,
            num_samples=num_samples if split is Split.train else None,
            sequence_length=65_536,
            seed=99,
            add_extra_token=extra,
        )
        theirs, ours = case.theirs(tmp_path / "cache"), case.ours()
        megatron.assert_same_indices(ours, theirs)
        assert len(ours) > 2**31 // 65_536
        numbers = random.integers(0, len(ours), 15).tolist()
        megatron.assert_same_samples(ours, theirs, numbers)
        assert ours.batch(numbers)["tokens"].any()


def write_hole(prefix: Path, lengths: np.ndarray) -> None:
    """Rewrites a pair for these lengths; only the ends of each sequence are not 0."""
    path = Path(f"{prefix}.idx")
    header = bytearray(path.read_bytes())
    pointers = np.append(0, np.cumsum(lengths[:-1], dtype=np.int64) * 2)
    header[34 : 34 + 12 * len(lengths)] = lengths.tobytes() + pointers.tobytes()
    path.write_bytes(header)
    with open(f"{prefix}.bin", "r+b") as file:
        os.truncate(file.fileno(), int(lengths.sum(dtype=np.int64)) * 2)
        pairs = zip(pointers.tolist(), lengths.tolist(), strict=True)
        for number, (pointer, length) in enumerate(pairs):
            for token in {0, length // 2, length - 1} - {-1}:
                file.seek(pointer + 2 * token)
                file.write((number + 1).to_bytes(2, "little") if length else b"")


def test_2_to_the_32_tokens_of_two_epochs_in_lengths_alone(tmp_path: Path) -> None:
    lengths = np.array([2**31 - 1, 0, 2**30, 1, 2**31 - 1, 77], dtype=np.int32)

    class LowLevelDataset:
        sequence_lengths = lengths
        path_prefix = str(tmp_path)

    num_tokens = int(lengths.sum(dtype=np.int64))
    for extra in (False, True):
        sequence_length, seed = 2**20 + 7, 4
        num_samples = int(1.9 * num_tokens) // sequence_length
        config = megatron.config_of(
            tmp_path / f"cache-{extra}",
            sequence_length=sequence_length,
            random_seed=seed,
            add_extra_token_to_sequence=extra,
        )
        what = LowLevelDataset(), "unused", np.arange(6, dtype=np.int32), num_samples
        theirs = megatron.GPTDataset(*what, Split.train, config)
        plan = plan_gpt(num_tokens, num_samples, sequence_length, add_extra_token=extra)
        assert plan.num_epochs == 2
        ours = build_gpt_indices(lengths, (0, 6), plan, seed)._asdict()
        for name, array in ours.items():
            np.testing.assert_array_equal(array, getattr(theirs, name), name, strict=True)


def sample_index_of_one_document(num_tokens: int, sequence_length: int, drop_last: bool) -> Any:
    lengths, documents = np.array([num_tokens], np.int32), np.zeros(1, np.int32)
    return megatron.helpers.build_sample_idx(
        lengths, documents, sequence_length, 1, num_tokens, drop_last, True
    )


def test_the_last_partial_sample_is_counted_exactly_where_megatron_rounds() -> None:
    """Megatron-LM divides in 32-bit floats: it loses a sample of 24,342,530 tokens at 2,048."""
    plan = plan_gpt(24_342_530, None, 2048, drop_last_partial_sequence=False)
    assert plan.num_samples == 11_887 == -(-(24_342_530 - 1) // 2048)
    theirs = sample_index_of_one_document(24_342_530, 2048, drop_last=False)
    assert len(theirs) - 1 == 11_886
    lengths = np.array([24_342_530], np.int32)
    ours = build_gpt_indices(lengths, (0, 1), plan, 0).sample_index
    np.testing.assert_array_equal(ours[:-1], theirs, strict=True)
    assert ours[-1].tolist() == [0, 24_342_529]


@pytest.mark.parametrize("num_tokens", [2**24 - 1, 2**24, 2**23 + 2, 2**24 - 2**11 + 2])
@pytest.mark.parametrize("sequence_length", [2, 1024, 2047, 2048, 4096])
def test_the_last_partial_sample_is_megatrons_up_to_2_to_the_24(
    num_tokens: int, sequence_length: int
) -> None:
    plan = plan_gpt(num_tokens, None, sequence_length, drop_last_partial_sequence=False)
    theirs = sample_index_of_one_document(num_tokens, sequence_length, drop_last=False)
    ours = build_gpt_indices(np.array([num_tokens], np.int32), (0, 1), plan, 0).sample_index
    np.testing.assert_array_equal(ours, theirs, strict=True)


# ---- splits: shares, book-ends and rounding ----

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


@pytest.mark.parametrize("seed", range(20))
def test_splits_have_megatrons_bookends_and_ranges(seed: int) -> None:
    random = np.random.default_rng([1, seed])
    for split in (*SPLITS, *(megatron.random_split(random) for _ in range(50))):
        shares = megatron.parse_and_normalize_split(split)
        matrix = megatron.convert_split_vector_to_split_matrix(shares)
        assert millrace.parse_split(split) == matrix
        for count in (0, 1, 2, 5, int(random.integers(1, 10_000)), int(random.integers(2**31))):
            # The rule is part of BlendedMegatronDatasetBuilder._build_megatron_dataset_splits.
            expected = [
                ends if ends is None else tuple(round(end * float(count)) for end in ends)
                for ends in matrix
            ]
            assert millrace.split_ranges(count, split) == expected
