"""From a token batch to the arrays of a batch: one rule for every source of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import MAX_INT32
from millrace.errors import ConfigError, DataError
from millrace.options import SampleOptions
from millrace.ragged import spread
from millrace.samples.fields import (
    ALL_FIELDS,
    FIELDS,
    Batch,
    BatchForm,
    merge_rows,
    needs_parts,
    plain_array,
    row_form,
)
from millrace.samples.tokens import Field, Numbers, TokenBatch, split_at_eod

_EVERYTHING = BatchForm()


def rows(
    tokens: TokenBatch,
    options: SampleOptions | Sequence[SampleOptions],
    form: BatchForm | None = None,
) -> Batch:
    """The arrays of a batch.

    Args:
        tokens: The tokens of its samples.
        options: What a sample looks like; or one for each sample, with one length of rows.
        form: Which arrays the batch has. None: tokens, labels, loss_mask and position_ids.

    Raises:
        ConfigError: A field that the token batch does not give.
        DataError: A sample that is longer than its row, or a token id that does not fit.

    Example:
        >>> batch = TokenBatch(np.array([5, 6, 7]), np.array([3]))
        >>> rows(batch, SampleOptions(sequence_length=4))["labels"].tolist()
        [[6, 7, 0, 0]]
    """
    if isinstance(options, SampleOptions):
        arrays = _core_fields(tokens, options, form)
        first, extras = options, np.broadcast_to(options.add_extra_token, len(tokens))
    else:
        arrays = _of_several_views(tokens, options, form)
        first, extras = options[0], np.array([one.add_extra_token for one in options], np.bool_)
    if form is None:
        return dict(zip(FIELDS, arrays, strict=True))
    parts = None
    if needs_parts(form) or any(_kind(tokens.fields.get(name)) == "part" for name in form.fields):
        tokens = with_parts(tokens, first)
        parts = find_parts(tokens.part_counts, tokens.part_bounds, first, extras)
    return finish(form, arrays, first, len(tokens), parts, _own_fields(tokens, form, first, parts))


def with_parts(tokens: TokenBatch, options: SampleOptions) -> TokenBatch:
    """The batch with its parts; if they are not known, EOD tells documents apart."""
    if tokens.part_starts is not None:
        return tokens
    if options.eod_token is None or options.boundaries == "documents":
        raise ConfigError(
            "the parts of the samples are not known, and boundaries='eod' needs eod_token to find "
            "them: give the dataset its eod_token, or leave out document_ids, cu_seqlens, "
            "max_seqlen and attention_mask"
        )
    return split_at_eod(tokens, options.eod_token)


# ---- tokens, labels, loss masks and position ids ----


def _core_fields(tokens: TokenBatch, options: SampleOptions, form: BatchForm | None) -> list[Any]:
    """FIELDS; None where an array is not asked for, or plain."""
    is_by_documents = options.boundaries == "documents"
    core_form = row_form(_unshared(form) if is_by_documents and form is not None else form)
    try:
        arrays = list(_native.fill_rows(tokens.tokens, tokens.ends, options, core_form))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from None
    if is_by_documents:
        _cut_at_parts(arrays, with_parts(tokens, options), options, form or _EVERYTHING)
    if tokens.trained is not None and (form is None or "loss_mask" in form.fields):
        mask = _plain("loss_mask", len(tokens), options) if arrays[2] is None else arrays[2]
        arrays[2] = mask_losses(mask, tokens)
    return arrays


def mask_losses(loss_mask: NDArray[np.float32], tokens: TokenBatch) -> NDArray[np.float32]:
    """A loss mask with 0 where the label is a token that is not trained on; [batch, length]."""
    if tokens.trained is None or tokens.trained.all():
        return loss_mask
    try:
        return _native.mask_losses(loss_mask, tokens.trained.view(np.uint8), tokens.ends)
    except ConfigError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from None


def _unshared(form: BatchForm) -> BatchForm:
    """The form without views: a label behind a document's end is 0, and the token there is not."""
    return replace(form, share_labels=False) if form.share_labels else form


def _cut_at_parts(
    arrays: list[Any], tokens: TokenBatch, options: SampleOptions, form: BatchForm
) -> None:
    """Ends labels, losses and position ids of rows with the parts, in place."""
    length = options.sequence_length
    starts, sizes = tokens.part_starts, tokens.sizes
    assert starts is not None
    row_of_part = np.repeat(np.arange(len(tokens)), np.diff(tokens.part_bounds))
    places = starts - (tokens.ends - sizes)[row_of_part]
    is_inner = places > 0
    last = row_of_part[is_inner], places[is_inner] - 1  # whose label is another document's
    if arrays[1] is not None:
        arrays[1][last] = 0
    if "loss_mask" in form.fields:
        mask = _plain("loss_mask", len(tokens), options) if arrays[2] is None else arrays[2]
        arrays[2] = mask.copy()
        arrays[2][last] = 0
    if "position_ids" in form.fields:
        extras = np.broadcast_to(options.add_extra_token, len(tokens))
        parts = find_parts(tokens.part_counts, tokens.part_bounds, options, extras)
        edges = np.append(parts.starts, len(tokens) * length)
        ids = np.arange(len(tokens) * length) - np.repeat(parts.starts, np.diff(edges))
        arrays[3] = ids.reshape(len(tokens), length)


def _plain(name: str, num_rows: int, options: SampleOptions) -> NDArray[Any]:
    return plain_array(name, num_rows, options.sequence_length, options.add_extra_token)


def _of_several_views(
    tokens: TokenBatch, views: Sequence[SampleOptions], form: BatchForm | None
) -> list[Any]:
    """FIELDS of samples with several options."""
    names = [name for name in FIELDS if form is None or name in form.fields]
    places: dict[SampleOptions, list[int]] = {}
    for place, view in enumerate(views):
        places.setdefault(view, []).append(place)
    batches = []
    for view, some in places.items():
        columns = dict(
            zip(FIELDS, _core_fields(tokens.select(np.array(some)), view, form), strict=True)
        )
        filled = {
            name: _plain(name, len(some), view) if columns[name] is None else columns[name]
            for name in names
        }
        batches.append(("a view", np.array(some), filled))
    merged = merge_rows(batches, len(tokens)) if batches else {}
    return [merged.get(name) for name in FIELDS]


# ---- other fields ----


class Parts(NamedTuple):
    """The parts of the rows of a batch.

    Attributes:
        starts: Where each part starts in the flattened batch: int64 [parts].
        bounds: Sample i has the parts bounds[i] up to bounds[i + 1]: int64 [batch + 1].
        places: Place of each part among those of the token batch; -1: padding alone. int64 [parts].
    """

    starts: Numbers
    bounds: Numbers
    places: Numbers


def find_parts(
    counts: Numbers, bounds: Numbers, options: SampleOptions, extras: NDArray[np.bool_]
) -> Parts:
    """The parts of rows.

    Args:
        counts: Number of tokens of each part, the extra token included: int64 [parts].
        bounds: Where each sample's parts start and end: int64 [batch + 1].
        options: Options of the samples.
        extras: Whether each sample has an extra token, which is not part of a row: bool [batch].
    """
    num_rows, length = len(bounds) - 1, options.sequence_length
    rows = np.repeat(np.arange(num_rows), np.diff(bounds))
    places = np.flatnonzero(counts > 0)
    rows, counts = rows[places], counts[places]
    sizes = np.bincount(rows, counts, num_rows).astype(np.int64)
    starts = np.cumsum(counts) - counts - (np.cumsum(sizes) - sizes)[rows]
    if options.boundaries == "documents":
        is_part = starts < length
        padded = np.flatnonzero(sizes < length)  # padding is a part of its own
    else:
        # A last part that is the extra token alone does not count, nor does padding.
        is_part = (starts == 0) | (starts < (sizes - extras)[rows])
        padded = np.flatnonzero(sizes == 0)
    rows, starts, places = rows[is_part], starts[is_part], places[is_part]
    if padded.size > 0:
        rows = np.concatenate((rows, padded))
        starts = np.concatenate((starts, sizes[padded]))
        places = np.concatenate((places, np.full(len(padded), -1)))
        order = np.argsort(rows * length + starts)
        rows, starts, places = rows[order], starts[order], places[order]
    return Parts(rows * length + starts, np.searchsorted(rows, np.arange(num_rows + 1)), places)


def finish(
    form: BatchForm,
    arrays: Sequence[Any],
    options: SampleOptions,
    num_rows: int,
    parts: Parts | None,
    own: Mapping[str, NDArray[Any]],
) -> Batch:
    """The fields of a form, in their order.

    Args:
        form: Which arrays the batch has.
        arrays: FIELDS, as the core wrote them: None where an array is not asked for, or plain.
        options: Options of the samples.
        num_rows: Number of samples.
        parts: The parts of the rows, if a field needs them.
        own: Other arrays of the batch, by name.

    Raises:
        ConfigError: A field that there is not.
    """
    batch: Batch = {}
    columns = dict(zip(FIELDS, arrays, strict=True))
    for name in form.fields:
        if name in columns:
            array = columns[name]
            batch[name] = _plain(name, num_rows, options) if array is None else array
    if len(batch) == len(form.fields):
        return batch
    batch |= own
    if parts is not None:
        batch |= _part_fields(form, parts, num_rows, options.sequence_length)
    for name in form.fields:
        if name not in batch:
            raise ConfigError(_missing(name, own))
    return {name: batch[name] for name in form.fields}


def _missing(name: str, own: Mapping[str, NDArray[Any]]) -> str:
    if name == "document_numbers":
        return (
            "document_numbers are not known: a transform has changed the tokens, or they come from "
            "no token file. Leave out document_numbers and document_bounds"
        )
    names = ", ".join(dict.fromkeys((*ALL_FIELDS, *own)))
    return f"there is no field {name!r}; there are {names}"


def _kind(entry: Field | None) -> str:
    return "" if entry is None else entry[0]


def _own_fields(
    tokens: TokenBatch, form: BatchForm, options: SampleOptions, parts: Parts | None
) -> Batch:
    """The source's own fields as arrays of the batch."""
    own: Batch = {"dataset_numbers": np.zeros(len(tokens), np.int64)}
    for name, (kind, array) in tokens.fields.items():
        if name not in form.fields:
            own[name] = array  # for the message about a field that there is not
        elif kind == "token":
            own[name] = _rows_of(tokens, array, options.sequence_length)
        elif kind == "part" and parts is not None:
            own[name] = of_parts(array, parts)
        else:
            own[name] = array
    return own


def _rows_of(tokens: TokenBatch, array: NDArray[Any], length: int) -> NDArray[Any]:
    """An array by token as rows, with 0 in the padding: [batch, length]."""
    out = np.zeros((len(tokens), length, *array.shape[1:]), array.dtype)
    rows, places = spread(tokens.sizes)
    is_in_row = places < length
    out[rows[is_in_row], places[is_in_row]] = array[is_in_row]
    return out


def of_parts(array: NDArray[Any], parts: Parts) -> NDArray[Any]:
    """An array by part; where a part is padding alone, -1, or 0 if that does not fit."""
    out = np.full((len(parts.places), *array.shape[1:]), -1 if array.dtype.kind == "i" else 0)
    out = out.astype(array.dtype)
    is_padding = parts.places < 0
    out[~is_padding] = array[parts.places[~is_padding]]
    return out


def _part_fields(form: BatchForm, parts: Parts, num_rows: int, sequence_length: int) -> Batch:
    starts, bounds, _ = parts
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
