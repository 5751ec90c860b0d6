"""`index`, `bench`, `cache` and `demo`."""

from dataclasses import dataclass
from typing import Any

from millrace.jobs import benchmark_report, indexing
from millrace.jobs.benchmarking import BenchOptions, RunOptions, bench, run_of
from millrace.jobs.cache import CacheOptions, PruneOptions, format_entries, list_cache, prune_cache
from millrace.jobs.indexing import IndexOptions
from millrace.option_class import option, take_options
from millrace.run import arguments as run_arguments
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
