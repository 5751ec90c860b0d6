"""`MegatronDataset`, the base of all datasets over one token file."""

from __future__ import annotations

import contextlib
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
"""The source of a `MegatronDataset`."""

_PAD_TOKEN_ID = -1
"""The pad id if the tokenizer has none, or its pad token is another special token too."""


class MegatronDataset(ABC, torch.utils.data.Dataset):  # type: ignore[misc]
    """The base of datasets over one low-level dataset; a subclass makes the samples.

    Args:
        dataset: Low-level dataset, such as an `IndexedDataset`.
        dataset_path: Path prefix of the low-level dataset, or None.
        indices: int32 [elements], the elements to use; None: all.
        num_samples: Least number of samples; None: those of one epoch.
        index_split: Split of this dataset.
        config: Options.

    Attributes:
        unique_identifiers: Everything that decides the indices.
        unique_description: JSON text of the identifiers.
        unique_description_hash: MD5 of that text, which names the cached indices.
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
        self._pad_token_id = _pad_token_id(config.tokenizer, config.allow_ambiguous_pad_tokens)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The number of elements of the low-level dataset, which the splits share."""
        raise NotImplementedError

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: BlendedMegatronDatasetConfig) -> Any:
        """Opens the low-level dataset at a path prefix."""
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


def _pad_token_id(tokenizer: Any, allow_ambiguous: bool | None) -> Any:
    """The tokenizer's pad token, which is never trained on.

    A pad token that is another special token too would mask documents: then it warns, and gives an
    id that no token has unless `allow_ambiguous`.
    """
    try:
        pad = tokenizer.pad
    except Exception:  # The error of a tokenizer without a pad token is its own choice.
        pad = _PAD_TOKEN_ID
    if pad not in _other_special_tokens(tokenizer):
        return pad
    effect = "is masked wherever it occurs" if allow_ambiguous else "is not taken for padding"
    warnings.warn(
        f"The pad token id in the tokenizer collides with another special token id ({pad}): it "
        f"{effect}. Give the tokenizer a separate pad token, or see allow_ambiguous_pad_tokens",
        stacklevel=4,
    )
    return pad if allow_ambiguous else _PAD_TOKEN_ID


def _other_special_tokens(tokenizer: Any) -> list[Any]:
    tokens: list[Any] = []
    with contextlib.suppress(AttributeError, IndexError, ValueError):
        special = tokenizer.special_tokens_dict
        tokens = [token for name, token in special.items() if name != "pad_token"]
    if not tokens:
        for name in ("eos", "eod"):
            with contextlib.suppress(AttributeError, NotImplementedError):
                tokens.append(getattr(tokenizer, name))
    return tokens
