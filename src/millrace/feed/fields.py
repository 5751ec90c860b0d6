"""Which arrays a batch has."""

from __future__ import annotations

from dataclasses import dataclass

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """Which arrays a batch has."""

    fields: tuple[str, ...] = FIELDS
    token_dtype: str = "int64"
    share_labels: bool = False
    vocab_size: int | None = None
    has_rows: bool = True
