"""The manifest of a run: from which token files its indices are made, and where they lie.

It is written before the first set is built, so that `prune` in another process leaves the sets to
the run; a manifest whose sets are missing is not used. A process that writes or removes one holds
the folder's lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.cache import arrays
from millrace.checks import absolute_path
from millrace.files import atomic_file, writers_lock
from millrace.order import RULES_VERSION, SPLITS, OrderPlan
from millrace.order.plans import entries_of
from millrace.records import record_from
from millrace.run.config import DatasetConfig
from millrace.run.plan import DatasetPlan, RunPlan, SplitPlan, order_inputs
from millrace.store.token_file import TokenFile, TokenFileRecord

MANIFEST = "run-"
"""What the names of manifests start with; a fingerprint and .json follow."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cache folder knows of a run.

    Attributes:
        config: The options that decide the order (see `DatasetConfig.order_key`).
        files: The token files; their prefixes are as they were given.
        splits, sets: The plan of each split, with the numbers of its files, and the name of its
            array set; None for a split without a share.
        paths: The absolute path of each token file's prefix; None where it is not known.
    """

    config: dict[str, Any]
    files: list[TokenFileRecord]
    splits: list[dict[str, Any] | None]
    sets: list[str | None]
    paths: list[str | None]

    @classmethod
    def of(cls, plan: RunPlan, sets: Mapping[str, str]) -> Manifest:
        return cls(
            config=plan.config.order_key(),
            files=[file.record for file in plan.files],
            splits=[None if split is None else _split_entry(plan, split) for split in plan.splits],
            sets=[None if split is None else sets[split.name] for split in plan.splits],
            paths=[absolute_path(file.prefix) for file in plan.files],
        )

    @classmethod
    def read(cls, path: str) -> Manifest | None:
        """The manifest in a file; None where there is none, or none of this version."""
        record = arrays.read_record(path)
        try:
            if record is None or record["logic"] != RULES_VERSION:
                return None
            if "paths" not in record:  # as of earlier versions
                prefixes = [file["prefix"] for file in record["files"]]
                record["paths"] = [one if os.path.isabs(one) else None for one in prefixes]
            return record_from(Manifest, record)
        except arrays.NO_RECORD:
            return None  # damaged, or another program's: it is made again

    def plan(self, config: DatasetConfig) -> RunPlan | None:
        """The plan of a configuration with this key; None if the record is not understood."""
        files = [TokenFile(record, config.access) for record in self.files]
        try:
            splits = [
                None if entry is None else _split_plan(config, entry, files)
                for entry in self.splits
            ]
        except arrays.NO_RECORD:
            return None
        return RunPlan(config=config, files=files, splits=splits)

    def write(self, folder: str, *, limit: float | None = None) -> None:
        """Writes the manifest, or makes an equal one in the folder as young as a new one; waits as
        many seconds for the folder's lock."""
        text = arrays.seal({"logic": RULES_VERSION, **dataclasses.asdict(self)})
        path = manifest_path(folder, self.config)
        os.makedirs(folder, exist_ok=True)
        with writers_lock(manifests_lock(folder), path, limit=limit):
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                if file.read() == text:
                    with contextlib.suppress(PermissionError):  # another user's: its age stays
                        os.utime(path)
                    return
            with atomic_file(path) as out:
                out.write(text)


def manifests_lock(folder: str) -> str:
    return os.path.join(folder, "manifests.lock")


def manifest_path(folder: str, key: dict[str, Any]) -> str:
    return os.path.join(folder, MANIFEST + arrays.fingerprint(key) + arrays.JSON)


# The name of a plan's entry is from the time when Megatron-LM's order was the only one.
_PLAN = "gpt"


def _split_entry(plan: RunPlan, split: SplitPlan) -> dict[str, Any]:
    numbers = {id(file): number for number, file in enumerate(plan.files)}
    datasets = [
        {
            "file": numbers[id(dataset.file)],
            "sequences": dataset.inputs.sequences,
            "num_samples": dataset.inputs.num_samples,
            _PLAN: entries_of(dataset.order),
        }
        for dataset in split.datasets
    ]
    return {**vars(split), "datasets": datasets}


def _split_plan(
    config: DatasetConfig, entry: dict[str, Any], files: Sequence[TokenFile]
) -> SplitPlan:
    """The plan of an entry; ValueError if a function makes another plan of its inputs now."""
    number, datasets = SPLITS.index(entry["name"]), []
    for part in entry["datasets"]:
        file, sequences, entries = files[part["file"]], tuple(part["sequences"]), part[_PLAN]
        inputs = order_inputs(config, number, file, sequences, part["num_samples"])
        make = config.plan_of
        plan: OrderPlan = make(**entries) if isinstance(make, type) else make(inputs)
        if not isinstance(make, type) and entries_of(plan) != entries:
            raise ValueError(f"the plan was {entries}, and is {plan}")
        datasets.append(DatasetPlan(file=file, inputs=inputs, order=plan))
    return SplitPlan(**{**entry, "datasets": datasets})
