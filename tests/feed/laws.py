"""Random cases of the one-order law and the resume law, over all kinds of datasets and samplers.

    python -m tests.feed.laws --cases 2000 --seed 1

A case is a run in legs. In each leg all ranks of some size draw their batches in lock step, with
some micro batch, threads and prefetch; then every rank's state is saved, the states are compared,
and the next leg resumes from one of them, sent through JSON, with other numbers. Each batch is
compared with a table of all samples of the dataset, and the ranks' sample numbers with the global
order, which a slow model gives:

- the ranks' samples of a step, dealt back into one sequence, are the next samples of that order;
- so every sample number comes exactly once, whatever the legs.

Where the order depends on the number of ranks (a cyclic sampler), a resume with other numbers must
either continue the same order, or be refused with a reason.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from millrace import ConfigError, IndexedDataset, ResumeError
from millrace.feed import (
    BatchForm,
    BatchSizeSchedule,
    BlendedDataset,
    CyclicSampler,
    ExternalBatches,
    FillInMiddle,
    FullValidationSampler,
    GlobalBatchSampler,
    GPTDataset,
    Loader,
    RampUp,
    RepeatGuard,
    SequentialSampler,
    ShardedDataset,
    TransformedDataset,
)
from millrace.order import PackedOrder, Spans
from millrace.samples.dataset import batch_of_form
from millrace.samples.fields import ALL_FIELDS, FIELDS, TOKEN_DTYPES
from tests.conftest import write_documents
from tests.shard_folders import make_sequences, write_sequences

Numbers = NDArray[np.int64]
Batch = dict[str, NDArray[Any]]

UNITS = (1, 2, 3, 4, 6, 8, 12, 24, 32, 60)
"""Numbers of samples that a step takes, or divides: micro batch times ranks divide one of them."""

SAMPLERS = tuple("short sequential global schedule ramp-up cyclic full external".split())


# ---- the datasets, made once ----


class EverySecond:
    """An order in Python: sample k has 9 tokens from token k of sequence 2 k on."""

    def __len__(self) -> int:
        return 40

    def spans(self, sample_numbers: Numbers) -> Spans:
        counts, bounds = np.full(len(sample_numbers), 9), np.arange(len(sample_numbers) + 1)
        return Spans(2 * sample_numbers, sample_numbers % 7, counts, bounds)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "every second"}


class Squares:
    """A dataset of a user, without a token file."""

    def __len__(self) -> int:
        return 53

    def batch(self, sample_numbers: Any) -> Batch:
        numbers = np.asarray(sample_numbers)
        return {"tokens": np.square(numbers), "half": numbers / 2}

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "squares"}


@cache
def folder() -> Path:
    """The folder of the token files, which ends with the process."""
    global _folder
    _folder = tempfile.TemporaryDirectory()
    random = np.random.default_rng(12)
    a, b, c = random.integers(0, 60, 30), random.integers(1, 9, 90), np.full(90, 20)
    for name, lengths in {"a": a, "b": b, "c": c}.items():
        documents = [random.integers(0, 500, length) for length in lengths]
        write_documents(Path(_folder.name) / name, documents)
    write_sequences(Path(_folder.name) / "shards", make_sequences(61, 8, np.uint16), num_shards=4)
    return Path(_folder.name)


def gpt(name: str, access: Any = "mmap", **options: Any) -> GPTDataset:
    data = IndexedDataset(folder() / name, access=access)
    return GPTDataset(data, sequence_length=8, **options)


TRANSFORMS = [
    FillInMiddle(
        rate=0.5, prefix_token=501, middle_token=502, suffix_token=503, eod_token=7, seed=3
    ),
    RepeatGuard(max_period=2, min_repeats=2),
]


def shards(**options: Any) -> ShardedDataset:
    return ShardedDataset(folder() / "shards", **options)


def packs() -> GPTDataset:
    data = IndexedDataset(folder() / "a")
    order = PackedOrder(data.sequence_lengths, 48, 3, num_samples=130, long_documents="split")
    options: Any = {"sequence_length": 48, "add_extra_token": False, "boundaries": "documents"}
    return GPTDataset(data, order=order, **options)


MAKERS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: gpt("a", seed=5, num_samples=150),
    "masked": lambda: gpt("b", seed=6, eod_token=7, reset_position_ids=True, eod_mask_loss=True),
    "file": lambda: gpt("a", "file", seed=5, num_samples=150),
    "python order": lambda: gpt("c", order=EverySecond()),
    "blend": lambda: BlendedDataset([gpt("a", seed=1), gpt("b", seed=2)], [3, 2], 120),
    "inner blend": lambda: BlendedDataset([gpt("a", seed=4), gpt("b", seed=4)]),
    "nested blend": lambda: BlendedDataset(
        [dataset_of(kind) for kind in ("inner blend", "file", "python order")]
    ),
    "transformed": lambda: TransformedDataset(gpt("b", seed=9, eod_token=7), TRANSFORMS),
    "packs": packs,
    "own": Squares,
    "sharded": lambda: shards(eod_token=7, reset_position_ids=True, access="file"),
    "blend with shards": lambda: BlendedDataset(
        [shards(), gpt("a", seed=5, add_extra_token=False)], [2, 1], 80
    ),
}


@cache
def dataset_of(kind: str) -> Any:
    return MAKERS[kind]()


def fields_of(kind: str) -> list[str]:
    """The fields that a dataset can make: a transformed text has no place in its token file."""
    placed = {"document_numbers", "document_bounds"}
    return sorted(set(ALL_FIELDS) - (placed if kind == "transformed" else set()))


UNEVEN = ("cu_seqlens", "max_seqlen", "document_numbers", "document_bounds")  # have no rows


@cache
def table_of(kind: str) -> Batch:
    """All samples of a dataset, read in one go: the arrays with a row for each."""
    dataset = dataset_of(kind)
    numbers = np.arange(len(dataset))
    names = tuple(name for name in fields_of(kind) if name not in UNEVEN)
    return dict(batch_of_form(dataset, numbers, None if kind == "own" else BatchForm(fields=names)))


def expected_batch(case: Case, numbers: Numbers) -> Batch:
    """The batch of some samples."""
    table = table_of(case.kind)
    names = case.fields or [name for name in table if name in FIELDS or case.kind == "own"]
    if any(name in UNEVEN for name in names):
        return dict(dataset_of(case.kind).batch(numbers, BatchForm(fields=tuple(names))))
    return {name: table[name][numbers] for name in names}


# ---- the global orders, by slow models ----


def dealt_back(parts: list[Numbers], turn: int) -> list[int]:
    """The ranks' numbers of a step in global order: `turn` of each rank at a time."""
    starts = range(0, max(map(len, parts)), turn)
    turns = [part[start : start + turn] for start in starts for part in parts]
    return [int(number) for number in np.concatenate([*turns, []])]


@dataclass(frozen=True)
class Leg:
    """A part of a run between two stops."""

    ranks: int
    micro: int
    num_steps: int
    threads: int
    prefetch: int | None
    resumed_rank: int

    @property
    def block(self) -> int:
        return self.ranks * self.micro

    def share(self, rank: int) -> dict[str, Any]:
        ranks = {"data_parallel_rank": rank, "data_parallel_size": self.ranks}
        return {"micro_batch_size": self.micro, **ranks}


@dataclass(frozen=True)
class Case:
    """A dataset, a sampler and the legs of a run."""

    kind: str
    sampler: str
    unit: int
    option: bool  # drop_last, data_sharding or pad
    sizes: tuple[int, ...]  # of a schedule of global batches, in units
    every: int  # samples between two of them
    start: int  # of the run, in units
    fields: tuple[str, ...] | None
    token_dtype: str
    shares_labels: bool
    legs: tuple[Leg, ...]


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 8, samplers: tuple[str, ...] = SAMPLERS) -> Case:
    """Cases with up to that many ranks."""
    unit = draw(st.sampled_from(UNITS))
    sampler = draw(st.sampled_from(samplers))
    kind = draw(st.sampled_from([*MAKERS]))
    has_forms = kind != "own" and sampler != "external"
    fields = draw(st.none() | st.lists(st.sampled_from(fields_of(kind)), min_size=1, unique=True))
    token_dtype = draw(st.sampled_from(TOKEN_DTYPES))
    shapes = [(r, m) for r in range(1, max_ranks + 1) for m in range(1, 61) if unit % (r * m) == 0]
    return Case(
        kind=kind,
        sampler=sampler,
        unit=unit,
        option=draw(st.booleans()),
        sizes=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))),
        every=draw(st.integers(1, 40)),
        start=draw(st.just(0) | st.integers(0, 40)),
        fields=tuple(fields) if fields is not None and has_forms else None,
        token_dtype=token_dtype if has_forms else "int64",
        shares_labels=has_forms and draw(st.booleans()),
        legs=tuple(
            Leg(
                *shape,
                num_steps=draw(st.integers(0, 12) | st.integers(0, 50)),
                threads=draw(st.integers(1, 4)),
                prefetch=draw(st.none() | st.integers(0, 4)),
                resumed_rank=draw(st.integers(0, max_ranks - 1)),
            )
            for shape in draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=4))
        ),
    )


def schedule_of(case: Case) -> int | BatchSizeSchedule:
    sizes = [case.unit * size for size in case.sizes]
    if case.sampler == "schedule":
        return BatchSizeSchedule([(place * case.every, size) for place, size in enumerate(sizes)])
    if case.sampler == "ramp-up":
        least, growth = sizes[0], case.unit * len(sizes)
        return RampUp(least, case.unit, case.every * len(sizes), least + growth)
    return sizes[0]


def size_after(case: Case, leg: Leg, consumed: int) -> int:
    """The number of samples that a step takes which starts there: the rules, written down anew."""
    sizes = [case.unit * size for size in case.sizes]
    growth = min(int(consumed / (case.every * len(sizes) / len(sizes))), len(sizes))
    models = {
        "global": sizes[0],
        "schedule": sizes[min(consumed // case.every, len(sizes) - 1)],
        "ramp-up": sizes[0] + growth * case.unit,
    }
    return models.get(case.sampler, leg.block)


def sampler_of(case: Case, leg: Leg, rank: int, num_samples: int) -> Any:
    """The sampler of a rank, for all kinds but "short" and "external"."""
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "sequential": (SequentialSampler, {"drop_last": case.option}),
        "cyclic": (CyclicSampler, {"data_sharding": case.option}),
        "full": (FullValidationSampler, {"pad": case.option}),
    }
    batches = {"global_batch_size": schedule_of(case), "drop_last": case.option}
    kind, options = kinds.get(case.sampler, (GlobalBatchSampler, batches))
    return kind(num_samples, **leg.share(rank), **options)


def loader_of(case: Case, leg: Leg, rank: int, consumed_samples: int) -> Loader:
    """The loader of a rank."""
    dataset = dataset_of(case.kind)
    options: dict[str, Any] = {"consumed_samples": consumed_samples}
    options |= {"threads": leg.threads, "prefetch": leg.prefetch, "fields": case.fields}
    options |= {"token_dtype": case.token_dtype, "share_labels": case.shares_labels}
    if case.sampler == "external":
        batches = partial(external_batches, case.kind, leg, rank)
        steps = {"samples_per_step": leg.block, "num_steps": len(dataset) // leg.block}
        dataset = ExternalBatches(batches, **steps)
    elif case.sampler == "short":
        options |= leg.share(rank) | {"drop_last": case.option}
    else:
        options["sampler"] = sampler_of(case, leg, rank, len(dataset))
    return Loader(dataset, **options)


def external_batches(kind: str, leg: Leg, rank: int, consumed: int) -> Iterator[Batch]:
    """What another program would make: a rank's slices of consecutive blocks."""
    dataset = dataset_of(kind)
    for start in range(consumed, len(dataset) - leg.block + 1, leg.block):
        first = start + rank * leg.micro
        yield dict(dataset.batch(np.arange(first, first + leg.micro)))


def global_order(
    case: Case, leg: Leg, start: int, num_samples: int
) -> tuple[list[int], int] | None:
    """The samples of the step that starts there, and the position after it; None at the end."""
    if case.sampler == "cyclic":
        epoch, inside = divmod(start, num_samples // leg.block * leg.block)
        shards = shards_of(case, leg, num_samples, epoch)
        first, count = inside // len(shards), leg.block // len(shards)
        numbers = [number for shard in shards for number in shard[first : first + count]]
        return numbers, start + leg.block
    drops = (case.option and case.sampler != "full") or case.sampler == "external"
    end = start + size_after(case, leg, start)
    if start >= num_samples or (drops and end > num_samples):
        return None
    return list(range(start, min(end, num_samples))), min(end, num_samples)


def shards_of(case: Case, leg: Leg, num_samples: int, epoch: int) -> list[list[int]]:
    """Megatron-LM's rules for `cyclic`: an epoch's order, of each shard or of all ranks."""
    num_steps = num_samples // leg.block
    if not case.option:
        order = permutation(num_samples // leg.micro * leg.micro, epoch)
        return [order[: num_steps * leg.block]]
    size = num_steps * leg.micro
    order = permutation(size, epoch)
    return [[rank * size + number for number in order] for rank in range(leg.ranks)]


@cache
def permutation(size: int, seed: int) -> list[int]:
    """torch.randperm of a generator with that seed, by its rule for small sizes."""
    next_word = np.random.RandomState(seed)._bit_generator.random_raw
    left = list(range(size))
    for place in range(size - 1):
        other = place + next_word() % (size - place)
        left[place], left[other] = left[other], left[place]
    return left


# ---- the laws ----


def check(case: Case) -> None:
    """Runs a case; AssertionError with the place where a law is broken."""
    num_samples = len(dataset_of(case.kind))
    units = case.start if case.sampler == "cyclic" else min(case.start, num_samples // case.unit)
    start = consumed = units * case.unit
    seen: list[int] = []
    state: Any = None
    last: Leg | None = None
    for number, leg in enumerate(case.legs):
        if case.sampler in ("short", "cyclic") and leg.block > num_samples:
            continue
        loaders = [loader_of(case, leg, rank, start) for rank in range(leg.ranks)]
        try:
            if last is not None and not resume(case, last, leg, loaders, state):
                continue
            last = leg
            consumed = run_leg(case, leg, loaders, consumed, seen, f"leg {number}")
            states = [loader.state_dict() for loader in loaders]
            assert all(one == states[0] for one in states), "the ranks' states differ"
            assert states[0]["consumed_samples"] == consumed
            state = json.loads(json.dumps(states[leg.resumed_rank % leg.ranks]))
        finally:
            for loader in loaders:
                loader.close()
    is_range = seen == list(range(start, start + len(seen)))
    assert is_range or case.sampler == "cyclic", "a sample number comes twice, or not at all"


def resume(case: Case, last: Leg, leg: Leg, loaders: list[Loader], state: Any) -> bool:
    """Loads a state of the last leg into all ranks; False if all of them refuse it, rightly."""
    refusals: list[Exception] = []
    for loader in loaders:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loader.load_state_dict(state)
        except (ResumeError, ConfigError) as error:
            refusals.append(error)
    consumed = state["consumed_samples"]
    assert len(refusals) in (0, len(loaders)), "some ranks refuse a state that others accept"
    if refusals:
        assert case.sampler in ("cyclic", "external"), refusals[0]
        is_same = (leg.ranks, leg.micro) == (last.ranks, last.micro)
        assert not is_same, refusals[0]
        assert case.sampler == "cyclic" or consumed % leg.block, refusals[0]
    if case.sampler == "cyclic" and consumed % leg.block == 0:
        orders = [rest_of_cycles(case, one, consumed) for one in (last, leg)]
        is_other = isinstance(refusals[0], ResumeError) if refusals else False
        assert (orders[0] != orders[1]) == is_other, f"from {last} to {leg}: {refusals[:1]}"
    else:
        assert refusals or case.sampler != "cyclic"
    return not refusals


def rest_of_cycles(case: Case, leg: Leg, consumed: int) -> list[list[int]]:
    """What follows in this epoch and in the next one: of each shard, or of all ranks together."""
    num_samples = len(dataset_of(case.kind))
    epoch, inside = divmod(consumed, num_samples // leg.block * leg.block)
    now, then = (shards_of(case, leg, num_samples, number) for number in (epoch, epoch + 1))
    return [one[inside // len(now) :] + other for one, other in zip(now, then, strict=True)]


def run_leg(
    case: Case, leg: Leg, loaders: list[Loader], consumed: int, seen: list[int], place: str
) -> int:
    """Runs the steps of a leg, and compares each with the model; returns the position after it."""
    num_samples = len(dataset_of(case.kind))
    for step in range(leg.num_steps):
        at = f"{place}, step {step}, consumed_samples {consumed}"
        expected = global_order(case, leg, consumed, num_samples)
        batches = [next(loader, None) for loader in loaders]
        if expected is None:
            assert batches == [None] * leg.ranks, f"{at}: batches after the end"
            assert [next(loader, None) for loader in loaders] == batches
            return consumed
        numbers, after = expected
        parts = rank_numbers(case, leg, loaders, consumed)
        check_parts(case, leg, parts, numbers, at)
        for rank, (batch, part) in enumerate(zip(batches, parts, strict=True)):
            assert batch is not None, f"{at}: rank {rank} has no batch"
            rows = expected_batch(case, part)
            assert set(batch) == set(rows), f"{at}: {set(batch)}"
            for name, array in rows.items():
                if name in ("tokens", "labels"):
                    array = array.astype(case.token_dtype.replace("file", "uint16"))
                place = f"{at}, rank {rank}: {name}"
                np.testing.assert_array_equal(batch[name], array, place, strict=True)
        positions = {loader.consumed_samples for loader in loaders}
        assert positions == {after}, f"{at}: {positions} instead of {after}"
        consumed = after
        seen += numbers
    check_steps(case, loaders[0], consumed)
    return consumed


def check_parts(case: Case, leg: Leg, parts: list[Numbers], numbers: list[int], at: str) -> None:
    """The ranks' numbers of a step, dealt back, are its samples in the global order."""
    turn = 1 if case.sampler == "cyclic" and not case.option else leg.micro
    dealt = dealt_back(parts, turn)
    if case.sampler == "full" and case.option:  # with padding behind the samples
        rows = [len(part) for part in parts]
        assert rows == [leg.micro] * leg.ranks, f"{at}: rows {rows}"
        dealt = dealt[: len(numbers)]
    assert dealt == numbers, f"{at}: {dealt} instead of {numbers}"


def check_samplers(case: Case, num_samples: int) -> None:
    """The samplers of all ranks, without loaders: every step from some step on, and no others."""
    leg = case.legs[0]
    samplers = [sampler_of(case, leg, rank, num_samples) for rank in range(leg.ranks)]
    is_endless = case.sampler == "cyclic"
    starts, consumed = [], 0
    while len(starts) < 200:
        expected = global_order(case, leg, consumed, num_samples)
        if expected is None:
            break
        starts.append(consumed)
        numbers, after = expected
        parts = [sampler.sample_numbers(consumed) for sampler in samplers]
        at = f"{num_samples} samples, consumed_samples {consumed}"
        check_parts(case, leg, parts, numbers, at)
        for sampler, part in zip(samplers, parts, strict=True):
            assert part.dtype == np.int64
            assert sampler.has_step(consumed)
            assert sampler.consumed_after(consumed) == after
            if case.sampler == "full":
                first = consumed + sampler.data_parallel_rank * leg.micro
                is_padding = first + np.arange(len(part)) >= num_samples
                assert np.array_equal(sampler.is_padding(consumed), is_padding), at
                again = (first - consumed + np.flatnonzero(is_padding)) % num_samples
                assert np.array_equal(part[is_padding], again), at
        consumed = after
    sampler = samplers[-1]
    assert sampler.has_step(consumed) == is_endless
    for step, start in enumerate([*starts, consumed]):
        sampler.check_position(start)
        assert (sampler.consumed_at(step), sampler.step_at(start)) == (start, step)
        last = starts[max(step - 1, 0)] if starts else start
        if last + 1 < start and (is_endless or start < num_samples):
            with pytest.raises(ConfigError, match=rf"starts at {last}\b.* {start}\b"):
                sampler.step_at(start - 1)
        assert is_endless or sampler.num_steps(start) == len(starts) - step


def rank_numbers(case: Case, leg: Leg, loaders: list[Loader], consumed: int) -> list[Numbers]:
    """The sample numbers of each rank at a step."""
    if case.sampler != "external":
        return [loader.sampler.sample_numbers(consumed) for loader in loaders]
    return [consumed + rank * leg.micro + np.arange(leg.micro) for rank in range(leg.ranks)]


def check_steps(case: Case, loader: Loader, consumed: int) -> None:
    """`batch(step)`, `len` and the conversions between steps and positions agree with the run."""
    sampler: Any = loader.sampler
    if case.sampler != "cyclic":
        num_steps, left = (sum(1 for _ in walk(sampler, start)) for start in (0, consumed))
        assert (len(loader), sampler.num_steps(consumed)) == (num_steps, left)
        with pytest.raises(IndexError, match="there is no step"):
            loader.batch(num_steps)
    try:
        step = sampler.step_at(consumed)
    except ConfigError:
        return  # an earlier leg had other steps
    assert sampler.consumed_at(step) == consumed
    if sampler.has_step(consumed):
        np.testing.assert_equal(dict(loader.batch(step)), dict(next(loader)))
        loader.load_state_dict({**loader.state_dict(), "consumed_samples": consumed})


def walk(sampler: Any, consumed: int) -> Iterator[int]:
    while sampler.has_step(consumed):
        yield consumed
        consumed = sampler.consumed_after(consumed)


# ---- any number of cases ----


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-ranks", type=int, default=32)
    options = parser.parse_args()
    counts: Counter[str] = Counter()  # of cases with each sampler
    health = list(hypothesis.HealthCheck)

    @hypothesis.seed(options.seed)
    @hypothesis.settings(
        max_examples=options.cases, deadline=None, database=None, suppress_health_check=health
    )
    @hypothesis.given(cases(options.max_ranks))
    def test(case: Case) -> None:
        counts[case.sampler] += 1
        check(case)

    start = time.monotonic()
    test()
    seconds = time.monotonic() - start
    print(f"{counts.total()} cases in {seconds:.0f} s, all laws hold: {dict(counts)}")


if __name__ == "__main__":
    main()
