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
    TextError,
    ViewChangeWarning,
)
from millrace.feed import (
    BlendedDataset,
    ExternalBatches,
    GPTDataset,
    Loader,
    SequentialSampler,
)
from millrace.order import normalize, parse_split, samples_per_dataset, split_ranges
from millrace.run import DatasetConfig, Datasets, build_datasets
from millrace.store import IndexedDataset, IndexedDatasetBuilder, optimal_dtype

__all__ = [
    "BlendedDataset",
    "CacheError",
    "ConfigError",
    "DataError",
    "DatasetConfig",
    "Datasets",
    "DuplicateDataWarning",
    "ExternalBatches",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Loader",
    "MillraceError",
    "ResumeError",
    "SequentialSampler",
    "TextError",
    "ViewChangeWarning",
    "build_datasets",
    "normalize",
    "optimal_dtype",
    "parse_split",
    "samples_per_dataset",
    "split_ranges",
]
