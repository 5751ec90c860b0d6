"""Packing and balance: against TRL's and OLMo-core's packers, and against bounds.

.venv/bin/python benchmarks/bench_packing.py

TRL and OLMo-core are rows where they can be imported (`pip install trl ai2-olmo-core`, in an
environment apart: they are of other versions of `datasets` than other peers).
"""

import collections
import heapq
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import HIGHER, LOWER, Report, Row, alternate, finish, number_of_runs, parser
from numpy.typing import NDArray

from millrace.feed import DocumentCosts, imbalance, least_imbalance
from millrace.order import PackedOrder
from millrace.sampling.balanced import deal

SETS = [(8192, 700), (8192, 2500), (32_768, 700), (32_768, 2500), (131_072, 700), (131_072, 2500)]
LEAST_FILL = {8192: 0.999, 32_768: 0.998, 131_072: 0.998}
PEER_DOCUMENTS = 100_000
SECONDS, MICROSECONDS = 3.0, 50.0  # of 10 M documents, and of a pack
DEAL_MS = {64: 0.2, 4096: 8.0}
SHARE = 4  # micro batches
MEAN_BAR, WORST_BAR, LARGE_BAR = 1.02, 1.08, 1.03

NOTES = [
    "Lengths are log-normal, of sigma 1 where nothing else is said, cut at the capacity. Ours: "
    "from the array of lengths to the tables of an order, one core. A pack: one sample number to "
    "its documents.",
    "TRL's packer (`pack_dataset`, strategy bfd, in one batch) also copies the tokens, here of "
    "8 bits; \"TRL's tree\" is the loop of it, over its segment tree, alone, as is OLMo-core's "
    "(`InstancePacker`). All get 100,000 documents, and so do we in these rows.",
    "Limits in the place of a peer: the bars themselves.",
    "Balance: work L**2 + 61,000 L, {share} micro batches of one pack. Slowest: the dearest rank "
    "over the lower bound of `least_imbalance`, of {batches} global batches drawn at random. "
    "Longest first: each pack, the dearest first, to the cheapest rank that has room. Waiting "
    "after each micro batch: the sum of the dearest micro batches over the mean rank, ours with "
    "`lockstep`.",
]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    runs = number_of_runs(options)
    count, batches = (100_000, 20) if options.quick else (10_000_000, 1000)
    notes = [note.format(share=SHARE, batches=f"{batches:,}") for note in NOTES]
    report = Report("Packing and balance", notes, runs, peer="peer or limit")
    for capacity, mean in SETS:
        print(f"{capacity} tokens, mean {mean}", flush=True)
        report.rows += packing_rows(capacity, mean, count, runs)
    for capacity in (32_768, 131_072):
        for mean, sigma in itertools.product((700, 2500), (1.0, 1.5)):
            print(f"balance of {capacity} tokens, mean {mean}, sigma {sigma}", flush=True)
            report.rows += balance_rows(capacity, mean, sigma, count // 3, batches)
    finish(report, options)


def make_lengths(capacity: int, mean: float, count: int, sigma: float = 1) -> NDArray[np.int32]:
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(lengths, 1, capacity).astype(np.int32)


def packing_rows(capacity: int, mean: float, count: int, runs: int) -> list[Row]:
    lengths = make_lengths(capacity, mean, count)
    name = f"{capacity} tokens, mean {mean}"
    orders = []

    def pack() -> float:
        start = time.perf_counter()
        orders[:] = [PackedOrder(lengths, capacity, 1)]
        return time.perf_counter() - start

    seconds = [pack() for _ in range(runs)]
    order = orders[0]
    numbers = np.random.default_rng(1).integers(0, len(order), 1000)
    order.spans(numbers[:1])  # makes the order of the core
    times = [seconds_of(lambda number=number: order.spans([number])) for number in numbers]
    fill = order.plan.num_tokens / order.plan.num_packs / capacity
    rows = [
        limited(f"{name}: {count:,} documents", seconds, SECONDS * count / 1e7, "s", LOWER),
        limited(f"{name}: a pack", [statistics.median(times) * 1e6], MICROSECONDS, "us", LOWER),
        limited(f"{name}: share of tokens used", [fill], LEAST_FILL[capacity], "", HIGHER),
    ]
    return rows + peer_rows(name, lengths[:PEER_DOCUMENTS], capacity, runs)


def limited(name: str, ours: list[float], limit: float, unit: str, better: str) -> Row:
    return Row.compare(name, ours, [limit], unit, better=better, bar=1.0)


def peer_rows(name: str, lengths: NDArray[np.int32], capacity: int, runs: int) -> list[Row]:
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: len(lengths) / seconds_of(lambda: PackedOrder(lengths, capacity, 1))
    }
    if importlib.util.find_spec("trl"):
        import pyarrow as pa
        from datasets import Dataset
        from trl import pack_dataset
        from trl.data_utils import _SegmentTree

        ends = np.append(0, np.cumsum(lengths)).astype(np.int64)
        tokens = pa.LargeListArray.from_arrays(ends, np.zeros(ends[-1], np.uint8))
        data = Dataset(pa.table({"input_ids": tokens}))
        options = {"map_kwargs": {"batch_size": len(lengths)}}
        sides["TRL"] = lambda: (
            len(lengths) / seconds_of(lambda: pack_dataset(data, capacity, "bfd", **options))
        )

        def pack_by_tree() -> None:
            tree, packs = _SegmentTree(capacity), collections.defaultdict(collections.deque)
            tree.add(capacity)
            for number in np.argsort(-lengths, kind="stable").tolist():
                room = tree.search(size := int(lengths[number]))
                pack = packs[room].popleft() if room < capacity else []
                pack.append(number)
                if room < capacity and not packs[room]:
                    tree.remove(room)
                packs[room - size].append(pack)
                if room > size:
                    tree.add(room - size)

        sides["TRL's tree"] = lambda: len(lengths) / seconds_of(pack_by_tree)
    if importlib.util.find_spec("olmo_core"):
        from olmo_core.data.utils import InstancePacker

        ends = np.append(0, np.cumsum(lengths)).astype(np.uint64)
        bounds = np.stack((ends[:-1], ends[1:]), axis=1)
        sides["OLMo-core"] = lambda: (
            len(lengths) / seconds_of(lambda: InstancePacker(capacity).pack_documents(bounds))
        )
    results = alternate(runs, sides)
    ours = results.pop("ours")
    return [
        Row.compare(f"{name}: {peer}", ours, theirs, "documents/s", better=HIGHER)
        for peer, theirs in results.items()
    ]


def seconds_of(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def balance_rows(capacity: int, mean: float, sigma: float, count: int, batches: int) -> list[Row]:
    order = PackedOrder(make_lengths(capacity, mean, count, sigma), capacity, 1)
    costs = DocumentCosts(spans=order.spans)(np.arange(len(order)))
    name, rows = f"{capacity} tokens, mean {mean}, sigma {sigma}", []
    for ranks, limit in DEAL_MS.items():
        size, random = ranks * SHARE, np.random.default_rng(2)
        if size > len(costs):
            continue
        found: dict[str, list[float]] = {"drawn": [], "longest": [], "dealt": [], "ms": []}
        in_step: dict[str, list[float]] = {"drawn": [], "longest": [], "dealt": []}
        for _ in range(batches if ranks == 64 else max(batches // 100, 3)):
            batch = costs[random.choice(len(costs), size, replace=False)]
            start = time.perf_counter()
            places = deal(batch, ranks)
            found["ms"].append(1e3 * (time.perf_counter() - start))
            least = least_imbalance(batch, ranks)
            longest, in_lockstep = longest_first(batch, ranks), deal(batch, ranks, lockstep=True)
            for kind, costs_by_rank, in_turn in (
                ("drawn", batch, batch),
                ("longest", longest, longest),
                ("dealt", batch[places], batch[in_lockstep]),
            ):
                found[kind].append(imbalance(costs_by_rank, ranks) / least)
                in_step[kind].append(imbalance(in_turn, ranks, SHARE))
        label = f"{name}, {ranks} ranks"
        time_name = f"{label}: a deal"
        rows.append(limited(time_name, [statistics.median(found["ms"])], limit, "ms", LOWER))
        dealt = found["dealt"]
        mean_bar = MEAN_BAR if ranks == 64 else LARGE_BAR
        rows.append(limited(f"{label}: slowest, mean", [np.mean(dealt)], mean_bar, "", LOWER))
        if ranks == 64:
            worst_name = f"{label}: slowest, worst"
            rows.append(limited(worst_name, [max(dealt)], WORST_BAR, "", LOWER))
        for kind, peer in (("drawn", "as drawn"), ("longest", "longest first")):
            values = [float(np.mean(found[kind]))]
            row = f"{label}: slowest, {peer}"
            rows.append(Row.compare(row, [np.mean(dealt)], values, "", better=LOWER))
            row = f"{label}: waiting after each micro batch, {peer}"
            ours, values = [np.mean(in_step["dealt"])], [float(np.mean(in_step[kind]))]
            rows.append(Row.compare(row, ours, values, "", better=LOWER))
    return rows


def longest_first(costs: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """The costs by rank, each of the dearest left to the cheapest rank that has room."""
    heap: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
    dealt: list[list[float]] = [[] for _ in range(ranks)]
    for cost in np.sort(costs)[::-1].tolist():
        total, rank = heapq.heappop(heap)
        dealt[rank].append(cost)
        if len(dealt[rank]) < len(costs) // ranks:
            heapq.heappush(heap, (total + cost, rank))
    return np.array(dealt).ravel()


if __name__ == "__main__":
    main()
