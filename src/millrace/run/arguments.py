"""Megatron-LM's arguments, from a file or a command line, as a `DatasetConfig`."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.errors import ConfigError
from millrace.order import SPLITS
from millrace.order.blends import SURPLUS
from millrace.run.config import Blend, DatasetConfig

LEGACY_SPLIT = "969, 30, 1"  # Megatron-LM's default where --data-path has no --split
DEFAULT_SEED, DEFAULT_EVAL_ITERS, DEFAULT_EVAL_INTERVAL = 1234, 100, 1000

_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
_DATA = ("data_path", "data_args_path", "per_split_data_args_path", *_PATHS)
_OTHERS = """
    split seq_length seed num_samples train_samples train_iters global_batch_size eval_iters
    eval_interval skip_train full_validation multiple_validation_sets data_cache_path
    dataloader_fast_cache_load num_dataset_builder_threads mid_level_dataset_surplus mmap_bin_files
    no_mmap_bin_files any_tokenizer
"""
NAMES = (*_DATA, *_OTHERS.split())
"""The arguments that concern data. Only two are millrace's own: `num_samples` (train, valid,
test) and `any_tokenizer`."""


def read_arguments(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments in a YAML or TOML file; names have - or _, and may be in sections.

    Raises:
        ConfigError: A missing file, or one in another format.
    """
    name = os.fspath(path)
    text = _read_text(name)
    load: Callable[[str], Any]
    if name.endswith((".yaml", ".yml")):
        import yaml

        load, error_class = yaml.safe_load, yaml.YAMLError
    elif name.endswith(".toml"):
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib

        load, error_class = tomllib.loads, ValueError
    else:
        raise ConfigError(f"{name} is neither .yaml, .yml nor .toml: rename it")
    try:
        arguments = load(text)
    except (error_class, ValueError) as error:  # YAML's dates raise ValueError
        raise ConfigError(f"{name} cannot be read: {error}") from None
    if not isinstance(arguments, dict):
        raise ConfigError(f"{name} holds a {type(arguments).__name__}; `name: value` is needed")
    return _flat(name, arguments)


def _flat(place: str, sections: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments in one dict: sections are for readers alone."""
    flat: dict[str, Any] = {}
    for key, value in sections.items():
        name = str(key).replace("-", "_")
        entries = _flat(place, value) if isinstance(value, Mapping) else {name: value}
        twice = flat.keys() & entries.keys()
        if twice:
            raise ConfigError(f"{place} gives {', '.join(sorted(twice))} twice: leave one out")
        flat.update(entries)
    return flat


def unknown_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """The names that do not concern data; ConfigError for one that is nearly one of NAMES."""
    unknown = [name for name in arguments if name not in NAMES]
    for name in unknown:
        near = difflib.get_close_matches(name, NAMES, 1, 0.85)
        if near:
            raise ConfigError(f"there is no argument {name}; did you mean {near[0]}?")
    return unknown


def config_from(arguments: Mapping[str, Any]) -> DatasetConfig:
    """A run's configuration from Megatron-LM's arguments, by its rules for sizes.

    Training takes train_samples, or train_iters * global_batch_size, samples; validation
    (train_iters // eval_interval + 1) * eval_iters batches; the test eval_iters batches.

    Args:
        arguments: Values by their names in NAMES.

    Raises:
        ConfigError: A missing argument, or arguments that do not go together.
    """
    arguments = {name: value for name, value in arguments.items() if value is not None}
    blend, per_split = _blends(arguments)
    split = arguments.get("split", None if blend is None else LEGACY_SPLIT)
    if isinstance(split, list | tuple):
        split = ",".join(map(str, split))
    if blend is None and split is not None:
        raise ConfigError(
            f"split {split!r} goes with data_path; here each split has its own data: leave it out"
        )
    is_mapped = arguments.get("mmap_bin_files", True) and not arguments.get("no_mmap_bin_files")
    return DatasetConfig(
        sequence_length=_integer(arguments, "seq_length"),
        seed=_integer(arguments, "seed", DEFAULT_SEED),
        num_samples=_num_samples(arguments, per_split),
        blend=blend,
        split=None if split is None else str(split),
        blend_per_split=per_split,
        multiple_validation_sets=bool(arguments.get("multiple_validation_sets")),
        full_validation=bool(arguments.get("full_validation")),
        cache=arguments.get("data_cache_path"),
        trust_cache=bool(arguments.get("dataloader_fast_cache_load")),
        num_threads=_integer(arguments, "num_dataset_builder_threads", 1),
        access="mmap" if is_mapped else "file",
        any_tokenizer=bool(arguments.get("any_tokenizer")),
        surplus=float(arguments.get("mid_level_dataset_surplus", SURPLUS)),
    )


def read_identifiers(text: str) -> Any:
    """A tokenizer's unique identifiers: JSON, a JSON file, or a description of Megatron-LM's."""
    content = _read_text(text) if os.path.exists(text) else text
    try:
        identifiers = json.loads(content)
    except ValueError as error:
        raise ConfigError(
            f"the tokenizer's identifiers {text!r} are neither a file nor JSON: {error}"
        ) from None
    while isinstance(identifiers, dict) and identifiers.get("datasets"):
        identifiers = identifiers["datasets"][0]  # the description of a blend
    if isinstance(identifiers, dict) and {"index_split", "tokenizer"} <= identifiers.keys():
        return identifiers["tokenizer"]
    return identifiers


def parse_blend(items: Sequence[Any] | str) -> Blend:
    """The blend in Megatron-LM's list: prefixes only, or a weight before each prefix."""
    parts = shlex.split(items) if isinstance(items, str) else map(str, items)
    parts = [part.strip() for part in parts]
    are_numbers = [_is_number(part) for part in parts[::2]]
    if len(parts) % 2 or not any(are_numbers):
        return parts, None
    if not all(are_numbers):
        raise ConfigError(
            f"the data {' '.join(parts[:8])} ... give weights for some prefixes only: give one "
            "before each, or none"
        )
    return parts[1::2], [float(part) for part in parts[::2]]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _blends(arguments: Mapping[str, Any]) -> tuple[Blend | None, list[Blend | None] | None]:
    names = [name for name in _DATA if name in arguments]
    kinds = {"paths" if name in _PATHS else name for name in names}
    if len(kinds) != 1:
        raise ConfigError(
            f"{' and '.join(names) or 'no data'} given; give one of data_path, data_args_path, "
            "per_split_data_args_path, or train_data_path and the like"
        )
    kind = kinds.pop()
    if kind == "paths":
        lists = [arguments.get(name) for name in _PATHS]
    elif kind == "per_split_data_args_path":
        try:
            blends = json.loads(_read_text(arguments[kind]))
            lists = [blends.get(name) for name in SPLITS]
        except (ValueError, AttributeError) as error:
            raise ConfigError(
                f"{arguments[kind]} is not a JSON object with train, valid and test: {error}"
            ) from None
    else:
        items = arguments[kind]
        return parse_blend(items if kind == "data_path" else _read_text(items)), None
    return None, [None if items is None else parse_blend(items) for items in lists]


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _num_samples(
    arguments: Mapping[str, Any], per_split: Sequence[Blend | None] | None
) -> tuple[int | None, int | None, int | None]:
    if "num_samples" in arguments:
        counts = arguments["num_samples"]
        if not isinstance(counts, list | tuple) or len(counts) != 3:
            raise ConfigError(f"num_samples is {counts}; three are needed: train, valid and test")
        train, valid, test = (_count(count) for count in counts)
        return train, valid, test
    batch = _integer(arguments, "global_batch_size", 0)
    if "train_samples" in arguments:
        train = _integer(arguments, "train_samples")
        iterations = _integer(arguments, "train_iters", train // batch if batch else 0)
    elif "train_iters" in arguments and batch:
        iterations = _integer(arguments, "train_iters")
        train = iterations * batch
    else:
        raise ConfigError(
            "the number of samples to train on is missing: give num_samples, train_samples, or "
            "train_iters and global_batch_size"
        )
    eval_iters = _integer(arguments, "eval_iters", DEFAULT_EVAL_ITERS)
    if not batch and eval_iters and (per_split is None or any(per_split[1:])):
        raise ConfigError(
            "validation and test take eval_iters batches: give global_batch_size, or num_samples"
        )
    interval = _integer(arguments, "eval_interval", DEFAULT_EVAL_INTERVAL)
    if interval < 1:
        raise ConfigError(f"eval_interval is {interval}; at least 1 is needed")
    rounds = 1 if arguments.get("skip_train") else iterations // interval + 1
    valid = None if arguments.get("full_validation") else rounds * eval_iters * batch
    return train, valid, eval_iters * batch


def _count(text: Any) -> int | None:
    if text is None or str(text).lower() in ("none", "null"):
        return None
    try:
        return int(str(text))
    except ValueError:
        raise ConfigError(f"num_samples holds {text!r}; a whole number or none is needed") from None


def _integer(arguments: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = arguments.get(name, default)
    if value is None:
        raise ConfigError(f"{name} is missing")
    try:
        return int(str(value))
    except ValueError:
        raise ConfigError(f"{name} is {value!r}; a whole number is needed") from None
