"""From a token batch to the arrays of a batch: one rule for every source of tokens."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import MAX_INT32
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.ragged import spread
from millrace.samples.fields import (
    ALL_FIELDS,
    FIELDS,
    Batch,
    BatchForm,
    SampleOptions,
    needs_parts,
    row_form,
)
from millrace.samples.tokens import Field, Numbers, TokenBatch, split_at_eod


def rows(tokens: TokenBatch, options: SampleOptions, form: BatchForm | None = None) -> Batch:
    """The arrays of a batch.

    Args:
        tokens: Tokens of the samples.
        options: What a sample looks like.
        form: Which arrays the batch has. None: FIELDS.

    Raises:
        ConfigError: A field that the token batch does not give.
        DataError: A sample that is longer than its row, or a token id that does not fit.
    """
    is_by_documents = options.boundaries == "documents"
    # A label behind a document's end is 0, the token is not: labels cannot be a view of tokens.
    core_form = row_form(replace(form, share_labels=False) if form and is_by_documents else form)
    starts = _with_parts(tokens, options).part_starts if is_by_documents else None
    with core_errors():
        arrays = list(_native.fill_rows(tokens.tokens, tokens.ends, options, core_form, starts))
    if form is None or "loss_mask" in form.fields:
        arrays[2] = mask_losses(arrays[2], tokens)
    if form is None:
        return dict(zip(FIELDS, arrays, strict=True))
    length, parts, fields = options.sequence_length, None, dict(tokens.fields)
    own = {name: field for name, field in fields.items() if name in form.fields}
    for name, (kind, array) in own.items():
        if kind == "token":
            fields[name] = "sample", _rows_of(tokens, array, length)
    if needs_parts(form) or any(kind == "part" for kind, _ in own.values()):
        tokens = _with_parts(tokens, options)
        parts = find_parts(tokens.part_counts, tokens.part_bounds, options)
    return finish(form, arrays, (len(tokens), length), parts, fields)


def _with_parts(tokens: TokenBatch, options: SampleOptions) -> TokenBatch:
    """The batch with its parts; if they are not known, those that EOD ends."""
    if tokens.part_starts is not None:
        return tokens
    if options.eod_token is None or options.boundaries == "documents":
        raise ConfigError(
            "the parts of the samples are not known: give the dataset its eod_token, or leave out "
            "document_ids, cu_seqlens, max_seqlen and attention_mask"
        )
    return split_at_eod(tokens, options.eod_token)


@contextmanager
def core_errors(message: str = "{}") -> Iterator[None]:
    """Turns the core's ValueErrors into DataErrors."""
    try:
        yield
    except MillraceError:
        raise
    except ValueError as error:
        raise DataError(message.format(error)) from None


def mask_losses(loss_mask: NDArray[np.float32], tokens: TokenBatch) -> NDArray[np.float32]:
    """A loss mask [batch, length], with 0 where the label is not trained on."""
    if tokens.trained is None or tokens.trained.all():
        return loss_mask
    with core_errors():
        return _native.mask_losses(loss_mask, tokens.trained.view(np.uint8), tokens.ends)


class Parts(NamedTuple):
    """The parts of rows; sample i has the parts bounds[i] up to bounds[i + 1]."""

    starts: Numbers  # in the flattened batch
    bounds: Numbers
    places: Numbers  # among the parts of the token batch; -1: padding alone


def find_parts(counts: Numbers, bounds: Numbers, options: SampleOptions) -> Parts:
    """The parts of rows, from those of their tokens.

    `counts` are the tokens of each part, the extra token included: int64 [parts].
    """
    num_rows, length = len(bounds) - 1, options.sequence_length
    places = np.flatnonzero(counts > 0)
    rows, counts = spread(np.diff(bounds))[0][places], counts[places]
    sizes = np.bincount(rows, counts, num_rows).astype(np.int64)
    starts = np.cumsum(counts) - counts - (np.cumsum(sizes) - sizes)[rows]
    if options.boundaries == "documents":
        is_part = starts < length
        padded = np.flatnonzero(sizes < length)  # padding is a part of its own
    else:
        # A last part that is the extra token alone does not count, nor does padding.
        is_part = (starts == 0) | (starts < (sizes - options.add_extra_token)[rows])
        padded = np.flatnonzero(sizes == 0)
    table = np.array((rows, starts, places))[:, is_part]
    if padded.size > 0:
        padding = np.array((padded, sizes[padded], np.full(len(padded), -1)))
        table = np.concatenate((table, padding), axis=1)
        table = table[:, np.argsort(table[0] * length + table[1])]
    rows, starts, places = table
    return Parts(rows * length + starts, np.searchsorted(rows, np.arange(num_rows + 1)), places)


def finish(
    form: BatchForm,
    arrays: Sequence[Any],
    shape: tuple[int, int],
    parts: Parts | None,
    fields: Mapping[str, Field],
) -> Batch:
    """The arrays of a form, of FIELDS as the core wrote them, and of fields by part or sample.

    `shape` is [batch, sequence_length].
    """
    batch = {name: one for name, one in zip(FIELDS, arrays, strict=True) if name in form.fields}
    if len(batch) < len(form.fields):
        batch["dataset_numbers"] = np.zeros(shape[0], np.int64)
        if parts is not None:
            batch |= _part_fields(form, parts, *shape)
    for name in form.fields:
        if name in fields:
            kind, array = fields[name]
            if kind == "part" and parts is not None:
                # For padding alone -1, or 0 if that does not fit.
                padding = -1 if array.dtype.kind == "i" else 0
                last = np.full((1, *array.shape[1:]), padding, array.dtype)
                array = np.concatenate((array, last))[parts.places]
            batch[name] = array
        elif name == "document_numbers":
            raise ConfigError(
                "document_numbers are not known: tokens were moved, or come from no token file. "
                "Leave out document_numbers and document_bounds"
            )
        elif name not in batch:
            names = ", ".join(dict.fromkeys((*ALL_FIELDS, *fields)))
            raise ConfigError(f"there is no field {name!r}; there are {names}")
    return {name: batch[name] for name in form.fields}


def _rows_of(tokens: TokenBatch, array: NDArray[Any], length: int) -> NDArray[Any]:
    """An array by token as rows [batch, length], with 0 in the padding."""
    out = np.zeros((len(tokens), length, *array.shape[1:]), array.dtype)
    rows, places = spread(tokens.sizes)
    is_in_row = places < length
    out[rows[is_in_row], places[is_in_row]] = array[is_in_row]
    return out


def _part_fields(form: BatchForm, parts: Parts, num_rows: int, sequence_length: int) -> Batch:
    starts, bounds, _ = parts
    end = num_rows * sequence_length
    if end > MAX_INT32:
        limit = f"cu_seqlens takes at most {MAX_INT32}: use smaller micro batches"
        raise ConfigError(f"a batch of {num_rows} samples has {end} tokens; {limit}")
    edges = np.append(starts, end)
    lengths = np.diff(edges)
    batch: Batch = {
        "cu_seqlens": edges.astype(np.int32),
        "max_seqlen": np.array(lengths.max(initial=0), np.int32),
        "document_bounds": bounds,
    }
    if "document_ids" in form.fields or "attention_mask" in form.fields:
        _, numbers = spread(np.diff(bounds))
        ids = np.repeat(numbers.astype(np.int32), lengths).reshape(num_rows, sequence_length)
        batch["document_ids"] = ids
        if "attention_mask" in form.fields:
            places = np.arange(sequence_length)
            mask = ids[:, None, :, None] != ids[:, None, None, :]
            mask |= places[:, None] < places  # in place: masks are large
            batch["attention_mask"] = mask
    return batch
