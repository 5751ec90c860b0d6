"""The options of a shuffle: each is described once, as a field."""

import contextlib
import itertools
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from millrace.checks import MAX_INT32, MAX_INT64, shown
from millrace.engine import ENGINES
from millrace.errors import ConfigError
from millrace.option_class import StrPath, check_options, identity_of, option, parse_size
from millrace.shuffling.domains import Input, Inputs, read_input_list
from millrace.shuffling.plans import PLANS
from millrace.shuffling.token_files import DTYPES


def _entries(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(value)
    raise ConfigError(f"{name} must be a list of pairs (weight, path), not {shown(value)}")


def _raw_dtype(name: str, value: Any) -> str:
    with contextlib.suppress(TypeError, ValueError):
        if (dtype := np.dtype(value)) in DTYPES:
            return str(dtype.name)
    raise ConfigError(f"{name} must be uint16, uint32 or int32, not {shown(value)}")


_input, _output = partial(option, group="input"), partial(option, group="output")
_job = partial(option, group="job", identity="never")


@dataclass(frozen=True, kw_only=True)
class ShuffleOptions:
    """The options of a shuffle; a ConfigError for one that cannot work."""

    # fmt: off
    input_dir: StrPath | None = option(
        "folder with a folder for each domain: .bin, .npy, or .bin with .idx", None,
        metavar="DIR", identity="never", group="input")
    input_list: Any | None = option(
        "file with a weight and a path on each line: 2.5 data/web (instead of --input-dir)", None,
        metavar="FILE", check=_entries, parse=read_input_list, identity="never",
        group="input")
    dtype: Any = option(
        "dtype of .bin files without .idx", "uint32",
        choices=tuple(dtype.name for dtype in DTYPES), check=_raw_dtype, group="input")
    seq_len: int = _input("tokens of a sequence", 4096, least=1, most=MAX_INT32, identity="never")
    carry: bool = _input("continue the remainder of a file in the next file of its domain", False)
    documents: bool = _input(
        "shuffle whole documents of indexed datasets instead of sequences", False)
    output_dir: StrPath = option(
        "folder for the shards: a new one, or an empty one",
        metavar="DIR", identity="never", group="output")
    num_shards: int = _output("number of shards, at most that of the sequences", 64, least=1)
    seed: int = _output("seed of the permutation", 42, least=0, most=MAX_INT64)
    permutation: str = _output(
        "numpy: numpy.random.default_rng(SEED).permutation(n); keyed: any n without memory", "auto",
        choices=("auto", "numpy", "keyed"), default_text="numpy if it fits half of --memory")
    plan: str = _job(
        "gather: read each shard's sequences wherever they are; scatter: sort runs of the input, "
        "then read each shard from them", "auto",
        choices=("auto", *PLANS), default_text="the faster one")
    engine: str = _job(
        "where it runs: here, or on the Ray cluster of RAY_ADDRESS, or one of its own", "local",
        choices=ENGINES)
    workers: int = _job("largest number of worker processes", 4, flags="--num-workers", least=1)
    memory: int | None = _job(
        "limit for all processes, beside 100 MB: 300M, 4G", None,
        least=1, default_text="half of what is available", parse=parse_size, metavar="SIZE")
    restart: bool = _job("discard what a job has done in the output folder", False)
    show_progress: bool = _job("show the phases on stderr", False, flags=None)
    # fmt: on

    def __post_init__(self) -> None:
        check_options(self)
        if (self.input_dir is None) == (self.input_list is None):
            given = "neither" if self.input_dir is None else "both"
            raise ConfigError(f"give either input_dir or input_list; {given} of them is given")
        if self.documents and self.carry:
            raise ConfigError(
                "carry cannot be combined with documents=True: it only applies to sequences of a "
                "fixed length"
            )

    @property
    def inputs(self) -> Inputs:
        return self.input_list if self.input_dir is None else os.fspath(self.input_dir)

    @property
    def folder(self) -> str:
        return os.fspath(self.output_dir)

    @property
    def unit(self) -> str:
        return "documents" if self.documents else "sequences"


def identity(options: ShuffleOptions, found: Input) -> dict[str, Any]:
    """What decides the output, for the journal: a job that differs cannot continue with it."""
    seq_len = None if options.documents else options.seq_len
    entries: dict[str, Any] = {"job": "shuffle 3", **identity_of(options), "seq_len": seq_len}
    entries["number of inputs"] = len(found.files)
    numbers = itertools.count(1)
    for domain in found.domains:
        entries[f"domain {domain.name}"] = {"weight": str(domain.weight)}
        for file in domain.files:
            entries[f"input {next(numbers)}, {file.path}"] = {
                "domain": domain.name,
                "bytes": file.size,
                "modified_ns": file.mtime_ns,
                "index_modified_ns": file.index_mtime_ns,
                **(file.sidecars if options.documents else {}),
            }
    return entries


def check_apart(options: ShuffleOptions) -> None:
    """Raises a ConfigError if the output lies in the input, or the reverse."""
    inputs, folder = options.inputs, options.folder
    for entry in [inputs] if isinstance(inputs, str) else [path for _, path in inputs]:
        path = os.fsdecode(entry)
        paths = [os.path.realpath(path), os.path.realpath(folder)]
        if os.path.commonpath(paths) in paths:
            raise ConfigError(
                f"the output folder {folder} lies in the input {path}, or holds it; give another "
                "output folder"
            )
