"""The shuffle job: numbers, permutes and moves the items, and publishes the shards.

Its options come first: each is described once, as a field.
"""

import contextlib
import itertools
import os
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from millrace.checks import MAX_INT32, MAX_INT64, check_local, shown
from millrace.engine import ALREADY, ENGINES, Run
from millrace.engine.uploading import Upload, check_target
from millrace.errors import ConfigError
from millrace.option_class import Options, StrPath, identity_of, option, parse_size
from millrace.ragged import even_sizes, starts_of
from millrace.shards.metadata import DOCUMENTS, SEQUENCES, output_files
from millrace.shuffling import shard_publication as publication
from millrace.shuffling.domains import DTYPES, Input, Inputs, find_domains, read_input_list
from millrace.shuffling.permutations import (
    Permutation,
    choose_permutation,
    distribution_json,
    format_figures,
    make_permutation,
    measure_distribution,
)
from millrace.shuffling.plans import PLANS, budget_of, choose_plan, resume_plan
from millrace.shuffling.shuffle_items import Items, SequenceItems
from millrace.shuffling.whole_documents import DocumentItems


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
class ShuffleOptions(Options):
    """The options of a shuffle; a ConfigError for one that cannot work."""

    # fmt: off
    input_dir: StrPath | None = option(
        "folder with a folder for each domain: .bin, .npy, or .bin with .idx", None,
        metavar="DIR", identity="never", group="input")
    input_list: Any | None = option(
        "file with a weight and a path on each line: 2.5 data/web (instead of --input-dir)", None,
        metavar="FILE", check=_entries, parse=read_input_list, identity="never", group="input")
    dtype: Any = option(
        "dtype of .bin files without .idx", "uint32",
        choices=tuple(dtype.name for dtype in DTYPES), check=_raw_dtype, group="input")
    seq_len: int = _input("tokens of a sequence", 4096, least=1, most=MAX_INT32, identity="never")
    carry: bool = _input("continue the remainder of a file in the next file of its domain", False)
    documents: bool = _input(
        "shuffle whole documents of indexed datasets instead of sequences", False)
    any_tokenizer: bool = _input(
        "shuffle data of different tokenizers or splitters, too", False, identity="never")
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
    upload_to: str | None = _job(
        "folder in a bucket to which each shard moves when it is written", None,
        check=check_target, metavar="s3://BUCKET/KEY")
    restart: bool = _job("discard what a job has done in the output folder", False)
    show_progress: bool = _job("show the phases on stderr", False, flags=None)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
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
        return self.input_list or () if self.input_dir is None else os.fspath(self.input_dir)

    @property
    def folder(self) -> str:
        return check_local(os.fspath(self.output_dir))

    @property
    def final_folder(self) -> str:
        return self.upload_to or self.folder

    @property
    def num_local_shards(self) -> int:
        """Number of shards that stay on the disk."""
        return self.num_shards if self.upload_to is None else 0

    @property
    def share(self) -> float:
        """Share of the output that is on the disk at a time."""
        return (self.num_local_shards or min(self.workers, self.num_shards)) / self.num_shards

    @property
    def unit(self) -> str:
        return "documents" if self.documents else "sequences"


@dataclass(frozen=True, kw_only=True)
class ShuffleResult:
    """What a shuffle wrote.

    Attributes:
        output_dir: Folder of the shards.
        unit: What was shuffled, "sequences" or "documents".
        num_items: Number of sequences or documents.
        num_tokens, num_bytes: Size of all shards together.
        shard_sizes: Number of items in each shard.
        domain_stats: Number of items of each domain.
        permutation: "numpy" or "keyed".
        plan: "gather" or "scatter".
        reason: Reason for the plan.
        workers: Number of workers.
        num_tasks_done, num_tasks_kept: Number of tasks of this run, and of interrupted runs.
        seconds: Duration of this run.
        notices: Sentences about the input that the user should read.
    """

    output_dir: str
    unit: str
    num_items: int
    num_tokens: int
    num_bytes: int
    shard_sizes: list[int]
    domain_stats: dict[str, int]
    permutation: str
    plan: str
    reason: str
    workers: int
    num_tasks_done: int
    num_tasks_kept: int
    seconds: float
    notices: list[str]


def shuffle(input_dir: StrPath | None, output_dir: StrPath, **options: Any) -> ShuffleResult:
    """Permutes the sequences, or documents, of many domains globally, and writes them as shards.

    Items are numbered by domain, then path, then place in the file; `permutation[i]` is the place
    of item i in the output. Each shard has total // num_shards items, and the first ones one more.
    The output does not depend on the plan, the number of workers, the engine, or interruptions. It
    depends on the memory only if that decides the permutation.

    The job keeps finished tasks in the folder `shuffle.journal` of the output folder until all
    shards are published. A job that fails or is killed leaves it; the same call continues there. A
    finished job that is called again with the same inputs and options returns its earlier result.

    Args:
        input_dir: Folder with a folder for each domain; None with `input_list`.
        output_dir: Folder for the shards, which is made or must be empty.
        options: Fields of `ShuffleOptions`. `input_list` is the weight and path of each domain:
            with the weight 2.5 each item is taken twice, and every second one a third time.

    Raises:
        ConfigError: An option that cannot work, an output folder that is not empty, or an
            interrupted job with other options.
        DataError: An input file that is damaged, or changes meanwhile.
        MillraceError: Another process at work on the folder, too little room on the disk, a worker
            process that died repeatedly, or a shuffle that is not uniform.
        OSError: A journal or shard that cannot be written.
    """
    start = time.monotonic()
    checked = ShuffleOptions(input_dir=input_dir, output_dir=output_dir, **options)
    found = find_domains(checked.inputs, dtype=checked.dtype, has_documents=checked.documents)
    found = replace(found, any_tokenizer=checked.any_tokenizer)
    _check_apart(checked)
    folder = checked.folder
    job = Run(
        os.path.join(folder, publication.JOB),
        _identity(checked, found),
        outputs=output_files(checked.final_folder, checked.num_local_shards),
        engine=checked.engine,
        restart=checked.restart,
        on_restart=lambda: publication.remove_output(folder),
        show_progress=checked.show_progress,
    )
    with publication.output_folder(folder), job as run:
        if run.result is not None:
            run.note(ALREADY)
            result = _earlier(ShuffleResult(**{**run.result, "output_dir": checked.final_folder}))
            return replace(result, seconds=0.0, notices=[*result.notices, ALREADY])
        if checked.upload_to is not None:
            upload = Upload(run, checked.upload_to, publication.LAST)
        content = run.stored("publication")
        if is_new := content is None:
            content = _write(run, checked, _make_items(run, checked, found))
            if checked.upload_to is not None:
                content["files"] = []  # they have moved
            run.store("publication", content)
        result = ShuffleResult(**{**content["result"], "output_dir": checked.final_folder})
        result = replace(result if is_new else _earlier(result), seconds=time.monotonic() - start)

        def make_public() -> None:
            with run.phase("phase 5: publish") as progress:
                report = None if is_new else progress.count
                publication.publish(run.folder, folder, content, report)
                if checked.upload_to is not None:
                    upload.send(folder)

        run.publish(make_public, asdict(result))
    return result


def _identity(options: ShuffleOptions, found: Input) -> dict[str, Any]:
    """What decides the output, for the journal: a job that differs cannot continue with it."""
    seq_len = None if options.documents else options.seq_len
    entries: dict[str, Any] = {"job": "shuffle 4", **identity_of(options), "seq_len": seq_len}
    entries["number of inputs"] = len(found.files)
    numbers = itertools.count(1)
    if options.upload_to is not None:  # where the shards of finished tasks are
        entries["upload_to"] = options.upload_to
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


def _check_apart(options: ShuffleOptions) -> None:
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


def _earlier(result: ShuffleResult) -> ShuffleResult:
    """The result of an earlier run, whose tasks this run keeps."""
    num_tasks = result.num_tasks_kept + result.num_tasks_done
    return replace(result, num_tasks_done=0, num_tasks_kept=num_tasks)


def _make_items(run: Run, options: ShuffleOptions, found: Input) -> Items:
    items: Items
    with run.phase("phase 1: files") as progress:
        if options.documents:
            items = DocumentItems(found, run.scratch)
        else:
            items = SequenceItems(found, options.seq_len, options.carry)
        for notice in items.notices:
            progress.note(f"millrace: {notice}")
        progress.note(f"phase 1: {len(items.inputs):,} files\n{items.table(options.unit)}")
    if items.num_items < options.num_shards:
        raise ConfigError(
            f"num_shards must be at most {items.num_items}, the number of {options.unit}, not "
            f"{options.num_shards}"
        )
    return items


def _write(run: Run, options: ShuffleOptions, items: Items) -> dict[str, Any]:
    """Writes all shards into the journal; returns what publishes them, as plain JSON."""
    arguments = options.plan, options.folder, options.memory, options.workers, options.share
    content = run.once("plan", lambda: asdict(choose_plan(items, *arguments)))
    plan = resume_plan(content, items, options.memory, options.workers)
    permutation, distribution = _permute(run, options, items)
    shard_sizes = even_sizes(items.num_items, options.num_shards)
    with run.phase("phase 3: plan") as progress:
        work = plan.work(items, permutation, starts_of(shard_sizes), options.upload_to)
        progress.note(f"plan: {plan}")
    done = work.write(run, plan.workers)
    publication.flush_folders(done[0].folder)
    in_both = {
        "shard_sizes": shard_sizes.tolist(),
        "domain_stats": items.domain_stats,
        "permutation": permutation.name,
    }
    num_bytes = sum(task.record["bytes"] for task in done)
    result = ShuffleResult(
        output_dir=options.final_folder,
        unit=options.unit,
        num_items=items.num_items,
        num_tokens=num_bytes // items.dtype.itemsize,
        num_bytes=num_bytes,
        plan=plan.name,
        reason=plan.reason,
        workers=plan.workers,
        num_tasks_done=run.num_done,
        num_tasks_kept=run.num_kept,
        seconds=0.0,
        notices=items.notices,
        **in_both,
    )
    metadata = {
        "shuffle_type": DOCUMENTS if options.documents else SEQUENCES,
        "seq_len": items.item_size,
        f"total_{options.unit}": items.num_items,
        **in_both,
        **{name: getattr(options, name) for name in ("num_shards", "seed", "carry")},
        "dtype": items.dtype.name,
        "inputs": items.inputs,
        "distribution": distribution,
    }
    return {**publication.publication(done, metadata), "result": asdict(result)}


def _permute(run: Run, options: ShuffleOptions, items: Items) -> tuple[Permutation, dict[str, Any]]:
    """The permutation, and the distribution, after a check that it is even."""
    label, size = "phase 2: permutation", items.num_items
    arguments = options.permutation, size, budget_of(options.memory, items).buffers, options.unit
    name = run.once("permutation", lambda: choose_permutation(*arguments))
    with run.phase(label) as progress:
        progress.note(f"{label} {name} of {size:,} {options.unit}, seed {options.seed}")
        permutation = make_permutation(name, size, options.seed, run.scratch)
        shard_sizes = even_sizes(size, options.num_shards)
        distribution = measure_distribution(permutation, items.domain_stats, shard_sizes)
        for parts in distribution.values():
            progress.note(format_figures(parts.figures()))
            parts.check()
    return permutation, distribution_json(distribution)
