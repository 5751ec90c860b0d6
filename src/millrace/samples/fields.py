"""Which arrays a batch has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import MAX_INT32, MAX_INT64, flag, shown, whole
from millrace.errors import ConfigError, DataError
from millrace.options import SampleOptions

Batch = dict[str, NDArray[Any]]
"""Arrays by name, one row for each sample."""

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
"""The arrays of a batch, if no others are asked for."""

SOURCE_FIELDS = ("sample_numbers", "dataset_numbers")
"""Where each sample comes from."""

PART_FIELDS = (
    "document_ids",
    "cu_seqlens",
    "max_seqlen",
    "attention_mask",
    "document_numbers",
    "document_bounds",
)
"""Where the documents in each sample start and end."""

ALL_FIELDS = FIELDS + SOURCE_FIELDS + PART_FIELDS

TOKEN_DTYPES = ("int64", "int32", "file")

_PLACES = {name: place for place, name in enumerate(FIELDS)}
_UNEVEN = ("cu_seqlens", "max_seqlen", "document_numbers", "document_bounds")


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """Which arrays a batch has.

    A *part* of a sample is a run of tokens of one sequence. The extra token, which is only a label,
    is not counted, and padding belongs to the last part.

    Args:
        fields: Names of the arrays. With S for the sequence length, and one row per sample:
            `tokens`, `labels` [batch, S];
            `loss_mask` float32 [batch, S];
            `position_ids` int64 [batch, S];
            `document_ids` int32 [batch, S], the number of the part within the sample;
            `attention_mask` bool [batch, 1, S, S], True where a token must not see another one: a
            later one, or one of another part;
            `sample_numbers` int64 [batch];
            `dataset_numbers` int64 [batch], the dataset of a blend (0 without a blend).
            And not by row:
            `cu_seqlens` int32 [parts + 1], where each part starts in the flattened batch, and the
            end, for variable-length attention;
            `max_seqlen` int32 [], the length of the longest part;
            `document_numbers` int64 [parts], the document of each part in its token file (-1: a
            sample without tokens); it brings `document_bounds` int64 [batch + 1] along: sample i
            has the parts document_bounds[i] up to document_bounds[i + 1].
        token_dtype: Dtype of tokens and labels: "int64", "int32" or "file", that of the token file.
        share_labels: Whether tokens and labels may be views of one array [batch, S + 1].
        vocab_size: Least number above all token ids, which are checked. The padding token, which
            becomes 0, may be above it. None: not checked.

    A loss mask, and position ids, that are the same in every row are one read-only array for all
    batches. They are new arrays for a batch in which a row differs.

    Raises:
        ConfigError: An unknown field, one that is named twice, or an option outside its limits.

    Example:
        >>> BatchForm(fields=("tokens", "labels"), token_dtype="int32").has_rows
        True
    """

    fields: tuple[str, ...] = FIELDS
    token_dtype: str = "int64"
    share_labels: bool = False
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", _check_fields(self.fields))
        if not isinstance(self.token_dtype, str) or self.token_dtype not in TOKEN_DTYPES:
            raise ConfigError(
                f"token_dtype is {shown(self.token_dtype)}; it is one of {', '.join(TOKEN_DTYPES)}"
            )
        object.__setattr__(self, "share_labels", flag("share_labels", self.share_labels))
        if self.vocab_size is not None:
            size = whole("vocab_size", self.vocab_size, 1, MAX_INT64)
            object.__setattr__(self, "vocab_size", size)

    @property
    def has_rows(self) -> bool:
        """Whether all arrays have one row for each sample."""
        return not any(name in _UNEVEN for name in self.fields)


def _check_fields(fields: Any) -> tuple[str, ...]:
    if isinstance(fields, str) or not isinstance(fields, Sequence):
        raise ConfigError(f"fields is {shown(fields)}; give a list of names, such as {FIELDS}")
    if len(fields) == 0:
        raise ConfigError(f"fields is empty; name at least one of {', '.join(ALL_FIELDS)}")
    for name in fields:
        if not isinstance(name, str) or name not in ALL_FIELDS:
            raise ConfigError(f"there is no field {shown(name)}; there are {', '.join(ALL_FIELDS)}")
    names = tuple(fields)
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the field {name!r} is named twice; name it once")
    if "document_numbers" in names and "document_bounds" not in names:
        names += ("document_bounds",)
    return names


def check_form(form: Any) -> None:
    """Raises ConfigError for what is neither a form nor None."""
    if form is not None and not isinstance(form, BatchForm):
        raise ConfigError(
            f"form is {shown(form)}; give a BatchForm, such as BatchForm(fields=('tokens',)), or "
            "None for all fields of a batch"
        )


@lru_cache(maxsize=256)
def row_form(form: BatchForm) -> _native.RowForm:
    """A form for the core; objects of the core cannot be pickled, so no form holds one."""
    return _native.row_form(
        **{name: name in form.fields for name in FIELDS},
        parts=needs_parts(form),
        token_dtype=form.token_dtype,
        share_labels=form.share_labels,
        share_plain=True,
        vocab_size=form.vocab_size,
    )


@lru_cache(maxsize=256)
def needs_parts(form: BatchForm) -> bool:
    """Whether a field of the form needs the parts of the samples."""
    return any(name in PART_FIELDS for name in form.fields)


# ---- arrays that are the same for every sample ----


@lru_cache(maxsize=64)
def plain_array(name: str, num_rows: int, sequence_length: int, has_extra: bool) -> NDArray[Any]:
    """A loss mask, or position ids, without padding and EOD: read-only [rows, sequence_length].

    Args:
        name: "loss_mask" or "position_ids".
        num_rows: Number of rows.
        sequence_length: Length of a row.
        has_extra: Whether samples have an extra token; without it, the last label is masked.
    """
    # Batches of other sizes share the memory: a ramp-up, or a last batch, needs no other array.
    num_rows_in_memory = 1 << max(num_rows - 1, 0).bit_length()
    if num_rows != num_rows_in_memory:
        return plain_array(name, num_rows_in_memory, sequence_length, has_extra)[:num_rows]
    array: NDArray[Any]
    if name == "loss_mask":
        array = np.ones((num_rows, sequence_length), np.float32)
        array[:, sequence_length - (not has_extra) :] = 0.0
    else:
        array = np.tile(np.arange(sequence_length), (num_rows, 1))
    array.flags.writeable = False
    return array


# ---- batches from the arrays of the core ----


class Parts(NamedTuple):
    """The parts of a batch's samples.

    Attributes:
        starts: Where each part starts in the flattened batch: int64 [parts].
        bounds: Sample i has the parts bounds[i] up to bounds[i + 1]: int64 [batch + 1].
        documents: Document of each part in its token file: int64 [parts].
    """

    starts: NDArray[np.int64]
    bounds: NDArray[np.int64]
    documents: NDArray[np.int64]


def make_batch(
    form: BatchForm,
    arrays: Sequence[Any],
    options: SampleOptions,
    sample_numbers: NDArray[np.int64],
    *,
    dataset_numbers: NDArray[Any] | None = None,
    parts: Parts | None = None,
) -> Batch:
    """The batch of a form.

    Args:
        form: Which arrays the batch has.
        arrays: FIELDS, as the core wrote them for `row_form(form)`: None where an array is not
            needed, or is plain.
        options: Options of the samples.
        sample_numbers: The samples' numbers: int64 [batch].
        dataset_numbers: The samples' datasets: integers [batch]. None: no blend.
        parts: The parts of the samples, if the form needs them.
    """
    batch: Batch = {}
    for name in form.fields:
        place = _PLACES.get(name)
        if place is None:
            continue
        array = arrays[place]
        if array is None:
            array = plain_array(
                name, len(sample_numbers), options.sequence_length, options.add_extra_token
            )
        batch[name] = array
    if len(batch) == len(form.fields):
        return batch
    return _in_order(form, batch, options.sequence_length, sample_numbers, dataset_numbers, parts)


def _in_order(
    form: BatchForm,
    batch: Batch,
    sequence_length: int,
    sample_numbers: NDArray[np.int64],
    dataset_numbers: NDArray[Any] | None,
    parts: Parts | None,
) -> Batch:
    """The fields of a form in their order, with those that the core does not write."""
    batch["sample_numbers"] = sample_numbers.copy()
    batch["dataset_numbers"] = (
        np.zeros_like(sample_numbers)
        if dataset_numbers is None
        else dataset_numbers.astype(np.int64)
    )
    if parts is not None:
        batch |= _part_fields(form, parts, len(sample_numbers), sequence_length)
    return {name: batch[name] for name in form.fields}


def find_parts(
    counts: NDArray[np.int64],
    bounds: NDArray[np.int64],
    documents: NDArray[np.int64],
    options: SampleOptions,
) -> Parts:
    """The parts of samples, from their spans.

    Args:
        counts: Number of tokens of each span, the extra token included: int64 [spans].
        bounds: Where each sample's spans start and end: int64 [batch + 1].
        documents: Document of each span in its token file: int64 [spans].
        options: Options of the samples.
    """
    num_rows = len(bounds) - 1
    rows = np.repeat(np.arange(num_rows), np.diff(bounds))
    if np.any(counts == 0):
        rows, documents, counts = (column[counts > 0] for column in (rows, documents, counts))
    empty = np.setdiff1d(np.arange(num_rows), rows)
    if empty.size > 0:  # a sample without tokens is one part, of padding
        places = np.searchsorted(rows, empty)
        rows, counts = np.insert(rows, places, empty), np.insert(counts, places, 0)
        documents = np.insert(documents, places, -1)
    is_first = np.diff(rows, prepend=-1) > 0
    sizes = np.bincount(rows, counts, num_rows).astype(np.int64)
    starts = np.cumsum(counts) - counts - (np.cumsum(sizes) - sizes)[rows]
    # A last span that is the extra token alone is not a part.
    is_part = is_first | (starts < sizes[rows] - options.add_extra_token)
    rows = rows[is_part]
    return Parts(
        rows * options.sequence_length + starts[is_part],
        np.searchsorted(rows, np.arange(num_rows + 1)),
        documents[is_part],
    )


def _part_fields(form: BatchForm, parts: Parts, num_rows: int, sequence_length: int) -> Batch:
    starts, bounds, documents = parts
    end = num_rows * sequence_length
    if end > MAX_INT32:
        raise ConfigError(
            f"a batch of {num_rows} samples has {end} tokens; cu_seqlens is int32, at most "
            f"{MAX_INT32} are possible. Use smaller micro batches"
        )
    edges = np.append(starts, end)
    lengths = np.diff(edges)
    batch: Batch = {
        "cu_seqlens": edges.astype(np.int32),
        "max_seqlen": np.array(lengths.max(initial=0), np.int32),
        "document_numbers": documents,
        "document_bounds": bounds,
    }
    if "document_ids" in form.fields or "attention_mask" in form.fields:
        numbers = np.arange(len(starts), dtype=np.int32)
        numbers -= np.repeat(bounds[:-1], np.diff(bounds)).astype(np.int32)
        ids = np.repeat(numbers, lengths).reshape(num_rows, sequence_length)
        batch["document_ids"] = ids
        if "attention_mask" in form.fields:
            places = np.arange(sequence_length)
            mask = ids[:, None, :, None] != ids[:, None, None, :]
            mask |= places[:, None] < places  # in place: masks are large
            batch["attention_mask"] = mask
    return batch


# ---- batches from those of several datasets ----


class DatasetBatch(NamedTuple):
    """The rows of a batch that one dataset of a blend has given.

    Attributes:
        name: Name of the dataset, for messages.
        rows: Places of the rows in the whole batch: integers [rows].
        arrays: The arrays of these rows.
    """

    name: str
    rows: NDArray[np.intp]
    arrays: Batch


def form_of_datasets(form: BatchForm) -> BatchForm:
    """The form of the batches that `merge_batches` makes one of."""
    names = [name for name in form.fields if name in FIELDS] or ["tokens"]
    if needs_parts(form):
        names.append("cu_seqlens")
    if "document_bounds" in form.fields:
        names.append("document_numbers")
    return replace(form, fields=tuple(names), share_labels=False)


def select_fields(batch: Mapping[str, Any], form: BatchForm, dataset_name: str) -> Batch:
    """The fields of a form from the batch of a dataset that knows no forms.

    Raises:
        ConfigError: A field that the batch does not have.
        DataError: Tokens that are not integers, or an id outside the vocabulary or the dtype.
    """
    if missing := [name for name in form.fields if name not in batch]:
        raise ConfigError(
            f"{dataset_name} returns {', '.join(batch)}; it has no {', '.join(missing)}: leave "
            "these fields out"
        )
    selected: Batch = {name: np.asarray(batch[name]) for name in form.fields}
    for name in ("tokens", "labels"):
        if name in selected:
            selected[name] = _converted(name, selected[name], form, dataset_name)
    return selected


def _converted(name: str, tokens: NDArray[Any], form: BatchForm, dataset_name: str) -> NDArray[Any]:
    """Tokens in the dtype of a form, checked."""
    if tokens.dtype.kind not in "iu":
        raise DataError(f"{dataset_name} returned {name} as {tokens.dtype}; integers are needed")
    dtype = tokens.dtype if form.token_dtype == "file" else np.dtype(form.token_dtype)
    least, limit = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max) + 1
    if form.vocab_size is not None:
        least, limit = 0, min(form.vocab_size, limit)
    bad = tokens[(tokens < least) | (tokens > limit - 1)]
    if bad.size > 0:
        raise DataError(
            f"{dataset_name} returned {name} with token id {bad[0]}, which is outside "
            f"[{least}, {limit})"
        )
    return tokens.astype(dtype, copy=False)


def merge_batches(
    form: BatchForm,
    batches: Sequence[DatasetBatch],
    sample_numbers: NDArray[np.int64],
    dataset_numbers: NDArray[Any],
) -> Batch:
    """The batch of a form from batches of `form_of_datasets(form)`.

    Raises:
        DataError: Batches whose arrays differ in dtype or shape, or are not [batch, length].
    """
    num_rows = len(sample_numbers)
    batch = merge_rows(
        [
            one._replace(arrays={k: array for k, array in one.arrays.items() if k in FIELDS})
            for one in batches
        ],
        num_rows,
    )
    for name, array in batch.items():
        if array.ndim != 2:
            raise DataError(
                f"{batches[0].name} returned {name} of shape {list(array.shape)}; [batch, length] "
                "is needed"
            )
    sequence_length = next(iter(batch.values())).shape[1]
    for name in ("loss_mask", "position_ids"):
        if name in batch and not any(one.arrays[name].flags.writeable for one in batches):
            for has_extra in (True, False):
                plain = plain_array(name, num_rows, sequence_length, has_extra)
                if np.array_equal(batch[name], plain):
                    batch[name] = plain
                    break
    parts = _merge_parts(batches, num_rows, sequence_length) if needs_parts(form) else None
    return _in_order(form, batch, sequence_length, sample_numbers, dataset_numbers, parts)


def _merge_parts(batches: Sequence[DatasetBatch], num_rows: int, sequence_length: int) -> Parts:
    starts, documents = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for one in batches:
        rows, places = np.divmod(one.arrays["cu_seqlens"][:-1].astype(np.int64), sequence_length)
        starts.append(one.rows[rows] * sequence_length + places)
        documents.append(one.arrays.get("document_numbers", np.zeros_like(places)))
    start = np.concatenate(starts)
    order = np.argsort(start)
    bounds = np.searchsorted(start[order], np.arange(num_rows + 1) * sequence_length)
    return Parts(start[order], bounds, np.concatenate(documents)[order])


def merge_rows(batches: Sequence[DatasetBatch], num_rows: int) -> Batch:
    """The rows of several batches in one; all arrays have one row for each sample.

    Raises:
        DataError: Batches whose arrays differ in name, dtype or shape.
    """
    merged: Batch = {}
    for place, (dataset_name, rows, batch) in enumerate(batches):
        if place == 0:
            merged = {
                name: np.empty((num_rows, *array.shape[1:]), array.dtype)
                for name, array in batch.items()
            }
        if batch.keys() != merged.keys():
            raise DataError(f"{dataset_name} returned {[*batch]}; {[*merged]} are needed")
        for name, array in batch.items():
            column = merged[name]
            shape = (len(rows), *column.shape[1:])
            if array.shape != shape or array.dtype != column.dtype:
                raise DataError(
                    f"{dataset_name} returned {name} as {array.dtype} {list(array.shape)}; "
                    f"{column.dtype} {list(shape)} is needed"
                )
            column[rows] = array
    return merged
