"""The token files of a run in the instant order, each opened when it is first drawn."""

import bisect
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.cache.loss_files import loss_checksum
from millrace.checks import absolute_path
from millrace.deferred import cached_property
from millrace.errors import DataError
from millrace.files import check_split, checksum
from millrace.names import BIN, IDX
from millrace.order import part_range
from millrace.order.splits import Range
from millrace.provenance import check_tokenizers, read_tokenizer
from millrace.provenance.tokenizers import TokenizerRecord
from millrace.run.instant_config import InstantConfig
from millrace.storage import LOCAL, storage_of
from millrace.store import IndexedDataset
from millrace.store.info import read_info
from millrace.store.layout import count_tokens, read_header


class SourceFile:
    """The token file of a source.

    Args:
        name: Name of the source.
        config: The configuration.
        tokenizers: Tokenizers of the files that were opened before, which all files share.

    Attributes:
        prefix: Absolute path prefix of the pair.
        is_remote, look_ahead: As of `StoredTokens`.
        dtype: Dtype of the tokens as they are read.
        num_tokens: Number of tokens, by the size of the file.
        part: First token of the source's part, and end, before they are moved to documents.

    Raises:
        DataError: A file that is missing, or not a whole number of tokens.
    """

    def __init__(
        self, name: str, config: InstantConfig, tokenizers: list[TokenizerRecord | None]
    ) -> None:
        source = config.sources[name]
        self.prefix = sys.intern(absolute_path(source.prefix))  # the run file's own text, mostly
        check_split(self.prefix)
        self._name, self._config, self._tokenizers = name, config, tokenizers
        dtype = source.dtype or config.dtype
        path, index = self.prefix + BIN, self.prefix + IDX
        storage = storage_of(path, config.storage)
        self.is_remote = storage is not LOCAL
        self.look_ahead = 4 * getattr(storage, "requests", 64)
        try:
            size = storage.stat(path).size
            if dtype is None:
                dtype = read_header(storage.open(index, "file"), index).dtype
        except FileNotFoundError as error:
            raise DataError(
                f"source {name}: {error.filename} not found: give the pair's path without .bin or "
                ".idx, in full or from the working directory"
            ) from None
        self.dtype: np.dtype[Any] = dtype
        self.num_tokens = count_tokens(f"source {name}: {path}", size, self.dtype)
        self.part = part_range(self.num_tokens, source.part)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "store"}

    @cached_property
    def store(self) -> IndexedDataset:
        """The open file; an error if it is not what it was, or of another tokenizer."""
        access, storage = self._config.access, self._config.storage
        store = IndexedDataset(self.prefix, access=access, storage=storage)
        if (store.num_tokens, store.dtype) != (self.num_tokens, self.dtype):
            raise DataError(
                f"source {self._name}: {self.prefix} has {store.num_tokens} tokens, {store.dtype}; "
                f"the run takes it for {self.num_tokens}, {self.dtype}. Correct the dtype, or "
                "restore the file"
            )
        _ = self._sums  # of now: other files may take their place
        if not self._config.any_tokenizer:
            records = [*self._tokenizers, read_tokenizer(self.prefix, storage)]
            check_tokenizers(records)
            self._tokenizers.append(records[-1])
        return store

    @cached_property
    def _sums(self) -> str | None:
        info = read_info(self.prefix, self._config.storage)
        if info is None or info.checksums is None:
            return None
        return checksum([f"{info.checksums.bin} {info.checksums.idx}".encode()])

    @cached_property
    def loss_ranges(self) -> str | None:
        """The checksum of its loss ranges, if they are applied; no token file is opened for it."""
        if self._config.loss_ranges != "apply":
            return None
        return loss_checksum(self.prefix, self._config.storage)

    @property
    def content(self) -> str:
        """A hash of the sidecar's checksums; without them, of the sizes and of parts of the files,
        which are opened for it."""
        return self._sums or self.store.fingerprint

    @property
    def _file(self) -> IndexedDataset:
        return self.store  # as of a `StoredTokens`, for `LossRanges`

    def sequences_in(self, start: int, stop: int) -> tuple[NDArray[np.int64], ...]:
        """The sequences that hold tokens [start, stop). See `InstantOrder`."""
        store = self.store
        pointers: Any
        pointers, size = store.sequence_pointers, self.dtype.itemsize
        # NumPy's search would copy all pointers, which are not aligned in the file.
        first = bisect.bisect_right(pointers, start * size) - 1
        end = max(bisect.bisect_left(pointers, stop * size), first + 1)
        store.check_sequences(first, end)  # a damaged index is an error
        numbers = np.arange(first, end)
        return numbers, pointers[first:end] // size, store.documents_of(numbers)

    def document_start(self, token: int) -> int:
        """The first token of a document from a token on; the number of tokens behind the last."""
        if token in (0, self.num_tokens):
            return token  # without opening the file
        store = self.store

        def start(document: int) -> int:
            sequence, _ = store.check_documents(document, document)  # a damaged index is an error
            return store.check_sequences(sequence, sequence)[0] // self.dtype.itemsize

        documents = range(store.num_documents + 1)
        return start(bisect.bisect_left(documents, token, key=start))


@dataclass(eq=False, slots=True)
class SourceRange:
    """The tokens of a source that a split draws from: see `Phases`."""

    file: SourceFile
    bounds: Range  # first token, and end, before they are moved to the starts of documents
    _tokens: Range | None = None  # once the ends are moved

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the tokens of the samples, as plain values."""
        file = self.file
        identity = {"tokens": file.num_tokens, "dtype": file.dtype.name, "range": [*self.bounds]}
        return {**identity, "content": file.content}

    @property
    def num_tokens(self) -> int:
        first, end = self.tokens
        return end - first

    @property
    def tokens(self) -> Range:
        """First token, and end. The file is opened, unless it is drawn from as a whole."""
        if self._tokens is None:
            first, end = self.bounds
            self._tokens = self.file.document_start(first), self.file.document_start(end)
        return self._tokens
