"""`assert_resumes` accepts loaders that resume exactly, and names what is wrong with others."""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millrace import ConfigError, GPTDataset, IndexedDataset, Loader
from millrace.feed import CyclicSampler, ExternalBatches, FullValidationSampler
from millrace.testing import assert_resumes
from tests.feed.helpers import Numbers

Make = Callable[..., IndexedDataset]


class Plain:
    """A loader written by hand: batches of a list, and the position as its state."""

    def __init__(self, size: int = 6) -> None:
        self.position = 0
        self.size = size
        self.log: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.size:
            self.position += 1
            yield self.make(self.position - 1)

    def make(self, number: int) -> Any:
        return {"x": np.full(3, number, np.float32)}

    def state_dict(self) -> Any:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


def test_loaders_that_resume_are_accepted(make_dataset: Make) -> None:
    gpt = GPTDataset(make_dataset([30, 0, 50, 7, 101]), sequence_length=8, seed=3)
    numbers = Numbers(21)
    external = partial(ExternalBatches, samples_per_step=2)
    for make, max_steps, num_steps in (
        (Plain, None, 6),
        (lambda: Loader(gpt, micro_batch_size=3), None, len(gpt) // 3),
        (lambda: Loader(gpt, micro_batch_size=1, consumed_samples=5), None, len(gpt) - 5),
        (lambda: Loader(Numbers(10), micro_batch_size=4, drop_last=False), None, 3),
        (lambda: Loader(numbers, sampler=CyclicSampler(21, micro_batch_size=4)), 12, 12),
        (lambda: Loader(numbers, sampler=FullValidationSampler(21, micro_batch_size=4)), None, 6),
        (lambda: Loader(external([[1, 2], [3, 4], {"x": 5}])), None, 3),
        (lambda: Loader(external(lambda start: range(start, 14, 2))), 9, 7),
    ):
        assert assert_resumes(make, max_steps=max_steps) == num_steps


@pytest.mark.filterwarnings("ignore")  # torchdata's own
def test_stateful_data_loaders_are_accepted() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    kind = torchdata.StatefulDataLoader
    assert assert_resumes(lambda: kind(list(range(14)), batch_size=2)) == 7


def test_limits_shorten_the_run() -> None:
    steps = []

    class Counting(Plain):
        def make(self, number: int) -> Any:
            steps.append(number)
            return super().make(number)

    assert assert_resumes(lambda: Counting(10**9), max_steps=5, steps_after_resume=2) == 5
    assert max(steps) <= 7


def test_batches_of_any_plain_kind_are_compared() -> None:
    torch = pytest.importorskip("torch")

    class Kinds(Plain):
        def make(self, number: int) -> Any:
            return (
                torch.full((2,), number, dtype=torch.bfloat16, requires_grad=True),
                np.array([np.nan, -0.0]),
                {"deep": [number, None, "text", 1.5, float("nan")], "object": np.array([None])},
                pa.array(["a", None]),
                np.int64(number),
            )

    assert assert_resumes(Kinds) == 6


def test_states_with_tensors_travel_by_pickle() -> None:
    torch = pytest.importorskip("torch")

    class Tensors(Plain):
        def state_dict(self) -> Any:
            return {"position": torch.tensor(self.position)}

        def load_state_dict(self, state: Any) -> None:
            self.position = int(state["position"])

    with pytest.raises(AssertionError, match="JSON cannot hold the state after 0 steps"):
        assert_resumes(Tensors)
    assert assert_resumes(Tensors, through_json=False) == 6


# ---- loaders that do not resume ----


class LosesOne(Plain):
    """It reads one batch ahead, and counts it."""

    def state_dict(self) -> Any:
        return {"position": min(self.position + (self.position > 2), self.size)}


class ChangesOnResume(Plain):
    """It knows that it was resumed after step 4."""

    was_resumed = False

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.was_resumed = state["position"] == 4

    def dtype(self) -> str:
        return "float64" if self.was_resumed else "float32"


class CountsFromTheResume(Plain):
    base = 0

    def state_dict(self) -> Any:
        return {"position": self.position - self.base}

    def load_state_dict(self, state: Any) -> None:
        self.base = self.position = state["position"]


class SharesItsState(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"position": 0}

    def state_dict(self) -> Any:
        self.state["position"] = self.position
        return self.state


class GoesOn(ChangesOnResume):
    change = 1

    def __iter__(self) -> Iterator[Any]:
        self.size += self.change * self.was_resumed
        return super().__iter__()


class EndsEarly(GoesOn):
    change = -1


class MovesWithItsState(Plain):
    def state_dict(self) -> Any:
        self.log.append(0)
        return {"position": self.position}

    def make(self, number: int) -> Any:
        return len(self.log)


class UsesItsBufferAgain(Plain):
    def make(self, number: int) -> Any:
        self.buffer = getattr(self, "buffer", np.zeros(3))
        self.buffer[:] = number
        return {"x": self.buffer}


def changed(base: type[Plain], **methods: Any) -> type[Plain]:
    return type(base.__name__, (base,), methods)


def making(make: Callable[[Any, int], Any]) -> type[Plain]:
    return changed(ChangesOnResume, make=make)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LosesOne, r"resumes after 3 steps differs in step 3: batch\.x\[0\] is 3\.0 in the"),
        (changed(Plain, load_state_dict=lambda *_: None), "1 steps differs .* is 1.0 .*, 0.0 now"),
        (
            changed(Plain, make=lambda *_: np.array([random.random()])),
            r"make_loader\(\) differs in",
        ),
        (
            making(lambda self, _: {"x": np.zeros(3, self.dtype())}),
            r"batch\.x is an array float32 \[",
        ),
        (
            making(lambda self, _: pa.array([str(self.was_resumed)])),
            r"batch\[0\] is 'False' .* 'True'",
        ),
        (making(lambda self, _: {"xy"[self.was_resumed]: np.zeros(3)}), "array .*, nothing now"),
        (
            making(lambda self, _: np.array([1, 0.0 * -self.was_resumed])),
            r"\[1\] is 0.0 in the first run, -0.0 now",
        ),
        (CountsFromTheResume, "stops and resumes after every step differs in step 2"),
        (SharesItsState, r"after 0 steps has changed while its loader .*position is 0 in"),
        (GoesOn, "after 4 steps goes on after step 5, the last of the run"),
        (EndsEarly, "after 4 steps has no step 5; without a stop it has one"),
        (making(lambda self, _: 1 // (not self.was_resumed)), "fails in step 4: .* by zero"),
        (MovesWithItsState, r"a second loader of make_loader\(\) differs in step 0"),
        (
            changed(Plain, state_dict=lambda _: {0: 0}, load_state_dict=lambda _, state: state[0]),
            r"after 0 steps refuses its state \{'0': 0\}",
        ),
        (UsesItsBufferAgain, "the batch of step 0 has changed .* is 0.0 in the first run, 5.0 now"),
    ],
)
def test_loaders_that_do_not_resume_are_named(kind: type[Plain], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_resumes(kind)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (partial(next, itertools.repeat(Plain())), {}, "the same loader twice"),
        (lambda: [1, 2], {}, "list, which has no state_dict, load_state_dict"),
        (lambda: Plain(0), {}, "returns no batch"),
        (Plain, {"max_steps": 0}, "max_steps must be at least 1, not 0"),
    ],
)
def test_what_is_not_a_loader_is_refused(make: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assert_resumes(make, **options)
