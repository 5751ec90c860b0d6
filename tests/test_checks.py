"""Checks of numbers and flags."""

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from millrace.checks import (
    check_bool,
    check_float,
    check_floats,
    check_int,
    check_ints,
    check_token,
    shown,
)
from millrace.errors import ConfigError

INTEGERS = [np.dtype(code) for code in "bBhHiIlLqQ"]


@given(st.data())
def test_every_integer_type_becomes_a_python_int(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(INTEGERS))
    limits = np.iinfo(dtype)
    number = data.draw(st.integers(int(limits.min), int(limits.max)))
    array = np.array(number, dtype)
    for value in (dtype.type(number), array, array.astype(dtype.newbyteorder())):
        assert check_int("size", value) == number
        assert type(check_int("size", value)) is int
    assert json.dumps(check_int("size", dtype.type(number))) == str(number)


@pytest.mark.parametrize(
    "value", [2.0, 2.5, True, np.True_, np.float64(2), "2", b"2", None, [2], np.array([2]), 2 + 0j]
)
def test_other_values_than_whole_numbers_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^size must be a whole number, not .*$"):
        check_int("size", value)


def test_messages_give_the_limits() -> None:
    with pytest.raises(ConfigError, match=r"^size must be at least 1, not 0$"):
        check_int("size", np.int8(0), 1)
    with pytest.raises(ConfigError, match=r"^seed must be between 0 and 2\*\*32 - 1, not 42949"):
        check_int("seed", 2**32, 0, 2**32 - 1)
    with pytest.raises(ConfigError, match=r"^size must be between 0 and 1, not 0x"):
        check_int("size", 10**5000, 0, 1)
    with pytest.raises(ConfigError, match="size must be at most 5, not 6"):
        check_int("size", 6, most=5)


def test_any_number_of_64_bits_is_a_token() -> None:
    tokens = [None, -1, -(2**63), 2**63 - 1]
    assert [check_token("pad_token", token) for token in tokens] == tokens
    assert type(check_token("pad_token", np.int64(-(2**63)))) is int
    for value in (2**63, 1.0, True, "0"):
        with pytest.raises(ConfigError, match="pad_token must be"):
            check_token("pad_token", value)


def test_flags_are_bools() -> None:
    assert check_bool("drop_last", np.True_) is True
    assert check_bool("drop_last", False) is False
    for value in (0, 1, None, "no", np.int64(1), [True]):
        with pytest.raises(ConfigError, match=r"^drop_last must be True or False, not .*$"):
            check_bool("drop_last", value)


def test_reals_accept_every_exact_or_floating_type() -> None:
    values = [1, 0.5, np.float32(0.5), np.int16(3), Fraction(1, 4), Decimal("0.25")]
    floats = check_floats("the weights", values)
    assert floats == [1.0, 0.5, 0.5, 3.0, 0.25, 0.25]
    assert {type(value) for value in floats} == {float}
    assert check_floats("the weights", np.array([1, 2], ">i4")) == [1.0, 2.0]
    for value in ("1", b"1", True, None, 1j, np.complex64(1), [1.0], Decimal("sNaN")):
        with pytest.raises(ConfigError, match=r"the weight must be a number, not .*"):
            check_float("the weight", value)
    with pytest.raises(ConfigError, match="fit float64"):
        check_float("the weight", Fraction(10) ** 400)
    for values in ("12", 1.0, np.array(1.0), None):
        with pytest.raises(ConfigError, match=r"the weights must be a list.*"):
            check_floats("the weights", values)


@given(st.data())
def test_whole_numbers_are_accepted_in_any_form(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(INTEGERS))
    limits = np.iinfo(dtype)
    most = min(int(limits.max), 2**63 - 1)
    numbers = data.draw(st.lists(st.integers(int(limits.min), most), max_size=20))
    array = np.array(numbers, dtype)
    unaligned = np.frombuffer(b"x" + array.tobytes(), dtype, offset=1)
    read_only = array.copy()
    read_only.setflags(write=False)
    for form in (
        numbers,
        tuple(numbers),
        list(array),
        array,
        array.astype(dtype.newbyteorder()),
        np.repeat(array, 3)[::3],
        array[::-1].copy()[::-1],
        unaligned,
        read_only,
        array.astype(object).tolist(),
    ):
        ids = check_ints("the ids", form)
        assert ids.tolist() == numbers
        assert ids.dtype == np.int64
        assert ids.dtype.isnative
        assert ids.flags.c_contiguous
        assert ids.flags.aligned


def test_int64_is_not_copied() -> None:
    ids = np.arange(5)
    assert check_ints("the ids", ids) is ids


def test_mixed_lists_are_exact() -> None:
    large = 2**53 + 1
    assert check_ints("the ids", [np.int64(-1), np.uint64(large)]).tolist() == [-1, large]


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [0.5, 1],
        np.array([1.0]),
        [True, False],
        np.array([True]),
        ["1"],
        5,
        [[1], [2]],
        np.array([2**63], np.uint64),
        [2**63],
        [-(2**63) - 1],
        [None],
        "12",
    ],
)
def test_other_arrays_are_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match="the ids"):
        check_ints("the ids", values)


def test_long_values_are_cut() -> None:
    assert len(shown("x" * 10**6)) < 300
    assert shown(5) == "5"
