"""`build_datasets` against Megatron-LM's builder, on random configurations.

A case is a pure function of its number. Where Megatron-LM fails (see docs/differences.md), the
case predicts it, and millrace must refuse:

    "no tokens"      a split of a file without tokens: Megatron-LM adds epochs for ever
    "no sample"      a split with too few tokens for a sample: Megatron-LM gives an empty dataset,
                     and a blend of it fails an assertion
    "oversampling"   an error of both builders; not predicted: Megatron-LM raises IndexError
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle_megatron as megatron
import pytest

import millrace
from millrace.order import SPLITS

EOD, PAD = 3, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """The options of both sides, and the expected outcome."""

    number: int
    sizes: list[int | None]
    options: dict[str, Any]  # DatasetConfig
    theirs: dict[str, Any]  # GPTDatasetConfig
    bookends: list[tuple[float, float] | None] | None  # fractions instead of a split string
    expected: str  # "", "no tokens" or "no sample"


def make_case(number: int, folder: Path) -> Case:
    """Writes a case's token files into a folder, and draws its configuration."""
    random = np.random.default_rng([40, number])
    names = [str(folder / f"data-{file}") for file in range(random.integers(1, 7))]
    keeps_partial = bool(random.random() < 0.3)
    is_scarce = random.random() < 0.15
    for name in names:
        lengths = megatron.random_lengths(random, 400)
        if not is_scarce:
            lengths = np.concatenate([lengths, random.integers(5, 60, 60)]).astype(np.int32)
        if keeps_partial:
            # Megatron-LM fails an assertion if the last document of an order is empty.
            lengths = np.maximum(lengths, 1)
        megatron.write_sequences(Path(name), lengths, random)
    sizes = [None if random.random() < 0.3 else int(random.integers(1, 400)) for _ in SPLITS]
    options: dict[str, Any] = {
        "sequence_length": int(random.integers(1, 25)),
        "seed": int(random.integers(2**32)),
        "surplus": float(random.choice([0.005, 0.005, 0.0, 0.1])),
        "add_extra_token": bool(random.random() < 0.8),
        "drop_last_partial_validation_sequence": not keeps_partial,
        "eod_token": EOD,
        "pad_token": PAD,
        "reset_position_ids": bool(random.random() < 0.5),
        "eod_mask_loss": bool(random.random() < 0.5),
    }
    bookends = None
    if random.random() < 0.5:
        sizes, weights = random_weights(random, len(names), sizes)
        options["blend"] = (names, weights)
        if random.random() < 0.3:
            bookends = random_bookends(random)
        options["split"] = bookends or megatron.random_split(random)
    else:
        blends = [random_blend(random, names, size) for size in sizes]
        if all(blend is None for blend in blends):
            blends[0] = (names[:1], None)
        is_apart = random.random() < 0.4
        is_full = is_apart and random.random() < 0.5
        if is_apart and blends[1] is not None:
            blends[1] = (blends[1][0], None)
            sizes[1] = None if is_full else sizes[1]
        options |= {
            "blend_per_split": blends,
            "multiple_validation_sets": is_apart,
            "full_validation": is_full and sizes[1] is None,
        }
    case = Case(number, sizes, options, their_options(options), bookends, "")
    return dataclasses.replace(case, expected=predict(case))


def random_weights(
    random: np.random.Generator, count: int, sizes: list[int | None]
) -> tuple[list[int | None], list[float] | None]:
    """Weights or None; with weights, each split has a size."""
    if random.random() < 0.4:
        return sizes, None
    weights = (random.random(count) ** random.choice([1, 3, 8]) + 1e-9).tolist()
    if random.random() < 0.3:
        weights = [float(weight) for weight in random.integers(1, 4, count)]
    return [size if size is not None else 7 for size in sizes], weights


def random_blend(
    random: np.random.Generator, names: list[str], size: int | None
) -> tuple[list[str], list[float] | None] | None:
    if random.random() < 0.15:
        return None
    chosen = random.choice(names, random.integers(1, len(names) + 1), replace=False).tolist()
    if size is None or random.random() < 0.4:
        return chosen, None
    return chosen, (random.random(len(chosen)) + 0.01).tolist()


def random_bookends(random: np.random.Generator) -> list[tuple[float, float] | None]:
    """Where each split starts and ends; there may be gaps."""
    ends = sorted(random.random(6).tolist())
    return [
        None if split == 2 and random.random() < 0.5 else (ends[2 * split], ends[2 * split + 1])
        for split in range(3)
    ]


def their_options(options: dict[str, Any]) -> dict[str, Any]:
    renamed = {"seed": "random_seed", "surplus": "mid_level_dataset_surplus"}
    renamed |= {"add_extra_token": "add_extra_token_to_sequence"}
    theirs = {renamed.get(name, name): value for name, value in options.items()}
    del theirs["eod_token"], theirs["pad_token"]
    if not isinstance(theirs.get("split", ""), str):
        theirs["split"] = "1,1,1"  # replaced by the book-ends afterwards
    return theirs | {"tokenizer": megatron.Tokenizer(eod=EOD, pad_id=PAD)}


def ranges_of(case: Case) -> Iterator[tuple[int, str, tuple[int, int]]]:
    """(split, prefix, range of sequences) of every dataset."""
    for split in range(len(SPLITS)):
        given = case.options.get("blend") or case.options["blend_per_split"][split]
        for name in given[0] if given is not None else []:
            count = len(millrace.IndexedDataset(name))
            span = (0, count)
            if "split" in case.options:
                span = millrace.split_ranges(count, case.options["split"])[split]
            if span is not None:
                yield split, name, span


def predict(case: Case) -> str:
    """Whether a dataset of the case has no tokens, or too few for a sample."""
    extra = int(case.options["add_extra_token"])
    kinds = set()
    for split, name, (start, stop) in ranges_of(case):
        given = case.options.get("blend") or case.options["blend_per_split"][split]
        tokens = int(millrace.IndexedDataset(name).sequence_lengths[start:stop].sum())
        is_mixed = len(given[0]) > 1 and not (split == 1 and is_apart(case))
        takes_one_epoch = case.sizes[split] is None or (is_mixed and given[1] is None)
        keeps_partial = split == 1 and not case.options["drop_last_partial_validation_sequence"]
        if tokens == 0:
            kinds.add("no tokens")
        elif takes_one_epoch:
            enough = extra + (1 if keeps_partial else case.options["sequence_length"])
            kinds.add("no sample" if tokens < enough else "")
    return max(kinds, default="")


def is_apart(case: Case) -> bool:
    return bool(case.options.get("multiple_validation_sets"))


# ---- comparing ----


def build_theirs(case: Case) -> list[Any]:
    """Indices are cached below each prefix: a cached blend would need torch.distributed."""
    config = megatron.config_of(None, **case.theirs)
    if case.bookends is not None:
        config.split_matrix = case.bookends
    return megatron.build(config, case.sizes)


def ways_to_build(case: Case, cache: Path) -> Iterator[tuple[str, millrace.DatasetConfig]]:
    config = millrace.DatasetConfig(num_samples=tuple(case.sizes), **case.options)
    yield "in memory", config
    config = dataclasses.replace(config, cache=cache, num_threads=1 + case.number % 3)
    yield "into a cache", config
    yield "from the cache", config
    yield "from the cache, trusted", dataclasses.replace(config, trust_cache=True)


@pytest.mark.parametrize("number", range(60))
def test_random_configurations_are_the_builders(number: int, tmp_path: Path) -> None:
    """A case is built by both, in every way."""
    case = make_case(number, tmp_path)
    theirs: list[Any] | None = None
    if case.expected == "":
        try:
            theirs = build_theirs(case)
        except IndexError as error:
            if "oversamples" not in str(error):
                raise
    for way, config in ways_to_build(case, tmp_path / "cache"):
        if theirs is None:
            assert_refused(config, case.expected or "oversampling")
            continue
        ours = millrace.build_datasets(config)
        for name, left, right in zip(SPLITS, ours, theirs, strict=True):
            assert_same(left, right, f"case {number}, {way}, {name}")


def assert_refused(config: millrace.DatasetConfig, kind: str) -> None:
    messages = {
        "no tokens": "holds 0 tokens|leaves no sample",  # by the dataset that comes first
        "no sample": "leaves no sample",
        "oversampling": "draws more samples",
    }
    message = "no manifest" if config.trust_cache else messages[kind]
    with pytest.raises(millrace.ConfigError, match=message):
        millrace.build_datasets(config)


def assert_same(ours: Any, theirs: Any, place: str) -> None:
    assert (ours is None) == (theirs is None), place
    assert isinstance(ours, list) == isinstance(theirs, list), place
    if ours is None:
        return
    if isinstance(ours, list):
        for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(left, right, f"{place}[{number}]")
        return
    assert len(ours) == len(theirs), place
    assert isinstance(ours, millrace.BlendedDataset) == isinstance(theirs, megatron.BlendedDataset)
    if isinstance(ours, millrace.BlendedDataset):
        for name in ("dataset_index", "dataset_sample_index"):
            left, right = getattr(ours, name), getattr(theirs, name)
            np.testing.assert_array_equal(left, right, f"{place} {name}", strict=True)
    for left, right in zip(parts_of(ours), parts_of(theirs), strict=True):
        megatron.assert_same_indices(left, right)
    draw = np.random.default_rng(len(ours))
    numbers = [0, len(ours) - 1, *draw.integers(0, len(ours), 6).tolist()]
    megatron.assert_same_samples(ours, theirs, numbers, place)


def parts_of(dataset: Any) -> list[Any]:
    return getattr(dataset, "datasets", None) or [dataset]


# ---- rare cases ----


def test_too_few_tokens_are_an_error_here_and_an_empty_dataset_there(tmp_path: Path) -> None:
    """A split with tokens, but too few for a sample (see docs/differences.md)."""
    prefix = megatron.write_sequences(tmp_path / "data", [100, 5], np.random.default_rng(41))
    options = {"blend": ([str(prefix)], None), "split": "1,1", "sequence_length": 8}
    train, valid, test = megatron.build(megatron.config_of(None, **options), [None] * 3)
    assert (len(train), len(valid), test) == (12, 0, None)
    config = millrace.DatasetConfig(seed=1234, num_samples=(None, None, None), **options)
    with pytest.raises(millrace.ConfigError, match=r"the valid split: .* leaves no sample"):
        millrace.build_datasets(config)


def test_the_same_prefix_twice_is_drawn_as_megatron_does(tmp_path: Path) -> None:
    prefix = str(megatron.write_sequences(tmp_path / "data", [30] * 50, np.random.default_rng(42)))
    for weights in (None, [0.3, 0.7]):
        options = {"blend": ([prefix, prefix], weights), "split": "8,1,1", "sequence_length": 8}
        sizes: Any = (200, 20, 20)
        theirs = megatron.build(megatron.config_of(None, **options), sizes)
        config = millrace.DatasetConfig(seed=1234, num_samples=sizes, **options)
        with pytest.warns(millrace.DuplicateDataWarning, match="twice"):
            ours = millrace.build_datasets(config)
        for name, left, right in zip(SPLITS, ours, theirs, strict=True):
            assert_same(left, right, name)
