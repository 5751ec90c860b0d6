"""Batches that another program makes: resumption, errors of iterators, ends, copies."""

import copy
import json
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millrace import BlendedDataset, ConfigError, MillraceError, ResumeError
from millrace.feed import (
    ExternalBatches,
    Loader,
    SampleOptions,
    SequentialSampler,
    StreamDataset,
    TokenBatch,
)
from tests.feed.helpers import AHEAD, FORKS, Numbers, is_true_in_child

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_external_batches_resume_by_a_function_and_by_reading() -> None:
    def from_consumed(consumed: int) -> range:
        return range(consumed, 20, 4)

    for batches in (from_consumed, list(from_consumed(0))):
        for prefetch in (0, 3):
            source = ExternalBatches(batches, samples_per_step=4)
            loader = Loader(source, prefetch=prefetch, threads=3)
            assert [next(loader), next(loader)] == [0, 4]
            state = json.loads(json.dumps(loader.state_dict()))
            other = Loader(ExternalBatches(batches, samples_per_step=4), prefetch=prefetch)
            other.load_state_dict(state)
            assert (list(other), other.consumed_samples) == ([8, 12, 16], 20)
            assert next(other, None) is None
            assert loader.batch(3) == 12
            assert list(loader) == [8, 12, 16]


@AHEAD
@pytest.mark.parametrize("consumed", [0, 2])
def test_an_iterator_that_has_failed_does_not_go_on(prefetch: int, consumed: int) -> None:
    def batches() -> Iterator[int]:
        yield 0
        raise OSError("the network is gone")

    source = ExternalBatches(batches(), samples_per_step=1)
    loader = Loader(source, prefetch=prefetch, consumed_samples=consumed)
    for batch in range(1 - min(consumed, 1)):
        assert next(loader) == batch
    with pytest.raises(OSError, match="the network is gone"):
        next(loader)
    for _ in range(3):
        with pytest.raises(ResumeError, match="cannot go back"):
            next(loader)


@AHEAD
def test_a_state_beyond_the_end_of_external_batches_is_refused(prefetch: int) -> None:
    state = Loader(ExternalBatches([], samples_per_step=2), consumed_samples=8).state_dict()
    known = ExternalBatches([1, 2, 3], samples_per_step=2, num_steps=3)
    with pytest.raises(ConfigError, match=r"consumed_samples is 8; .* 6 samples"):
        Loader(known, prefetch=prefetch).load_state_dict(state)
    for end, batches in ((6, [1, 2, 3]), (0, []), (2, iter([1]))):
        loader = Loader(ExternalBatches(batches, samples_per_step=2), prefetch=prefetch)
        loader.load_state_dict(state)
        for _ in range(2):
            place = f"consumed_samples is 8; .* after {end} samples|iterator cannot go back"
            with pytest.raises(MillraceError, match=place):
                next(loader)
    at_end = Loader(ExternalBatches([1, 2, 3, 4], samples_per_step=2), prefetch=prefetch)
    at_end.load_state_dict(state)
    assert list(at_end) == []


def test_wrong_external_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="batches is a int"):
        ExternalBatches(3, samples_per_step=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"samples_per_step must be .* not 0"):
        ExternalBatches([], samples_per_step=0)
    short = Loader(ExternalBatches([1, 2], samples_per_step=2, num_steps=3))
    assert len(short) == 3
    assert [next(short), next(short)] == [1, 2]
    with pytest.raises(ConfigError, match="num_steps=3 promises 6 samples"):
        next(short)
    endless = ExternalBatches([1, 2], samples_per_step=2)
    with pytest.raises(TypeError, match="ExternalBatches has no number of steps"):
        len(Loader(endless))
    with pytest.raises(ConfigError, match="is 3, inside step 1"):
        Loader(endless, consumed_samples=3)
    state = Loader(ExternalBatches([], samples_per_step=2, fingerprint={"file": "a"})).state_dict()
    with pytest.raises(ResumeError, match="file: saved 'a', now nothing"):
        Loader(endless).load_state_dict(state)


@FORKS
def test_a_fork_while_external_batches_are_read() -> None:
    is_reading = threading.Event()

    def batches(consumed: int) -> Iterator[int]:
        for number in range(consumed, 100):
            if number == 3 and not is_reading.is_set():
                is_reading.set()
                time.sleep(0.2)
            yield number

    loader = Loader(ExternalBatches(batches, samples_per_step=1), prefetch=3)
    assert [next(loader), next(loader)] == [0, 1]
    is_reading.wait(20)
    assert is_true_in_child(lambda: [next(loader), next(loader)] == [2, 3])
    assert [next(loader), next(loader)] == [2, 3]
    loader.close()


def test_a_copy_of_an_iterator_that_was_read_does_not_go_on_as_if_it_were_new() -> None:
    loader = Loader(ExternalBatches(iter([0, 1, 2, 3]), samples_per_step=1), prefetch=0)
    assert next(copy.deepcopy(loader)) == 0
    assert next(loader) == 0
    for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        with pytest.raises(ResumeError, match="iterator"):
            next(twin)


@AHEAD
@pytest.mark.parametrize("consumed", [0, 2, 3])
def test_the_end_of_an_iterator_stays_the_end(prefetch: int, consumed: int) -> None:
    batches = ExternalBatches(iter([0, 1, 2]), samples_per_step=1)
    loader = Loader(batches, consumed_samples=consumed, prefetch=prefetch)
    assert list(loader) == [0, 1, 2][consumed:]
    assert list(loader) == []
    loader.load_state_dict(loader.state_dict())
    assert next(loader, None) is None
    loader.load_state_dict(loader.state_dict(2))
    if consumed < 3:
        with pytest.raises(ResumeError, match="cannot go back to consumed_samples=2"):
            next(loader)


# ---- streams ----


class Counting:
    """Samples of four tokens, and states changed in place; `answer` changes what `read` returns."""

    def __init__(self, size: int = 20, answer: Any = None) -> None:
        self.size, self.answer, self.states = size, answer, []

    def read(self, state: Any, count: int) -> Any:
        self.states.append(state)
        if self.answer is not None:
            return self.answer
        state = state or {"next": 0}
        start = state["next"]
        count = min(count, self.size - start)
        state["next"] += count
        tokens = np.arange(4 * start, 4 * (start + count))
        return TokenBatch(tokens, 4 * np.arange(1, count + 1)), state

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "counting"}


OPTIONS = SampleOptions(sequence_length=3)


def test_what_is_not_a_stream_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"StreamDataset\(stream, options\)"):
        Loader(Counting(), micro_batch_size=2)  # type: ignore[arg-type]
    for arguments in ((3, OPTIONS), (Counting(), None)):
        with pytest.raises(ConfigError, match="stream is a"):
            StreamDataset(*arguments)  # type: ignore[arg-type]
    dataset: Any = StreamDataset(Counting(), OPTIONS)
    with pytest.raises(ConfigError, match=r"micro_batch_size must be .*, not None"):
        Loader(dataset)
    with pytest.raises(ConfigError, match="no sampler"):
        Loader(dataset, sampler=SequentialSampler(4, micro_batch_size=2))
    with pytest.raises(ConfigError, match="consumed_samples is 40; the stream ends after 20"):
        next(Loader(dataset, micro_batch_size=2, consumed_samples=40))
    too_many = TokenBatch(np.arange(3), np.arange(1, 4))
    for answer in ((too_many, 3), (None, 0)):
        loader = Loader(StreamDataset(Counting(answer=answer), OPTIONS), micro_batch_size=2)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="at most 2 samples"):
            next(loader)


@AHEAD
def test_the_last_step_of_a_stream_is_dropped_or_short(prefetch: int) -> None:
    dataset: Any = StreamDataset(Counting(), OPTIONS)
    for drop_last, sizes in ((True, [3] * 6), (False, [3] * 6 + [2])):
        loader = Loader(dataset, micro_batch_size=3, drop_last=drop_last, prefetch=prefetch)
        assert [len(batch["tokens"]) for batch in loader] == sizes
        assert loader.consumed_samples == sum(sizes)
        assert next(loader, None) is None
    share: Any = {"micro_batch_size": 6, "data_parallel_rank": 3, "data_parallel_size": 4}
    with pytest.raises(ConfigError, match="the dataset has 20 samples, so that no step"):
        next(Loader(dataset, **share))
    with pytest.raises(ConfigError, match="dataset 1 is a StreamDataset"):
        BlendedDataset([Numbers(), dataset])
    last = Loader(dataset, **share, drop_last=False)
    assert [len(batch["tokens"]) for batch in last] == [2]
