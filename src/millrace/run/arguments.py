"""Megatron-LM's arguments, from a file or a command line, as a `DatasetConfig`."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.errors import ConfigError
from millrace.order.blends import SURPLUS
from millrace.run.config import Blend, DatasetConfig

LEGACY_SPLIT = "969, 30, 1"  # what Megatron-LM takes where --data-path has no --split
DEFAULT_SEED, DEFAULT_EVAL_ITERS, DEFAULT_EVAL_INTERVAL = 1234, 100, 1000

_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
_DATA = ("data_path", "data_args_path", "per_split_data_args_path", *_PATHS)
NAMES = (
    *_DATA,
    "split",
    "seq_length",
    "seed",
    "num_samples",
    "train_samples",
    "train_iters",
    "global_batch_size",
    "eval_iters",
    "eval_interval",
    "skip_train",
    "full_validation",
    "multiple_validation_sets",
    "data_cache_path",
    "dataloader_fast_cache_load",
    "num_dataset_builder_threads",
    "mid_level_dataset_surplus",
    "mmap_bin_files",
    "no_mmap_bin_files",
)
"""The arguments that say something about data. `num_samples` alone is ours: train, valid, test."""


def read_arguments(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments in a YAML or TOML file, names with - or _, in sections or without.

    Raises:
        ConfigError: no such file, or one that is neither.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}. Give a YAML or TOML file") from None
    try:
        found = _parse(name, content.decode())
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError among them
        raise ConfigError(f"{name} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds a {type(found).__name__}; `name: value` is needed")
    return dict(_flat(name, found))


def _parse(name: str, text: str) -> Any:
    if name.endswith((".yaml", ".yml")):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None
    if name.endswith(".toml"):
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib

        return tomllib.loads(text)
    raise ConfigError(f"{name} is neither .yaml, .yml nor .toml: rename it")


def _flat(place: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are there for people: their arguments count as if there were none."""
    flat: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        entries = _flat(place, value) if isinstance(value, Mapping) else {name: value}
        twice = flat.keys() & entries.keys()
        if twice:
            raise ConfigError(f"{place} gives {', '.join(sorted(twice))} twice: leave one out")
        flat.update(entries)
    return flat


def unknown_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """The names that say nothing about data: the model's, in a file for the whole run.

    Raises:
        ConfigError: one that is nearly a name of ours.
    """
    unknown = [name for name in arguments if name not in NAMES]
    for name in unknown:
        near = difflib.get_close_matches(name, NAMES, 1, 0.85)
        if near:
            raise ConfigError(f"there is no argument {name}; did you mean {near[0]}?")
    return unknown


def config_from(arguments: Mapping[str, Any]) -> DatasetConfig:
    """The datasets of a run by Megatron-LM's arguments, and by its rules for their sizes.

    Training takes train_samples, or train_iters * global_batch_size, samples; validation
    (train_iters // eval_interval + 1) * eval_iters batches; the test eval_iters batches.

    Args:
        arguments: by their names in NAMES.

    Raises:
        ConfigError: what is missing, or does not go together.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    blend, per_split = _blends(given)
    split = given.get("split", LEGACY_SPLIT) if blend is not None else None
    if blend is None and "split" in given:
        raise ConfigError(
            f"split {given['split']!r} goes with data_path; data for each split are given here: "
            "leave it out"
        )
    return DatasetConfig(
        sequence_length=_integer(given, "seq_length"),
        seed=_integer(given, "seed", DEFAULT_SEED),
        num_samples=_num_samples(given, per_split),
        blend=blend,
        split=split if split is None else _split_text(split),
        blend_per_split=per_split,
        multiple_validation_sets=bool(given.get("multiple_validation_sets", False)),
        full_validation=bool(given.get("full_validation", False)),
        cache=given.get("data_cache_path"),
        trust_cache=bool(given.get("dataloader_fast_cache_load", False)),
        num_threads=_integer(given, "num_dataset_builder_threads", 1),
        access="mmap" if _is_mapped(given) else "file",
        surplus=float(given.get("mid_level_dataset_surplus", SURPLUS)),
    )


def read_identifiers(text: str) -> Any:
    """A tokenizer's unique identifiers: JSON, a file of it, or a description of Megatron-LM's.

    Raises:
        ConfigError: none of these.
    """
    content = _read_text(text) if os.path.exists(text) else text
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ConfigError(
            f"the tokenizer's identifiers {text!r} are neither a file nor JSON: {error}"
        ) from None
    while isinstance(found, dict) and found.get("datasets"):
        found = found["datasets"][0]  # the description of a blend
    if isinstance(found, dict) and "index_split" in found and "tokenizer" in found:
        return found["tokenizer"]
    return found


def parse_blend(items: Sequence[Any] | str) -> Blend:
    """Megatron-LM's list: prefixes alone, or a weight before each prefix.

    Raises:
        ConfigError: weights for some of the prefixes alone.
    """
    parts = shlex.split(items) if isinstance(items, str) else [str(item) for item in items]
    if len(parts) % 2 == 0:
        weights = [_number(part) for part in parts[::2]]
        if all(weight is not None for weight in weights) and parts:
            return [part.strip() for part in parts[1::2]], [w for w in weights if w is not None]
        if any(weight is not None for weight in weights):
            raise ConfigError(
                f"the data {' '.join(parts[:8])} ... give weights for some prefixes alone: give "
                "one before each, or none"
            )
    return [part.strip() for part in parts], None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _blends(given: Mapping[str, Any]) -> tuple[Blend | None, list[Blend | None] | None]:
    names = [name for name in _DATA if name in given]
    kinds = {"paths" if name in _PATHS else name for name in names}
    if len(kinds) != 1:
        raise ConfigError(
            f"{' and '.join(names) or 'no data'} given; give one of data_path, data_args_path, "
            "per_split_data_args_path, or train_data_path and the like"
        )
    kind = kinds.pop()
    if kind == "data_path":
        return parse_blend(given[kind]), None
    if kind == "data_args_path":
        return parse_blend(_read_text(given[kind])), None
    if kind == "paths":
        return None, [parse_blend(given[name]) if name in given else None for name in _PATHS]
    try:
        found = json.loads(_read_text(given[kind]))
        lists = [found.get(name) for name in ("train", "valid", "test")]
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{given[kind]} is no JSON object with train, valid and test: {error}"
        ) from None
    return None, [None if items is None else parse_blend(items) for items in lists]


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _num_samples(
    given: Mapping[str, Any], per_split: Sequence[Blend | None] | None
) -> tuple[int | None, int | None, int | None]:
    if "num_samples" in given:
        counts = given["num_samples"]
        if not isinstance(counts, list | tuple) or len(counts) != 3:
            raise ConfigError(f"num_samples is {counts}; three are needed: train, valid and test")
        train, valid, test = (_count(count) for count in counts)
        return train, valid, test
    batch = _integer(given, "global_batch_size", 0)
    if "train_samples" in given:
        train = _integer(given, "train_samples")
        iterations = _integer(given, "train_iters", train // batch if batch else 0)
    elif "train_iters" in given and batch:
        iterations = _integer(given, "train_iters")
        train = iterations * batch
    else:
        raise ConfigError(
            "how many samples to train on is not given: give num_samples, train_samples, or "
            "train_iters and global_batch_size"
        )
    evaluated = _integer(given, "eval_iters", DEFAULT_EVAL_ITERS)
    if not batch and evaluated and (per_split is None or any(per_split[1:])):
        raise ConfigError(
            "validation and test take eval_iters batches: give global_batch_size, or num_samples"
        )
    interval = _integer(given, "eval_interval", DEFAULT_EVAL_INTERVAL)
    if interval < 1:
        raise ConfigError(f"eval_interval is {interval}; at least 1 is needed")
    rounds = 1 if given.get("skip_train") else iterations // interval + 1
    valid = None if given.get("full_validation") else rounds * evaluated * batch
    return train, valid, evaluated * batch


def _count(text: Any) -> int | None:
    if text is None or str(text).lower() in ("none", "null"):
        return None
    try:
        return int(str(text))
    except ValueError:
        raise ConfigError(f"num_samples holds {text!r}; a whole number or none is needed") from None


def _integer(given: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = given.get(name, default)
    if value is None:
        raise ConfigError(f"{name} is missing")
    try:
        return int(str(value).replace("_", ""))
    except ValueError:
        raise ConfigError(f"{name} is {value!r}; a whole number is needed") from None


def _split_text(split: Any) -> str:
    return ",".join(map(str, split)) if isinstance(split, list | tuple) else str(split)


def _is_mapped(given: Mapping[str, Any]) -> bool:
    return bool(given.get("mmap_bin_files", True)) and not given.get("no_mmap_bin_files", False)
