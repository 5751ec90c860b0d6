"""A mixture without an index: a binary tree that deals samples to sources by their shares.

`docs/instant_order.md` defines it (M1 to M5). Its memory depends on the number of sources alone.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace import _native

_BITS = 40
ONE = 1 << _BITS
"""The sum of all shares."""


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers with the sum `ONE`, in proportion to positive weights, each at least 1 (M1)."""
    total = math.fsum(weights)
    shares = [max(1, math.floor(weight / total * ONE)) for weight in weights]
    shares[shares.index(max(shares))] += ONE - sum(shares)
    return shares


class MixtureTree:
    """Which source each sample of a stretch is drawn from, and its number among the source's.

    Args:
        shares: Share of each source, as `whole_shares` returns them.
        debts: What each source is owed at the start, in samples times `ONE`. None: nothing.

    Example:
        >>> leaves, numbers = MixtureTree(whole_shares([2, 1])).draws(np.arange(6))
        >>> leaves.tolist(), numbers.tolist()
        ([0, 1, 0, 0, 1, 0], [0, 0, 1, 2, 1, 3])
    """

    def __init__(self, shares: Sequence[int], debts: Sequence[int] | None = None) -> None:
        self._num_leaves = len(shares)
        node_shares = list(shares)
        node_debts = [0] * len(shares) if debts is None else list(debts)
        heap = [(share, leaf) for leaf, share in enumerate(shares)]
        heapq.heapify(heap)
        parents = [-1] * (2 * len(shares) - 1)
        nodes = []
        while len(heap) > 1:
            (left_share, left), (right_share, right) = heapq.heappop(heap), heapq.heappop(heap)
            node, share = len(node_shares), left_share + right_share
            left_debt, right_debt = node_debts[left], node_debts[right]
            # Three sixteenths: more is too much for a phase, less for the sum of many.
            carry = max(-ONE // 2, min(ONE // 2 - 1, 3 * (left_debt - right_debt) // 16))
            nodes.append((left, right, share, left_share, carry))
            node_shares.append(share)
            node_debts.append((left_share * left_debt + right_share * right_debt) // share)
            parents[left] = parents[right] = node
            heapq.heappush(heap, (share, node))
        # Arrays: a run whose sources reach their caps one by one has thousands of trees.
        self._parents = np.array(parents, np.int32)
        self._table = np.array(nodes, np.int64).reshape(-1, 5)

    def draws(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The source of some samples, int32 [n], and their numbers among its samples, int64 [n]."""
        return _native.draw_from_tree(self._table, numbers)

    def counts(self, number: int) -> list[int]:
        """How many of the first `number` samples each source has."""
        counts = [0] * len(self._parents)
        counts[-1] = number
        for place, node in reversed([*enumerate(self._table.tolist(), self._num_leaves)]):
            left, right = node[:2]
            counts[left] = _left_count(node, counts[place])
            counts[right] = counts[place] - counts[left]
        return counts[: self._num_leaves]

    def find(self, leaf: int, number: int) -> int:
        """The sample that is a source's of that number: the reverse of `draws`."""
        node, number = int(leaf), int(number)
        while (parent := int(self._parents[node])) >= 0:
            number = _in_parent(self._table[parent - self._num_leaves].tolist(), node, number)
            node = parent
        return number


def _in_parent(parent: Sequence[int], child: int, number: int) -> int:
    """The number, among the samples of a node, of one of its child."""
    left, _, share, left_share, _ = parent
    part = left_share if child == left else share - left_share
    low, high = max(number - 1, 0) * share // part, (number + 2) * share // part + 1
    while high - low > 1:  # the child has at most `number` of the first `low`, more of `high`
        middle = (low + high) // 2
        count = _left_count(parent, middle)
        if (count if child == left else middle - count) > number:
            high = middle
        else:
            low = middle
    return low


def _left_count(node: Sequence[int], count: int) -> int:
    """How many of the first samples of a node its left child has (M4)."""
    _, _, share, left_share, carry = node
    return ((left_share * count << _BITS) // share + carry + ONE // 2) >> _BITS
