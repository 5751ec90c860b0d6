"""A run in phases: which source each sample is drawn from, and where each source is.

Weights, sources and the sequence length may change from a sample on; what was drawn before stays
what it is. `docs/instant_order.md` defines it (R1 to R4, M3, C1, C2).
"""

import bisect
import itertools
import math
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.checks import MAX_INT64, check_float, check_int, shown
from millrace.errors import ConfigError
from millrace.forks import Renewed
from millrace.order.instant import Position, check_windows, num_windows
from millrace.order.mixture_tree import ONE, MixtureTree, whole_shares
from millrace.order.spans import RULES_VERSION

Numbers = NDArray[np.int64]


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
        weights: Positive weights of the sources that take part, by their names.
    """

    start: int
    sequence_length: int
    weights: Mapping[str, float]


class Stretch(NamedTuple):
    """Samples between which neither weights nor sources change (M1 to M5)."""

    start: int
    phase: int
    names: list[str]  # of the tree's leaves, sorted
    sources: NDArray[np.int32]  # the leaves' places among `Phases.names`
    shares: list[int]
    tree: MixtureTree
    drawn: Numbers  # draws of each source before, in this segment: int64 [leaves]

    def draws(self, sample_numbers: Numbers) -> tuple[NDArray[np.int32], Numbers]:
        """See `Phases.draws`, for samples of this stretch."""
        leaves, own = self.tree.draws(sample_numbers - self.start)
        return self.sources[leaves], own + self.drawn[leaves]


_start = operator.attrgetter("start")


class Phases(Renewed):
    """The mixture of a run in phases. Stretches are computed as far as samples ask for them.

    Args:
        sources: The sources by their names; their order does not matter.
        phases: Phases by their starts; the first one starts at 0.

    Attributes:
        names: The names of all sources, sorted.
        segments: Of each phase, which part of the run it is in: a part has one sequence length.
        positions: Where a source is when it is first drawn in a segment, by segment and name.

    Raises:
        ConfigError: What cannot be drawn: it names the phase, the source, the value and the remedy.
    """

    def __init__(self, sources: Mapping[str, Source], phases: Sequence[Phase]) -> None:
        self._sources, self._phases = dict(sources), list(phases)
        self._check()
        self.names = sorted(self._sources)
        self._places = {name: place for place, name in enumerate(self.names)}
        lengths = [phase.sequence_length for phase in phases]
        changes = np.flatnonzero(np.diff(lengths, prepend=-1))
        self.segments: list[int] = np.repeat(
            np.arange(len(changes)), np.diff([*changes, len(phases)])
        ).tolist()
        self.renew()
        self.stretch_of(0)

    _renewed = ("_lock", "_stretches", "_end", "positions", "_lefts", "_drawn", "_debts")

    def after_fork(self) -> None:
        """Begins again: the parent may have been between two stretches."""
        self._lock = threading.RLock()
        self.positions: dict[tuple[int, str], Position] = {}
        self._stretches: list[Stretch] = []
        # Of each source: where its last draw left it, its draws in its last segment, and its debt.
        self._lefts: dict[str, Position] = {}
        self._drawn: dict[str, int] = {}
        self._debts: dict[str, int] = {}
        self._end: int | None = 0  # of the last stretch

    def stretch_of(self, sample_number: int) -> Stretch:
        """The stretch that a sample is in."""
        with self._lock:
            while self._end is not None and sample_number >= self._end:
                self._go_on(self._end)
        return self._stretches[bisect.bisect_right(self._stretches, sample_number, key=_start) - 1]

    def draws(self, sample_numbers: Numbers) -> tuple[NDArray[np.int32], Numbers]:
        """The sources of some samples, and the samples' numbers in them.

        Args:
            sample_numbers: int64 [n].

        Returns:
            The place of each sample's source among `names`, int32 [n]; and the number of its draw,
            counted from the one that `positions` tells of, int64 [n].
        """
        listed = sample_numbers.tolist()  # whose ends Python finds in a fifth of NumPy's time
        last = self.stretch_of(max(listed, default=0))
        if min(listed, default=last.start) >= last.start:  # as in most batches
            return last.draws(sample_numbers)
        stretches = np.searchsorted([*map(_start, self._stretches)], sample_numbers, "right") - 1
        sources, numbers = np.empty(len(stretches), np.int32), np.empty(len(stretches), np.int64)
        for number in {*stretches.tolist()}:
            here = stretches == number
            sources[here], numbers[here] = self._stretches[number].draws(sample_numbers[here])
        return sources, numbers

    # ---- one stretch after the other ----

    def _go_on(self, end: int) -> None:
        """Adds the next stretch, or nothing: a file that cannot be read now may be read later."""
        size, state = len(self._stretches), (self.positions, self._lefts, self._drawn, self._debts)
        kept: Any = [{**one} for one in state]
        try:
            self._add_stretch(end, self._leave(end) if self._stretches else 0)
        except BaseException:
            self.positions, self._lefts, self._drawn, self._debts = kept
            self._end = end
            del self._stretches[size:]
            raise

    def _add_stretch(self, start: int, number: int) -> None:
        """Adds the stretch of a phase that starts at a sample, with the sources that have draws."""
        phase, segment = self._phases[number], self.segments[number]
        lefts = {name: self._draws_left(name, phase.sequence_length) for name in phase.weights}
        names = sorted(name for name, left in lefts.items() if left > 0)
        if not names:
            raise ConfigError(
                f"phase {number}: all of its sources have reached max_epochs at sample {start}: "
                "raise max_epochs, add a source, or let the phase end there"
            )
        for name in names:
            if (segment, name) not in self.positions:
                self.positions[segment, name] = self._next_position(name, phase.sequence_length)
                self._drawn[name] = 0
        shares = whole_shares([phase.weights[name] for name in names])
        tree = MixtureTree(shares, [self._debts.get(name, 0) for name in names])
        sources = np.array([self._places[name] for name in names], np.int32)
        drawn = np.array([self._drawn[name] for name in names], np.int64)
        self._stretches.append(Stretch(start, number, names, sources, shares, tree, drawn))
        ends = [phase.start for phase in self._phases[number + 1 : number + 2]]
        # To find a draw takes 0.1 ms. Only those are searched that may be the first to reach a cap:
        # after t samples a source has 4.4 draws more or less than its share of t, at most.
        spans = [
            (lefts[name] - 5, lefts[name] + 5, share)
            for name, share in zip(names, shares, strict=True)
        ]
        first = min((high * ONE / share for _, high, share in spans), default=math.inf)
        first = min([first, *(end - start for end in ends)])
        for leaf, (low, _, share) in enumerate(spans):
            if low * ONE / share <= first < math.inf:
                ends.append(start + tree.find(leaf, int(low) + 4) + 1)
        self._end = min(ends, default=None)

    def _leave(self, end: int) -> int:
        """Notes what the last stretch drew up to its end; the phase of the next one."""
        last, number = self._stretches[-1], self._stretches[-1].phase
        length, count = self._phases[number].sequence_length, end - last.start
        for name, share, draws in zip(
            last.names, last.shares, last.tree.counts(count), strict=True
        ):
            self._debts[name] = self._debts.get(name, 0) + share * count - ONE * draws
            if draws > 0:
                place = self._num_tokens(name, length), length, self._sources[name].mix_window
                self._lefts[name] = self._next_position(name, length).after(draws, *place)
                self._drawn[name] += draws
        is_next = number + 1 < len(self._phases) and end == self._phases[number + 1].start
        return number + is_next

    def _next_position(self, name: str, length: int) -> Position:
        left, source = self._lefts.get(name), self._sources[name]
        if left is None:
            return Position(0, source.mix_window * length, 0)
        return left.before_draw(source.num_tokens, length, source.mix_window)

    def _draws_left(self, name: str, length: int) -> float:
        """Draws of that length until the source has reached its last epoch (C1)."""
        source, position = self._sources[name], self._next_position(name, length)
        if source.max_epochs is None:
            return math.inf
        epochs = source.max_epochs - position.epoch - 1
        num_tokens = self._num_tokens(name, length)
        rest = position.samples_left(num_tokens, length)
        of_epoch = num_windows(num_tokens, source.mix_window * length) * source.mix_window
        return 0 if epochs < 0 else rest + epochs * of_epoch

    def _num_tokens(self, name: str, length: int) -> int:
        source = self._sources[name]
        check_windows(f"source {name}", source.num_tokens, length, source.mix_window)
        return source.num_tokens

    # ---- what has been drawn ----

    def find(self, segment: int, name: str, number: int) -> int:
        """The sample that is a source's of that number in a segment; -1: none. See `draws`."""
        for stretch, end in self.stretches():
            of = self.segments[stretch.phase]
            if of > segment:
                break
            if of == segment and name in stretch.names:
                leaf = stretch.names.index(name)
                before = int(stretch.drawn[leaf])
                sample = stretch.start + stretch.tree.find(leaf, number - before)
                if number >= before and sample < end:
                    return sample
        return -1

    def stretches(self) -> Iterator[tuple[Stretch, float]]:
        """The stretches one by one, computed when they are asked for, and the end of each."""
        place = 0
        while True:
            with self._lock:
                if place == len(self._stretches):
                    self._go_on(int(self._end))  # type: ignore[arg-type]
                ends = [one.start for one in self._stretches[place + 1 : place + 2]]
                end = min(ends, default=math.inf if self._end is None else self._end)
                stretch = self._stretches[place]
            yield stretch, end
            if end == math.inf:
                return
            place += 1

    def past(self, sample_number: int) -> list[Stretch]:
        """The stretches that decide the samples before a number."""
        if sample_number == 0:
            return []
        last = self.stretch_of(sample_number - 1)
        return self._stretches[: self._stretches.index(last) + 1]

    def length_of(self, stretch: Stretch) -> int:
        return self._phases[stretch.phase].sequence_length

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the draws, for comparison with a saved state. See `Mixture`."""
        past = self.past(MAX_INT64 if consumed_samples is None else consumed_samples)
        stretches = [
            [one.start, self.length_of(one), dict(zip(one.names, one.shares, strict=True))]
            for one in past
        ]
        return {"kind": "phases", "rules": RULES_VERSION, "stretches": stretches}

    def _check(self) -> None:
        if not self._phases or self._phases[0].start != 0:
            raise ConfigError("the first phase must start at sample 0: give it no start")
        starts = [check_int("a phase's start", phase.start, 0) for phase in self._phases]
        for number, (before, start) in enumerate(itertools.pairwise(starts), 1):
            if start <= before:
                raise ConfigError(
                    f"phase {number} starts at sample {start}, the one before it at {before}: "
                    "phases must be in order, and not be empty"
                )
        for number, phase in enumerate(self._phases):
            length = check_int(f"sequence_length of phase {number}", phase.sequence_length, 1)
            if not phase.weights:
                raise ConfigError(f"phase {number} has no source: give it weights")
            for name, weight in phase.weights.items():
                what = f"phase {number}, source {name}"
                source = self._sources.get(name)
                if source is None:
                    there = ", ".join(sorted(self._sources))
                    raise ConfigError(f"{what}: there are only {there}: add it to the sources")
                if not 0 < check_float(f"{what}: the weight", weight) < math.inf:
                    raise ConfigError(
                        f"{what}: the weight is {shown(weight)}; it must be positive and finite. "
                        "Leave a source out to draw nothing from it"
                    )
                check_windows(what, source.rough_tokens, length, source.mix_window)
        for name, source in self._sources.items():
            if source.max_epochs is not None:
                check_int(f"max_epochs of source {name}", source.max_epochs, 1)
