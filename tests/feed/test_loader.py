"""The loader's laws: one global order for any number of ranks, and exact resumption."""

import copy
import enum
import json
import math
import pickle
import threading
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, IndexedDataset, ResumeError, ViewChangeWarning
from millrace.feed import (
    BlendedDataset,
    CyclicSampler,
    GPTDataset,
    Loader,
    SequentialSampler,
    TokenBatch,
    TransformedDataset,
)
from tests.feed.helpers import FORKS, Numbers, firsts, is_true_in_child

Make = Callable[..., IndexedDataset]


@pytest.fixture
def dataset(make_dataset: Make) -> GPTDataset:
    return GPTDataset(make_dataset([30, 0, 50, 7, 101]), sequence_length=8, seed=3, num_samples=50)


def test_invalid_loaders_are_refused(dataset: GPTDataset) -> None:
    for options, message in (
        ({"micro_batch_size": 0}, r"micro_batch_size must be .* not 0"),
        ({"data_parallel_rank": 1}, r"data_parallel_rank must be .* not 1"),
        ({"micro_batch_size": 1000}, r"is 1000; .* no step is complete.*drop_last=False"),
        ({"consumed_samples": 10000}, r"consumed_samples is 10000; the dataset has \d+"),
        ({"prefetch": -1}, r"prefetch must be .*, not -1"),
        ({"threads": 0}, r"threads must be .*, not 0"),
        ({"watchdog": math.nan}, r"watchdog must be .*, not nan"),
        ({"token_dtype": "int31"}, "token_dtype must be one of .* 'int31'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Loader(dataset, **{"micro_batch_size": 1, **options})
    assert len(list(Loader(dataset, micro_batch_size=1000, drop_last=False))) == 1
    with pytest.raises(ConfigError, match="which has no has_step, sample_numbers, consumed_after"):
        Loader(Numbers(), sampler=3)  # type: ignore[arg-type]
    sampler = CyclicSampler(101, micro_batch_size=2)
    with pytest.raises(ConfigError, match="draws from 101 samples; the dataset has 100"):
        Loader(Numbers(100), sampler=sampler)
    assert Loader(Numbers(101), sampler=sampler)  # endless, and true


def test_what_is_not_a_dataset_is_refused_with_the_remedy(dataset: GPTDataset) -> None:
    torch_data = pytest.importorskip("millrace.torch")
    for value, remedy in [
        (dataset.dataset, "GPTDataset"),
        ([1, 2, 3], "ExternalBatches"),
        (torch_data.MapDataset(dataset), "`dataset`"),
        (None, "GPTDataset"),
    ]:
        with pytest.raises(ConfigError, match=rf"{type(value).__name__}, .*batch.*{remedy}"):
            Loader(value, micro_batch_size=2)  # type: ignore[arg-type]


# ---- foreign states ----


def test_a_state_of_another_order_is_refused_and_the_error_says_what_differs(
    make_dataset: Make,
) -> None:
    data, other = make_dataset([100, 200]), make_dataset([200, 100], name="b")

    def gpt(token_file: IndexedDataset = data, **options: Any) -> GPTDataset:
        return GPTDataset(token_file, **{"sequence_length": 8, "seed": 3, **options})

    def blend(*weights: float) -> BlendedDataset:
        return BlendedDataset([gpt(), gpt(other)], weights, 20)

    for saved, now, message in (
        (gpt(), gpt(seed=4), "seed: saved 3, now 4"),
        (gpt(), gpt(sequence_length=9), "sequence_length: saved 8, now 9"),
        (gpt(), gpt(num_samples=60), "num_epochs: saved 1, now 2"),
        (gpt(), gpt(sequences=(0, 1)), r"sequences\[1\]: saved 2, now 1"),
        (gpt(), gpt(add_extra_token=False), "add_extra_token: saved True, now False"),
        (gpt(), gpt(other), "content: saved"),
        (blend(1, 1), blend(1, 3), r"weights\[0\]: saved 0.5, now 0.25"),
    ):
        loader = Loader(now, micro_batch_size=1)
        with pytest.raises(ResumeError, match=message):
            loader.load_state_dict(Loader(saved, micro_batch_size=1).state_dict())
        assert loader.consumed_samples == 0


def test_another_view_of_the_same_order_is_a_warning(make_dataset: Make) -> None:
    """Masks and padding may change in a run; the tokens stay the same."""
    data = make_dataset([100, 200])
    views = [{}, {"pad_token": 5}, {"eod_token": 3, "eod_mask_loss": True}]
    for make in (lambda part: part, lambda part: BlendedDataset([part, part], [1, 2], 20)):
        datasets = [make(GPTDataset(data, sequence_length=8, seed=3, **view)) for view in views]
        loader = Loader(datasets[0], micro_batch_size=2)
        next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        for dataset, message in [
            (datasets[1], r"view\.pad_token: saved None, now 5"),
            (datasets[2], r"view\.eod_mask_loss: saved False, now True"),
        ]:
            other = Loader(dataset, micro_batch_size=2)
            with pytest.warns(ViewChangeWarning, match=message):
                other.load_state_dict(state)
            assert other.consumed_samples == 2
        other = Loader(datasets[0], micro_batch_size=2)
        other.load_state_dict(state)  # the same view: no warning
        reordered = make(GPTDataset(data, sequence_length=8, seed=4, pad_token=5))
        with pytest.raises(ResumeError, match=r"(?s)seed: saved 3, now 4.*Restore"):
            Loader(reordered, micro_batch_size=2).load_state_dict(state)


def test_the_list_of_differences_is_short(make_dataset: Make) -> None:
    """A state of 400 datasets against 401, against others, and against arbitrary objects."""
    data = [make_dataset([200 + i], name=f"part{i}") for i in range(3)]
    parts = [GPTDataset(one, sequence_length=8, seed=1) for one in data]
    state = Loader(BlendedDataset(parts[:1] * 400), micro_batch_size=1).state_dict()

    def message(datasets: list[GPTDataset], state: dict[str, Any]) -> str:
        with pytest.raises(ResumeError) as caught:
            Loader(BlendedDataset(datasets), micro_batch_size=1).load_state_dict(state)
        assert len(str(caught.value)) < 3000
        return str(caught.value)

    text = message([*parts[:1] * 17, parts[1], *parts[:1] * 383], state)
    assert "datasets: saved 400 entries, now 401\n  datasets[17].content" in text
    assert "datasets: saved 400 entries, now 401\nRestore" in message(parts[:1] * 401, state)
    others = BlendedDataset(parts[1:2] * 400).fingerprint()
    others["datasets"] = [{**one, "seed": 2} for one in others["datasets"]]
    assert "and 390 more" in message(parts[1:2] * 400, state | {"fingerprint": others})
    for wrong in ("x" * 10**6, [0] * 10**6, None, {"kind": "x" * 10**6}, {"kind": np.zeros(9)}):
        message(parts, state | {"fingerprint": wrong})
    for wrong in ("x" * 10**6, None, np.zeros(9), 10**5000):
        message(parts, state | {"version": wrong})


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_loader_goes_on_after_it_has_refused_a_state(dataset: GPTDataset, prefetch: int) -> None:
    other = GPTDataset(dataset.dataset, sequence_length=32, seed=2)
    foreign = Loader(other, micro_batch_size=2).state_dict()
    with Loader(dataset, micro_batch_size=2, prefetch=prefetch, threads=2) as loader:
        next(loader)
        good = loader.state_dict()
        positions = {len(dataset) + 1: "the dataset has", -2: "at least 0", 10**5000: "is 0x"}
        positions |= dict.fromkeys((2.5, "2", True, None, math.nan), "must be a whole number")
        changes: list[tuple[Any, type[Exception], str]] = [
            *(
                ({"consumed_samples": value}, ConfigError, f"consumed_samples .*{problem}")
                for value, problem in positions.items()
            ),
            ({"version": 2}, ResumeError, r"version 2; .* Loader\(\.\.\., consumed_samples=2\)"),
            ({"version": 4}, ResumeError, "version 4; millrace reads 3"),
            ({"version": "3"}, ResumeError, "version '3'"),
            ({"version": None}, ResumeError, "version None"),
            ({"fingerprint": good["fingerprint"] | {"sequences": 2.0}}, ResumeError, "sequences: "),
        ]
        for state, error, problem in (
            (foreign, ResumeError, "seed: saved 2, now 3"),
            ({}, ResumeError, "has no consumed_samples, fingerprint, version"),
            (None, ResumeError, "the state is None: it is not a Loader's"),
            ([good], ResumeError, "it is not a Loader's"),
            *((good | change, *others) for change, *others in changes),
        ):
            with pytest.raises(error, match=problem):
                loader.load_state_dict(state)  # type: ignore[arg-type]
        assert loader.state_dict() == good
        assert np.array_equal(next(loader)["tokens"], dataset.batch([2, 3])["tokens"])
        loader.load_state_dict(good | {"consumed_samples": np.int8(5)})
        assert json.dumps(loader.state_dict()["consumed_samples"]) == "5"


# ---- several threads, errors, copies ----


def test_a_transform_may_use_its_loader(dataset: GPTDataset) -> None:
    """The state does not count the current batch; `next` in the transform gives the next one."""
    states = []

    def skip_the_first(batch: Any) -> Any:
        states.append(loader.state_dict()["consumed_samples"])
        return next(loader) if len(states) == 1 else batch

    loader = Loader(dataset, micro_batch_size=2, transform=skip_the_first)
    assert np.array_equal(next(loader)["tokens"], dataset.batch([2, 3])["tokens"])
    assert (states, loader.consumed_samples) == ([0, 0], 4)

    def seek(batch: Any) -> Any:
        loader.load_state_dict(loader.state_dict() | {"consumed_samples": 20})
        return batch

    loader.transform = seek
    assert np.array_equal(next(loader)["tokens"], dataset.batch([4, 5])["tokens"])
    assert loader.consumed_samples == 20


@FORKS
def test_a_fork_during_a_step_does_not_block_the_child(dataset: GPTDataset) -> None:
    """The child does not inherit the step that another thread was making."""
    is_stepping, may_end = threading.Event(), threading.Event()

    def wait(batch: Any) -> Any:
        if threading.current_thread() is thread:
            is_stepping.set()
            may_end.wait()
        return batch

    def is_first() -> bool:
        tokens = next(loader)["tokens"]
        is_first = np.array_equal(tokens, dataset.batch([0, 1])["tokens"])
        return is_first and loader.consumed_samples == 2

    loader = Loader(dataset, micro_batch_size=2, transform=wait)
    thread = threading.Thread(target=next, args=(loader,))
    thread.start()
    is_stepping.wait()
    assert is_true_in_child(is_first, before_wait=may_end.set)
    thread.join()
    assert loader.consumed_samples == 2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_numbers_of_a_sampler_become_plain(prefetch: int) -> None:
    class Sampler(SequentialSampler):
        def consumed_after(self, consumed_samples: int) -> Any:
            return np.int64(consumed_samples + step)

    loader = Loader(Numbers(), sampler=Sampler(50, micro_batch_size=2), prefetch=prefetch)
    step = 2
    next(loader)
    assert json.loads(json.dumps(loader.state_dict()))["consumed_samples"] == 2
    loader.load_state_dict(loader.state_dict(0))
    for step in (0, -1):
        with pytest.raises(ConfigError, match=f"consumed_after must be at least 1, not {step}"):
            next(loader)


def test_copies_are_independent(dataset: GPTDataset) -> None:
    loader = Loader(dataset, micro_batch_size=2)
    next(loader)
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.state_dict() == loader.state_dict()
        assert np.array_equal(next(other)["tokens"], dataset.batch([2, 3])["tokens"])
        assert (loader.consumed_samples, other.consumed_samples) == (2, 4)


# ---- datasets of one's own ----


class Padded(Numbers):
    """Samples of 1 to 9 tokens, as wide as the longest one of their batch."""

    def batch(self, sample_numbers: Any) -> dict[str, Any]:
        numbers = np.asarray(sample_numbers, np.int64)
        tokens = np.repeat(numbers[:, None], 9, axis=1)
        widths = np.full(len(numbers), (numbers % 9 + 1).max(initial=0))
        return {"tokens": tokens, "loss_mask": np.ones(tokens.shape), "widths": widths}

    def tokens(self, sample_numbers: Any) -> TokenBatch:
        ends = np.arange(1, len(sample_numbers) + 1) * 9
        return TokenBatch(np.repeat(np.asarray(sample_numbers, np.int64), 9), ends)


@pytest.mark.parametrize("kind", ["plain", "blend", "blend of blends", "transformed"])
def test_batches_of_a_dataset_whose_rows_depend_on_their_batch_come_again(kind: str) -> None:
    blend = BlendedDataset([Padded(700), Padded(700)], [1, 2], 600)
    dataset: Any = {
        "plain": Padded(700),
        "blend": blend,
        "blend of blends": BlendedDataset([blend], [1], 590),
        "transformed": TransformedDataset(Padded(700), []),
    }[kind]

    def widths(batches: Iterable[Any]) -> list[list[int]]:
        return [batch["widths"].tolist() for batch in batches]

    loader = Loader(dataset, micro_batch_size=2)
    batches = widths(loader)
    assert batches == widths(Loader(dataset, micro_batch_size=2, prefetch=0))
    assert batches == widths(map(loader.batch, range(len(loader))))
    loader.load_state_dict(loader.state_dict(202))
    assert widths(loader) == batches[101:]


# ---- fingerprints of datasets and samplers ----


class Named(Numbers):
    """A dataset with a fingerprint of its own."""

    def __init__(self, fingerprint: Any) -> None:
        super().__init__()
        self.fingerprint = lambda: fingerprint  # type: ignore[method-assign]

    def batch(self, sample_numbers: Any) -> dict[str, Any]:
        return {"tokens": np.asarray(sample_numbers, np.int64)[:, None]}


@pytest.mark.parametrize(
    ("fingerprint", "place"),
    [
        ({"hash": b"ab"}, "hash is b'ab'"),
        ({"view": {"weight": math.nan}}, "view.weight is nan"),
        ({"weight": np.float32("inf")}, "weight is .*inf"),
        ({"parts": ({1: "a"},)}, r"parts\[0\] has the key 1"),
        ({"day": np.datetime64("2026-01-01")}, "day is .*2026-01-01"),
    ],
)
def test_a_fingerprint_that_no_state_can_hold_is_refused_at_once(
    fingerprint: Any, place: str
) -> None:
    with pytest.raises(ConfigError, match=f"fingerprint.{place}"):
        Loader(Named(fingerprint), micro_batch_size=2)
    blend = BlendedDataset([Named({}), Named(fingerprint)])
    with pytest.raises(ConfigError, match=rf"fingerprint.datasets\[1\].{place}"):
        Loader(blend, micro_batch_size=2)

    class Sampler(SequentialSampler):
        def fingerprint(self) -> Any:
            return fingerprint

    with pytest.raises(ConfigError, match=f"fingerprint.sampler.{place}"):
        Loader(Numbers(), sampler=Sampler(100, micro_batch_size=2))


class Kind(enum.IntEnum):
    TEXT = 1


@pytest.mark.parametrize("fingerprint", [None, ["numbers"], "numbers"])
def test_a_fingerprint_that_is_not_a_dict_is_refused_at_once(fingerprint: Any) -> None:
    with pytest.raises(ConfigError, match=r"fingerprint is .*numbers|fingerprint is None"):
        Loader(Named(fingerprint), micro_batch_size=2)


def test_a_fingerprint_with_numbers_of_numpy_is_saved_as_plain_values() -> None:
    fingerprint = {
        "size": np.int32(3),
        "weights": (np.float32(0.1), np.float64(0.2), 0.3),
        "is_new": np.bool_(True),
        np.str_("name"): np.str_("web"),
        "kind": Kind.TEXT,
        "nothing": None,
    }
    loader = Loader(Named(fingerprint), micro_batch_size=2)
    next(loader)
    state = loader.state_dict()
    through_json, through_pickle = json.loads(json.dumps(state)), pickle.loads(pickle.dumps(state))
    assert through_json == through_pickle == state
    saved = state["fingerprint"]
    assert {type(key) for key in saved} == {str}
    assert type(saved["kind"]) is int  # else torch.load refuses it by default
    for saved in (state, through_json, through_pickle, state | {"fingerprint": fingerprint}):
        other = Loader(Named(fingerprint), micro_batch_size=2)
        other.load_state_dict(saved)
        assert other.consumed_samples == 2
    loader.close()


# ---- what has been drawn ----


class Phased(Numbers):
    """Samples of phases, each with a name from some sample number on."""

    def __init__(self, *phases: tuple[int, str]) -> None:
        super().__init__()
        self.phases = phases

    def fingerprint(self, consumed_samples: int) -> dict[str, Any]:  # type: ignore[override]
        return {"phases": [phase for phase in self.phases if phase[0] < consumed_samples]}


@pytest.mark.parametrize("prefetch", [0, 5])
def test_a_run_resumes_if_only_its_future_has_changed(prefetch: int) -> None:
    def loader(*phases: tuple[int, str]) -> Loader:
        return Loader(Phased(*phases), micro_batch_size=2, prefetch=prefetch)

    first = loader((0, "a"), (50, "b"))
    assert firsts(islice(first, 20)) == [*range(0, 40, 2)]
    state = json.loads(json.dumps(first.state_dict()))
    assert len(list(first)) == 30
    at_end = first.state_dict()
    assert first.state_dict(40) == state
    other = loader((0, "a"), (50, "c"))
    other.load_state_dict(state)
    assert next(other)["tokens"].tolist() == [40, 41]
    with pytest.raises(ResumeError, match=r"phases\[1\]\[1\]: saved 'b', now 'c'"):
        other.load_state_dict(at_end)
    with pytest.raises(ResumeError, match=r"phases\[0\]\[1\]: saved 'a', now 'x'"):
        loader((0, "x"), (50, "b")).load_state_dict(state)
    other.close()
