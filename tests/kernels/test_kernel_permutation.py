"""The twin law for swap_or_not, and its frozen values; tests/order has its statistics."""

import itertools
import pickle
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.kernels.twins import assert_refused, assert_twin

from millrace import _native
from millrace.errors import ConfigError
from millrace.order import KeyedPermutation

# Around the kernel's blocks of 512 numbers and powers of two, up to the largest size.
LARGE = [2**k + d for k in (31, 32, 40, 53, 62, 63) for d in (-1, 0, 1) if 2**k + d < 2**63]
KEYS = [0, 1, 2**32, 2**63, 2**64 - 1]


def permuted(size: int, key: int) -> np.ndarray:
    return _native.swap_or_not(np.arange(size), size, key, False)


# ---- the twin and the laws ----


@given(data=st.data(), key=st.integers(0, 2**64 - 1), is_inverse=st.booleans())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_swap_or_not_equals_its_twin(data: st.DataObject, key: int, is_inverse: bool) -> None:
    size = data.draw(st.one_of(st.integers(1, 50), st.sampled_from(LARGE), st.integers(1, 2**63)))
    size = min(size, 2**63 - 1)
    numbers = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20)), np.int64)
    actual = assert_twin("swap_or_not", numbers, size, key, is_inverse)
    assert np.all((actual >= 0) & (actual < size))
    back = _native.swap_or_not(actual, size, key, not is_inverse)
    np.testing.assert_array_equal(back, numbers, strict=True)


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1023, 1024, 1025, 5000])
def test_any_number_of_numbers_equals_the_twin(count: int) -> None:
    for size, is_inverse in itertools.product((count + 1, 2**40), (False, True)):
        numbers = np.random.default_rng(count).integers(0, size, count)
        assert_twin("swap_or_not", numbers, size, 3, is_inverse)


SIZES = [*range(600), 1023, 1024, 1025, 2047, 2048, 2049, 65535, 65536, 65537]
SIZES += [2**power + more for power in range(1, 41) for more in (-1, 0, 1)]


def check_sizes(sizes: Iterable[int]) -> None:
    """The inverse finds every number again, or of large sizes the ends and some others."""
    for size in sizes:
        numbers = np.arange(min(size, 70_000))
        if size > len(numbers):
            numbers = np.append(np.random.default_rng(1).integers(0, size, 3000), [0, size - 1])
        for key in KEYS if size < 100 else KEYS[:1]:
            places = _native.swap_or_not(numbers, size, key, False)
            assert np.all((places >= 0) & (places < size))
            assert np.array_equal(_native.swap_or_not(places, size, key, True), numbers)


def test_every_size_is_permuted() -> None:
    check_sizes(SIZES)


def test_the_values_are_frozen() -> None:
    """Output folders depend on them: a change would be another shuffle."""
    assert permuted(10, 0).tolist() == GOLDEN_SMALL
    for size, expected in GOLDEN.items():
        numbers = np.array([0, 1, size // 2, size - 1])
        assert _native.swap_or_not(numbers, size, 2**64 - 1, False).tolist() == expected
    assert KeyedPermutation(2**40, 42).places(np.arange(4)).tolist() == GOLDEN_SEED


GOLDEN_SMALL = [9, 3, 6, 8, 4, 1, 5, 7, 2, 0]
GOLDEN = {
    2: [0, 1, 1, 1],
    1000: [332, 474, 899, 501],
    2**20 + 1: [678794, 138842, 784927, 869303],
    2**32: [1434477914, 592409453, 1283551637, 289560388],
    2**63 - 1: [2218318356120565215, 5416133068671208174, 6056464301726852435, 6569824497717213444],
}
GOLDEN_SEED = [1029293945607, 604818437896, 547157517414, 214819085131]


def test_numbers_and_arguments_outside_their_limits_are_refused() -> None:
    for size in (0, 1, 10, 2**63 - 1):
        for bad in (-1, -(2**63), *((size,) if size < 2**63 else ()), 2**63 - 1):
            assert_refused(ValueError, "outside", "swap_or_not", np.array([bad]), size, 0, False)
    nothing = np.empty(0, np.int64)
    assert len(_native.swap_or_not(nothing, 0, 0, False)) == 0
    for size, key in ((2**63, 0), (1, -1), (1, 2**64)):
        with pytest.raises(TypeError, match="incompatible"):
            _native.swap_or_not(nothing, size, key, False)


# ---- KeyedPermutation ----


@given(size=st.integers(1, 2**63 - 1), seed=st.integers(0, 2**130), data=st.data())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_places_and_sources_are_inverse(size: int, seed: int, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, size - 1), max_size=10, unique=True))
    permutation = KeyedPermutation(size, seed)
    places = permutation.places(np.array(numbers, np.int64))
    assert len(set(places.tolist())) == len(numbers)
    assert permutation.sources(places).tolist() == numbers
    copy = pickle.loads(pickle.dumps(permutation))
    assert copy == permutation
    assert copy.places(numbers).tolist() == places.tolist()


def test_bad_arguments_are_refused() -> None:
    for size, seed in ((-1, 0), (2**63, 0), (1.0, 0), (1, -1), (1, 0.5), (True, 0)):
        with pytest.raises(ConfigError):
            KeyedPermutation(size, seed)
    permutation = KeyedPermutation(10, 0)
    for bad in (-1, 10):
        for method in (permutation.places, permutation.sources):
            with pytest.raises(ValueError, match=rf"number is {bad}, outside \[0, 10\)"):
                method(np.array([bad]))
