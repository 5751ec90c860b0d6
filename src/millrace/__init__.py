"""millrace: the data plane for pre-training language models.

Megatron-LM's token files and its exact sample order, fast, resumable to the sample.
"""

from millrace.errors import (
    CacheError,
    ConfigError,
    DataError,
    DuplicateDataWarning,
    MillraceError,
    ResumeError,
    StorageError,
    TextError,
    ViewChangeWarning,
)
from millrace.feed import (
    BatchSizeSchedule,
    BlendedDataset,
    CyclicSampler,
    ExternalBatches,
    FillInMiddle,
    FullValidationSampler,
    GlobalBatchSampler,
    GPTDataset,
    Loader,
    LossRanges,
    RampUp,
    RepeatGuard,
    SequentialSampler,
    ShardedDataset,
    TransformedDataset,
    write_loss_ranges,
)
from millrace.order import normalize, parse_split, samples_per_dataset, split_ranges
from millrace.run import DatasetConfig, Datasets, InstantConfig, build_datasets
from millrace.store import IndexedDataset, IndexedDatasetBuilder, optimal_dtype

__all__ = [
    "BatchSizeSchedule",
    "BlendedDataset",
    "CacheError",
    "ConfigError",
    "CyclicSampler",
    "DataError",
    "DatasetConfig",
    "Datasets",
    "DuplicateDataWarning",
    "ExternalBatches",
    "FillInMiddle",
    "FullValidationSampler",
    "GPTDataset",
    "GlobalBatchSampler",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "InstantConfig",
    "Loader",
    "LossRanges",
    "MillraceError",
    "RampUp",
    "RepeatGuard",
    "ResumeError",
    "SequentialSampler",
    "ShardedDataset",
    "StorageError",
    "TextError",
    "TransformedDataset",
    "ViewChangeWarning",
    "build_datasets",
    "normalize",
    "optimal_dtype",
    "parse_split",
    "samples_per_dataset",
    "split_ranges",
    "write_loss_ranges",
]
