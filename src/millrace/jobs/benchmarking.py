"""Measures how fast this machine feeds a run: the user's data as it lies, through the `Loader`."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.cache import arrays
from millrace.checks import flag, real, whole
from millrace.cores import available_cores
from millrace.engine import Task, run_local
from millrace.errors import ConfigError
from millrace.feed import BlendedDataset, GPTDataset, Loader, Sampler, SequentialSampler
from millrace.jobs.benchmark_limits import copy_bytes_per_second, drop_from_page_cache
from millrace.run import DatasetConfig, build_datasets
from millrace.run.config import source_of
from millrace.run.manifest import Manifest, manifest_path
from millrace.store.publish import bin_path, idx_path

ACCELERATOR_TOKENS_PER_SECOND = 10_000
"""About what one H100 makes of a model of 8 billion parameters at half its peak: 6 operations per
parameter and token, 495 * 10**12 operations per second."""

STEP_TIME = 0.01  # seconds; real steps take longer, which is easier for the loader
SECONDS = 5.0
_BLOCK_SIZE = 512  # bytes, the unit of `ru_inblock`
_BUSY = 0.7  # share of the cores' time above which a measurement is bound by them
_NEAR_COPY = 0.5  # share of the copying rate above which a measurement is bound by memory
_SMALL_WAIT = 0.02  # share of the time below which a trainer hardly waits
_MOST_POINTS = 400  # of a timeline
_OTHERS = ("paced", "warm", "replay")  # the measurements after the cold one
_TRAIN = 0  # place of the training data among the splits


@dataclass(frozen=True, kw_only=True)
class Waits:
    """How long the consumer waited for its batches.

    Attributes:
        share: Share of the whole time that was spent waiting, 0 to 1.
        median, percentile_99, longest: Seconds of a wait, over all steps and ranks.
        by_cause: Share of the waits by what took the longest in making the batches: "sampler",
            "dataset" or "prepare" (see `Loader.wait_stats`).
        timeline: (seconds since the start, longest wait from there to the next entry) of rank 0.
    """

    share: float
    median: float
    percentile_99: float
    longest: float
    by_cause: dict[str, float]
    timeline: list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement, over all ranks.

    Attributes:
        name: "cold", "paced" (with simulated steps), "warm" or "replay" (paced, and the same ready
            batch each time).
        seconds: Length of the measurement.
        step_time: Seconds of a simulated step; 0: batches are drawn as fast as they come.
        num_steps: Number of steps of all ranks.
        samples_per_second, tokens_per_second: Rates of all ranks together.
        accelerators: Number of accelerators that this rate feeds; None with simulated steps.
        cores: Number of cores that were busy with this process and its threads.
        disk_bytes_per_second: Bytes read from disks.
        memory_bytes_per_second: Bytes of tokens read and of arrays written.
        waits: The waits of the consumer.
        bound_by: "step", "disk", "memory", "CPU" or "other"; empty for a replay.
        reason: The measured quantities that decided it.
    """

    name: str
    seconds: float
    step_time: float
    num_steps: int
    samples_per_second: float
    tokens_per_second: float
    accelerators: int | None
    cores: float
    disk_bytes_per_second: float
    memory_bytes_per_second: float
    waits: Waits
    bound_by: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What `bench` measured.

    Attributes:
        num_files: Number of token files of the training data.
        num_samples: Number of training samples.
        sequence_length: Tokens in a sample.
        token_bytes: Bytes of a token in the first token file.
        options: Micro batch size, ranks, threads, prefetch, fields and token dtype.
        num_cores: Number of cores that this process may use.
        copy_bytes_per_second: Rate of copying memory with as many threads as the loaders have, in
            bytes read and written.
        page_cache: What happened to the run's files in the page cache.
        opening_seconds: Time to open the data, and to load or build their indices; the slowest
            rank's.
        first_batch_seconds: Time from the start to the first batch, opening included; the slowest
            rank's.
        accelerator_tokens_per_second: Assumed rate of one accelerator.
        measurements: The measurements, in the order in which they were made.
        perfect_share: Rate of the paced measurement as a share of the replay's; None without one.
    """

    num_files: int
    num_samples: int
    sequence_length: int
    token_bytes: int
    options: dict[str, Any]
    num_cores: int
    copy_bytes_per_second: float
    page_cache: str
    opening_seconds: float
    first_batch_seconds: float
    accelerator_tokens_per_second: float
    measurements: list[Measurement]
    perfect_share: float | None


def bench(
    config: DatasetConfig,
    *,
    micro_batch_size: int = 1,
    ranks: int = 1,
    threads: int = 1,
    prefetch: int | None = None,
    fields: Sequence[str] | None = None,
    token_dtype: str = "int64",
    seconds: float = SECONDS,
    step_time: float = STEP_TIME,
    drop_cache: bool = True,
    replay: bool = False,
    accelerator_tokens_per_second: float = ACCELERATOR_TOKENS_PER_SECOND,
) -> BenchResult:
    """Measures how fast this machine feeds the training samples of a run.

    Three measurements through the `Loader`: as fast as possible after the run's files were dropped
    from the page cache ("cold"), with simulated training steps after the same ("paced"), and as
    fast as possible with samples that are in memory ("warm").

    Args:
        config: Configuration of the run. Indices that its cache folder lacks are built there.
        micro_batch_size: Number of samples in a batch.
        ranks: Number of data-parallel ranks to feed at once, each by a separate process.
        threads: Number of threads of each rank that make batches.
        prefetch: Number of ready batches of each rank; 0: each is made when it is needed; None: the
            loader's own choice.
        fields: Arrays of a batch (see `Loader`); None: the usual four.
        token_dtype: Dtype of tokens and labels: "int64", "int32" or "file".
        seconds: Length of each measurement.
        step_time: Seconds of a simulated training step.
        drop_cache: Whether to drop the run's files from the page cache before the first two
            measurements. Without it there is no cold one.
        replay: Whether to measure a perfect loader too, which has the same batch always ready.
        accelerator_tokens_per_second: Tokens per second that one accelerator trains on.

    Raises:
        ConfigError: An option outside its limits, no training data, or too few for a step.
        DataError: A token file that is missing or damaged.
    """
    job = _Job(
        config=config,
        micro_batch_size=whole("micro_batch_size", micro_batch_size, 1),
        ranks=whole("ranks", ranks, 1, 1024),
        threads=whole("threads", threads, 1),
        prefetch=None if prefetch is None else whole("prefetch", prefetch, 0),
        fields=None if fields is None else tuple(fields),
        token_dtype=token_dtype,
        seconds=_positive("seconds", seconds),
        step_time=_positive("step_time", step_time),
    )
    drop_cache, replay = flag("drop_cache", drop_cache), flag("replay", replay)
    tokens_each = _positive("accelerator_tokens_per_second", accelerator_tokens_per_second)
    prefixes = _training_prefixes(config)
    page_cache = "left as it was"
    reports: list[_RankReport] = []
    measurements: list[Measurement] = []
    copy_rate = copy_bytes_per_second(min(job.ranks * job.threads, available_cores()))
    for names in [("cold",), _OTHERS] if drop_cache else [_OTHERS]:
        names = tuple(name for name in names if replay or name != "replay")
        if drop_cache:
            gc.collect()  # maps of the last round
            page_cache = drop_from_page_cache(_files(config, prefixes))
        round_reports = _measure_ranks(job, names)
        reports = reports or round_reports
        passes = zip(*(report.passes for report in round_reports), strict=True)
        measurements += [_merge(job, list(each), copy_rate, tokens_each) for each in passes]
    rates = {each.name: each.samples_per_second for each in measurements}
    return BenchResult(
        num_files=len(set(prefixes)),
        num_samples=reports[0].num_samples,
        sequence_length=config.sequence_length,
        token_bytes=reports[0].token_bytes,
        options={
            "micro_batch_size": job.micro_batch_size,
            "ranks": job.ranks,
            "threads": job.threads,
            "prefetch": job.prefetch,
            "fields": reports[0].fields,
            "token_dtype": job.token_dtype,
        },
        num_cores=available_cores(),
        copy_bytes_per_second=copy_rate,
        page_cache=page_cache,
        opening_seconds=max(report.opening_seconds for report in reports),
        first_batch_seconds=max(report.first_batch_seconds for report in reports),
        accelerator_tokens_per_second=tokens_each,
        measurements=measurements,
        perfect_share=rates["paced"] / rates["replay"] if replay else None,
    )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The checked arguments of `bench`, for the processes of its ranks."""

    config: DatasetConfig
    micro_batch_size: int
    ranks: int
    threads: int
    prefetch: int | None
    fields: tuple[str, ...] | None
    token_dtype: str
    seconds: float
    step_time: float


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One measurement on one rank. `starts` and `waits` have an entry a step, in seconds."""

    name: str
    step_time: float
    seconds: float
    starts: NDArray[np.float64]
    waits: NDArray[np.float64]
    by_cause: dict[str, float]
    cpu_seconds: float
    disk_bytes: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class _RankReport:
    num_samples: int
    token_bytes: int
    fields: list[str]
    opening_seconds: float
    first_batch_seconds: float
    passes: list[_Pass]


def _positive(name: str, value: Any) -> float:
    number = real(name, value)
    if not 0 < number < float("inf"):  # NaN too
        raise ConfigError(f"{name} is {number:g}; a finite number above 0 is needed")
    return number


# ---- the files ----


def _training_prefixes(config: DatasetConfig) -> list[str]:
    blend = config.blend_of(_TRAIN)
    if blend is None:
        raise ConfigError("the run has no training data to measure: give train_data_path")
    return [source_of(source)[0] for source in blend[0]]


def _files(config: DatasetConfig, prefixes: Sequence[str]) -> list[str]:
    """The files that a start reads: token files, and index arrays that are in the cache folder."""
    files = [path(prefix) for prefix in dict.fromkeys(prefixes) for path in (bin_path, idx_path)]
    if config.cache is not None:
        folder = os.fspath(config.cache)
        manifest = Manifest.read(manifest_path(folder, config.order_key()))
        for name in [] if manifest is None else filter(None, manifest.sets):
            array_set = arrays.load(folder, name)
            if array_set is not None:
                files += [array_set.path(array) for array in array_set.layout]
    return files


# ---- one rank ----


class _Cycle:
    """A sampler's first steps, over and over.

    Args:
        sampler: The sampler; its steps start at 0, block_size, 2 * block_size, ...
        num_steps: Number of steps.
    """

    def __init__(self, sampler: SequentialSampler, num_steps: int) -> None:
        self._sampler = sampler
        self.size = sampler.block_size * num_steps

    def has_step(self, consumed_samples: int) -> bool:
        return True

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        return self._sampler.sample_numbers(consumed_samples % self.size)

    def consumed_after(self, consumed_samples: int) -> int:
        return consumed_samples + self._sampler.block_size


def _measure_ranks(job: _Job, names: Sequence[str]) -> list[_RankReport]:
    """Makes the measurements of some names on all ranks at once, each in a process."""
    tasks = [Task(rank, names, f"rank {rank}") for rank in range(job.ranks)]
    # A rank that is tried again would be measured without the others.
    results = run_local(_measure_rank, job, tasks, workers=job.ranks, attempts=1)
    reports = {task.number: report for task, report in results}
    return [reports[rank] for rank in range(job.ranks)]


def _measure_rank(job: _Job, task: Task) -> _RankReport:
    """Makes the measurements of some names on one rank."""
    rank, names = task.number, task.payload
    start = time.perf_counter()
    dataset = build_datasets(job.config).train
    if dataset is None:
        raise ConfigError("the split leaves no training data to measure: give train a share")
    opening_seconds = time.perf_counter() - start
    sampler = SequentialSampler(
        len(dataset),
        micro_batch_size=job.micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=job.ranks,
    )
    if len(dataset) < 2 * sampler.block_size:
        raise ConfigError(
            f"a step takes micro_batch_size * ranks = {sampler.block_size} samples; the data have "
            f"{len(dataset)}, and at least 2 steps are needed: lower one of them, or use more data"
        )
    with _loader(job, dataset, sampler) as loader:
        batch = next(loader)
        first_batch_seconds = time.perf_counter() - start
        token_bytes = _token_bytes(dataset)
        first = names[0]
        step_time = 0.0 if first == "cold" else job.step_time
        passes = [_draw(first, loader, job.seconds, step_time, token_bytes)]
    if "warm" in names:
        with _loader(job, dataset, sampler) as loader:
            num_steps = _draw("", loader, job.seconds, 0.0, token_bytes).waits.size
        with _loader(job, dataset, _Cycle(sampler, num_steps)) as loader:
            passes.append(_draw("warm", loader, job.seconds, 0.0, token_bytes))
    if "replay" in names:
        passes.append(_draw("replay", _same(batch), job.seconds, job.step_time, token_bytes))
    return _RankReport(
        num_samples=len(dataset),
        token_bytes=token_bytes,
        fields=list(batch),
        opening_seconds=opening_seconds,
        first_batch_seconds=first_batch_seconds,
        passes=passes,
    )


def _loader(job: _Job, dataset: Any, sampler: Sampler) -> Loader:
    return Loader(
        dataset,
        sampler=sampler,
        fields=job.fields,
        token_dtype=job.token_dtype,
        threads=job.threads,
        prefetch=job.prefetch,
    )


def _same(batch: Any) -> Iterator[Any]:
    while True:
        yield batch


def _token_bytes(dataset: GPTDataset | BlendedDataset) -> int:
    """Bytes of a token in the first token file."""
    part: Any = dataset.datasets[0] if isinstance(dataset, BlendedDataset) else dataset
    return int(part.dataset.dtype.itemsize)


def _draw(
    name: str, batches: Iterator[Any], seconds: float, step_time: float, token_bytes: int
) -> _Pass:
    """Draws batches for some seconds, or to the end of the data; at least one."""
    starts: list[float] = []
    waits: list[float] = []
    causes = _causes(batches)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    start = after = time.perf_counter()
    while after - start < seconds:
        before = time.perf_counter()
        following = next(batches, None)
        if following is None:
            break
        batch = following
        after = time.perf_counter()
        starts.append(before - start)
        waits.append(after - before)
        if step_time:
            time.sleep(step_time)
            after = time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_SELF)
    written, num_tokens = _bytes_written(batch)
    return _Pass(
        name=name,
        step_time=step_time,
        seconds=after - start,
        starts=np.array(starts),
        waits=np.array(waits),
        by_cause={
            cause: total - causes.get(cause, 0.0) for cause, total in _causes(batches).items()
        },
        cpu_seconds=used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime,
        disk_bytes=(used.ru_inblock - usage.ru_inblock) * _BLOCK_SIZE,
        memory_bytes=len(waits) * (written + num_tokens * token_bytes),
    )


def _causes(batches: Iterator[Any]) -> dict[str, float]:
    """Seconds of waiting by cause, so far."""
    return dict(batches.wait_stats().by_cause) if isinstance(batches, Loader) else {}


def _bytes_written(batch: dict[str, NDArray[Any]]) -> tuple[int, int]:
    """Bytes that a batch takes to write, and its number of tokens.

    Views of one buffer count once, and arrays that all batches share, which are read-only, do not.
    """
    owners = {}
    for array in batch.values():
        owner = array if array.base is None or not hasattr(array.base, "nbytes") else array.base
        if array.flags.writeable:
            owners[id(owner)] = owner.nbytes
    num_tokens = max((array.size for name, array in batch.items() if name in _TOKENS), default=0)
    return sum(owners.values()), num_tokens


_TOKENS = ("tokens", "labels")


# ---- all ranks ----


def _merge(job: _Job, passes: Sequence[_Pass], copy_rate: float, tokens_each: float) -> Measurement:
    first = passes[0]
    seconds = max(each.seconds for each in passes)
    num_steps = sum(each.waits.size for each in passes)
    samples = sum(each.waits.size / each.seconds for each in passes) * job.micro_batch_size
    tokens = samples * job.config.sequence_length
    all_waits = np.concatenate([each.waits for each in passes])
    waits = Waits(
        share=float(all_waits.sum() / sum(each.seconds for each in passes)),
        median=float(np.median(all_waits)),
        percentile_99=float(np.quantile(all_waits, 0.99)),
        longest=float(all_waits.max()),
        by_cause=_shares([each.by_cause for each in passes]),
        timeline=_timeline(first),
    )
    cores = sum(each.cpu_seconds / each.seconds for each in passes)
    disk = sum(each.disk_bytes / each.seconds for each in passes)
    memory = sum(each.memory_bytes / each.seconds for each in passes)
    cause, reason = "", ""
    if first.name != "replay":
        cause, reason = bound_by(
            wait_share=waits.share if first.step_time else None,
            busy_share=cores / min(job.ranks * job.threads, available_cores()),
            disk_rate=disk,
            copy_share=memory / copy_rate,
        )
    return Measurement(
        name=first.name,
        seconds=seconds,
        step_time=first.step_time,
        num_steps=num_steps,
        samples_per_second=samples,
        tokens_per_second=tokens,
        accelerators=None if first.step_time else int(tokens // tokens_each),
        cores=cores,
        disk_bytes_per_second=disk,
        memory_bytes_per_second=memory,
        waits=waits,
        bound_by=cause,
        reason=reason,
    )


def _shares(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The sums of all parts as shares of the whole, the largest first."""
    sums = {cause: sum(part.get(cause, 0.0) for part in parts) for part in parts for cause in part}
    whole_sum = sum(sums.values())
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {cause: seconds / whole_sum for cause, seconds in ordered if seconds > 0}


def _timeline(one: _Pass) -> list[tuple[float, float]]:
    """Every wait, or the longest in each of equal parts of the time."""
    if one.waits.size <= _MOST_POINTS:
        return list(zip(one.starts.tolist(), one.waits.tolist(), strict=True))
    parts = np.minimum(one.starts / one.seconds * _MOST_POINTS, _MOST_POINTS - 1).astype(np.int64)
    longest = np.zeros(_MOST_POINTS)
    np.maximum.at(longest, parts, one.waits)
    present = np.unique(parts)
    return [(part * one.seconds / _MOST_POINTS, float(longest[part])) for part in present.tolist()]


def bound_by(
    *, wait_share: float | None, busy_share: float, disk_rate: float, copy_share: float
) -> tuple[str, str]:
    """What bounds a measurement, and the quantities that say so.

    Args:
        wait_share: Share of the time that the consumer of simulated steps waited; None: there were
            no steps.
        busy_share: CPU time as a share of the time of all cores that the threads could use.
        disk_rate: Bytes read from disks per second.
        copy_share: Bytes of memory read and written, as a share of what a copy reaches.

    Returns:
        "step", "disk", "memory", "CPU" or "other", and a sentence.
    """
    if wait_share is not None and wait_share < _SMALL_WAIT:
        return "step", f"the steps waited {wait_share:.2%} of the time"
    busy = f"the cores were busy {min(busy_share, 1):.0%} of the time"
    if busy_share < _BUSY:
        if disk_rate > 0:
            return "disk", f"{busy}, and {disk_rate / 1e6:,.0f} MB/s came from disks"
        return "other", f"{busy}, and nothing came from a disk"
    if copy_share >= _NEAR_COPY:
        return "memory", f"{busy}, and memory at {copy_share:.0%} of a plain copy's rate"
    return "CPU", f"{busy}, and memory at {copy_share:.0%} of a plain copy's rate"
