"""What a loader draws from: the checks of its dataset, and the choice of its sampler."""

from __future__ import annotations

from typing import Any

from millrace.checks import shown
from millrace.errors import ConfigError
from millrace.feed.streams import ExternalBatches, StreamDataset, StreamSampler
from millrace.samples.tokens import TokenStream
from millrace.sampling import SequentialSampler
from millrace.sampling.samplers import RankSampler
from millrace.store import IndexedDataset


def check_dataset(dataset: Any) -> None:
    """Raises ConfigError for what is not a dataset, with the remedy."""
    if isinstance(dataset, StreamDataset):
        return
    names = ("__len__", "batch", "fingerprint")
    missing = [name for name in names if not callable(getattr(dataset, name, None))]
    if not missing:
        return
    if isinstance(dataset, IndexedDataset):
        remedy = "GPTDataset(indexed_dataset, sequence_length=..., seed=...) makes samples of it"
    elif isinstance(dataset, TokenStream):
        remedy = "StreamDataset(stream, options) makes rows of its tokens"
    elif hasattr(dataset, "dataset") and not hasattr(dataset, "__iter__"):
        remedy = "give the dataset that it was made of, its attribute `dataset`"
    else:
        remedy = (
            "give a GPTDataset, a BlendedDataset or an object with these methods, or "
            "ExternalBatches(batches, samples_per_step=...) of an iterable of batches"
        )
    name = type(dataset).__name__
    raise ConfigError(f"dataset is a {name}, which has no {', '.join(missing)}: {remedy}")


def sampler_of(dataset: Any, sampler: Any, share: tuple[Any, ...]) -> Any:
    """The sampler of a loader: the one that is given, the dataset's own, or a sequential one."""
    if isinstance(dataset, StreamDataset) and sampler is None:
        return StreamSampler(*share)
    if isinstance(dataset, StreamDataset):
        raise ConfigError("a stream has no sample numbers: give micro_batch_size, and no sampler")
    if sampler is None and not isinstance(dataset, ExternalBatches):
        return _sequential_sampler(len(dataset), *share)
    if share != (None, 0, 1, True):
        raise ConfigError(
            "micro_batch_size, data_parallel_rank, data_parallel_size and drop_last are the "
            "sampler's: leave them out where a sampler is given"
        )
    if sampler is None:
        return dataset
    names = ("has_step", "sample_numbers", "consumed_after")
    missing = [name for name in names if not callable(getattr(sampler, name, None))]
    if missing:
        raise ConfigError(
            f"sampler is {shown(sampler)}, which has no {', '.join(missing)}; give a sampler, such "
            "as SequentialSampler"
        )
    if isinstance(sampler, RankSampler) and sampler.num_samples > len(dataset):
        raise ConfigError(
            f"the sampler draws from {sampler.num_samples} samples; the dataset has "
            f"{len(dataset)}. Make it with num_samples=len(dataset)"
        )
    return sampler


def _sequential_sampler(
    num_samples: int, micro_batch_size: Any, rank: int, size: int, drop_last: bool
) -> SequentialSampler:
    sampler = SequentialSampler(
        num_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=size,
        drop_last=drop_last,
    )
    if drop_last:
        sampler.check_block(", or pass drop_last=False")
    return sampler
