"""Checks the arguments of a shuffle, and derives the identity of the job from them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from millrace import checks
from millrace.errors import ConfigError
from millrace.jobs.shuffling.plans import PLANS
from millrace.shuffling.domains import Input, Inputs
from millrace.shuffling.permutations import KeyedRanges, NumpyPermutation

PLAN_NAMES = "auto", *(plan.name for plan in PLANS)
PERMUTATIONS = "auto", NumpyPermutation.name, KeyedRanges.name
ENGINES = "local", "ray"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The checked arguments of a job.

    Attributes:
        inputs: Folder with a folder for each domain, or weight and path of each domain.
        output_dir: Folder of the shards.
        seq_len: Tokens of a sequence; None: items are documents.
        num_shards, workers, seed: As in `shuffle`.
        dtype: Dtype of raw `.bin` files.
        plan, permutation, engine: One of `PLAN_NAMES`, `PERMUTATIONS` and `ENGINES`.
        memory: Bytes of memory for the processes of the job, or None.
        carry: Whether the remainder of a file is continued in the next one.
        restart, show_progress: As in `shuffle`.
    """

    inputs: Inputs
    output_dir: str
    seq_len: int | None
    num_shards: int
    workers: int
    seed: int
    dtype: DTypeLike
    plan: str
    permutation: str
    memory: int | None
    carry: bool
    engine: str
    restart: bool
    show_progress: bool

    @property
    def unit(self) -> str:
        """What is shuffled: "documents" or "sequences"."""
        return "documents" if self.seq_len is None else "sequences"


def checked_arguments(
    *,
    input_dir: Any,
    input_list: Any,
    output_dir: Any,
    seq_len: Any,
    num_shards: Any,
    workers: Any,
    seed: Any,
    dtype: Any,
    plan: Any,
    permutation: Any,
    memory: Any,
    carry: Any,
    documents: Any,
    engine: Any,
    restart: Any,
    show_progress: Any,
) -> Arguments:
    """Checks the arguments of `shuffle`; raises a ConfigError for one that cannot work."""
    for name, value, choices in (
        ("plan", plan, PLAN_NAMES),
        ("permutation", permutation, PERMUTATIONS),
        ("engine", engine, ENGINES),
    ):
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(
                f"{name} must be one of {', '.join(choices)}, not {checks.shown(value)}"
            )
    if (input_dir is None) == (input_list is None):
        raise ConfigError(
            "there is no input; give input_dir or input_list"
            if input_dir is None
            else "input_dir and input_list are both given; leave one of them out"
        )
    documents = checks.flag("documents", documents)
    carry = checks.flag("carry", carry)
    if documents and carry:
        raise ConfigError(
            "carry cannot be combined with documents=True: it only applies to sequences of a fixed "
            "length"
        )
    output_dir = checks.one_path("output_dir", output_dir)
    if not output_dir:
        raise ConfigError("output_dir is empty; give a folder for the shards")
    if input_dir is None and not isinstance(input_list, (tuple, list)):
        raise ConfigError(
            f"input_list is {checks.shown(input_list)}; give a list of pairs (weight, path)"
        )
    return Arguments(
        inputs=input_list if input_dir is None else checks.one_path("input_dir", input_dir),
        output_dir=output_dir,
        seq_len=None if documents else checks.whole("seq_len", seq_len, 1, checks.MAX_INT32),
        num_shards=checks.whole("num_shards", num_shards, 1),
        workers=checks.whole("workers", workers, 1),
        seed=checks.whole("seed", seed, 0, checks.MAX_INT64),
        dtype=dtype,
        plan=plan,
        permutation=permutation,
        memory=None if memory is None else checks.whole("memory", memory, 1),
        carry=carry,
        engine=engine,
        restart=checks.flag("restart", restart),
        show_progress=checks.flag("show_progress", show_progress),
    )


def identity(arguments: Arguments, found: Input) -> dict[str, Any]:
    """All that decides the output, for the journal: a job that differs cannot continue with it."""
    entries: dict[str, Any] = {
        "job": "shuffle 2",
        "documents": arguments.seq_len is None,
        "seq_len": arguments.seq_len,
        "num_shards": arguments.num_shards,
        "seed": arguments.seed,
        "dtype": np.dtype(arguments.dtype).name,
        "permutation": arguments.permutation,
        "carry": arguments.carry,
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
                **(file.sidecars if arguments.seq_len is None else {}),
            }
    return entries


def check_apart(arguments: Arguments) -> None:
    """Raises a ConfigError if the output would lie among the input, or the reverse."""
    inputs, output_dir = arguments.inputs, arguments.output_dir
    paths = (
        [inputs] if isinstance(inputs, (str, bytes, os.PathLike)) else [path for _, path in inputs]
    )
    for path in map(os.fsdecode, paths):
        source, target = os.path.realpath(path), os.path.realpath(output_dir)
        if source == target:
            raise ConfigError(f"{output_dir} is both input and output; give another output folder")
        common = os.path.commonpath([source, target])
        if common == source:
            raise ConfigError(
                f"{output_dir} lies inside the input {path}; give an output folder outside it"
            )
        if common == target:
            raise ConfigError(
                f"the input {path} lies inside {output_dir}; give an output folder that does not "
                "hold the input"
            )
