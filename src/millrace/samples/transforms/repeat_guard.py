"""A guard against runs of repeated tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from millrace import _native
from millrace.checks import MAX_INT32, flag, whole
from millrace.samples.tokens import Numbers, TokenBatch


@dataclass(frozen=True, kw_only=True)
class RepeatGuard:
    """Takes the loss from runs in which the same few tokens repeat over and over.

    A run of period p is a longest stretch of a sample in which each token equals the one p places
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

    def __call__(self, batch: TokenBatch, sample_numbers: Numbers) -> tuple[None, TokenBatch]:
        """See `Transform`."""
        tokens = batch.tokens.astype(np.int64, copy=False)
        marks = _native.mark_repeats(
            tokens, batch.ends, self.max_period, self.min_repeats, self.whole_sample
        )
        return None, batch.untrained(marks.view(np.bool_))

    def fingerprint(self) -> dict[str, Any]:
        """See `Transform.fingerprint`."""
        return {"kind": "repeat_guard", **asdict(self)}
