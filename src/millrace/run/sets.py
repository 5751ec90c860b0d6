"""The arrays of a split: in memory, or in a cache folder as one set.

The arrays of all its datasets lie one after the other in the set's files, and those of its blend
beside them. A set is named by what its arrays are a function of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from millrace.cache import arrays
from millrace.deferred import Deferred
from millrace.errors import ConfigError, DataError
from millrace.order import BlendIndices, build_blend_indices
from millrace.order.plans import Arrays, Layout, build_arrays, key_of
from millrace.run.config import DatasetConfig, name_of_order
from millrace.run.plan import DatasetPlan, RunPlan, SplitPlan

Places = Mapping[str, slice]
"""Where the arrays of a dataset lie in those of its split: rows by the array's name."""

_BLEND = {"dataset_index": np.dtype(np.int16), "dataset_sample_index": np.dtype(np.int64)}


class SplitArrays(NamedTuple):
    """The arrays of each dataset's order and of the blend, loaded at the first sample."""

    datasets: Sequence[Deferred[Arrays]]
    blend: Deferred[BlendIndices] | None


def build_blend(split: SplitPlan) -> BlendIndices:
    """The indices of a blend; ConfigError if it draws more samples of a dataset than there are."""
    prefixes = [dataset.file.prefix for dataset in split.datasets]
    try:
        return build_blend_indices(prefixes, split.lengths, split.weights, split.size)
    except ConfigError as error:
        raise ConfigError(f"the {split.name} split: {error}") from None


def build_in_memory(
    split: SplitPlan, pool: ThreadPoolExecutor, count: Callable[[], None]
) -> SplitArrays:
    """The arrays of a split, without a cache folder; `count` is called after each dataset."""

    def build(dataset: DatasetPlan) -> Deferred[Arrays]:
        built = build_arrays(dataset.order, dataset.inputs, dataset.file.prefix)
        count()
        return Deferred.of(built)

    blend = Deferred.of(build_blend(split)) if split.kind == "blend" else None
    return SplitArrays(list(pool.map(build, split.datasets)), blend)


def set_key(config: DatasetConfig, split: SplitPlan) -> dict[str, Any]:
    """What the arrays of a split are a function of: plain JSON values."""
    key: dict[str, Any] = {
        "kind": split.kind,
        "seed": config.seed,
        "sequence_length": config.sequence_length,
        "add_extra_token": config.add_extra_token,
        "datasets": [
            [
                dataset.file.record.lengths,
                dataset.file.record.num_sequences,
                *dataset.inputs.sequences,
                *key_of(dataset.order),
            ]
            for dataset in split.datasets
        ],
        "weights": None if split.weights is None else list(split.weights),
        "size": split.size,
    }
    if config.order is not None:
        inputs = [dataset.inputs for dataset in split.datasets]
        key["order"] = name_of_order(config.order)
        key["inputs"] = [[one.num_samples, one.drop_last_partial_sequence] for one in inputs]
    return key


class SplitSet:
    """The set of a split."""

    def __init__(self, config: DatasetConfig, split: SplitPlan) -> None:
        self.split, self.key = split, set_key(config, split)
        self.name = arrays.fingerprint(self.key)
        self._places, self._layout = _places_and_layout(split)

    def find(self, folder: str) -> SplitArrays | None:
        """The arrays in a folder, if they are all there and show no damage."""
        array_set = arrays.usable(folder, self.name, self.key)
        if array_set is None or array_set.layout != self._layout:
            return None
        return self._arrays(array_set)

    def load_or_build(
        self, folder: str, pool: ThreadPoolExecutor, count: Callable[[], None], limit: float | None
    ) -> SplitArrays:
        """The arrays in a folder, which are built if need be; see `arrays.load_or_build`."""

        def build(writers: Mapping[str, arrays.ArrayWriter]) -> None:
            if self.split.kind == "blend":
                for name, index in build_blend(self.split)._asdict().items():
                    writers[name].write(0, index)
                del index

            def build_dataset(dataset: DatasetPlan, places: Places) -> None:
                built = build_arrays(dataset.order, dataset.inputs, dataset.file.prefix)
                for name, array in built.items():
                    writers[name].write(places[name].start, array)
                count()

            for _ in pool.map(build_dataset, self.split.datasets, self._places):
                pass

        return self._arrays(
            arrays.load_or_build(folder, self.name, self.key, self._layout, build, limit=limit)[0]
        )

    def _arrays(self, array_set: arrays.ArraySet) -> SplitArrays:
        blend = Deferred(partial(_load_blend, array_set)) if self.split.kind == "blend" else None
        datasets = [Deferred(partial(_load, array_set, places)) for places in self._places]
        return SplitArrays(datasets, blend)


def sets_of(plan: RunPlan) -> dict[str, SplitSet]:
    """The sets of a run's splits by their names."""
    return {split.name: SplitSet(plan.config, split) for split in plan.present_splits}


def _places_and_layout(split: SplitPlan) -> tuple[list[Places], Layout]:
    """Where each dataset's arrays lie, and the dtypes and shapes of the split's arrays."""
    places: list[Places] = []
    dtypes: dict[str, set[Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for dataset in split.datasets:
        place = {}
        for name, (dtype, shape) in dataset.order.arrays(dataset.inputs).items():
            dtypes.setdefault(name, set()).add(dtype)
            start = shapes.get(name, (0,))[0]
            place[name] = slice(start, start + shape[0])
            shapes[name] = (start + shape[0], *shape[1:])
        places.append(place)
    layout: dict[str, tuple[Any, tuple[int, ...]]] = {
        name: (np.result_type(*dtypes[name]), shape) for name, shape in shapes.items()
    }
    if split.kind == "blend":
        layout.update((name, (dtype, (split.num_samples,))) for name, dtype in _BLEND.items())
    return places, layout


def _load(array_set: arrays.ArraySet, places: Places) -> Arrays:
    try:
        return {name: array_set[name][place] for name, place in places.items()}
    except DataError as error:  # it was removed or damaged between the start and the first sample
        raise DataError(
            f"{error}. It was whole when the run started: start it again, or run `millrace index`, "
            "and it is built anew"
        ) from None


def _load_blend(array_set: arrays.ArraySet) -> BlendIndices:
    return BlendIndices(**_load(array_set, dict.fromkeys(BlendIndices._fields, slice(None))))
