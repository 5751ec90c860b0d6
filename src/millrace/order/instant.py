"""The instant order: fixed windows of the stored tokens, permuted in each epoch, without a table.

`docs/instant_order.md` defines it (S1 to S8).
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import MAX_INT64, check_bool, check_int
from millrace.deferred import cached_property
from millrace.errors import ConfigError
from millrace.order.spans import RULES_VERSION, CoreOrder
from millrace.order.splits import Range


def num_windows(num_tokens: int, length: int) -> int:
    """Windows of an epoch: as many for every offset, and one more token for the last label (S3)."""
    return (num_tokens - length) // length


def check_windows(what: str, num_tokens: int, length: int) -> None:
    """Raises ConfigError for too few tokens for a sample (S8)."""
    if num_windows(num_tokens, length) < 1:
        raise ConfigError(
            f"{what} has {num_tokens} tokens; samples of {length} tokens need {2 * length}: "
            "shorten the sequence length, or leave the source out"
        )


def source_key(seed: int, name: str) -> int:
    """What decides the permutations of a source: its name, not its place in a list (S1)."""
    text = json.dumps(["instant", seed, name], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class Position(NamedTuple):
    """Where a source is: behind the first `drawn` tokens of the windows of an epoch (S5)."""

    epoch: int
    window_length: int
    drawn: int

    def before_draw(self, num_tokens: int, sequence_length: int) -> "Position":
        """The position at which the next sample of that length is drawn (S6)."""
        length = self.window_length
        drawn = -(-self.drawn // sequence_length) * sequence_length
        if length % sequence_length == 0 and drawn < num_windows(num_tokens, length) * length:
            return self._replace(drawn=drawn)
        return Position(self.epoch + 1, sequence_length, 0)

    def samples_left(self, num_tokens: int, sequence_length: int) -> int:
        """Samples of that length that are left in the epoch, for a position before a draw."""
        size = num_windows(num_tokens, self.window_length) * self.window_length
        return (size - self.drawn) // sequence_length

    def after(self, draws: int, num_tokens: int, sequence_length: int) -> "Position":
        """The position some draws later, at least one, for a position before a draw."""
        left = self.samples_left(num_tokens, sequence_length)
        if draws <= left:
            return self._replace(drawn=self.drawn + draws * sequence_length)
        epochs, rest = divmod(draws - left - 1, num_windows(num_tokens, sequence_length))
        return Position(self.epoch + 1 + epochs, sequence_length, (rest + 1) * sequence_length)


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

    def find(self, tokens: Range, samples: Range) -> Iterator[NDArray[np.int64]]:
        """Those of a range of samples that may hold some tokens of the token file.

        The samples in whose windows the tokens lie: not all of them need hold any.

        Returns:
            Ascending numbers for each epoch, int64 [n].
        """
        (start, stop), length = samples, self.sequence_length
        while start < stop:
            here = self.position
            if start > 0:
                here = here.after(start, self.num_tokens, length)
                here = here.before_draw(self.num_tokens, length)
            epoch, window, drawn = here
            philox = np.random.Philox(key=source_key(self.seed, self.name), counter=epoch)
            offset, key = map(int, philox.random_raw(2))
            # The label behind a window belongs to its last sample.
            first, last = (token - self.first_token - (offset * window >> 64) for token in tokens)
            size = num_windows(self.num_tokens, window)
            windows = np.arange(max(first - 1, 0) // window, min(-(-last // window), size))
            places = _native.swap_or_not(windows, size, key, False)
            begins = places[:, None] * window + np.arange(0, window, length)
            end = min(start + here.samples_left(self.num_tokens, length), stop)
            numbers = np.sort(start + (begins.reshape(-1) - drawn) // length)
            yield numbers[(numbers >= start) & (numbers < end)]
            start = end

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the spans; not the number of samples, for any sample is the same."""
        names = ("name", "seed", "first_token", "num_tokens", "sequence_length", "add_extra_token")
        values = {name: getattr(self, name) for name in names}
        return {"kind": "instant", "rules": RULES_VERSION, **values, "position": [*self.position]}
