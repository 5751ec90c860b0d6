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

KINDS = WEIGHTS_OF | {
    "equal": lambda random, count: np.ones(count),
    "of any size": lambda random, count: 10.0 ** random.uniform(-12, 12, count),
}
COUNTS = (1, 2, 3, 7, 20, 60, 70, 300, 1000, 4096)


def theirs_by_weights(weights: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros(size, np.int16), np.zeros(size, np.int64)
    megatron.helpers.build_blending_indices(*out, weights, len(weights), size, False)
    return out


def theirs_by_sizes(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
    megatron.helpers.build_exhaustive_blending_indices(*out, sizes, len(sizes))
    return out


def assert_by_weights(weights: list[float], size: int) -> None:
    megatron.assert_alike(
        blend(weights, size), theirs_by_weights(megatron.normalize(weights), size)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_blends_of_random_weights_are_equal(count: int, kind: str) -> None:
    """By weight, long enough for the set of candidates to change many times over; and by size."""
    random = np.random.default_rng([29, count])
    weights = KINDS[kind](random, count)
    # Megatron-LM looks at every dataset for every sample.
    assert_by_weights(weights.tolist(), min(200_000, 250_000_000 // count))
    size = min(150_000, 40_000_000 // count)
    sizes = np.ceil(weights / weights.sum() * size).astype(int).tolist()
    megatron.assert_alike(blend_exhaustively(sizes), theirs_by_sizes(sizes))


@pytest.mark.parametrize("scale", [1e-9, 0.9, 1.1, 1e9])
def test_blends_by_weights_that_are_not_normalised_are_equal(scale: float) -> None:
    """Megatron-LM's helper does not normalise them, and neither does our kernel."""
    random = np.random.default_rng(30)
    for count in (5, 70, 1000):
        weights = random.random(count)
        weights *= scale / weights.sum()
        ours = _native.blend_by_weights(weights, 30_000)
        megatron.assert_alike(ours, theirs_by_weights(weights, 30_000))


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


@pytest.mark.parametrize("seed", range(30))
def test_the_samples_of_each_dataset_are_equal_in_number(seed: int) -> None:
    random = np.random.default_rng([22, seed])
    draw = KINDS[[*KINDS][seed % len(KINDS)]]
    weights = megatron.normalize(draw(random, int(random.integers(1, 61))))
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


Datasets = tuple[list[millrace.GPTDataset], list[megatron.GPTDataset]]


def both_datasets(prefixes: list[Path], cache: Path, num_samples: int | None) -> Datasets:
    cases = [
        megatron.Case(
            prefix=prefix,
            sequences=(0, len(millrace.IndexedDataset(prefix))),
            num_samples=num_samples,
            sequence_length=8,
        )
        for prefix in prefixes
    ]
    return [case.ours() for case in cases], [case.theirs(cache) for case in cases]


def test_the_builders_weights_are_normalised_twice(tmp_path: Path) -> None:
    """The second time may change a weight's last bit, and so break a tie."""
    random = np.random.default_rng(28)
    prefixes, weights, size = write_datasets(random, tmp_path, 2), [0.15, 0.79], 1000
    once = millrace.normalize(weights)
    assert millrace.normalize(once) != once
    assert blend(once, size)[0].tolist() != blend(weights, size)[0].tolist()
    options: Any = {"blend": ([*map(str, prefixes)], weights), "split": "1", "sequence_length": 8}
    theirs = megatron.build(megatron.config_of(None, **options), [size, 1, 1])
    config = millrace.DatasetConfig(seed=1234, num_samples=(size, 1, 1), **options)
    megatron.assert_same_datasets(millrace.build_datasets(config).train, theirs[0])


@pytest.mark.parametrize("seed", range(5))
def test_a_blend_of_datasets_built_one_by_one_is_equal(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng([26, seed])
    count = int(random.integers(1, 6))
    prefixes = write_datasets(random, tmp_path, count)
    weights, size = (10.0 ** random.uniform(-3, 3, count)).tolist(), 300
    ours, theirs = both_datasets(prefixes, tmp_path / "cache", size)
    megatron.assert_same_datasets(
        millrace.BlendedDataset(ours, weights, size),
        megatron.BlendedDataset(theirs, weights, size, megatron.config_of(None)),
    )


def test_a_blend_that_draws_too_much_of_a_dataset_is_refused_by_both(tmp_path: Path) -> None:
    prefixes = write_datasets(np.random.default_rng(27), tmp_path, 2)
    ours, theirs = both_datasets(prefixes, tmp_path / "cache", None)
    for weights in ([1.0, 1e-6], [1e-6, 1.0]):
        size = len(ours[weights.index(1.0)]) + 5
        with pytest.raises(IndexError, match="oversamples"):
            megatron.BlendedDataset(theirs, weights, size, megatron.config_of(None))
        with pytest.raises(millrace.ConfigError, match="draws more samples"):
            millrace.BlendedDataset(ours, weights, size)
