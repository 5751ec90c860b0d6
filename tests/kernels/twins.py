"""A kernel beside its twin: equal results, or errors of both."""

from typing import Any

import numpy as np
import pytest
from tests.kernels import reference

from millrace import _native


def int64(values: object) -> np.ndarray:
    return np.array(values, np.int64).reshape(-1)


MODULES: tuple[Any, ...] = (_native, reference)


def assert_same(actual: Any, expected: Any) -> None:
    """Of values, or of tuples of them."""
    left, right = (x if isinstance(x, (tuple, list)) else (x,) for x in (actual, expected))
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def assert_twin(name: str, *arguments: Any, **options: Any) -> Any:
    """The kernel's result, which equals its twin's."""
    actual, expected = (getattr(module, name)(*arguments, **options) for module in MODULES)
    assert_same(actual, expected)
    return actual


def assert_refused(error: Any, match: str, name: str, *arguments: Any, **options: Any) -> None:
    for module in MODULES:
        with pytest.raises(error, match=match):
            getattr(module, name)(*arguments, **options)
