"""Indices in cache files: loaded, or built by one process while the others wait."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.cache import megatron as cache
from millrace.errors import DataError
from millrace.megatron.errors import DataAssertionError, MissingFileError
from millrace.megatron.utils import log_on_first_rank

logger = logging.getLogger(__name__)

Check = Callable[[cache.Arrays], None]


def prepare_arrays(
    files: cache.CacheSet | None, what: str, check: Check, build: Callable[[], cache.Arrays]
) -> cache.Arrays:
    """Arrays from the cache; where they are missing or do not fit, they are built and cached.

    Args:
        files: where they are cached; None: nowhere.
        what: they are, for the log, such as "GPTDataset train indices".
    """

    def build_and_say(problem: str) -> cache.Arrays:
        if problem:
            message = f"The cached {what} do not fit, and are replaced: {problem}"
            log_on_first_rank(logger, logging.WARNING, message)
        log_on_first_rank(logger, logging.INFO, f"Build and save the {what}")
        return build()

    if files is None:
        message = f"The {what} are not saved: path_to_cache is empty"
        log_on_first_rank(logger, logging.WARNING, message)
        return build_and_say("")
    arrays, is_built = cache.load_or_build(files, check, build_and_say)
    if not is_built:
        _say_loaded(files, what)
    return arrays


def open_arrays(files: cache.CacheSet, what: str, check: Check) -> cache.Arrays:
    """Arrays that must be in the cache; their description is not looked at.

    Raises:
        MissingFileError: they are not there.
        DataAssertionError: they are damaged or do not fit.
    """
    try:
        arrays = {name: cache.load_array(files.path(name)) for name in files.arrays}
        check(arrays)
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{error.filename} is missing, and fast_cache_load or defer_npy_index_mmap builds "
            "nothing: build the cache without them first"
        ) from None
    except DataError as error:
        raise DataAssertionError(
            f"the cached {what} in {files.folder} do not fit: {error}. Remove {files.stem}-*, and "
            "build them without fast_cache_load and defer_npy_index_mmap"
        ) from None
    _say_loaded(files, what)
    return arrays


def _say_loaded(files: cache.CacheSet, what: str) -> None:
    log_on_first_rank(logger, logging.INFO, f"Load the {what}")
    for name in files.arrays:
        message = f"\tLoad the {name.replace('_', ' ')} from {files.path(name)}"
        log_on_first_rank(logger, logging.INFO, message)


@dataclass(frozen=True)
class MappedArrays:
    """Arrays of an object that are mapped from files: pickled by their paths."""

    paths: dict[str, str]

    KEY = "mapped_arrays"

    @classmethod
    def put_into(cls, state: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """Replaces mapped arrays in an object's state by their paths."""
        mapped = {
            name: str(state[name].filename)
            for name in names
            if isinstance(state[name], np.memmap) and state[name].filename is not None
        }
        return state | dict.fromkeys(mapped) | {cls.KEY: cls(mapped)}

    @classmethod
    def open_in(cls, state: dict[str, Any]) -> dict[str, Any]:
        """Undoes `put_into`."""
        mapped: MappedArrays = state.pop(cls.KEY)
        arrays = {name: cache.load_array(path) for name, path in mapped.paths.items()}
        return state | arrays
