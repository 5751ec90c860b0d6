"""Random cases through Megatron-LM's builder and through `millrace.megatron`: all must be equal.

    python -m tests.oracle.differential --cases 500 --seed 1
    python -m tests.oracle.differential --seed 1 --case 217      # one case again

A case is a pure function of seed and number: token files, a configuration, a class and sizes. Both
sides build it, each on an empty cache and on the cache that the other one wrote. Compared are what
is None, lengths, every index with its dtype, descriptions and hashes, the bytes of every cache
file, and all tensors of some samples; where Megatron-LM raises an error, ours must be one of the
same class. What cannot be compared has a name here: see `Known`.
"""

import argparse
import contextlib
import dataclasses
import operator
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

# torch and megatron-core warn of their own deprecations, and of optional packages, on import.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset

from tests.oracle import oracle_megatron as oracle

import millrace
import millrace.megatron as ours

# After a failed opening it raises at some later time.
indexed_dataset.IndexedDataset.__del__ = lambda self: None

NAMES_OF_ALL = ("unique_description", "unique_description_hash")
GPT_NAMES = (
    *(*NAMES_OF_ALL, "num_samples", "dataset_path", "_pad_token_id", "index_split.name"),
    *("indices", "document_index", "sample_index", "shuffle_index"),
)
BLEND_NAMES = (
    *(*NAMES_OF_ALL, "weights", "size", "split.name"),
    *("dataset_index", "dataset_sample_index"),
)
SPLIT_NAMES = ("train", "valid", "test")


NAMES = ("GPTDataset", "GPTDatasetConfig", "MockGPTDataset", "MockGPTLowLevelDataset")
Ours, Theirs = (
    SimpleNamespace(Builder=builder, log=log, **{name: vars(module)[name] for name in NAMES})
    for module, builder, log in (
        (ours, ours.BlendedMegatronDatasetBuilder, "millrace.megatron"),
        (gpt_dataset, oracle.BlendedMegatronDatasetBuilder, "megatron.core.datasets"),
    )
)


class Known(Exception):  # noqa: N818
    """A bug of Megatron-LM; the comparison of a case ends there."""


class LooksForeverError(Exception):
    """Samples without tokens: Megatron-LM would add epochs for ever; ours must assert."""


# ---- cases ----


@dataclasses.dataclass
class Tokenizer(oracle.Tokenizer):
    has_special_tokens: bool = True

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        if not self.has_special_tokens:
            raise AttributeError("no special_tokens_dict")
        return super().special_tokens_dict


@dataclasses.dataclass
class Case:
    """The inputs of a case; its folder holds the token files."""

    lengths: dict[str, list[int]]
    vocabulary: tuple[int, int]
    dtype: str
    data_seed: int
    options: dict[str, Any]
    sizes: list[int | None]
    cache: str  # "own", "beside", "none" or "file"
    mock_size: int | None
    group: bool
    reopen: list[str]

    def __str__(self) -> str:
        return "\n".join(f"  {name} = {value!r:.2000}" for name, value in vars(self).items())


class Generator:
    """Draws a case."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = np.random.default_rng([seed, number])

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def pick(self, choices: list[Any], weights: list[float] | None = None) -> Any:
        shares = None if weights is None else np.array(weights) / np.sum(weights)
        return choices[int(self.random.choice(len(choices), p=shares))]

    def integer(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high))

    def case(self, mock_share: float = 0.06) -> Case:
        is_mock = self.chance(mock_share)
        # Most careless cases have a split without tokens or samples, and only raise.
        self.is_careful = self.chance(0.75)
        # Mostly few datasets; sometimes many small ones.
        count = self.pick(
            [1, self.integer(2, 5), self.integer(5, 40), self.integer(40, 301)],
            [0.35, 0.5, 0.14, 0.01],
        )
        lengths = {} if is_mock else {f"data/{i}": self.lengths(count) for i in range(count)}
        dtype = self.pick(["uint16", "int32", "uint8", "int8", "int16", "int64", "float32"],
                          [10, 10, 1, 1, 1, 1, 0.3])  # fmt: skip
        lowest = -2 if dtype.startswith("int") and self.chance(0.3) else 0
        vocabulary = lowest, self.integer(3, 30)
        totals = [sum(values) for values in lengths.values()] or [100_000]
        longest = min(totals) / 25 if self.is_careful else max(totals)
        sequence_length = max(1, int(np.exp(self.random.uniform(0, np.log(longest + 1)))))
        if is_mock or self.chance(0.9):
            sequence_length = min(sequence_length, 300)
        sequence_length = max(sequence_length, 100) if is_mock else sequence_length
        options = self.options(sequence_length, vocabulary, dtype)
        if not is_mock:
            options |= self.blends(sorted(lengths))
        cache = self.pick(["own", "beside", "none", "file"], [0.6, 0.25, 0.12, 0.03])
        case = Case(
            lengths=lengths,
            vocabulary=vocabulary,
            dtype=dtype,
            data_seed=self.integer(0, 2**31),
            options=options,
            sizes=[self.size(sum(totals) // sequence_length) for _ in SPLIT_NAMES],
            cache=cache,
            mock_size=self.integer(1, 2000) if is_mock else None,
            # Megatron-LM needs a process group to cache a blend.
            group=cache in ("own", "file") or self.chance(0.3),
            reopen=[],
        )
        if self.chance(0.85):
            self.fill_sizes_for_weights(case)
        if self.chance(0.15) and dtype in ("uint16", "int32") and lengths:
            case.options["sequences_per_dataset"] = True  # counted when the files are written
        if cache == "own":
            case.reopen = ["defer"] if self.chance(0.5) else []
            if "blend_per_split" in options and self.chance(0.7):
                case.reopen += ["fast", "fast defer"]
        return case

    def lengths(self, count: int) -> list[int]:
        """Lengths of a file's sequences; not all 0, as Megatron-LM cannot map an empty file."""
        most = np.log(400 if count < 5 else 25)
        fewest = np.log(15) if self.is_careful else 0.0
        number = max(1, int(np.exp(self.random.uniform(fewest, most))))
        mean = self.pick([3, 10, 60] if self.is_careful else [1, 3, 10, 60])
        lengths = self.random.geometric(1 / mean, number) - self.pick([0, 1])
        lengths[self.random.random(number) < self.pick([0, 0, 0.2, 0.7])] = 0
        if lengths.sum() == 0:
            lengths[self.integer(0, number)] = self.integer(1, 20)
        return [int(length) for length in lengths]

    def options(self, sequence_length: int, vocabulary: tuple[int, int], dtype: str) -> Any:
        eod = self.integer(*vocabulary)
        pad = self.pick([None, self.integer(*vocabulary), eod, vocabulary[1] + 5], [2, 3, 2, 1])
        tokenizer = Tokenizer(
            eod=eod,
            vocab_size=self.pick([1000, 50_000]) if dtype != "int32" else 100_000,
            pad_id=pad,
            has_special_tokens=self.chance(0.8),
        )
        seed = self.pick([0, 1234, 2**32 - 1, self.integer(0, 2**32), 2**32], [2, 2, 2, 9, 0.1])
        return {
            "random_seed": seed,
            "sequence_length": sequence_length,
            "tokenizer": tokenizer,
            "reset_position_ids": self.chance(0.3),
            "reset_attention_mask": self.chance(0.3),
            "eod_mask_loss": self.chance(0.3) if self.chance(0.99) else None,
            "create_attention_mask": self.chance(0.5),
            "drop_last_partial_validation_sequence": self.chance(0.6),
            "add_extra_token_to_sequence": self.chance(0.7),
            "allow_ambiguous_pad_tokens": self.chance(0.4),
            "num_dataset_builder_threads": self.pick([1, 1, 2, 4]),
            "mmap_bin_files": self.chance(0.8),
            "mid_level_dataset_surplus": self.pick([0.005, 0.0, 0.5], [0.7, 0.1, 0.2]),
        }

    def blends(self, prefixes: list[str]) -> dict[str, Any]:
        if self.chance(0.55):
            return {"blend": self.blend(prefixes), "split": self.split()}
        options = {
            "blend_per_split": [
                None if self.chance(0.2) else self.blend(prefixes) for _ in SPLIT_NAMES
            ],
            "multiple_validation_sets": self.chance(0.4),
            "full_validation": self.chance(0.2),
        }
        if self.chance(0.02):
            options["split"] = self.split()
        return options

    def blend(self, prefixes: list[str]) -> tuple[list[str], list[float] | None]:
        few = prefixes[:6] if self.chance(0.5) else prefixes
        chosen = [few[i] for i in self.random.permutation(len(few))]
        if self.chance(0.15):
            chosen = chosen[:1]
        if self.chance(0.02):
            chosen.append("data/missing")
        if self.chance(0.1):
            chosen.append(chosen[0])
        if self.chance(0.45):
            return chosen, None
        count = len(chosen) + (1 if self.chance(0.01) else 0)
        kinds = [
            (self.random.random(count) + 0.01).tolist(),
            self.random.integers(1, 5, count).astype(float).tolist(),
            (10.0 ** self.random.uniform(-3, 3, count)).tolist(),
            [1.0] * count,
            self.random.integers(1, 99, count).tolist(),
            self.random.integers(-1, 3, count).astype(float).tolist(),
        ]
        return chosen, self.pick(kinds, [3, 3, 2, 2, 1, 0.3])

    def split(self) -> str:
        if self.is_careful and self.chance(0.7):
            shares = [*self.random.integers(2, 6, self.integer(1, 4)).tolist(), 0, 0][:3]
            return ",".join(str(shares[i]) for i in self.random.permutation(3))
        kind = self.integer(0, 40)
        if kind < 12:
            return ",".join(str(share) for share in self.random.integers(1, 1000, 3))
        if kind < 20:
            return ",".join(repr(float(share)) for share in self.random.random(3))
        if kind < 28:
            shares = [str(share) for share in self.random.integers(0, 3, self.integer(1, 4))]
            shares[self.integer(0, len(shares))] = "1"
            return ",".join(shares)
        if kind < 38:
            return str(
                self.pick(["969,30,1", "1,1,1", "99", "50 50", "[8/1/1]", "-3,2", "0,.5,.5"])
            )
        return str(self.pick(["0,0,0", "1,2,3,4", "1.2.3", "", ".", "1e2,3"]))

    def size(self, num_samples: int) -> int | None:
        if self.chance(0.35):
            return None
        epochs = self.pick([0, 0.2, 1, 1.1, 1.9, 2.5, 4.05])
        return min(int(epochs * num_samples) + self.pick([0, 0, 1, -1]), 4000)

    def fill_sizes_for_weights(self, case: Case) -> None:
        one = case.options.get("blend")
        blends = case.options.get("blend_per_split") or [one] * len(SPLIT_NAMES)
        for place, blend in enumerate(blends):
            if case.sizes[place] is None and blend is not None and blend[1] is not None:
                case.sizes[place] = self.integer(0, 60)


# ---- building ----


@dataclasses.dataclass
class Built:
    """The result of a builder: datasets or an error, and its log lines."""

    datasets: list[Any] | None = None
    error: BaseException | None = None
    log: list[str] = dataclasses.field(default_factory=list)

    def build_lines(self) -> list[str]:
        return [line for line in self.log if line.startswith("Build and save the ")]


def write_files(case: Case, folder: Path) -> dict[str, tuple[int, int]]:
    """Writes the token files; returns the counts of sequences and of document entries."""
    random = np.random.default_rng(case.data_seed)
    counts = {}
    (folder / "data").mkdir()
    for name, lengths in case.lengths.items():
        what = folder / name, lengths, random, case.dtype, case.vocabulary
        prefix = str(oracle.write_sequences(*what))
        counts[prefix] = len(lengths), len(millrace.IndexedDataset(prefix).document_indices)
    return counts


def with_folder(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The options with prefixes in a folder."""

    def moved(blend: Any) -> Any:
        return None if blend is None else ([str(folder / name) for name in blend[0]], blend[1])

    options = dict(options)
    if "blend" in options:
        options["blend"] = moved(options["blend"])
    if "blend_per_split" in options:
        options["blend_per_split"] = [moved(blend) for blend in options["blend_per_split"]]
    return options


def arguments_of(case: Case, folder: Path, counts: dict[str, Any]) -> dict[str, Any]:
    options = with_folder(case.options, folder)
    if "sequences_per_dataset" in options:
        options["sequences_per_dataset"] = counts
    caches = {"own": str(folder / "cache" / "deep"), "beside": None, "none": "",
              "file": str(folder / "file")}  # fmt: skip
    return options | {"path_to_cache": caches[case.cache]}


def build(side: Any, case: Case, arguments: dict[str, Any], **more: Any) -> Built:
    result = Built()
    with oracle.captured(side.log) as result.log:
        try:
            config = side.GPTDatasetConfig(**arguments | more)
            kind = side.GPTDataset if case.mock_size is None else side.MockGPTDataset
            builder = side.Builder(kind, case.sizes, lambda: True, config)
            result.datasets = builder.build()
        except Exception as error:
            result.error = error
    return result


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Raises where Megatron-LM would hang, corrupt memory or miscount."""
    count_epochs = gpt_dataset.GPTDataset._get_num_epochs
    load, lock = np.load, threading.Lock()
    build_sample_idx = helpers.build_sample_idx

    def count_epochs_or_raise(self: Any, num_tokens: int) -> int:
        extra = self.config.add_extra_token_to_sequence
        wanted = self.num_samples
        if wanted is not None and wanted * self.config.sequence_length + extra > num_tokens == 0:
            raise LooksForeverError
        if num_tokens == 0 and extra and self.config.sequence_length == 1:
            raise Known("no tokens at sequence length 1: a write before the start of an array")
        epochs: int = count_epochs(self, num_tokens)
        if epochs * num_tokens >= 2**24 and not self.config.drop_last_partial_validation_sequence:
            raise Known("2**24 tokens and a partial sample: counted in 32-bit floats")
        return epochs

    def build_sample_idx_or_raise(*arguments: Any) -> Any:
        try:
            return build_sample_idx(*arguments)
        except AssertionError:
            sizes, documents = arguments[:2]
            if sizes[documents[-1]] == 0:
                raise Known("a partial sample whose last document is empty: offset -1") from None
            raise

    def load_in_turn(*arguments: Any, **named: Any) -> Any:
        # Python 3.11 cannot read two headers at once: ast.literal_eval raises SystemError.
        with lock:
            return load(*arguments, **named)

    with (
        mock.patch.object(np, "load", load_in_turn),
        mock.patch.object(gpt_dataset.GPTDataset, "_get_num_epochs", count_epochs_or_raise),
        mock.patch.object(helpers, "build_sample_idx", build_sample_idx_or_raise),
    ):
        yield


def known_cause(error: BaseException | None) -> str | None:
    """The name of the known bug behind an error, or None."""
    while error is not None:
        if isinstance(error, Known):
            return str(error)
        error = error.__cause__
    return None


# ---- comparing ----


def same_error(mine: BaseException | None, their: BaseException | None, where: str) -> None:
    kind: Any = AssertionError if isinstance(their, LooksForeverError) else type(their)
    is_alike = (mine is None) == (their is None) and (their is None or isinstance(mine, kind))
    assert is_alike, f"{where}: ours raises {mine!r}, Megatron-LM {their!r}"


def same_tree(mine: Any, their: Any, where: str) -> None:
    """Compares datasets, lists of them or None, down to the indices."""
    oracle.assert_alike(tree(mine), tree(their), where)


def tree(dataset: Any) -> Any:
    if dataset is None or isinstance(dataset, list):
        return dataset and [tree(each) for each in dataset]
    names = BLEND_NAMES if hasattr(dataset, "datasets") else GPT_NAMES
    return {
        "class": type(dataset).__name__,
        "length": len(dataset),
        **{name: operator.attrgetter(name)(dataset) for name in names},
        "datasets": tree(list(getattr(dataset, "datasets", []))),
    }


def fresh(dataset: Any, number: Any) -> Callable[[], Any]:
    """A function that reads a sample as if it were the first.

    Megatron-LM keeps the loss mask of the first sample, with zeros for its padding, for all later
    samples.
    """

    def read() -> Any:
        for part in oracle.parts_of(dataset):
            part.masks_and_position_ids_are_cached = False
        return dataset[number]

    return read


def outcome(read: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return read(), None
    except Exception as error:
        return None, error


def same_sample(mine: Any, their: Any, number: Any, where: str) -> None:
    where = f"{where}[{number}]"
    left, my_error = outcome(lambda: mine[number])
    right, their_error = outcome(fresh(their, number))
    same_error(my_error, their_error, where)
    oracle.assert_alike(left, right, where)


def same_query(mine: Any, their: Any, number: Any, where: str) -> None:
    """Compares the hook that subclasses override."""
    where = f"{where}: query of {number}"
    left, my_error = outcome(lambda: mine._query_document_sample_shuffle_indices(number))
    right, their_error = outcome(lambda: their._query_document_sample_shuffle_indices(number))
    same_error(my_error, their_error, where)
    oracle.assert_alike(left, right, where)


def same_samples(mine: Any, their: Any, random: Generator, where: str) -> None:
    if isinstance(their, list):
        for number, pair in enumerate(zip(mine, their, strict=True)):
            same_samples(*pair, random, f"{where}[{number}]")
    elif their is not None:
        count = len(their)
        numbers: list[Any] = [0, count - 1, count, -1]
        numbers += [random.integer(0, count) for _ in range(6) if count > 0]
        if count > 0:
            numbers.append(np.int64(random.integer(0, count)))
        for number in numbers:
            same_sample(mine, their, number, where)
        if hasattr(their, "datasets"):
            chosen = random.integer(0, len(their.datasets))
            pair = mine.datasets[chosen], their.datasets[chosen]
            same_samples(*pair, random, f"{where}.datasets[{chosen}]")
        else:
            same_sample(mine, their, None, where)
            for number in numbers:
                same_query(mine, their, number, where)


def cached_files(folder: Path) -> dict[str, Path]:
    """The cache files below a case's folder, by relative path."""
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "cache" in path.relative_to(folder).parts[:-1]
    }


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for name, path in cached_files(folder).items()
    }


def drop_caches(folder: Path) -> None:
    for cache in [path for path in folder.rglob("cache") if path.is_dir()]:
        shutil.rmtree(cache)


# ---- one case ----


def run_case(seed: int, number: int, folder: Path) -> str:
    """Builds and compares a case; returns the outcome.

    Raises:
        AssertionError: If something differs.
    """
    generator = Generator(seed, number)
    case = generator.case()
    folder.joinpath("file").touch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(guarded())
        if case.mock_size is not None:
            for side in (Ours, Theirs):
                change = mock.patch.object(side.MockGPTLowLevelDataset, "size", case.mock_size)
                stack.enter_context(change)
        if case.group:
            stack.enter_context(oracle.process_group())
        try:
            return compare(case, generator, folder)
        except BaseException:
            print(f"seed {seed}, case {number}:\n{case}", file=sys.stderr)
            print(f"again: python -m tests.oracle.differential --seed {seed} --case {number}",
                  file=sys.stderr)  # fmt: skip
            raise


def compare(case: Case, generator: Generator, folder: Path) -> str:
    arguments = arguments_of(case, folder, write_files(case, folder))
    if any(len(set(blend[0])) < len(blend[0]) for blend in blends_of(case)):
        # With threads, Megatron-LM would write one cache file twice at once.
        arguments["num_dataset_builder_threads"] = 1
    their = build(Theirs, case, arguments)
    known = known_cause(their.error)
    if known:
        drop_caches(folder)
        error = build(Ours, case, arguments).error
        # There may be another error after the bug: sequences_per_dataset raises KeyError.
        kinds = (millrace.MillraceError, KeyError)
        assert error is None or isinstance(error, kinds), repr(error)
        return f"known: {known}"
    if their.error is not None:
        drop_caches(folder)
        mine = build(Ours, case, arguments)
        same_error(mine.error, their.error, "build")
        return f"both raise {type(their.error).__name__}"
    has_negative = any(weights and min(weights) < 0 for _, weights in blends_of(case))
    if has_negative and isinstance(build(Ours, case, arguments).error, millrace.ConfigError):
        # Negative ones alone become positive shares there (docs/differences.md).
        return "known: negative weights"
    is_cached = case.cache in ("own", "beside") and (case.mock_size is None or case.cache == "own")

    def build_same(side: Any, where: str) -> Built:
        built = build(side, case, arguments)
        assert built.error is None, f"{where}: {built.error!r}"
        same_tree(built.datasets, their.datasets, where)
        return built

    before, contents = stamps(folder), contents_of(folder)
    mine = build_same(Ours, "ours on Megatron-LM's cache")
    check_reused(mine, before, folder, case, "ours on Megatron-LM's cache")

    drop_caches(folder)
    mine = build_same(Ours, "build")
    found = contents_of(folder)
    oracle.assert_alike(found, contents, "cache")
    oracle.assert_alike(sorted(mine.build_lines()), sorted(their.build_lines()), "built")
    assert bool(found) == (is_cached and len(oracle.parts_of(their.datasets)) > 0), "a cache"
    before = stamps(folder)
    their = build_same(Theirs, "Megatron-LM on our cache")
    check_reused(their, before, folder, case, "Megatron-LM on our cache")
    for name, left, right in zip(SPLIT_NAMES, mine.datasets, their.datasets, strict=True):  # type: ignore[arg-type]
        same_samples(left, right, generator, name)
    for how in case.reopen:
        reopen(case, arguments, generator, how)
    return "same"


def blends_of(case: Case) -> list[Any]:
    blends = [case.options.get("blend"), *(case.options.get("blend_per_split") or [])]
    return [blend for blend in blends if blend is not None]


def contents_of(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in cached_files(folder).items()}


def check_reused(built: Built, before: Any, folder: Path, case: Case, where: str) -> None:
    """Checks that nothing was written; without a cache folder, only blends are built again."""
    assert stamps(folder) == before, f"{where}: files were written"
    anew = built.build_lines()
    if case.cache == "beside" and case.mock_size is None:
        anew = [line for line in anew if "BlendedDataset" not in line]
    if before:
        assert anew == [], f"{where}: {anew}"


def reopen(case: Case, arguments: dict[str, Any], generator: Generator, how: str) -> None:
    """Compares the datasets again, opened by the options that trust the cache."""
    words = {"fast": "fast_cache_load", "defer": "defer_npy_index_mmap"}
    more = {option: True for word, option in words.items() if word in how}
    their = build(Theirs, case, arguments, **more)
    if isinstance(their.error, ValueError) and "__len__() should return >= 0" in str(their.error):
        return  # a deferred length below 0, of a dataset without tokens
    mine = build(Ours, case, arguments, **more)
    same_error(mine.error, their.error, how)
    if their.error is None:
        lengths = outcome(lambda: [len(part) for part in oracle.parts_of(their.datasets)])
        if lengths[1] is not None:
            return  # the same
        same_tree(mine.datasets, their.datasets, how)
        for place in range(len(SPLIT_NAMES)):
            same_samples(mine.datasets[place], their.datasets[place], generator, how)
        same_tree(mine.datasets, their.datasets, f"{how}, opened")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.differential")
    parser.add_argument("--cases", type=int, default=500, help="number of cases")
    parser.add_argument("--seed", type=int, default=1, help="seed of the cases")
    parser.add_argument("--case", type=int, help="number of a single case to run")
    options = parser.parse_args(words)
    numbers = range(options.cases) if options.case is None else [options.case]
    outcomes: Counter[str] = Counter()
    start = time.monotonic()
    for number in numbers:
        folder = Path(tempfile.mkdtemp(prefix="differential-"))
        try:
            outcomes[run_case(options.seed, number, folder)] += 1
        except AssertionError:
            traceback.print_exc()
            return 1
        finally:
            shutil.rmtree(folder)
    seconds = time.monotonic() - start
    print(f"seed {options.seed}: {sum(outcomes.values())} cases in {seconds:.0f} s")
    for name, count in outcomes.most_common():
        print(f"  {count:6} {name}")
    return 0


if __name__ == "__main__":
    # The arrays are small: more threads of torch would only wait.
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
