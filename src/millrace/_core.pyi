"""The native core as Python sees it. Call it through `millrace._native`, which checks arguments."""

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

_State = tuple[NDArray[np.uint32], int]
_Blend = tuple[NDArray[np.int16], NDArray[np.int64]]

def shuffled_int32(
    values: NDArray[np.int32], key: NDArray[np.uint32], position: int
) -> tuple[NDArray[np.int32], _State]: ...
def shuffled_uint32(
    values: NDArray[np.uint32], key: NDArray[np.uint32], position: int
) -> tuple[NDArray[np.uint32], _State]: ...
def shuffled_int64(
    values: NDArray[np.int64], key: NDArray[np.uint32], position: int
) -> tuple[NDArray[np.int64], _State]: ...
def shuffled_ranges_int32(
    ranges: NDArray[np.int64], key: NDArray[np.uint32], position: int
) -> tuple[NDArray[np.int32], _State]: ...
def shuffled_ranges_uint32(
    ranges: NDArray[np.int64], key: NDArray[np.uint32], position: int
) -> tuple[NDArray[np.uint32], _State]: ...
def shuffled_ranges_int64(
    ranges: NDArray[np.int64], key: NDArray[np.uint32], position: int
) -> tuple[NDArray[np.int64], _State]: ...
def draw_targets(
    first: int, count: int, key: NDArray[np.uint32], position: int
) -> tuple[NDArray[np.int64], _State]: ...
def sample_index_int32(
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sequence_length: int,
    num_samples: int,
    add_extra_token: bool,
    allow_partial: bool,
) -> NDArray[np.int32]: ...
def sample_index_int64(
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sequence_length: int,
    num_samples: int,
    add_extra_token: bool,
    allow_partial: bool,
) -> NDArray[np.int64]: ...
def blend_by_weights(weights: NDArray[np.float64], size: int, threads: int) -> _Blend: ...
def blend_by_sizes(sizes: NDArray[np.int64], total: int, threads: int) -> _Blend: ...
def copy_pieces(
    bytes: NDArray[np.uint8],  # noqa: A002
    byte_offsets: NDArray[np.int64],
    byte_counts: NDArray[np.int64],
) -> NDArray[np.uint8]: ...
def read_pieces(
    descriptor: int,
    num_bytes: int,
    byte_offsets: NDArray[np.int64],
    byte_counts: NDArray[np.int64],
) -> NDArray[np.uint8]: ...
def copy_sequences(
    bytes: NDArray[np.uint8],  # noqa: A002
    pointers: NDArray[np.int64],
    lengths: NDArray[np.int32],
    ids: NDArray[np.int64],
    token_size: int,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]: ...
def first_bad_sequence(
    lengths: NDArray[np.int32], pointers: NDArray[np.int64], token_size: int, byte_offset: int
) -> tuple[int, int]: ...
def first_bad_document(entries: NDArray[np.int64], num_sequences: int) -> int: ...
def map_file(descriptor: int, size: int) -> NDArray[np.uint8]: ...
def start_writeback(file: int, start: int, size: int) -> None: ...

class TokenBuffer:
    is_busy: bool
    def __init__(
        self, dtype: str, capacity: int, file: int = -1, has_modes: bool = True
    ) -> None: ...
    def append(self, tokens: Any) -> int: ...
    def add_sequences(
        self, tokens: Any, lengths: Any = None, modes: Any = None, ends_document: bool = False
    ) -> bool: ...
    def add_document(self, tokens: Any, lengths: Any) -> bool: ...
    def add_documents(self, tokens: Any, lengths: NDArray[np.int64]) -> bool: ...
    def end_document(self, is_alone: bool = False) -> bool: ...
    def count(self, num_sequences: int, num_documents: int, num_tokens: int) -> None: ...
    def view(self) -> NDArray[np.uint8]: ...
    def take_entries(self) -> tuple[NDArray[np.int32], NDArray[np.int8], NDArray[np.int64]]: ...
    def flush(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...
    @property
    def is_full(self) -> bool: ...
    @property
    def has_open_document(self) -> bool: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def num_documents(self) -> int: ...

class SequenceViews:
    def __init__(
        self,
        tokens: NDArray[Any],
        sequence_pointers: NDArray[np.int64],
        sequence_lengths: NDArray[np.int32],
    ) -> None: ...
    def one(self, index: SupportsIndex) -> NDArray[Any]: ...
    def many(self, start: int, stop: int, step: int) -> list[NDArray[Any]]: ...

class SampleSource:
    def __init__(
        self,
        tokens: NDArray[Any],
        sequence_pointers: NDArray[np.int64],
        sequence_lengths: NDArray[np.int32],
        document_index: NDArray[np.int32],
        sample_index: NDArray[Any],
        shuffle_index: NDArray[Any],
        num_bytes: int,
    ) -> None: ...

_Samples = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]

def look_up_draws(
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    sample_numbers: NDArray[np.int64],
) -> tuple[NDArray[np.int16], NDArray[np.int64]]: ...
def find_pieces(
    source: SampleSource,
    sample_numbers: NDArray[np.int64],
    sequence_length: int,
    add_extra_token: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]: ...
def fill_rows(
    tokens: NDArray[Any],
    ends: NDArray[np.int64],
    sequence_length: int,
    add_extra_token: bool,
    pad_token: int | None,
    eod_token: int | None,
    reset_position_ids: bool,
    eod_mask_loss: bool,
) -> _Samples: ...
def gather_samples(
    sources: tuple[SampleSource, ...],
    source_numbers: NDArray[np.int64],
    sample_numbers: NDArray[np.int64],
    sequence_length: int,
    add_extra_token: bool,
    pad_token: int | None,
    eod_token: int | None,
    reset_position_ids: bool,
    eod_mask_loss: bool,
) -> _Samples: ...
