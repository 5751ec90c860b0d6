"""Token files under Megatron-LM's names."""

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from millrace import store
from millrace.checks import SCHEME, shown
from millrace.errors import ConfigError, DataError
from millrace.megatron.bin_readers import (
    BUCKETS,
    ObjectStorageConfig,
    S3Config,
    _BinReader,
    _FileBinReader,
    _MMapBinReader,
    _MultiStorageClientBinReader,
    _S3BinReader,
    storage_in,
)
from millrace.megatron.errors import (
    ConfigAssertionError,
    DataAssertionError,
    MissingFileError,
    as_assertions,
    require,
)
from millrace.storage import Storage, exists, storage_of

__all__ = [
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "ObjectStorageConfig",
    "S3Config",
    "_BinReader",
    "_FileBinReader",
    "_IndexReader",
    "_MMapBinReader",
    "_MultiStorageClientBinReader",
    "_S3BinReader",
    "get_bin_path",
    "get_idx_path",
]


class _IndexReader:
    """The index of a token file: `IndexedDataset.index`. `token_file` is the pair, if open."""

    def __init__(
        self,
        idx_path: str,
        multimodal: bool,
        sequences_per_dataset: tuple[int, int] | None = None,
        dtype_code: int | None = None,
        token_file: store.IndexedDataset | None = None,
    ) -> None:
        if token_file is None:
            token_file = _open(os.fspath(idx_path).removesuffix(".idx"), mmap=True)
        if multimodal and token_file.sequence_modes is None:
            raise DataAssertionError(f"{idx_path} holds no modes; open it without multimodal")
        self.dtype: Any = token_file.dtype.type
        self.dtype_size = token_file.dtype.itemsize
        self.sequence_count = token_file.header.num_sequences
        self.document_count = token_file.header.num_document_entries
        self.sequence_lengths = token_file.sequence_lengths
        self.sequence_pointers = token_file.sequence_pointers
        self.document_indices = token_file.document_indices
        self.sequence_modes = token_file.sequence_modes if multimodal else None
        counts = (self.sequence_count, self.document_count)
        if sequences_per_dataset and tuple(sequences_per_dataset) != counts:
            raise DataAssertionError(
                f"{idx_path} has {counts[0]} sequences and {counts[1]} document entries; "
                f"sequences_per_dataset says {tuple(sequences_per_dataset)}. Count them again"
            )

    def __len__(self) -> int:
        return self.sequence_count

    def __getitem__(self, idx: Any) -> tuple[Any, Any, Any]:
        """A sequence's pointer, length and mode (None in a file without modes)."""
        mode = None if self.sequence_modes is None else self.sequence_modes[idx]
        return self.sequence_pointers[idx], self.sequence_lengths[idx], mode


class IndexedDataset(torch.utils.data.Dataset):  # type: ignore[misc]
    """The sequences of a `.bin`/`.idx` pair.

    Args:
        path_prefix: Path of the pair, without `.bin` or `.idx`.
        multimodal: Whether to give the sequences' modes, which the file must hold.
        mmap: Whether to map the `.bin`, or use positioned reads.
        object_storage_config, s3_config: Options of a pair in a bucket, `s3://BUCKET/PREFIX`, which
            it needs; `mmap` must be False.
        fast_cache_load: Ignored; opening reads only a few bytes.
        sequences_per_dataset: Expected numbers of sequences and of document entries.
        dtype_code: Ignored; the index says the dtype. (Megatron-LM trusts this code with
            sequences_per_dataset.)

    Raises:
        MissingFileError: If one of the files is missing.
        DataAssertionError: If a file is damaged or foreign, has other counts than expected, or has
            changed since it was pickled.
        ConfigAssertionError: If a path in a bucket comes without these options, or they with
            another path.
    """

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: Any = None,
        s3_config: Any = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: tuple[int, int] | None = None,
        dtype_code: int | None = None,
    ) -> None:
        super().__init__()
        files = path_prefix, multimodal, mmap, object_storage_config or s3_config
        self.initialize(*files, fast_cache_load, sequences_per_dataset, dtype_code)

    def initialize(
        self,
        path_prefix: str,
        multimodal: bool,
        mmap: bool,
        object_storage_config: Any,
        fast_cache_load: bool = False,
        sequences_per_dataset: tuple[int, int] | None = None,
        dtype_code: int | None = None,
    ) -> None:
        """Opens the files, by the class's arguments."""
        self.path_prefix = os.fspath(path_prefix)
        is_remote = self.path_prefix.startswith(BUCKETS)
        is_right = is_remote and not mmap and hasattr(object_storage_config, "path_to_idx_cache")
        require(
            is_right or not (object_storage_config or SCHEME.match(self.path_prefix)),
            f"{path_prefix} with mmap={mmap}, object_storage_config={object_storage_config}: paths "
            f"that begin with one of {', '.join(BUCKETS)} need mmap=False and an "
            "ObjectStorageConfig, others take none. Copy the pair to a file system, or change it",
        )
        self.multimodal, self.mmap = multimodal, mmap
        self.object_storage_config = object_storage_config
        self.fast_cache_load, self.dtype_code = fast_cache_load, dtype_code
        self.sequences_per_dataset = sequences_per_dataset
        storage = storage_in(object_storage_config.path_to_idx_cache) if is_remote else None
        self.token_file = _open(self.path_prefix, mmap, storage)
        idx_path, bin_path = get_idx_path(self.path_prefix), get_bin_path(self.path_prefix)
        self.index = _IndexReader(
            idx_path, multimodal, sequences_per_dataset, token_file=self.token_file
        )
        reader = self.token_file.reader
        self.bin_reader: _BinReader
        if is_remote:
            is_msc = self.path_prefix.startswith("msc://")
            kind = _MultiStorageClientBinReader if is_msc else _S3BinReader
            self.bin_reader = kind(bin_path, object_storage_config, reader)
        else:
            self.bin_reader = (_MMapBinReader if mmap else _FileBinReader)(bin_path, reader=reader)

    def __getstate__(self) -> tuple[Any, ...]:
        files = self.path_prefix, self.multimodal, self.mmap, self.object_storage_config
        expected = self.fast_cache_load, self.sequences_per_dataset, self.dtype_code
        return (*files, *expected), self.token_file.identity()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        arguments, identity = state
        self.initialize(*arguments)
        with as_assertions():
            self.token_file.check_identity(identity)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.index)

    def __getitem__(self, idx: Any) -> Any:
        """A sequence's tokens, [length]; a list of them for a slice without steps.

        For a multimodal file, a pair: tokens and mode, or a list and an int8 array of modes. An
        empty slice is a list of one empty array, as in Megatron-LM.
        """
        if isinstance(idx, (int, np.integer)):
            pointer, length, mode = self.index[idx]
            tokens = self._read(length, pointer)
            return tokens if mode is None else (tokens, mode)
        if not isinstance(idx, slice):
            raise TypeError(f"a sequence's number is an int or a slice, not {type(idx).__name__}")
        start, _, step = idx.indices(len(self))
        if step != 1:
            raise ConfigError(f"the slice {idx} has the step {step}; only runs can be read at once")
        ends = np.cumsum(self.index.sequence_lengths[idx], dtype=np.int64)
        count = 0 if len(ends) == 0 else int(ends[-1])
        sequences = np.split(self._read(count, self.index.sequence_pointers[start]), ends[:-1])
        modes = self.index.sequence_modes
        return sequences if modes is None else (sequences, modes[idx])

    def get(self, idx: Any, offset: int = 0, length: Any = None) -> Any:
        """Tokens [offset, offset + length) of a sequence; without a length, all from `offset` on.
        For a multimodal file, a pair: tokens and mode.

        Raises:
            IndexError: If there is no such sequence.
            ConfigAssertionError: If the span lies outside the sequence. (Megatron-LM reads on.)
        """
        pointer, available, mode = self.index[idx]
        count = available - offset if length is None else length
        require(
            offset >= 0 and count >= 0 and offset + count <= available,
            f"tokens [{offset}, {offset + count}) of sequence {idx} of {self.path_prefix} were "
            f"requested; it has {available}",
        )
        tokens = self._read(count, int(pointer) + int(offset) * self.index.dtype_size)
        return tokens if mode is None else (tokens, mode)

    def _read(self, count: Any, offset: Any) -> NDArray[Any]:
        return self.bin_reader.read(dtype=self.index.dtype, count=count, offset=offset)

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """int32 [sequences], in tokens."""
        return self.index.sequence_lengths

    def get_document_indices(self) -> NDArray[np.int64]:
        """int64 [documents + 1]: the first sequence of each document, and their number."""
        return self.index.document_indices

    document_indices = property(get_document_indices)

    def set_document_indices(self, document_indices: NDArray[np.int64]) -> None:
        """Replaces the document indices, in memory alone."""
        self.index.document_indices = document_indices

    @property
    def sequence_modes(self) -> NDArray[np.int8]:
        """int8 [sequences]; a ConfigAssertionError if the file was not opened as multimodal."""
        if self.index.sequence_modes is None:
            raise ConfigAssertionError(f"{self.path_prefix} was opened without multimodal=True")
        return self.index.sequence_modes

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files exist."""
        storage = storage_of(path_prefix)
        return all(exists(storage, path_prefix + ending) for ending in (".idx", ".bin"))


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair, which `finalize` publishes.

    Args:
        bin_path: PREFIX.bin.
        dtype: NumPy type of the tokens in the file.
        multimodal: Whether to store a mode for each sequence.

    Raises:
        MissingFileError: If the folder does not exist.
        ConfigAssertionError: If the path does not end in `.bin`, or the format lacks the dtype.
    """

    def __init__(self, bin_path: str, dtype: Any = np.int32, multimodal: bool = False) -> None:
        self._prefix, ending = os.path.splitext(os.fspath(bin_path))
        require(ending == ".bin", f"{bin_path} must end in .bin: a pair is PREFIX.bin, PREFIX.idx")
        if not os.path.isdir(os.path.dirname(self._prefix) or "."):
            raise MissingFileError(f"the folder of {bin_path} does not exist; create it first")
        self.dtype = dtype
        self.multimodal = multimodal
        with as_assertions():
            self._builder = store.IndexedDatasetBuilder(self._prefix, dtype, multimodal=multimodal)

    def add_item(self, tensor: ArrayLike, mode: int = 0) -> None:
        """Appends a sequence to the open document.

        Args:
            tensor: Tokens of any shape: whatever `numpy.array(tensor, dtype)` takes unchanged, such
                as tensors, nested lists, strings of digits and whole floats.
            mode: Mode of the sequence, in a multimodal file.

        Raises:
            ConfigAssertionError: If the dtype cannot hold a token.
        """
        with as_assertions():
            self._builder.add_sequence(_as_tokens(tensor, self.dtype), mode)

    def add_document(
        self, tensor: ArrayLike, lengths: ArrayLike, modes: ArrayLike | None = None
    ) -> None:
        """Appends a whole document.

        Args:
            tensor: Tokens of all its sequences, as in `add_item`.
            lengths: Integers [sequences], in tokens.
            modes: Integers [sequences], in a multimodal file; None: 0. (Megatron-LM fails on None.)

        Raises:
            ConfigAssertionError: If the dtype cannot hold a token, or the lengths have another sum.
        """
        with as_assertions():
            self._builder.add_document(_as_tokens(tensor, self.dtype), lengths, modes)

    def end_document(self) -> None:
        """Ends the open document."""
        self._builder.end_document()

    def add_index(self, path_prefix: str) -> None:
        """Appends all documents of another pair of the same dtype.

        Raises:
            MissingFileError: If the pair does not exist.
            ConfigAssertionError: If it has another dtype, or only one of the two has modes.
        """
        if not IndexedDataset.exists(path_prefix):
            raise MissingFileError(f"{path_prefix}.idx or .bin does not exist")
        with as_assertions():
            self._builder.add_index(path_prefix)

    def finalize(self, idx_path: str) -> None:
        """Writes the index, whose path has the prefix of `bin_path`, and publishes the pair."""
        require(
            os.fspath(idx_path) == get_idx_path(self._prefix),
            f"the index of {self._prefix}.bin is {self._prefix}.idx, not {idx_path}",
        )
        with as_assertions():
            self._builder.finalize()


def get_idx_path(path_prefix: str) -> str:
    """PREFIX.idx."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """PREFIX.bin."""
    return path_prefix + ".bin"


def _open(prefix: str, mmap: bool, storage: Storage | None = None) -> store.IndexedDataset:
    try:
        return store.IndexedDataset(prefix, access="mmap" if mmap else "file", storage=storage)
    except DataError as error:
        kind = DataAssertionError if IndexedDataset.exists(prefix) else MissingFileError
        raise kind(str(error)) from None


def _as_tokens(tokens: Any, dtype: Any) -> NDArray[Any]:
    """`numpy.array(tokens, dtype)` as [tokens]; ConfigError if that changes a token."""
    try:
        array = np.asarray(tokens)
        if array.dtype.kind in "iu":  # The builder checks that they fit.
            return array.reshape(-1)
        with np.errstate(invalid="ignore"):  # NaN and infinity: the comparison refuses them.
            converted = np.array(tokens, dtype)
        if array.dtype.kind != "c" and (
            converted.dtype.kind == "f" or np.array_equal(converted, np.array(tokens, np.float64))
        ):
            return converted.reshape(-1)
        problem = "not all are whole numbers within its limits"
    except (TypeError, ValueError, OverflowError) as error:
        problem = str(error)
    raise ConfigError(
        f"the tokens {shown(tokens)} cannot be stored as {np.dtype(dtype)}: {problem}"
    )
