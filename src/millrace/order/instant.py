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
from millrace.checks import MAX_INT64, check_ints
from millrace.deferred import cached_property
from millrace.order.spans import CoreOrder, Spans
from millrace.order.splits import Range

Pieces = NDArray[np.int64]
"""Pieces of a window: their sequences, first tokens in them, and counts of tokens, [3, pieces]."""


def num_windows(num_tokens: Any, length: Any) -> Any:
    """Windows of an epoch: as many for every offset, and one more token for the last label (S3)."""
    return (num_tokens - length) // length


def source_key(seed: int, name: str) -> int:
    """What decides the permutations of a source: its name, not its place in a list (S1)."""
    text = json.dumps(["instant", seed, name], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class Position(NamedTuple):
    """Where a source is: behind the first `drawn` tokens of the windows of an epoch (S5).

    The three may be arrays, of many sources, like the arguments of the methods but the sequence
    length.
    """

    epoch: Any
    window_length: Any
    drawn: Any

    def select(self, places: Any) -> "Position":
        """The positions of some of the sources."""
        return Position(*(array[places] for array in self))

    def epoch_size(self, num_tokens: Any) -> Any:
        """Number of tokens in the windows of the epoch."""
        return num_windows(num_tokens, self.window_length) * self.window_length

    def before_draw(self, num_tokens: Any, sequence_length: int, mix_window: Any) -> "Position":
        """The position at which the next sample of that length is drawn (S6)."""
        drawn = -(-self.drawn // sequence_length) * sequence_length
        return _chosen(
            (self.window_length % sequence_length == 0) & (drawn < self.epoch_size(num_tokens)),
            self._replace(drawn=drawn),
            Position(self.epoch + 1, mix_window * sequence_length, 0),
        )

    def samples_left(self, num_tokens: Any, sequence_length: int) -> Any:
        """Samples of that length that are left in the epoch, for a position before a draw."""
        return (self.epoch_size(num_tokens) - self.drawn) // sequence_length

    def at(self, draw: Any, num_tokens: Any, sequence_length: int, mix_window: Any) -> "Position":
        """The position before a later draw of that length, for the position before draw 0."""
        later = draw - self.samples_left(num_tokens, sequence_length)
        length = mix_window * sequence_length
        epochs, rest = divmod(later, num_windows(num_tokens, length) * mix_window)
        return _chosen(
            later < 0,
            self._replace(drawn=self.drawn + draw * sequence_length),
            Position(self.epoch + 1 + epochs, length, rest * sequence_length),
        )

    def after(
        self, draws: Any, num_tokens: Any, sequence_length: int, mix_window: Any
    ) -> "Position":
        """The position behind some draws of that length, for the position before draw 0."""
        last = self.at(draws - 1, num_tokens, sequence_length, mix_window)
        return last._replace(drawn=last.drawn + sequence_length)


UNDRAWN = Position(-1, 1, 1 << 62)
"""The position of a source before its first draw: at the end of an epoch before the first one."""


def _chosen(condition: Any, one: Position, other: Position) -> Position:
    """One position or the other, or of many sources the one or the other of each."""
    if not isinstance(condition, np.ndarray):
        return one if condition else other
    return Position(*(np.where(condition, *pair) for pair in zip(one, other, strict=True)))


class InstantOrder(CoreOrder):
    """The samples of one source of an instant order, without end: no index, and no build.

    Args:
        tokens: First token of the source in the token file, and end: at least two windows of them.
        name: Name of the source, which decides its permutations with the seed.
        seed: Seed of the run, at least 0.
        sequence_length, add_extra_token: As in `OrderInputs`.
        position: Where the source is before sample 0.
        mix_window: Number of samples in a window; documents change places in windows of several.
        sequences_in: Function of a range of tokens of the file, start and stop, for such windows.
            It returns the sequences that hold them: their numbers, first tokens and documents,
            int64 [n] each.

    Example:
        >>> order = InstantOrder((0, 100), "web", seed=1, sequence_length=8)
        >>> spans = order.spans([0, 1])
        >>> spans.offsets.tolist(), spans.counts.tolist()
        ([36, 4], [9, 9])
    """

    def __init__(
        self,
        tokens: Range,
        name: str,
        seed: int,
        *,
        sequence_length: int,
        add_extra_token: bool = True,
        position: Position = UNDRAWN,
        mix_window: int = 1,
        sequences_in: Callable[[int, int], tuple[NDArray[np.int64], ...]] | None = None,
    ) -> None:
        self._cut = tokens[1] - tokens[0], sequence_length, mix_window
        self._key, self._first_token = source_key(seed, name), tokens[0]
        self._add_extra_token, self._sequences_in = add_extra_token, sequences_in
        self._position = position.before_draw(*self._cut)
        self._last: tuple[Any, Any] = None, None  # mixed window: its epoch and place, and pieces

    def __len__(self) -> int:
        return MAX_INT64

    @cached_property
    def core(self) -> Any:
        """The order in the core, which knows no documents; None: windows are mixed."""
        num_tokens, length, mix_window = self._cut
        if mix_window > 1:
            return None
        tokens, extra = (self._first_token, num_tokens), self._add_extra_token
        return _native.InstantOrder(tokens, self._key, tuple(self._position), length, extra)

    def epochs(self, num_samples: int) -> float:
        """Epochs of the source, from the first on, up to behind so many samples."""
        position = self._position.after(num_samples, *self._cut)
        return float(position.epoch + position.drawn / position.epoch_size(self._cut[0]))

    def find(self, tokens: Range, samples: Range) -> Iterator[NDArray[np.int64]]:
        """Those of a range of samples that may hold some tokens of the token file.

        The samples in whose windows the tokens lie: not all of them need hold any.

        Returns:
            Ascending numbers for each epoch, int64 [n].
        """
        (start, stop), (num_tokens, length, _) = samples, self._cut
        if max(tokens[0], self._first_token) >= min(tokens[1], self._first_token + num_tokens):
            return  # without tokens, or of another split: no epoch has any
        while start < stop:
            here = self._position.at(start, *self._cut)
            first_token, window, key, _ = self._windows(here)
            # The label behind a window belongs to its last sample.
            first, last = (token - first_token for token in tokens)
            size = num_windows(num_tokens, window)
            windows = np.arange(max(first - 1, 0) // window, min(-(-last // window), size))
            places = _native.swap_or_not(windows, size, key, False)
            begins = places[:, None] * window + np.arange(0, window, length)
            end = min(start + here.samples_left(num_tokens, length), stop)
            numbers = np.sort(start + (begins.reshape(-1) - here.drawn) // length)
            yield numbers[(numbers >= start) & (numbers < end)]
            start = end

    def _windows(self, position: Position) -> tuple[int, int, int, int]:
        """Of an epoch, the first token of window 0, the windows' length, and its words v and r."""
        words = np.random.Philox(key=self._key, counter=position.epoch).random_raw(3).tolist()
        length = position.window_length
        return self._first_token + (words[0] * length >> 64), length, words[1], words[2]

    # ---- mixed windows ----

    def spans(self, sample_numbers: ArrayLike) -> Spans:
        if self.core is not None:
            return super().spans(sample_numbers)
        numbers = check_ints("sample numbers", sample_numbers).tolist()
        samples = [self._sample(number) for number in numbers]
        sequences, offsets, counts = np.hstack([*samples, np.empty((3, 0), np.int64)])
        bounds = np.cumsum([0, *(sample.shape[1] for sample in samples)])
        return Spans(sequences, offsets, counts, bounds)

    def _sample(self, number: int) -> Pieces:
        """The pieces of a sample (W3)."""
        position = self._position.at(number, *self._cut)
        window, start = divmod(position.drawn, position.window_length)
        last, pieces = self._last  # most samples are of the window of the one before
        if last != (position.epoch, window):
            pieces = self._window(position, window)
            self._last = (position.epoch, window), pieces
        stop = start + self._cut[1] + self._add_extra_token
        ends = np.cumsum(pieces[2])
        first, end = np.searchsorted(ends, start, "right"), np.searchsorted(ends, stop) + 1
        sample: Pieces = pieces[:, first:end].copy()
        sample[2, -1] -= ends[end - 1] - stop
        before = start - (ends[first] - pieces[2, first])
        sample[1:, 0] += before, -before
        return sample

    def _window(self, position: Position, place: int) -> Pieces:
        """The window at a place of an epoch, and the label behind it (W1, W2)."""
        first_token, length, key, mixing = self._windows(position)
        num = num_windows(self._cut[0], length)
        number = int(_native.swap_or_not(np.array([place]), num, key, True)[0])
        start = first_token + number * length
        stop = start + length + 1
        sequences, firsts, documents = self._sequences_in(start, stop)  # type: ignore[misc]
        starts = np.maximum(firsts, start)
        counts = np.diff(starts, append=stop)
        has_tokens = counts > 0
        pieces: Pieces = np.stack([sequences, starts - firsts, counts])[:, has_tokens]
        starts_piece = np.diff(documents[has_tokens], prepend=documents[has_tokens][0]) > 0
        of = np.cumsum(starts_piece)
        others = np.arange(of[-1])
        places = _native.swap_or_not(others, len(others), (mixing + number) % 2**64, False)
        order = np.argsort(np.append(places, len(others))[of], kind="stable")
        return pieces[:, order]
