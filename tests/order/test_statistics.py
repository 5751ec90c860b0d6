"""The instant order as a random order: the same statistics as NumPy's shuffle, for every size.

`python -m tests.order.test_statistics` prints the p-values.
"""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from millrace.order.instant import InstantOrder, source_key
from tests.kernels.test_kernel_permutation import check_sizes
from tests.order.instant_model import Position, Source

NUM, EPOCHS, BINS, LENGTH = 5000, 400, 50, 4
SEEDS = range(5)


def instant(seed: int) -> np.ndarray:
    """The window at each place of each epoch: [EPOCHS, NUM]."""
    order = InstantOrder((0, (NUM + 1) * LENGTH), "web", seed, sequence_length=LENGTH)
    return order.spans(np.arange(NUM * EPOCHS)).offsets.reshape(EPOCHS, NUM) // LENGTH


def shuffle(seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(NUM) for _ in range(EPOCHS)])


def normal_score(chi_square: float, degrees: int) -> float:
    """Wilson and Hilferty's score of a chi-square."""
    spread = 2 / (9 * degrees)
    return float(((chi_square / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


def p_values(orders: np.ndarray) -> dict[str, float]:
    """Two-sided p-values, of statistics whose means and variances are those of all permutations."""
    places, mean = np.arange(NUM), orders.size / BINS**2
    adjacent = (np.abs(np.diff(orders)) == 1).sum()  # Poisson: 2 * (n - 1) / n in an epoch
    expected = EPOCHS * 2 * (NUM - 1) / NUM
    moved = np.abs(orders - places).sum()  # Spearman's footrule
    footrule = EPOCHS * (NUM**2 - 1) / 3, EPOCHS * (NUM + 1) * (2 * NUM**2 + 7) / 45
    size = NUM // BINS
    sums = orders.reshape(-1, size).sum(axis=1) - size * (NUM - 1) / 2
    spread = size * (NUM - size) * (NUM + 1) / 12
    cells = np.bincount((orders // size * BINS + places // size).ravel(), minlength=BINS**2)
    scores = {
        "adjacent pairs": (adjacent - expected) / math.sqrt(expected),
        "displacement": (moved - footrule[0]) / math.sqrt(footrule[1]),
        "windows": normal_score((sums**2).sum() / spread * (BINS - 1) / BINS, EPOCHS * (BINS - 1)),
        "positions": normal_score(((cells - mean) ** 2).sum() / mean, (BINS - 1) ** 2),
    }
    return {name: math.erfc(abs(score) / math.sqrt(2)) for name, score in scores.items()}


@pytest.mark.parametrize("draw", [instant, shuffle])
def test_statistics_are_those_of_random_orders(draw: Callable[[int], np.ndarray]) -> None:
    values = [value for seed in SEEDS for value in p_values(draw(seed)).values()]
    assert min(values) > 1e-4
    assert 0.2 < np.mean(values) < 0.8


def test_every_size_is_permuted() -> None:
    check_sizes(range(70_001))


def test_samples_of_large_numbers_are_the_models() -> None:
    rng = random.Random(1)
    order = InstantOrder((0, 1000), "web", 3, sequence_length=8)
    for number in [2**48 - 1, 2**48, 2**62, *(rng.randrange(2**48, 2**62) for _ in range(50))]:
        epoch, place = divmod(number, 124)
        source = Source(1000, None, 1, (), source_key(3, "web"), Position(epoch, 8, 8 * place))
        assert order.spans([number]).offsets[0] == source.draw(8)[0]


if __name__ == "__main__":
    for draw in (instant, shuffle):
        for seed in SEEDS:
            values = p_values(draw(seed)).items()
            print(f"{draw.__name__:8} {seed}", *(f"{name} {one:.3f}" for name, one in values))
