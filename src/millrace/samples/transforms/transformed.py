"""Datasets whose samples are transformed.

A transform takes the texts of some samples, which are their raw tokens, and says for each token
whether the model is trained to predict it. It is a pure function of texts and sample numbers, so a
sample is the same whatever the batch, rank or thread that reads it, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import shown, whole_numbers
from millrace.errors import ConfigError, DataError
from millrace.options import SampleOptions
from millrace.order import Spans
from millrace.samples.datasets import BlendedDataset, Dataset, _sample, _texts_of_one, batch_of_form
from millrace.samples.fields import (
    FIELDS,
    SOURCE_FIELDS,
    Batch,
    BatchForm,
    Parts,
    check_form,
    find_parts,
    make_batch,
    needs_parts,
    row_form,
)


class TransformedDataset:
    """A dataset whose samples are transformed.

    The transforms are applied in their order. Tokens and labels are made of the transformed texts
    by the options of the dataset, as for texts that the token file holds; then the loss mask is
    set to 0 wherever the label is a token that is not trained on.

    Args:
        dataset: `GPTDataset`, `BlendedDataset`, or another dataset with a method `texts` and, if a
            transform changes tokens, with `options`.
        transforms: The transforms: `LossRanges`, `FillInMiddle`, `RepeatGuard` or others with the
            methods of `Transform`.

    Attributes:
        dataset: The dataset.
        transforms: The transforms.

    Raises:
        ConfigError: A dataset or a transform that lacks what is needed, or transforms in an order
            that cannot work.
    """

    takes_form = True

    def __init__(self, dataset: Dataset, transforms: Sequence[Transform]) -> None:
        self.dataset = dataset
        self.transforms = _list_of(transforms)
        self._changes_tokens = _check_transforms(dataset, self.transforms)
        self._options = _options_of(dataset) if self._changes_tokens else None

    @property
    def prefix(self) -> str:
        """The dataset's name in messages."""
        return str(getattr(self.dataset, "prefix", type(self.dataset).__name__))

    @property
    def options(self) -> SampleOptions:
        """What a sample looks like."""
        options: SampleOptions = self.dataset.options  # type: ignore[attr-defined]
        return options

    @property
    def file_dtype(self) -> np.dtype[Any]:
        """The dtype of the token files."""
        dtype: np.dtype[Any] = getattr(self.dataset, "file_dtype", np.dtype(np.int64))
        return dtype

    @property
    def spans(self) -> Callable[[ArrayLike], Spans]:
        """The dataset's method: where the tokens come from, before they are transformed."""
        spans: Callable[[ArrayLike], Spans] = self.dataset.spans  # type: ignore[attr-defined]
        return spans

    @property
    def is_remote(self) -> bool:
        """See `SampleSource.is_remote`."""
        return bool(getattr(self.dataset, "is_remote", False))

    def prefetch(self, sample_numbers: ArrayLike) -> None:
        """See `GPTDataset.prefetch`."""
        getattr(self.dataset, "prefetch", id)(sample_numbers)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample_number: SupportsIndex) -> Batch:
        """One sample; see `GPTDataset`."""
        return _sample(self, sample_number)

    def batch(self, sample_numbers: ArrayLike, form: BatchForm | None = None) -> Batch:
        """The transformed samples of these numbers; see `GPTDataset.batch`.

        If a transform changes tokens, `document_ids`, `cu_seqlens`, `max_seqlen` and
        `attention_mask` are those of the documents in the transformed texts, which end with the
        options' EOD.

        Raises:
            ConfigError: Also a field or token dtype that transformed tokens do not allow, or a
                transform that returns something else than texts.
            DataError: Also a transformed text that is longer than a sample, or holds a token id
                that does not fit the vocabulary or int32.
        """
        check_form(form)
        numbers = whole_numbers("sample numbers", sample_numbers)
        has_mask = form is None or "loss_mask" in form.fields
        if self._options is None and not has_mask:
            return batch_of_form(self.dataset, numbers, form)
        texts = self._transformed_texts(numbers)
        if self._options is None:
            batch = batch_of_form(self.dataset, numbers, form)
        else:
            batch = self._batch_of_texts(texts, self._options, numbers, form)
        if has_mask and not texts.is_trained.all():
            flags = texts.is_trained.view(np.uint8)
            try:
                mask = _native.mask_losses(batch["loss_mask"], flags, texts.ends)
            except ValueError as error:
                raise self._error_of(error, numbers) from None
            batch = {**batch, "loss_mask": mask}  # the dataset may keep the dict that it returned
        return batch

    def _batch_of_texts(
        self,
        texts: MaskedTexts,
        options: SampleOptions,
        numbers: NDArray[np.int64],
        form: BatchForm | None,
    ) -> Batch:
        tokens = texts.tokens
        if form is not None and form.token_dtype == "file":
            tokens = _narrowed(tokens, self.file_dtype)
        try:
            arrays = _native.fill_rows(
                tokens, texts.ends, options, None if form is None else row_form(form)
            )
        except ValueError as error:
            raise self._error_of(error, numbers) from None
        if form is None:
            return dict(zip(FIELDS, arrays, strict=True))
        parts = _parts_of(texts, options, form) if needs_parts(form) else None
        batch = make_batch(form, arrays, options, numbers, parts=parts)
        if names := tuple(name for name in form.fields if name in SOURCE_FIELDS):
            batch |= batch_of_form(self.dataset, numbers, replace(form, fields=names))
        return batch

    def _error_of(self, error: ValueError, numbers: NDArray[np.int64]) -> DataError:
        return DataError(f"{self.prefix}, transformed samples {shown(numbers.tolist())}: {error}")

    def _transformed_texts(self, numbers: NDArray[np.int64]) -> MaskedTexts:
        tokens, ends = _texts_of_one(self.dataset, numbers)
        name = f"{type(self.dataset).__name__}.texts"
        is_trained = np.ones(np.shape(tokens), np.bool_)
        texts = _checked_texts(name, (tokens, ends, is_trained), len(numbers))
        for transform in self.transforms:
            name = type(transform).__name__
            old, texts = texts, _checked_texts(name, transform.apply(texts, numbers), len(numbers))
            if not transform.changes_tokens and not np.array_equal(texts.ends, old.ends):
                raise ConfigError(
                    f"{name} returned texts of other lengths: its changes_tokens must be True"
                )
        return texts

    def fingerprint(self) -> dict[str, Any]:
        """See `Dataset.fingerprint`.

        Transforms that change tokens belong to the order, those that only mask to the view.
        """
        fingerprint = self.dataset.fingerprint()
        if not self.transforms:
            return fingerprint
        entries = [transform.fingerprint() for transform in self.transforms]
        pairs = list(zip(self.transforms, entries, strict=True))
        order = [entry for transform, entry in pairs if transform.changes_tokens]
        view = {**fingerprint.get("view", {}), "transforms": entries}
        return {**fingerprint, **({"transforms": order} if order else {}), "view": view}


class MaskedTexts(NamedTuple):
    """The texts of some samples, and which of their tokens are trained on.

    Attributes:
        tokens: Tokens of all texts, one text after the other, the last labels included: int64 [n].
        ends: Where each text ends among them: int64 [batch].
        is_trained: Whether each token has a loss where it is the label: bool [n].
    """

    tokens: NDArray[np.int64]
    ends: NDArray[np.int64]
    is_trained: NDArray[np.bool_]


class Transform(Protocol):
    """A function from texts to texts.

    A transform may offer one attribute more: `dataset`, the only dataset that it works for, because
    it looks up positions in its token files. It comes before transforms that change tokens.
    """

    changes_tokens: bool
    """Whether it changes tokens, and not only which of them are trained on."""

    def apply(self, texts: MaskedTexts, sample_numbers: NDArray[np.int64]) -> MaskedTexts:
        """The transformed texts of some samples.

        Each text depends on the old text and its sample number alone.

        Args:
            texts: The texts. Their arrays are not written to.
            sample_numbers: Sample number of each text: int64 [batch].
        """
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What decides the result, as plain values, for comparison with a saved state."""
        ...


def _list_of(transforms: Any) -> list[Any]:
    try:
        return list(transforms)
    except TypeError:
        raise ConfigError(f"transforms is {shown(transforms)}; give a list of transforms") from None


def _check_transforms(dataset: Dataset, transforms: Sequence[Any]) -> bool:
    """Whether one of the transforms changes tokens; a ConfigError if they cannot work."""
    if not hasattr(dataset, "texts"):
        hint = (
            "give all transforms in one list"
            if isinstance(dataset, TransformedDataset)
            else "transforms need it to read the tokens of samples"
        )
        raise ConfigError(f"a {type(dataset).__name__} has no method `texts`: {hint}")
    changes_tokens = False
    for place, transform in enumerate(transforms):
        if isinstance(transform, type):
            raise ConfigError(
                f"transform {place} is the class {transform.__name__}; give an object of it"
            )
        for name in ("apply", "fingerprint", "changes_tokens"):
            if not hasattr(transform, name):
                raise ConfigError(
                    f"transform {place} is {shown(transform)}, which has no {name!r}: see "
                    "millrace.samples.transforms.transformed.Transform"
                )
        if (own := getattr(transform, "dataset", None)) is not None:
            kind = type(transform).__name__
            if own is not dataset:
                raise ConfigError(f"transform {place}, {kind}, was made for another dataset")
            if changes_tokens:
                raise ConfigError(
                    f"transform {place}, {kind}, knows where tokens are in the token file: put it "
                    "before the transforms that change tokens"
                )
        changes_tokens = changes_tokens or transform.changes_tokens
    return changes_tokens


def _narrowed(tokens: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    limits = np.iinfo(dtype)
    least, most = (int(tokens.min()), int(tokens.max())) if tokens.size > 0 else (0, 0)
    if least < limits.min or most > limits.max:
        raise ConfigError(
            f"the transformed tokens go from {least} to {most}; the token file's dtype is {dtype}, "
            f"{limits.min} to {limits.max}. Pass token_dtype='int32' or 'int64'"
        )
    return tokens.astype(dtype)


def _parts_of(texts: MaskedTexts, options: SampleOptions, form: BatchForm) -> Parts:
    """The parts of transformed texts: a part ends with an EOD, or with its text."""
    if "document_numbers" in form.fields or "document_bounds" in form.fields:
        raise ConfigError(
            "a transform has changed the tokens, so their documents in the token file are not "
            "known: leave out document_numbers and document_bounds"
        )
    if options.eod_token is None:
        raise ConfigError(
            "a transform has changed the tokens, so documents are told apart by EOD: give the "
            "dataset its eod_token, or leave out document_ids, cu_seqlens, max_seqlen and "
            "attention_mask"
        )
    is_last = texts.tokens == options.eod_token
    is_last[texts.ends[np.diff(texts.ends, prepend=0) > 0] - 1] = True
    stops = np.flatnonzero(is_last) + 1
    bounds = np.searchsorted(stops, np.append(0, texts.ends), side="right")
    counts = np.diff(stops, prepend=0)
    return find_parts(counts, bounds, np.zeros_like(counts), options)


def _checked_texts(name: str, texts: Any, num_texts: int) -> MaskedTexts:
    """What a dataset or transform returned, if it is texts."""
    try:
        tokens, ends, is_trained = (np.ascontiguousarray(array) for array in texts)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} returned {shown(texts)}; MaskedTexts are needed") from None
    forms = [(array.dtype, array.ndim) for array in (tokens, ends, is_trained)]
    needed = [(np.dtype(np.int64), 1), (np.dtype(np.int64), 1), (np.dtype(np.bool_), 1)]
    if forms != needed or len(ends) != num_texts or len(is_trained) != len(tokens):
        arrays = zip(MaskedTexts._fields, (tokens, ends, is_trained), strict=True)
        forms_shown = ", ".join(f"{name} {one.dtype} {list(one.shape)}" for name, one in arrays)
        raise ConfigError(
            f"{name} returned {forms_shown}; tokens int64 [n], ends int64 [{num_texts}] and "
            "is_trained bool [n] are needed"
        )
    bounds = np.append(0, ends)
    if bounds[-1] != len(tokens) or np.any(bounds[1:] < bounds[:-1]):
        raise ConfigError(
            f"{name} returned ends {shown(ends.tolist())} for {len(tokens)} tokens; they must not "
            "go backwards, and the last one must be the number of tokens"
        )
    return MaskedTexts(tokens, ends, is_trained)


def _options_of(dataset: Dataset) -> SampleOptions:
    """The options of all samples of a dataset."""
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    options = [
        _options_of(part) if isinstance(part, BlendedDataset) else getattr(part, "options", None)
        for part in parts
    ]
    if options[0] is None or options.count(options[0]) != len(options):
        raise ConfigError(
            "a transform that changes tokens needs a dataset with `options`, the same for all "
            "samples: transform each dataset of the blend alone"
        )
    return options[0]
