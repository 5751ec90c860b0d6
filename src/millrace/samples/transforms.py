"""Transforms: functions of the token batch.

A transform says for each token where it was, and whether it is trained on. It is a pure function of
tokens and sample numbers, so a sample is the same whatever the batch, rank or thread that reads it,
and after a resume.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from millrace import _native
from millrace.checks import (
    MAX_INT32,
    MAX_INT64,
    check_bool,
    check_float,
    check_int,
    check_token,
    shown,
)
from millrace.errors import ConfigError
from millrace.samples.tokens import Numbers, TokenBatch, check_tokens


class Transform(Protocol):
    """A function from token batches to token batches.

    One that looks up positions in token files has an attribute `dataset`, the only one that it
    works for, and comes before transforms that change tokens.
    """

    changes_tokens: bool
    """Whether it changes tokens, and not only which of them are trained on."""

    def __call__(self, batch: TokenBatch, sample_numbers: Numbers) -> tuple[Numbers | None, Any]:
        """The transformed tokens of some samples, each by its old ones and its number alone.

        Args:
            batch: The tokens, in arrays that are not written to.
            sample_numbers: Number of each sample: int64 [batch].

        Returns:
            The old place in the batch of each new token, int64 [n], -1 for an inserted one; None if
            no token has moved. The new batch, of which tokens and ends are enough: what is known of
            a token follows it (see `TokenBatch.moved` and, for None, `TokenBatch.kept`).
        """

    def fingerprint(self) -> dict[str, Any]:
        """What decides the result, as plain values, for comparison with a saved state."""


def transformed(transform: Any, batch: TokenBatch, sample_numbers: Numbers) -> TokenBatch:
    """The batch that a transform makes of a batch."""
    name = type(transform).__name__
    answer = transform(batch, sample_numbers)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ConfigError(f"{name} returned {shown(answer)}; (take, TokenBatch) is needed")
    take, new = answer[0], check_tokens(name, answer[1], len(batch))
    stays = take is None or not transform.changes_tokens
    if stays and not np.array_equal(batch.ends, new.ends):
        remedy = "`take` must say where tokens were, and changes_tokens be True"
        raise ConfigError(f"{name} changed where samples end: {remedy}")
    return batch.kept(new) if take is None else batch.moved(np.asarray(take), new)


def check_transforms(source: Any, transforms: Iterable[Any], boundaries: str = "") -> list[Any]:
    """The transforms as a list; a ConfigError if they cannot work."""
    if not isinstance(transforms, Iterable):
        raise ConfigError(f"transforms is {shown(transforms)}; give a list of transforms")
    transforms = list(transforms)
    has_moved = False
    for place, transform in enumerate(transforms):
        kind = type(transform).__name__
        methods = ("fingerprint", "changes_tokens", "__call__")
        if isinstance(transform, type) or not all(hasattr(transform, name) for name in methods):
            raise ConfigError(
                f"transform {place} is {shown(transform)}; give an object with {', '.join(methods)}"
            )
        own = getattr(transform, "dataset", None)
        if own is not None and own is not source:
            raise ConfigError(f"transform {place}, {kind}, was made for another dataset")
        if own is not None and has_moved:
            raise ConfigError(
                f"transform {place}, {kind}, looks tokens up in the token file: put it before the "
                "transforms that change tokens"
            )
        if boundaries == "documents" and getattr(transform, "eod_token", 0) is None:
            raise ConfigError(f"{kind} takes a sample for one document: give it an eod_token")
        has_moved = has_moved or transform.changes_tokens
    return transforms


@dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """Permutes documents so that the model learns to fill in their middle.

    A sample is split into documents at each EOD, or is one document without `eod_token`. A document
    is permuted with probability `rate`: two cuts split its tokens into prefix, middle and suffix,
    any of which may be empty, and they are written as one of

        PSM:  prefix_token, prefix, suffix_token, suffix, middle_token, middle
        SPM:  prefix_token, suffix_token, suffix, middle_token, prefix, middle

    The sample keeps its length: the inserted tokens push out its last tokens. The document that
    does not fit any more is cut and then permuted, so that a permuted document has all three
    inserted tokens. A document of which fewer than 3 tokens would remain is not permuted. An EOD
    stays behind its document.

    The cuts are places between tokens, not characters: there is no tokenizer at training time.

    The draws of document d (0, 1, ...) of sample k are the four words of
    `np.random.Philox(key=seed, counter=[d, k, 0, 0]).random_raw(4)`: whether it is permuted,
    whether as SPM, and the two cuts, each uniform over all places.

    Args:
        rate: Probability that a document is permuted, 0 to 1.
        spm_rate: Probability that a permuted document is written as SPM, 0 to 1.
        prefix_token, middle_token, suffix_token: Ids of the three inserted tokens.
        eod_token: End-of-document token; None: a sample is one document.
        pad_token: Padding token. Padding at the end of a sample makes room for inserted tokens, and
            belongs to no document. None: no padding.
        seed: Seed of the draws, 0 to 2**63 - 1.

    Raises:
        ConfigError: A rate outside [0, 1], or a token that is not an id or equals another one.

    Example:
        >>> fill = FillInMiddle(
        ...     rate=1, spm_rate=0, prefix_token=97, middle_token=98, suffix_token=99, seed=3
        ... )
        >>> take, batch = fill(TokenBatch(np.arange(12), np.array([12])), np.array([0]))
        >>> batch.tokens.tolist()
        [97, 0, 1, 2, 99, 7, 8, 98, 3, 4, 5, 6]
        >>> take.tolist()
        [-1, 0, 1, 2, -1, 7, 8, -1, 3, 4, 5, 6]
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
        inserted = ("prefix_token", "middle_token", "suffix_token")
        for name in ("seed", *inserted):
            vars(self)[name] = check_int(name, getattr(self, name), 0, MAX_INT64)
        for name in ("rate", "spm_rate"):
            vars(self)[name] = check_float(name, getattr(self, name), 0, 1)
        for name in ("eod_token", "pad_token"):
            vars(self)[name] = check_token(name, getattr(self, name))
        names: dict[int, str] = {}
        for name in (*inserted, "eod_token", "pad_token"):
            token = getattr(self, name)
            other = names.setdefault(token, name)
            if other in inserted and other != name:
                raise ConfigError(
                    f"{other} and {name} are both {token}: give each a token id of its own"
                )

    def __call__(self, batch: TokenBatch, sample_numbers: Numbers) -> tuple[Numbers, TokenBatch]:
        tokens, take = _native.fill_in_middle(
            batch.tokens.astype(np.int64, copy=False), batch.ends, sample_numbers, **asdict(self)
        )
        return take, TokenBatch(tokens, batch.ends)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "fill_in_middle", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class RepeatGuard:
    """Takes the loss from runs in which the same few tokens repeat over and over.

    A run of period p is a longest stretch of a sample in which each token but the last p equals the
    one p places later. In a run of at least p * min_repeats tokens, with p at most `max_period`, no
    token is trained on, not even in the first repetition.

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
        vars(self).update(
            max_period=check_int("max_period", self.max_period, 1, MAX_INT32),
            min_repeats=check_int("min_repeats", self.min_repeats, 2, MAX_INT32),
            whole_sample=check_bool("whole_sample", self.whole_sample),
        )

    def __call__(self, batch: TokenBatch, sample_numbers: Numbers) -> tuple[None, TokenBatch]:
        tokens = batch.tokens.astype(np.int64, copy=False)
        marks = _native.mark_repeats(
            tokens, batch.ends, self.max_period, self.min_repeats, self.whole_sample
        )
        return None, batch.untrained(marks.view(np.bool_))

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "repeat_guard", **asdict(self)}
