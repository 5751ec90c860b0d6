"""The measurements of one rank of `bench`, in its own process."""

import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.engine import Task
from millrace.errors import ConfigError
from millrace.feed import BlendedDataset, CyclicSampler, Loader, SequentialSampler
from millrace.option_class import check_options, option
from millrace.run import DatasetConfig, build_datasets
from millrace.samples.fields import FIELDS, TOKEN_DTYPES

_BLOCK_SIZE = 512  # bytes, the unit of `ru_inblock`
_TOKENS = ("tokens", "labels")

_loaded = partial(option, group="loader")
_measured = partial(option, group="measurement", least=1e-6, most=10**12)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
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

    def __post_init__(self) -> None:
        check_options(self)


class Pass(NamedTuple):
    """One measurement on one rank: its length, the seconds that each step waited, their sums by
    cause, and the fields of `Measurement` that are sums over the ranks, by name."""

    seconds: float
    waits: NDArray[np.float64]
    by_cause: Counter[str]
    rates: dict[str, float]


def measure_rank(
    job: tuple[DatasetConfig, BenchOptions], task: Task
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
    sampler = SequentialSampler(len(dataset), micro_batch_size=own.micro_batch_size, **rank)
    if len(dataset) < 2 * sampler.block_size:
        raise ConfigError(
            f"a step takes micro_batch_size * ranks = {sampler.block_size} samples; the data have "
            f"{len(dataset)}, and at least 2 steps are needed: lower one of them, or use more data"
        )
    first_file: Any = dataset.datasets[0] if isinstance(dataset, BlendedDataset) else dataset
    token_bytes = first_file.dataset.dtype.itemsize
    loader_of = partial(
        Loader,
        dataset,
        fields=None if own.fields is None else tuple(own.fields),
        token_dtype=own.token_dtype,
        threads=own.threads,
        prefetch=own.prefetch,
    )
    draw = partial(_draw, job, token_bytes)
    with loader_of(sampler=sampler) as loader:
        facts = {
            "num_samples": len(dataset),
            "token_bytes": token_bytes,
            "fields": list(next(loader)),
            "opening_seconds": opening_seconds,
            "first_batch_seconds": time.perf_counter() - start,
        }
        passes = [draw(loader, own.step_time if "paced" in task.payload else 0.0)]
    if "warm" in task.payload:
        with loader_of(sampler=sampler) as loader:
            num_read = draw(loader).waits.size * sampler.block_size
        again = CyclicSampler(
            num_read, micro_batch_size=own.micro_batch_size, data_sharding=False, **rank
        )
        with loader_of(sampler=again) as loader:
            passes.append(draw(loader))
    return facts, passes


def _draw(
    job: tuple[DatasetConfig, BenchOptions],
    token_bytes: int,
    loader: Loader,
    step_time: float = 0.0,
) -> Pass:
    """Draws batches for some seconds, or to the end of the data; at least one."""
    config, own = job
    waits: list[float] = []
    causes = Counter(loader.wait_stats().by_cause)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    start = after = time.perf_counter()
    while after - start < own.seconds:
        before = time.perf_counter()
        if (following := next(loader, None)) is None:
            break
        batch = following
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
        "memory_bytes_per_second": len(waits) * _bytes_of(batch, token_bytes),
    }
    return Pass(
        seconds=after - start,
        waits=np.array(waits),
        by_cause=Counter(loader.wait_stats().by_cause) - causes,
        rates={name: amount / (after - start) for name, amount in amounts.items()},
    )


def _bytes_of(batch: dict[str, NDArray[Any]], token_bytes: int) -> int:
    """Bytes that making a batch reads and writes.

    Views of one buffer count once; arrays that all batches share, which are read-only, do not.
    """
    own = [array for array in batch.values() if array.flags.writeable]
    owners = [one.base if isinstance(one.base, np.ndarray) else one for one in own]
    written = {id(owner): owner.nbytes for owner in owners}
    num_tokens = max((batch[name].size for name in _TOKENS if name in batch), default=0)
    return sum(written.values()) + num_tokens * token_bytes
