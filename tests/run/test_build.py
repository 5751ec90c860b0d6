"""`build_datasets`: refusals, warnings, and cache folders."""

import contextlib
import dataclasses
import os
import pickle
import re
import shutil
import subprocess
import tempfile
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import millrace
from millrace import CacheError, ConfigError, DataError, DatasetConfig, GPTDataset, build_datasets
from millrace.files import file_lock
from millrace.order import OrderInputs, plan_gpt
from millrace.run.build import build_run
from millrace.store import token_file
from tests.cache.test_arrays import stamps
from tests.conftest import results_of_processes

S = 8  # the sequence length

Options = dict[str, Any]
Prefixes = list[str]


def write(prefix: Path, lengths: Sequence[int], seed: int = 0) -> str:
    """Writes a token file with random documents of these lengths; returns its prefix."""
    random = np.random.default_rng(seed)
    with millrace.IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in lengths:
            builder.add_document(random.integers(0, 100, length))
    return str(prefix)


def set_a_length(prefix: str, length: int) -> None:
    """Writes another length of sequence 1 into the index of a token file."""
    with open(prefix + ".idx", "r+b") as file:
        file.seek(34 + 4)
        file.write(np.int32(length).tobytes())


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """The prefixes of three token files with 30, 60 and 90 documents."""
    return [
        write(tmp_path / f"data-{number}", [12 + place % 7 for place in range(30 * number)], number)
        for number in (1, 2, 3)
    ]


@pytest.fixture
def options(prefixes: Prefixes, tmp_path: Path) -> Options:
    """A blend of all three files, with a cache folder."""
    return {"blend": (prefixes, None), "cache": tmp_path / "cache"}


def config_of(**options: Any) -> DatasetConfig:
    defaults = {"sequence_length": S, "seed": 11, "num_samples": (200, 20, 20)}
    split = {} if "blend_per_split" in options else {"split": "8,1,1"}
    return DatasetConfig(**{**defaults, **split, **options})


def build(**options: Any) -> Any:
    return build_datasets(config_of(**options))


def test_an_extended_blend_goes_on(prefixes: Prefixes) -> None:
    """A larger size of a blend by weight changes no sample before; earlier states have it."""
    weights = [3.0, 2.0, 1.0]
    short, long = (
        build(blend=(prefixes, weights), num_samples=(size, 0, 0)).train for size in (20, 30)
    )
    state = millrace.Loader(short, micro_batch_size=1).state_dict(9)
    for fingerprint in (state["fingerprint"], {**state["fingerprint"], "size": 20}):
        loader = millrace.Loader(long, micro_batch_size=1)
        loader.load_state_dict({**state, "fingerprint": fingerprint})
        assert next(loader)["tokens"].tolist() == short.batch([9])["tokens"].tolist()


# ---- the same data twice ----


def test_the_same_data_twice_in_a_blend_warns(prefixes: Prefixes, tmp_path: Path) -> None:
    a, b, _ = prefixes
    for suffix in (".bin", ".idx"):
        shutil.copy(a + suffix, tmp_path / f"copy{suffix}")
    copy = str(tmp_path / "copy")
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):  # also when nothing is built
        with pytest.warns(millrace.DuplicateDataWarning, match=f"blend has the data of {a} twice"):
            build(blend=([a, b, a], [1, 2, 1]), cache=cache)
        with pytest.warns(millrace.DuplicateDataWarning, match=rf"{copy} twice \(also as") as w:
            build(blend=([a, b, copy], None), num_samples=(None,) * 3, cache=cache)
        assert {warning.filename for warning in w} == {__file__}
    # The same data in two splits or validation sets do not warn.
    build(blend_per_split=[([a], None), ([a, a], None), ([a], None)], multiple_validation_sets=True)


# ---- parts of a file ----


def test_parts_of_a_file_are_datasets_of_their_documents(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    with millrace.IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for number in range(10):  # of three sequences each
            builder.add_document(np.full(S * 3 * (1 + number), number), [S * (1 + number)] * 3)
    parts: list[Any] = [{"prefix": prefix, "part": part} for part in ((0, 0.6), [0.6, 1])]
    options = {"num_samples": (None,) * 3, "cache": tmp_path / "cache"}
    whole = build(blend=([prefix], None), split="1", **options)
    for _ in range(2):  # built, then from the cache; the same file twice does not warn
        train = build(blend=(parts, None), split="1", **options).train
        assert isinstance(train, millrace.BlendedDataset)
        drawn = [np.unique(part.batch(np.arange(len(part)))["tokens"]) for part in train.datasets]
        assert [numbers.tolist() for numbers in drawn] == [[*range(6)], [*range(6, 10)]]
        assert train.fingerprint() != whole.train.fingerprint()
    train, valid, _ = build(blend=(parts[:1], None), split="1,1", **options)
    assert isinstance(valid, GPTDataset)
    assert train.fingerprint()["sequences"] == [0, 9]  # a part is split by sequence, as a file is
    assert valid.fingerprint()["sequences"] == [9, 18]
    with pytest.warns(millrace.DuplicateDataWarning, match=f"{prefix} twice"):
        build(blend=([prefix, parts[1]], None), split="1", **options)


@pytest.mark.parametrize(
    "source", [{"prefix": "a"}, {"prefix": "a", "part": [0.5, 2]}, {"prefix": 5, "part": [0, 1]}, 5]
)
def test_invalid_sources_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"part|prefix"):
        config_of(blend=(["a", source], None))


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blend": ("AB", [1.0])}, "1 weights for 2 prefixes"),
        ({"blend": ("AB", [1.0, -1.0])}, r"\[1.0, -1.0\]; they must be finite, not below 0"),
        ({"blend": ("AB", [0.0, 0.0])}, "not all 0"),
        ({"blend": ("AB", [1.0, 0.0])}, "train split: the weight of dataset 1 is 0.0"),
        ({"blend": ("AB", [1e300, 1e-300])}, "train split: the weight of dataset 1 is 0.0"),
        ({"blend": ("AB", None), "num_samples": (1, 2)}, r"num_samples must .*\(1, 2\)"),
        ({"blend": ("AB", None), "num_samples": 7}, "num_samples must .* 7"),
        ({"blend": ("AB", None), "num_samples": (-1, 2, 3)}, "of train must be at least 0, not -1"),
        ({"blend": ("AB", [1, 2]), "num_samples": (9, None, 9)}, "valid blend has weights, and"),
        ({"blend": ("", None)}, "train blend must"),
        ({"blend": ("A",)}, "train blend must"),
        ({"split": None}, "a blend needs one"),
        ({"split": "a,b"}, 'split "a,b" must be'),
        ({"split": [(0, 0.9), (0.9, 1.1), None]}, "end <= 1"),
        ({"blend_per_split": [None] * 3}, "one of the two"),
        ({"blend": None, "blend_per_split": [("A", None)]}, "blend_per_split must"),
        ({"blend": None, "blend_per_split": [None] * 3}, "no split has a blend"),
        ({"seed": 2**32}, "seed must be between .* not 4294967296"),
        ({"surplus": -0.1}, "surplus must be .* not -0.1"),
        ({"num_threads": 0}, "num_threads must be at least 1, not 0"),
        ({"trust_cache": True}, "give cache"),
        ({"full_validation": True}, r"num_samples\[1\] is 20"),
        ({"multiple_validation_sets": True}, "needs a blend_per_split"),
        ({"eod_mask_loss": True}, "give eod_token"),
        ({"sequence_length": 0}, "sequence_length must be .* not 0"),
        ({"access": "carrier pigeon"}, "access must .*mmap, file"),
        (
            {"blend": ("ABC", None), "sequence_length": 150, "num_samples": (None,) * 3},
            "the valid split: .*data-1, sequences 24 to 27: sequence_length 150 .* no sample",
        ),
        ({"split": "999,1"}, r"the valid split: .*30 to 30: .* 0 tokens"),
        ({"num_samples": (2**62, 1, 1)}, "4,611,686,018,427,.* bytes .* 70,368,744,177,664 is the"),
        (
            {"blend": ("AB", [1, 1]), "num_samples": (10**30, 1, 1)},
            r"the train split: num_samples must be between 0 and 2\*\*63 - 1, not 10+",
        ),
    ],
)
def test_invalid_configurations_are_refused(
    prefixes: Prefixes, options: Options, message: str, tmp_path: Path
) -> None:
    names = dict(zip("ABC", prefixes, strict=True))
    arguments = {"blend": ("A", None), **options}
    if arguments["blend"] is not None:
        letters, *weights = arguments["blend"]
        arguments["blend"] = ([names[letter] for letter in letters], *weights)
    with pytest.raises(ConfigError, match=message):
        build(**arguments)
    if "trust_cache" in options:
        message = "no manifest"
    with pytest.raises(ConfigError, match=message):
        build(**arguments, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*")) == []  # no partial file and no lock


def test_oversampling_is_refused_with_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greedy rule may draw one sample more than a dataset's share: here 22, not 21."""
    monkeypatch.setattr("millrace.order.blends._CHUNK_SIZE", 8)  # draws counted in several parts
    prefixes = [write(tmp_path / f"part-{n}", [S * n + 1]) for n in (21, 4, 2)]
    blend = (prefixes, [0.8243101435519362, 0.12519108493695014, 0.05049877151111362])
    options: Options = {"blend": blend, "split": "1", "num_samples": (25, 1, 1)}
    table = (
        r"(?s)train split: .* 1 of its datasets have:\n"
        r"  dataset 0 \(.*part-21\): has 21, 22 are drawn, 1 short\n.* surplus"
    )
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        with pytest.raises(ConfigError, match=table):
            build(**options, surplus=0, cache=cache)
    assert list((tmp_path / "cache").glob("*")) == [manifest_of(tmp_path / "cache")]
    train = build(**options).train  # with Megatron-LM's surplus
    assert len(train) == 27


def test_numpy_numbers_are_accepted(prefixes: Prefixes, tmp_path: Path) -> None:
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


def test_indices_that_exceed_memory(prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is simulated: a machine may grant memory that it does not have."""

    def run_out_of_memory(*_: Any) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr("millrace.order.gpt.build_gpt_indices", run_out_of_memory)
    with pytest.raises(MemoryError, match=r"data-1: the indices of .* bytes, and there is no"):
        build(blend=(prefixes[:1], None), num_samples=(2**40, 1, 1))


# ---- cache folders ----

FORMS = ("one", "blend", "lengths", "exhaustive", "per split", "apart")


def options_of(form: str, prefixes: Prefixes) -> Options:
    """The options of a configuration of this form."""
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
    """The GPT datasets of a blend, of a list of validation sets, or of a single dataset."""
    if dataset is None or isinstance(dataset, list):
        return dataset or []
    return [dataset] if isinstance(dataset, GPTDataset) else list(dataset.datasets)


def contents(dataset: Any) -> Any:
    """Fingerprint, arrays and first samples of a dataset, or of each dataset of a list."""
    if dataset is None or isinstance(dataset, list | tuple):
        return [contents(one) for one in dataset or ()]
    arrays = dict(dataset.batch(np.arange(min(len(dataset), 20))))
    is_blend = isinstance(dataset, millrace.BlendedDataset)
    arrays |= (dataset.order if is_blend else dataset).indices._asdict()
    values = {name: (str(array.dtype), array.tolist()) for name, array in arrays.items()}
    parts = [dataset.weights, contents(list(dataset.datasets))] if is_blend else []
    return [len(dataset), dataset.fingerprint(), values, parts]


def assert_equal(ours: Any, others: Any) -> None:
    assert contents(ours) == contents(others)


def num_built(**options: Any) -> int:
    """The number of datasets whose indices a build makes."""
    counts = [0]
    build_datasets(config_of(**options), progress=lambda done, total: counts.append(done))
    return max(counts)


def rename_data(prefixes: Prefixes, old: str, new: str) -> None:
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            os.rename(prefix + old + suffix, prefix + new + suffix)


@pytest.mark.parametrize("form", FORMS)
def test_caches_and_threads_change_nothing(form: str, prefixes: Prefixes, tmp_path: Path) -> None:
    options, cache = options_of(form, prefixes), tmp_path / "cache"
    memory = build(**options)
    assert_equal(build(**options, num_threads=4), memory)
    assert_equal(build(**options, num_threads=4, cache=tmp_path / "four"), memory)
    options["cache"] = cache
    assert_equal(build(**options), memory)
    before = stamps(cache)
    assert not [name for name in before if name.endswith((".tmp", ".lock"))]
    cached = build(**options, access="file")
    for each in (cached, memory, build(**options), build(**options, trust_cache=True)):
        assert_equal(each, memory)  # opens the token files and maps the arrays
        assert_equal(pickle.loads(pickle.dumps(each)), memory)
    assert num_built(**options, num_threads=4) == 0
    assert stamps(cache) == before
    for path in cache.iterdir():
        assert (tmp_path / "four" / path.name).read_bytes() == path.read_bytes()
    # A trusted cache needs no token file before the first sample.
    rename_data(prefixes, "", "-away")
    trusted = build(**options, trust_cache=True)
    for left, right in zip(trusted, memory, strict=True):
        assert [len(part) for part in parts_of(left)] == [len(part) for part in parts_of(right)]
    loader = millrace.Loader(trusted.train, micro_batch_size=4)
    state = loader.state_dict()
    with pytest.raises(DataError, match="not found"):
        next(loader)
    rename_data(prefixes, "-away", "")
    loader.load_state_dict(state)
    next(loader)
    assert_equal(trusted, memory)


def test_progress_counts_the_datasets(prefixes: Prefixes, tmp_path: Path) -> None:
    for cache in (None, tmp_path / "cache"):
        reports: list[tuple[int, int]] = []
        config = config_of(blend=(prefixes, None), num_threads=3, cache=cache)
        build_datasets(config, progress=lambda *counts: reports.append(counts))  # noqa: B023
        assert sorted(reports) == [(done, 9) for done in range(10)]


# ---- changes of the data ----


def other_lengths(prefix: str, *, seed: int = 99) -> list[int]:
    """The document lengths in another order: file sizes, counts and the number of tokens stay."""
    lengths = millrace.IndexedDataset(prefix).document_lengths
    return np.random.default_rng(seed).permutation(lengths).tolist()


def times_of(prefix: str) -> dict[str, tuple[int, int]]:
    stats = {suffix: os.stat(prefix + suffix) for suffix in (".bin", ".idx")}
    return {suffix: (stat.st_atime_ns, stat.st_mtime_ns) for suffix, stat in stats.items()}


def set_times(prefix: str, times: dict[str, tuple[int, int]], later: int = 0) -> None:
    for suffix, (accessed, modified) in times.items():
        os.utime(prefix + suffix, ns=(accessed, modified + later))


@pytest.mark.parametrize("form", FORMS)
def test_other_lengths_are_built_again(form: str, prefixes: Prefixes, tmp_path: Path) -> None:
    """A nanosecond later, or other sizes with the times of before."""
    options, cache = options_of(form, prefixes), tmp_path / "cache"
    build(**options, cache=cache)
    before, permuted = build(**options), other_lengths(prefixes[0])
    for lengths, later in ((permuted, 1), ([12] * 31, 0), ([12] * 30 + [13], 0)):
        times = times_of(prefixes[0])
        write(Path(prefixes[0]), lengths, seed=1)
        set_times(prefixes[0], times, later=later)
        after = build(**options)
        assert contents(after) != contents(before)
        assert_equal(build(**options, cache=cache), after)
        assert_equal(build(**options, cache=cache, trust_cache=True), after)
        loaders = [millrace.Loader(one.train, micro_batch_size=4) for one in (before, after)]
        with pytest.raises(millrace.ResumeError, match=r"lengths: saved '\w{16}', now"):
            loaders[1].load_state_dict(loaders[0].state_dict())


@pytest.mark.parametrize("changed", ["lengths", "counts"])
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("later", [0, 10**9])  # nanoseconds
def test_data_that_changes_after_the_start_is_refused_at_the_first_sample(
    prefixes: Prefixes, changed: str, trust: bool, later: int, options: Options
) -> None:
    build(**options)
    times, lengths = times_of(prefixes[0]), other_lengths(prefixes[0])
    before = build(**options, trust_cache=trust).train
    write(Path(prefixes[0]), lengths if changed == "lengths" else [12] * 30, seed=1)
    set_times(prefixes[0], times, later=later)
    # A second start refuses the data, too.
    for train in (before, build(**options, trust_cache=True).train) if trust else (before,):
        with pytest.raises(DataError, match=r"data-1 has .* its indices were built for .* again"):
            train.batch(np.arange(len(train)))


def test_a_build_closes_its_token_files(prefixes: Prefixes, tmp_path: Path) -> None:
    """A start after a build is the same as any other: files are opened by the first sample."""
    before = len(os.listdir("/proc/self/fd"))
    config = config_of(blend=(prefixes, None), split="1,0,0", cache=tmp_path / "c", access="file")
    datasets = build_datasets(config)
    assert len(os.listdir("/proc/self/fd")) == before
    write(Path(prefixes[0]), [100])
    with pytest.raises(DataError, match="Build them again"):
        datasets.train.batch(np.arange(len(datasets.train)))


def test_indices_do_not_depend_on_tokens(prefixes: Prefixes, options: Options) -> None:
    """The order depends on lengths only: other tokens use the same indices, at any file time."""
    build(**options)
    times = times_of(prefixes[0])
    for later, seed in ((0, 5), (1, 6)):
        lengths = millrace.IndexedDataset(prefixes[0]).document_lengths
        write(Path(prefixes[0]), lengths.tolist(), seed)
        set_times(prefixes[0], times, later)
        assert num_built(**options) == 0
    # The times showed the second change, so the manifest now has the new content.
    assert_equal(build(**options), build(blend=(prefixes, None)))


def test_touched_and_moved_data_use_their_indices(prefixes: Prefixes, options: Options) -> None:
    build(**options)
    before = stamps(options["cache"])
    for prefix in prefixes:
        set_times(prefix, times_of(prefix), later=10**10)
    assert num_built(**options) == 0
    assert stamps(options["cache"]) == before
    rename_data(prefixes, "", "-moved")
    moved = ([f"{prefix}-moved" for prefix in prefixes], None)
    assert num_built(**{**options, "blend": moved}) == 0  # with a new manifest
    with pytest.raises(DataError, match="not found"):
        build(**options)


def test_data_that_is_missing_or_damaged_is_refused(prefixes: Prefixes, options: Options) -> None:
    build(**options)
    with open(prefixes[1] + ".bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match=r"data-2.bin has .* too long"):
        build(**options)
    os.unlink(prefixes[1] + ".bin")
    with pytest.raises(DataError, match=r"data-2.bin not found"):
        build(**options)


def test_a_half_published_pair_is_used(prefixes: Prefixes, options: Options) -> None:
    """A builder that dies between its last renames leaves the new index under another name."""
    memory = build(blend=options["blend"])
    os.rename(prefixes[0] + ".idx", prefixes[0] + ".idx.new")
    assert_equal(build(blend=options["blend"]), memory)
    assert_equal(build(**options), memory)
    assert num_built(**options) == 0
    os.rename(prefixes[0] + ".idx.new", prefixes[0] + ".idx")
    assert_equal(build(**options), memory)


# ---- damaged manifests ----


def manifest_of(cache: Path) -> Path:
    (path,) = cache.glob("run-*.json")
    return path


FOREIGN = (b"null", b"{}", b"[]", b"17", b'"run"', b"[" * 50_000, b'{"logic": 1, "xxh3": "0"}')


def test_another_configurations_manifest_is_not_used(options: Options) -> None:
    build(**options)
    one = manifest_of(options["cache"])
    saved = one.read_bytes()
    one.unlink()
    options["seed"] = 5
    build(**options)
    manifest_of(options["cache"]).write_bytes(saved)
    with pytest.raises(ConfigError, match="no manifest"):
        build(**options, trust_cache=True)
    assert_equal(build(**options), build(blend=options["blend"], seed=5))


def test_any_damaged_file_is_built_again(prefixes: Prefixes, tmp_path: Path) -> None:
    """Each start restores the file and changes no other one; `trust_cache` refuses the folder."""
    cache = tmp_path / "cache"
    options: Options = {"blend": (prefixes[:2], [1, 2]), "split": "1"}
    with pytest.raises(ConfigError, match="no manifest"):
        build(**options, cache=cache, trust_cache=True)
    assert not cache.exists()
    memory = build(**options, cache=cache)
    contents = {path: path.read_bytes() for path in sorted(cache.iterdir())}
    for path, data in contents.items():
        damages = (data[:-1], data[:-1] + b"?", b"", None, data + b" ", b"another's \xe9 file")
        for damaged in (*damages, *(FOREIGN if path.suffix == ".json" else ())):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            (cache / f"{path.name}.tmp").write_bytes(b"half written")
            with pytest.raises(ConfigError, match=r"no manifest .* damaged"):
                build(**options, cache=cache, trust_cache=True)
            build(**options, cache=cache)
            assert path.read_bytes() == data
    assert_equal(build(**options, cache=cache, trust_cache=True), memory)
    assert {path: path.read_bytes() for path in contents} == contents


# ---- unusable cache folders ----


def test_a_file_in_place_of_the_folder(options: Options, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheError, match=r"file.* cannot be written: .* Give a cache folder"):
            build(**{**options, "cache": cache})
    assert (tmp_path / "file").read_text() == "a file"


def test_a_read_only_folder(options: Options, disk: Path, prefixes: Prefixes) -> None:
    options["cache"] = disk / "cache"
    build(**options)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert num_built(**options) == 0  # existing indices are used
    with pytest.raises(CacheError, match=r"cannot be written: Read-only file system\. Give a"):
        build(**options, seed=5)
    # So are sets without a manifest; here the data has another path.
    options["blend"] = [prefix.replace("/data-", "/./data-") for prefix in prefixes], None
    assert num_built(**options) == 0
    with pytest.raises(ConfigError, match="no manifest"):
        build(**options, trust_cache=True)


def test_waiting_for_another_builder_has_a_limit(options: Options) -> None:
    build(**options)
    names = [path.stem for path in options["cache"].glob("*.json")]
    a_set = next(name for name in names if not name.startswith("run-"))
    for lock in ("manifests", a_set):
        for path in options["cache"].glob("*.json"):
            path.unlink()
        message = f"another process builds the indices: .*lock is held by process {os.getpid()} on"
        held = file_lock(str(options["cache"] / f"{lock}.lock"))
        with held, pytest.raises(CacheError, match=message):
            build_datasets(config_of(**options), wait_limit=0.05)
        build_datasets(config_of(**options), wait_limit=0.05)


def _build_and_report(config: DatasetConfig, out: Any) -> None:
    try:
        build_datasets(config)
    except Exception as error:
        out.put(f"{type(error).__name__}: {error}")


def test_a_refusal_is_the_same_on_every_process(prefixes: Prefixes, tmp_path: Path) -> None:
    """This includes errors of the process that holds the lock: no process waits for ever."""
    prefix, cache = write(tmp_path / "damaged", [50, 60, 70]), tmp_path / "cache"
    set_a_length(prefix, -60)
    blend = ([prefix], None)
    config = config_of(blend=blend, split="1", cache=cache)
    outcomes = results_of_processes("fork", _build_and_report, [(config,)] * 4)
    assert set(outcomes) == {outcomes[0]}
    assert re.match("DataError: .*sequence 1 has the length -60", outcomes[0])
    assert list(cache.glob("*")) == [manifest_of(cache)]


def test_a_full_disk_is_a_clear_error(options: Options, disk: Path) -> None:
    """The free space grows page by page, so that every array and record meets the full disk."""
    memory = build(blend=options["blend"])
    options["cache"] = disk / "cache"
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
                assert {path.suffix for path in options["cache"].glob("*")} <= {".npy", ".json"}
    assert len(errors) > 3
    for error in errors:
        assert "cannot be written: No space left on device. Give a" in str(error)
    assert_equal(build(**options), memory)


# ---- random small configurations ----


@st.composite
def configurations(draw: st.DrawFn) -> tuple[list[list[int]], Options]:
    """The document lengths of some token files, and options."""
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
def test_the_order_law(case: tuple[list[list[int]], Options]) -> None:
    """In memory, with a new cache and from a cache: the same order, or the same refusal.

    Each dataset also equals one that its class makes from the same arguments.
    """
    files, options = case
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", millrace.DuplicateDataWarning)
        prefixes = [write(Path(name) / f"{place}", lengths) for place, lengths in enumerate(files)]
        arguments = {**options, "blend": (prefixes, options["weights"])}
        del arguments["weights"]
        try:
            config = DatasetConfig(**arguments)
            plan, memory = build_run(config)
        except ConfigError as error:
            with pytest.raises(ConfigError, match=re.escape(str(error))):
                build_datasets(DatasetConfig(**arguments, cache=f"{name}/cache"))
            return
        for trust in (False, False, True):
            cached = dataclasses.replace(config, cache=f"{name}/cache", trust_cache=trust)
            assert_equal(build_datasets(cached), memory)
        for dataset, split in zip(memory, plan.splits, strict=True):
            plans = split.datasets if split else ()
            for part, planned in zip(parts_of(dataset), plans, strict=True):
                assert_equal(part, single_dataset(planned.file.prefix, planned.inputs))


def single_dataset(prefix: str, inputs: OrderInputs) -> GPTDataset:
    """The same dataset, made by its class."""
    names = ("sequence_length", "seed", "num_samples", "sequences", "add_extra_token")
    options = {name: getattr(inputs, name) for name in names}
    drops_partial = inputs.drop_last_partial_sequence
    dataset = millrace.IndexedDataset(prefix)
    return GPTDataset(dataset, **options, drop_last_partial_sequence=drops_partial)


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
def test_large_counts_have_64_bit_arrays(
    num_sequences: int, num_epochs: int, num_samples: int, rows: Any, shuffle: Any
) -> None:
    """The dtypes are those of Megatron-LM and of `build_gpt_indices`."""
    plan = dataclasses.replace(plan_gpt(9, None, 8), num_epochs=num_epochs, num_samples=num_samples)
    inputs: Any = types.SimpleNamespace(sequences=(0, num_sequences))
    assert plan.arrays(inputs) == {
        "document_index": (np.int32, (num_sequences * num_epochs,)),
        "sample_index": (rows, (num_samples + 1, 2)),
        "shuffle_index": (shuffle, (num_samples,)),
    }


def test_more_datasets_than_int16_can_number_are_refused(prefixes: Prefixes) -> None:
    names = prefixes[:1] * 32767
    with pytest.raises(ConfigError, match="datasets must be between 1 and 32766, not 32767"):
        build(blend=(names, [1.0] * len(names)))


def test_lengths_that_exceed_the_tokens(prefixes: Prefixes, tmp_path: Path) -> None:
    set_a_length(prefixes[0], 2**31 - 1)
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(DataError, match=r"21474\d+ tokens.* the .bin holds \d+"):
            build(blend=(prefixes, None), cache=cache)


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_splits_share_their_token_files(tmp_path: Path, access: Any) -> None:
    """Otherwise three splits of 600 unmapped files would need 1,800 descriptors."""
    prefix = write(tmp_path / "data", [100] * 50)
    for _ in range(2):  # built, then loaded by its manifest
        datasets = build(blend=([prefix], None), cache=tmp_path / "cache", access=access)
        for several in (datasets, pickle.loads(pickle.dumps(datasets))):
            assert len({id(dataset.dataset) for dataset in several}) == 1


def test_the_first_batch_opens_the_files_that_it_reads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = [write(tmp_path / f"d{number}", [100] * 9, number) for number in range(20)]
    blends = [(prefixes, [1.0] * 20), None, None]
    options: Options = {"num_samples": (50, None, None), "cache": tmp_path / "cache"}
    build(blend_per_split=blends, **options)
    opened = []
    open_dataset = token_file.IndexedDataset

    def note(prefix: str, **options: Any) -> Any:
        opened.append(prefix)
        return open_dataset(prefix, **options)

    monkeypatch.setattr(token_file, "IndexedDataset", note)
    train = build(blend_per_split=blends, **options).train
    assert opened == []
    next(millrace.Loader(train, micro_batch_size=2, prefetch=0))
    assert 1 <= len(opened) <= 2
    with millrace.Loader(train, micro_batch_size=2, prefetch=2) as ahead:
        next(ahead)
    assert len(opened) < 20
