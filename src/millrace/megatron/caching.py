"""Indices in cache files: loaded, or built by one process while the others wait."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from millrace.cache import megatron as cache
from millrace.errors import DataError
from millrace.megatron.config import BlendedMegatronDatasetConfig
from millrace.megatron.errors import DataAssertionError, MissingFileError
from millrace.megatron.utils import Split, log_on_first_rank

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
    def _check(self, arrays: cache.Arrays) -> None:
        """Raises DataError if the arrays are not this dataset's."""

    @abstractmethod
    def _build(self) -> cache.Arrays: ...

    def _prepare_indices(
        self, folder: str | None, split: Split, description: str, *, is_trusted: bool
    ) -> tuple[Any, ...]:
        """The indices in the order of their names; None for each if they are deferred.

        Without a folder there is no cache. Indices of a trusted cache are never built. The log has
        the description.
        """
        self._description = description
        self._files = cache.CacheSet(
            folder=os.fspath(folder or ""),
            stem=f"{self.unique_description_hash}-{type(self).__name__}-{split.name}",
            description=self.unique_description,
            arrays=self._INDICES,
        )
        if self.config.defer_npy_index_mmap:
            for name in self._INDICES:
                setattr(self, f"path_to_{name}", self._files.path(name))
            return (None,) * len(self._INDICES)
        arrays = self._load_trusted() if is_trusted else self._load_or_build()
        return tuple(arrays[name] for name in self._INDICES)

    def _open_deferred(self) -> None:
        for name, array in self._load_trusted().items():
            setattr(self, name, array)

    def _load_trusted(self) -> cache.Arrays:
        """The indices of the cache, whatever its description says."""
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
        self._log_load()
        return arrays

    def _load_or_build(self) -> cache.Arrays:
        if not self._files.folder:
            log_on_first_rank(
                f"The {self._description} are not saved: path_to_cache is empty", is_warning=True
            )
            return self._log_and_build("")
        arrays, is_built = cache.load_or_build(self._files, self._check, self._log_and_build)
        if not is_built:
            self._log_load()
        return arrays

    def _log_and_build(self, problem: str) -> cache.Arrays:
        if problem:
            log_on_first_rank(
                f"The cached {self._description} do not fit, and are replaced: {problem}",
                is_warning=True,
            )
        log_on_first_rank(f"Build and save the {self._description}")
        return self._build()

    def _log_load(self) -> None:
        log_on_first_rank(f"Load the {self._description}")
        for name in self._INDICES:
            log_on_first_rank(f"\tLoad the {name.replace('_', ' ')} from {self._files.path(name)}")

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
