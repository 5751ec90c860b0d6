"""The order of sequences of one length, as they are stored."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from millrace import _native
from millrace.checks import flag, whole, whole_numbers
from millrace.order.spans import RULES_VERSION, Spans


class SequenceOrder:
    """Sequences of one length as samples: sample n is sequence n. It needs no index.

    Args:
        num_samples: Number of sequences.
        sequence_length: Number of tokens to train on in a sample.
        add_extra_token: Whether a sequence has one more token, for the last label.
    """

    def __init__(
        self, num_samples: int, *, sequence_length: int, add_extra_token: bool = False
    ) -> None:
        self.num_samples = whole("num_samples", num_samples, 0)
        self.sequence_length = whole("sequence_length", sequence_length, 1)
        self.add_extra_token = flag("add_extra_token", add_extra_token)
        self._core: _native.Order | None = None

    def __len__(self) -> int:
        return self.num_samples

    @property
    def core(self) -> _native.Order:
        """The same order in the native core."""
        if self._core is None:
            num_tokens = self.sequence_length + self.add_extra_token
            self._core = _native.sequence_order(self.num_samples, num_tokens)
        return self._core

    def spans(self, sample_numbers: ArrayLike) -> Spans:
        """The spans of some samples.

        Args:
            sample_numbers: Integers [batch], each in [0, len).

        Raises:
            ConfigError: Sample numbers that are not integers.
            ValueError: No such sample.
        """
        return Spans(*_native.spans(self.core, whole_numbers("sample numbers", sample_numbers)))

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the spans."""
        return {
            "kind": "sequences",
            "rules": RULES_VERSION,
            "num_samples": self.num_samples,
            "sequence_length": self.sequence_length,
            "add_extra_token": self.add_extra_token,
        }

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_core": None}  # made again where it is needed
