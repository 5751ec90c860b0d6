"""Megatron-LM's cache files: written atomically, loaded only if they fit, built by one process."""

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.cache import megatron as cache
from millrace.errors import DataError
from millrace.order import build_gpt_indices, plan_gpt
from tests.no_flock import no_flock
from tests.store import pairs

LENGTHS = np.array([5, 0, 7, 1, 0, 12, 3, 0, 0, 9], np.int32)


def make(
    folder: Path, *, sequence_length: int = 4, num_samples: int | None = 20, **options: Any
) -> tuple[cache.CacheSet, dict[str, Any], Callable[[dict[str, Any]], None]]:
    """A cache set, its arrays, and the check that they pass."""
    seed, lengths = options.pop("seed", 3), options.pop("lengths", LENGTHS)
    plan = plan_gpt(int(lengths.sum()), num_samples, sequence_length, **options)
    arrays = build_gpt_indices(lengths, (0, len(lengths)), plan, seed)._asdict()
    identifiers = {
        "class": "GPTDataset",
        "dataset_path": "data",
        "num_samples": num_samples,
        "index_split": "valid",
        "random_seed": seed,
        "sequence_length": sequence_length,
        "split": "9,1",
        "split_matrix": [(0, 0.9), (0.9, 1.0), None],
        "tokenizer": {"name": "τ"},
    }
    files = cache.CacheSet.of(str(folder), identifiers, "valid", cache.GPT_ARRAYS)
    return files, arrays, lambda loaded: cache.check_gpt_arrays(loaded, plan, len(lengths), lengths)


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "no header": lambda data: b"\x93NUMPY" + b"\0" * 200,
    "another start": lambda data: b"x" * 40 + data[40:],
    "longer": lambda data: data + b"\0",
    "gone": lambda data: None,
}


def test_the_description_is_json_and_describes_the_set(tmp_path: Path) -> None:
    files, arrays, check = make(tmp_path / "deep" / "cache")
    cache.save(files, arrays)
    assert files.stem.endswith("-GPTDataset-valid")
    text = Path(files.path("description")).read_text()
    assert text.startswith('{\n    "class": "GPTDataset",\n    "dataset_path": "data",\n')
    assert '"split_matrix": [\n        [\n            0,\n            0.9\n        ],' in text
    assert len(list((tmp_path / "deep" / "cache").iterdir())) == 4
    with ThreadPoolExecutor(8) as pool:
        # On Python 3.11 a plain `numpy.load` in threads fails every few hundred loads.
        for loaded in pool.map(lambda _: cache.load(files, check), range(600)):
            assert not any(array.flags.writeable for array in loaded.values())
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)


@pytest.mark.parametrize("name", ["description", *cache.GPT_ARRAYS])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_set_is_built_again(name: str, damage: str, tmp_path: Path) -> None:
    files, arrays, check = make(tmp_path)
    cache.save(files, arrays)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    path = Path(files.path(name))
    damaged = DAMAGES[damage](path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises((DataError, FileNotFoundError)):
        cache.load(files, check)
    problems = []

    def build(problem: str) -> dict[str, Any]:
        problems.append(problem)
        return arrays

    cache.load_or_build(files, check, build)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole
    cache.load_or_build(files, check, build)
    assert [bool(problem) for problem in problems] == [damage != "gone"]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "other",
    [
        {"num_samples": 60},
        {"sequence_length": 6},
        {"drop_last_partial_sequence": False},
        {"add_extra_token": False},
        {"lengths": LENGTHS[::-1].copy()},
        {"lengths": np.append(LENGTHS[:-1], LENGTHS[-1] + 1)},
    ],
)
def test_a_set_of_other_options_does_not_fit(other: Any, seed: int, tmp_path: Path) -> None:
    """Arrays of other options or data under this set's name: the check rejects other rows.

    Without the extra token a row may be the end of one document, and with it the start of the next:
    the samples are then the same.
    """
    options: dict[str, Any] = {"num_samples": None, "sequence_length": 5, "seed": seed}
    files, arrays, check = make(tmp_path, **options)
    _, other_arrays, _ = make(tmp_path, **(options | other))
    cache.save(files, other_arrays)
    if np.array_equal(other_arrays["sample_index"], arrays["sample_index"]):
        cache.load(files, check)
    else:
        with pytest.raises(DataError):
            cache.load(files, check)


@pytest.mark.parametrize("name", cache.GPT_ARRAYS)
def test_an_array_of_another_form_does_not_fit(name: str, tmp_path: Path) -> None:
    _, arrays, check = make(tmp_path)
    array = arrays[name]
    for other in (array.astype(np.int16), array[:-1], np.append(array, array[-1:], axis=0)):
        with pytest.raises(DataError, match=rf"the {name} is {other.dtype} \({len(other)}"):
            check({**arrays, name: other})


@pytest.mark.parametrize("seed", range(40))
def test_a_new_set_passes_its_check(seed: int, tmp_path: Path) -> None:
    """For any plan; some of the sequences are empty."""
    random = np.random.default_rng(seed)
    files, arrays, check = make(
        tmp_path,
        sequence_length=int(random.integers(1, 30)),
        num_samples=[None, 1, 30][seed % 3],
        add_extra_token=bool(random.integers(2)),
        drop_last_partial_sequence=bool(random.integers(2)),
        seed=seed,
    )
    check(arrays)
    cache.save(files, arrays)
    cache.load(files, check)


def test_a_blend_is_checked(tmp_path: Path) -> None:
    identifiers = {"class": "BlendedDataset", "weights": [0.5, 0.5]}
    files = cache.CacheSet.of(str(tmp_path), identifiers, "train", cache.BLEND_ARRAYS)
    numbers, places = np.array([0, 1, 0, 1], np.int16), np.array([0, 0, 1, 1], np.int64)
    good = {"dataset_index": numbers, "dataset_sample_index": places}

    def check(arrays: dict[str, Any]) -> None:
        cache.check_blend_arrays(arrays, 4, 2)

    cache.save(files, good)
    cache.load(files, check)
    one_more = numbers + np.int16(1)
    for bad in ({"dataset_index": one_more}, {"dataset_sample_index": places[:3]}):
        cache.save(files, good | bad)
        with pytest.raises(DataError):
            cache.load(files, check)


BUILD = """
import os, sys, time
from pathlib import Path
import numpy as np
from millrace.cache import megatron as cache
from tests.cache.test_megatron import make
lengths = np.full(20_000, 9, np.int32)
for seed in range(8):
    files, arrays, check = make(Path(sys.argv[1]), lengths=lengths, num_samples=None, seed=seed)
    def build(problem):
        print("builds")
        time.sleep(0.2)  # so that others come meanwhile
        return arrays
    loaded, _ = cache.load_or_build(files, check, build)
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)
"""


@pytest.mark.parametrize("has_locks", [True, False])
def test_processes_that_build_the_same_set_all_load_it(has_locks: bool, tmp_path: Path) -> None:
    environment = dict(os.environ) if has_locks else no_flock(tmp_path)
    options: Any = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    num_builds = 0
    with pairs.ended(pairs.start(BUILD, tmp_path / "cache", **options) for _ in range(4)) as builds:
        for process in builds:
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            num_builds += output.count("builds")
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert len(names) == 8 * 4, sorted(names)
    assert num_builds == 8 if has_locks else num_builds >= 8  # of each set, one process builds it
