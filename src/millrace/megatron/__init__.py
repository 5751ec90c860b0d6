"""Megatron-LM's own names, over millrace.

Change only the imports:

    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from millrace.megatron import GPTDataset, GPTDatasetConfig

Files, cached indices, samples and their order are Megatron-LM's, bit for bit (megatron-core
0.16.1). `docs/megatron.md` is the guide, `docs/differences.md` lists where Megatron-LM fails, and
`errors` lists the errors.
"""

from millrace.megatron import helpers
from millrace.megatron.base import _PAD_TOKEN_ID, LowLevelDataset, MegatronDataset
from millrace.megatron.blended import BlendedDataset
from millrace.megatron.builder import (
    BlendedMegatronDatasetBuilder,
    DistributedDataset,
    MidLevelDataset,
    TopLevelDataset,
    _get_size_per_split_per_dataset,
)
from millrace.megatron.config import (
    BlendedMegatronDatasetConfig,
    GPTDatasetConfig,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from millrace.megatron.gpt import GPTDataset, MockGPTDataset, MockGPTLowLevelDataset
from millrace.megatron.helpers import (
    build_blending_indices,
    build_exhaustive_blending_indices,
    build_sample_idx,
    build_sample_idx_int32,
    build_sample_idx_int64,
)
from millrace.megatron.indexed import (
    OBJECT_STORAGE_BIN_READERS,
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    _BinReader,
    _FileBinReader,
    _IndexReader,
    _MMapBinReader,
    _MultiStorageClientBinReader,
    _S3BinReader,
    get_bin_path,
    get_idx_path,
)
from millrace.megatron.object_storage import (
    MSC_PREFIX,
    S3_PREFIX,
    ObjectStorageConfig,
    S3Client,
    S3Config,
    is_object_storage_path,
)
from millrace.megatron.rules import (
    _build_document_index,
    _build_shuffle_index,
    _get_ltor_masks_and_position_ids,
)
from millrace.megatron.samplers import (
    HybridCPMegatronPretrainingSampler,
    MegatronFullValidationSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    RandomSeedDataset,
    build_pretraining_data_loader,
)
from millrace.megatron.utils import Split, compile_helpers, get_blend_from_list, normalize
from millrace.store.layout import MAGIC as _INDEX_HEADER

__all__ = [
    "MSC_PREFIX",
    "OBJECT_STORAGE_BIN_READERS",
    "S3_PREFIX",
    "_INDEX_HEADER",
    "_PAD_TOKEN_ID",
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "BlendedMegatronDatasetConfig",
    "DType",
    "DistributedDataset",
    "GPTDataset",
    "GPTDatasetConfig",
    "HybridCPMegatronPretrainingSampler",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "LowLevelDataset",
    "MegatronDataset",
    "MegatronFullValidationSampler",
    "MegatronPretrainingRandomSampler",
    "MegatronPretrainingSampler",
    "MidLevelDataset",
    "MockGPTDataset",
    "MockGPTLowLevelDataset",
    "ObjectStorageConfig",
    "RandomSeedDataset",
    "S3Client",
    "S3Config",
    "Split",
    "TopLevelDataset",
    "_BinReader",
    "_FileBinReader",
    "_IndexReader",
    "_MMapBinReader",
    "_MultiStorageClientBinReader",
    "_S3BinReader",
    "_build_document_index",
    "_build_shuffle_index",
    "_get_ltor_masks_and_position_ids",
    "_get_size_per_split_per_dataset",
    "build_blending_indices",
    "build_exhaustive_blending_indices",
    "build_pretraining_data_loader",
    "build_sample_idx",
    "build_sample_idx_int32",
    "build_sample_idx_int64",
    "compile_helpers",
    "convert_split_vector_to_split_matrix",
    "get_bin_path",
    "get_blend_from_list",
    "get_idx_path",
    "helpers",
    "is_object_storage_path",
    "normalize",
    "parse_and_normalize_split",
]
