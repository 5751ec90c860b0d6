"""What one rank of `bench` measures: waits for batches, in its own process."""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.engine import Task
from millrace.errors import ConfigError
from millrace.feed import BlendedDataset, Loader, Sampler, SequentialSampler
from millrace.option_class import check_options, option
from millrace.run import DatasetConfig, build_datasets
from millrace.samples.fields import FIELDS, TOKEN_DTYPES

_BLOCK_SIZE = 512  # bytes, the unit of `ru_inblock`
_TOKENS = ("tokens", "labels")


_loaded = partial(option, group="loader")
_measured = partial(option, group="measurement", least=1e-6, most=10**12)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `bench`. An accelerator's rate is about what one H100 makes of a model of
    8 billion parameters at half its peak: 6 operations per parameter and token, 495 * 10**12
    operations per second."""

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

    def __post_init__(self) -> None:
        check_options(self)


class Pass(NamedTuple):
    """One measurement on one rank.

    Attributes:
        name: Its name, as in `Measurement`.
        step_time: Seconds of a simulated step, or 0.
        seconds: Its length.
        waits: Seconds that each step waited.
        by_cause: Seconds of the waits by their causes.
        rates: The fields of `Measurement` that are sums over the ranks, by their names.
    """

    name: str
    step_time: float
    seconds: float
    waits: NDArray[np.float64]
    by_cause: dict[str, float]
    rates: dict[str, Any]


def measure_rank(
    job: tuple[DatasetConfig, BenchOptions], task: Task
) -> tuple[dict[str, Any], list[Pass]]:
    """Makes the measurements whose names are the task's payload, on the rank of its number.

    Returns:
        The fields of `BenchResult` that a rank knows, by their names, and the measurements.
    """
    config, own = job
    start = time.perf_counter()
    dataset = build_datasets(config).train
    if dataset is None:
        raise ConfigError("the split leaves no training data to measure: give train a share")
    opening_seconds = time.perf_counter() - start
    sampler = SequentialSampler(
        len(dataset),
        micro_batch_size=own.micro_batch_size,
        data_parallel_rank=task.number,
        data_parallel_size=own.ranks,
    )
    if len(dataset) < 2 * sampler.block_size:
        raise ConfigError(
            f"a step takes micro_batch_size * ranks = {sampler.block_size} samples; the data have "
            f"{len(dataset)}, and at least 2 steps are needed: lower one of them, or use more data"
        )
    first_file: Any = dataset.datasets[0] if isinstance(dataset, BlendedDataset) else dataset
    token_bytes = int(first_file.dataset.dtype.itemsize)

    def loader_of(sampler: Sampler) -> Loader:
        return Loader(
            dataset,
            sampler=sampler,
            fields=None if own.fields is None else tuple(own.fields),
            token_dtype=own.token_dtype,
            threads=own.threads,
            prefetch=own.prefetch,
        )

    with loader_of(sampler) as loader:
        facts = {
            "num_samples": len(dataset),
            "token_bytes": token_bytes,
            "fields": list(next(loader)),
            "opening_seconds": opening_seconds,
            "first_batch_seconds": time.perf_counter() - start,
        }
        passes = [_draw(task.payload[0], loader, job, token_bytes)]
    if "warm" in task.payload:
        with loader_of(sampler) as loader:
            num_steps = _draw("warm", loader, job, token_bytes).waits.size
        with loader_of(_Cycle(sampler, num_steps)) as loader:
            passes.append(_draw("warm", loader, job, token_bytes))
    return facts, passes


def _draw(
    name: str, loader: Loader, job: tuple[DatasetConfig, BenchOptions], token_bytes: int
) -> Pass:
    """Draws batches for some seconds, or to the end of the data; at least one."""
    config, own = job
    step_time = own.step_time if name == "paced" else 0.0
    waits: list[float] = []
    causes = dict(loader.wait_stats().by_cause)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    start = after = time.perf_counter()
    while after - start < own.seconds:
        before = time.perf_counter()
        following = next(loader, None)
        if following is None:
            break
        batch = following
        waits.append(time.perf_counter() - before)
        if step_time:
            time.sleep(step_time)
        after = time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_SELF)
    by_cause = loader.wait_stats().by_cause
    num_samples = len(waits) * own.micro_batch_size
    amounts = {
        "samples_per_second": num_samples,
        "tokens_per_second": num_samples * config.sequence_length,
        "cores": used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime,
        "disk_bytes_per_second": (used.ru_inblock - usage.ru_inblock) * _BLOCK_SIZE,
        "memory_bytes_per_second": len(waits) * _bytes_of(batch, token_bytes),
    }
    return Pass(
        name=name,
        step_time=step_time,
        seconds=after - start,
        waits=np.array(waits),
        by_cause={cause: total - causes.get(cause, 0.0) for cause, total in by_cause.items()},
        rates={field: amount / (after - start) for field, amount in amounts.items()},
    )


def _bytes_of(batch: dict[str, NDArray[Any]], token_bytes: int) -> int:
    """Bytes that making a batch reads and writes.

    Views of one buffer count once, and arrays that all batches share, which are read-only, do not.
    """
    owners = {}
    for array in batch.values():
        owner = array if array.base is None or not hasattr(array.base, "nbytes") else array.base
        if array.flags.writeable:
            owners[id(owner)] = owner.nbytes
    num_tokens = max((array.size for name, array in batch.items() if name in _TOKENS), default=0)
    return sum(owners.values()) + num_tokens * token_bytes


class _Cycle:
    """The first `num_steps` steps of a sampler, over and over; they start at multiples of
    `block_size`."""

    def __init__(self, sampler: SequentialSampler, num_steps: int) -> None:
        self._sampler = sampler
        self._size = sampler.block_size * num_steps

    def has_step(self, consumed_samples: int) -> bool:
        return True

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        return self._sampler.sample_numbers(consumed_samples % self._size)

    def consumed_after(self, consumed_samples: int) -> int:
        return consumed_samples + self._sampler.block_size
