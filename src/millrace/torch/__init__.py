"""Tensors, DataLoaders, and the ranks of torch.distributed."""

from millrace.torch.data import BatchSampler, CheckpointState, IterableDataset, MapDataset, collate
from millrace.torch.ranks import (
    build_datasets,
    check_consistency,
    distributed_rank,
    first_then_rest,
)
from millrace.torch.tensors import to_device, to_tensors

__all__ = [
    "BatchSampler",
    "CheckpointState",
    "IterableDataset",
    "MapDataset",
    "build_datasets",
    "check_consistency",
    "collate",
    "distributed_rank",
    "first_then_rest",
    "to_device",
    "to_tensors",
]
