"""Samples of raw rows: on the fly, from the cache and from token files they are the same."""

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import (
    BlendedDataset,
    CacheError,
    ConfigError,
    GPTDataset,
    IndexedDataset,
    Loader,
    ResumeError,
    TextError,
)
from millrace.chats import ChatEncoder
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import EncodedRows, TextRows, encode_rows
from millrace.feed import BatchForm, DocumentCosts
from millrace.online import StreamDataset, TextDataset, open_rows
from millrace.online.text_dataset import _inputs_of
from millrace.order import PackedOrder
from millrace.samples.fields import FIELDS
from millrace.tokenizing import tokenize
from tests.jobs.kills import deaths_of, finished_tasks
from tests.no_flock import no_flock
from tests.online.encoders import (
    BYTES,
    CASES,
    EOD,
    Document,
    Marked,
    assert_same_tokens,
    documents_in,
    write_rows,
)
from tests.store.pairs import ended, output_of, start
from tests.store.test_faults import size_limit

TEXTS = st.one_of(
    st.text(alphabet="maz é\n", max_size=14),
    st.lists(st.text(alphabet="az", max_size=5), max_size=3),
).map(lambda text: {"text": text})
AGAIN, BAD, SAID = {"text": "b", "again": True}, {"a": 1}, [{"text": "c"}, {"text": ["d"]}]
ODD: list[Any] = [
    *({"text": text} for text in (5, ["a", None], "\ud800", "z" * 600)),
    {"text": "é" * 150},  # 900 bytes with escapes, and 300 without
    *(AGAIN, BAD),
    *({"text": text} for text in ("", "az", "maz")),
    {"text": "a", "at": date(2020, 1, 1), "n": np.int64(3), 5: "x"},
]
NUMBERED = BatchForm(fields=(*FIELDS, "document_numbers"))
NUMBERS = st.lists(st.integers(0, 29), max_size=12)
LAW = {
    "rows": st.lists(TEXTS, min_size=1, max_size=12)
    | st.permutations(ODD)
    | st.permutations([AGAIN, BAD, *SAID])  # as many documents as rows
    | st.permutations([AGAIN, "{", *SAID]),
    "edges": st.tuples(st.integers(0, 11), st.integers(0, 11)),
    "seed": st.none() | st.integers(0, 2**70),
    "length": st.integers(1, 5) | st.integers(1, 20),
    "extra": st.booleans(),
    "boundaries": st.sampled_from(["eod", "documents"]),
    "named": NUMBERS,
    "start": st.integers(0, 20),
    "micro": st.integers(1, 5),
    "numbers": NUMBERS,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A new folder for each random case."""
    return lambda: tmp_path_factory.mktemp("case")


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("on_error", ["stop", "skip", "quarantine"])
def test_a_document_per_sample_is_the_same_on_the_fly_and_from_the_cache(
    cases: int, is_marked: bool, in_memory: bool, on_error: str, folder: Callable[[], Path]
) -> None:
    """Of any rows, each document once in an epoch, and bad rows as the policy says."""

    @settings(max_examples=max(cases // 12, 10), deadline=None)  # 12 laws
    @given(case=st.fixed_dictionaries(LAW))
    def law(case: dict[str, Any]) -> None:
        place, numbers = folder(), case["numbers"]
        source = case["rows"] if in_memory else write_rows(place / "a.jsonl", case["rows"])
        rows = open_rows(source, cache=place, max_document_size=500)
        first, last = sorted(number % len(rows) for number in case["edges"])
        part, encoder = rows.range(first, last + 1), Marked() if is_marked else BYTES
        form: Any = {"sequence_length": case["length"], "add_extra_token": case["extra"]}
        form |= {"pad_token": 999, "boundaries": case["boundaries"], "seed": case["seed"]}
        form |= {"num_samples": 30 if on_error == "stop" else None}
        size = case["length"] + case["extra"]

        def check(drawn: list[Document], documents: list[Document]) -> None:
            cut = [one[:size] for one in documents]
            assert sorted(drawn) == sorted(cut)
            assert case["seed"] is not None or drawn == cut

        documents = [  # of each row, by the encoder alone
            documents_in(encoder.encode([row])) if isinstance(row, dict) else []
            for row in rows.read(np.arange(len(rows)))
        ]
        online, drawn, refused = TextDataset(part, encoder, **form), [], set()
        for number in range(len(part)):
            try:
                drawn += documents_in(online.tokens([number]))
            except TextError as error:
                places = [re.escape(part.place(one)) for one in range(len(part))]
                refused |= {n for n, one in enumerate(places) if re.search(rf"{one}\b", f"{error}")}
        own = documents[first : last + 1]
        assert refused == {number for number, one in enumerate(own) if len(one) != 1}
        check(drawn, [one[0] for one in own if len(one) == 1])
        if on_error != "stop" and encoder is BYTES:  # a text without tokens is a bad one
            documents = [[one for one in row if one] for row in documents]
        is_shared = encoder is BYTES and on_error == "stop"  # so all rows are tokenised
        read = range(len(rows)) if is_shared else range(first, last + 1)
        bad = [number for number in read if not documents[number]]
        make = partial(TextDataset, part, encoder, cache=place / "cache", workers=1, **form)
        if on_error == "stop" and bad:
            with pytest.raises(TextError) as stopped:
                make()
            assert any(f"{rows.place(number)}: " in str(stopped.value) for number in bad)
            return
        cached = make(on_error=on_error)
        kept = [*itertools.chain.from_iterable(documents[first : last + 1])]
        assert on_error == "stop" or len(cached) == len(kept)
        drawn = documents_in(cached.tokens(range(len(kept))))
        check(drawn, kept)
        behind = [len(one) - size for one in kept if len(one) > size]
        untrained = [one for one in kept if not any(trained for _, trained in one[1:size])]
        counts = {"cut documents": len(behind), "tokens behind the cut": sum(behind)}
        counts["samples without a target"] = len(untrained)
        if len(part) == len(rows):
            flags = [trained for one in kept for _, trained in one]
            counts |= {"rows": len(rows), "tokens": len(flags), "skipped rows": len(bad)}
            counts["trained tokens"] = sum(flags) * is_marked
        assert {name: cached.report[name] for name in counts} == counts
        named = cached.batch(range(len(kept)), NUMBERED)["document_numbers"]
        assert [kept[n][:size] for n in named if n >= 0] == [one for one in drawn if one]
        if on_error == "quarantine":
            files = [path.read_text() for path in place.glob("cache/*.quarantine.jsonl")]
            entries = [json.loads(line) for text in files for line in text.splitlines()]
            unit = "row" if in_memory else "line"
            places = {f"{one['file']}, {unit} {one['line']}" for one in entries}
            assert places == {*map(rows.place, bad)}
        if refused or on_error != "stop":
            return
        assert {name: online.report[name] for name in counts} == counts
        online = pickle.loads(pickle.dumps(online))
        online.prefetch(case["named"])  # which decides nothing
        assert_same_tokens(online.tokens(numbers), cached.tokens(numbers))
        for name, array in online.batch(numbers, NUMBERED).items():
            assert array.tolist() == cached.batch(numbers, NUMBERED)[name].tolist(), name
        # A run from token files goes on with the rows, at any sample.
        start, micro = case["start"], case["micro"]
        state = Loader(cached, micro_batch_size=3).state_dict(start)
        with Loader(online, micro_batch_size=micro) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            for number in (start, start + micro):
                tokens = cached.batch(range(number, number + micro))["tokens"]
                assert next(loader)["tokens"].tolist() == tokens.tolist()
        other = Loader(TextDataset([{"text": "other"}], encoder, **form), micro_batch_size=1)
        with pytest.raises(ResumeError, match="rows"):
            other.load_state_dict(state)

    law()


@pytest.mark.parametrize("cases", CASES)
def test_orders_of_token_files_are_those_of_the_cache(
    cases: int, folder: Callable[[], Path]
) -> None:
    """Also of a part of the rows."""
    texts = st.lists(TEXTS, max_size=12)
    some = {"seed": st.integers(0, 99), "length": st.integers(1, 9), "is_marked": st.booleans()}
    longs = st.sampled_from(["split", "cut", "drop"])

    @settings(max_examples=cases, deadline=None)
    @given(before=texts, rows=texts, long=longs, **some)
    def law(before: Any, rows: Any, long: str, seed: int, length: int, is_marked: bool) -> None:
        place, rows = folder(), [*rows, {"text": "enough for a sample"}]
        if is_marked:  # a list is one sequence for a row encoder, and several for Megatron-LM
            rows = [row for row in rows if isinstance(row["text"], str)]
        encoder = Marked() if is_marked else BYTES
        path = write_rows(place / "a.jsonl", rows)
        tokenize([path], place / "whole", BYTES.tokenizer, append_eod=True, workers=1)
        every = open_rows(write_rows(place / "b.jsonl", [*before, *rows]), cache=place / "cache")
        part, file = every.range(len(before)), IndexedDataset(place / "whole_text_document")
        gpt = {"order": "gpt", "seed": seed, "sequence_length": length, "num_samples": 9}
        form: Any = {"sequence_length": 20, "add_extra_token": False, "boundaries": "documents"}
        packs: Any = {
            "order": "packs",
            "seed": seed,
            "order_options": {"long_documents": long, "multiple": 4},
        }
        packed = PackedOrder(file.sequence_lengths, 20, seed, **packs["order_options"])
        whole = GPTDataset(file, sequence_length=length, seed=seed, num_samples=9)
        for options, other in ((gpt, whole), (packs | form, None)):
            other = other or GPTDataset(file, order=packed, **form)
            one, numbers = TextDataset(part, encoder, **options), range(len(other))
            batch, tokens = one.batch(numbers), one.tokens(numbers)
            assert tokens.tokens.tolist() == other.tokens(numbers).tokens.tolist()
            assert one.spans(numbers).counts.tolist() == other.spans(numbers).counts.tolist()
            if other is not whole:
                assert DocumentCosts.of(BlendedDataset([one])).multiple == 4
                assert one.report["lost tokens"] == file.num_tokens - len(tokens.tokens)
                assert one.report["long documents"] == (file.sequence_lengths > 20).sum()
            for name, array in other.batch(numbers).items():
                if name == "loss_mask" and is_marked:
                    array = array * (batch["labels"] < ord("m"))
                assert batch[name].tolist() == array.tolist(), name

    law()


class Capitals(TextRows):
    """Texts in capitals, of which B is trained on."""

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
        encoded = super().encode([{"text": row["text"].upper()} for row in rows])
        return encoded._replace(trained=encoded.tokens == ord("B"))


def test_rows_of_memory_go_to_the_encoder_as_they_are(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: list[Any] = [{"text": "a", "again": np.bool_(False), "messages": chat, 5: "x"}] * 600
    rows[0] = {**rows[0], "at": date(2020, 1, 1)}
    for encoder in (Capitals(BYTES.tokenizer), Marked(), ChatEncoder(BYTES.tokenizer)):
        online = TextDataset(rows, encoder, sequence_length=4)
        [document] = documents_in(encoder.encode(rows[:1]))
        assert documents_in(online.tokens([0])) == [document[:5]]
        for workers in (1, 2):
            form: Any = {"sequence_length": 4, "cache": tmp_path / f"{workers}", "workers": workers}
            cached = TextDataset(rows, encoder, **form)
            assert_same_tokens(online.tokens([0, 599]), cached.tokens([0, 599]))


def test_rows_that_are_sorted_by_length_are_several_inputs() -> None:
    rows = open_rows([{"text": "a"}] * 300 + [{"text": "a" * 10**6}] * 30)
    assert len(_inputs_of(rows)) > 2


def test_threads_encode_rows_of_several_steps_at_once(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": f"{n:03}"} for n in range(512)]
    rows[500] = {"no": "text"}
    barrier, sizes, met = threading.Barrier(2), list[int](), list[int]()

    class Watched(Marked):
        def encode(self, rows: Any) -> Any:
            sizes.append(len(rows))
            if len(rows) >= 64:
                with contextlib.suppress(threading.BrokenBarrierError):
                    met.append(barrier.wait(10))
            return super().encode(rows)

    path, form = write_rows(tmp_path / "a.jsonl", rows), {"sequence_length": 3}
    dataset = TextDataset(path, Watched(), add_extra_token=False, threads=2, **form)
    whole = b"".join(b"%03d" % n for n in range(500))
    for source, threads in itertools.product((dataset, BlendedDataset([dataset])), (1, 3)):
        assert (source.is_remote, source.look_ahead) == (True, dataset.look_ahead)
        sizes.clear()
        loader = Loader(source, micro_batch_size=5, threads=threads)
        seen = [next(loader)["tokens"] for _ in range(100)]
        assert bytes(np.concatenate(seen).astype(np.uint8).ravel()) == whole
        with pytest.raises(TextError, match="line 501: there is no key"):
            next(loader)
        assert sorted(sizes)[-2] >= 64  # the rows of the block of the bad one are encoded alone
        loader.close()
    assert {*met} == {0, 1}


# ---- the cache: kills, several processes, changes ----

MANY = [{"text": f"row {n} " * 40} for n in range(16_000)]  # several chunks of 1 MB


def build(rows: Any, cache: Path, workers: int = 1) -> TextDataset:
    options: Any = {"order": "gpt", "seed": 1, "sequence_length": 8, "workers": workers}
    return TextDataset(rows, Marked(), cache=cache, **options)


def contents(cache: Path) -> dict[str, bytes]:
    endings = (".bin", ".idx", ".npy")
    return {path.name: path.read_bytes() for path in cache.iterdir() if path.suffix in endings}


def test_a_full_disk(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", MANY[:1])
    for rows in (path, MANY):  # a file in place of the folder
        with pytest.raises(CacheError, match=r"a\.jsonl: File exists\. Give another folder"):
            build(rows, path)
    problem = "cache/rows-.*cannot be written.*Free space"
    with size_limit(4000), pytest.raises(CacheError, match=problem):
        build(MANY[:400], tmp_path / "cache")


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_cache_survives_death_at_every_step(tmp_path: Path, in_memory: bool) -> None:
    rows = [{"text": f"row {n}"} for n in range(9)]
    source = rows if in_memory else write_rows(tmp_path / "a.jsonl", rows)
    expected = build(source, tmp_path / "whole")
    for _ in deaths_of(lambda: build(source, tmp_path / "cache"), 5):
        after = build(source, tmp_path / "after").tokens([0, 3])
        assert_same_tokens(after, expected.tokens([0, 3]))
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")
    assert not [*(tmp_path / "cache").glob("*.journal")]


@pytest.mark.parametrize("has_locks", [True, False])
def test_one_of_three_processes_builds_the_cache(has_locks: bool, tmp_path: Path) -> None:
    cache, rows = tmp_path / "cache", MANY if has_locks else MANY[:400]
    build(rows, tmp_path / "whole")
    code = "from tests.online.test_text_dataset import *; import sys; "
    code += f"build(MANY[:{len(rows)}], Path(sys.argv[1]), 2)"
    environment = None if has_locks else no_flock(tmp_path)
    with ended([start(code, cache, env=environment) for _ in range(3)]) as processes:
        if has_locks:
            end = time.monotonic() + 60
            while not finished_tasks(cache) and None in [one.poll() for one in processes]:
                assert time.monotonic() < end
                time.sleep(0.01)
            processes[0].kill()  # whether it builds or waits
        assert {one.wait(100) for one in processes[has_locks:]} == {0}
    assert contents(cache) == contents(tmp_path / "whole")
    assert not [*cache.glob("*.rows.jsonl")]


def test_a_cache_is_found_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a" * 30}, {"text": "b"}])
    cache = tmp_path / "cache"
    first = build(path, cache).tokens([0])
    os.utime(path, ns=(0, 0))
    moved = path.rename(tmp_path / "b.jsonl")
    cache = cache.rename(tmp_path / "elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr("millrace.online.text_dataset.tokenize", None)
        assert_same_tokens(build(moved, cache).tokens([0]), first)
    for ending in ("bin", "bin", "loss.json", "loss-ranges.npy"):  # damaged: made again
        [file] = cache.glob(f"*.{ending}")
        file.write_bytes(file.read_bytes()[:-2])
        assert_same_tokens(build(moved, cache).tokens([0]), first)
    write_rows(moved, [{"text": "c" * 30}])
    assert ord("c") in build(moved, cache).tokens([0]).tokens


def test_a_file_that_changes_before_or_under_the_job_is_refused(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"{name}.jsonl", [{"text": name * 9}]) for name in "ab"]
    form: Any = {"cache": tmp_path, "order": "gpt", "seed": 1, "sequence_length": 12, "workers": 1}
    rows = open_rows(paths, cache=tmp_path)
    write_rows(paths[1], [{"text": "c" * 9}])
    with pytest.raises(TextError, match=r"b\.jsonl was written to"):
        TextDataset(rows, Marked(), **form)
    write_rows(paths[1], [{"text": "b" * 9}])
    tokens = TextDataset(paths, Marked(), **form).tokens([0]).tokens.tolist()
    assert {ord("b")} < {*tokens} <= {*b"ab", EOD}


def test_what_waits_when_python_ends_is_not_encoded() -> None:
    code = """if True:
        import time; from tests.online.test_text_dataset import *
        class Slow(Marked):
            def encode(self, rows):
                print(len(rows), flush=True)
                time.sleep(0.3)
                return super().encode(rows)
        dataset = TextDataset([{"text": "a"}] * 2000, Slow(), sequence_length=4)
        next(loader := Loader(dataset, micro_batch_size=4))"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 1 <= len(result.stdout.split()) < 4  # of five blocks that are announced


def show_temporary(path: str) -> None:
    """Prints the folder of token files, which a forked child, too, can read."""
    dataset = TextDataset(path, BYTES, order="gpt", seed=1, sequence_length=8)
    child = multiprocessing.get_context("fork").Process(target=dataset.batch, args=([0],))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert dataset.batch([0])["tokens"].tolist()
    print(os.path.dirname(dataset.prefix))


def test_a_temporary_folder_goes_with_its_process(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "abcdefgh"}] * 3)
    code = "from tests.online.test_text_dataset import *; import sys; show_temporary(sys.argv[1])"
    folder = output_of(code, path).strip()
    assert "millrace-" in folder
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"encoder": BYTES.tokenizer}, "encoder is a Tokenizer: give TextRows"),
        ({"on_error": "skip"}, 'on_error="skip" needs all rows'),
        ({"order": "random", "seed": 1}, "order must be one of gpt, packs"),
        ({"order": "gpt"}, "seed, which this order needs,"),
        ({"order": "gpt", "seed": 1, "order_options": {"room": 1}}, "order_options"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"pad_token": 256}, "pad_token is 256, with which .* Leave pad_token out"),
        ({"threads": 0}, "threads must be between 1 and 1024"),
        ({"rows": iter([])}, "StreamDataset"),
        ({"rows": [], "num_samples": 1}, "list: there are no rows"),
        ({"order_options": {"room": 1}}, "order_options are .*give order"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TextDataset(**{"rows": [{"text": "a"}], "encoder": BYTES, "sequence_length": 4, **options})


def test_metrics_name_the_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "abcdefgh"}] * 2)
    kinds: Any = ({}, {"cache": tmp_path}, {"order": "gpt", "seed": 1})
    for options, name in itertools.product(kinds, (None, "web")):
        dataset = TextDataset(path, BYTES, sequence_length=8, name=name, **options)
        loader = Loader(BlendedDataset([dataset]), micro_batch_size=2)
        next(loader)
        metrics = loader.metrics()
        assert metrics[f"tokens/{name or path}"] == 16
        assert metrics[f"epoch/{name or path}"] == (16 / 18 if "order" in options else 1)


def test_a_misspelt_option_is_named_with_the_options() -> None:
    for make in (TextDataset, StreamDataset):
        with pytest.raises(
            TypeError, match=rf"{make.__name__} has no .*'length'.* seed, .*pad_token"
        ):
            make([{"text": "a"}], BYTES, length=4)


# ---- encoders ----


def test_options_of_texts() -> None:
    plain = TextRows(BYTES.tokenizer, "doc.body", append_eod=False)
    assert plain.encode([{"doc": {"body": "a"}}]).tokens.tolist() == [ord("a")]
    assert plain.fingerprint() != TextRows(BYTES.tokenizer, "doc.body").fingerprint()
    function: Any = Tokenizer.from_function(len, vocabulary_size=9)  # type: ignore[arg-type]
    for arguments, problem in (
        (["bytes"], "must be a millrace"),
        ([BYTES.tokenizer, 5], "key 5 must be"),
        ([BYTES.tokenizer, "text", True, True], "give bos_token"),
        ([function], "has none of"),
    ):
        with pytest.raises((ConfigError, TextError), match=problem):
            TextRows(*arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ends", np.array([1, 3])),
        ("counts", np.array([1, 0])),
        ("counts", np.array([2, 0])),
        ("counts", np.array(2)),
        ("tokens", np.array([1, 2, 3], np.int64)),
        ("trained", np.ones(3, np.bool_)),
        ("problems", {0: "bad"}),
        ("report", {"rows": np.int64(2)}),
        ("report", None),
    ],
)
def test_an_encoder_that_contradicts_itself_is_refused(name: str, value: Any) -> None:
    class Wrong(Marked):
        def encode(self, rows: Any) -> EncodedRows:
            return super().encode(rows)._replace(**{name: value})

    rows = [{"text": "a"}, {"text": ""}]
    assert encode_rows(Marked(), rows).counts.tolist() == [1, 1]
    with pytest.raises(ConfigError, match=r"Wrong\.encode returned"):
        encode_rows(Wrong(), rows)
