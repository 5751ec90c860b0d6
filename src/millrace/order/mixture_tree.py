"""A mixture without an index: a binary tree that deals samples to sources by their shares.

`docs/instant_order.md` defines it (M1 to M5). Its memory depends on the number of sources alone.
"""

import bisect
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import MAX_INT64

ONE = 1 << 40
"""The sum of all shares."""


def whole_shares(weights: Sequence[float]) -> NDArray[np.int64]:
    """Whole numbers with the sum `ONE`, in proportion to positive weights, each at least 1 (M1)."""
    total = math.fsum(weights)
    shares = np.maximum(np.floor(np.asarray(weights) / total * ONE).astype(np.int64), 1)
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

    def samples_until(
        self, leaves: NDArray[np.int64], counts: NDArray[np.int64], most: int = MAX_INT64 - 1
    ) -> int:
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
