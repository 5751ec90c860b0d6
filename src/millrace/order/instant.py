"""The instant order: fixed windows of the stored tokens, permuted in each epoch, without a table.

`docs/instant_order.md` defines it (S1 to S8).
"""

import hashlib
import json
from typing import Any, NamedTuple

import numpy as np

from millrace import _native
from millrace.checks import MAX_INT64, check_bool, check_int
from millrace.deferred import cached_property
from millrace.errors import ConfigError
from millrace.order.spans import RULES_VERSION, CoreOrder


def num_windows(num_tokens: Any, length: Any) -> Any:
    """Windows of an epoch: as many for every offset, and one more token for the last label (S3)."""
    return (num_tokens - length) // length


def check_windows(what: str, num_tokens: int, length: int, mix_window: int = 1) -> None:
    """Raises ConfigError for too few tokens for a window of so many samples (S8)."""
    if num_windows(num_tokens, mix_window * length) < 1:
        mixed = "" if mix_window == 1 else f", {mix_window} in a window,"
        raise ConfigError(
            f"{what} has {num_tokens} tokens; samples of {length} tokens{mixed} need "
            f"{2 * mix_window * length}: shorten the sequence length, or leave the source out"
        )


def source_key(seed: int, name: str) -> int:
    """What decides the permutations of a source: its name, not its place in a list (S1)."""
    text = json.dumps(["instant", seed, name], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class Position(NamedTuple):
    """Where a source is: behind the first `drawn` tokens of the windows of an epoch (S5).

    The three may be arrays, of many sources, like the other arguments of the methods but the
    sequence length.
    """

    epoch: Any
    window_length: Any
    drawn: Any

    def before_draw(self, num_tokens: Any, sequence_length: int, mix_window: Any = 1) -> "Position":
        """The position at which the next sample of that length is drawn (S6)."""
        length = self.window_length
        drawn = -(-self.drawn // sequence_length) * sequence_length
        size = num_windows(num_tokens, length) * length
        return _chosen(
            (length % sequence_length == 0) & (drawn < size),
            self._replace(drawn=drawn),
            Position(self.epoch + 1, mix_window * sequence_length, 0),
        )

    def samples_left(self, num_tokens: Any, sequence_length: int) -> Any:
        """Samples of that length that are left in the epoch, for a position before a draw."""
        size = num_windows(num_tokens, self.window_length) * self.window_length
        return (size - self.drawn) // sequence_length

    def after(
        self, draws: Any, num_tokens: Any, sequence_length: int, mix_window: Any = 1
    ) -> "Position":
        """The position some draws later, for a position before a draw."""
        later = draws - self.samples_left(num_tokens, sequence_length)
        length = mix_window * sequence_length
        epochs, rest = divmod(later - 1, num_windows(num_tokens, length) * mix_window)
        return _chosen(
            later <= 0,
            self._replace(drawn=self.drawn + draws * sequence_length),
            Position(self.epoch + 1 + epochs, length, (rest + 1) * sequence_length),
        )


UNDRAWN = Position(-1, 1, 1 << 62)
"""The position of a source before its first draw: at the end of an epoch before the first one."""


def _chosen(condition: Any, one: Position, other: Position) -> Position:
    """One position or the other, or of many sources the one or the other of each."""
    if not isinstance(condition, np.ndarray):
        return one if condition else other
    return Position(*(np.where(condition, *pair) for pair in zip(one, other, strict=True)))


class InstantOrder(CoreOrder):
    """The samples of one source of an instant order: it needs no index and no build.

    Args:
        num_tokens: Number of tokens of the source, at least two samples' worth.
        name: Name of the source, which decides its permutations with the seed.
        seed: Seed of the run, at least 0.
        num_samples: Number of samples, through as many epochs as needed; None: no limit.
        sequence_length, add_extra_token: As in `OrderInputs`.
        first_token: The source's first token in the token file.
        position: Where the source is before sample 0; None: at the start of epoch 0.

    Raises:
        ConfigError: An argument outside its limits, or too few tokens for a sample.

    Example:
        >>> order = InstantOrder(100, "web", seed=1, sequence_length=8)
        >>> spans = order.spans([0, 1])
        >>> spans.offsets.tolist(), spans.counts.tolist()
        ([36, 4], [9, 9])
    """

    def __init__(
        self,
        num_tokens: int,
        name: str,
        seed: int,
        *,
        sequence_length: int,
        add_extra_token: bool = True,
        num_samples: int | None = None,
        first_token: int = 0,
        position: Position | None = None,
    ) -> None:
        self.name, self.seed = name, check_int("seed", seed, 0)
        self.sequence_length = check_int("sequence_length", sequence_length, 1, MAX_INT64 // 4)
        self.num_tokens = check_int("num_tokens", num_tokens, 0, MAX_INT64 // 4)
        self.first_token = check_int("first_token", first_token, 0, MAX_INT64 // 4)
        self.add_extra_token = check_bool("add_extra_token", add_extra_token)
        num_samples = MAX_INT64 if num_samples is None else num_samples
        self.num_samples = check_int("num_samples", num_samples, 0, MAX_INT64)
        self.position = Position(0, sequence_length, 0) if position is None else position
        check_windows(f"source {name}", num_tokens, sequence_length)

    def __len__(self) -> int:
        return self.num_samples

    @cached_property
    def core(self) -> _native.Order:
        epoch, length, drawn = self.position
        return _native.InstantOrder(
            (self.first_token, self.num_tokens),
            source_key(self.seed, self.name),
            (epoch, length, drawn),
            self.sequence_length,
            self.add_extra_token,
            self.num_samples,
        )

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the spans; not the number of samples, for any sample is the same."""
        names = ("name", "seed", "first_token", "num_tokens", "sequence_length", "add_extra_token")
        values = {name: getattr(self, name) for name in names}
        return {"kind": "instant", "rules": RULES_VERSION, **values, "position": [*self.position]}
