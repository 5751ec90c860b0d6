"""torch's DataLoader and torchdata's, with any number of workers and start method."""

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import millrace
from millrace import ConfigError, Loader, ResumeError
from millrace.samples.fields import FIELDS
from millrace.torch import (
    BatchSampler,
    CheckpointState,
    IterableDataset,
    MapDataset,
    collate,
    to_device,
    to_tensors,
)
from tests.feed.test_external import OPTIONS, Counting

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more than there are cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata, with torch 2.13
]

WORKERS = [(0, None, False), (3, "fork", False), (2, "forkserver", True), (1, "spawn", True)]
RANKS = {"micro_batch_size": 3, "data_parallel_rank": 1, "data_parallel_size": 2}


@pytest.fixture
def dataset(make_dataset: Callable[..., Any]) -> millrace.GPTDataset:
    token_file = make_dataset([30, 41, 7, 60, 33, 52])
    return millrace.GPTDataset(token_file, sequence_length=8, seed=3, num_samples=60)


def loader_of(dataset: Any, **options: Any) -> Loader:
    return Loader(dataset, transform=to_tensors, **{**RANKS, **options})


def sampler_of(dataset: Any) -> millrace.SequentialSampler:
    return millrace.SequentialSampler(len(dataset), **RANKS)


def by_number(dataset: Any, kind: Any = DataLoader, **options: Any) -> Any:
    batches = BatchSampler(sampler_of(dataset))
    return kind(MapDataset(dataset), batch_sampler=batches, collate_fn=collate, **options)


def by_step(loader: Loader, kind: Any = DataLoader, **options: Any) -> Any:
    return kind(IterableDataset(loader), batch_size=None, **options)


def tokens(batches: Any) -> list[list[Any]]:
    return [batch["tokens"].tolist() for batch in batches]


def worker_options(workers: int, method: str | None, is_persistent: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": is_persistent}
    return options | {"multiprocessing_context": method} if workers else {}


@pytest.mark.parametrize(("workers", "method", "is_persistent"), WORKERS)
def test_a_data_loader_has_the_order_of_the_loader(
    dataset: Any, workers: int, method: str | None, is_persistent: bool
) -> None:
    options = worker_options(workers, method, is_persistent)
    expected = tokens(loader_of(dataset, prefetch=0))
    batches = by_number(dataset, **options)
    steps = by_step(loader_of(dataset, prefetch=0), **options)
    assert len(batches) == len(steps) == len(expected)
    assert tokens(batches) == tokens(steps) == expected
    assert tokens(batches) == expected  # each iteration starts at the beginning again
    if is_persistent:
        assert tokens(steps) == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 4, 13, 14])  # 13: the last batch; 14: the end after it
def test_torchdata_resumes_at_the_next_batch(dataset: Any, workers: int, stop: int) -> None:
    expected = tokens(loader_of(dataset, prefetch=0))
    makers: list[Callable[[], Any]] = [
        lambda: by_step(loader_of(dataset), StatefulDataLoader, num_workers=workers),
        lambda: by_number(dataset, StatefulDataLoader, num_workers=workers),
    ]
    for make in makers:
        first = make()
        iterator = iter(first)
        assert tokens(islice(iterator, stop)) == expected[:stop]
        state = first.state_dict()
        del iterator
        second = make()
        second.load_state_dict(state)
        assert tokens(second) == (expected[stop:] if stop < 14 else expected)
        assert tokens(second) == expected


@pytest.mark.parametrize(
    ("workers", "method"), [(0, None), (1, "spawn"), (2, "fork"), (2, "forkserver")]
)
def test_torchdata_refuses_other_data_and_another_seed(
    dataset: Any, make_dataset: Callable[..., Any], workers: int, method: str | None
) -> None:
    def gpt(length: int, seed: int) -> Any:
        data = make_dataset([30, 41, 7, 60, 33, length], name=f"{length} {seed}")
        return millrace.GPTDataset(data, sequence_length=8, seed=seed, num_samples=60)

    options = worker_options(workers, method, False)
    loader = by_number(dataset, StatefulDataLoader, **options)
    next(iter(loader))
    state = loader.state_dict()
    del loader
    cases = [(gpt(52, 4), "seed: saved 3, now 4"), (gpt(53, 3), "lengths: saved")]
    for other, place in cases[: 1 if method else 2]:
        resumed = by_number(other, StatefulDataLoader, **options)
        resumed.load_state_dict(state)
        with pytest.raises(ResumeError, match=place):
            next(iter(resumed))


def test_a_map_dataset_compares_its_state(dataset: Any) -> None:
    state = MapDataset(dataset).state_dict()
    assert set(map(type, state.values())) == {str}
    MapDataset(dataset, fields=("tokens",)).load_state_dict(state)
    data = dataset.dataset
    view = millrace.GPTDataset(data, sequence_length=8, seed=3, num_samples=60, eod_token=1)
    with pytest.warns(millrace.ViewChangeWarning, match="eod_token: saved None, now 1"):
        MapDataset(view).load_state_dict(state)
    with pytest.raises(ResumeError, match="consumed_samples"):
        MapDataset(dataset).load_state_dict({"consumed_samples": 4})  # type: ignore[dict-item]


@pytest.mark.parametrize(("workers", "is_persistent"), [(0, False), (2, False), (2, True)])
def test_an_iteration_after_the_end_starts_again(
    dataset: Any, workers: int, is_persistent: bool
) -> None:
    options = worker_options(workers, "fork", is_persistent)
    expected = tokens(loader_of(dataset, consumed_samples=12, prefetch=0))
    loader = loader_of(dataset, consumed_samples=12)
    for kind in (DataLoader, StatefulDataLoader):
        steps = by_step(loader, kind, **options)
        assert [tokens(steps) for _ in range(3)] == [expected] * 3
        loader.load_state_dict({**loader.state_dict(), "consumed_samples": 36})  # the caller's move
        if is_persistent:
            steps = by_step(loader, kind, **options)
        assert [tokens(steps) for _ in range(2)] == [expected[4:]] * 2
        loader.load_state_dict({**loader.state_dict(), "consumed_samples": 12})
    finished = by_step(loader, StatefulDataLoader, **options)
    assert tokens(finished) == expected
    state = finished.state_dict()
    again = by_step(loader_of(dataset, consumed_samples=12), StatefulDataLoader, **options)
    again.load_state_dict(state)
    assert [tokens(again) for _ in range(2)] == [expected] * 2


@pytest.mark.parametrize(("workers", "is_persistent"), [(0, False), (2, False), (2, True)])
def test_a_batch_sampler_resumes_in_a_data_loader(
    dataset: Any, workers: int, is_persistent: bool
) -> None:
    expected = tokens(loader_of(dataset, prefetch=0))
    for stop in (4, len(expected)):
        batches = by_number(dataset, **worker_options(workers, "fork", is_persistent))
        sampler = batches.batch_sampler
        sampler.load_state_dict(sampler.state_after(stop))
        assert sampler.state_after(0) == {"consumed_samples": 6 * stop}
        assert tokens(batches) == expected[stop:]
        assert tokens(batches) == expected
        assert sampler.state_after(1) == {"consumed_samples": 6}


def test_iterators_of_a_batch_sampler_are_independent(dataset: Any) -> None:
    batches = steps_of(dataset)
    expected = list(batches)
    assert [step for step, _ in zip(batches, batches, strict=True)] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_from_the_end_is_refused(dataset: Any, workers: int) -> None:
    loader = loader_of(dataset)
    whole, end = tokens(loader_of(dataset, prefetch=0)), 6 * len(loader)
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": end})
    steps = by_step(loader, num_workers=workers)
    with pytest.raises(ConfigError, match=f"consumed_samples={end}"):
        list(steps)
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 0})
    assert tokens(steps) == whole


def test_without_workers_an_iteration_that_was_left_goes_on(dataset: Any) -> None:
    expected = tokens(loader_of(dataset, prefetch=0))
    steps = IterableDataset(loader_of(dataset))
    before = tokens(batch for _, batch in zip(range(3), steps, strict=False))
    assert before + tokens(steps) == expected
    assert tokens(steps) == expected
    external = millrace.ExternalBatches([1, 2, 3], samples_per_step=2)  # the end is not known
    assert [list(IterableDataset(Loader(external))) for _ in range(2)] == [[1, 2, 3]] * 2
    again = IterableDataset(Loader(external))
    assert [list(again) for _ in range(2)] == [[1, 2, 3]] * 2


def test_an_iteration_after_a_resumed_one_reads_no_stream_from_its_beginning() -> None:
    stream = Counting()
    loader = Loader(millrace.feed.StreamDataset(stream, OPTIONS), micro_batch_size=2)
    saved = [loader.state_dict() for _ in islice(loader, 6)][-1]
    stream.states.clear()
    loader.load_state_dict(saved)
    batches = by_step(loader)
    assert [[batch[0][0] for batch in tokens(batches)] for _ in range(2)] == [[48, 56, 64, 72]] * 2
    assert None not in stream.states


@pytest.mark.parametrize("workers", [0, 2])
def test_state_after_resumes_with_other_ranks(dataset: Any, workers: int) -> None:
    expected = tokens(loader_of(dataset, prefetch=0))
    steps = IterableDataset(loader_of(dataset))
    if workers:
        iterator = iter(DataLoader(steps, batch_size=None, num_workers=workers))
        before = tokens(next(iterator) for _ in range(3))
        state = steps.state_after(3)
    else:
        before = tokens(batch for _, batch in zip(range(3), steps, strict=False))
        with pytest.raises(ConfigError, match=r"save loader.state_dict\(\)"):
            steps.state_after(3)
        state = steps.loader.state_dict()
    assert state["consumed_samples"] == 18
    resumed = loader_of(dataset)
    resumed.load_state_dict(state)
    assert before + tokens(resumed) == expected
    alone = loader_of(dataset, micro_batch_size=6, data_parallel_rank=0, data_parallel_size=1)
    alone.load_state_dict(state)
    assert [batch[3:] for batch in tokens(alone)] == expected[3:]
    assert BatchSampler(sampler_of(dataset), 6).state_after(2) == {"consumed_samples": 18}
    with pytest.raises(ConfigError, match="num_batches is 99; only 11 batches are left"):
        BatchSampler(sampler_of(dataset), 12).state_after(99)


def test_any_collate_function_gets_samples(dataset: Any) -> None:
    ours = MapDataset(dataset)
    expected = dataset.batch([4, 9])
    sample = ours[4]
    assert sample["tokens"].tolist() == expected["tokens"][0].tolist()
    for batch in (
        collate(ours.__getitems__([4, 9])),
        collate([ours[4], ours[9]]),
        torch.utils.data.default_collate(ours.__getitems__([4, 9])),
    ):
        assert {name: tensor.tolist() for name, tensor in batch.items()} == {
            name: array.tolist() for name, array in expected.items()
        }
    rows = ours.__getitems__(range(5))  # a list of them
    expected = dataset.batch([3, 4])["tokens"].tolist()
    assert [sample["tokens"].tolist() for sample in rows[3:]] == expected
    narrow = MapDataset(dataset, fields=("tokens", "cu_seqlens"), token_dtype="file")
    whole = collate(narrow.__getitems__([4, 9]))
    assert (whole["tokens"].dtype, whole["cu_seqlens"].dtype) == (torch.uint16, torch.int32)
    with pytest.raises(ConfigError, match="cu_seqlens belongs to a whole batch"):
        torch.utils.data.default_collate(narrow.__getitems__([4, 9]))
    with pytest.raises(ConfigError, match="'words'"):
        MapDataset(dataset, fields=("words",))[0]


def test_tensors_may_be_changed_in_place(dataset: Any) -> None:
    """No two batches of the loaders of a process share memory."""
    for prepare in (to_tensors, to_device("cpu")):
        loader = Loader(dataset, micro_batch_size=2, prepare=prepare, fields=FIELDS)
        for batch in (next(loader), next(loader), collate(MapDataset(dataset).__getitems__([1]))):
            assert batch["loss_mask"].all()
            assert batch["position_ids"][0].tolist() == list(range(8))
            for tensor in batch.values():
                tensor[:] = 0


def test_tensors_share_the_memory_of_a_batch(dataset: Any) -> None:
    arrays = next(Loader(dataset, micro_batch_size=2, fields=FIELDS))
    tensors = to_tensors(arrays, pin=True)  # without CUDA, pin has no effect
    for name, tensor in tensors.items():
        assert np.array_equal(tensor.numpy(), arrays[name])
        assert tensor.data_ptr() == arrays[name].ctypes.data
    empty = np.empty((0, 4), np.uint16)
    empty.flags.writeable = False
    assert to_tensors({"tokens": empty})["tokens"].shape == (0, 4)


def test_to_device(dataset: Any) -> None:
    for device in ("cpu", "meta"):
        loader = Loader(dataset, micro_batch_size=2, prepare=to_device(device))
        assert next(loader)["tokens"].device.type == device
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees 0 CUDA devices"):
            to_device("cuda:0")


def test_workers_do_not_copy_to_a_gpu(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tensors would outlive them: with "spawn", workers end by SIGABRT."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    loader = Loader(dataset, micro_batch_size=2, prepare=to_device("cuda:0"))
    with pytest.raises(ConfigError, match="in a worker process of a DataLoader: leave it out"):
        next(iter(by_step(loader, num_workers=1)))


def test_a_state_in_one_entry(dataset: Any) -> None:
    loader, other = loader_of(dataset), loader_of(dataset)
    next(loader)
    state = CheckpointState(loader).state_dict()
    assert set(map(type, state.values())) == {str}
    CheckpointState(other).load_state_dict(state)
    assert other.consumed_samples == 6


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda of: state_of(of).load_state_dict({"x": 4}), ResumeError, "by CheckpointState"),
        (lambda of: state_of(of).load_state_dict({"json": "{"}), ResumeError, "is not JSON"),
        (lambda of: steps_of(of).load_state_dict({"x": 4}), ResumeError, "no consumed_samples"),
        (lambda of: steps_of(of).load_state_dict({"consumed_samples": -1}), ConfigError, "not -1"),
        (lambda of: steps_of(of, 99), ConfigError, "is 99; the dataset has 83 samples"),
        (lambda of: IterableDataset(of), ConfigError, "loader is a GPTDataset; a millrace"),
        (lambda of: CheckpointState(IterableDataset(loader_of(of))), ConfigError, "loader is a It"),
        (lambda of: BatchSampler(loader_of(of)), ConfigError, "sampler is a Loader; a sampler"),
        (lambda of: MapDataset(None), ConfigError, "dataset is a NoneType; a dataset"),
        (lambda of: MapDataset(of).load_state_dict({}), ResumeError, "not saved by MapDataset"),
        (lambda of: MapDataset(of)[1.5], ConfigError, "integers of shape"),
        (lambda of: list(by_step(Loader(EXTERNAL), num_workers=1)), ConfigError, "num_workers=0"),
        (lambda of: to_device("nowhere"), ConfigError, "device is 'nowhere'"),
    ],
)
def test_what_cannot_work_is_refused(dataset: Any, use: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        use(dataset)


EXTERNAL = millrace.ExternalBatches([1, 2, 3], samples_per_step=2, num_steps=3)


def state_of(dataset: Any) -> CheckpointState:
    return CheckpointState(loader_of(dataset))


def steps_of(dataset: Any, *position: int) -> BatchSampler:
    return BatchSampler(sampler_of(dataset), *position)


def test_arrays_that_torch_cannot_map_are_copied_or_refused() -> None:
    arrays = {
        "big": np.arange(3, dtype=">i4"),
        "back": np.arange(3)[::-1],
        "none": np.array(7),
        "tensor": torch.ones(1, dtype=torch.bfloat16),
    }
    tensors = to_tensors(arrays)
    assert [tensors[name].tolist() for name in arrays] == [[0, 1, 2], [2, 1, 0], 7, [1.0]]
    with pytest.raises(ConfigError, match="'names' is an array of <U1, which torch does not have"):
        to_tensors({"names": np.array(["a"])})


def test_a_batch_may_be_empty(dataset: Any) -> None:
    ours = MapDataset(dataset)
    assert collate(ours.__getitems__([]))["tokens"].shape == (0, 8)
    with pytest.raises(IndexError, match="batches may be empty, pass collate_fn"):
        torch.utils.data.default_collate(ours.__getitems__([]))


def test_a_batch_sampler_refuses_positions_and_orders_of_others(dataset: Any) -> None:
    def batches(ranks: int) -> BatchSampler:
        return BatchSampler(
            millrace.CyclicSampler(61, micro_batch_size=3, data_parallel_size=ranks)
        )

    first = batches(2)
    list(zip(range(12), first, strict=False))
    state = json.loads(json.dumps(first.state_dict()))
    second = batches(2)
    second.load_state_dict(state)
    assert next(iter(second)) == first.sampler.sample_numbers(72).tolist()
    assert batches(2).state_after(12) == state
    with pytest.raises(ResumeError, match="may depend on a sampler's micro batch, ranks"):
        batches(4).load_state_dict(state)
    with pytest.raises(ConfigError, match="consumed_samples is 3; "):
        second.load_state_dict({**state, "consumed_samples": 3})


def test_a_map_dataset_compares_all_samples_and_a_batch_sampler_those_drawn() -> None:
    class Phased(millrace.SequentialSampler):
        phases = ((0, "a"), (50, "b"))

        def fingerprint(self, consumed_samples: int) -> dict[str, Any]:
            return {"phases": [name for start, name in self.phases if start < consumed_samples]}

        def batch(self, sample_numbers: Any) -> Any:
            return {"tokens": np.asarray(sample_numbers)}

        def __len__(self) -> int:
            return 100

    first, second = (Phased(100, micro_batch_size=2) for _ in range(2))
    second.phases = ((0, "a"), (50, "c"))
    state = MapDataset(first).state_dict()
    MapDataset(first).load_state_dict(state)
    with pytest.raises(ResumeError, match=r"phases\[1\]: saved 'b', now 'c'"):
        MapDataset(second).load_state_dict(state)
    batches = BatchSampler(second)
    batches.load_state_dict(BatchSampler(first).state_after(20))
    with pytest.raises(ResumeError, match="another order"):
        batches.load_state_dict(BatchSampler(first).state_after(30))
