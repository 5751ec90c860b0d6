"""A run in phases: which source each sample is drawn from, and where each source is.

Weights, sources and the sequence length may change from a sample on; what was drawn before stays
what it is. `docs/instant_order.md` defines it (R1 to R4, M3, C1, C2).
"""

import bisect
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.checks import MAX_INT64
from millrace.errors import ConfigError
from millrace.forks import Renewed
from millrace.order.instant import UNDRAWN, Position, check_windows, num_windows
from millrace.order.mixture_tree import ONE, MixtureTree, whole_shares

Numbers = NDArray[np.int64]

MAX_WEIGHT = 1e300  # so that the sum of a phase's weights is finite
_KEPT = 64  # one of so many stretches is kept, and those behind it are computed from it again


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a phase may draw from.

    Attributes:
        num_tokens: Number of tokens.
        max_epochs: Number of epochs after which it takes no part; None: no limit.
        mix_window: Number of samples in a window, in which documents are permuted.
    """

    num_tokens: int
    max_epochs: int | None = None
    mix_window: int = 1

    @property
    def rough_tokens(self) -> int:
        """About `num_tokens`, where that takes time to find: it is asked for last."""
        return self.num_tokens


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Samples from `start` up to the next phase.

    Attributes:
        start: Its first sample number.
        sequence_length: Tokens to train on in a sample.
        weights: New weights by the names of sources, up to `MAX_WEIGHT`. One of 0 takes a source
            out; sources that it does not name keep theirs.
    """

    start: int
    sequence_length: int
    weights: Mapping[str, float]


class State(NamedTuple):
    """What decides a stretch.

    Attributes:
        number, start, phase: Its number, its first sample, and the number of its phase.
        weights: Of each source, its weight in the phase; 0: it takes no part.
        begins: Where the last part of the run left each source: arrays.
        drawn: Draws of each source before, in this part of the run.
        debts: What each source is owed, in samples times `ONE`.
    """

    number: int
    start: int
    phase: int
    weights: NDArray[np.float64]
    begins: Position
    drawn: Numbers
    debts: Numbers


class Stretch(NamedTuple):
    """Samples between which neither weights nor sources change (M1 to M5).

    Attributes:
        start, end: Its first sample, and the one behind it; `MAX_INT64`: it has no end.
        phase: Number of its phase.
        state: What decides it.
        sources: Places of its sources among `all_names`: int32 [leaves].
        tree: What deals the samples.
    """

    start: int
    end: int
    phase: int
    state: State
    all_names: Sequence[str]
    sources: NDArray[np.int32]
    tree: MixtureTree

    @property
    def names(self) -> list[str]:
        return [self.all_names[place] for place in self.sources.tolist()]

    @property
    def shares(self) -> list[int]:
        """The sources' shares, with the sum `ONE`."""
        return self.tree.shares.tolist()  # type: ignore[no-any-return]

    @property
    def drawn(self) -> Numbers:
        """Draws of its sources before, in this part of the run: int64 [leaves]."""
        return self.state.drawn[self.sources]

    def draws(self, sample_numbers: Numbers) -> tuple[NDArray[np.int32], Numbers]:
        """See `Phases.draws`, for samples of this stretch."""
        leaves, own = self.tree.draws(sample_numbers - self.start)
        sources = self.sources[leaves]
        return sources, own + self.state.drawn[sources]


class Phases(Renewed):
    """The mixture of a run in phases. Stretches are computed as far as samples ask for them; their
    memory does not depend on the number of phases.

    Args:
        sources: The sources by their names; their order does not matter.
        phases: Phases by their starts; the first one starts at 0. `InstantConfig` checks them.

    Attributes:
        names: The names of all sources, sorted.
        segments: Of each phase, which part of the run it is in: a part has one sequence length.

    Raises:
        ConfigError: What cannot be drawn: it names the phase, the source, the value and the remedy.
    """

    def __init__(self, sources: Mapping[str, Source], phases: Sequence[Phase]) -> None:
        self.names = sorted(sources)
        self._sources, self._phases = [sources[name] for name in self.names], list(phases)
        self._check()
        lengths = [phase.sequence_length for phase in phases]
        changes = np.flatnonzero(np.diff(lengths, prepend=-1))
        self.segments: list[int] = np.repeat(
            np.arange(len(changes)), np.diff([*changes, len(phases)])
        ).tolist()
        caps = [one.max_epochs or MAX_INT64 for one in self._sources]
        self._caps = np.minimum(np.array(caps, object), MAX_INT64).astype(np.int64)
        self._mix_windows = np.array([one.mix_window for one in self._sources], np.int64)
        self._sizes = np.zeros(len(self.names), np.int64)  # 0: not known yet
        self.renew()
        self.stretch_of(0)

    _renewed = ("_lock", "_known", "_kept", "_recent")

    def after_fork(self) -> None:
        """Begins again: the parent may have been between two stretches."""
        self._lock = threading.RLock()
        self._known: list[tuple[int, int]] = []  # starts of stretches, and their phases
        self._kept: list[State] = []
        self._recent: tuple[Stretch, ...] = ()  # the last two that were asked for

    def stretch_of(self, sample_number: int) -> Stretch:
        """The stretch that a sample is in."""
        for stretch in self._recent:
            if stretch.start <= sample_number < stretch.end:
                return stretch
        with self._lock:
            number = max(bisect.bisect_right(self._known, sample_number, key=itemgetter(0)) - 1, 0)
            near = [one.state for one in self._recent[:1] if one.start <= sample_number]
            if not near or near[0].number // _KEPT < number // _KEPT:
                kept = self._kept[number // _KEPT : number // _KEPT + 1]
                self._go_to(kept[0] if kept else self._first_state())
            while sample_number >= self._recent[0].end:
                self._go_to(self._next_state(self._recent[0]))
            return self._recent[0]

    def draws(self, sample_numbers: Numbers) -> tuple[NDArray[np.int32], Numbers]:
        """The sources of some samples, and the samples' numbers in them.

        Args:
            sample_numbers: int64 [n].

        Returns:
            The place of each sample's source among `names`, int32 [n]; and the number of its draw,
            counted from the one that `position` tells of, int64 [n].
        """
        listed = sample_numbers.tolist()  # whose ends Python finds in a fifth of NumPy's time
        stretch, last = self.stretch_of(min(listed, default=0)), max(listed, default=0)
        if last < stretch.end:  # as in most batches
            return stretch.draws(sample_numbers)
        sources, numbers = np.empty(len(listed), np.int32), np.empty(len(listed), np.int64)
        while True:
            here = (sample_numbers >= stretch.start) & (sample_numbers < stretch.end)
            sources[here], numbers[here] = stretch.draws(sample_numbers[here])
            if last < stretch.end:
                return sources, numbers
            stretch = self.stretch_of(min(one for one in listed if one >= stretch.end))

    # ---- one stretch after the other ----

    def _go_to(self, state: State) -> None:
        """Makes the stretch of a state the current one, or raises and changes nothing: a file that
        cannot be read now may be read later."""
        stretch = self._make_stretch(state)
        self._recent = (stretch, *self._recent[:1])
        if state.number == len(self._known):
            self._known.append((state.start, state.phase))
            if state.number % _KEPT == 0:
                self._kept.append(state)

    def _first_state(self) -> State:
        size, zeros = len(self.names), np.broadcast_to(np.int64(0), len(self.names))
        begins = Position(*(np.broadcast_to(np.int64(one), size) for one in UNDRAWN))
        weights = self._changed_weights(np.zeros(size), 0)
        return State(0, 0, 0, weights, begins, zeros, zeros)

    def _next_state(self, last: Stretch) -> State:
        state, count, number = last.state, last.end - last.start, last.phase
        drawn, debts = state.drawn.copy(), state.debts.copy()
        draws = last.tree.counts(count)
        drawn[last.sources] += draws
        # The product may overflow, but not what is left of it.
        debts[last.sources] += last.tree.shares * count - ONE * draws
        weights, begins = state.weights, state.begins
        if [last.end] == [phase.start for phase in self._phases[number + 1 : number + 2]]:
            number += 1
            weights = self._changed_weights(weights, number)
            if self.segments[number] > self.segments[number - 1]:
                places = np.flatnonzero(drawn)
                ends = self._positions(state._replace(drawn=drawn), places)
                begins = Position(*(array.copy() for array in begins))
                for array, end in zip(begins, ends, strict=True):
                    array[places] = end
                drawn = np.broadcast_to(np.int64(0), len(drawn))
        return State(state.number + 1, last.end, number, weights, begins, drawn, debts)

    def _changed_weights(self, weights: NDArray[np.float64], number: int) -> NDArray[np.float64]:
        """The weights of a phase, from those before it."""
        places = {name: place for place, name in enumerate(self.names)}
        changes = self._phases[number].weights
        weights = weights.copy()
        weights[[places[name] for name in changes]] = [*changes.values()]
        return weights

    def _make_stretch(self, state: State) -> Stretch:
        sources = np.flatnonzero(state.weights)
        capped = sources[self._caps[sources] < MAX_INT64]
        lefts = self._draws_left(state, capped)
        sources = np.setdiff1d(sources, capped[lefts == 0], assume_unique=True)
        if len(sources) == 0:
            raise ConfigError(
                f"phase {state.phase}: all of its sources have reached max_epochs at sample "
                f"{state.start}: raise max_epochs, add a source, or let the phase end there"
            )
        tree = MixtureTree(whole_shares(state.weights[sources].tolist()), state.debts[sources])
        ends = [phase.start for phase in self._phases[state.phase + 1 : state.phase + 2]]
        end = min(ends, default=MAX_INT64)
        if lefts.any():
            leaves = np.searchsorted(sources, capped[lefts > 0])
            most = end - state.start - 1
            end = state.start + tree.samples_until(leaves, lefts[lefts > 0], most)
        ends_and_phase = state.start, end, state.phase
        return Stretch(*ends_and_phase, state, self.names, sources.astype(np.int32), tree)

    def _positions(self, state: State, places: NDArray[np.intp]) -> Position:
        """Where the last draws before a stretch have left some sources."""
        sizes, length, mix_windows = place = self.sizes_of(places, state.phase)
        begins = Position(*(array[places] for array in state.begins)).before_draw(*place)
        return begins.after(state.drawn[places], sizes, length, mix_windows)

    def _draws_left(self, state: State, places: NDArray[np.intp]) -> Numbers:
        """Draws that some sources have left until they reach their caps (C1)."""
        sizes, length, mix_windows = place = self.sizes_of(places, state.phase)
        position = self._positions(state, places).before_draw(*place)
        of_epoch = num_windows(sizes, mix_windows * length) * mix_windows
        # More epochs than that are more draws than a run can have.
        epochs = np.minimum(self._caps[places] - position.epoch - 1, (1 << 61) // of_epoch)
        lefts = position.samples_left(sizes, length) + epochs * of_epoch
        return np.where(epochs < 0, 0, lefts)

    def sizes_of(self, places: NDArray[np.intp], phase: int) -> tuple[Numbers, int, Numbers]:
        """Tokens of some sources, the sequence length of a phase, and the sources' windows: what
        the methods of a `Position` take."""
        for place in places[self._sizes[places] == 0].tolist():
            self._sizes[place] = self._sources[place].num_tokens
        length, mix_windows = self._phases[phase].sequence_length, self._mix_windows[places]
        is_small = num_windows(self._sizes[places], mix_windows * length) < 1
        for place in places[is_small].tolist():
            size, mix_window = int(self._sizes[place]), self._sources[place].mix_window
            check_windows(f"source {self.names[place]}", size, length, mix_window)
        return self._sizes[places], length, mix_windows

    # ---- what has been drawn ----

    def position(self, segment: int, place: int) -> Position:
        """Where a source is when it is first drawn in a part of the run.

        Args:
            segment: A number of `segments`.
            place: Place of the source among `names`.
        """
        phase = self.segments.index(segment)
        recent = [one for one in self._recent if self.segments[one.phase] == segment]
        stretch = recent[0] if recent else self.stretch_of(self._phases[phase].start)
        begin = Position(*(int(array[place]) for array in stretch.state.begins))
        size, mix_window = 0, self._sources[place].mix_window
        if begin != UNDRAWN:  # else it may not be known, and does not matter
            [size] = self.sizes_of(np.array([place]), phase)[0].tolist()
        return begin.before_draw(size, self.length_of(phase), mix_window)

    def drawn_before(self, sample_number: int) -> set[str]:
        """The names of the sources that have been drawn before a sample, above 0."""
        stretch = self.stretch_of(sample_number - 1)
        is_drawn = (stretch.state.drawn > 0) | (stretch.state.begins.epoch >= 0)
        is_drawn[stretch.sources] |= stretch.tree.counts(sample_number - stretch.start) > 0
        return {self.names[place] for place in np.flatnonzero(is_drawn).tolist()}

    def stretches(self, stop: int = MAX_INT64) -> Iterator[tuple[Stretch, int]]:
        """The stretches with samples before a number, computed when they are asked for, and the
        end of each."""
        start = 0
        while start < stop:
            stretch = self.stretch_of(start)
            start = stretch.end
            yield stretch, start

    def past(self, sample_number: int) -> list[tuple[int, int]]:
        """The starts of the stretches that decide the samples before a number, and their phases."""
        if sample_number == 0:
            return []
        self.stretch_of(sample_number - 1)
        return self._known[: bisect.bisect_left(self._known, sample_number, key=itemgetter(0))]

    def length_of(self, phase: int) -> int:
        return self._phases[phase].sequence_length

    def _check(self) -> None:
        weights = np.zeros(len(self.names))
        sizes = np.array([one.rough_tokens for one in self._sources], np.int64)
        mix_windows = np.array([one.mix_window for one in self._sources], np.int64)
        for number, phase in enumerate(self._phases):
            length, weights = phase.sequence_length, self._changed_weights(weights, number)
            if not weights.any():
                raise ConfigError(f"phase {number} has no source: give a weight to one, or alpha")
            is_small = (weights > 0) & (num_windows(sizes, mix_windows * length) < 1)
            for place in np.flatnonzero(is_small).tolist():
                what, size = f"phase {number}, source {self.names[place]}", int(sizes[place])
                check_windows(what, size, length, int(mix_windows[place]))
