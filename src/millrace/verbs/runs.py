"""`index`, `bench`, `plan`, `cache` and `demo`."""

import json
from dataclasses import asdict, dataclass
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from millrace import inspect
from millrace.checks import SCHEME
from millrace.errors import ConfigError
from millrace.files import atomic_file
from millrace.jobs import benchmark_report, indexing
from millrace.jobs.benchmarking import (
    BenchOptions,
    RunOptions,
    bench,
    prefixes_of,
    read_run,
    run_of,
)
from millrace.jobs.bucket_budget import BucketOptions, budget_lines, budget_of
from millrace.jobs.cache import CacheOptions, PruneOptions, format_entries, list_cache, prune_cache
from millrace.jobs.indexing import IndexOptions
from millrace.option_class import check_options, option, take_options
from millrace.run import arguments as run_arguments, build_datasets
from millrace.verbs import DamageError, JsonOption, Verb, json_text


def _index(
    config: str | None = None,
    tokenizer_identifiers: str | None = None,
    as_json: bool = False,
    **options: Any,
) -> str:
    values = run_arguments.read_arguments(config) if config else {}
    tokenizer = values.pop("tokenizer_identifiers", None)
    unknown = run_arguments.unknown_arguments(values)
    values.update({name: options.pop(name) for name in run_arguments.NAMES if name in options})
    tokenizer = tokenizer_identifiers or tokenizer
    if isinstance(tokenizer, str):
        tokenizer = run_arguments.read_identifiers(tokenizer)
    run = run_arguments.built_config_from(values)
    result = indexing.index(run, tokenizer=tokenizer, show_progress=True, **options)
    if as_json:
        return json_text(result)
    text = indexing.format_result(result)
    if unknown:
        text += f"\narguments that do not concern the data were left out: {', '.join(unknown)}"
    return text


def _bench(as_json: bool = False, **options: Any) -> str:
    run = run_of(**take_options(RunOptions, options))
    result = bench(run, **options)
    return json_text(result) if as_json else benchmark_report.format_result(result)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(BucketOptions):
    """The options of `plan`."""

    config: str = option("YAML or TOML file of the run", flags="config", metavar="RUN")
    diff: str | None = option(
        "the file as it was: tell from which sample and step on RUN draws anything else",
        None,
        metavar="OLD",
    )
    consumed_samples: int = option(
        "with --diff: samples that are consumed: refuse a change before their end", 0, least=0
    )
    save_interval: int | None = option(
        "steps from a checkpoint to the next one",
        None,
        default_text="save-interval of the run",
        least=1,
    )
    picture: str | None = option(
        "write a picture of the mixture over the run, .svg or .html", None, metavar="FILE"
    )

    def __post_init__(self) -> None:
        check_options(self)


def _plan(as_json: bool = False, **values: Any) -> str:
    own = PlanOptions(**values)
    arguments, config = read_run(own.config)
    batches = run_arguments.schedule_from(arguments)
    if own.diff is not None:
        return _change(own, read_run(own.diff)[1], config, batches, as_json)
    interval = own.save_interval or arguments.get("save_interval") or 0
    num_parts = 0 if own.picture is None else 64
    one = inspect.forecast(config, batches=batches, save_interval=interval, num_parts=num_parts)
    budget, text = None, inspect.format_forecast(one)
    if any(SCHEME.match(prefix) for prefix in prefixes_of(config)):  # else nothing is built
        size = 1 if batches is None else batches.batch_size(0)
        rate = 10_000 / config.sequence_length  # samples of an accelerator in a second
        budget = budget_of(build_datasets(config).train, own, size, rate)
        text = "\n".join([text, *([] if budget is None else budget_lines(budget))])
    if own.picture is not None:
        image = inspect.forecast_svg(one, own.config)
        if own.picture.endswith(".html"):
            image = f"<!doctype html>\n<meta charset=utf-8>\n{image}<pre>{escape(text)}</pre>\n"
        with atomic_file(own.picture) as file:
            file.write(image.encode())
    report = asdict(one) | {"buckets": budget and asdict(budget)}
    return json.dumps(report, default=np.ndarray.tolist) if as_json else text


def _change(own: PlanOptions, old: Any, new: Any, batches: Any, as_json: bool) -> str:
    first, changes = inspect.forecast_change(old, new)
    if first is not None and first < own.consumed_samples:
        raise ConfigError(
            f"sample {first:,} changes, and {own.consumed_samples:,} are consumed: "
            f"{'; '.join(changes[:3])}. Let the change begin behind them"
        )
    if as_json:
        return json.dumps({"first_changed_sample": first, "changes": changes})
    if first is None:
        return "no sample changes that both runs have"
    steps = "" if batches is None else f", with the steps below {batches.num_steps(first):,}"
    text = f"position {first:,} is the first one that changes; all before it stay{steps}:"
    return "\n".join([text, *(f"  {change}" for change in changes[:20])])


def _list(folder: str, as_json: bool = False) -> str:
    entries = list_cache(folder)
    return json_text(entries) if as_json else format_entries(entries, "there")


def _check(folder: str, as_json: bool = False) -> str:
    entries = list_cache(folder, check_contents=True)
    text = json_text(entries) if as_json else format_entries(entries, "checked")
    num_damaged = sum(1 for entry in entries if entry.problems and entry.kind == "set")
    if num_damaged:
        raise DamageError(
            f"{num_damaged} sets of arrays are damaged; `millrace cache prune` removes them", text
        )
    return text


def _prune(folder: str, as_json: bool = False, **options: Any) -> str:
    entries = prune_cache(folder, **options)
    state = "to remove" if options.get("dry_run") else "removed"
    return json_text(entries) if as_json else format_entries(entries, state)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `demo`."""

    folder: str = option("output folder", "millrace-demo", metavar="DIR")


def _demo(folder: str = DemoOptions.folder) -> str:
    from millrace.demo import run_demo  # which needs the tokenizers package

    run_demo(folder)
    return ""


VERBS = (
    Verb(
        "index",
        _index,
        (IndexOptions, JsonOption),
        "Builds the indices of a training run ahead of time. The run then starts without "
        "building any. The arguments are Megatron-LM's, in a YAML or TOML file, as options, or "
        "both (an option overrides the file).",
    ),
    Verb(
        "bench",
        _bench,
        (RunOptions, BenchOptions, JsonOption),
        "Measures how fast this machine feeds a run. Draws batches of the training data, cold "
        "and warm, and says how long training steps would wait, what bounds the rate, and how many "
        "accelerators it could feed.",
    ),
    Verb(
        "plan",
        _plan,
        (PlanOptions, JsonOption),
        "Tells what a run will draw. Counts tokens, samples, epochs and repeats by source and "
        "phase, without reading tokens, and warns of what a careful person would want to know.",
    ),
    Verb("cache list", _list, (CacheOptions, JsonOption), "Lists the entries."),
    Verb(
        "cache check",
        _check,
        (CacheOptions, JsonOption),
        "Reads every array and compares its checksum. Exits with 1 if one is damaged.",
    ),
    Verb(
        "cache prune",
        _prune,
        (PruneOptions, JsonOption),
        "Removes what no run can use: leftovers, damaged sets, runs whose token files are "
        "missing or changed, and sets that no run needs. Keeps entries that are being built or "
        "cannot be judged here.",
    ),
    Verb(
        "demo",
        _demo,
        (DemoOptions,),
        "Runs the whole pipeline on the text of Python's standard library. Makes a corpus of its "
        "modules and packages, trains a small tokenizer, tokenises both domains, blends "
        "them, draws batches for 2 ranks, stops, resumes with 4, and checks that no sample was "
        "lost or repeated. Needs no network.",
    ),
)
