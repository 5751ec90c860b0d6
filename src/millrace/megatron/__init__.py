"""Megatron-LM's own names, over millrace.

Change only the imports:

    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from millrace.megatron import GPTDataset, GPTDatasetConfig

Files, cached indices, samples and their order are Megatron-LM's, bit for bit (megatron-core
0.16.1). `docs/megatron.md` is the guide, `docs/differences.md` lists where Megatron-LM fails, and
`errors` lists the errors.
"""

import types

from millrace.megatron import helpers as helpers
from millrace.megatron.base import _PAD_TOKEN_ID as _PAD_TOKEN_ID
from millrace.megatron.base import LowLevelDataset as LowLevelDataset
from millrace.megatron.base import MegatronDataset as MegatronDataset
from millrace.megatron.blended import BlendedDataset as BlendedDataset
from millrace.megatron.blended import BlendedMegatronDatasetBuilder as BlendedMegatronDatasetBuilder
from millrace.megatron.blended import DistributedDataset as DistributedDataset
from millrace.megatron.blended import MidLevelDataset as MidLevelDataset
from millrace.megatron.blended import TopLevelDataset as TopLevelDataset
from millrace.megatron.blended import (
    _get_size_per_split_per_dataset as _get_size_per_split_per_dataset,
)
from millrace.megatron.gpt import GPTDataset as GPTDataset
from millrace.megatron.gpt import MockGPTDataset as MockGPTDataset
from millrace.megatron.gpt import MockGPTLowLevelDataset as MockGPTLowLevelDataset
from millrace.megatron.gpt import _build_document_index as _build_document_index
from millrace.megatron.gpt import _build_shuffle_index as _build_shuffle_index
from millrace.megatron.gpt import (
    _get_ltor_masks_and_position_ids as _get_ltor_masks_and_position_ids,
)
from millrace.megatron.helpers import build_blending_indices as build_blending_indices
from millrace.megatron.helpers import (
    build_exhaustive_blending_indices as build_exhaustive_blending_indices,
)
from millrace.megatron.helpers import build_sample_idx as build_sample_idx
from millrace.megatron.helpers import build_sample_idx_int32 as build_sample_idx_int32
from millrace.megatron.helpers import build_sample_idx_int64 as build_sample_idx_int64
from millrace.megatron.indexed import OBJECT_STORAGE_BIN_READERS as OBJECT_STORAGE_BIN_READERS
from millrace.megatron.indexed import IndexedDataset as IndexedDataset
from millrace.megatron.indexed import IndexedDatasetBuilder as IndexedDatasetBuilder
from millrace.megatron.indexed import _BinReader as _BinReader
from millrace.megatron.indexed import _FileBinReader as _FileBinReader
from millrace.megatron.indexed import _IndexReader as _IndexReader
from millrace.megatron.indexed import _MMapBinReader as _MMapBinReader
from millrace.megatron.indexed import _MultiStorageClientBinReader as _MultiStorageClientBinReader
from millrace.megatron.indexed import _S3BinReader as _S3BinReader
from millrace.megatron.indexed import get_bin_path as get_bin_path
from millrace.megatron.indexed import get_idx_path as get_idx_path
from millrace.megatron.samplers import (
    HybridCPMegatronPretrainingSampler as HybridCPMegatronPretrainingSampler,
)
from millrace.megatron.samplers import (
    MegatronFullValidationSampler as MegatronFullValidationSampler,
)
from millrace.megatron.samplers import (
    MegatronPretrainingRandomSampler as MegatronPretrainingRandomSampler,
)
from millrace.megatron.samplers import MegatronPretrainingSampler as MegatronPretrainingSampler
from millrace.megatron.samplers import RandomSeedDataset as RandomSeedDataset
from millrace.megatron.samplers import (
    build_pretraining_data_loader as build_pretraining_data_loader,
)
from millrace.megatron.utils import MSC_PREFIX as MSC_PREFIX
from millrace.megatron.utils import S3_PREFIX as S3_PREFIX
from millrace.megatron.utils import BlendedMegatronDatasetConfig as BlendedMegatronDatasetConfig
from millrace.megatron.utils import DType as DType
from millrace.megatron.utils import GPTDatasetConfig as GPTDatasetConfig
from millrace.megatron.utils import ObjectStorageConfig as ObjectStorageConfig
from millrace.megatron.utils import S3Client as S3Client
from millrace.megatron.utils import S3Config as S3Config
from millrace.megatron.utils import Split as Split
from millrace.megatron.utils import compile_helpers as compile_helpers
from millrace.megatron.utils import (
    convert_split_vector_to_split_matrix as convert_split_vector_to_split_matrix,
)
from millrace.megatron.utils import get_blend_from_list as get_blend_from_list
from millrace.megatron.utils import is_object_storage_path as is_object_storage_path
from millrace.megatron.utils import normalize as normalize
from millrace.megatron.utils import parse_and_normalize_split as parse_and_normalize_split
from millrace.store.layout import MAGIC as _INDEX_HEADER  # noqa: F401

__all__ = ["helpers"] + [
    name
    for name, value in list(globals().items())
    if not (name.startswith("__") or isinstance(value, types.ModuleType))
]
