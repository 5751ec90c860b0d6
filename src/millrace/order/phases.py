"""A run in phases: which source each sample is drawn from, and where each source is.

Weights, sources and the sequence length may change from a sample on; what was drawn before stays
what it is. A binary tree deals the samples to the sources by their shares, without an index.
`docs/instant_order.md` defines both (R1 to R4, M1 to M5, C1, C2).
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import MAX_INT32, MAX_INT64, check_float, shown
from millrace.errors import ConfigError
from millrace.option_class import Options, option
from millrace.order.instant import UNDRAWN, Position, num_windows

Numbers = NDArray[np.int64]
Places = NDArray[np.intp]

ONE = 1 << 40
"""The sum of all shares."""

MAX_WEIGHT = 1e300  # so that the sum of a phase's weights is finite
_KEPT = 64  # one of so many stretches is kept without its tree; those behind it begin again there


def _weights(_: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"weights must be numbers by name, not {shown(value)}")
    pairs = value.items()
    return {name: check_float(f"the weight of {name}", one, 0, MAX_WEIGHT) for name, one in pairs}


@dataclass(frozen=True, kw_only=True)
class Phase(Options):
    """What is new in a phase of a run in the instant order."""

    until: int | None = option(
        "first sample number behind it; the last phase, which has no end, has none",
        None,
        least=1,
        most=MAX_INT64,
    )
    weights: Mapping[str, float] | None = option(
        "new weights by the names of sources: 0 takes a source out, and those without keep theirs",
        None,
        check=_weights,
    )
    sequence_length: int | None = option(
        "tokens to train on in a sample, if not as before", None, least=1, most=MAX_INT32
    )


def whole_shares(weights: Sequence[float]) -> Numbers:
    """Whole numbers with the sum `ONE`, in proportion to positive weights, each at least 1 (M1)."""
    total = math.fsum(weights)
    shares: Numbers = np.maximum(np.floor(np.asarray(weights) / total * ONE).astype(np.int64), 1)
    shares[shares.argmax()] += ONE - shares.sum()
    return shares


class MixtureTree:
    """Which source each sample of a stretch is drawn from, and its number among the source's.

    Args:
        shares: Share of each source, as `whole_shares` returns them.
        debts: What each source is owed at the start, in samples times `ONE`. None: nothing.

    Example:
        >>> tree = MixtureTree(whole_shares([2, 1]))
        >>> leaves, numbers = tree.draws(np.arange(6))
        >>> leaves.tolist(), numbers.tolist()
        ([0, 1, 0, 0, 1, 0], [0, 0, 1, 2, 1, 3])
        >>> tree.counts(5).tolist(), tree.find(1, 1)
        ([3, 2], 4)
    """

    def __init__(self, shares: ArrayLike, debts: ArrayLike | None = None) -> None:
        self.shares = np.asarray(shares, np.int64)
        debts = np.zeros_like(self.shares) if debts is None else np.asarray(debts, np.int64)
        core = _native.MixtureTree(self.shares, debts)
        self.draws, self.counts = core.draws, core.counts

    def find(self, leaf: int, number: int) -> int:
        """The sample that is a source's of that number: the reverse of `draws`."""
        return self.samples_until(np.array([leaf]), np.array([number + 1])) - 1

    def samples_until(self, leaves: Numbers, counts: Numbers, most: int = MAX_INT64 - 1) -> int:
        """The least number of samples that hold as many of one of some sources as `counts` says;
        `most` + 1, if that is more than `most`."""
        # After t samples a source has 4.4 draws more or less than its share of t, at most.
        per_draw, ends = ONE / self.shares[leaves], counts.astype(np.float64)
        low = max(((ends - 5) * per_draw).min() * (1 - 1e-12), 0)
        high = min(((ends + 5) * per_draw).min() * (1 + 1e-12) + 1, most)
        return bisect.bisect_left(
            range(int(high) + 1),
            True,
            min(int(low), int(high)),
            key=lambda number: bool((self.counts(number)[leaves] >= counts).any()),
        )


class Stretch(NamedTuple):
    """Samples between which neither weights nor sources change (M1 to M5)."""

    start: int  # its first sample
    end: int  # the sample behind it; `MAX_INT64`: it has no end
    phase: int
    segment: int  # phases of one sequence length
    weights: NDArray[np.float64]  # of all sources in the phase; 0: it takes no part
    begins: Position  # where the segment before left all sources: arrays
    drawn: Numbers  # draws of all sources before, in this segment
    debts: Numbers  # what all sources are owed, in samples times `ONE`
    sources: NDArray[np.int32]  # places of those that take part among all: [leaves]
    tree: Any  # the `MixtureTree` that deals the samples to them

    def draws(self, sample_numbers: Numbers) -> tuple[NDArray[np.int32], Numbers]:
        """See `Phases.draws`, for samples of this stretch."""
        leaves, own = self.tree.draws(sample_numbers - self.start)
        sources = self.sources[leaves]
        own += self.drawn[sources]
        return sources + self.segment * len(self.weights) if self.segment else sources, own

    def drawn_up_to(self, sample_number: int) -> Numbers:
        """Draws of each source before a sample, in this segment."""
        drawn: Numbers = self.drawn.copy()
        drawn[self.sources] += self.tree.counts(sample_number - self.start)
        return drawn


class Phases:
    """The mixture of a run in phases. Stretches are computed as far as samples ask for them, and
    computed again where they are asked for later.

    Args:
        sources: The sources by their names, whose order does not matter. A source has `num_tokens`,
            and `bounds`, whose difference is about as much, where that takes time to find.
        phases: Phases, each with its sequence length. `InstantConfig` checks them.
        caps: Epochs after which a source takes no part, by name; None: no limit.
        mix_window: Number of samples in a window.
        position: Function of a sample number: how many before it no skip leaves out.

    Attributes:
        names, mix_window: The names of all sources, sorted, and the mix window.

    Raises:
        ConfigError: What cannot be drawn: it names the phase, the source, the value and the remedy.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        phases: Sequence[Phase],
        *,
        caps: Mapping[str, int | None] | None = None,
        mix_window: int = 1,
        position: Any = int,
    ) -> None:
        self.names, self._position_of = sorted(sources), position
        self._sources, self._phases = [sources[name] for name in self.names], list(phases)
        self._ends: list[Any] = [*(phase.until for phase in phases[:-1]), MAX_INT64]
        most = [(caps or {}).get(name) or MAX_INT64 for name in self.names]
        self._caps, self.mix_window = np.array(most, np.int64), mix_window
        self._sizes = np.full(len(self.names), -1)  # in tokens, as far as they were asked for
        weights, sizes = np.zeros(len(self.names)), np.diff([one.bounds for one in self._sources])
        for number in range(len(phases)):
            weights = self._changed_weights(weights, number)
            if not weights.any():
                raise ConfigError(f"phase {number} has no source: give a weight to one, or alpha")
            is_short = num_windows(sizes[:, 0], mix_window * self.length_of(number)) < 1
            self.cuts(np.flatnonzero((weights > 0) & is_short), number)  # an error, if it is so
        # Several threads may compute a stretch side by side: theirs are equal.
        self._known: dict[int, int] = {}  # the phase of each stretch, by its start
        self._recent: tuple[Stretch, ...] = ()  # the last two that were asked for
        self._kept: dict[int, Stretch] = {}  # those to begin again from, by their starts
        self.stretch_of(0)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": {}, "_recent": (), "_kept": {}}

    def stretch_of(self, sample_number: int) -> Stretch:
        """The stretch that a sample is in."""
        for stretch in self._recent:
            if stretch.start <= sample_number < stretch.end:
                return stretch
        begun = [*self._recent, *self._kept.copy().values()]  # at once: other threads may add one
        earlier = (one for one in begun if one.start <= sample_number)
        last = max(earlier, key=lambda one: one.start, default=None)
        while last is None or last.tree is None or sample_number >= last.end:
            last = self._next(last)
            self._recent = (last, *self._recent[:1])
            if last.start not in self._known and len(self._known) % _KEPT == 0:
                self._kept[last.start] = last._replace(tree=None)
            self._known[last.start] = last.phase
        return last

    def draws(self, sample_numbers: Numbers) -> tuple[NDArray[np.int32], Numbers]:
        """The datasets of some samples, and the samples' numbers in them.

        A dataset is what a segment draws from a source: dataset number segment * len(names) + place
        of the source.

        Args:
            sample_numbers: int64 [n].

        Returns:
            The number of each sample's dataset, int32 [n]; and the number of its draw, counted from
            the one that `position` tells of, int64 [n].
        """
        listed = sample_numbers.tolist()  # whose ends Python finds in a fifth of NumPy's time
        stretch, last = self.stretch_of(min(listed, default=0)), max(listed, default=0)
        if last < stretch.end:  # as in most batches
            return stretch.draws(sample_numbers)
        datasets, numbers = np.empty(len(listed), np.int32), np.empty(len(listed), np.int64)
        while True:
            here = (sample_numbers >= stretch.start) & (sample_numbers < stretch.end)
            datasets[here], numbers[here] = stretch.draws(sample_numbers[here])
            if last < stretch.end:
                return datasets, numbers
            stretch = self.stretch_of(min(one for one in listed if one >= stretch.end))

    # ---- one stretch after the other ----

    def _next(self, last: Stretch | None) -> Stretch:
        """The stretch behind another one, or the first; of one without its tree, itself."""
        if last is None:
            size, zeros = len(self.names), np.broadcast_to(np.int64(0), len(self.names))
            begins = Position(*(np.broadcast_to(np.int64(one), size) for one in UNDRAWN))
            weights = self._changed_weights(np.zeros(size), 0)
            last = Stretch(0, 0, 0, 0, weights, begins, zeros, zeros, np.empty(0, np.int32), None)
        if last.tree is None:
            return self._deal(last)
        drawn, debts, count = last.drawn_up_to(last.end), last.debts.copy(), last.end - last.start
        draws = drawn[last.sources] - last.drawn[last.sources]
        # The product may overflow, but not what is left of it.
        debts[last.sources] += last.tree.shares * count - ONE * draws
        new = last._replace(start=last.end, drawn=drawn, debts=debts)
        if last.end == self._ends[last.phase]:
            phase = last.phase + 1
            new = new._replace(phase=phase, weights=self._changed_weights(last.weights, phase))
            if self.length_of(phase) != self.length_of(last.phase):
                begins, zeros = self.ends(last, last.end), np.zeros_like(drawn)
                new = new._replace(segment=last.segment + 1, begins=begins, drawn=zeros)
        return self._deal(new)

    def _changed_weights(self, weights: NDArray[np.float64], number: int) -> NDArray[np.float64]:
        """The weights of a phase, from those before it."""
        places = {name: place for place, name in enumerate(self.names)}
        changes = self._phases[number].weights or {}
        weights = weights.copy()
        weights[[places[name] for name in changes]] = [*changes.values()]
        return weights

    def _deal(self, new: Stretch) -> Stretch:
        """A stretch with its end, its sources and their tree."""
        sources, (start, end) = np.flatnonzero(new.weights), (new.start, self._ends[new.phase])
        capped = sources[self._caps[sources] < MAX_INT64]
        lefts = self._draws_left(new, capped)
        sources = np.setdiff1d(sources, capped[lefts == 0], assume_unique=True)
        if len(sources) == 0:
            part = "run" if new.phase == len(self._phases) - 1 else "phase"
            raise ConfigError(
                f"phase {new.phase}: all of its sources have reached max_epochs at sample {start}, "
                f"position {self._position_of(start)}: raise it, or end the {part} there"
            )
        tree = MixtureTree(whole_shares(new.weights[sources].tolist()), new.debts[sources])
        if lefts.any():
            leaves = np.searchsorted(sources, capped[lefts > 0])
            end = start + tree.samples_until(leaves, lefts[lefts > 0], end - start - 1)
        return new._replace(end=end, sources=sources.astype(np.int32), tree=tree)

    def _draws_left(self, stretch: Stretch, places: Places) -> Numbers:
        """Draws that some sources have left until they reach their caps (C1)."""
        sizes, length, mix_window = cut = self.cuts(places, stretch.phase)
        position = stretch.begins.select(places).before_draw(*cut).at(stretch.drawn[places], *cut)
        of_epoch = num_windows(sizes, mix_window * length) * mix_window
        # More epochs than that are more draws than a run can have.
        epochs = np.minimum(self._caps[places] - position.epoch - 1, (1 << 61) // of_epoch)
        lefts = position.samples_left(sizes, length) + epochs * of_epoch
        return np.where(epochs < 0, 0, lefts)

    def cuts(self, places: Places, phase: int) -> tuple[Numbers, int, int]:
        """Tokens of some sources, the sequence length of a phase, and the mix window: what the
        methods of a `Position` take. ConfigError for too few tokens for a window (S8)."""
        for place in places[self._sizes[places] < 0].tolist():
            self._sizes[place] = self._sources[place].num_tokens
        sizes, length, mix_window = self._sizes[places], self.length_of(phase), self.mix_window
        for n in np.flatnonzero(num_windows(sizes, mix_window * length) < 1).tolist():
            mixed = "" if mix_window == 1 else f", {mix_window} in a window,"
            raise ConfigError(
                f"phase {phase}, source {self.names[places[n]]} has {sizes[n]} tokens; samples of "
                f"{length} tokens{mixed} need {2 * mix_window * length}: shorten the sequence "
                "length, or leave the source out"
            )
        return sizes, length, mix_window

    # ---- what has been drawn ----

    def ends(self, stretch: Stretch, sample_number: int) -> Position:
        """Where the samples before one, which is in or behind a stretch, leave each source."""
        drawn = stretch.drawn_up_to(sample_number)
        places = np.flatnonzero(drawn)
        cut = self.cuts(places, stretch.phase)
        begin = stretch.begins.select(places).before_draw(*cut)
        ends = Position(*(array.copy() for array in stretch.begins))
        for array, values in zip(ends, begin.after(drawn[places], *cut), strict=True):
            array[places] = values
        return ends

    def position(self, dataset: int) -> Position:
        """Where the source of a dataset of `draws` is before its first draw."""
        segment, place = divmod(dataset, len(self.names))
        known_first = itertools.chain(self._recent, (one for one, _ in self.stretches()))
        stretch = next(one for one in known_first if one.segment == segment)
        self.cuts(np.array([place]), stretch.phase)  # an error for too few tokens
        return Position(*(int(array[place]) for array in stretch.begins))

    def drawn_before(self, sample_number: int) -> set[str]:
        """The names of the sources that have been drawn before a sample."""
        stretch = self.stretch_of(sample_number - 1)
        is_drawn = (stretch.begins.epoch >= 0) | (stretch.drawn_up_to(sample_number) > 0)
        return {self.names[place] for place in np.flatnonzero(is_drawn).tolist()}

    def stretches(self, stop: int = MAX_INT64) -> Iterator[tuple[Stretch, int]]:
        """The stretches with samples before a number, computed when they are asked for, and where
        each ends, or the number."""
        start = 0
        while start < stop:
            stretch = self.stretch_of(start)
            start = stretch.end
            yield stretch, min(start, stop)

    def past(self, sample_number: int) -> list[tuple[int, int]]:
        """The starts of the stretches that decide the samples before a number, and their phases."""
        self.stretch_of(sample_number - 1)
        known = self._known.copy().items()  # at once: other threads may add to it
        return sorted(pair for pair in known if pair[0] < sample_number)

    def length_of(self, phase: int) -> Any:
        return self._phases[phase].sequence_length
