"""Which arrays a batch has: their names, and the form that a caller asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from millrace import _native
from millrace.checks import MAX_INT64, check_bool, check_choice, check_int, shown
from millrace.errors import ConfigError

Batch = dict[str, NDArray[Any]]
"""Arrays by name, one row per sample."""

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
"""The fields that every token batch gives; a source of tokens may have others of its own."""

TOKEN_DTYPES = ("int64", "int32", "file")


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """Which arrays a batch has.

    A *part* of a sample is a run of tokens of one sequence, without the extra token, which is only
    a label. Padding belongs to the last part; with `boundaries="documents"`, it is a part.

    Args:
        fields: Names of the arrays. With S for the sequence length, and one row per sample:
            `tokens`, `labels` [batch, S];
            `loss_mask` float32 [batch, S];
            `position_ids` int64 [batch, S];
            `document_ids` int32 [batch, S], the number of the part within the sample;
            `attention_mask` bool [batch, 1, S, S], True where a token must not see another: a later
            one, or one of another part;
            `sample_numbers` int64 [batch];
            `dataset_numbers` int64 [batch], the dataset of a blend (0 without a blend).
            And not by row:
            `cu_seqlens` int32 [parts + 1], where each part starts in the flattened batch, and the
            end, for variable-length attention;
            `max_seqlen` int32 [], the length of the longest part;
            `document_numbers` int64 [parts], the document of each part in its token file (-1: a
            part of padding alone); it brings `document_bounds` int64 [batch + 1] along: sample i
            has the parts document_bounds[i] up to document_bounds[i + 1].
            A dataset's own fields have their names: those by token are [batch, S], those by part
            [parts], those by sample [batch].
        token_dtype: Dtype of tokens and labels: "int64", "int32" or "file" (the token file's).
        share_labels: Whether tokens and labels may be views of one array [batch, S + 1].
        vocab_size: Least number above all token ids, which are checked; the padding token, which
            becomes 0, may be above it. None: no check.

    Raises:
        ConfigError: A field that is named twice, or an option outside its limits.
    """

    fields: tuple[str, ...] = FIELDS
    token_dtype: str = "int64"
    share_labels: bool = False
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_choice("token_dtype", self.token_dtype, TOKEN_DTYPES)
        size = self.vocab_size
        vars(self).update(
            fields=_check_fields(self.fields),
            share_labels=check_bool("share_labels", self.share_labels),
            vocab_size=None if size is None else check_int("vocab_size", size, 1, MAX_INT64),
        )


def form_of(fields: tuple[str, ...] | None, **options: Any) -> BatchForm | None:
    """The form of some fields and options; None if none is given."""
    form = BatchForm(fields=FIELDS if fields is None else fields, **options)
    return None if fields is None and form == BatchForm() else form


def _check_fields(fields: Any) -> tuple[str, ...]:
    if isinstance(fields, str) or not isinstance(fields, Sequence) or len(fields) == 0:
        raise ConfigError(f"fields is {shown(fields)}; give a list of names, such as {FIELDS}")
    names = tuple(fields)
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"fields must be names, not {shown(name)}")
        if names.count(name) > 1:
            raise ConfigError(f"the field {name!r} is named twice; name it once")
    if "document_numbers" in names and "document_bounds" not in names:
        names += ("document_bounds",)
    return names


@lru_cache(maxsize=256)
def row_form(form: BatchForm | None) -> _native.RowForm | None:
    """A form for the core; objects of the core cannot be pickled, so no form holds one."""
    if form is None:
        return None
    return _native.RowForm(
        **{name: name in form.fields for name in FIELDS},
        parts=needs_parts(form),
        token_dtype=form.token_dtype,
        share_labels=form.share_labels,
        vocab_size=form.vocab_size,
    )


def needs_parts(form: BatchForm | None) -> bool:
    """Whether a field of the form needs the parts of the samples."""
    return form is not None and any(name in PART_FIELDS for name in form.fields)
