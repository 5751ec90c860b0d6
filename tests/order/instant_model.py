"""A slow model of the instant order, from the statements of `docs/instant_order.md` alone.

It draws sample after sample in turn. Names of rules (S6, M4) are those of the page.
"""

import hashlib
import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tests.kernels.reference import swap_or_not

ONE = 2**40
BLOCK = 4096  # places of an epoch that are permuted at once


class Phase(NamedTuple):
    start: int
    length: int
    weights: dict[str, float]


class Position(NamedTuple):
    epoch: int
    window: int  # tokens of a window
    past: int  # tokens of the epoch


class Sample(NamedTuple):
    number: int
    source: str
    tokens: Sequence[int]  # with the last label


@lru_cache(None)
def windows(block: int, num_windows: int, key: int) -> list[int]:
    places = np.arange(block * BLOCK, min((block + 1) * BLOCK, num_windows))
    return swap_or_not(places, num_windows, key, is_inverse=True).tolist()


@dataclass
class Source:
    """The first four are a user's; the rest is the source's state."""

    tokens: int
    max_epochs: int | None
    mix: int  # samples in a window
    documents: Sequence[int]  # their first tokens
    key: int
    position: Position | None = None
    debt: int = 0
    drawn: int = 0  # tokens of this epoch
    repeated: int = 0  # tokens drawn of epochs that another length ended

    def epoch_size(self, window: int) -> int:
        return (self.tokens - window) // window * window  # S3: n * W

    def next_position(self, length: int) -> Position:
        """S6, before the sample."""
        if self.position is None:
            return Position(0, self.mix * length, 0)
        epoch, window, past = self.position
        past = -(-past // length) * length
        if window % length == 0 and past < self.epoch_size(window):
            return Position(epoch, window, past)
        return Position(epoch + 1, self.mix * length, 0)

    def is_over(self, length: int) -> bool:
        """C1."""
        return self.max_epochs is not None and self.next_position(length).epoch >= self.max_epochs

    def draw(self, length: int) -> Sequence[int]:
        """The tokens of the next sample, and its last label."""
        last, (epoch, window, past) = self.position, self.next_position(length)
        if last and epoch > last.epoch:
            is_cut = last.window % length != 0 and last.past < self.epoch_size(last.window)
            self.repeated += self.drawn * is_cut
            self.drawn = 0
        u, v, r = map(int, np.random.Philox(key=self.key, counter=epoch).random_raw(3))  # S2
        block, place = divmod(past // window, BLOCK)
        order = windows(block, self.epoch_size(window) // window, v)
        self.position = Position(epoch, window, past + length)
        self.drawn += length
        start = (u * window >> 64) + order[place] * window
        tokens: Sequence[int] = range(start, start + window + 1)
        if self.mix > 1:
            tokens = self.mixed(tokens, (r + order[place]) % 2**64)
        return tokens[past % window : past % window + length + 1]

    def mixed(self, tokens: range, key: int) -> list[int]:
        """W1 and W2."""
        cuts = [place for place, token in enumerate(tokens) if place and token in self.documents]
        ends = zip([0, *cuts], [*cuts, len(tokens)], strict=True)
        *others, last = [tokens[start:end] for start, end in ends]
        order = swap_or_not(np.arange(len(others)), len(others), key, is_inverse=True)
        return [token for piece in order for token in others[piece]] + list(last)


@dataclass
class Node:
    """A leaf has a name, another node has children."""

    share: int
    debt: int
    name: str = ""
    left: "Node | None" = None
    right: "Node | None" = None
    level: int = 0  # the left child's next sample comes where it reaches share * ONE
    samples: int = 0


def joined(left: Node, right: Node) -> Node:
    """M3 and M4: the two smallest nodes become one."""
    share = left.share + right.share
    debt = (left.share * left.debt + right.share * right.debt) // share
    carry = max(-ONE // 2, min(ONE // 2 - 1, 3 * (left.debt - right.debt) // 16))
    return Node(share, debt, "", left, right, (ONE // 2 + carry) * share)


def shares(weights: dict[str, float]) -> dict[str, int]:
    """M1."""
    total = math.fsum(weights[name] for name in sorted(weights))
    rounded = {name: max(1, int(weights[name] / total * ONE)) for name in sorted(weights)}
    largest = max(rounded, key=rounded.__getitem__)  # the first by name among equals
    rounded[largest] += ONE - sum(rounded.values())
    return rounded


class Stretch:
    """Samples over which the weights stay the same (M1 to M5)."""

    def __init__(self, weights: dict[str, float], sources: dict[str, Source]) -> None:
        self.leaves = [Node(q, sources[name].debt, name) for name, q in shares(weights).items()]
        heap = [(leaf.share, 0, number, leaf) for number, leaf in enumerate(self.leaves)]  # M2
        heapq.heapify(heap)
        for age in range(len(heap) - 1):
            node = joined(heapq.heappop(heap)[-1], heapq.heappop(heap)[-1])
            heapq.heappush(heap, (node.share, 1, age, node))
        self.root = heap[0][-1]

    def draw(self) -> str:
        node = self.root
        node.samples += 1
        while node.left and node.right:
            node.level += node.left.share * ONE
            is_left = node.level >= node.share * ONE
            node.level -= node.share * ONE * is_left
            node = node.left if is_left else node.right
            node.samples += 1
        return node.name

    def end(self, sources: dict[str, Source]) -> None:
        for leaf in self.leaves:
            sources[leaf.name].debt += leaf.share * self.root.samples - leaf.samples * ONE  # M3


class Model:
    """A run, drawn sample after sample.

    Args:
        seed: Seed of the run.
        sources: By name, the tokens of each source, its `max_epochs`, its mix window, and the first
            token of each of its documents.
        phases: Start, sequence length and weights of each phase.
        skips: Ranges of sample numbers that are left out.
    """

    def __init__(
        self,
        seed: int,
        sources: dict[str, tuple[int, int | None, int, Sequence[int]]],
        phases: list[tuple[int, int, dict[str, float]]],
        skips: list[list[int]],
    ) -> None:
        self.sources = {}
        for name, own in sources.items():
            text = json.dumps(["instant", seed, name], separators=(",", ":"))
            key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")  # S1
            self.sources[name] = Source(*own, key)
        self.phases = [Phase(*phase) for phase in phases]
        self.skips = sorted(skips)
        self.number = 0  # of the next sample, a skipped one or not
        self.stretch: Stretch | None = None

    def draw(self) -> Sample:
        """The next sample that is not skipped (K2, K3)."""
        while True:
            sample = self._draw()
            if not any(start <= sample.number < stop for start, stop in self.skips):
                return sample

    def _draw(self) -> Sample:
        phase = max(phase for phase in self.phases if phase.start <= self.number)
        if self.stretch and phase.start == self.number:
            self._end_stretch()
        if not self.stretch:
            self.stretch = self._next_stretch(phase)
        source = self.sources[name := self.stretch.draw()]
        sample = Sample(self.number, name, source.draw(phase.length))
        self.number += 1
        if source.is_over(phase.length):  # C2
            self._end_stretch()
        return sample

    def _next_stretch(self, phase: Phase) -> Stretch:
        weights = {
            name: weight
            for name, weight in phase.weights.items()
            if not self.sources[name].is_over(phase.length)
        }
        if not weights:
            raise ValueError(f"sample {self.number}: all sources of its phase are at their caps")
        return Stretch(weights, self.sources)

    def _end_stretch(self) -> None:
        self.stretch.end(self.sources)
        self.stretch = None
