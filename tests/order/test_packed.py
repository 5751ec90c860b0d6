"""Packs: their laws, beside a slow packer, and what is refused."""

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import ConfigError, DataError, _native
from millrace.deferred import Deferred
from millrace.order import PackedOrder, PackPlan
from millrace.order.packed import LONG_DOCUMENTS
from tests.kernels import reference

Pieces = list[tuple[int, int, int]]  # sequence, offset and count of each document of a pack


def packs_of(order: PackedOrder, start: int, stop: int) -> list[Pieces]:
    spans = order.spans(np.arange(start, stop))
    assert spans.sequences is not None
    pieces = list(zip(*(column.tolist() for column in spans[:3]), strict=True))
    return [pieces[a:b] for a, b in zip(spans.bounds[:-1], spans.bounds[1:], strict=True)]


def slow_packs(
    lengths: list[int], capacity: int, seed: int, options: dict[str, Any]
) -> list[Pieces]:
    """The packs in the order in which they are made, step by step: the twin of the core's order."""
    pieces: Pieces = [(number, 0, min(count, capacity)) for number, count in enumerate(lengths)]
    long = [number for number, count in enumerate(lengths) if count > capacity]
    if options["long_documents"] == "drop":
        pieces = [piece for piece in pieces if piece[0] not in long]
    if options["long_documents"] == "split":
        for number in long:
            for offset in range(capacity, lengths[number], capacity):
                pieces.append((number, offset, min(capacity, lengths[number] - offset)))
    pieces = [piece for piece in pieces if piece[2] > 0]
    multiple, size = options["multiple"], len(pieces)
    padded = [-(-count // multiple) * multiple for _, _, count in pieces]
    num_windows = 1
    if not options["in_order"]:
        key = int(np.random.SeedSequence(seed).generate_state(2, np.uint64)[0])
        places = reference.swap_or_not(np.arange(size), size, key, True).tolist()
        pieces, padded = ([values[place] for place in places] for values in (pieces, padded))
        worth = options["window_packs"] * capacity * size // max(sum(padded), 1)
        num_windows = max(size // max(worth, options["window_documents"]), 1)
    packs = []
    for window in np.array_split(np.arange(size), num_windows):
        sizes = np.array([padded[place] for place in window], np.int32)
        packer = slow_packs_in_order if options["in_order"] else reference.pack
        documents, ends = packer(sizes, capacity)
        for members in np.split(documents, ends[:-1])[: len(ends)]:
            packs.append([pieces[window[member]] for member in members])
    return packs


def slow_packs_in_order(sizes: Any, capacity: int) -> tuple[Any, Any]:
    ends, room = [], 0
    for number, size in enumerate(sizes):
        if size > room:
            ends.append(number)
            room = capacity
        room -= size
    return np.arange(len(sizes)), np.array([*ends[1:], len(sizes)] if ends else [], np.int64)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int, dict[str, Any]]:
    multiple = draw(st.integers(1, 4))
    capacity = multiple * draw(st.integers(1, 20))
    lengths = draw(st.lists(st.integers(0, 2 * capacity), min_size=1, max_size=60))
    options = {
        "long_documents": draw(st.sampled_from(LONG_DOCUMENTS[1:])),
        "in_order": draw(st.booleans()),
        "window_documents": draw(st.integers(1, 40)),
        "window_packs": draw(st.integers(1, 5)),
        "multiple": multiple,
    }
    return lengths, capacity, draw(st.integers(0, 2**70)), options


@given(case=cases())
@settings(deadline=None, max_examples=300)
def test_each_epoch_is_a_permutation_of_the_packs_of_a_slow_packer(case: Any) -> None:
    lengths, capacity, seed, options = case
    try:
        order = PackedOrder(lengths, capacity, seed, num_samples=10_000, **options)
    except ConfigError:
        assert not slow_packs(lengths, capacity, seed, options)
        return
    packs, num_packs = slow_packs(lengths, capacity, seed, options), order.plan.num_packs
    key = int(np.random.SeedSequence(seed).generate_state(2, np.uint64)[1])
    for epoch in (0, 1, 3):
        golden = (key + epoch * 0x9E3779B97F4A7C15) % 2**64
        places = reference.swap_or_not(np.arange(num_packs), num_packs, golden, True)
        start = epoch * num_packs
        assert packs_of(order, start, start + num_packs) == [packs[place] for place in places]
    counts = [count for pack in packs for _, _, count in pack]
    assert (order.plan.num_pieces, order.plan.num_tokens) == (len(counts), sum(counts))
    assert order.plan.num_lost_tokens == sum(lengths) - sum(counts)
    assert order.plan.num_long == sum(count > capacity for count in lengths)


@given(case=cases(), size=st.integers(1, 200))
@settings(deadline=None, max_examples=100)
def test_the_number_of_samples_and_the_way_of_loading_change_no_sample(
    case: Any, size: int
) -> None:
    lengths, capacity, seed, options = case
    lengths = [*lengths, 1]
    order = PackedOrder(lengths, capacity, seed, num_samples=size, **options)
    assert len(order) == size
    whole = PackedOrder(lengths, capacity, seed, **options)
    assert len(whole) == whole.plan.num_packs
    same = min(size, len(whole))
    assert packs_of(order, 0, same) == packs_of(whole, 0, same)
    assert whole.fingerprint() == order.fingerprint()
    stored = order.plan.build(order.inputs)
    plan = type(order.plan)(**dataclasses.asdict(order.plan))
    layout = {name: (array.dtype, array.shape) for name, array in stored.items()}
    assert layout == plan.arrays(order.inputs)
    loaded = plan.load(order.inputs, Deferred.of(stored))
    for other in (loaded, pickle.loads(pickle.dumps(order))):
        assert packs_of(other, 0, size) == packs_of(order, 0, size)


def test_a_range_of_sequences_is_packed_alone() -> None:
    lengths = [50, 3, 4, 1, 2, 50]
    inputs = dataclasses.replace(
        PackedOrder([1], 8, 0).inputs,
        num_sequences=6,
        num_tokens=110,
        sequences=(1, 5),
        load_lengths=lambda: np.array(lengths, np.int32),
    )
    plan = PackPlan.of(inputs)
    order = plan.load(inputs, Deferred.of(plan.build(inputs)))
    pieces = [piece for pack in packs_of(order, 0, len(order)) for piece in pack]
    assert sorted(pieces) == [(1, 0, 3), (2, 0, 4), (3, 0, 1), (4, 0, 2)]


def test_lengths_and_options_are_the_orders_own() -> None:
    lengths = np.random.default_rng(1).integers(1, 8192, 20_000)
    options = {"window_packs": 30_000, "multiple": 1, "window_documents": 7}
    order = PackedOrder(lengths, 8192, 1, **options)
    typed = {name: np.int16(value) for name, value in options.items()}
    other = PackedOrder(lengths, np.int32(8192), np.uint64(1), **typed)  # type: ignore[arg-type]
    assert json.dumps(other.fingerprint()) == json.dumps(order.fingerprint())
    lengths[:] = 3  # by the caller
    assert packs_of(order, 0, 50) == packs_of(other, 0, 50)
    assert PackedOrder(lengths, 8192, 1, **options).fingerprint() != order.fingerprint()


def test_the_order_is_frozen() -> None:
    """Saved states name it by its options alone."""
    order = PackedOrder([7, 3, 12, 1, 9, 4, 4], 8, 42, long_documents="split", num_samples=12)
    assert [[piece[:2] for piece in pack] for pack in packs_of(order, 0, 12)] == GOLDEN


GOLDEN = [
    [(5, 0), (2, 8)],
    [(6, 0), (4, 8), (1, 0)],
    [(4, 0)],
    [(0, 0), (3, 0)],
    [(2, 0)],
    [(6, 0), (4, 8), (1, 0)],
    [(0, 0), (3, 0)],
    [(2, 0)],
    [(4, 0)],
    [(5, 0), (2, 8)],
    [(5, 0), (2, 8)],
    [(0, 0), (3, 0)],
]


@pytest.mark.parametrize(
    ("lengths", "capacity", "seed", "options", "message"),
    [
        ([9, 3, 20], 8, 0, {}, r"2 of 3 documents \(66.67%\) have more than 8 tokens, up to 20"),
        ([], 8, 0, {}, "no document can be packed"),
        ([9], 8, 0, {"long_documents": "drop"}, "no document can be packed"),
        ([3], 8, 0, {"long_documents": "keep"}, "long_documents must be one of"),
        ([3], 8, 0, {"multiple": 3}, "8 tokens must be a multiple of 3"),
        ([3], 8, 0, {"window_documents": 0}, "window_documents must be"),
        ([3], 8, 0, {"in_order": 1}, "in_order must be"),
        ([3], 8, -1, {}, "seed must be"),
        ([3], 0, 0, {}, "capacity must be"),
        ([-1], 8, 0, {}, "a length must be"),
        ([2**31], 8, 0, {}, "a length must be"),
        ([3], 8, 0, {"num_samples": -1}, "num_samples must be"),
    ],
)
def test_wrong_arguments_are_refused(
    lengths: Any, capacity: int, seed: int, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PackedOrder(lengths, capacity, seed, **options)


@pytest.mark.parametrize("lengths", [[3, -1, 4], [3, 4, 5]])
def test_a_damaged_index_is_an_error(lengths: list[int]) -> None:
    inputs = dataclasses.replace(
        PackedOrder([3, 3, 4], 8, 0).inputs, load_lengths=lambda: np.array(lengths, np.int32)
    )
    with pytest.raises(DataError, match="the index is damaged"):
        PackPlan.of(inputs)


def test_samples_outside_and_damaged_tables_are_refused() -> None:
    order = PackedOrder([3, 4, 9, 1], 8, 0, long_documents="split", num_samples=10)
    for number in (-1, 10, 2**62):
        with pytest.raises(ValueError, match="sample number"):
            order.spans(np.array([number]))
    pieces, ends = order.plan.build(order.inputs).values()
    lengths = np.array([3, 4, 9, 1], np.int32)

    def read(lengths: Any = lengths, pieces: Any = pieces, ends: Any = ends) -> Any:
        core = _native.PackOrder(lengths, pieces, np.asarray(ends, np.int64), 8, 10, 0)
        return _native.spans(core, np.arange(10))

    read()
    for change in (
        {"pieces": np.full(5, 4, np.uint32)},
        {"pieces": np.full(5, 2**32 - 1, np.uint32)},
        {"pieces": np.full(5, -1)},
        {"pieces": np.full(5, 2 | 2 << 32)},
        {"pieces": np.full(5, 2**63 - 1)},
        {"pieces": np.zeros(5, np.int64), "ends": [5] * len(ends)},
        {"ends": ends[::-1].copy()},
        {"ends": ends + 1},
        {"ends": ends - 9},
        {"ends": []},
        {"lengths": np.full(4, -5, np.int32)},
        {"lengths": np.full(4, 7, np.int32)},
    ):
        with pytest.raises(ValueError, match=r"[0-9]"):
            read(**change)
