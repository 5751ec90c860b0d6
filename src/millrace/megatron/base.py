"""`MegatronDataset`, the base of all datasets over one token file."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.cache import megatron as cache
from millrace.megatron.config import BlendedMegatronDatasetConfig
from millrace.megatron.indexed import IndexedDataset
from millrace.megatron.utils import Split

LowLevelDataset = IndexedDataset | Iterable[Any]
"""What a `MegatronDataset` draws from."""

IMPOSSIBLE_PAD_TOKEN = -1
"""The pad id where the tokenizer has none, or one that is another special token too."""


class MegatronDataset(ABC, torch.utils.data.Dataset):  # type: ignore[misc]
    """The base of datasets over one low level dataset; subclasses say what a sample is.

    Args:
        dataset: the low level dataset, such as an `IndexedDataset`.
        dataset_path: its path prefix, or None.
        indices: int32 [elements], which elements of it to use; None: all.
        num_samples: to have at least; None: what one epoch gives.
        index_split: the split that this is.
        config: the options.

    Attributes:
        unique_identifiers: what decides the indices.
        unique_description: their JSON text.
        unique_description_hash: its MD5, the name of the cached indices.
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["dataset_path"] = dataset_path
        self.unique_identifiers["num_samples"] = num_samples
        self.unique_identifiers["index_split"] = index_split.name
        for name in self._key_config_attributes():
            self.unique_identifiers[name] = getattr(config, name)
        self.unique_description, self.unique_description_hash = cache.describe(
            self.unique_identifiers
        )
        self._pad_token_id = pad_token_id(config.tokenizer, config.allow_ambiguous_pad_tokens)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The number of elements of the low level dataset, which the splits share."""
        raise NotImplementedError

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: BlendedMegatronDatasetConfig) -> Any:
        """Opens the low level dataset at a path prefix."""
        raise NotImplementedError

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """The options that decide the indices, in the order of the description."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def __getitem__(self, idx: Any) -> Mapping[str, Any]:
        """A sample."""


def pad_token_id(tokenizer: Any, allow_ambiguous: bool | None) -> Any:
    """The token that is never trained on.

    It is the tokenizer's pad token. Where that is another special token too, documents would be
    taken for padding: then it is an id that no token has, unless `allow_ambiguous`. Both warn.
    """
    try:
        pad = tokenizer.pad
    except Exception:  # a tokenizer without one raises what it likes
        pad = IMPOSSIBLE_PAD_TOKEN
    if pad not in _other_special_tokens(tokenizer):
        return pad
    kept = "is masked wherever it occurs" if allow_ambiguous else "is not taken for padding"
    warnings.warn(
        f"The pad token id in the tokenizer collides with another special token id ({pad}): it "
        f"{kept}. Give the tokenizer a pad token of its own, or see allow_ambiguous_pad_tokens",
        stacklevel=4,
    )
    return pad if allow_ambiguous else IMPOSSIBLE_PAD_TOKEN


def _other_special_tokens(tokenizer: Any) -> list[Any]:
    try:
        named = tokenizer.special_tokens_dict
        tokens = [token for name, token in named.items() if name != "pad_token"]
    except (AttributeError, IndexError, ValueError):
        tokens = []
    if tokens:
        return tokens
    for name in ("eos", "eod"):
        try:
            tokens.append(getattr(tokenizer, name))
        except (AttributeError, NotImplementedError):
            continue
    return tokens
