"""The options of a shuffle: each is described once, as a field."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypedDict

from millrace.checks import MAX_INT32, MAX_INT64, shown
from millrace.engine import ENGINES
from millrace.errors import ConfigError
from millrace.option_class import StrPath, check_options, identity_of, option, parse_size
from millrace.shuffling.domains import Input, Inputs, raw_dtype, read_input_list
from millrace.shuffling.permutations import KeyedRanges, NumpyPermutation
from millrace.shuffling.plans import PLANS
from millrace.shuffling.token_files import DTYPES

_PLAN_NAMES = ("auto", *(plan.name for plan in PLANS))
_PERMUTATIONS = ("auto", NumpyPermutation.name, KeyedRanges.name)


def _entries(name: str, value: Any) -> Any:
    if not isinstance(value, (tuple, list)):
        raise ConfigError(f"{name} must be a list of pairs (weight, path), not {shown(value)}")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class ShuffleOptions:
    """The options of a shuffle, checked; each field says what it is.

    Raises:
        ConfigError: An option that cannot work.
    """

    input_dir: StrPath | None = option(
        "folder with a folder for each domain: .bin, .npy, or .bin with .idx",
        None,
        metavar="DIR",
        identity="never",
        group="input",
    )
    input_list: Any = option(
        "file with a weight and a path on each line: 2.5 data/web (instead of --input-dir)",
        None,
        metavar="FILE",
        check=lambda name, value: None if value is None else _entries(name, value),
        parse=read_input_list,
        identity="never",
        group="input",
    )
    dtype: Any = option(
        "dtype of .bin files without .idx",
        "uint32",
        choices=tuple(dtype.name for dtype in DTYPES),
        check=lambda name, value: raw_dtype(value).name,
        group="input",
    )
    seq_len: int = option(
        "tokens of a sequence", 4096, least=1, most=MAX_INT32, identity="never", group="input"
    )
    carry: bool = option(
        "continue the remainder of a file in the next file of its domain", False, group="input"
    )
    documents: bool = option(
        "shuffle whole documents of indexed datasets instead of sequences", False, group="input"
    )
    output_dir: StrPath = option(
        "folder for the shards: a new one, or an empty one",
        metavar="DIR",
        identity="never",
        group="output",
    )
    num_shards: int = option(
        "number of shards, at most that of the sequences", 64, least=1, group="output"
    )
    seed: int = option("seed of the permutation", 42, least=0, most=MAX_INT64, group="output")
    permutation: str = option(
        "numpy: numpy.random.default_rng(SEED).permutation(n); keyed: any n without memory",
        "auto",
        choices=_PERMUTATIONS,
        default_text="numpy if it fits half of --memory",
        group="output",
    )
    plan: str = option(
        "gather: read each shard's sequences wherever they are; scatter: sort runs of the "
        "input, then read each shard from them",
        "auto",
        choices=_PLAN_NAMES,
        default_text="the faster one",
        identity="never",
        group="job",
    )
    engine: str = option(
        "where it runs: here, or on the Ray cluster of RAY_ADDRESS, or one of its own",
        "local",
        choices=ENGINES,
        identity="never",
        group="job",
    )
    workers: int = option(
        "largest number of worker processes",
        4,
        flags="--num-workers",
        least=1,
        identity="never",
        group="job",
    )
    memory: int | None = option(
        "limit for all processes, beside 100 MB: 300M, 4G",
        None,
        least=1,
        default_text="half of what is available",
        parse=parse_size,
        metavar="SIZE",
        identity="never",
        group="job",
    )
    restart: bool = option(
        "discard what a job has done in the output folder", False, identity="never", group="job"
    )
    show_progress: bool = option("show the phases on stderr", False, flags=None, identity="never")

    def __post_init__(self) -> None:
        check_options(self)
        if (self.input_dir is None) == (self.input_list is None):
            raise ConfigError(
                "there is no input; give input_dir or input_list"
                if self.input_dir is None
                else "input_dir and input_list are both given; leave one of them out"
            )
        if self.documents and self.carry:
            raise ConfigError(
                "carry cannot be combined with documents=True: it only applies to sequences of a "
                "fixed length"
            )
        if not self.output_dir:
            raise ConfigError("output_dir is empty; give a folder for the shards")

    @property
    def inputs(self) -> Inputs:
        """Folder of the domains, or weight and path of each."""
        inputs: Inputs = self.input_list if self.input_dir is None else self.input_dir
        return inputs

    @property
    def folder(self) -> str:
        """Folder of the shards."""
        return os.fspath(self.output_dir)

    @property
    def unit(self) -> str:
        """What is shuffled: "documents" or "sequences"."""
        return "documents" if self.documents else "sequences"


class ShuffleKeywords(TypedDict, total=False):
    """The keywords of `shuffle`, for type checkers; a test compares them with `ShuffleOptions`."""

    input_list: Any
    dtype: Any
    seq_len: int
    carry: bool
    documents: bool
    num_shards: int
    seed: int
    permutation: str
    plan: str
    engine: str
    workers: int
    memory: int | None
    restart: bool
    show_progress: bool


def identity(options: ShuffleOptions, found: Input) -> dict[str, Any]:
    """All that decides the output, for the journal: a job that differs cannot continue with it."""
    entries: dict[str, Any] = {
        "job": "shuffle 3",
        **identity_of(options),
        "seq_len": None if options.documents else options.seq_len,
        "number of inputs": len(found.files),
    }
    number = 0
    for domain in found.domains:
        entries[f"domain {domain.name}"] = {"weight": str(domain.weight)}
        for file in domain.files:
            number += 1
            entries[f"input {number}, {file.path}"] = {
                "domain": domain.name,
                "bytes": file.size,
                "modified_ns": file.mtime_ns,
                "index_modified_ns": file.index_mtime_ns,
                **(file.sidecars if options.documents else {}),
            }
    return entries


def check_apart(options: ShuffleOptions) -> None:
    """Raises a ConfigError if the output would lie among the input, or the reverse."""
    inputs, folder = options.inputs, options.folder
    paths = [inputs] if isinstance(inputs, (str, os.PathLike)) else [path for _, path in inputs]
    for path in map(os.fsdecode, paths):
        source, target = os.path.realpath(path), os.path.realpath(folder)
        if source == target:
            raise ConfigError(f"{folder} is both input and output; give another output folder")
        common = os.path.commonpath([source, target])
        if common == source:
            raise ConfigError(
                f"{folder} lies inside the input {path}; give an output folder outside it"
            )
        if common == target:
            raise ConfigError(
                f"the input {path} lies inside {folder}; give an output folder that does not hold "
                "the input"
            )
