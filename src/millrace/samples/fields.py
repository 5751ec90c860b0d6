"""What a sample looks like, and which arrays a batch has: their names, and the form that a caller
asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from inspect import signature
from typing import Any

from numpy.typing import NDArray

from millrace import _native
from millrace.checks import (
    MAX_INT32,
    MAX_INT64,
    check_bool,
    check_choice,
    check_int,
    check_token,
    shown,
)
from millrace.errors import ConfigError

BOUNDARIES = ("eod", "documents")


@dataclass(frozen=True, kw_only=True)
class SampleFields:
    """The fields of `SampleOptions`, which a run's configuration has among others."""

    sequence_length: int
    add_extra_token: bool = True
    eod_token: int | None = None
    pad_token: int | None = None
    reset_position_ids: bool = False
    eod_mask_loss: bool = False
    boundaries: str = "eod"

    def __post_init__(self) -> None:
        vars(self).update(
            sequence_length=check_int("sequence_length", self.sequence_length, 1, MAX_INT32),
            eod_token=check_token("eod_token", self.eod_token),
            pad_token=check_token("pad_token", self.pad_token),
            boundaries=check_choice("boundaries", self.boundaries, BOUNDARIES),
        )
        for field in fields(self):  # a configuration has flags of its own
            if field.type is bool:
                vars(self)[field.name] = check_bool(field.name, getattr(self, field.name))
        has_eod_rules = self.reset_position_ids or self.eod_mask_loss
        if has_eod_rules and self.eod_token is None:
            raise ConfigError("reset_position_ids and eod_mask_loss look for EOD: give eod_token")
        if has_eod_rules and self.boundaries == "documents":
            raise ConfigError(
                "reset_position_ids and eod_mask_loss belong to boundaries='eod': leave them out; "
                "boundaries='documents' resets position ids and masks between documents"
            )


@dataclass(frozen=True, kw_only=True)
class SampleOptions(SampleFields):
    """What a sample looks like. The core reads the fields by name (`cpp/rows.hpp` has the same).

    Args:
        sequence_length: Number of tokens to train on in a sample, 1 to 2**31 - 1.
        add_extra_token: Whether a sample has one token more, the last label. Without it the last
            label is missing and masked.
        eod_token: The end-of-document token; `reset_position_ids` and `eod_mask_loss` need it.
        pad_token: The padding token, never trained on: where a label equals it, the loss mask is 0,
            and it becomes token 0 in tokens and labels. None: every token is trained on. If it is
            the EOD, no end of a document is (Megatron-LM's `allow_ambiguous_pad_tokens`).
        reset_position_ids: Whether position ids start again after each EOD.
        eod_mask_loss: Whether the loss mask is 0 where the input is EOD.
        boundaries: What tells documents apart. "eod": the EOD token, wherever it stands, as in
            Megatron-LM. "documents": the parts of the token batch. Then position ids start again
            with each part, the label behind its last token is 0 and masked, and padding is a part
            of its own, whatever the tokens; this replaces the two options before.

    Raises:
        ConfigError: An option outside its limits, or one that needs another.
    """

    def identity(self) -> dict[str, Any]:
        """The options as plain values, for fingerprints; `boundaries` only if it is not "eod"."""
        values = dict(vars(self))
        if values["boundaries"] == "eod":
            del values["boundaries"]
        return values


def choose_options(
    options: SampleOptions | None, single: dict[str, Any], owner: Any
) -> SampleOptions:
    """The options of the owner's samples, as one object or made of single ones."""
    fields = SampleOptions.__dataclass_fields__
    if unknown := single.keys() - fields.keys():
        own = [one for one in signature(type(owner)).parameters if one != "sample_options"]
        problem = f"{type(owner).__name__} has no argument {min(unknown)!r}; it has "
        raise TypeError(problem + ", ".join([*own, *fields]))
    if options is None:
        return SampleOptions(**{"sequence_length": None, **single})
    if not isinstance(options, SampleOptions):
        raise ConfigError(f"options must be SampleOptions, not {shown(options)}")
    if single:
        raise ConfigError(f"give options, or {', '.join(single)}: one of the two")
    return options


# ---- the arrays ----

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
            `document_numbers` int64 [parts], the document of each part in its token file, or the
            `part_sequence` of another source (-1: a part of padding alone); it brings
            `document_bounds` int64 [batch + 1] along: sample i has the parts document_bounds[i] up
            to document_bounds[i + 1].
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
        fields, size = self.fields, self.vocab_size
        is_list = isinstance(fields, Sequence) and not isinstance(fields, str)
        names: tuple[Any, ...] = tuple(fields) if is_list else ()
        is_text = all(isinstance(name, str) for name in names)
        if not names or not is_text or len(set(names)) < len(names):
            raise ConfigError(f"fields is {shown(fields)}; give different names, such as {FIELDS}")
        if "document_numbers" in names and "document_bounds" not in names:
            names += ("document_bounds",)
        vars(self).update(
            fields=names,
            share_labels=check_bool("share_labels", self.share_labels),
            vocab_size=None if size is None else check_int("vocab_size", size, 1, MAX_INT64),
        )


def form_of(fields: tuple[str, ...] | None, **options: Any) -> BatchForm | None:
    """The form of some fields and options; None if none is given."""
    form = BatchForm(fields=FIELDS if fields is None else fields, **options)
    return None if fields is None and form == BatchForm() else form


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


def needs_parts(form: BatchForm) -> bool:
    """Whether a field of the form needs the parts of the samples."""
    return any(name in PART_FIELDS for name in form.fields)
