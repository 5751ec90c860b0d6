"""What a sample looks like: the options that the datasets, the core and its twins share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millrace.checks import MAX_INT32, flag, token, whole
from millrace.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What a sample looks like. The core reads the fields by name (`cpp/rows.hpp` has the same).

    Args:
        sequence_length: Number of tokens to train on in a sample, 1 to 2**31 - 1.
        add_extra_token: Whether a sample has one token more, the last label. Without it the last
            label is missing and masked.
        eod_token: The end-of-document token; `reset_position_ids` and `eod_mask_loss` need it.
        pad_token: The padding token, which is never trained on: where a label equals it, the loss
            mask is 0, and it becomes token 0 in tokens and labels. None: every token is trained on.
        reset_position_ids: Whether position ids start again after each EOD.
        eod_mask_loss: Whether the loss mask is 0 where the input is EOD.

    Raises:
        ConfigError: An option outside its limits, or one that needs another.
    """

    sequence_length: int
    add_extra_token: bool = True
    eod_token: int | None = None
    pad_token: int | None = None
    reset_position_ids: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {
            "sequence_length": whole("sequence_length", self.sequence_length, 1, MAX_INT32),
            "eod_token": token("eod_token", self.eod_token),
            "pad_token": token("pad_token", self.pad_token),
        }
        for name in ("add_extra_token", "reset_position_ids", "eod_mask_loss"):
            plain[name] = flag(name, getattr(self, name))
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if (self.reset_position_ids or self.eod_mask_loss) and self.eod_token is None:
            raise ConfigError("reset_position_ids and eod_mask_loss look for EOD: give eod_token")
