"""What a sample looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millrace.checks import flag, token, whole
from millrace.errors import ConfigError

MAX_LENGTH = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What a sample looks like; see `GPTDataset` for each option.

    Raises:
        ConfigError: An option outside its limits, or that needs another one.
    """

    sequence_length: int
    add_extra_token: bool = True
    eod_token: int | None = None
    pad_token: int | None = None
    reset_position_ids: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {
            "sequence_length": whole("sequence_length", self.sequence_length, 1, MAX_LENGTH),
            "eod_token": token("eod_token", self.eod_token),
            "pad_token": token("pad_token", self.pad_token),
        }
        for name in ("add_extra_token", "reset_position_ids", "eod_mask_loss"):
            plain[name] = flag(name, getattr(self, name))
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if (self.reset_position_ids or self.eod_mask_loss) and self.eod_token is None:
            raise ConfigError("reset_position_ids and eod_mask_loss look for EOD: give eod_token")
