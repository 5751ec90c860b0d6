"""Measures how fast this machine feeds a run: the user's data as it lies, through the `Loader`."""

import contextlib
import ctypes
import gc
import mmap
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.cache import arrays
from millrace.cores import available_cores
from millrace.engine import Task, run_local
from millrace.errors import ConfigError
from millrace.feed import CyclicSampler, Loader, SequentialSampler
from millrace.jobs.benchmark_report import BenchResult, Measurement
from millrace.jobs.bucket_budget import BucketOptions, budget_of
from millrace.names import BIN, IDX
from millrace.option_class import option
from millrace.run import DatasetConfig, InstantConfig, build_datasets
from millrace.run.config import source_of
from millrace.run.instant_config import AnyConfig
from millrace.run.plan import Manifest
from millrace.samples.fields import FIELDS, TOKEN_DTYPES

_BUSY = 0.7  # share of the cores' time above which a measurement is bound by them
_SMALL_WAIT = 0.02  # share of the time below which a trainer hardly waits
_BLOCK_SIZE = 512  # bytes, the unit of `ru_inblock`

_loaded = partial(option, group="loader")
_measured = partial(option, group="measurement", least=1e-6, most=10**12)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(BucketOptions):
    """An accelerator's default rate is about that of one H100 at half its peak, 495 * 10**12
    operations per second, for 8 billion parameters: 6 operations per parameter and token."""

    micro_batch_size: int = _loaded("samples in a batch", 1, least=1)
    ranks: int = _loaded("ranks to feed, each a process", 1, least=1, most=1024)
    threads: int = _loaded("threads of each rank", 1, least=1)
    prefetch: int | None = _loaded(
        "ready batches of each rank; 0: each is made on demand",
        None,
        default_text="by their size",
        least=0,
    )
    fields: Sequence[str] | None = _loaded(
        "arrays of a batch", None, default_text=" ".join(FIELDS), metavar="NAME"
    )
    token_dtype: str = _loaded(
        "dtype of tokens and labels; file: as in the token files", "int64", choices=TOKEN_DTYPES
    )
    seconds: float = _measured("length of each measurement", 5.0, metavar="S")
    step_time: float = _measured("simulated training step", 0.01, metavar="S")
    drop_cache: bool = option(
        "leave the page cache as it is, and make no cold measurement",
        True,
        flags="--keep-cache",
        group="measurement",
    )
    accelerator_tokens_per_second: float = _measured(
        "tokens that one accelerator trains on in a second", 10_000, metavar="N"
    )


class Pass(NamedTuple):
    """One measurement on one rank: its length, the seconds that each step waited, and the fields of
    `Measurement` that are sums over the ranks, by name."""

    seconds: float
    waits: NDArray[np.float64]
    rates: dict[str, float]


def bench(config: AnyConfig, **options: Any) -> BenchResult:
    """Measures how fast this machine feeds the training samples of a run, up to those of another
    sequence length.

    Three measurements through the `Loader`: as fast as possible after the run's files were dropped
    from the page cache ("cold"), with simulated training steps after another drop ("paced"), and as
    fast as possible with samples in memory ("warm").

    Args:
        config: Configuration of the run, whose cache folder gets the indices that it lacks.
        options: Fields of `BenchOptions`.

    Raises:
        ConfigError: An option outside its limits, no training data, or too few for a step.
        DataError: A token file that is missing or damaged.
    """
    own = BenchOptions(**options)
    if isinstance(config, InstantConfig):  # up to another length
        config = replace(config, sequence_length=config.whole_phases[0].sequence_length)
    prefixes = prefixes_of(config)
    page_cache = "left as it was"
    facts: dict[str, Any] = {}
    measurements: list[Measurement] = []
    for names in [("cold",), ("paced", "warm")] if own.drop_cache else [("paced", "warm")]:
        if own.drop_cache:
            gc.collect()  # maps of the last round
            page_cache = drop_from_page_cache(_files(config, prefixes))
        tasks = [Task(rank, names, f"rank {rank}") for rank in range(own.ranks)]
        # Each rank is a process. One that is tried again would be measured without the others.
        results = run_local(measure_rank, (config, own), tasks, workers=own.ranks, attempts=1)
        reports, passes = zip(*(report for _, report in results), strict=True)
        slowest = ("opening_seconds", "first_batch_seconds")
        facts = facts or reports[0] | {name: max(one[name] for one in reports) for name in slowest}
        of_ranks = zip(names, zip(*passes, strict=True), strict=True)
        measurements += [_merge(name, own, each) for name, each in of_ranks]
    return BenchResult(
        num_files=len(set(prefixes)),
        sequence_length=config.sequence_length,
        options=asdict(own) | {"fields": facts.pop("fields")},
        num_cores=available_cores(),
        page_cache=page_cache,
        measurements=measurements,
        **facts,
    )


def prefixes_of(config: DatasetConfig | InstantConfig) -> list[str]:
    """The token files of the training data."""
    if isinstance(config, InstantConfig):
        return [source.prefix for source in config.sources.values()]
    blend = config.blend_of(0)
    if blend is None:
        raise ConfigError("the run has no training data to measure: give train_data_path")
    return [source_of(source)[0] for source in blend[0]]


def _files(config: AnyConfig, prefixes: Sequence[str]) -> list[str]:
    """The files that a start reads: token files, and index arrays in the cache folder."""
    files = [prefix + end for prefix in dict.fromkeys(prefixes) for end in (BIN, IDX)]
    if isinstance(config, InstantConfig):
        return files
    manifest = Manifest.find(config)
    for name in [] if manifest is None else filter(None, manifest.sets):
        if (array_set := arrays.load(str(config.cache), name)) is not None:
            files += [array_set.path(array) for array in array_set.layout]
    return files


def _merge(name: str, own: BenchOptions, passes: Sequence[Pass]) -> Measurement:
    step_time = own.step_time if name == "paced" else 0.0
    rates = {rate: sum(each.rates[rate] for each in passes) for rate in passes[0].rates}
    waits = np.concatenate([each.waits for each in passes])
    share = float(waits.sum() / sum(each.seconds for each in passes))
    cause, reason = bound_by(
        wait_share=share if step_time else None,
        busy_share=rates["cores"] / min(own.ranks * own.threads, available_cores()),
        disk_rate=rates["disk_bytes_per_second"],
    )
    fed = int(rates["tokens_per_second"] // own.accelerator_tokens_per_second)
    return Measurement(
        name=name,
        seconds=max(each.seconds for each in passes),
        step_time=step_time,
        num_steps=waits.size,
        accelerators=None if step_time else fed,
        wait_share=share,
        wait_median=float(np.median(waits)),
        wait_percentile_99=float(np.quantile(waits, 0.99)),
        wait_longest=float(waits.max()),
        bound_by=cause,
        reason=reason,
        **rates,
    )


def bound_by(*, wait_share: float | None, busy_share: float, disk_rate: float) -> tuple[str, str]:
    """What bounds a measurement, and the quantities that say so.

    Args:
        wait_share: Share of the time that the consumer waited; None without simulated steps.
        busy_share: CPU time as a share of the time of all cores that the threads could use.
        disk_rate: Bytes read from disks per second.

    Returns:
        "step", "disk", "CPU" or "other", and a phrase.
    """
    if wait_share is not None and wait_share < _SMALL_WAIT:
        return "step", f"the steps waited {wait_share:.2%} of the time"
    busy = f"the cores were busy {min(busy_share, 1):.0%} of the time"
    if busy_share >= _BUSY:
        return "CPU", busy
    if disk_rate > 0:
        return "disk", f"{busy}, and {disk_rate / 1e6:,.0f} MB/s came from disks"
    return "other", f"{busy}, and nothing came from a disk"


# ---- one rank, in its own process ----


def measure_rank(
    job: tuple[AnyConfig, BenchOptions], task: Task
) -> tuple[dict[str, Any], list[Pass]]:
    """Makes the measurements that the task's payload names, on the rank of its number.

    Returns the fields of `BenchResult` that a rank knows, by name, and the measurements.
    """
    config, own = job
    start = time.perf_counter()
    dataset = build_datasets(config).train
    if dataset is None:
        raise ConfigError("the split leaves no training data to measure: give train a share")
    opening_seconds = time.perf_counter() - start
    rank = {"data_parallel_rank": task.number, "data_parallel_size": own.ranks}
    # Megatron-LM's order of one prefix has the samples of whole epochs.
    num_samples = of_run = min(len(dataset), config.num_samples[0] or len(dataset))
    if isinstance(config, InstantConfig):  # those of one sequence length
        num_samples = min([num_samples, *config.length_changes().values()])
    sampler = SequentialSampler(num_samples, micro_batch_size=own.micro_batch_size, **rank)
    if num_samples < 2 * sampler.block_size:
        raise ConfigError(
            f"a step takes micro_batch_size * ranks = {sampler.block_size} samples; the data have "
            f"{num_samples}, and at least 2 steps are needed: lower one of them, or use more data"
        )
    loader_of = partial(
        Loader,
        dataset,
        fields=None if own.fields is None else tuple(own.fields),
        token_dtype=own.token_dtype,
        threads=own.threads,
        prefetch=own.prefetch,
    )
    with loader_of(sampler=sampler) as loader:
        facts = {
            "num_samples": of_run,
            "num_measured": num_samples,
            "fields": list(next(loader)),
            "opening_seconds": opening_seconds,
            "first_batch_seconds": time.perf_counter() - start,
        }
        rate = own.accelerator_tokens_per_second / config.sequence_length
        facts["buckets"] = budget_of(dataset, own, sampler.block_size, rate, of_run)
        passes = [_draw(job, loader, own.step_time if "paced" in task.payload else 0.0)]
    if "warm" in task.payload:
        with loader_of(sampler=sampler) as loader:
            num_read = _draw(job, loader).waits.size * sampler.block_size
        again = CyclicSampler(
            num_read, micro_batch_size=own.micro_batch_size, data_sharding=False, **rank
        )
        with loader_of(sampler=again) as loader:
            passes.append(_draw(job, loader))
    return facts, passes


def _draw(job: tuple[AnyConfig, BenchOptions], loader: Loader, step_time: float = 0.0) -> Pass:
    """Draws batches for some seconds, or to the end of the data; at least one."""
    config, own = job
    waits: list[float] = []
    usage = resource.getrusage(resource.RUSAGE_SELF)
    start = after = time.perf_counter()
    while after - start < own.seconds:
        before = time.perf_counter()
        if next(loader, None) is None:
            break
        waits.append(time.perf_counter() - before)
        if step_time:
            time.sleep(step_time)
        after = time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_SELF)
    num_samples = len(waits) * own.micro_batch_size
    amounts = {
        "samples_per_second": num_samples,
        "tokens_per_second": num_samples * config.sequence_length,
        "cores": used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime,
        "disk_bytes_per_second": (used.ru_inblock - usage.ru_inblock) * _BLOCK_SIZE,
    }
    return Pass(
        seconds=after - start,
        waits=np.array(waits),
        rates={name: amount / (after - start) for name, amount in amounts.items()},
    )


# ---- the page cache ----


def drop_from_page_cache(paths: Sequence[str]) -> str:
    """Drops files from the page cache, so that the next reads go to the disk.

    Pages that a process has mapped and touched stay, and so do files of memory file systems.
    Returns a text for people: "dropped (12.3 MB in 4 files)", or why not.
    """
    num_bytes = num_resident = 0
    for path in paths:
        # Opening the run says what is wrong with a file.
        with contextlib.suppress(OSError), open(path, "rb") as file:
            descriptor, size = file.fileno(), os.path.getsize(path)
            os.fdatasync(descriptor)  # pages that are not on the disk cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            num_bytes += size
            num_resident += int(resident_pages(descriptor, 0, size).sum()) * mmap.PAGESIZE
    amount = f"{num_bytes / 1e6:,.1f} MB in {len(paths)} files"
    if num_resident > 0.01 * num_bytes:
        return (
            f"partly dropped: {num_resident / 1e6:,.1f} of {amount} stay in memory. Another "
            "process has mapped them, or the file system is in memory. They are warm"
        )
    return f"dropped ({amount})"


def resident_pages(descriptor: int, start: int, size: int) -> NDArray[np.bool_]:
    """Which pages of an open file's bytes are in the page cache; asking starts no read.

    `start` is the first byte of a page.
    """
    states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    if size:
        pages = mmap.mmap(descriptor, size, prot=mmap.PROT_READ, offset=start)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (address, size, states.ctypes.data)))
    return (states & 1).astype(bool)
