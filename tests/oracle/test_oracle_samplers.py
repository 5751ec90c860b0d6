"""Megatron-LM's names for samplers: golden batches, its exceptions, and its data loader.

The training program is not on PyPI: `tests/feed/golden_samplers.json` holds batches of its
samplers. Its calculator of batch sizes is in megatron-core.
"""

import inspect
import json
import random
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import oracle_megatron as oracle
import pytest
import torch

import millrace.megatron as ours
from millrace import ConfigError, MillraceError, RampUp
from millrace.run import config_from

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

GOLDEN = json.loads((Path(__file__).parents[1] / "feed" / "golden_samplers.json").read_text())

SIGNATURES = {
    "MegatronPretrainingSampler": "total_samples, consumed_samples, micro_batch_size, "
    "data_parallel_rank, data_parallel_size, drop_last=True",
    "HybridCPMegatronPretrainingSampler": "total_samples, consumed_samples, micro_batch_size, "
    "global_batch_size, data_parallel_rank, data_parallel_size, drop_last=True",
    "MegatronFullValidationSampler": "total_samples, data_parallel_rank, data_parallel_size",
    "MegatronPretrainingRandomSampler": "dataset, total_samples, consumed_samples, "
    "micro_batch_size, data_parallel_rank, data_parallel_size, data_sharding",
    "RandomSeedDataset": "dataset, seed",
    "build_pretraining_data_loader": "dataset, consumed_samples",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_megatrons(name: str) -> None:
    assert name in ours.__all__
    parameters = inspect.signature(getattr(ours, name)).parameters.values()
    plain = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert ", ".join(plain) == SIGNATURES[name]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['sampler']}{case['arguments']}")
def test_batches_are_megatrons(case: dict[str, Any]) -> None:
    sampler = getattr(ours, case["sampler"])(*case["arguments"])
    batches = list(sampler)
    assert batches == case["batches"]
    assert all(type(number) is int for batch in batches for number in batch)
    is_full = case["sampler"] == "MegatronFullValidationSampler"
    assert len(sampler) == (len(batches) if is_full else sampler.total_samples)


def test_the_random_sampler_counts_on() -> None:
    """Each iteration is an epoch; an extra batch puts some ranks ahead, as in Megatron-LM."""
    data = ours.RandomSeedDataset(list(range(10)), 100)
    ends = []
    for rank in range(3):
        sampler = ours.MegatronPretrainingRandomSampler(data, 10, 0, 2, rank, 3, False)
        assert not hasattr(sampler, "epoch")
        positions = [sampler.consumed_samples for _ in sampler]
        assert (sampler.epoch, data.curr_seed) == (0, 100)
        next(iter(sampler))
        assert data.curr_seed == 100 + sampler.epoch
        ends.append((positions, sampler.epoch))
    assert ends == [([6, 12], 2), ([6], 1), ([6], 1)]
    sampler = ours.MegatronPretrainingRandomSampler(data, 10, 6 * 2**33, 2, 0, 3, True)
    assert len(next(iter(sampler))) == 2
    assert sampler.epoch == 2**33


def test_the_seed_dataset_seeds_every_generator() -> None:
    class Draws:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, number: int) -> tuple[float, ...]:
            return random.random(), float(np.random.rand()), float(torch.rand(1))

    data = ours.RandomSeedDataset(Draws(), 100)
    assert (len(data), data.base_seed) == (5, 100)
    data.set_epoch(7)
    sample = data[3]
    random.seed(110)
    np.random.seed(110)
    torch.manual_seed(110)
    assert sample == Draws()[0]
    assert data[3] == sample != data[4]


@pytest.mark.parametrize(
    "bad", [(0, 0, 2, 0, 3), (9, 9, 2, 0, 3), (9, 0, 0, 0, 3), (9, 0, 2, 3, 3)]
)
def test_errors_are_megatrons_kinds(bad: tuple[int, ...]) -> None:
    total, consumed, micro, rank, size = bad
    for make in (
        lambda: ours.MegatronPretrainingSampler(*bad),
        lambda: ours.HybridCPMegatronPretrainingSampler(total, consumed, micro, 6, rank, size),
    ):
        with pytest.raises(AssertionError) as caught:
            make()
        assert isinstance(caught.value, MillraceError)
    if consumed == 0:
        kind = ZeroDivisionError if micro == 0 else AssertionError
        with pytest.raises(kind):
            ours.MegatronPretrainingRandomSampler(None, total, 0, micro, rank, size, True)
    if consumed == 0 and micro > 0:
        with pytest.raises(AssertionError):
            ours.MegatronFullValidationSampler(total, rank, size)


def test_the_random_sampler_fails_at_its_first_batch() -> None:
    iterator = iter(ours.MegatronPretrainingRandomSampler(None, 50, 100, 2, 0, 3, True))
    with pytest.raises(AssertionError, match=r"is 100, 4 samples into epoch 2; .* = 6 samples"):
        next(iterator)
    iterator = iter(ours.MegatronPretrainingRandomSampler(None, 5, 0, 2, 0, 3, True))
    with pytest.raises(ZeroDivisionError, match=r"is 6; the dataset has 5 samples"):
        next(iterator)
    with pytest.raises(AssertionError, match="data_parallel_rank is -1; 0 to 2 is possible"):
        ours.MegatronPretrainingSampler(50, 0, 2, -1, 3)


def test_a_ramp_up_is_that_of_megatrons_calculator() -> None:
    draw = random.Random(0)
    for _ in range(100):
        increment, start = draw.randint(1, 40), draw.randint(1, 100)
        number, samples = (
            draw.randint(1, 30),
            draw.choice([draw.randint(1, 3000), 10**12 + 7, 2**53 - 1]),
        )
        final = start + number * increment
        theirs = RampupBatchsizeNumMicroBatchesCalculator(
            final, 1, 1, False, 1, start, increment, samples
        )
        schedule = RampUp(start, increment, samples, final)
        places = {0, samples, samples + 1, *(draw.randint(0, samples) for _ in range(10))}
        for change, _ in schedule.changes:
            places |= {max(change - 1, 0), change}
        for place in places:
            theirs.update(place, False)
            assert schedule.batch_size(place) == theirs.get_current_global_batch_size()
            assert schedule.num_micro_batches(place, 1, 1) == theirs.get()


def test_validation_under_a_ramp_up_is_counted_as_by_its_training_program_or_refused() -> None:
    """Up to core 0.17 its `update_train_iters` counts steps of the ramp-up; later ones do not."""
    draw = random.Random(0)
    outcomes = set()
    for _ in range(300):
        increment, start = draw.randint(1, 40), draw.randint(1, 100)
        final = start + increment * draw.randint(1, 30)
        ramp, train = draw.randint(1, 5000), draw.randint(1, 20_000)
        interval = draw.choice([1, 20, 400])
        theirs = RampupBatchsizeNumMicroBatchesCalculator(
            final, 1, 1, False, 1, start, increment, ramp
        )
        consumed = steps = 0
        while consumed <= min(ramp, train):
            theirs.update(consumed, False)
            consumed += theirs.get_current_global_batch_size()
            steps += 1
        steps += max(0, train - consumed) // final
        counts = [(n // interval + 1) * 3 * final for n in (steps, train // final)]
        arguments = {
            "data_path": "a", "seq_length": 8, "train_samples": train, "global_batch_size": final,
            "rampup_batch_size": [start, increment, ramp],
            "eval_interval": interval, "eval_iters": 3,
        }  # fmt: skip
        try:
            our_counts = [config_from(arguments).num_samples[1]] * 2
        except ConfigError as error:
            our_counts = [int(count) for count in re.findall(r"(?<=on )\d+", str(error))]
        assert our_counts == counts
        outcomes.add(counts[0] == counts[1])
    assert outcomes == {True, False}


# ---- the data loader ----


class Samples(torch.utils.data.Dataset):
    """A dataset whose samples are their own numbers."""

    def __init__(self, size: int, split: Any = None) -> None:
        self.size = size
        if split is not None:
            self.index_split = split

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"tokens": torch.tensor([number])}


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The arguments of a Megatron-LM program, whose training package is a stand-in."""
    args = SimpleNamespace(
        dataloader_type="single",
        micro_batch_size=2,
        global_batch_size=8,
        eval_micro_batch_size=3,
        eval_global_batch_size=12,
        full_validation=False,
        hybrid_context_parallel=False,
        data_sharding=True,
        num_workers=0,
        exit_signal_handler=False,
        exit_signal=15,
    )
    training = ModuleType("megatron.training")
    training.get_args = lambda: args  # type: ignore[attr-defined]
    handlers = ModuleType("megatron.training.dist_signal_handler")
    handlers.DistributedSignalHandler = SignalHandler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setitem(sys.modules, "megatron.training.dist_signal_handler", handlers)
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    return args


class SignalHandler:
    """Shows in a sample of a worker that it was entered there."""

    entered: int | None = None

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        SignalHandler.entered = self.number


pin_memory_warning = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")


def batches(loader: Any) -> list[list[int]]:
    return [batch["tokens"].flatten().tolist() for batch in loader]


@pin_memory_warning
def test_the_data_loader_takes_the_programs_arguments(arguments: SimpleNamespace) -> None:
    build = ours.build_pretraining_data_loader
    assert build(None, 0) is None
    assert build(Samples(0), 0) is None
    loader = build(Samples(20), 8)
    assert isinstance(loader.batch_sampler, ours.MegatronPretrainingSampler)
    assert (loader.num_workers, loader.pin_memory, loader.persistent_workers) == (0, True, False)
    assert batches(loader) == [[10, 11], [14, 15], [18, 19]]
    for split in (ours.Split.valid, oracle.Split.test):
        assert batches(build(Samples(20, split), 6)) == [[9, 10, 11], [15, 16, 17]]
    arguments.dataloader_type = "cyclic"
    arguments.data_sharding = False
    for split in (None, ours.Split.train):
        loader = build(Samples(20, split), 20 * 3 + 4)
        expected = ours.MegatronPretrainingRandomSampler(None, 20, 64, 2, 1, 2, False)
        assert batches(loader) == list(expected)
        assert loader.batch_sampler.dataset is loader.dataset
    arguments.full_validation = True
    assert batches(build(Samples(5, oracle.Split.valid), 0)) == [[1], [3]]
    assert len(build(Samples(5, ours.Split.valid), 0)) == 2
    arguments.dataloader_type = "external"
    for iterable in (iter([1, 2]), Samples(3)):
        assert build(iterable, 0) is iterable
    arguments.dataloader_type = "random"
    with pytest.raises(ConfigError, match="dataloader_type is 'random'"):
        build(Samples(5), 0)


@pin_memory_warning
def test_hybrid_context_parallelism_takes_global_batches(arguments: SimpleNamespace) -> None:
    arguments.hybrid_context_parallel = True
    loader = ours.build_pretraining_data_loader(Samples(20), 8)
    assert isinstance(loader.batch_sampler, ours.HybridCPMegatronPretrainingSampler)
    lists = list(loader)  # not collated
    assert [[int(sample["tokens"]) for sample in batch] for batch in lists] == [[10, 11, 14, 15]]


@pin_memory_warning
def test_workers_enter_the_signal_handler(arguments: SimpleNamespace) -> None:
    class Handled(Samples):
        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"tokens": torch.tensor([SignalHandler.entered or 0])}

    for arguments.exit_signal_handler, expected in ((True, 15), (False, 0)):
        arguments.num_workers = 1
        loader = ours.build_pretraining_data_loader(Handled(4), 0)
        assert loader.persistent_workers
        assert batches(loader) == [[expected] * 2]


@pytest.fixture
def one_process() -> Iterator[None]:
    with oracle.process_group():
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()


@pin_memory_warning
def test_ranks_come_from_parallel_state(
    arguments: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.undo()
    training = ModuleType("megatron.training")
    training.get_args = lambda: arguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    request.getfixturevalue("one_process")
    loader = ours.build_pretraining_data_loader(Samples(9), 2)
    assert batches(loader) == [[2, 3], [4, 5], [6, 7]]


def test_the_first_batch_does_not_wait_for_a_list_of_all_samples() -> None:
    """The sequential samplers hold no list: 10^17 samples would not fit."""
    for make in (
        lambda: ours.MegatronPretrainingSampler(10**17, 10**16, 2, 1, 2),
        lambda: ours.HybridCPMegatronPretrainingSampler(10**17, 10**16, 2, 4, 1, 2),
    ):
        assert next(iter(make())) == [10**16 + 2, 10**16 + 3]
    assert next(iter(ours.MegatronFullValidationSampler(10**17, 3, 4))) == [3]


@pin_memory_warning
def test_without_a_megatron_program_the_error_says_so(
    arguments: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments.eval_micro_batch_size = None  # as before Megatron-LM has completed its arguments
    validation = Samples(6, ours.Split.valid)
    loader = ours.build_pretraining_data_loader(validation, 0)
    assert loader.batch_sampler.micro_batch_size == arguments.micro_batch_size
    with pytest.raises(AssertionError, match="consumed_samples is -1; 0 is the least"):
        ours.MegatronPretrainingSampler(10, -1, 2, 0, 1)
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    with pytest.raises(ImportError, match="belongs into a Megatron-LM program"):
        ours.build_pretraining_data_loader(validation, 0)
