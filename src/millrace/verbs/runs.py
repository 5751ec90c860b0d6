"""`index`, `bench`, `plan`, `cache` and `demo`."""

import itertools
import json
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from millrace import inspect
from millrace.checks import SCHEME, check_int, printable
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError
from millrace.files import write_file
from millrace.jobs import benchmark_report, indexing
from millrace.jobs.benchmarking import BenchOptions, bench, prefixes_of
from millrace.jobs.bucket_budget import BucketOptions, budget_lines, budget_of
from millrace.jobs.cache import CacheOptions, PruneOptions, format_entries, list_cache, prune_cache
from millrace.jobs.indexing import IndexOptions
from millrace.option_class import option
from millrace.run import arguments as run_arguments, build_datasets
from millrace.verbs import DamageError, JsonOption, RunOption, UsageError, Verb, json_text


def _index(
    config: str | None = None,
    tokenizer_identifiers: str | None = None,
    as_json: bool = False,
    **options: Any,
) -> str:
    values = run_arguments.read_arguments(config) if config else {}
    tokenizer = values.pop("tokenizer_identifiers", None)
    needed = {*run_arguments.NAMES}.difference(run_arguments.ROW_ARGUMENTS)
    unknown = [name for name in values if name not in needed]
    values = {name: value for name, value in values.items() if name in needed}
    values.update({name: options.pop(name) for name in run_arguments.NAMES if name in options})
    tokenizer = tokenizer_identifiers or tokenizer
    if isinstance(tokenizer, str):
        tokenizer = run_arguments.read_identifiers(tokenizer)
    run = run_arguments.built_config_from(values)
    result = indexing.index(run, tokenizer=tokenizer, show_progress=True, **options)
    if as_json:
        return json_text(result)
    text = indexing.format_result(result) + _left_out(unknown, (), "the indices")
    if options.get("megatron_cache_folder") is None:
        text += "\nthis is millrace's cache; --megatron-cache writes what Megatron-LM itself loads"
    return text


_NAMES = {*run_arguments.NAMES, "save_interval", "micro_batch_size", "tokenizer_identifiers"}


def _left_out(names: Iterable[str], known: Container[str] = _NAMES, what: str = "the data") -> str:
    """A line about the arguments in a file that a verb leaves out, or nothing."""
    text = printable(", ".join(name for name in names if name not in known))
    return f"\narguments that do not concern {what} were left out: {text}" if text else ""


def _bench(config: str, as_json: bool = False, **options: Any) -> str:
    arguments, run = run_arguments.read_run(config)
    result = bench(run, **options)
    if as_json:
        return json_text(result)
    return benchmark_report.format_result(result) + _left_out(arguments)


@dataclass(frozen=True, kw_only=True)
class TraceOptions(RunOption):
    sample: int | None = option("number of a sample", None, least=0, metavar="K")
    step: int | None = option(
        "number of a step, from 0; with the next options the step before which to look", None
    )
    line: str | None = option("line, or row, of a file", None, metavar="FILE:N")
    document: int | None = option("number of a document of --source", None, least=0)
    held_out: str | None = option("JSONL, or text with FILE:N on each line", None, metavar="FILE")
    source: str | None = option("source of --document or --line", None, metavar="NAME")
    until: int | None = option("sample before which to look", None, least=0)
    rank: str | None = option("of a step: the samples of rank R, from 0, of N", None, metavar="R/N")
    limit: int = option("most samples to print of a document", 100, least=1)
    tokenizer: str | None = option(
        "tokenizer to decode with", None, default_text="the token file's", metavar="FILE"
    )


def _trace(as_json: bool = False, **values: Any) -> str:
    own = TraceOptions(**values)
    asked = own.sample, own.line, own.document, own.held_out
    is_one = asked.count(None) == 3 or (asked.count(None) == 4 and own.step is not None)
    if not is_one or (own.document is not None and own.source is None):
        raise UsageError("give --sample, --step, --line, --source and --document, or --held-out")
    if (own.sample, own.step, own.until).count(None) < 2:
        raise UsageError("give one of --sample, --step and --until")
    tokenizer = None if own.tokenizer is None else Tokenizer(own.tokenizer)
    trace = inspect.Trace.of(own.config, tokenizer)
    if own.sample is not None or asked.count(None) == 4:
        samples = [trace.sample(number) for number in _samples_of(own, trace)]
        return json_text(samples) if as_json else "\n\n".join(map(inspect.format_sample, samples))
    until = own.until if own.step is None else trace.first_sample(own.step)
    if own.held_out is not None:
        report = inspect.check_held_out(trace, own.held_out, until)
        text = json_text(report) if as_json else inspect.format_held_out(report)
        if report["seen"]:
            raise DamageError(f"{len(report['seen'])} held-out documents are drawn", text)
        return text
    lines, all_visits = [], []
    for source, document, origin in _documents_of(own, trace):
        more = trace.visits(source, document, until)
        visits = [*itertools.islice(more, own.limit)]
        all_visits += visits
        name = printable(source)
        lines.append(f"{name}: document {document}, {inspect.format_origin(origin)}")
        lines += [f"  {visit}" for visit in visits] or ["  in no sample"]
        lines += ["  and more: --limit"] if next(more, None) else []
    return json_text(all_visits) if as_json else "\n".join(lines)


def _samples_of(own: TraceOptions, trace: inspect.Trace) -> list[int]:
    if own.sample is not None:
        return [own.sample]
    share = re.fullmatch(r"(\d+)/(\d+)", own.rank or "0/1")
    if share is None:
        raise UsageError(f"--rank is {own.rank}: give R/N, such as 3/8")
    rank, ranks = map(int, share.groups())
    return trace.step(own.step or 0, None if own.rank is None else rank, ranks)


def _documents_of(own: TraceOptions, trace: inspect.Trace) -> list[tuple[str, int, Any]]:
    if own.document is not None and own.source is not None:
        number = trace.sources(own.source)[0]
        return [(own.source, own.document, trace.origin(number, own.document))]
    documents = [*inspect.find_documents(trace, [str(own.line)], source=own.source)]
    if not documents:
        raise ConfigError(
            f"no document of the run comes from {own.line}: `millrace tokenize` left it out, or "
            "its path was another"
        )
    return documents


@dataclass(frozen=True, kw_only=True)
class PlanOptions(BucketOptions, RunOption):
    diff: str | None = option(
        "the file as it was: tell from which position and step on RUN draws anything else",
        None,
        metavar="OLD",
    )
    picture: str | None = option(
        "write a picture of the mixture over the run, .svg or .html", None, metavar="FILE"
    )


def _plan(as_json: bool = False, **values: Any) -> str:
    own = PlanOptions(**values)
    if own.picture is not None and not own.picture.endswith((".svg", ".html")):
        raise UsageError(f"--picture is {own.picture}: give a name that ends with .svg or .html")
    if own.picture is not None and own.diff is not None:
        raise UsageError("--picture is of one run, and --diff compares two: leave one out")
    arguments, config = run_arguments.read_run(own.config)
    batches = run_arguments.schedule_from(arguments)
    if own.diff is not None:
        old = run_arguments.read_run(own.diff)[1]
        return _change(old, config, batches, as_json)
    interval = check_int("save_interval", arguments.get("save_interval") or 0, 0)
    num_parts = 0 if own.picture is None else 64
    left_out = _left_out(arguments)
    del arguments  # as much as the configuration again
    one = inspect.forecast(config, batches=batches, save_interval=interval, num_parts=num_parts)
    budget, text = None, inspect.format_forecast(one) + left_out
    if any(SCHEME.match(prefix) for prefix in prefixes_of(config)):  # else nothing is built
        size = 1 if batches is None else batches.batch_size(0)
        rate = 10_000 / config.sequence_length  # samples of an accelerator in a second
        train, num_samples = build_datasets(config).train, int(one.samples.sum())
        budget = budget_of(train, own, size, rate, num_samples)
        text = "\n".join([text, *([] if budget is None else budget_lines(budget))])
    if own.picture is not None:
        image = inspect.forecast_svg(one, own.config)
        if own.picture.endswith(".html"):
            image = f"<!doctype html>\n<meta charset=utf-8>\n{image}<pre>{escape(text)}</pre>\n"
        write_file(own.picture, image.encode())
    if not as_json:
        return text
    report = {**vars(one), "buckets": budget}
    return json.dumps(report, default=np.ndarray.tolist)


def _change(old: Any, new: Any, batches: Any, as_json: bool) -> str:
    first, changes = inspect.forecast_change(old, new)
    if as_json:
        return json.dumps({"first_changed_position": first, "changes": changes})
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
    num_unknown = sum(1 for entry in entries if entry.kind == "unknown")
    state = f"there, {len(entries) - num_unknown} of them checked" if num_unknown else "checked"
    text = json_text(entries) if as_json else format_entries(entries, state)
    num_damaged = sum(1 for entry in entries if entry.problems and entry.kind == "set")
    if num_damaged:
        raise DamageError(
            f"{num_damaged} sets of arrays are damaged; `millrace cache prune` removes them", text
        )
    if num_unknown:
        raise DamageError(f"{num_unknown} of {len(entries)} entries could not be checked", text)
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
        (RunOption, BenchOptions, JsonOption),
        "Measures how fast this machine feeds a run. Draws batches of the training data, cold "
        "and warm, and says how long training steps would wait, what bounds the rate, and how many "
        "accelerators it could feed.",
    ),
    Verb(
        "trace",
        _trace,
        (TraceOptions, JsonOption),
        "Says which documents a sample of a run holds, and which samples hold a document. "
        "Computes both from the run and its data: nothing is logged while it trains. "
        "Of a sample or step, prints source, document, file, line, range and text, with what is "
        "trained on in brackets; of a document or line, the samples and steps that draw it. "
        "With --held-out, exits with 1 if a document of the list is drawn before a step.",
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
        "Reads every array and compares its checksum. Exits with 1 if one is not ok.",
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
