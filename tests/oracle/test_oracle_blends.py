"""Blends: the dataset of each sample, its number there, and the samples."""

from pathlib import Path
from typing import Any

import numpy as np
import oracle_megatron as megatron
import pytest
from tests.kernels.test_kernel_blend import WEIGHTS_OF

import millrace
from millrace import _native
from millrace.order import blend, blend_exhaustively

OPTIONS: dict[str, Any] = {"sequence_length": 8, "seed": 77, "eod": 3, "pad": 4}
RESETS = {"reset_position_ids": True, "eod_mask_loss": True}


def random_weights(random: np.random.Generator) -> list[float]:
    """1 to 60 weights: similar, with many ties, or of very different sizes."""
    count = int(random.integers(1, 61))
    kind = random.integers(4)
    if kind == 0:
        return (random.random(count) + 0.01).tolist()
    if kind == 1:
        return random.integers(1, 4, count).astype(float).tolist()
    if kind == 2:
        return (10.0 ** random.uniform(-12, 12, count)).tolist()
    return [1.0] * count


def theirs_by_weights(weights: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros(size, np.int16), np.zeros(size, np.int64)
    megatron.helpers.build_blending_indices(*out, weights, len(weights), size, False)
    return out


def theirs_by_sizes(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
    megatron.helpers.build_exhaustive_blending_indices(*out, sizes, len(sizes))
    return out


@pytest.mark.parametrize("seed", range(100))
def test_random_blends_by_weight_are_equal(seed: int) -> None:
    random = np.random.default_rng([20, seed])
    assert_by_weights(random_weights(random), int(random.integers(0, 20_000)))


def assert_by_weights(weights: list[float], size: int) -> None:
    megatron.assert_alike(
        blend(weights, size), theirs_by_weights(megatron.normalize(weights), size)
    )


@pytest.mark.parametrize("kind", WEIGHTS_OF)
@pytest.mark.parametrize("count", [20, 70, 300, 1000, 4096])
def test_blends_of_many_datasets_by_weight_are_equal(count: int, kind: str) -> None:
    """Long enough for the set of candidates to change many times over."""
    random = np.random.default_rng([29, count])
    weights = WEIGHTS_OF[kind](random, count).tolist()
    # Megatron-LM looks at every dataset for every sample.
    assert_by_weights(weights, min(200_000, 250_000_000 // count))


@pytest.mark.parametrize("scale", [1e-9, 0.9, 1.1, 1e9])
def test_blends_by_weights_that_are_not_normalised_are_equal(scale: float) -> None:
    """Megatron-LM's helper does not normalise them, and neither does our kernel."""
    random = np.random.default_rng(30)
    for count in (5, 70, 1000):
        weights = random.random(count)
        weights *= scale / weights.sum()
        ours = _native.blend_by_weights(weights, 30_000)
        megatron.assert_alike(ours, theirs_by_weights(weights, 30_000))


@pytest.mark.parametrize("kind", WEIGHTS_OF)
@pytest.mark.parametrize("count", [20, 70, 300, 1000, 4096])
def test_exhaustive_blends_of_many_datasets_are_equal(count: int, kind: str) -> None:
    random = np.random.default_rng([31, count])
    weights = WEIGHTS_OF[kind](random, count)
    size = min(150_000, 40_000_000 // count)
    sizes = np.ceil(weights / weights.sum() * size).astype(int).tolist()
    megatron.assert_alike(blend_exhaustively(sizes), theirs_by_sizes(sizes))


@pytest.mark.parametrize(
    "weights",
    [
        [1.0],
        [1.0, 1e-15],
        [1e-15, 1.0],
        [1e-300, 1.0],
        [1e300, 1e-5, 1e299],
        [1 / 3] * 3,
        [0.1] * 10,
        [1.0] * 60,
        [0.7, 0.2, 0.1],
        [2**53 + 1.0, 1.0],
    ],
)
def test_extreme_blends_by_weight_are_equal(weights: list[float]) -> None:
    assert_by_weights(weights, 30_000)


@pytest.mark.parametrize("seed", range(60))
def test_random_exhaustive_blends_are_equal(seed: int) -> None:
    random = np.random.default_rng([21, seed])
    sizes = (random.geometric(1 / random.choice([2, 50, 500]), random.integers(1, 61))).tolist()
    if seed % 5 == 0:
        sizes[0] = 20_000  # one dataset outlasts all others
    megatron.assert_alike(blend_exhaustively(sizes), theirs_by_sizes(sizes))


@pytest.mark.parametrize("seed", range(30))
def test_the_samples_of_each_dataset_are_equal_in_number(seed: int) -> None:
    random = np.random.default_rng([22, seed])
    weights = megatron.normalize(random_weights(random))
    assert millrace.normalize(weights) == megatron.normalize(weights)
    sizes = [int(size) for size in random.integers(0, 10**9, 3)]
    for surplus in (0.0, 0.005, 0.5):
        targets = megatron.sizes_per_split_and_dataset(weights, sizes)
        buffers = megatron.sizes_per_split_and_dataset(weights, sizes, surplus)
        for split, size in enumerate(sizes):
            assert millrace.samples_per_dataset(weights, size, surplus) == [
                (target[split], buffer[split])
                for target, buffer in zip(targets, buffers, strict=True)
            ]


def write_datasets(random: np.random.Generator, folder: Path, count: int) -> list[Path]:
    """Files that differ in size, each large enough for samples in every split."""
    return [
        megatron.write_sequences(
            folder / f"data-{number}", random.integers(5, 40, random.integers(12, 120)), random
        )
        for number in range(count)
    ]


def our_datasets(prefixes: list[Path], num_samples: int | None) -> list[millrace.GPTDataset]:
    return [
        megatron.Case(
            prefix=prefix,
            sequences=(0, len(millrace.IndexedDataset(prefix))),
            num_samples=num_samples,
            **OPTIONS,
            **RESETS,
        ).ours()
        for prefix in prefixes
    ]


def config_of(**options: Any) -> Any:
    """Indices are cached below each prefix: a cached blend would need torch.distributed."""
    tokenizer = megatron.Tokenizer(eod=3, pad_id=4)
    options |= {"random_seed": 77, "tokenizer": tokenizer, "sequence_length": 8}
    return megatron.config_of(None, **RESETS, **options)


def test_the_builders_weights_are_normalised_twice(tmp_path: Path) -> None:
    """The second time may change a weight's last bit, and so break a tie."""
    random = np.random.default_rng(28)
    prefixes, weights, size = write_datasets(random, tmp_path, 2), [0.15, 0.79], 1000
    once = millrace.normalize(weights)
    assert millrace.normalize(once) != once
    assert blend(once, size)[0].tolist() != blend(weights, size)[0].tolist()
    blend_of = (list(map(str, prefixes)), weights)
    theirs = megatron.build(config_of(blend=blend_of, split="1"), [size, 1, 1])[0]
    ours = millrace.build_datasets(
        millrace.DatasetConfig(
            blend=blend_of,
            split="1",
            num_samples=(size, 1, 1),
            sequence_length=8,
            seed=77,
            eod_token=3,
            pad_token=4,
            **RESETS,
        )
    )
    megatron.assert_same_datasets(ours.train, theirs)


@pytest.mark.parametrize("seed", range(15))
def test_a_blend_of_datasets_built_one_by_one_is_equal(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng([26, seed])
    count = int(random.integers(1, 6))
    prefixes = write_datasets(random, tmp_path, count)
    weights, size = (10.0 ** random.uniform(-3, 3, count)).tolist(), 300
    config = config_of()
    theirs = [
        megatron.gpt_dataset(prefix, config, (0, len(millrace.IndexedDataset(prefix))), size)
        for prefix in prefixes
    ]
    ours = our_datasets(prefixes, size)
    megatron.assert_same_datasets(
        millrace.BlendedDataset(ours, weights, size),
        megatron.BlendedDataset(theirs, weights, size, config),
    )


def test_a_blend_that_draws_too_much_of_a_dataset_is_refused_by_both(tmp_path: Path) -> None:
    random = np.random.default_rng(27)
    prefixes = write_datasets(random, tmp_path, 2)
    config = config_of()
    ours = our_datasets(prefixes, None)
    theirs = [
        megatron.gpt_dataset(prefix, config, dataset.order.inputs.sequences, None)
        for prefix, dataset in zip(prefixes, ours, strict=True)
    ]
    for weights in ([1.0, 1e-6], [1e-6, 1.0]):
        size = len(ours[weights.index(1.0)]) + 5
        with pytest.raises(IndexError, match="oversamples"):
            megatron.BlendedDataset(theirs, weights, size, config)
        with pytest.raises(millrace.ConfigError, match="draws more samples"):
            millrace.BlendedDataset(ours, weights, size)
