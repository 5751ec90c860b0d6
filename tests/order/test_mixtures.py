"""Megatron-LM's blend as a mixture: what is drawn, found again and counted."""

import numpy as np
import pytest

from millrace import ConfigError, normalize
from millrace.deferred import Deferred
from millrace.order import BlendOrder, Mixture, blends, build_blend_indices

WEIGHTS = [5.0, 2.0, 0.1, 1.0]


@pytest.fixture
def blend() -> Mixture:
    indices = build_blend_indices("abcd", [1000] * 4, WEIGHTS, 700)
    return BlendOrder(normalize(WEIGHTS), 700, Deferred.of(indices))


def test_find_is_the_reverse_of_draws(blend: Mixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blends, "_CHUNK_SIZE", 64)
    every = np.arange(len(blend))
    sources, numbers = blend.draws(every)
    total = blend.counts(len(blend))
    assert total.tolist() == np.bincount(sources, minlength=4).tolist()
    for source, count in enumerate(total.tolist()):
        places = blend.find(source, np.arange(count + 3))
        np.testing.assert_array_equal(places[:count], every[sources == source])
        assert places[count:].tolist() == [-1] * 3
        wanted = np.array([count, 0, -5, max(count - 1, 0), 0])
        assert blend.find(source, wanted).tolist() == [-1, *places[[0]], -1, *places[wanted[3:]]]
    np.testing.assert_array_equal(numbers[sources == 0], np.arange(total[0]))


def test_counts_are_those_before_a_sample_number(blend: Mixture) -> None:
    sources, _ = blend.draws(np.arange(len(blend)))
    for number in (0, 1, 350, 699, 700):
        expected = np.bincount(sources[:number], minlength=4)
        np.testing.assert_array_equal(blend.counts(number), expected)


def test_numbers_outside_a_blend_are_refused(blend: Mixture) -> None:
    with pytest.raises(ConfigError, match=r"sample_number .* 700, not 701"):
        blend.counts(701)
    with pytest.raises(ConfigError, match=r"source .*3"):
        blend.find(4, np.arange(1))
