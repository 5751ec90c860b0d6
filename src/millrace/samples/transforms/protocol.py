"""Transforms: functions of the token batch.

A transform says for each token where it was, and whether the model is trained to predict it. It is
a pure function of tokens and sample numbers, so a sample is the same whatever the batch, rank or
thread that reads it, and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.checks import shown
from millrace.errors import ConfigError
from millrace.samples.tokens import Numbers, TokenBatch, check_tokens


class Transform(Protocol):
    """A function from token batches to token batches.

    A transform may offer one attribute more: `dataset`, the only dataset that it works for, because
    it looks up positions in its token files. It comes before transforms that change tokens.
    """

    changes_tokens: bool
    """Whether it changes tokens, and not only which of them are trained on."""

    def __call__(self, batch: TokenBatch, sample_numbers: Numbers) -> tuple[Numbers | None, Any]:
        """The transformed tokens of some samples.

        Each sample depends on its old tokens and its sample number alone.

        Args:
            batch: The tokens. Their arrays are not written to.
            sample_numbers: Sample number of each sample: int64 [batch].

        Returns:
            The old place in the batch of each new token, int64 [n], -1 for an inserted one; None if
            no token has moved. The new batch: what is known of a token follows it by itself (see
            `TokenBatch.moved`), so that a batch of tokens and ends is enough.
        """
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What decides the result, as plain values, for comparison with a saved state."""
        ...


class MaskedTokens(NamedTuple):
    """What a transform with a method `apply` gets and returns.

    Attributes:
        tokens: Tokens of all samples, one sample after the other, the last labels included: int64
            [n].
        ends: Where each sample ends among them: int64 [batch].
        is_trained: Whether each token has a loss where it is the label: bool [n].
    """

    tokens: Numbers
    ends: Numbers
    is_trained: NDArray[np.bool_]


def transformed(transform: Any, batch: TokenBatch, sample_numbers: Numbers) -> TokenBatch:
    """The batch that a transform makes of a batch, with all that follows its tokens.

    Raises:
        ConfigError: Something else than a transform returns.
    """
    name = type(transform).__name__
    if hasattr(transform, "apply"):
        return _applied(transform, batch, sample_numbers)
    answer = transform(batch, sample_numbers)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ConfigError(f"{name} returned {shown(answer)}; (take, TokenBatch) is needed")
    take, new = answer[0], check_tokens(name, answer[1], len(batch))
    if not transform.changes_tokens:
        _check_ends(name, batch.ends, new.ends)
    if take is None:
        _check_ends(f"{name} without `take`", batch.ends, new.ends)
        return new
    return batch.moved(np.asarray(take), new)


def _applied(transform: Any, batch: TokenBatch, sample_numbers: Numbers) -> TokenBatch:
    """The same for a transform of masked tokens, which does not say where its tokens were."""
    name = type(transform).__name__
    trained = np.ones(len(batch.tokens), np.bool_) if batch.trained is None else batch.trained
    old = MaskedTokens(batch.tokens.astype(np.int64, copy=False), batch.ends, trained)
    answer = transform.apply(old, sample_numbers)
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise ConfigError(f"{name} returned {shown(answer)}; (tokens, ends, is_trained) is needed")
    try:
        new = TokenBatch(*answer)
    except ConfigError as error:
        raise ConfigError(f"{name} returned other arrays: {error}") from None
    check_tokens(name, new, len(batch))
    if transform.changes_tokens:  # what was known of the old tokens is lost
        own = {name: entry for name, entry in batch.fields.items() if entry[0] == "sample"}
        return replace(new, fields=own)
    _check_ends(name, batch.ends, new.ends)
    return replace(batch, tokens=new.tokens, trained=new.trained)


def _check_ends(name: str, old: Numbers, new: Numbers) -> None:
    if not np.array_equal(old, new):
        raise ConfigError(f"{name} changed where samples end: its changes_tokens must be True")


def check_transforms(source: Any, transforms: Iterable[Any]) -> list[Any]:
    """The transforms as a list; a ConfigError if they cannot work."""
    try:
        transforms = list(transforms)
    except TypeError:
        raise ConfigError(f"transforms is {shown(transforms)}; give a list of transforms") from None
    changes_tokens = False
    for place, transform in enumerate(transforms):
        if isinstance(transform, type):
            raise ConfigError(
                f"transform {place} is the class {transform.__name__}; give an object of it"
            )
        for name in ("fingerprint", "changes_tokens"):
            if not hasattr(transform, name):
                raise ConfigError(
                    f"transform {place} is {shown(transform)}, which has no {name!r}: see "
                    "millrace.samples.Transform"
                )
        if not callable(transform) and not hasattr(transform, "apply"):
            raise ConfigError(f"transform {place} is {shown(transform)}, which cannot be called")
        if (own := getattr(transform, "dataset", None)) is not None:
            kind = type(transform).__name__
            if own is not source:
                raise ConfigError(f"transform {place}, {kind}, was made for another dataset")
            if changes_tokens:
                raise ConfigError(
                    f"transform {place}, {kind}, knows where tokens are in the token file: put it "
                    "before the transforms that change tokens"
                )
        changes_tokens = changes_tokens or transform.changes_tokens
    return transforms
