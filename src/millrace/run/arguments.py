"""Megatron-LM's arguments, from a file or a command line, as a `DatasetConfig`."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from millrace.checks import check_bool, check_int, check_path, shown
from millrace.errors import ConfigError
from millrace.option_class import parse_size
from millrace.order import SPLITS
from millrace.run.config import Blend, DatasetConfig, dict_of, source_of
from millrace.run.instant_config import AnyConfig, InstantConfig
from millrace.run.trials import trial_of
from millrace.run.yaml_events import load_yaml
from millrace.sampling import BatchSizeSchedule, RampUp

LEGACY_SPLIT = "969, 30, 1"  # Megatron-LM's default where --data-path has no --split
DEFAULT_SEED, DEFAULT_EVAL_ITERS, DEFAULT_EVAL_INTERVAL = 1234, 100, 1000
_GIVE_COUNTS = "Give num_samples: the numbers that Megatron-LM prints as `datasets target sizes`"

_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
_DATA = ("data_path", "data_args_path", "per_split_data_args_path", *_PATHS)
_OF_BUILT_ORDERS = ("full_validation", "multiple_validation_sets", "order_options")
_OF_THE_INSTANT_ORDER = ("sources", "phases", "skips", "trial", "alpha", "mix_window")
ROW_ARGUMENTS = ("reset_position_ids", "eod_mask_loss", "eod_token", "pad_token")
"""The arguments on which rows alone depend, and no index."""
_UNKNOWN_COUNTS = ("step_batch_size_schedule", "phase_transition_iterations")


def read_arguments(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments in a YAML or TOML file; names have - or _, and may be in sections.

    Raises:
        ConfigError: A file that is missing or in another format, a name given twice, one that
            resembles one of NAMES, or a value of the wrong type.
    """
    name = check_path("the file of arguments", path)
    load: Callable[[BinaryIO], Any]
    if name.endswith((".yaml", ".yml")):
        load = load_yaml
    elif name.endswith(".toml"):
        load = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").load
    else:
        raise ConfigError(f"{name} is neither .yaml, .yml nor .toml: rename it")
    with _open(name, name.rpartition(".")[2]) as file:
        arguments = load(file)
        if not isinstance(arguments, dict):
            raise ConfigError(f"it holds a {type(arguments).__name__}; `name: value` is needed")
        arguments = _flat(arguments)
        for argument, value in arguments.items():
            _read(argument, value)
    return arguments


@contextlib.contextmanager
def _open(path: str, kind: str) -> Iterator[BinaryIO]:
    """An open file; ConfigError, with its path, for what cannot be read, or fails meanwhile."""
    try:
        with open(path, "rb") as file:
            yield file
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as {kind}: {error}") from None


_load_json = functools.partial(json.loads, object_pairs_hook=dict_of)


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments in one dict: sections mean nothing."""
    flat: list[tuple[str, Any]] = []
    for key, value in sections.items():
        name = str(key).replace("-", "_")
        words = [one for one in NAMES if "_" not in one] if "_" not in name else []
        near = difflib.get_close_matches(name.lower(), NAMES, 1, 0.87)  # 0.86: titles_data_path
        near = near or difflib.get_close_matches(name.lower(), words, 1, 0.75)
        if near and name not in NAMES:
            raise ConfigError(f"there is no argument {name}; did you mean {near[0]}?")
        is_section = isinstance(value, Mapping) and name not in (*NAMES, "tokenizer_identifiers")
        flat += _flat(value).items() if is_section else [(name, value)]
    return dict_of(flat)


Reader = Callable[[str, Any], Any]
"""Converts the value (or an option's text) of a named argument; ConfigError if it is not valid."""


def _number(name: str, value: Any, kind: type[int] | type[float] = int) -> Any:
    try:
        return kind(str(value))
    except ValueError:
        needed = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{name} must be {needed}, not {shown(value)}") from None


def _at_least(least: int) -> Reader:
    return lambda name, value: check_int(name, _number(name, value), least)


def _three(name: str, value: Any) -> tuple[int | None, ...]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ConfigError(f"{name} must be a list of three whole numbers, not {shown(value)}")
    nothing = ("none", "null") if name == "num_samples" else ()
    return tuple(None if str(one).lower() in nothing else _number(name, one) for one in value)


def _shares(name: str, value: Any) -> str:
    parts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(part, bool) or not isinstance(part, str | int | float) for part in parts):
        raise ConfigError(f'{name} must be shares such as "969,30,1", not {shown(value)}')
    return ",".join(map(str, parts))


_READERS: dict[str, Reader | None] = {
    **dict.fromkeys(("data_path", *_PATHS), lambda name, value: parse_blend(value, name)),
    **dict.fromkeys(("data_args_path", "per_split_data_args_path", "data_cache_path"), check_path),
    **dict.fromkeys(("seq_length", "global_batch_size", "eval_global_batch_size"), _at_least(1)),
    **dict.fromkeys(("eval_interval", "num_dataset_builder_threads"), _at_least(1)),
    **dict.fromkeys(("seed", "train_samples", "train_iters"), _at_least(0)),
    **dict.fromkeys(("eval_iters", "start_eval_at_iter"), _at_least(0)),
    **dict.fromkeys(("skip_train", "full_validation", "multiple_validation_sets"), check_bool),
    **dict.fromkeys(("any_tokenizer", "dataloader_fast_cache_load"), check_bool),
    **dict.fromkeys(("mmap_bin_files", "no_mmap_bin_files"), check_bool),
    "mirror": check_path,
    "mirror_limit": lambda name, value: parse_size(str(value)),
    "split": _shares,
    **dict.fromkeys(("num_samples", "rampup_batch_size"), _three),
    "mid_level_dataset_surplus": functools.partial(_number, kind=float),
    **dict.fromkeys(("add_extra_token", "reset_position_ids", "eod_mask_loss"), check_bool),
    **dict.fromkeys(("eod_token", "pad_token"), _number),
    "order": lambda _, value: None if value == "gpt" else value,
    **dict.fromkeys(("order_options", "sampler", "sampler_options", "boundaries")),
    **dict.fromkeys(("loss_ranges", *_UNKNOWN_COUNTS)),  # taken as they are, like the line before
    **dict.fromkeys(("sources", "phases", "skips")),  # these two lines are of `InstantConfig`
    **dict.fromkeys(("alpha", "dtype", "mix_window", "trial")),
}

_FIELDS = {
    "seq_length": "sequence_length",
    "data_cache_path": "cache",
    "dataloader_fast_cache_load": "trust_cache",
    "num_dataset_builder_threads": "num_threads",
    "mid_level_dataset_surplus": "surplus",
}
"""The fields of a configuration by the arguments of other names."""

NAMES = tuple(_READERS)
"""The arguments that concern data. Millrace's own are `num_samples` (train, valid, test),
`any_tokenizer`, `loss_ranges`, `order`, `sampler` and their options, `add_extra_token`,
`eod_token`, `pad_token`, `boundaries`, `mirror` and `mirror_limit`, and what the instant order has
of its own: `sources`, `phases`, `skips`, `alpha`, `dtype`, `mix_window` and `trial`."""


def _read(name: str, value: Any) -> Any:
    reader = _READERS.get(name)
    return value if value is None or reader is None else reader(name, value)


def config_from(arguments: Mapping[str, Any]) -> AnyConfig:
    """A run's configuration from Megatron-LM's arguments, by its rules for sizes.

    With `order` "instant" it is that of the instant order, which needs no sizes.

    Training takes train_samples, or train_iters * global_batch_size, samples; validation
    (train_iters // eval_interval + 1) * eval_iters batches, without those before
    start_eval_at_iter; the test eval_iters batches. The last two take batches of
    eval_global_batch_size.

    Args:
        arguments: Values by their names in NAMES.

    Raises:
        ConfigError: A missing argument, or arguments that do not go together.
    """
    values = {name: _read(name, arguments.get(name)) for name in NAMES}
    arguments = {name: value for name, value in values.items() if value is not None}
    if "seq_length" not in arguments:
        raise ConfigError("seq_length is missing: give it, also beside those of phases")
    if "pad_token" in arguments and arguments["pad_token"] == arguments.get("eod_token"):
        raise ConfigError(
            "pad_token is eod_token, which Megatron-LM takes for no padding: leave pad_token out"
        )
    is_instant = arguments.get("order") == "instant"
    for name in _OF_BUILT_ORDERS if is_instant else _OF_THE_INSTANT_ORDER:
        if arguments.get(name, False) is not False:
            needed = "gpt" if is_instant else "instant"
            raise ConfigError(f"{name} needs `order: {needed}`: give that, or leave it out")
    if is_instant:
        return _instant_config(arguments)
    blend, per_split = _blends(arguments)
    split = arguments.get("split", None if blend is None else LEGACY_SPLIT)
    if blend is None and split is not None:
        raise ConfigError(f"split {split!r} goes with data_path, not with such data: leave it out")
    own = _config_fields(DatasetConfig, arguments)
    own |= {"blend": blend, "split": split, "blend_per_split": per_split}
    return DatasetConfig(**own | {"num_samples": _num_samples(arguments, per_split)})


def read_run(path: str | os.PathLike[str]) -> tuple[dict[str, Any], AnyConfig]:
    """The arguments in a run's file, and the configuration that they make."""
    values = read_arguments(path)
    try:
        return values, config_from(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def built_config_from(arguments: Mapping[str, Any]) -> DatasetConfig:
    """The same for what needs a built order; ConfigError for the instant one."""
    config = config_from(arguments)
    if isinstance(config, InstantConfig):
        raise ConfigError("the order is instant, for which nothing is built: leave this step out")
    return config


def _instant_config(arguments: Mapping[str, Any]) -> InstantConfig:
    if "sources" not in arguments:
        arguments = {**_named_sources(arguments), **arguments}
    elif both := [name for name in _DATA if name in arguments]:
        raise ConfigError(f"there are sources and {both[0]}: leave one out")
    own = {}
    if arguments.keys() & {"num_samples", "train_samples", "train_iters"}:
        own["num_samples"] = _num_samples(arguments, None)
    config = InstantConfig(**_config_fields(InstantConfig, arguments) | own)
    if "trial" in arguments:
        config = trial_of(config, arguments["trial"], schedule_from(arguments))
    return config


def schedule_from(arguments: Mapping[str, Any]) -> BatchSizeSchedule | None:
    """The global batch sizes of a run; None without global_batch_size."""
    names = "global_batch_size", "rampup_batch_size"
    size, rampup = (_read(name, arguments.get(name)) for name in names)
    if size is None or not rampup:
        return None if size is None else BatchSizeSchedule([(0, size)])
    start, increment, samples = rampup
    return RampUp(start, increment, samples, size)


def _named_sources(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The sources in Megatron-LM's list, named by the last parts of their prefixes."""
    blend = _blends(arguments)[0] if {*_DATA} & arguments.keys() else None
    if blend is None:
        raise ConfigError("the instant order splits each source: give data_path, or sources")
    prefixes, weights = blend
    sources: dict[str, Any] = {}
    for number, item in enumerate(prefixes):
        prefix, part = source_of(item)
        name = os.path.basename(prefix)
        if name in sources:
            raise ConfigError(f"two prefixes end with {name}: give sources, each with its name")
        sources[name] = {"prefix": prefix, "part": part or (0.0, 1.0)}
        if weights is not None:
            sources[name]["weight"] = weights[number]
    rest = {"split": LEGACY_SPLIT} if "split" not in arguments else {}
    return {"sources": sources, **rest, **({"alpha": 1.0} if weights is None else {})}


def _config_fields(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that are arguments of their own, and how to read its files."""
    names = {one.name for one in dataclasses.fields(kind)}
    values = {_FIELDS.get(name, name): value for name, value in arguments.items()}
    given = {name: value for name, value in values.items() if name in names}
    is_mapped = arguments.get("mmap_bin_files", True) and not arguments.get("no_mmap_bin_files")
    mirror, limit, storage = arguments.get("mirror"), arguments.get("mirror_limit"), None
    if (mirror is None) != (limit is None):
        raise ConfigError("give mirror and mirror-limit, or none of the two")
    if mirror is not None:
        from millrace.storage.objects import ObjectStorage  # 10 ms that runs on disks do without

        storage = ObjectStorage(mirror=mirror, limit=limit)
    files = {"access": "mmap" if is_mapped else "file", "storage": storage}
    return {"seed": DEFAULT_SEED, **given, **files}


def read_identifiers(text: str) -> Any:
    """A tokenizer's unique identifiers: JSON, a JSON file, or a description of Megatron-LM's."""
    try:
        identifiers = _load_json(Path(text).read_bytes() if os.path.exists(text) else text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"identifiers {text!r}: neither a file nor JSON ({error})") from None
    while isinstance(identifiers, dict) and identifiers.get("datasets"):
        identifiers = identifiers["datasets"][0]  # of a blend
    if isinstance(identifiers, dict) and {"index_split", "tokenizer"} <= identifiers.keys():
        return identifiers["tokenizer"]
    if isinstance(identifiers, dict) and {"model", "added_tokens"} <= identifiers.keys():
        raise ConfigError(
            f"{text} is a tokenizer, not what Megatron-LM notes of one: give a *-description.txt "
            "of its --data-cache-path"
        )
    return identifiers


def parse_blend(items: Sequence[Any] | str, name: str = "the data") -> Blend:
    """The blend in Megatron-LM's list: prefixes only, or a weight before each prefix.

    In place of a prefix may stand millrace's own {"prefix": PREFIX, "part": [START, END]}.
    """
    try:
        parts = shlex.split(items) if isinstance(items, str) else items
    except ValueError as error:
        raise ConfigError(f"{name} is {shown(items)}: {error}") from None
    types = (str, int, float, os.PathLike, Mapping)
    if not isinstance(parts, list | tuple) or any(
        isinstance(part, bool) or not isinstance(part, types) for part in parts
    ):
        raise ConfigError(f"{name} must be a list of prefixes, or with weights, not {shown(items)}")
    parts = [part if isinstance(part, Mapping) else str(part).strip() for part in parts]
    weights = []
    for part in parts[::2]:
        with contextlib.suppress(TypeError, ValueError):
            weights.append(float(part))
    if len(parts) % 2 or not weights:
        return parts, None
    if len(weights) < len(parts) // 2:
        raise ConfigError(f"{shown(parts)} has weights for some prefixes only: give all or none")
    return parts[1::2], weights


def _blends(arguments: Mapping[str, Any]) -> tuple[Blend | None, list[Blend | None] | None]:
    names = [name for name in _DATA if name in arguments]
    kinds = {"paths" if name in _PATHS else name for name in names}
    if len(kinds) != 1:
        raise ConfigError(f"{' and '.join(names) or 'no data'} given; use {' or '.join(_DATA[:4])}")
    kind = kinds.pop()
    if kind == "paths":
        return None, [arguments.get(name) for name in _PATHS]
    path = arguments[kind]
    if kind == "data_path":
        return path, None
    with _open(path, "text" if kind == "data_args_path" else "JSON") as file:
        if kind == "data_args_path":
            return parse_blend(file.read().decode()), None
        blends = _load_json(file.read())
        if not isinstance(blends, dict):
            raise ConfigError(f"it holds {shown(blends)}; lists by the names of splits are needed")
        lists = [(name, blends.get(name)) for name in SPLITS]
        return None, [None if items is None else parse_blend(items, name) for name, items in lists]


def _num_samples(
    arguments: Mapping[str, Any], per_split: Sequence[Blend | None] | None
) -> tuple[int | None, int | None, int | None]:
    if "num_samples" in arguments:
        return arguments["num_samples"]  # type: ignore[no-any-return]
    for name in filter(arguments.get, _UNKNOWN_COUNTS):
        raise ConfigError(f"{name} is {shown(arguments[name])}: it sets the counts. {_GIVE_COUNTS}")
    batch = arguments.get("global_batch_size", 0)
    train, all_iterations = _training(arguments, batch)
    eval_iters = arguments.get("eval_iters", DEFAULT_EVAL_ITERS)
    if not batch and eval_iters and (per_split is None or any(per_split[1:])):
        raise ConfigError("validation needs batches: give global_batch_size, or num_samples")
    test = eval_iters * arguments.get("eval_global_batch_size", batch)
    if arguments.get("full_validation"):
        return train, None, test
    if arguments.get("skip_train"):
        return train, test, test
    interval = arguments.get("eval_interval", DEFAULT_EVAL_INTERVAL)
    skipped = arguments.get("start_eval_at_iter", 0) // interval
    valid = [max(0, number // interval + 1 - skipped) * test for number in all_iterations]
    if valid[0] != valid[-1]:
        raise ConfigError(
            f"rampup_batch_size is {arguments['rampup_batch_size']}: Megatron-LM validates on "
            f"{valid[1]} samples up to core 0.17, and on {valid[0]} in later versions, which "
            f"ignore it. {_GIVE_COUNTS}"
        )
    return train, valid[0], test


def _training(arguments: Mapping[str, Any], batch: int) -> tuple[int, list[int]]:
    """The samples to train on, and their iterations: without a ramp-up, and with."""
    samples, iterations = arguments.get("train_samples"), arguments.get("train_iters")
    if samples is not None and iterations is not None:
        raise ConfigError(f"train_samples is {samples}, train_iters {iterations}: leave one out")
    if iterations is not None and arguments.get("rampup_batch_size"):
        raise ConfigError(
            f"rampup_batch_size is given, and train_iters {iterations}, which Megatron-LM refuses: "
            "give train_samples in place of it"
        )
    if samples is None and iterations is not None and batch:
        return iterations * batch, [iterations]
    if samples is None:
        raise ConfigError("no number of samples to train on: give train_samples or num_samples")
    all_iterations = [samples // batch if batch else 0]
    rampup: tuple[int, int, int] | None = arguments.get("rampup_batch_size")
    if batch and rampup:
        ramp = RampUp(*rampup, batch)
        steps = ramp.num_steps(min(ramp.samples, samples) + 1, drop_last=False)
        all_iterations.append(steps + max(0, samples - ramp.consumed_at(steps)) // batch)
    return samples, all_iterations
