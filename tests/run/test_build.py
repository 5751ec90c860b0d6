"""`build_datasets`: what it refuses, what it warns of, and what it finds in a cache folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import (
    BlendedDataset,
    CacheError,
    ConfigError,
    DataError,
    DatasetConfig,
    Datasets,
    DuplicateDataWarning,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    Loader,
    ResumeError,
    build_datasets,
)
from millrace.files import file_lock
from millrace.order import plan_gpt
from millrace.run.build import _layout, build_run
from millrace.run.manifest import Manifest
from millrace.run.plan import DatasetPlan, RunPlan, SplitPlan

S = 8  # the sequence length


def write(prefix: Path, lengths: Sequence[int], seed: int = 0) -> str:
    """A token file of random tokens, in documents of these lengths."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in lengths:
            builder.add_document(random.integers(0, 100, length))
    return str(prefix)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Three token files, of 30, 60 and 90 documents."""
    return [
        write(tmp_path / f"data-{number}", [12 + place % 7 for place in range(30 * number)], number)
        for number in (1, 2, 3)
    ]


def config_of(**options: Any) -> DatasetConfig:
    everything = {"sequence_length": S, "seed": 11, "num_samples": (200, 20, 20)}
    if "blend_per_split" not in options:
        everything["split"] = "8,1,1"
    return DatasetConfig(**{**everything, **options})


def build(**options: Any) -> Datasets:
    return build_datasets(config_of(**options))


# ---- the same data twice ----


@pytest.mark.parametrize("cache", [False, True])
def test_the_same_prefix_twice_in_a_blend_warns(
    prefixes: list[str], cache: bool, tmp_path: Path
) -> None:
    a, b, _ = prefixes
    options = {"cache": tmp_path / "cache"} if cache else {}
    for _ in range(2):  # with a cache: also when everything is there
        with pytest.warns(DuplicateDataWarning, match=f"blend has the data of {a} twice"):
            build(blend=([a, b, a], [1, 2, 1]), **options)


def test_a_copy_of_the_data_at_another_path_warns(prefixes: list[str], tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(prefixes[0] + suffix, tmp_path / f"copy{suffix}")
    copy = str(tmp_path / "copy")
    with pytest.warns(DuplicateDataWarning, match=f"{copy} twice \\(also as {prefixes[0]}\\)") as w:
        build(blend=([prefixes[0], prefixes[1], copy], None), num_samples=(None,) * 3)
    assert {warning.filename for warning in w} == {__file__}


def test_the_same_data_in_two_splits_or_apart_does_not_warn(prefixes: list[str]) -> None:
    a = prefixes[0]
    build(blend_per_split=[([a], None), ([a, a], None), ([a], None)], multiple_validation_sets=True)


# ---- what is refused ----

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blend": ("AB", [1.0])}, "1 weights for 2 prefixes"),
        ({"blend": ("AB", [1.0, 2.0, 3.0])}, "3 weights for 2 prefixes"),
        ({"blend": ("AB", [1.0, -1.0])}, r"\[1.0, -1.0\]; they must be finite, not below 0"),
        ({"blend": ("AB", [1.0, NAN])}, r"\[1.0, nan\]; they must be finite"),
        ({"blend": ("AB", [1.0, INF])}, r"\[1.0, inf\]; they must be finite"),
        ({"blend": ("AB", [0.0, 0.0])}, "not all 0"),
        ({"blend": ("AB", [1.0, 0.0])}, "train split: the weight of dataset 1 is 0.0"),
        ({"blend": ("AB", [1e300, 1e-300])}, "train split: the weight of dataset 1 is 0.0"),
        ({"blend": ("AB", ["1", "2"])}, "a number is needed"),
        ({"blend": ("AB", None), "num_samples": (1, 2)}, r"\(1, 2\); give an entry for each"),
        ({"blend": ("AB", None), "num_samples": 7}, "is 7; give an entry for each"),
        (
            {"blend": ("AB", None), "num_samples": (-1, 2, 3)},
            "num_samples of train is -1; at least 0",
        ),
        ({"blend": ("AB", None), "num_samples": (1.5, 2, 3)}, "1.5; a whole number"),
        ({"blend": ("AB", [1, 2]), "num_samples": (9, None, 9)}, "valid blend has weights, and"),
        ({"blend": ("", None)}, "list of prefixes is needed"),
        ({"blend": ("A",)}, r"it must be \(prefixes, weights\)"),
        ({"blend": ("A", None), "split": None}, "a blend needs one"),
        ({"blend": ("A", None), "split": "a,b"}, 'split "a,b" must be'),
        ({"blend": ("A", None), "split": "1,-1"}, 'split "1,-1" must be'),
        ({"blend": ("A", None), "split": [(0, 0.9), (0.8, 1), None]}, "they overlap"),
        ({"blend": ("A", None), "split": [(0, 0.9), (0.9, 1.1), None]}, "end <= 1"),
        ({"blend": ("A", None), "blend_per_split": [None] * 3}, "one of the two"),
        ({"blend_per_split": [("A", None)]}, "give an entry for each of train"),
        ({"blend_per_split": [None] * 3}, "no split has a blend"),
        ({"blend": ("A", None), "seed": -1}, "seed is -1"),
        ({"blend": ("A", None), "seed": 2**32}, "seed is 4294967296; 0 to 4294967295"),
        ({"blend": ("A", None), "surplus": -0.1}, "surplus is -0.1"),
        ({"blend": ("A", None), "surplus": NAN}, "surplus is nan"),
        ({"blend": ("A", None), "surplus": INF}, "surplus is inf"),
        ({"blend": ("A", None), "num_threads": 0}, "num_threads is 0; at least 1"),
        ({"blend": ("A", None), "trust_cache": True}, "give cache"),
        ({"blend": ("A", None), "full_validation": True}, "asks for 20 validation samples"),
        ({"blend": ("A", None), "multiple_validation_sets": True}, "needs a blend_per_split"),
        ({"blend": ("A", None), "eod_mask_loss": True}, "give eod_token"),
        ({"blend": ("A", None), "sequence_length": 0}, "sequence_length is 0; 1 to 2147483647"),
        ({"blend": ("A", None), "access": "carrier pigeon"}, "it is one of mmap, file"),
        (
            {"blend": ("ABC", None), "sequence_length": 150, "num_samples": (None,) * 3},
            "the valid split: .*data-1, sequences 24 to 27: sequence_length 150 .* no sample",
        ),
        ({"blend": ("A", None), "split": "999,1"}, r"the valid split: .*30 to 30: .* 0 tokens"),
        (
            {"blend": ("A", None), "num_samples": (2**62, 1, 1)},
            "4,611,686,018,427,.* bytes of indices; 70,368,744,177,664 is the limit",
        ),
        (
            {"blend": ("AB", [1, 1]), "num_samples": (10**30, 1, 1)},
            "the train split: num_samples is 10+; 0 to 9223372036854775807 is possible",
        ),
    ],
)
@pytest.mark.parametrize("cache", [False, True])
def test_what_cannot_work_is_refused(
    prefixes: list[str], options: dict[str, Any], message: str, cache: bool, tmp_path: Path
) -> None:
    names = dict(zip("ABC", prefixes, strict=True))

    def named(blend: Any) -> Any:
        return blend and ([names[letter] for letter in blend[0]], *blend[1:])

    given = dict(options)
    if "blend" in given:
        given["blend"] = named(given["blend"])
    if "blend_per_split" in given:
        given["blend_per_split"] = [named(blend) for blend in given["blend_per_split"]]
    if cache:
        given["cache"] = tmp_path / "cache"
        if "trust_cache" in given:
            message = "no manifest"
    with pytest.raises(ConfigError, match=message):
        build(**given)
    left = list((tmp_path / "cache").glob("*")) if cache else []
    assert left == []  # nothing half made, and no lock


def test_oversampling_is_refused_with_a_table(tmp_path: Path) -> None:
    """The greedy rule may ask a dataset for one sample more than its share: 22 for 21 here."""
    prefixes = [write(tmp_path / f"part-{n}", [S * n + 1]) for n in (21, 4, 2)]
    blend = (prefixes, [0.8243101435519362, 0.12519108493695014, 0.05049877151111362])
    options: dict[str, Any] = {"blend": blend, "split": "1", "num_samples": (25, 1, 1)}
    table = (
        r"(?s)train split: .* 1 of its datasets have:\n"
        r"  dataset 0 \(.*part-21\): has 21, 22 are drawn, 1 short\n.* surplus"
    )
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        with pytest.raises(ConfigError, match=table):
            build(**options, surplus=0, cache=cache)
    assert list((tmp_path / "cache").glob("*")) == [manifest_of(tmp_path / "cache")]
    train = build(**options).train  # with the usual surplus, as Megatron-LM does it
    assert train is not None
    assert len(train) == 27


def test_numbers_of_numpy_are_numbers(prefixes: list[str], tmp_path: Path) -> None:
    plain = {"blend": (prefixes[:2], [1.0, 3.0]), "num_samples": (50, 5, 5)}
    numpys = {
        "blend": (prefixes[:2], np.array([1, 3], np.float32)),
        "num_samples": np.array([50, 5, 5]),
        "seed": np.uint32(11),
        "sequence_length": np.int16(S),
        "surplus": np.float32(0.005),
    }
    build(**numpys, cache=tmp_path / "cache")
    assert config_of(**plain).order_key() == config_of(**{**numpys, "surplus": 0.005}).order_key()


def test_more_indices_than_memory_say_so(
    prefixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only said here: a machine may hand out memory that it does not have."""

    def build_none(*_: Any) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr("millrace.feed.indices.build_gpt_indices", build_none)
    with pytest.raises(MemoryError, match=r"data-1: the indices of .* bytes, and there is no"):
        build(blend=(prefixes[:1], None), num_samples=(2**40, 1, 1))


# ---- what is in a cache folder ----

FORMS = ("one", "blend", "lengths", "exhaustive", "per split", "apart")


def options_of(form: str, prefixes: list[str]) -> dict[str, Any]:
    """A configuration of each kind."""
    a, b, c = prefixes
    return {
        "one": {"blend": ([a], None)},
        "blend": {"blend": ([a, b, c], [0.5, 0.2, 0.3])},
        "lengths": {"blend": ([a, b, c], None)},
        "exhaustive": {"blend": ([a, b, c], None), "num_samples": (None, None, None)},
        "per split": {"blend_per_split": [([a, b], [1, 2]), ([c], None), None]},
        "apart": {
            "blend_per_split": [([a], None), ([b, c], None), ([a, b], None)],
            "num_samples": (100, None, 10),
            "multiple_validation_sets": True,
            "full_validation": True,
        },
    }[form]


def parts_of(dataset: Any) -> list[GPTDataset]:
    """The datasets of which one is made."""
    if dataset is None or isinstance(dataset, GPTDataset):
        return [] if dataset is None else [dataset]
    return list(dataset if isinstance(dataset, list) else dataset.datasets)


def assert_equal(ours: Datasets, others: Datasets) -> None:
    """The same arrays, samples and fingerprints."""
    for left, right in zip(ours, others, strict=True):
        assert type(left) is type(right)
        for one, other in zip(parts_of(left), parts_of(right), strict=True):
            assert_same_indices(one, other)
        if isinstance(left, BlendedDataset) and isinstance(right, BlendedDataset):
            assert left.fingerprint() == right.fingerprint()
            assert left.weights == right.weights
            np.testing.assert_array_equal(left.dataset_index, right.dataset_index, strict=True)
            np.testing.assert_array_equal(left.dataset_sample_index, right.dataset_sample_index)
            assert_same_samples(left, right)


def assert_same_indices(one: GPTDataset, other: GPTDataset) -> None:
    assert len(one) == len(other)
    assert one.fingerprint() == other.fingerprint()
    for name in ("document_index", "sample_index", "shuffle_index"):
        np.testing.assert_array_equal(
            getattr(one.indices, name), getattr(other.indices, name), name, strict=True
        )
    assert_same_samples(one, other)


def assert_same_samples(one: Any, other: Any) -> None:
    numbers = np.arange(min(len(one), 20))
    for name, array in one.batch(numbers).items():
        np.testing.assert_array_equal(array, other.batch(numbers)[name], name, strict=True)


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file."""
    stats = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def num_built(**options: Any) -> int:
    """How many datasets' indices a build makes."""
    seen = [0]
    build_datasets(config_of(**options), progress=lambda done, total: seen.append(done))
    return max(seen)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_cached_is_what_is_built(form: str, prefixes: list[str], tmp_path: Path) -> None:
    options, cache = options_of(form, prefixes), tmp_path / "cache"
    memory = build(**options)
    assert_equal(build(**options, cache=cache), memory)
    before = stamps(cache)
    assert not [name for name in before if name.endswith((".tmp", ".lock"))]
    assert_equal(build(**options, cache=cache), memory)
    assert_equal(build(**options, cache=cache, trust_cache=True), memory)
    assert_equal(build(**options, cache=cache, access="file"), memory)
    assert num_built(**options, cache=cache, num_threads=4) == 0
    assert stamps(cache) == before


@pytest.mark.parametrize("form", FORMS)
def test_threads_change_nothing(form: str, prefixes: list[str], tmp_path: Path) -> None:
    options, one = options_of(form, prefixes), build(**options_of(form, prefixes))
    assert_equal(build(**options, num_threads=4), one)
    assert_equal(build(**options, num_threads=4, cache=tmp_path / "four"), one)
    build(**options, cache=tmp_path / "one")
    for path in (tmp_path / "one").glob("*"):
        assert (tmp_path / "four" / path.name).read_bytes() == path.read_bytes()


def test_progress_counts_the_datasets(prefixes: list[str], tmp_path: Path) -> None:
    for cache in (None, tmp_path / "cache"):
        seen: list[tuple[int, int]] = []
        config = config_of(blend=(prefixes, None), num_threads=3, cache=cache)
        build_datasets(config, progress=lambda *counts: seen.append(counts))  # noqa: B023
        assert sorted(seen) == [(done, 9) for done in range(10)]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 12},
        {"sequence_length": 9},
        {"num_samples": (201, 20, 20)},
        {"split": "8,1,2"},
        {"surplus": 0.1},
        {"add_extra_token": False},
        {"drop_last_partial_validation_sequence": False},
    ],
)
def test_other_options_have_other_indices(
    prefixes: list[str], change: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"blend": (prefixes, [1, 2, 3])}
    build(**options, cache=tmp_path / "cache")
    assert_equal(build(**options, **change, cache=tmp_path / "cache"), build(**options, **change))
    with pytest.raises(ConfigError, match="no manifest for this configuration"):
        build(**options, **{**change, "seed": 99}, cache=tmp_path / "cache", trust_cache=True)


def test_what_samples_look_like_does_not_change_their_order(
    prefixes: list[str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"blend": (prefixes, None), "cache": tmp_path / "cache"}
    build(**options)
    looks = {"eod_token": 3, "pad_token": 4, "reset_position_ids": True, "eod_mask_loss": True}
    assert num_built(**options, **looks) == 0


# ---- starts that open no token file ----


def forget_data(prefixes: list[str]) -> None:
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            os.rename(prefix + suffix, prefix + suffix + ".away")


def bring_back(prefixes: list[str]) -> None:
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            os.rename(prefix + suffix + ".away", prefix + suffix)


@pytest.mark.parametrize("form", FORMS)
def test_a_trusted_cache_needs_no_token_file_before_the_first_sample(
    form: str, prefixes: list[str], tmp_path: Path
) -> None:
    options = options_of(form, prefixes)
    memory = build(**options)
    build(**options, cache=tmp_path / "cache")
    forget_data(prefixes)
    trusted = build(**options, cache=tmp_path / "cache", trust_cache=True)
    for left, right in zip(trusted, memory, strict=True):
        assert [len(part) for part in parts_of(left)] == [len(part) for part in parts_of(right)]
    assert trusted.train is not None
    loader = Loader(trusted.train, micro_batch_size=4)
    state = loader.state_dict()
    with pytest.raises(DataError, match="not found"):
        next(loader)
    bring_back(prefixes)
    loader.load_state_dict(state)
    next(loader)
    assert_equal(trusted, memory)


def _report_opened(config: DatasetConfig, out: Any) -> None:
    seen: list[str] = []
    is_watching = [True]

    def hook(event: str, arguments: Any) -> None:
        if is_watching and event == "open" and isinstance(arguments[0], str):
            seen.append(arguments[0])

    sys.addaudithook(hook)
    datasets = build_datasets(config)
    at_start = list(seen)
    assert datasets.train is not None
    datasets.train.batch([0, 1])
    is_watching.clear()
    out.put((at_start, seen))


def test_a_trusted_start_opens_nothing_beside_the_cache(
    prefixes: list[str], tmp_path: Path
) -> None:
    """Python tells of every file that it opens."""
    cache = tmp_path / "cache"
    options: dict[str, Any] = {"blend": (prefixes, [1, 2, 3]), "cache": cache}
    build(**options)
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    config = config_of(**options, trust_cache=True)
    process = context.Process(target=_report_opened, args=(config, out))
    process.start()
    at_start, after = out.get(timeout=60)
    process.join()
    data = tuple(prefix + suffix for prefix in prefixes for suffix in (".bin", ".idx"))
    assert not [path for path in at_start if path.startswith(data)]
    assert [path for path in at_start if path.startswith(str(cache))]
    assert [path for path in after if path.startswith(data)]


def test_trust_without_a_cache_that_can_be_trusted_is_refused(
    prefixes: list[str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    options: dict[str, Any] = {"blend": (prefixes, None), "cache": cache}
    for _ in range(2):
        with pytest.raises(ConfigError, match="no manifest for this configuration, or"):
            build(**options, trust_cache=True)
        assert not cache.exists()
    build(**options)
    for path in sorted(cache.iterdir()):
        saved = path.read_bytes()
        for damaged in (saved[:-1], saved[:-1] + b"?", b"", b"null", saved + b" "):
            path.write_bytes(damaged)
            with pytest.raises(ConfigError, match=r"no manifest .* damaged"):
                build(**options, trust_cache=True)
        path.write_bytes(saved)
        build(**options, trust_cache=True)


# ---- data that changes ----


def other_lengths(prefix: str, *, seed: int = 99) -> list[int]:
    """The lengths of its documents in another order: the same sizes, counts and tokens in all."""
    lengths = IndexedDataset(prefix).document_lengths
    return np.random.default_rng(seed).permutation(lengths).tolist()


def times_of(prefix: str) -> dict[str, tuple[int, int]]:
    stats = {suffix: os.stat(prefix + suffix) for suffix in (".bin", ".idx")}
    return {suffix: (stat.st_atime_ns, stat.st_mtime_ns) for suffix, stat in stats.items()}


def set_times(prefix: str, times: dict[str, tuple[int, int]], later: int = 0) -> None:
    for suffix, (accessed, modified) in times.items():
        os.utime(prefix + suffix, ns=(accessed, modified + later))


@pytest.mark.parametrize("form", FORMS)
def test_other_lengths_of_the_same_sizes_are_built_again(
    form: str, prefixes: list[str], tmp_path: Path
) -> None:
    options, cache = options_of(form, prefixes), tmp_path / "cache"
    build(**options, cache=cache)
    before, times = build(**options), times_of(prefixes[0])
    write(Path(prefixes[0]), other_lengths(prefixes[0]), seed=1)
    assert {suffix: os.stat(prefixes[0] + suffix).st_size for suffix in times}
    set_times(prefixes[0], times, later=1)  # a nanosecond
    after = build(**options)
    with pytest.raises(AssertionError):
        assert_equal(after, before)
    assert_equal(build(**options, cache=cache), after)
    assert_equal(build(**options, cache=cache, trust_cache=True), after)


@pytest.mark.parametrize("lengths", [[12] * 31, [12] * 30 + [13]])
def test_other_counts_are_built_again_even_at_the_same_times(
    prefixes: list[str], lengths: list[int], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"blend": (prefixes, None)}
    build(**options, cache=tmp_path / "cache")
    times = times_of(prefixes[0])
    write(Path(prefixes[0]), lengths)
    set_times(prefixes[0], times)
    assert_equal(build(**options, cache=tmp_path / "cache"), build(**options))


@pytest.mark.parametrize("changed", ["lengths", "counts"])
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("later", [0, 10**9])  # nanoseconds
def test_data_that_changes_after_the_start_is_refused_at_the_first_sample(
    prefixes: list[str], changed: str, trust: bool, later: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"blend": (prefixes, None), "cache": tmp_path / "cache"}
    build(**options)
    times = times_of(prefixes[0])
    train = build(**options, trust_cache=trust).train
    assert train is not None
    write(
        Path(prefixes[0]), other_lengths(prefixes[0]) if changed == "lengths" else [12] * 30, seed=1
    )
    set_times(prefixes[0], times, later=later)
    with pytest.raises(DataError, match=r"data-1 has .* its indices were built for .* again"):
        train.batch(np.arange(len(train)))
    if trust:  # the next one as well
        again = build(**options, trust_cache=True).train
        assert again is not None
        with pytest.raises(DataError, match=r"data-1 has .* its indices were built for .* again"):
            again.batch(np.arange(len(again)))


def swap_two_lengths(prefix: str) -> None:
    """Of neighbours, where the fingerprint of the content, which looks at places, does not look."""
    before = IndexedDataset(prefix)
    content, fingerprint = Path(prefix + ".idx").read_bytes(), before.fingerprint
    header = before.header
    for place in range(len(before) // 2, len(before) - 1):
        index = bytearray(content)
        lengths = np.frombuffer(index, "<i4", len(before), header.lengths_offset)
        pointers = np.frombuffer(index, "<i8", len(before), header.pointers_offset)
        lengths[[place, place + 1]] = lengths[[place + 1, place]]
        pointers[place + 1] = pointers[place] + 2 * lengths[place]
        Path(prefix + ".idx").write_bytes(index)
        if IndexedDataset(prefix).fingerprint == fingerprint:
            return
    raise AssertionError("the fingerprint looks everywhere")


def test_a_change_of_the_lengths_alone_is_seen(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [3 + place % 2 for place in range(40_000)])
    options: dict[str, Any] = {"blend": ([prefix], None), "cache": tmp_path / "cache"}
    started = build(**options).train
    assert started is not None
    states = [Loader(d, micro_batch_size=4).state_dict() for d in (started, memory_of(prefix))]
    assert states[0] == states[1]
    swap_two_lengths(prefix)
    with pytest.raises(DataError, match="but for other ones"):
        build(**options, trust_cache=True).train.batch([0])  # type: ignore[union-attr]
    for dataset in (memory_of(prefix), build(**options).train):
        assert dataset is not None
        with pytest.raises(ResumeError, match=r"order:\n  lengths: saved '[0-9a-f]{16}', now"):
            Loader(dataset, micro_batch_size=4).load_state_dict(states[0])


def memory_of(prefix: str) -> Any:
    return build(blend=([prefix], None)).train


def test_tokens_decide_no_index(prefixes: list[str], tmp_path: Path) -> None:
    """The order is of lengths alone: other tokens find their indices, by whatever time."""
    options: dict[str, Any] = {"blend": (prefixes, None), "cache": tmp_path / "cache"}
    build(**options)
    times = times_of(prefixes[0])
    for later, seed in ((0, 5), (1, 6)):
        write(Path(prefixes[0]), IndexedDataset(prefixes[0]).document_lengths.tolist(), seed)
        set_times(prefixes[0], times, later)
        assert num_built(**options) == 0
    # The times told of the second change, and so what is recorded of the content is the new one.
    assert_equal(build(**options), build(blend=(prefixes, None)))


def test_touched_and_moved_data_find_their_indices(prefixes: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"blend": (prefixes, None), "cache": tmp_path / "cache"}
    build(**options)
    before = stamps(tmp_path / "cache")
    for prefix in prefixes:
        set_times(prefix, times_of(prefix), later=10**10)
    assert num_built(**options) == 0
    assert stamps(tmp_path / "cache") == before
    moved = [prefix.replace("data-", "moved-") for prefix in prefixes]
    for prefix, other in zip(prefixes, moved, strict=True):
        for suffix in (".bin", ".idx"):
            os.rename(prefix + suffix, other + suffix)
    assert num_built(**{**options, "blend": (moved, None)}) == 0  # with a manifest of their own
    with pytest.raises(DataError, match="not found"):
        build(**options)


def test_data_that_is_missing_or_damaged_is_refused(prefixes: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"blend": (prefixes, None), "cache": tmp_path / "cache"}
    build(**options)
    with open(prefixes[1] + ".bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match=r"data-2.bin has .* too long"):
        build(**options)
    os.unlink(prefixes[1] + ".bin")
    with pytest.raises(DataError, match=r"data-2.bin not found"):
        build(**options)


def test_a_pair_that_was_published_halfway_is_used(prefixes: list[str], tmp_path: Path) -> None:
    """A builder that dies among its last renames leaves the new index under another name."""
    options: dict[str, Any] = {"blend": (prefixes, None)}
    memory = build(**options)
    os.rename(prefixes[0] + ".idx", prefixes[0] + ".idx.new")
    assert_equal(build(**options), memory)
    assert_equal(build(**options, cache=tmp_path / "cache"), memory)
    assert num_built(**options, cache=tmp_path / "cache") == 0
    os.rename(prefixes[0] + ".idx.new", prefixes[0] + ".idx")
    assert_equal(build(**options, cache=tmp_path / "cache"), memory)


# ---- damaged manifests ----


def manifest_of(cache: Path) -> Path:
    (path,) = cache.glob("run-*.json")
    return path


def test_every_byte_of_a_manifest_counts(prefixes: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"blend": (prefixes[:2], [1, 2]), "split": "1"}
    build(**options, cache=tmp_path / "cache")
    path = manifest_of(tmp_path / "cache")
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        assert Manifest.read(str(path)) is None, at
    build(**options, cache=tmp_path / "cache")
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "text", ["", "null", "{}", "[]", "17", '"run"', "[" * 50_000, '{"logic": 1, "xxh3": "0"}', "é"]
)
def test_foreign_manifests_are_replaced(prefixes: list[str], text: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"blend": (prefixes, None)}
    build(**options, cache=tmp_path / "cache")
    path = manifest_of(tmp_path / "cache")
    data = path.read_bytes()
    path.write_text(text, encoding="latin-1")
    assert_equal(build(**options, cache=tmp_path / "cache"), build(**options))
    assert path.read_bytes() == data


def test_another_configurations_manifest_is_not_used(prefixes: list[str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    build(blend=(prefixes, None), cache=cache)
    one = manifest_of(cache)
    saved = one.read_bytes()
    one.unlink()
    build(blend=(prefixes, None), cache=cache, seed=5)
    other = manifest_of(cache)
    other.write_bytes(saved)
    with pytest.raises(ConfigError, match="no manifest"):
        build(blend=(prefixes, None), cache=cache, seed=5, trust_cache=True)
    assert_equal(
        build(blend=(prefixes, None), cache=cache, seed=5), build(blend=(prefixes, None), seed=5)
    )


def test_a_manifest_of_another_logic_is_not_used(
    prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"blend": (prefixes, None), "cache": tmp_path / "cache"}
    build(**options)
    monkeypatch.setattr("millrace.cache.arrays.RULES_VERSION", 2)
    with pytest.raises(ConfigError, match="no manifest"):
        build(**options, trust_cache=True)
    assert num_built(**options) == 9
    assert num_built(**options) == 0


def test_any_damaged_file_is_mended(prefixes: list[str], tmp_path: Path) -> None:
    """Truncated, emptied, missing, or another's: the next start builds it, and no other file."""
    options, cache = {"blend": (prefixes, [1, 2, 3])}, tmp_path / "cache"
    memory = build(**options, cache=cache)
    contents = {path: path.read_bytes() for path in sorted(cache.iterdir())}
    for path, data in contents.items():
        for damaged in (data[:-1], b"", None, b"another's file"):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            (cache / f"{path.name}.tmp").write_bytes(b"half written")
            build(**options, cache=cache)
            assert path.read_bytes() == data
    assert_equal(build(**options, cache=cache), memory)
    assert {path: path.read_bytes() for path in contents} == contents


def test_swapped_files_of_one_form_are_mended(prefixes: list[str], tmp_path: Path) -> None:
    """Of two seeds: every array has the same dtype and shape in both."""
    options, cache = {"blend": (prefixes, [1, 2, 3])}, tmp_path / "cache"
    build(**options, cache=cache)
    first = {path.name: path.read_bytes() for path in cache.glob("*.npy")}
    build(**options, cache=cache, seed=5)
    second = {path.name: path.read_bytes() for path in cache.glob("*.npy")}
    others = [name for name in second if name not in first]
    for name, data in first.items():
        kind = name.partition("-")[2]
        for other in others:
            if other.endswith(kind) and len(second[other]) == len(data) and second[other] != data:
                (cache / other).write_bytes(data)
    assert_equal(build(**options, cache=cache, seed=5), build(**options, seed=5))
    assert {name: (cache / name).read_bytes() for name in second} == second


# ---- cache folders that cannot be used ----


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with options, where that is possible."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            pytest.skip(f"a tmpfs cannot be mounted here: {result.stderr.strip()}")
        return folder

    yield mount
    while os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_file_in_place_of_the_folder_is_a_clear_error(
    prefixes: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheError, match=r"file.* cannot be written: .* Give a cache folder"):
            build(blend=(prefixes, None), cache=cache)
    assert (tmp_path / "file").read_text() == "a file"


def test_a_folder_in_place_of_a_cached_file_is_a_clear_error(
    prefixes: list[str], tmp_path: Path
) -> None:
    options, cache = {"blend": (prefixes, None)}, tmp_path / "cache"
    build(**options, cache=cache)
    for path in sorted(cache.iterdir()):
        data = path.read_bytes()
        path.unlink()
        path.mkdir()
        if path.name.startswith("run-"):  # all sets are there: only the short way is lost
            assert num_built(**options, cache=cache) == 0
        else:
            with pytest.raises(CacheError, match=r"cannot be written: Is a directory"):
                build(**options, cache=cache)
        path.rmdir()
        path.write_bytes(data)
        assert_equal(build(**options, cache=cache), build(**options))


def test_a_read_only_folder(
    prefixes: list[str], mounted: Callable[[str], Path], tmp_path: Path
) -> None:
    disk = mounted("size=4m")
    options: dict[str, Any] = {"blend": (prefixes, [1, 2, 3]), "cache": disk / "cache"}
    build(**options)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert num_built(**options) == 0  # what is there is used
    with pytest.raises(CacheError, match=r"cannot be written: Read-only file system\. Give a"):
        build(**options, seed=5)
    # So is a set for which there is no manifest: here by another name of the data.
    renamed = [os.path.join(os.path.dirname(p), ".", os.path.basename(p)) for p in prefixes]
    assert num_built(**{**options, "blend": (renamed, [1, 2, 3])}) == 0
    with pytest.raises(ConfigError, match="no manifest"):
        build(**{**options, "blend": (renamed, [1, 2, 3])}, trust_cache=True)


def test_waiting_for_another_builder_has_a_limit(prefixes: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"blend": (prefixes, None), "cache": tmp_path / "cache"}
    build(**options)
    for lock in ("manifests", next(iter(set_names(tmp_path / "cache")))):
        for path in (tmp_path / "cache").glob("*.json"):
            path.unlink()
        with file_lock(str(tmp_path / "cache" / f"{lock}.lock")):
            said = f"another process builds the indices: .*lock is held by process {os.getpid()} on"
            with pytest.raises(CacheError, match=said):
                build_datasets(config_of(**options), wait_limit=0.05)
        build_datasets(config_of(**options), wait_limit=0.05)


def set_names(cache: Path) -> set[str]:
    return {path.stem for path in cache.glob("*.json") if not path.name.startswith("run-")}


def _build_and_tell(config: DatasetConfig, as_nobody: bool, out: Any) -> None:
    if as_nobody:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        build_datasets(config)
        out.put("built")
    except Exception as error:
        out.put(f"{type(error).__name__}: {error}")


def said_by_processes(config: DatasetConfig, *, as_nobody: bool = False) -> list[str]:
    """What four processes say that build the same at once."""
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    made = [
        context.Process(target=_build_and_tell, args=(config, as_nobody, out)) for _ in range(4)
    ]
    for process in made:
        process.start()
    said = [out.get(timeout=60) for _ in made]
    for process in made:
        process.join()
    return said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become nobody")
def test_a_folder_of_somebody_else_is_a_clear_error_on_every_process(prefixes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:  # one that nobody can reach
        os.chmod(name, 0o755)
        data = []
        for prefix in prefixes:
            data.append(shutil.copy(prefix + ".bin", name).removesuffix(".bin"))
            shutil.copy(prefix + ".idx", name)
        os.mkdir(f"{name}/cache", 0o755)
        said = said_by_processes(
            config_of(blend=(data, None), cache=f"{name}/cache"), as_nobody=True
        )
        assert os.listdir(f"{name}/cache") == []
    for line in said:
        assert line.startswith("CacheError: the indices must be built, and ")
        assert "cannot be written: Permission denied. Give a cache folder" in line


def test_a_refusal_is_the_same_on_every_process(prefixes: list[str], tmp_path: Path) -> None:
    """Also where it comes from the one that holds the lock: none waits for ever."""
    write(tmp_path / "damaged", [50, 60, 70])
    with open(tmp_path / "damaged.idx", "r+b") as file:  # the length of sequence 1
        file.seek(34 + 4)
        file.write(np.int32(-60).tobytes())
    options: dict[str, Any] = {"split": "1", "cache": tmp_path / "cache"}
    said = said_by_processes(config_of(blend=([str(tmp_path / "damaged")], None), **options))
    assert set(said) == {said[0]}
    assert said[0].startswith("DataError: ")
    assert "sequence 1 has the length -60" in said[0]
    assert list((tmp_path / "cache").glob("*")) == [manifest_of(tmp_path / "cache")]


def test_a_full_disk_is_a_clear_error_on_every_process(
    prefixes: list[str], mounted: Callable[[str], Path]
) -> None:
    disk = mounted("size=16k")
    for line in said_by_processes(config_of(blend=(prefixes, [1, 2, 3]), cache=disk / "cache")):
        assert line.startswith("CacheError: the indices must be built, and ")
        assert "cannot be written: No space left on device. Give a cache folder" in line
    assert names_left(disk / "cache") <= {".npy", ".json"}


def test_a_full_disk_is_a_clear_error(prefixes: list[str], mounted: Callable[[str], Path]) -> None:
    """With room for more and more pages: in every array, and in the records."""
    disk = mounted("size=1m")
    options: dict[str, Any] = {"blend": (prefixes, [1, 2, 3]), "cache": disk / "cache"}
    errors: list[CacheError] = []
    with open(disk / "ballast", "wb", buffering=0) as ballast:
        with contextlib.suppress(OSError):
            while ballast.write(bytes(4096)):
                pass
        for room in range(0, 160, 4):
            ballast.truncate(max(0, (1 << 20) - (room + 1) * 4096))
            try:
                build(**options)
                break
            except CacheError as error:
                errors.append(error)
                assert names_left(disk / "cache") <= {".npy", ".json"}
    assert len(errors) > 3
    for error in errors:
        assert "cannot be written: No space left on device. Give a" in str(error)
    assert_equal(build(**options), build(blend=(prefixes, [1, 2, 3])))


def names_left(cache: Path) -> set[str]:
    """The last parts of the names in a cache folder."""
    return {path.suffix for path in cache.glob("*")}


def test_a_limit_on_file_sizes_is_a_clear_error(prefixes: list[str], tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    options: dict[str, Any] = {"blend": (prefixes, [1, 2, 3]), "cache": tmp_path / "cache"}
    for limit in (0, 1, 100, 1000, 2000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(CacheError, match="cannot be written: File too large"):
                build(**options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert names_left(tmp_path / "cache") <= {".npy"}
    assert_equal(build(**options), build(blend=(prefixes, [1, 2, 3])))


# ---- to other processes, and after a stop ----


def _digests(datasets: Datasets) -> list[str]:
    found = []
    for dataset in datasets:
        for part in dataset if isinstance(dataset, list) else [dataset]:
            if part is not None:
                batch = part.batch(np.arange(len(part)))
                found.append(hashlib.sha256(batch["tokens"].tobytes()).hexdigest())
    return found


def _put_digests(datasets: Datasets, out: Any) -> None:
    out.put(_digests(datasets))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_datasets_reach_other_processes(method: str, prefixes: list[str], tmp_path: Path) -> None:
    options = options_of("apart", prefixes)
    cached = {**options, "cache": tmp_path / "cache"}
    made = [build(**options), build(**cached), build(**cached, trust_cache=True)]
    expected = _digests(made[0])
    if method == "spawn":
        made = [pickle.loads(pickle.dumps(one)) for one in made]
    context: Any = multiprocessing.get_context(method)
    out = context.Queue()
    processes = [context.Process(target=_put_digests, args=(one, out)) for one in made]
    for process in processes:
        process.start()
    assert [out.get(timeout=120) for _ in processes] == [expected] * 3
    for process in processes:
        process.join()


@pytest.mark.parametrize("form", FORMS)
def test_pickled_datasets_are_equal(form: str, prefixes: list[str], tmp_path: Path) -> None:
    options = options_of(form, prefixes)
    cached = build(**options, cache=tmp_path / "cache")
    _digests(cached)  # opened and mapped
    assert_equal(pickle.loads(pickle.dumps(cached)), build(**options))
    assert_equal(pickle.loads(pickle.dumps(build(**options))), cached)


@pytest.mark.parametrize("form", ["one", "blend", "exhaustive"])
def test_a_state_resumes_with_or_without_a_cache(
    form: str, prefixes: list[str], tmp_path: Path
) -> None:
    options = options_of(form, prefixes)
    ways: list[dict[str, Any]] = [
        {},
        {"cache": tmp_path / "cache"},
        {"cache": tmp_path / "cache", "access": "file"},
        {"cache": tmp_path / "cache", "trust_cache": True},
        {"num_threads": 3},
    ]
    loaders = []
    for way in ways:
        train = build(**options, **way).train
        assert train is not None
        loaders.append(Loader(train, micro_batch_size=4))
    for step, loader in enumerate(loaders):
        expected = next(loader)["tokens"].tolist()
        following = loaders[(step + 1) % len(loaders)]
        state = loader.state_dict()
        state["consumed_samples"] = 0
        following.load_state_dict(state)
        assert next(following)["tokens"].tolist() == expected
        following.load_state_dict(loader.state_dict())
        following.load_state_dict({**state, "consumed_samples": 0})


def test_a_state_of_other_data_is_refused(prefixes: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"blend": (prefixes[:1], None), "cache": tmp_path / "cache"}
    train = build(**options).train
    assert train is not None
    state = Loader(train, micro_batch_size=4).state_dict()
    write(Path(prefixes[0]), IndexedDataset(prefixes[0]).document_lengths.tolist(), seed=77)
    again = build(**options).train
    assert again is not None
    with pytest.raises(ResumeError, match="content: saved"):
        Loader(again, micro_batch_size=4).load_state_dict(state)


# ---- any small configuration ----


@st.composite
def configurations(draw: st.DrawFn) -> tuple[list[list[int]], dict[str, Any]]:
    """Lengths of the documents of some token files, and options."""
    files = draw(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=12), max_size=3))
    files = [[*lengths, 5] for lengths in files] or [[7]]
    sizes = st.one_of(st.none(), st.integers(0, 60))
    weights = st.lists(st.floats(0.01, 1), min_size=len(files), max_size=len(files))
    return files, {
        "sequence_length": draw(st.integers(1, 6)),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "num_samples": draw(st.tuples(sizes, sizes, sizes)),
        "weights": draw(st.one_of(st.none(), weights)),
        "split": draw(st.sampled_from(["1", "1,1", "8,1,1", "0,1", "969,30,1"])),
        "add_extra_token": draw(st.booleans()),
        "drop_last_partial_validation_sequence": draw(st.booleans()),
    }


@settings(deadline=None, max_examples=40)
@given(configurations())
def test_the_order_law(case: tuple[list[list[int]], dict[str, Any]]) -> None:
    """In memory, into a cache and from it: the same order, or the same refusal.

    And each dataset is what the classes make of the same numbers.
    """
    files, options = case
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", DuplicateDataWarning)
        prefixes = [
            write(Path(name) / f"data-{number}", lengths) for number, lengths in enumerate(files)
        ]
        given_options = {k: v for k, v in options.items() if k != "weights"}
        given_options["blend"] = (prefixes, options["weights"])
        try:
            config = DatasetConfig(**given_options)
            plan, memory = build_run(config)
        except ConfigError as error:
            with pytest.raises(ConfigError, match=re.escape(str(error))):
                build_datasets(DatasetConfig(**given_options, cache=f"{name}/cache"))
            return
        for trust in (False, False, True):
            cached = dataclasses.replace(config, cache=f"{name}/cache", trust_cache=trust)
            assert_equal(build_datasets(cached), memory)
        for dataset, split in zip(memory, plan.splits, strict=True):
            for part, planned in zip(
                parts_of(dataset), split.datasets if split else (), strict=True
            ):
                assert_same_indices(part, made_alone(plan, planned, config))


def made_alone(plan: RunPlan, dataset: DatasetPlan, config: DatasetConfig) -> GPTDataset:
    """The same dataset by its class."""
    return GPTDataset(
        IndexedDataset(dataset.file.prefix),
        sequence_length=config.sequence_length,
        seed=config.seed,
        num_samples=dataset.num_samples,
        sequences=dataset.sequences,
        drop_last_partial_sequence=not dataset.gpt.allow_partial,
        add_extra_token=config.add_extra_token,
    )


# ---- counts beyond 32 bits ----


@pytest.mark.parametrize(
    ("num_sequences", "num_epochs", "num_samples", "rows", "shuffle"),
    [
        (2**31 - 1, 1, 5, np.int32, np.uint32),
        (2**31, 1, 5, np.int64, np.uint32),
        (2**20, 2**11, 5, np.int64, np.uint32),
        (5, 1, 2**32 - 3, np.int32, np.uint32),
        (5, 1, 2**32 - 2, np.int32, np.int64),
    ],
)
def test_large_counts_have_wide_arrays(
    num_sequences: int, num_epochs: int, num_samples: int, rows: Any, shuffle: Any
) -> None:
    """The dtypes are Megatron-LM's, and `build_gpt_indices` gives the same."""
    gpt = dataclasses.replace(plan_gpt(9, None, 8), num_epochs=num_epochs, num_samples=num_samples)
    dataset = DatasetPlan(file=None, sequences=(0, num_sequences), num_samples=None, gpt=gpt)
    split = SplitPlan(name="train", datasets=[dataset], kind="one", weights=None, size=None)
    assert _layout(split) == {
        "document_index": (np.int32, (num_sequences * num_epochs,)),
        "sample_index": (rows, (num_samples + 1, 2)),
        "shuffle_index": (shuffle, (num_samples,)),
    }


def test_more_datasets_than_int16_can_number_are_refused(prefixes: list[str]) -> None:
    names = prefixes[:1] * 32767
    with pytest.raises(ConfigError, match="a blend has 32767 datasets; 1 to 32766"):
        build(blend=(names, [1.0] * len(names)))


def test_an_index_whose_lengths_exceed_its_tokens_is_refused(
    prefixes: list[str], tmp_path: Path
) -> None:
    with open(prefixes[0] + ".idx", "r+b") as file:  # the length of sequence 1
        file.seek(34 + 4)
        file.write(np.int32(2**31 - 1).tobytes())
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(DataError, match=r"have 21474\d+ tokens by .* the .bin holds"):
            build(blend=(prefixes, None), cache=cache)


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_splits_share_their_token_files(tmp_path: Path, access: Any) -> None:
    """Else three splits of 600 files that are not mapped would need 1,800 descriptors."""
    prefix = write(tmp_path / "data", [100] * 50)
    for _ in range(2):  # built, and then by the manifest
        train, valid, test = build(blend=([prefix], None), cache=tmp_path / "cache", access=access)
        assert isinstance(train, GPTDataset)
        assert isinstance(valid, GPTDataset)
        assert isinstance(test, GPTDataset)
        assert train.dataset is valid.dataset is test.dataset
    train, valid = pickle.loads(pickle.dumps((train, valid)))
    assert isinstance(train, GPTDataset)
    assert isinstance(valid, GPTDataset)
    assert train.dataset is valid.dataset
