"""Measures how fast this machine feeds a run: the user's data as it lies, through the `Loader`."""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from millrace.cache import arrays
from millrace.cores import available_cores
from millrace.engine import Task, run_local
from millrace.errors import ConfigError
from millrace.jobs.benchmark_limits import copy_bytes_per_second, drop_from_page_cache
from millrace.jobs.benchmark_ranks import BenchOptions, Pass, measure_rank
from millrace.names import BIN, IDX
from millrace.option_class import option
from millrace.run import DatasetConfig, arguments
from millrace.run.config import source_of
from millrace.run.plan import Manifest

_BUSY = 0.7  # share of the cores' time above which a measurement is bound by them
_NEAR_COPY = 0.5  # share of the copying rate above which a measurement is bound by memory
_SMALL_WAIT = 0.02  # share of the time below which a trainer hardly waits


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    source: str = option(
        "arguments of a run, as for `millrace index` (.yaml, .toml), or a path prefix",
        flags="source",
        metavar="RUN",
    )
    sequence_length: int | None = option("tokens in a sample, for a prefix", None, least=1)
    seed: int | None = option("seed of the order, for a prefix", None, default_text="1234")


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waits of the consumer for its batches.

    Attributes:
        share: Share of the time that was spent waiting, 0 to 1.
        median, percentile_99, longest: Seconds of a wait, over all steps and ranks.
        by_cause: Share of the waits by the slowest step of making the batches: "sampler", "dataset"
            or "prepare" (see `Loader.wait_stats`).
    """

    share: float
    median: float
    percentile_99: float
    longest: float
    by_cause: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement, over all ranks.

    Attributes:
        name: "cold", "paced" (with simulated steps) or "warm".
        seconds: Length of the measurement.
        step_time: Seconds of a simulated step; 0: no pause between batches.
        num_steps: Number of steps of all ranks.
        samples_per_second, tokens_per_second: Rates of all ranks together.
        accelerators: Number of accelerators that this rate feeds; None with simulated steps.
        cores: Number of cores that were busy with all threads of the ranks.
        disk_bytes_per_second: Bytes read from disks.
        memory_bytes_per_second: Bytes of tokens read and of arrays written.
        waits: Waits of the consumer.
        bound_by: "step", "disk", "memory", "CPU" or "other".
        reason: Measured quantities that decided `bound_by`.
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
        options: The `BenchOptions`, with the fields that the batches had.
        num_cores: Number of cores that this process may use.
        copy_bytes_per_second: Bytes read and written in copying memory with as many threads as the
            loaders have.
        page_cache: Text on the run's files in the page cache.
        opening_seconds: Time to open the data, and to load or build their indices, on the slowest
            rank.
        first_batch_seconds: Time to the first batch, opening included, on the slowest rank.
        accelerator_tokens_per_second: Assumed rate of one accelerator.
        measurements: The measurements, in order.
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


def bench(config: DatasetConfig, **options: Any) -> BenchResult:
    """Measures how fast this machine feeds the training samples of a run.

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
    blend = config.blend_of(0)  # of the training data
    if blend is None:
        raise ConfigError("the run has no training data to measure: give train_data_path")
    prefixes = [source_of(source)[0] for source in blend[0]]
    page_cache = "left as it was"
    facts: dict[str, Any] = {}
    measurements: list[Measurement] = []
    copy_rate = copy_bytes_per_second(min(own.ranks * own.threads, available_cores()))
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
        measurements += [_merge(name, own, each, copy_rate) for name, each in of_ranks]
    return BenchResult(
        num_files=len(set(prefixes)),
        sequence_length=config.sequence_length,
        options=asdict(own) | {"fields": facts.pop("fields")},
        num_cores=available_cores(),
        copy_bytes_per_second=copy_rate,
        page_cache=page_cache,
        accelerator_tokens_per_second=own.accelerator_tokens_per_second,
        measurements=measurements,
        **facts,
    )


def run_of(
    source: str, sequence_length: int | None = None, seed: int | None = None
) -> DatasetConfig:
    """The configuration in a file, or one with all samples of a token file once."""
    if source.endswith((".yaml", ".yml", ".toml")):
        if (sequence_length, seed) != (None, None):
            raise ConfigError(
                f"{source} gives the sequence length and the seed: leave out --sequence-length and "
                "--seed"
            )
        values = arguments.read_arguments(source)
        values.pop("tokenizer_identifiers", None)
        arguments.unknown_arguments(values)
        return arguments.config_from(values)
    if sequence_length is None:
        raise ConfigError(
            f"{source} is taken as the path prefix of a token file, as it does not end with .yaml, "
            ".yml or .toml: give --sequence-length too"
        )
    return DatasetConfig(
        sequence_length=sequence_length,
        seed=arguments.DEFAULT_SEED if seed is None else seed,
        num_samples=(None, 0, 0),
        blend=([source], None),
        split="1,0,0",
    )


def _files(config: DatasetConfig, prefixes: Sequence[str]) -> list[str]:
    """The files that a start reads: token files, and index arrays in the cache folder."""
    files = [prefix + end for prefix in dict.fromkeys(prefixes) for end in (BIN, IDX)]
    manifest = Manifest.find(config)
    for name in [] if manifest is None else filter(None, manifest.sets):
        if (array_set := arrays.load(str(config.cache), name)) is not None:
            files += [array_set.path(array) for array in array_set.layout]
    return files


def _merge(name: str, own: BenchOptions, passes: Sequence[Pass], copy_rate: float) -> Measurement:
    step_time = own.step_time if name == "paced" else 0.0
    rates = {rate: sum(each.rates[rate] for each in passes) for rate in passes[0].rates}
    waits = np.concatenate([each.waits for each in passes])
    share = float(waits.sum() / sum(each.seconds for each in passes))
    causes = sum((each.by_cause for each in passes), Counter())
    cause, reason = bound_by(
        wait_share=share if step_time else None,
        busy_share=rates["cores"] / min(own.ranks * own.threads, available_cores()),
        disk_rate=rates["disk_bytes_per_second"],
        copy_share=rates["memory_bytes_per_second"] / copy_rate,
    )
    fed = int(rates["tokens_per_second"] // own.accelerator_tokens_per_second)
    return Measurement(
        name=name,
        seconds=max(each.seconds for each in passes),
        step_time=step_time,
        num_steps=waits.size,
        accelerators=None if step_time else fed,
        waits=Waits(
            share=share,
            median=float(np.median(waits)),
            percentile_99=float(np.quantile(waits, 0.99)),
            longest=float(waits.max()),
            by_cause={one: part / causes.total() for one, part in causes.most_common()},
        ),
        bound_by=cause,
        reason=reason,
        **rates,
    )


def bound_by(
    *, wait_share: float | None, busy_share: float, disk_rate: float, copy_share: float
) -> tuple[str, str]:
    """What bounds a measurement, and the quantities that say so.

    Args:
        wait_share: Share of the time that the consumer waited; None without simulated steps.
        busy_share: CPU time as a share of the time of all cores that the threads could use.
        disk_rate: Bytes read from disks per second.
        copy_share: Rate of reading and writing memory, as a share of a plain copy's.

    Returns:
        "step", "disk", "memory", "CPU" or "other", and a phrase.
    """
    if wait_share is not None and wait_share < _SMALL_WAIT:
        return "step", f"the steps waited {wait_share:.2%} of the time"
    busy = f"the cores were busy {min(busy_share, 1):.0%} of the time"
    if busy_share < _BUSY:
        if disk_rate > 0:
            return "disk", f"{busy}, and {disk_rate / 1e6:,.0f} MB/s came from disks"
        return "other", f"{busy}, and nothing came from a disk"
    cause = "memory" if copy_share >= _NEAR_COPY else "CPU"
    return cause, f"{busy}, and memory at {copy_share:.0%} of a plain copy's rate"
