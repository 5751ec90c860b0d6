"""What datasets share: `MegatronDataset`, and indices from a cache, or built."""

import contextlib
import os
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from millrace.cache import megatron as cache
from millrace.errors import DataError
from millrace.megatron.errors import DataAssertionError, MissingFileError
from millrace.megatron.indexed import IndexedDataset
from millrace.megatron.utils import BlendedMegatronDatasetConfig, Split, log_on_first_rank

__all__ = ["_PAD_TOKEN_ID", "LowLevelDataset", "MegatronDataset"]

LowLevelDataset = IndexedDataset | Iterable[Any]
"""The source of a `MegatronDataset`."""

_PAD_TOKEN_ID = -1
"""The pad id if the tokenizer has none of its own."""


@dataclass(eq=False, repr=False)
class MegatronDataset(ABC, torch.utils.data.Dataset):  # type: ignore[misc]
    """Base of datasets over one low-level dataset; a subclass makes the samples.

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

    dataset: Any
    dataset_path: str | None
    indices: NDArray[np.int32]
    num_samples: int | None
    index_split: Split
    config: BlendedMegatronDatasetConfig
    _masks_pad: ClassVar[bool] = False

    def __post_init__(self) -> None:
        config = self.config
        identifiers: dict[str, Any] = {
            "class": type(self).__name__,
            "dataset_path": self.dataset_path,
            "num_samples": self.num_samples,
            "index_split": self.index_split.name,
        }
        identifiers |= {name: getattr(config, name) for name in self._key_config_attributes()}
        self.unique_identifiers = OrderedDict(identifiers)
        self.unique_description, self.unique_description_hash = cache.describe(identifiers)
        masks_pad = self._masks_pad or config.allow_ambiguous_pad_tokens
        self._pad_token_id = _pad_token_id(config.tokenizer, masks_pad)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The number of elements, which the splits share."""
        raise NotImplementedError

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: BlendedMegatronDatasetConfig) -> Any:
        """Opens the low-level dataset at a path prefix."""
        raise NotImplementedError

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Options that decide the indices, in the description's order."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, idx: Any) -> Mapping[str, Any]: ...


def _pad_token_id(tokenizer: Any, allow_ambiguous: bool | None) -> Any:
    """The tokenizer's pad token, which is never trained on. If it is another special token too,
    this warns and, unless `allow_ambiguous`, returns an id that no token has."""
    pad = _PAD_TOKEN_ID
    with contextlib.suppress(Exception):  # A tokenizer without a pad token chooses its error.
        pad = tokenizer.pad
    if pad not in _other_special_tokens(tokenizer):
        return pad
    effect = "is masked wherever it occurs" if allow_ambiguous else "is not taken for padding"
    warnings.warn(
        f"The pad token id in the tokenizer collides with another special token id ({pad}): it "
        f"{effect}. Give the tokenizer a separate pad token, or see allow_ambiguous_pad_tokens",
        stacklevel=5,
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


def filled_bounds(bounds: ArrayLike, size: int) -> dict[str, NDArray[np.int32]]:
    """`cu_seqlens` [size], where documents start, filled up with their end, and `max_seqlen`."""
    starts = np.asarray(bounds, np.int32)
    if len(starts) > size:  # Too many: leave out the empty documents.
        starts = np.unique(starts)
    cu_seqlens = np.full(size, starts[-1], np.int32)
    cu_seqlens[: len(starts)] = starts
    return {"cu_seqlens": cu_seqlens, "max_seqlen": np.asarray((starts[1:] - starts[:-1]).max())}


class CachedIndices(ABC):
    """A dataset with indices as attributes; in a pickle, mapped ones are paths."""

    _INDICES: ClassVar[tuple[str, ...]]
    config: BlendedMegatronDatasetConfig
    unique_identifiers: Any

    @abstractmethod
    def _check(self, arrays: cache.Arrays) -> None:
        """Raises DataError for another dataset's arrays."""

    @abstractmethod
    def _build(self) -> cache.Arrays: ...

    def _prepare_indices(
        self, folder: str | None, split: Split, description: str, *, is_trusted: bool
    ) -> tuple[Any, ...]:
        """The indices in the order of `_INDICES`; None for each if they are deferred. Without a
        folder there is no cache. Indices of a trusted cache are never built."""
        self._description = description
        identifiers, folder = self.unique_identifiers, os.fspath(folder or "")
        self._files = cache.CacheSet.of(folder, identifiers, split.name, self._INDICES)
        if self.config.defer_npy_index_mmap:
            for name in self._INDICES:
                setattr(self, f"path_to_{name}", self._files.path(name))
            return (None,) * len(self._INDICES)
        arrays = self._load_trusted() if is_trusted else self._load_or_build()
        return tuple(arrays[name] for name in self._INDICES)

    def _open_deferred(self) -> None:
        """Opens the indices, if that was left to the first sample."""
        if vars(self)[self._INDICES[0]] is None:
            vars(self).update(self._load_trusted())

    def _load_trusted(self) -> cache.Arrays:
        """The cached indices, whatever the description says."""
        files = self._files
        try:
            arrays = {name: cache.load_array(files.path(name)) for name in self._INDICES}
            self._check(arrays)
        except FileNotFoundError as error:
            raise MissingFileError(
                f"{error.filename} is missing, and fast_cache_load or defer_npy_index_mmap builds "
                "nothing: build the cache without them first"
            ) from None
        except DataError as error:
            raise DataAssertionError(
                f"the cached {self._description} in {files.folder} do not fit: {error}. Remove "
                f"{files.stem}-*, and build them without fast_cache_load and defer_npy_index_mmap"
            ) from None
        log_on_first_rank(f"Load the {self._description}")
        return arrays

    def _load_or_build(self) -> cache.Arrays:
        if not self._files.folder:
            problem = f"The {self._description} are not saved: path_to_cache is empty"
            log_on_first_rank(problem, is_warning=True)
            return self._log_and_build("")
        arrays, is_built = cache.load_or_build(self._files, self._check, self._log_and_build)
        if not is_built:
            log_on_first_rank(f"Load the {self._description}")
        return arrays

    def _log_and_build(self, problem: str) -> cache.Arrays:
        if problem:
            problem = f"The cached {self._description} do not fit, and are replaced: {problem}"
            log_on_first_rank(problem, is_warning=True)
        log_on_first_rank(f"Build and save the {self._description}")
        return self._build()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in self._INDICES:
            if isinstance(array := state[name], np.memmap) and array.filename is not None:
                state[name] = str(array.filename)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in self._INDICES:
            if isinstance(path := state[name], str):
                setattr(self, name, cache.load_array(path))
