"""Megatron-LM's data loader over our samplers: its batches, and the calculator of batch sizes.

The training program is not on PyPI: `tests/feed/golden_samplers.json` holds batches of its
samplers, with which `tests/feed/test_samplers.py` compares ours. The calculator is in
megatron-core.
"""

import random
import re
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle_megatron as oracle
import pytest
import torch

import millrace.megatron as ours
from millrace import ConfigError, RampUp
from millrace.run import config_from

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")


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


def batches(loader: Any) -> list[list[int]]:
    return [batch["tokens"].flatten().tolist() for batch in loader]


def test_the_data_loader_takes_the_programs_arguments(arguments: SimpleNamespace) -> None:
    build = ours.build_pretraining_data_loader
    assert build(None, 0) is None
    assert build(Samples(0), 0) is None
    loader = build(Samples(20), 8)
    assert (loader.num_workers, loader.pin_memory, loader.persistent_workers) == (0, True, False)
    assert batches(loader) == batches(loader) == [[10, 11], [14, 15], [18, 19]]
    for split in (ours.Split.valid, oracle.Split.test):
        assert batches(build(Samples(20, split), 6)) == [[9, 10, 11], [15, 16, 17]]
    arguments.full_validation = True
    assert batches(build(Samples(5, oracle.Split.valid), 7)) == [[1], [3]]
    assert [len(build(Samples(size, ours.Split.valid), 0)) for size in (4, 5)] == [2, 3]
    arguments.dataloader_type = "external"
    for iterable in (iter([1, 2]), Samples(3)):
        assert build(iterable, 0) is iterable
    arguments.dataloader_type = "random"
    with pytest.raises(ConfigError, match="dataloader_type is 'random'"):
        build(Samples(5), 0)


@pytest.mark.parametrize("seed", range(60))
def test_the_epochs_of_a_cyclic_loader_are_megatrons(
    seed: int, arguments: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each iteration is the rest of an epoch, as Megatron-LM's training loop needs it."""
    draw = random.Random(seed)
    micro, ranks = draw.randint(1, 4), draw.randint(1, 5)
    step = micro * ranks
    size = draw.randint(step, 8 * step)
    steps, shard = size // step, size // step * micro
    consumed = draw.randrange(20 * steps) * step
    arguments.dataloader_type, arguments.micro_batch_size = "cyclic", micro
    arguments.data_sharding = draw.random() < 0.5
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank)
        loader = ours.build_pretraining_data_loader(Samples(size), consumed)
        assert len(loader) == steps
        epoch, done = divmod(consumed // step, steps)
        for _ in range(3):
            generator = torch.Generator().manual_seed(epoch)
            if arguments.data_sharding:
                places = torch.randperm(shard, generator=generator) + rank * shard
            else:
                whole = torch.randperm(size // micro * micro, generator=generator)
                places = whole[rank::ranks][:shard]  # Megatron-LM gives some ranks a batch more
            assert batches(loader) == places.view(steps, micro)[done:].tolist()
            epoch, done = epoch + 1, 0


def test_hybrid_context_parallelism_takes_global_batches(arguments: SimpleNamespace) -> None:
    arguments.hybrid_context_parallel = True
    lists = list(ours.build_pretraining_data_loader(Samples(20), 8))  # not collated
    assert [[int(sample["tokens"]) for sample in batch] for batch in lists] == [[10, 11, 14, 15]]


@pytest.mark.parametrize(
    ("kind", "size", "consumed"),
    [("single", 20, 21), ("single", 20, -1), ("cyclic", 3, 0), ("cyclic", 50, 98)],
)
def test_positions_and_sizes_without_a_step_are_refused(
    arguments: SimpleNamespace, kind: str, size: int, consumed: int
) -> None:
    arguments.dataloader_type = kind
    with pytest.raises(AssertionError, match=r"no step is complete|consumed_samples") as caught:
        ours.build_pretraining_data_loader(Samples(size), consumed)
    assert isinstance(caught.value, ConfigError)


def test_workers_enter_the_signal_handler(arguments: SimpleNamespace) -> None:
    class Handled(Samples):
        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"tokens": torch.tensor([SignalHandler.entered or 0])}

    for arguments.exit_signal_handler, expected in ((True, 15), (False, 0)):
        arguments.num_workers = 1
        loader = ours.build_pretraining_data_loader(Handled(4), 0)
        assert loader.persistent_workers
        assert batches(loader) == [[expected] * 2]


def test_without_a_megatron_program_the_error_says_so(
    arguments: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments.eval_micro_batch_size = None  # as before Megatron-LM has completed its arguments
    validation = Samples(6, ours.Split.valid)
    assert batches(ours.build_pretraining_data_loader(validation, 0)) == [[2, 3]]
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    with pytest.raises(ImportError, match="belongs into a Megatron-LM program"):
        ours.build_pretraining_data_loader(validation, 0)
