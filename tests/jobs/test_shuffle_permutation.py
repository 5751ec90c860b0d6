"""The permutations of a shuffle: NumPy's own in two files, and the keyed one."""

import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace.errors import ConfigError, DataError
from millrace.order import KeyedPermutation
from millrace.shuffling import permutations
from millrace.shuffling.permutations import choose_permutation, make_permutation

NAMES = ("numpy", "keyed")


@given(
    size=st.integers(0, 300),
    seed=st.integers(0, 2**70),
    name=st.sampled_from(NAMES),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_ranges_are_parts_of_one_permutation(
    tmp_path_factory: pytest.TempPathFactory, size: int, seed: int, name: str, cuts: list[int]
) -> None:
    folder = str(tmp_path_factory.mktemp("permutation"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutations, "_BLOCK", 16)
        permutation = make_permutation(name, size, seed, folder)
    assert (permutation.name, permutation.size) == (name, size)
    bounds = sorted({0, size, *(min(cut, size) for cut in cuts)})
    places, sources = (
        np.concatenate(
            [np.empty(0, np.int64)] + [read(a, b) for a, b in itertools.pairwise(bounds)]
        )
        for read in (permutation.places, permutation.sources)
    )
    assert places.dtype == sources.dtype == np.int64
    assert np.array_equal(np.sort(places), np.arange(size))
    assert np.array_equal(places[sources], np.arange(size))
    expected = np.random.default_rng(seed).permutation(size)
    if name == "keyed":
        expected = KeyedPermutation(size, seed).places(np.arange(size))
    np.testing.assert_array_equal(places, expected, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_only_paths_and_numbers_travel_to_a_worker(tmp_path: Path, name: str) -> None:
    permutation = make_permutation(name, 100_000, 3, str(tmp_path))
    permutation.places(0, 100_000)
    data = pickle.dumps(permutation)
    assert len(data) < 1000
    code = (
        "import pickle, sys\n"
        "permutation = pickle.loads(sys.stdin.buffer.read())\n"
        "print(permutation.places(5, 9).tolist(), permutation.sources(5, 9).tolist())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, check=True, cwd="/"
    ).stdout
    expected = f"{permutation.places(5, 9).tolist()} {permutation.sources(5, 9).tolist()}"
    assert out.decode().strip() == expected


def test_files_that_are_lost_while_the_job_runs_are_an_error(tmp_path: Path) -> None:
    permutation = make_permutation("numpy", 1000, 1, str(tmp_path))
    os.truncate(tmp_path / "places", 5000)
    assert len(permutation.places(0, 500)) == 500
    with pytest.raises(DataError, match=r"places is missing or has become shorter"):
        permutation.places(500, 1000)
    (tmp_path / "sources").unlink()
    with pytest.raises(DataError, match=r"sources is missing"):
        permutation.sources(0, 1)


def test_the_choice_depends_on_the_memory() -> None:
    for name, size, memory, expected in (
        ("auto", 1000, 32_000, "numpy"),
        ("auto", 1001, 32_000, "keyed"),
        ("auto", 0, 0, "numpy"),
        ("numpy", 1001, 20_000, "numpy"),
        ("keyed", 1, 10**12, "keyed"),
    ):
        assert choose_permutation(name, size, memory, "sequences") == expected
    with pytest.raises(ConfigError, match=r"takes 16.0 MB .* 1,000,001 sequences, and 0 bytes are"):
        choose_permutation("numpy", 1_000_001, -1, "sequences")
