"""Fixtures of the loader's tests."""

import gc
from collections.abc import Iterator

import pytest

from tests.feed.helpers import wait_for, workers


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Checks that the loaders of a test have ended their threads."""
    yield
    gc.collect()
    wait_for(lambda: not workers())
