"""The order of sequences of one length, as they are stored."""

from __future__ import annotations

from typing import Any

from millrace import _native
from millrace.checks import flag, whole
from millrace.order.spans import RULES_VERSION, CoreOrder


class SequenceOrder(CoreOrder):
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

    def __len__(self) -> int:
        return self.num_samples

    def _make_core(self) -> _native.Order:
        num_tokens = self.sequence_length + self.add_extra_token
        return _native.sequence_order(self.num_samples, num_tokens)

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the spans."""
        return {
            "kind": "sequences",
            "rules": RULES_VERSION,
            "num_samples": self.num_samples,
            "sequence_length": self.sequence_length,
            "add_extra_token": self.add_extra_token,
        }
