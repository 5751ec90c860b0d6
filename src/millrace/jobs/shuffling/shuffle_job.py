"""The shuffle job: numbers the items, permutes them, moves them, and publishes the shards."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from millrace.engine import Journal
from millrace.engine.progress import Progress
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.interrupts import interruptible, interrupts_held
from millrace.jobs.shuffling import shard_publication as publish
from millrace.jobs.shuffling.movement import Movement
from millrace.jobs.shuffling.plan_choice import check_room, choose_plan
from millrace.jobs.shuffling.plans import ShufflePlan, resume_plan
from millrace.jobs.shuffling.shuffle_options import (
    Arguments,
    check_apart,
    checked_arguments,
    identity,
)
from millrace.ragged import even_sizes, starts_of
from millrace.shards.metadata import (
    DOCUMENTS,
    JOURNAL,
    SEQUENCES,
    ShardsMetadata,
    bin_paths,
    metadata_path,
    read_metadata,
    shard_prefix,
)
from millrace.shuffling.distribution import (
    Distribution,
    check_distribution,
    format_distribution,
    measure_distribution,
)
from millrace.shuffling.domains import Input, find_domains
from millrace.shuffling.fixed_sequences import SequenceItems
from millrace.shuffling.memory_budget import budget_of, in_units
from millrace.shuffling.permutations import (
    NUMPY_MEMORY,
    Permutation,
    choose_permutation,
    make_permutation,
)
from millrace.shuffling.shuffle_items import Items
from millrace.shuffling.whole_documents import DocumentItems
from millrace.store import IndexedDataset


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
        plan: "gather" or "scatter"; "none" if the output was there already.
        reason: Reason for the plan.
        workers: Number of workers.
        bytes_read, bytes_written: Bytes of items that the plan reads and writes.
        num_tasks_done, num_tasks_kept: Number of tasks of this run, and of earlier runs that were
            interrupted.
        seconds: Duration of this run.
        notices: Sentences about the input that a user should read.
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
    bytes_read: int
    bytes_written: int
    num_tasks_done: int
    num_tasks_kept: int
    seconds: float
    notices: list[str]


def shuffle(
    input_dir: str | os.PathLike[str] | None,
    output_dir: str | os.PathLike[str],
    *,
    input_list: Sequence[tuple[float, str | os.PathLike[str]]] | None = None,
    seq_len: int = 4096,
    num_shards: int = 64,
    workers: int = 4,
    seed: int = 42,
    dtype: Any = "uint32",
    plan: str = "auto",
    permutation: str = "auto",
    memory: int | None = None,
    carry: bool = False,
    documents: bool = False,
    engine: str = "local",
    restart: bool = False,
    show_progress: bool = False,
) -> ShuffleResult:
    """Permutes the sequences, or documents, of many domains globally, and writes them as shards.

    The items are numbered by domain, then path, then place in the file; `permutation[i]` is the
    place of item i in the output. Each shard has total // num_shards items, and the first ones one
    more. The output does not depend on the plan, the number of workers, the engine, or how often
    the job was interrupted. It depends on the memory only if that decides the permutation.

    The job keeps finished tasks in the folder `shuffle.journal` of the output folder until all
    shards are published. A job that fails or is killed leaves it; the same call continues there.

    Args:
        input_dir: Folder with a folder for each domain; None with `input_list`.
        output_dir: Folder for the shards. It is made, or must be empty.
        input_list: Weight and path of each domain. With the weight 2.5 each item is taken twice,
            and every second one a third time.
        seq_len: Tokens of a sequence, 1 to 2**31 - 1.
        num_shards: Number of shards, at most the number of items.
        workers: Largest number of worker processes.
        seed: Seed of the permutation, 0 to 2**63 - 1.
        dtype: Dtype of raw `.bin` files: uint16, uint32 or int32.
        plan: How the items move: "gather", "scatter", or "auto".
        permutation: "numpy" is `numpy.random.default_rng(seed).permutation(n)`; "keyed" needs no
            memory; "auto" is numpy as long as it takes at most half of the memory.
        memory: Bytes of memory for all processes of the job, beside 100 MB; None: half of what is
            available.
        carry: Whether the remainder of a file is continued in the next file of its domain.
        documents: Whether the items are the documents of indexed datasets.
        engine: Where tasks run: "local" in worker processes, "ray" on a Ray cluster.
        restart: Whether to discard what an interrupted job has done in the output folder.
        show_progress: Whether to show the phases on stderr.

    Raises:
        ConfigError: An argument that cannot work, an output folder that is not empty, or an
            interrupted job with other arguments.
        DataError: An input file that is damaged, or changes while the job runs.
        MillraceError: Another process at work on the folder, a full disk, a worker process that
            died repeatedly, or a shuffle that is not uniform.
    """
    arguments = checked_arguments(**locals())
    start = time.monotonic()
    with interrupts_held(), contextlib.ExitStack() as stack:
        with interruptible():
            found = find_domains(
                arguments.inputs,
                dtype=arguments.dtype,
                has_documents=arguments.seq_len is None,
            )
        check_apart(arguments)
        journal = _open_journal(stack, arguments, found)
        if journal.result is not None:
            return _finished(journal, arguments)
        if "publication" in (journal.plan or {}):  # all shards are written
            result = _kept(ShuffleResult(**journal.plan["result"]))
            with Progress("phase 5: check", enabled=arguments.show_progress) as progress:
                publish.publish(
                    journal, arguments.output_dir, journal.plan["publication"], progress.count
                )
        else:
            publish.remove_rest(arguments.output_dir)
            items = _make_items(journal, arguments, found)
            if publish.output_in(arguments.output_dir):
                return _result_of_output(arguments, items)
            result = _write(journal, arguments, items)
            publish.publish(journal, arguments.output_dir, journal.plan["publication"])
        result = replace(result, seconds=time.monotonic() - start)
        journal.finish(asdict(result))
    return result


# ---- the folder ----


def _open_journal(stack: contextlib.ExitStack, arguments: Arguments, found: Input) -> Journal:
    """Makes the output folder, or checks what is in it, and opens the journal."""
    folder = arguments.output_dir
    publish.check_folder(folder)
    if not os.path.isdir(folder):
        publish.make_folder(folder)
        stack.callback(_remove_empty, folder)  # of a job that fails at its start
    path = os.path.join(folder, JOURNAL)
    return stack.enter_context(
        Journal(
            path,
            identity(arguments, found),
            restart=arguments.restart,
            on_restart=lambda: publish.remove_metadata(folder),
        )
    )


def _remove_empty(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _finished(journal: Journal, arguments: Arguments) -> ShuffleResult:
    """The result of a job that was killed while it removed its journal."""
    if not os.path.exists(metadata_path(arguments.output_dir)):
        raise MillraceError(
            f"the output of the finished job in {arguments.output_dir} was removed. Start over: "
            "--restart"
        )
    journal.remove()
    return _kept(ShuffleResult(**journal.result))


def _kept(result: ShuffleResult) -> ShuffleResult:
    """The result of an earlier run, whose tasks this run keeps."""
    return replace(
        result, num_tasks_done=0, num_tasks_kept=result.num_tasks_kept + result.num_tasks_done
    )


def _result_of_output(arguments: Arguments, items: Items) -> ShuffleResult:
    """The result of a job whose output was there; a ConfigError if it is not this job's."""
    folder = arguments.output_dir
    metadata = _read_output(folder)
    if (
        metadata is None
        or arguments.permutation not in ("auto", metadata.permutation)
        or metadata != replace(metadata, **_metadata(arguments, items, metadata.permutation))
    ):
        raise publish.not_empty(folder, publish.output_in(folder)[0])
    num_bytes = sum(map(os.path.getsize, bin_paths(folder, metadata)))
    return ShuffleResult(
        output_dir=folder,
        unit=arguments.unit,
        num_items=metadata.num_items,
        num_tokens=num_bytes // items.dtype.itemsize,
        num_bytes=num_bytes,
        shard_sizes=metadata.shard_sizes,
        domain_stats=metadata.domain_stats,
        permutation=str(metadata.permutation),
        plan="none",
        reason="the output was there already",
        workers=0,
        bytes_read=0,
        bytes_written=0,
        num_tasks_done=0,
        num_tasks_kept=metadata.num_shards,
        seconds=0.0,
        notices=list(items.contents.notices),
    )


def _read_output(folder: str) -> ShardsMetadata | None:
    """The metadata of an output; None if there are none, a ConfigError if a file is damaged."""
    if not os.path.exists(metadata_path(folder)):
        return None
    try:
        metadata = read_metadata(folder)
        for shard in range(metadata.num_shards):
            with IndexedDataset(shard_prefix(folder, shard)):
                pass  # it compares the index with the size of the .bin
    except DataError as error:
        raise ConfigError(
            f"{folder} is not empty, and the output in it is damaged: {error}. To shuffle again, "
            "remove that output first, or give another folder"
        ) from None
    return metadata


# ---- phases 1 to 4 ----


def _make_items(journal: Journal, arguments: Arguments, found: Input) -> Items:
    folder = os.path.join(journal.folder, "items")
    os.makedirs(folder, exist_ok=True)
    with interruptible():
        if arguments.seq_len is None:
            return DocumentItems(found, folder)
        return SequenceItems(found, seq_len=arguments.seq_len, carry=arguments.carry)


def _write(journal: Journal, arguments: Arguments, items: Items) -> ShuffleResult:
    """Writes all shards into the journal, and stores there how they are published."""
    contents = items.contents
    with Progress("phase 1: files", enabled=arguments.show_progress) as progress:
        for notice in contents.notices:
            progress.note(f"millrace: {notice}")
        progress.note(f"phase 1: {len(contents.inputs):,} files\n{contents.table(arguments.unit)}")
    if items.num_items < arguments.num_shards:
        raise ConfigError(
            f"num_shards is {arguments.num_shards}, and there are {items.num_items} "
            f"{arguments.unit}; give at most {items.num_items}"
        )
    if journal.plan is None:
        check_room(items, arguments.output_dir)
    permutation, distribution = _permute(journal, arguments, items)
    with Progress("phase 3: plan", enabled=arguments.show_progress) as progress:
        with interruptible():
            plan = _plan(journal, arguments, items, permutation)
            starts = starts_of(even_sizes(items.num_items, arguments.num_shards))
            work = plan.work(journal.folder, items, permutation, starts)
        progress.note(f"plan: {plan}")
    movement = Movement(
        journal,
        work,
        workers=plan.workers,
        engine=arguments.engine,
        show_progress=arguments.show_progress,
    )
    records = movement.move()
    with Progress("phase 5: flush", enabled=arguments.show_progress) as progress, interruptible():
        publish.flush_shards(journal, records, progress.count)
    metadata = _metadata(arguments, items, permutation.name)
    num_bytes = sum(record["bytes"] for record in records)
    result = ShuffleResult(
        output_dir=arguments.output_dir,
        unit=arguments.unit,
        num_items=items.num_items,
        num_tokens=num_bytes // items.dtype.itemsize,
        num_bytes=num_bytes,
        shard_sizes=metadata["shard_sizes"],
        domain_stats=metadata["domain_stats"],
        permutation=permutation.name,
        plan=plan.name,
        reason=plan.reason,
        workers=plan.workers,
        bytes_read=plan.num_bytes,
        bytes_written=plan.num_bytes,
        num_tasks_done=movement.num_done,
        num_tasks_kept=movement.num_kept,
        seconds=0.0,
        notices=list(contents.notices),
    )
    metadata["distribution"] = distribution.to_json()
    journal.set_plan(
        {
            **journal.plan,
            "publication": publish.publication(records, metadata),
            "result": asdict(result),
        }
    )
    return result


def _permute(
    journal: Journal, arguments: Arguments, items: Items
) -> tuple[Permutation, Distribution]:
    """The permutation, after a check that it spreads the domains evenly."""
    label = "phase 2: permutation"
    with Progress(label, enabled=arguments.show_progress) as progress, interruptible():
        name = (journal.plan or {}).get("permutation") or _choose_permutation(arguments, items)
        progress.note(
            f"{label} {name} of {items.num_items:,} {arguments.unit}, seed {arguments.seed}"
        )
        permutation = make_permutation(name, items.num_items, arguments.seed, journal.folder)
        distribution = measure_distribution(
            permutation,
            [domain.name for domain in items.contents.domains],
            [domain.num_items for domain in items.contents.domains],
            even_sizes(items.num_items, arguments.num_shards).tolist(),
        )
        progress.note(format_distribution(distribution))
        check_distribution(distribution)
    return permutation, distribution


def _choose_permutation(arguments: Arguments, items: Items) -> str:
    memory = budget_of(arguments.memory, items).buffers
    name = choose_permutation(arguments.permutation, items.num_items, memory)
    needed = NUMPY_MEMORY * items.num_items
    if name == "numpy" and needed > memory:
        raise ConfigError(
            f"permutation is 'numpy', which takes {in_units(needed)} of memory for "
            f"{items.num_items:,} {arguments.unit}, and {in_units(max(memory, 0))} are free for "
            "it; give more memory, or the permutation keyed"
        )
    return name


def _plan(
    journal: Journal, arguments: Arguments, items: Items, permutation: Permutation
) -> ShufflePlan:
    """The plan of an interrupted job, or a new one."""
    if journal.plan is not None:
        return resume_plan(
            journal.plan["plan"], items, workers=arguments.workers, memory=arguments.memory
        )
    plan = choose_plan(
        items,
        name=arguments.plan,
        memory=arguments.memory,
        workers=arguments.workers,
        output_dir=arguments.output_dir,
    )
    journal.set_plan({"permutation": permutation.name, "plan": plan.to_json()})
    return plan


def _metadata(arguments: Arguments, items: Items, permutation: str | None) -> dict[str, Any]:
    """The fields of `ShardsMetadata` that do not depend on the output."""
    sizes = even_sizes(items.num_items, arguments.num_shards)
    is_documents = arguments.seq_len is None
    return {
        "shuffle_type": DOCUMENTS if is_documents else SEQUENCES,
        "seq_len": arguments.seq_len,
        "total_sequences": None if is_documents else items.num_items,
        "total_documents": items.num_items if is_documents else None,
        "num_shards": arguments.num_shards,
        "domain_stats": {domain.name: domain.num_items for domain in items.contents.domains},
        "shard_sizes": sizes.tolist(),
        "dtype": items.dtype.name,
        "seed": arguments.seed,
        "permutation": permutation,
        "carry": arguments.carry,
        "inputs": items.contents.inputs,
    }
