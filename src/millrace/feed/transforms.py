"""Transforms of samples: fill-in-the-middle, and masks of losses.

A transform takes the texts of some samples, which are their raw tokens, and says for each token
whether the model is trained to predict it. It is a pure function of texts and sample numbers, so a
sample is the same whatever the batch, rank or thread that reads it, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import MAX_INT32, MAX_INT64, flag, real, shown, token, whole, whole_numbers
from millrace.errors import ConfigError
from millrace.feed.datasets import BlendedDataset, Dataset, _sample
from millrace.feed.samples import FIELDS, Batch
from millrace.feed.size_watch import SizeWatch
from millrace.options import SampleOptions
from millrace.order import Spans
from millrace.order.spans import MappedFiles


class TransformedDataset:
    """A dataset whose samples are transformed.

    The transforms are applied in their order. Tokens and labels are made of the transformed texts
    by the options of the dataset, as for texts that the token file holds; then the loss mask is
    set to 0 wherever the label is a token that is not trained on.

    Args:
        dataset: `GPTDataset`, `BlendedDataset` of such, or another dataset with a method `texts`
            and, if a transform changes tokens, with `options`.
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
        self.transforms = list(transforms)
        self._changes_tokens = _check_transforms(dataset, self.transforms)
        self._options = _options_of(dataset) if self._changes_tokens else None
        self._watch = SizeWatch()

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
    def spans(self) -> Callable[[ArrayLike], Spans]:
        """The dataset's method: where the tokens come from, before they are transformed."""
        spans: Callable[[ArrayLike], Spans] = self.dataset.spans  # type: ignore[attr-defined]
        return spans

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample_number: SupportsIndex) -> Batch:
        """One sample; see `GPTDataset`."""
        return _sample(self, sample_number)

    def batch(self, sample_numbers: ArrayLike) -> Batch:
        """The transformed samples of these numbers; see `GPTDataset.batch`."""
        numbers = whole_numbers("sample numbers", sample_numbers)
        self._watch.look(self._own_files)
        texts = self._transformed_texts(numbers)
        if self._options is None:
            batch = self.dataset.batch(numbers)
        else:
            batch = dict(
                zip(
                    FIELDS,
                    _native.fill_rows(texts.tokens, texts.ends, self._options),
                    strict=True,
                )
            )
        if not texts.is_trained.all():
            batch["loss_mask"] = _native.mask_losses(
                batch["loss_mask"], texts.is_trained.view(np.uint8), texts.ends
            )
        return batch

    def _transformed_texts(self, numbers: NDArray[np.int64]) -> MaskedTexts:
        tokens, ends = self.dataset.texts(numbers)  # type: ignore[attr-defined]
        texts = MaskedTexts(tokens, ends, np.ones(len(tokens), np.bool_))
        for transform in self.transforms:
            texts = transform.apply(texts, numbers)
        return texts

    def mapped_files(self) -> list[MappedFiles]:
        """The files whose sizes are checked now and then."""
        return [*getattr(self.dataset, "mapped_files", list)(), *self._own_files()]

    def _own_files(self) -> list[MappedFiles]:
        return [file for one in self.transforms for file in getattr(one, "files", ())]

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

    A transform may offer two attributes more. `dataset` is the dataset whose places it knows: it
    can transform no other one, and it comes before transforms that change tokens. `files` are the
    mapped files that it reads.
    """

    changes_tokens: bool
    """Whether texts change, and not only what of them is trained on."""

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


@dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """Permutes documents so that the model learns to fill in their middle.

    A text is split into documents at each EOD, or is one document without `eod_token`. Each
    document is permuted with probability `rate`: two cuts split its tokens into prefix, middle and
    suffix, any of which may be empty, and they are written as one of

        PSM:  prefix_token, prefix, suffix_token, suffix, middle_token, middle
        SPM:  prefix_token, suffix_token, suffix, middle_token, prefix, middle

    The text keeps its length: the inserted tokens push out the last tokens of the text. The
    document that does not fit any more is cut first and permuted then, so that a permuted document
    has all of its three inserted tokens. A document of which fewer than 3 tokens would remain is
    not permuted. An EOD stays behind its document.

    The cuts are places between tokens, not characters: there is no tokenizer at training time.

    The draws of document d (0, 1, ...) of sample k are the four words of a counter-based generator,
    `np.random.Philox(key=seed, counter=[d, k, 0, 0]).random_raw(4)`: whether it is permuted,
    whether as SPM, and the two cuts, each uniform over all places.

    Args:
        rate: Probability that a document is permuted, 0 to 1.
        spm_rate: Probability that a permuted document is written as SPM, 0 to 1.
        prefix_token, middle_token, suffix_token: Token ids of the three inserted tokens.
        eod_token: End-of-document token; None: a text is one document.
        pad_token: Padding token. Padding at the end of a text makes room for inserted tokens, and
            belongs to no document. None: the texts are not padded.
        seed: Seed of the draws, 0 to 2**63 - 1.

    Raises:
        ConfigError: A rate outside [0, 1], or a token that is not a token id or equals another one.

    Example:
        >>> fill = FillInMiddle(
        ...     rate=1, spm_rate=0, prefix_token=97, middle_token=98, suffix_token=99, seed=3
        ... )
        >>> tokens = np.arange(12)
        >>> texts = MaskedTexts(tokens, np.array([12]), np.ones(12, bool))
        >>> fill.apply(texts, np.array([0])).tokens.tolist()
        [97, 0, 1, 2, 99, 7, 8, 98, 3, 4, 5, 6]
    """

    rate: float
    spm_rate: float = 0.5
    prefix_token: int
    middle_token: int
    suffix_token: int
    eod_token: int | None = None
    pad_token: int | None = None
    seed: int

    changes_tokens = True

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {"seed": whole("seed", self.seed, 0, MAX_INT64)}
        for name in ("rate", "spm_rate"):
            plain[name] = real(name, getattr(self, name))
            if not 0 <= plain[name] <= 1:  # NaN too
                raise ConfigError(f"{name} is {plain[name]}; 0 to 1 is possible")
        inserted = ("prefix_token", "middle_token", "suffix_token")
        for name in inserted:
            plain[name] = whole(name, getattr(self, name), 0, MAX_INT64)
        for name in ("eod_token", "pad_token"):
            plain[name] = token(name, getattr(self, name))
        names: dict[int, str] = {}
        for name in (*inserted, "eod_token", "pad_token"):
            other = names.setdefault(plain[name], name)
            if other in inserted and other != name:
                raise ConfigError(
                    f"{other} and {name} are both {plain[name]}: a model could not tell them "
                    "apart. Give each a token id of its own"
                )
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def apply(self, texts: MaskedTexts, sample_numbers: NDArray[np.int64]) -> MaskedTexts:
        """See `Transform.apply`."""
        tokens, flags = _native.fill_in_middle(
            texts.tokens,
            texts.is_trained.view(np.uint8),
            texts.ends,
            sample_numbers,
            **asdict(self),
        )
        return MaskedTexts(tokens, texts.ends, flags.view(np.bool_))

    def fingerprint(self) -> dict[str, Any]:
        """See `Transform.fingerprint`."""
        return {"kind": "fill_in_middle", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class RepeatGuard:
    """Takes the loss from runs in which the same few tokens repeat over and over.

    A run of period p is a longest stretch of a text in which each token equals the one p places
    later, the last p tokens excepted. Where a run has at least p * min_repeats tokens, and p is at
    most `max_period`, none of its tokens is trained on, the first repetition included.

    Args:
        max_period: Largest number of tokens that are repeated, 1 to 2**31 - 1.
        min_repeats: Smallest number of times that they stand in a row, 2 to 2**31 - 1.
        whole_sample: Whether a sample with such a run has no loss at all.

    Raises:
        ConfigError: A number outside its limits.
    """

    max_period: int = 13
    min_repeats: int = 32
    whole_sample: bool = False

    changes_tokens = False

    def __post_init__(self) -> None:
        plain = {
            "max_period": whole("max_period", self.max_period, 1, MAX_INT32),
            "min_repeats": whole("min_repeats", self.min_repeats, 2, MAX_INT32),
            "whole_sample": flag("whole_sample", self.whole_sample),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def apply(self, texts: MaskedTexts, sample_numbers: NDArray[np.int64]) -> MaskedTexts:
        """See `Transform.apply`."""
        marks = _native.mark_repeats(
            texts.tokens, texts.ends, self.max_period, self.min_repeats, self.whole_sample
        )
        return texts._replace(is_trained=texts.is_trained & ~marks.view(np.bool_))

    def fingerprint(self) -> dict[str, Any]:
        """See `Transform.fingerprint`."""
        return {"kind": "repeat_guard", **asdict(self)}


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
        for name in ("apply", "fingerprint", "changes_tokens"):
            if not hasattr(transform, name):
                raise ConfigError(
                    f"transform {place} is {shown(transform)}, which has no {name!r}: see "
                    "millrace.feed.transforms.Transform"
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
