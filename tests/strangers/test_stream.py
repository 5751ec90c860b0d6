"""A stream of one's own by public names alone: texts of a generator, tokenised on the way."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millrace import Loader, ResumeError
from millrace.feed import SampleOptions, StreamDataset, TokenBatch
from millrace.testing import assert_resumes

EOD = 256


def texts(first: int, stop: int) -> Iterator[str]:
    """A long source that can be read from any text on."""
    for number in range(first, stop):
        yield f"text {number}: " + "water " * (number % 7)


class Tokenised:
    """Texts as bytes, one after the other, cut into samples. The state is plain and small."""

    def __init__(self, seed: int = 0, stop: int = 60, length: int = 17) -> None:
        self.seed, self.stop, self.length = seed, stop, length

    def read(self, state: Any, count: int) -> tuple[TokenBatch, Any]:
        next_text, tokens = (state["next_text"], state["left"]) if state else (self.seed, [])
        for text in texts(next_text, self.stop):
            if len(tokens) >= count * self.length:
                break
            tokens = [*tokens, *text.encode(), EOD]
            next_text += 1
        used = min(count, len(tokens) // self.length) * self.length
        ends = self.length * np.arange(1, used // self.length + 1)
        batch = TokenBatch(np.array(tokens[:used], np.int64), ends)
        return batch, {"next_text": next_text, "left": tokens[used:]}

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        return {"kind": "tokenised", "seed": self.seed, "length": self.length}


def loader(size: int = 1, rank: int = 0, stream: Any = None, **options: Any) -> Loader:
    rows = SampleOptions(sequence_length=16, eod_token=EOD, reset_position_ids=True)
    dataset = StreamDataset(stream or Tokenised(), rows)
    share = {"data_parallel_rank": rank, "data_parallel_size": size}
    return Loader(dataset, **{"micro_batch_size": 2, **share, **options})


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"prefetch": 5, "threads": 4}])
def test_it_resumes_from_every_step(options: dict[str, Any]) -> None:
    assert assert_resumes(lambda: loader(**options)) > 40
    assert assert_resumes(lambda: loader(consumed_samples=6, **options), max_steps=5) == 5
    assert assert_resumes(lambda: loader(drop_last=False, micro_batch_size=7, **options)) > 10


def test_the_samples_are_the_texts() -> None:
    tokens = [token for text in texts(0, 60) for token in [*text.encode(), EOD]]
    batches = list(loader(drop_last=False, fields=("tokens", "labels", "sample_numbers")))
    rows = np.concatenate([batch["tokens"] for batch in batches])
    assert rows.tolist() == [tokens[start : start + 16] for start in range(0, len(tokens) - 16, 17)]
    numbers = np.concatenate([batch["sample_numbers"] for batch in batches])
    assert numbers.tolist() == [*range(len(rows))]


def test_ranks_share_one_order_and_one_state() -> None:
    expected = np.concatenate([batch["tokens"] for batch in loader()])
    ranks = [loader(3, rank) for rank in range(3)]
    seen = [next(one)["tokens"] for _ in range(4) for one in ranks]
    states = [json.loads(json.dumps(one.state_dict())) for one in ranks]
    assert states == [states[0]] * 3
    for one in (rest := [loader(2, rank) for rank in range(2)]):
        one.load_state_dict(states[1])
    seen += [batch["tokens"] for pair in zip(*rest, strict=True) for batch in pair]
    rows = np.concatenate(seen)
    assert rows.tolist() == expected[: len(rows)].tolist()
    assert len(expected) - len(rows) < 4


def test_a_state_moves_to_any_position_of_the_same_stream() -> None:
    batches = [batch["tokens"].tolist() for batch in loader()]
    one = loader()
    for _ in range(9):
        next(one)
    state = one.state_dict()
    for consumed in (0, 6, 18):
        for moved in (state | {"consumed_samples": consumed}, one.state_dict(consumed)):
            other = loader()
            other.load_state_dict(moved)
            assert next(other)["tokens"].tolist() == batches[consumed // 2]
    assert one.batch(3)["tokens"].tolist() == batches[3]
    with pytest.raises(ResumeError, match="seed: saved 0, now 5"):
        loader(stream=Tokenised(seed=5)).load_state_dict(state)
    with pytest.raises(TypeError, match="has no number of steps"):
        len(one)
