"""The native core, with the dtypes of its arrays. Call it through `millrace._native`."""

from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from millrace.options import SampleOptions

_T = TypeVar("_T", bound=np.generic)
_Numbers = NDArray[np.int64]
_Lengths = NDArray[np.int32]
_Key = NDArray[np.uint32]
_State = tuple[_Key, int]
_Blend = tuple[NDArray[np.int16], _Numbers]
_Bytes = NDArray[np.uint8]
_Spans = tuple[_Numbers, _Numbers, _Numbers, _Numbers]

def shuffled_ranges(
    ranges: _Numbers, like: NDArray[_T], key: _Key, position: int
) -> tuple[NDArray[_T], _State]: ...
def draw_targets(first: int, count: int, key: _Key, position: int) -> tuple[_Numbers, _State]: ...
def sample_index(
    sequence_lengths: _Lengths,
    document_index: _Lengths,
    sequence_length: int,
    num_samples: int,
    add_extra_token: bool,
    allow_partial: bool,
    like: NDArray[_T],
) -> NDArray[_T]: ...
def blend_by_weights(weights: NDArray[np.float64], size: int, threads: int) -> _Blend: ...
def blend_by_sizes(sizes: _Numbers, total: int, threads: int) -> _Blend: ...
def look_up_draws(
    dataset_index: NDArray[np.int16], dataset_sample_index: _Numbers, sample_numbers: _Numbers
) -> _Blend: ...
def copy_pieces(data: _Bytes, byte_offsets: _Numbers, byte_counts: _Numbers) -> _Bytes: ...
def read_packed(
    descriptor: int, num_bytes: int, byte_offsets: _Numbers, byte_counts: _Numbers
) -> _Bytes: ...
def read_pieces(
    descriptor: int,
    byte_offsets: _Numbers,
    sizes: _Numbers,
    buffer: _Bytes,
    targets: _Numbers,
    or_words: bool = False,
) -> int: ...
def prefetch_mapped(data: _Bytes, byte_offsets: _Numbers, byte_counts: _Numbers) -> None: ...
def prefetch_file(
    descriptor: int, num_bytes: int, byte_offsets: _Numbers, byte_counts: _Numbers
) -> None: ...
def copy_sequences(
    data: _Bytes, pointers: _Numbers, lengths: _Lengths, ids: _Numbers, token_size: int
) -> tuple[_Bytes, _Numbers]: ...
def first_bad_sequence(
    lengths: _Lengths, pointers: _Numbers, token_size: int, byte_offset: int
) -> tuple[int, int]: ...
def first_bad_document(entries: _Numbers, num_sequences: int) -> int: ...
def map_file(descriptor: int, size: int) -> _Bytes: ...
def start_writeback(file: int, start: int, size: int) -> None: ...

class TokenBuffer:
    def __init__(
        self, dtype: str, capacity: int, file: int = -1, has_modes: bool = True
    ) -> None: ...
    def append(self, tokens: list[int] | NDArray[Any]) -> None: ...
    def add_sequences(
        self, lengths: _Numbers, modes: NDArray[np.int8] | None = None, ends_document: bool = False
    ) -> None: ...
    def add_documents(self, lengths: _Numbers) -> None: ...
    def end_document(self) -> None: ...
    def count(self, num_sequences: int, num_documents: int, num_tokens: int) -> None: ...
    def view(self) -> _Bytes: ...
    def take_entries(self) -> tuple[_Lengths, NDArray[np.int8], _Numbers]: ...
    def flush(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...
    is_full: bool
    has_open_document: bool
    num_bytes: int
    num_tokens: int
    num_sequences: int
    num_documents: int

class TokenSource:
    @overload
    def __init__(
        self,
        tokens: NDArray[Any],
        sequence_pointers: _Numbers,
        sequence_lengths: _Lengths,
        num_bytes: int,
    ) -> None: ...
    @overload
    def __init__(
        self,
        shards: tuple[NDArray[Any], ...],
        shard_sizes: _Numbers,
        sequence_length: int,
        is_mapped: bool,
    ) -> None: ...

class RowForm:
    def __init__(
        self,
        tokens: bool = True,
        labels: bool = True,
        loss_mask: bool = True,
        position_ids: bool = True,
        parts: bool = False,
        token_dtype: str = "int64",
        share_labels: bool = False,
        share_plain: bool = False,
        vocab_size: int | None = None,
    ) -> None: ...

class Order: ...

class GPTOrder(Order):
    def __init__(
        self,
        sequence_lengths: _Lengths,
        document_index: _Lengths,
        sample_index: NDArray[Any],
        shuffle_index: NDArray[Any],
        sequence_length: int,
        add_extra_token: bool,
    ) -> None: ...

class SequenceOrder(Order):
    def __init__(self, num_sequences: int, sequence_length: int) -> None: ...

def spans(order: Order, sample_numbers: _Numbers) -> _Spans: ...
def locate_spans(
    token_source: TokenSource, sequences: _Numbers, offsets: _Numbers, counts: _Numbers
) -> tuple[_Numbers, _Numbers]: ...
def gather_samples(
    token_sources: tuple[TokenSource, ...],
    orders: tuple[Order, ...],
    source_numbers: _Numbers,
    sample_numbers: _Numbers,
    options: SampleOptions,
    form: RowForm | None = None,
) -> tuple[Any, ...]: ...
def gather_tokens(
    token_sources: tuple[TokenSource, ...],
    orders: tuple[Order, ...],
    source_numbers: _Numbers,
    sample_numbers: _Numbers,
) -> tuple[NDArray[Any], _Numbers, _Numbers, _Numbers, _Numbers]: ...
def fill_rows(
    tokens: NDArray[Any], ends: _Numbers, options: SampleOptions, form: RowForm | None = None
) -> tuple[Any, ...]: ...
def torch_randperm(
    size: int, seed: int, has_64_bit_draws: bool, like: NDArray[_T]
) -> NDArray[_T]: ...
def swap_or_not(numbers: _Numbers, size: int, key: int, is_inverse: bool) -> _Numbers: ...
def fill_in_middle(
    tokens: _Numbers,
    ends: _Numbers,
    sample_numbers: _Numbers,
    rate: float,
    spm_rate: float,
    prefix_token: int,
    middle_token: int,
    suffix_token: int,
    eod_token: int | None,
    pad_token: int | None,
    seed: int,
) -> tuple[_Numbers, _Numbers]: ...
def mark_repeats(
    tokens: _Numbers, ends: _Numbers, max_period: int, min_repeats: int, is_whole: bool
) -> _Bytes: ...
def mark_ranges(
    ranges: NDArray[np.int32], sequences: _Numbers, offsets: _Numbers, counts: _Numbers
) -> _Bytes: ...
def mask_losses(
    loss_masks: NDArray[np.float32], flags: _Bytes, ends: _Numbers
) -> NDArray[np.float32]: ...
def find_documents(document_indices: _Numbers, sequences: _Numbers) -> _Numbers: ...
