"""Samples of rows in turn: what they hold, and that no row is lost or repeated by a resume."""

import copy
import itertools
import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import numpy as np
import pytest
import torchdata.nodes
from hypothesis import given, settings, strategies as st

from millrace import ConfigError, Loader, ResumeError, TextError
from millrace.online import StreamDataset, TextRows
from millrace.online.row_documents import epoch_order
from millrace.testing import assert_resumes
from tests.online.encoders import BYTES, CASES, EOD, Document, Marked, documents_in

PACKINGS = ["documents", "joined", "packs"]


class Stateful:
    """A source with a state of its own, which it goes on changing, as it does what it was given."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.start, self.now = rows, 0, {"at": [0]}

    def state_dict(self) -> dict[str, Any]:
        return self.now

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"].pop()  # `now` changes with the first row, as with many libraries

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.start, len(self.rows)):
            self.now["at"] = [number + 1]
            yield self.rows[number]


def source_of(kind: str, rows: list[Any]) -> Any:
    if kind == "torchdata":
        return torchdata.nodes.Loader(torchdata.nodes.IterableWrapper(rows))
    functions = {"function": lambda first: iter(rows[first:]), "iterable": rows}
    return functions.get(kind) or Stateful(rows)


def loader_of(source: Any, encoder: Any = BYTES, micro: int = 1, **options: Any) -> Loader:
    """A loader without look-ahead; options of either."""
    share = {name: options.pop(name) for name in [*options] if name.startswith("data_parallel")}
    dataset = StreamDataset(source, encoder, **{"sequence_length": 4, **options})
    return Loader(dataset, micro_batch_size=micro, drop_last=False, prefetch=0, **share)


def expected_samples(rows: list[Any], encoder: Any, case: Any) -> list[Document]:
    """The samples, token by token."""
    length, extra, count = case["length"], case["extra"], case["per_sample"]
    size = case["buffer"] if case["buffer"] > 1 else 64
    documents = []  # of each row
    for number, start in enumerate(range(0, len(rows), size)):
        window = rows[start : start + size]
        places = np.arange(len(window))
        if case["buffer"] > 1:
            places = epoch_order(len(window), case["seed"], number).sources(places)
        documents += [documents_in(encoder.encode([window[place]])) for place in places.tolist()]
    capacity, joined = length + extra, itertools.chain.from_iterable
    if case["packing"] == "documents":
        groups = [documents[n : n + count] for n in range(0, len(documents), count)]
        return [[*joined(joined(group))][:capacity] for group in groups]
    if case["packing"] == "joined":
        tokens: Document = [*joined(joined(documents))]
        return [tokens[n : n + capacity] for n in range(0, max(len(tokens) - extra, 0), length)]
    whole = joined(documents)
    pieces = [one[n : n + capacity] for one in whole for n in range(0, len(one), capacity)]
    samples: list[Document] = []
    for piece in pieces:
        if not samples or len(samples[-1]) + len(piece) > capacity:
            samples.append([])
        samples[-1] = samples[-1] + piece
    return samples


LAW = {
    "texts": st.lists(st.text(alphabet="amz", max_size=9), max_size=25),
    "again": st.booleans(),
    "kind": st.sampled_from(["function", "state", "torchdata", "iterable"]),
    "packing": st.sampled_from(PACKINGS),
    "buffer": st.integers(0, 9),
    "per_sample": st.integers(1, 3),
    "length": st.integers(1, 12),
    "extra": st.booleans(),
    "seed": st.integers(0, 99),
    "sizes": st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    "stop": st.integers(0, 5),
}


@pytest.mark.parametrize("cases", CASES)
def test_no_row_is_lost_or_repeated(cases: int) -> None:
    settings(max_examples=cases, deadline=None)(given(case=st.fixed_dictionaries(LAW))(law))()


def law(case: dict[str, Any]) -> None:
    again = case["again"]
    rows = [{"text": text, "again": again and n % 3 == 0} for n, text in enumerate(case["texts"])]
    encoder: Any = Marked() if again else BYTES

    def loader(rank: int, size: int, micro: int) -> Loader:
        options = {"packing": case["packing"], "rows_per_sample": case["per_sample"]}
        options |= {"shuffle_buffer": case["buffer"], "seed": case["seed"]}
        options |= {"sequence_length": case["length"], "add_extra_token": case["extra"]}
        options |= {"data_parallel_rank": rank, "data_parallel_size": size}
        return loader_of(source_of(case["kind"], rows), encoder, micro, **options)

    expected = expected_samples(rows, encoder, case)
    stream = loader(0, 1, 1).dataset.stream
    whole, state = [], None
    while len(batch := stream.read(state, 2)[0]):
        state = stream.read(state, 2)[1]  # the same state again: read again from the source
        whole += documents_in(batch)
        assert len(json.dumps(state)) < 150  # never tokens
    assert whole == expected
    if not expected:
        return  # which a loader refuses
    first, micro, second = case["sizes"]
    ranks = [loader(rank, first, micro) for rank in range(first)]
    rows_seen: list[Any] = []
    for _ in range(case["stop"]):
        rows_seen += [row for one in ranks for row in next(one, {"tokens": []})["tokens"]]
    states = [json.loads(json.dumps(one.state_dict())) for one in ranks]
    if len({state["consumed_samples"] for state in states}) > 1:
        return  # the last, partial step has samples for some ranks alone
    assert states == [states[0]] * first
    others = [loader(rank, second, 1) for rank in range(second)]
    for one in others:
        one.load_state_dict(states[0])
    while got := [row for one in others for row in next(one, {"tokens": []})["tokens"]]:
        rows_seen += got
    length = case["length"]
    assert [row.tolist() for row in rows_seen] == [
        ([token for token, _ in sample] + [0] * length)[:length] for sample in expected
    ]


@pytest.mark.parametrize("packing", PACKINGS)
def test_it_resumes_from_every_step_with_threads(packing: str) -> None:
    rows = [{"text": "mill race "[: n % 11]} for n in range(50)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)

    def loader() -> Loader:
        options: Any = {"packing": packing, "shuffle_buffer": 7, "sequence_length": 12}
        dataset = StreamDataset(copy.deepcopy(stream), Marked(), **options)
        return pickle.loads(pickle.dumps(Loader(dataset, micro_batch_size=2, prefetch=4)))

    assert assert_resumes(loader) >= 10

    def drawn(dataset: StreamDataset) -> list[Any]:
        return [batch["tokens"].tolist() for batch in Loader(dataset, micro_batch_size=2)]

    one = loader()
    batches = drawn(one.dataset)
    assert one.batch(3)["tokens"].tolist() == batches[3]
    with ThreadPoolExecutor(3) as pool:  # several loaders of one dataset at once
        assert [*pool.map(drawn, [one.dataset] * 3)] == [batches] * 3


@pytest.mark.parametrize(("buffer", "count"), [(20, 18), (20, 5), (0, 9), (20, 30)])
def test_a_source_that_has_changed_is_refused(buffer: int, count: int) -> None:
    rows = [{"text": str(n)} for n in range(25)]
    one = loader_of(rows, shuffle_buffer=buffer)
    for _ in range(10 if count < 25 else 22):
        next(one)
    other = loader_of([*rows, *rows][:count], shuffle_buffer=buffer)
    other.load_state_dict(one.state_dict())
    with pytest.raises(ResumeError, match=f"has {count - 20 * (count > 20)} now"):
        next(other)


def test_each_rank_tokenises_its_own() -> None:
    class Counting(TextRows):
        seen: list[str]

        def encode(self, rows: Any) -> Any:
            self.seen += [row["text"] for row in rows]
            return super().encode(rows)

    rows, share = [{"text": str(n)} for n in range(24)], {"data_parallel_rank": 1}
    for packing, count, kind in (("documents", 12, "own"), ("joined", 24, "all")):
        encoder = Counting(BYTES.tokenizer)
        encoder.seen = []
        loader = loader_of(rows, encoder, 2, packing=packing, data_parallel_size=2, **share)
        list(loader)
        assert len({*encoder.seen}) == len(encoder.seen) == count
        assert loader.state_dict()["stream"]["state"]["tokenised"] == kind


def test_a_report_counts_rows_and_what_is_cut() -> None:
    loader = loader_of([{"text": "abcdef"}, {"text": "m"}], Marked(), sequence_length=3)
    assert len([*loader]) == 2
    counts = {"rows": 2, "tokens": 9, "trained tokens": 6}
    assert loader.dataset.report == {**counts, "cut documents": 1, "tokens behind the cut": 3}


def test_an_iterator_is_refused_when_a_state_is_saved() -> None:
    loader = loader_of(({"text": str(n)} for n in range(9)), micro=3)
    assert loader.state_dict()["consumed_samples"] == 0
    assert next(loader)["tokens"][:, 0].tolist() == [*b"012"]
    with pytest.raises(ConfigError, match=r"an iterator has no state.*give a function"):
        loader.state_dict()
    assert next(loader)["tokens"][:, 0].tolist() == [*b"345"]  # it goes on
    with pytest.raises(ResumeError, match="cannot begin again"):
        loader.batch(0)
    stream = datasets.Dataset.from_list([{"text": str(n)} for n in range(9)]).to_iterable_dataset()
    stream = datasets.concatenate_datasets([stream, stream.shuffle(buffer_size=5)])
    loader = Loader(StreamDataset(stream, BYTES, sequence_length=4), micro_batch_size=3)
    assert len([*loader]) == 6
    with pytest.raises(ConfigError, match=r"lacks the rows in the buffer.*give shuffle_buffer"):
        loader.state_dict()
    assert len([*Loader(loader.dataset, micro_batch_size=3)]) == 6


def test_a_stream_begins_at_its_start_and_resumes_in_its_epoch() -> None:
    rows = datasets.Dataset.from_list([{"text": str(n)} for n in range(9)])
    source, other = rows.to_iterable_dataset(), source_of("torchdata", [*rows])
    for one in (source, other):
        assert next(iter(one)) == {"text": "0"}  # as people do to see what it holds
    assert len([*loader_of(other)]) == 9
    source.set_epoch(1)
    loader = loader_of(source, shuffle_buffer=2)
    seen = [int(next(loader)["tokens"][0, 0]) for _ in range(5)]
    other = loader_of(rows.to_iterable_dataset(), shuffle_buffer=2)
    other.load_state_dict(loader.state_dict())
    seen += [int(batch["tokens"][0, 0]) for batch in other]
    assert sorted(seen) == [*b"012345678"]


@pytest.mark.parametrize("kind", ["hugging face", "stateful", "torchdata"])
def test_streams_of_one_source_do_not_move_each_other(kind: str) -> None:
    """Neither by turns nor where one begins after another has resumed."""
    rows = [{"text": f"{number:02}"} for number in range(60)]

    def source() -> Any:
        if kind == "hugging face":
            return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        return source_of(kind, rows)

    def batches(loader: Loader, count: int) -> list[Any]:
        return [next(loader)["tokens"].tolist() for _ in range(count)]

    options: dict[str, Any] = {"packing": "joined", "shuffle_buffer": 7}
    expected, shared = batches(loader_of(source(), **options), 44), source()
    loaders = [loader_of(shared, **options) for _ in range(2)]
    ahead = 10
    batches(loaders[0], ahead)
    for step in range(30):
        for loader, place in zip(loaders, (step + ahead, step), strict=True):
            assert batches(loader, 1) == expected[place : place + 1]
            resumed = loader_of(source(), **options)
            resumed.load_state_dict(loader.state_dict())
            assert batches(resumed, 2) == expected[place + 1 : place + 3]
    other = loader_of(shared, **options)
    other.load_state_dict(loaders[0].state_dict())
    assert batches(other, 2) == expected[40:42]
    assert batches(loader_of(shared, **options), 3) == expected[:3]


@pytest.mark.parametrize("packing", PACKINGS)
def test_bad_rows_stop_at_their_sample(packing: str) -> None:
    rows: list[Any] = [{"text": "abc"}, {"text": "def"}, {"no": 1}, {"text": "ghi"}]
    loader = loader_of(lambda n: rows[n:], packing=packing, add_extra_token=False)
    for text in (b"abc", b"def"):
        assert next(loader)["tokens"][0].tolist() == [*text, EOD]
    for _ in range(2):
        with pytest.raises(TextError, match="row 2 of the stream: there is no key"):
            next(loader)
    assert loader.consumed_samples == 2
    rows[2] = {"text": "xyz"}
    assert next(loader)["tokens"][0].tolist() == [*b"xyz", EOD]
    rows[3] = 5
    with pytest.raises(TextError, match="row 3 of the stream is 5; a dictionary"):
        list(loader_of(rows, packing=packing))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"source": 5}, "source is a int; give"),
        ({"packing": "gpt"}, "packing must be one of"),
        ({"rows_per_sample": 0}, "rows_per_sample"),
        ({"shuffle_buffer": -1}, "shuffle_buffer"),
        ({"seed": -1}, "seed"),
        ({"pad_token": EOD}, "pad_token is 256, with which"),
        ({"fingerprint": 3}, "fingerprint is 3; give a dict"),
        ({"source": lambda first: None}, r"source\(0\) returned None"),
        ({"source": {"train": []}}, "source is a dict; give an iterable of rows"),
        ({"source": "a.jsonl.zst"}, "source is a str; .* a function from a row number"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        next(loader_of(**{"source": [{"text": "a"}], **options}))


def test_wrong_states() -> None:
    stream = loader_of(lambda first: [{"text": "a"}][first:]).dataset.stream
    _, state = stream.read(None, 0)
    for name in ("window", "row", "token", "source"):
        with pytest.raises(ConfigError, match=f"{name}, of the stream's state, must be at least 0"):
            stream.read(state | {name: -1}, 1)
