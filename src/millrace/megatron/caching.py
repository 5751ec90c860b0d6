"""Indices in cache files: loaded, or built by one process while the others wait."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from millrace.cache import megatron as cache
from millrace.errors import DataError
from millrace.megatron.config import BlendedMegatronDatasetConfig
from millrace.megatron.errors import DataAssertionError, MissingFileError
from millrace.megatron.utils import Split, log_on_first_rank

logger = logging.getLogger(__name__)

_PATHS = "_paths_of_mapped_indices"  # in a pickle


class CachedIndices(ABC):
    """A dataset with indices as attributes, which are loaded from its cache or built.

    With `defer_npy_index_mmap` they are None until the first sample. In a pickle, mapped indices
    are paths.
    """

    _INDICES: ClassVar[tuple[str, ...]]
    config: BlendedMegatronDatasetConfig
    unique_description: str
    unique_description_hash: str

    @abstractmethod
    def _files(self) -> cache.CacheSet:
        """The cache files; without a folder, there is no cache."""

    @abstractmethod
    def _what(self) -> str:
        """The indices' name in the log, such as "GPTDataset train indices"."""

    @abstractmethod
    def _check(self, arrays: cache.Arrays) -> None:
        """Raises DataError if the arrays are not this dataset's."""

    @abstractmethod
    def _build(self) -> cache.Arrays:
        """Builds the indices."""

    def _cache_set(self, folder: str | None, split: Split) -> cache.CacheSet:
        return cache.CacheSet(
            folder=os.fspath(folder or ""),
            stem=f"{self.unique_description_hash}-{type(self).__name__}-{split.name}",
            description=self.unique_description,
            arrays=self._INDICES,
        )

    def _prepare_indices(self, is_trusted: bool) -> tuple[Any, ...]:
        """The indices in the order of their names; None for each if they are deferred.

        Indices of a trusted cache are never built.
        """
        if self.config.defer_npy_index_mmap:
            files = self._files()
            for name in self._INDICES:
                setattr(self, f"path_to_{name}", files.path(name))
            return (None,) * len(self._INDICES)
        arrays = self._load_trusted() if is_trusted else self._load_or_build()
        return tuple(arrays[name] for name in self._INDICES)

    def _open_deferred(self) -> None:
        arrays = self._load_trusted()
        for name in self._INDICES:
            setattr(self, name, arrays[name])

    def _load_trusted(self) -> cache.Arrays:
        """The indices of the cache, whatever its description says.

        Raises:
            MissingFileError: If a file is missing.
            DataAssertionError: If a file is damaged or does not fit.
        """
        files = self._files()
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
                f"the cached {self._what()} in {files.folder} do not fit: {error}. Remove "
                f"{files.stem}-*, and build them without fast_cache_load and defer_npy_index_mmap"
            ) from None
        self._log_load(files)
        return arrays

    def _load_or_build(self) -> cache.Arrays:
        files = self._files()
        if not files.folder:
            message = f"The {self._what()} are not saved: path_to_cache is empty"
            log_on_first_rank(logger, message, logging.WARNING)
            return self._log_and_build("")
        arrays, is_built = cache.load_or_build(files, self._check, self._log_and_build)
        if not is_built:
            self._log_load(files)
        return arrays

    def _log_and_build(self, problem: str) -> cache.Arrays:
        if problem:
            message = f"The cached {self._what()} do not fit, and are replaced: {problem}"
            log_on_first_rank(logger, message, logging.WARNING)
        log_on_first_rank(logger, f"Build and save the {self._what()}")
        return self._build()

    def _log_load(self, files: cache.CacheSet) -> None:
        log_on_first_rank(logger, f"Load the {self._what()}")
        for name in self._INDICES:
            message = f"\tLoad the {name.replace('_', ' ')} from {files.path(name)}"
            log_on_first_rank(logger, message)

    def __getstate__(self) -> dict[str, Any]:
        indices = {name: getattr(self, name) for name in self._INDICES}
        paths = {
            name: str(array.filename)
            for name, array in indices.items()
            if isinstance(array, np.memmap) and array.filename is not None
        }
        return self.__dict__ | dict.fromkeys(paths) | {_PATHS: paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        paths = state.pop(_PATHS)
        self.__dict__.update(state)
        for name, path in paths.items():
            setattr(self, name, cache.load_array(path))
