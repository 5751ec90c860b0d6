"""The instant order: fixed windows of the stored tokens, permuted in each epoch, without a table.

`docs/instant_order.md` defines it (S1 to S8).
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import MAX_INT64, check_bool, check_int, check_ints
from millrace.deferred import cached_property
from millrace.errors import ConfigError
from millrace.order.spans import RULES_VERSION, CoreOrder, Spans
from millrace.order.splits import Range

Pieces = NDArray[np.int64]
"""Pieces of a window: their sequences, first tokens in them, and counts of tokens, [3, pieces]."""


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

    mix_window = 1

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

    def epochs(self, num_samples: int) -> float:
        """Epochs of the source, from the first on, up to behind so many samples."""
        place = self.num_tokens, self.sequence_length, self.mix_window
        epoch, length, drawn = self.position.after(num_samples, *place)
        return float(epoch + drawn / (num_windows(self.num_tokens, length) * length))

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
                here = here.after(start, self.num_tokens, length, self.mix_window)
                here = here.before_draw(self.num_tokens, length, self.mix_window)
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


class MixedOrder(InstantOrder):
    """The samples of a source whose windows have several samples, and permuted documents.

    Args:
        mix_window: Number of samples in a window, at least 2.
        sequences_in: Function of a range of tokens of the file, start and stop. It returns the
            sequences that hold them: their numbers, first tokens and documents, int64 [n] each.
        options: The arguments of `InstantOrder`, of which `position` is needed.
    """

    core: Any = None  # the core knows no documents

    def __init__(
        self,
        *args: Any,
        mix_window: int,
        sequences_in: Callable[[int, int], tuple[NDArray[np.int64], ...]],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.mix_window, self._sequences_in = mix_window, sequences_in
        self._key = source_key(self.seed, self.name)
        self._last: tuple[Any, Pieces] = None, np.empty((3, 0), np.int64)

    def spans(self, sample_numbers: ArrayLike) -> Spans:
        numbers = check_ints("sample numbers", sample_numbers).tolist()
        samples = [self._sample(number) for number in numbers]
        sequences, offsets, counts = np.hstack([*samples, np.empty((3, 0), np.int64)])
        bounds = np.cumsum([0, *(sample.shape[1] for sample in samples)])
        return Spans(sequences, offsets, counts, bounds)

    def _sample(self, number: int) -> Pieces:
        """The pieces of a sample (W3)."""
        place = self.num_tokens, self.sequence_length, self.mix_window
        epoch, length, drawn = self.position.after(number, *place).before_draw(*place)
        window = (epoch, length, drawn // length)
        last, pieces = self._last  # most samples are of the window of the one before
        if last != window:
            pieces = self._window(*window)
            self._last = window, pieces
        start = drawn % length
        stop = start + self.sequence_length + self.add_extra_token
        ends = np.cumsum(pieces[2])
        first, end = np.searchsorted(ends, start, "right"), np.searchsorted(ends, stop) + 1
        sample: Pieces = pieces[:, first:end].copy()
        sample[2, -1] -= ends[end - 1] - stop
        before = start - (ends[first] - pieces[2, first])
        sample[1:, 0] += before, -before
        return sample

    def _window(self, epoch: int, length: int, place: int) -> Pieces:
        """The window at a place of an epoch, and the label behind it (W1, W2)."""
        words = np.random.Philox(key=self._key, counter=epoch).random_raw(3).tolist()
        num = num_windows(self.num_tokens, length)
        number = int(_native.swap_or_not(np.array([place]), num, words[1], True)[0])
        start = self.first_token + (words[0] * length >> 64) + number * length
        stop = start + length + 1
        sequences, firsts, documents = self._sequences_in(start, stop)
        starts = np.maximum(firsts, start)
        counts = np.diff(starts, append=stop)
        has_tokens = counts > 0
        pieces: Pieces = np.stack([sequences, starts - firsts, counts])[:, has_tokens]
        of = np.cumsum(np.diff(documents[has_tokens], prepend=documents[0]) > 0)
        of -= of[0]
        others = np.arange(of[-1])
        places = _native.swap_or_not(others, len(others), (words[2] + number) % 2**64, False)
        order = np.argsort(np.append(places, len(others))[of], kind="stable")
        return pieces[:, order]
