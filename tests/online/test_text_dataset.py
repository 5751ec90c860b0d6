"""Samples of raw rows: on the fly, from the cache and from token files they are the same."""

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import (
    BlendedDataset,
    ConfigError,
    GPTDataset,
    IndexedDataset,
    Loader,
    ResumeError,
    TextError,
)
from millrace.chats import ChatEncoder
from millrace.online import TextDataset, open_rows
from millrace.order import PackedOrder
from millrace.testing import assert_resumes
from millrace.tokenizing import tokenize
from tests.jobs.kills import deaths_of, finished_tasks
from tests.no_flock import no_flock
from tests.online.encoders import BYTES, CASES, EOD, Marked, assert_same_tokens, write_rows

TEXTS = st.one_of(
    st.text(alphabet="maz é\n", max_size=14),
    st.lists(st.text(alphabet="az", max_size=5), max_size=3),
)
ROWS = st.lists(TEXTS, min_size=1, max_size=12).map(lambda texts: [{"text": t} for t in texts])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A new folder for each random case."""
    return lambda: tmp_path_factory.mktemp("case")


LAW = {
    "rows": ROWS,
    "seed": st.none() | st.integers(0, 2**70),
    "length": st.integers(1, 20),
    "extra": st.booleans(),
    "is_marked": st.booleans(),
    "in_memory": st.booleans(),
    "boundaries": st.sampled_from(["eod", "documents"]),
    "named": st.lists(st.integers(0, 29), max_size=12),
    "start": st.integers(0, 20),
    "micro": st.integers(1, 5),
    "numbers": st.lists(st.integers(0, 29), max_size=12),
}
CUT = {"cut documents": 0, "tokens behind the cut": 0, "samples without a target": 0}


@pytest.mark.parametrize("cases", CASES)
def test_a_document_per_sample_is_the_same_on_the_fly_and_from_the_cache(
    cases: int, folder: Callable[[], Path]
) -> None:
    @settings(max_examples=cases, deadline=None)
    @given(case=st.fixed_dictionaries(LAW))
    def law(case: dict[str, Any]) -> None:
        place, rows, numbers = folder(), case["rows"], case["numbers"]
        source = rows if case["in_memory"] else write_rows(place / "a.jsonl", rows)
        options: Any = {"sequence_length": case["length"], "add_extra_token": case["extra"]}
        options |= {"pad_token": 999, "boundaries": case["boundaries"]}
        options |= {"seed": case["seed"], "num_samples": 30}
        encoder: Any = Marked() if case["is_marked"] else BYTES
        online = TextDataset(source, encoder, **options)
        cached = TextDataset(source, encoder, cache=place / "cache", workers=1, **options)
        online.prefetch(case["named"])  # which decides nothing
        assert_same_tokens(online.tokens(numbers), cached.tokens(numbers))
        for name, array in online.batch(numbers).items():
            assert array.tolist() == cached.batch(numbers)[name].tolist(), name
        # A run from token files goes on with the rows, at any sample.
        start, micro = case["start"], case["micro"]
        state = Loader(cached, micro_batch_size=3).state_dict(start)
        with Loader(online, micro_batch_size=micro) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            for first in (start, start + micro):
                tokens = cached.batch(range(first, first + micro))["tokens"]
                assert next(loader)["tokens"].tolist() == tokens.tolist()
        # Every epoch has every document once: by the encoder alone.
        drawn = online.tokens(range(len(rows)))
        pieces = [piece.tolist() for piece in np.split(drawn.tokens, drawn.ends[:-1])]
        size = case["length"] + case["extra"]
        expected = [encoder.encode([row]).tokens[:size].tolist() for row in rows]
        assert sorted(pieces) == sorted(expected)
        assert case["seed"] is not None or pieces == expected

    law()


@pytest.mark.parametrize("cases", CASES)
def test_orders_of_token_files_are_those_of_the_cache(
    cases: int, folder: Callable[[], Path]
) -> None:
    @settings(max_examples=cases, deadline=None)
    @given(rows=ROWS, seed=st.integers(0, 99), length=st.integers(1, 9), is_marked=st.booleans())
    def law(rows: Any, seed: int, length: int, is_marked: bool) -> None:
        place, rows = folder(), [*rows, {"text": "enough for a sample"}]
        if is_marked:  # a list is one sequence for a row encoder, and several for Megatron-LM
            rows = [row for row in rows if isinstance(row["text"], str)]
        path, encoder = write_rows(place / "a.jsonl", rows), Marked() if is_marked else BYTES
        tokenize([path], place / "whole", BYTES.tokenizer, append_eod=True, workers=1)
        file = IndexedDataset(place / "whole_text_document")
        kept = {"cache": place / "cache"}
        gpt = {"order": "gpt", "seed": seed, "sequence_length": length, "num_samples": 9, **kept}
        form: Any = {"sequence_length": 32, "add_extra_token": False, "boundaries": "documents"}
        packs = {"order": "packs", "seed": seed, "order_options": {"long_documents": "split"}}
        packed = PackedOrder(file.sequence_lengths, 32, seed, long_documents="split")
        whole = GPTDataset(file, sequence_length=length, seed=seed, num_samples=9)
        for options, other in ((gpt, whole), (packs | form | kept, None)):
            other = other or GPTDataset(file, order=packed, **form)
            one, numbers = TextDataset(path, encoder, **options), range(len(other))
            batch, tokens = one.batch(numbers), one.tokens(numbers)
            assert tokens.tokens.tolist() == other.tokens(numbers).tokens.tolist()
            for name, array in other.batch(numbers).items():
                if name == "loss_mask" and is_marked:
                    array = array * (batch["labels"] < ord("m"))
                assert batch[name].tolist() == array.tolist(), name

    law()


def test_loaders_resume_with_any_ranks(tmp_path: Path) -> None:
    rows = [{"text": f"row {n} " + "a" * (n % 7)} for n in range(23)]
    path = write_rows(tmp_path / "a.jsonl", rows)

    def loader(rank: int = 0, size: int = 1, rows: Any = path, **options: Any) -> Loader:
        dataset = TextDataset(rows, Marked(), seed=5, sequence_length=12, num_samples=60)
        share = {"data_parallel_rank": rank, "data_parallel_size": size}
        return Loader(dataset, **{"micro_batch_size": 2, **share, **options})

    assert assert_resumes(loader) == 30
    whole = np.concatenate([batch["tokens"] for batch in loader()])
    ranks = [loader(rank, 3, threads=2) for rank in range(3)]
    seen = [next(one)["tokens"] for _ in range(4) for one in ranks]
    state = json.loads(json.dumps(ranks[2].state_dict()))
    assert state["consumed_samples"] == 24
    copies = [pickle.loads(pickle.dumps(loader(rank, 2, micro_batch_size=1))) for rank in range(2)]
    for one in copies:
        one.load_state_dict(state)
    seen += [batch["tokens"] for pair in zip(*copies, strict=True) for batch in pair]
    assert np.concatenate(seen).tolist() == whole.tolist()
    with pytest.raises(ResumeError, match="rows"):
        loader(rows=rows[1:]).load_state_dict(state)


@pytest.mark.parametrize(("encoder", "num_pairs"), [(Marked(), 2), (BYTES, 1)])
def test_a_split_is_a_range_of_documents(tmp_path: Path, encoder: Any, num_pairs: int) -> None:
    rows = [{"text": f"{n:02}"} for n in range(20)]
    parts = open_rows(write_rows(tmp_path / "a.jsonl", rows), cache=tmp_path / "c").split("8,2,0")
    form: Any = {"seed": 1, "sequence_length": 3, "add_extra_token": False}
    for share, part in ((range(16), parts[0]), (range(16, 20), parts[1])):
        expected = sorted([*f"{n:02}".encode(), EOD] for n in share)
        for options in ({}, {"cache": tmp_path / "c"}, {"order": "packs", "cache": tmp_path / "c"}):
            dataset = TextDataset(part, encoder, **form, **options)
            tokens = dataset.tokens(range(len(share))).tokens.reshape(-1, 3)
            assert sorted(tokens.tolist()) == expected
    assert len([*(tmp_path / "c").glob("*.bin")]) == num_pairs  # of all rows, for both parts


def test_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, reason in (
        (b"{", "not valid JSON"),
        (b'{"a": 1}', "no key"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ):
        path.write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
        for encoder, on_error in ((BYTES, "skip"), (Marked(), "quarantine")):
            online = TextDataset(path, encoder, sequence_length=4)
            assert online[0]["tokens"].tolist() == [ord("a"), EOD, 0, 0]
            with pytest.raises(TextError, match=f"sample 1: .*line 3: .*{reason}"):
                online.batch([0, 1, 2])
            cached: Any = partial(TextDataset, path, encoder, sequence_length=4, workers=1)
            with pytest.raises(TextError, match=f"line 3: .*{reason}"):
                cached(cache=tmp_path / "c")
            for _ in range(2):
                kept = cached(cache=tmp_path / "c", on_error=on_error)
                assert kept.tokens([0, 1]).tokens.tolist() == [ord("a"), EOD, ord("b"), EOD]
                counts = {"rows": 3, "tokens": 4, "skipped rows": 1}
                untrained = {} if encoder is BYTES else {"samples without a target": 2}
                assert kept.report == CUT | counts | untrained
    assert len([*(tmp_path / "c").glob("*.quarantine.jsonl")]) == 4
    path.write_text('{"text": ""}\n{"text": "a"}\n{\n')
    tokenize([path], tmp_path / "alone", BYTES.tokenizer, on_error="skip", workers=1)
    assert IndexedDataset(tmp_path / "alone_text_document").num_documents == 1
    for encoder, count in ((BYTES, 1), (Marked(), 2)):  # a text without tokens is a bad one
        form: Any = {"cache": tmp_path / "c", "on_error": "skip", "workers": 1}
        assert len(TextDataset(path, encoder, sequence_length=4, **form)) == count


def test_rows_of_memory_with_values_that_json_lacks(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "a" * 99, "at": date(2020, 1, 1), "n": np.int64(3)}]
    for place in (None, tmp_path):
        source = open_rows(rows, max_document_size=20)
        dataset = TextDataset(source, BYTES, sequence_length=4, cache=place, workers=1)
        assert dataset[0]["tokens"].tolist() == [ord("a")] * 4
        wrong = [*rows, {"text": ("a", "b")}]
        with pytest.raises(TextError, match='list, row 1: the value of "text"'):
            TextDataset(wrong, BYTES, sequence_length=4, cache=place, workers=1).batch([1])
    with pytest.raises(TextError, match='list, row 0: the value of "text"'):
        TextDataset([{"text": 5}], Marked(), sequence_length=4, cache=tmp_path, workers=1)
    wrong += [{"text": 5}, "no row"]
    form: Any = {"sequence_length": 4, "cache": tmp_path, "workers": 1}
    cached = TextDataset(wrong, BYTES, on_error="quarantine", **form)
    assert (len(cached), cached.report["skipped rows"]) == (1, 3)
    [path] = tmp_path.glob("*.quarantine.jsonl")
    places = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["file"], one["line"]) for one in places] == [("list", n) for n in (1, 2, 3)]
    assert "is 'no row'; a dictionary" in places[2]["reason"]


def test_rows_of_memory_go_to_the_encoder_as_they_are(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: list[Any] = [{"text": "a", "again": np.bool_(False), "messages": chat, 5: "x"}] * 600
    rows[0] = {**rows[0], "at": date(2020, 1, 1)}
    for encoder in (Marked(), ChatEncoder(BYTES.tokenizer)):
        online = TextDataset(rows, encoder, sequence_length=4)
        for workers in (1, 2):
            form: Any = {"sequence_length": 4, "cache": tmp_path / f"{workers}", "workers": workers}
            cached = TextDataset(rows, encoder, **form)
            assert_same_tokens(online.tokens([0, 599]), cached.tokens([0, 599]))
    for wrong, reason in (
        ({"content": date(2020, 1, 1)}, "content is .*date"),
        ({"x": {"y": {1: "a"}}}, r"x\.y has the key 1"),
        ({"x": [math.nan]}, r"x\[0\] is nan"),
    ):
        rows[0]["messages"] = [chat[0], {**chat[1], **wrong}]
        for cache in (None, tmp_path):
            with pytest.raises(TextError, match=rf"list, row 0: messages\[1\]\.{reason}"):
                TextDataset(rows, encoder, **form | {"cache": cache})[0]


def test_a_part_of_a_file_has_its_limit_and_its_lines(tmp_path: Path) -> None:
    texts = ["x", "é" * 150, "y", "z" * 600, ""]  # the second has 900 bytes as escapes
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]))
    rows = open_rows(tmp_path / "a.jsonl", cache=tmp_path, max_document_size=500)
    form: Any = {"sequence_length": 4, "cache": tmp_path, "workers": 1, "on_error": "quarantine"}
    dataset = TextDataset(rows.range(1), Marked(), **form)
    assert dataset.tokens(range(3)).ends.tolist() == [5, 7, 7]
    assert dataset.report["cut documents"] == 1
    [path] = tmp_path.glob("*.quarantine.jsonl")
    entries = [*map(json.loads, path.read_text().splitlines())]
    reasons = {4: "longer than 500 bytes", 6: "not valid JSON"}
    assert [one["line"] for one in entries] == [*reasons]
    for one in entries:
        assert one["file"] == str(tmp_path / "a.jsonl")
        assert reasons[one["line"]] in one["reason"]


def test_the_report_counts_what_was_read(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("", "zzz", "aazz", "a", "abcdefghi")]
    dataset = TextDataset(rows, Marked(), sequence_length=4)
    assert dataset.report == {}
    dataset.batch([0, 1, 2, 3, 4])
    # Of "zzz" nothing is trained on; the first token, and EOD, are never trained on.
    own = {"cut documents": 1, "tokens behind the cut": 5, "samples without a target": 3}
    assert dataset.report == {"rows": 5, "tokens": 21, **own}
    cached = TextDataset(rows, Marked(), sequence_length=4, cache=tmp_path)
    assert cached.report == {"rows": 5, "tokens": 21}
    cached.batch([0, 1, 2, 3, 4])
    assert cached.report == dataset.report
    assert TextDataset(rows, BYTES, sequence_length=4, seed=1)[0]["tokens"].shape == (4,)


def test_a_loader_encodes_rows_of_several_steps_at_once(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": f"{n:03}"} for n in range(600)]
    rows[550] = {"no": "text"}
    path = write_rows(tmp_path / "a.jsonl", rows)
    sizes = []

    class Counting(Marked):
        def encode(self, rows: Any) -> Any:
            sizes.append(len(rows))
            return super().encode(rows)

    dataset = TextDataset(path, Counting(), sequence_length=4, add_extra_token=False)
    whole = b"".join(b"%03d" % n for n in range(550))
    for source, threads in itertools.product((dataset, BlendedDataset([dataset])), (1, 3)):
        sizes.clear()
        loader = Loader(source, micro_batch_size=5, threads=threads)
        seen = [next(loader)["tokens"][:, :3] for _ in range(110)]
        assert bytes(np.concatenate(seen).astype(np.uint8).ravel()) == whole
        with pytest.raises(TextError, match="line 551: there is no key"):
            next(loader)
        assert sorted(sizes)[-2] >= 64  # the rows of the block of the bad one are encoded alone
        loader.close()


def test_threads_encode_at_once_and_give_the_same_samples() -> None:
    barrier, num_met = threading.Barrier(2), 0

    class Meeting(Marked):
        def encode(self, rows: Any) -> Any:
            nonlocal num_met
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(10)
                num_met += 1
            return super().encode(rows)

    rows = [{"text": f"{n:04}"} for n in range(1024)]
    dataset = TextDataset(rows, Meeting(), seed=1, sequence_length=4, threads=2)
    seen = np.concatenate([batch["tokens"] for batch in Loader(dataset, micro_batch_size=64)])
    assert num_met >= 2
    expected = TextDataset(rows, Marked(), seed=1, sequence_length=4).batch(range(1024))
    np.testing.assert_array_equal(seen, expected["tokens"])


def test_rows_that_become_several_documents_need_the_cache(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b", "again": True}]
    with pytest.raises(TextError, match=r"list, row 1 becomes several.*cache"):
        TextDataset(rows, Marked(), sequence_length=4).batch([1])
    cached = TextDataset(rows, Marked(), sequence_length=4, cache=tmp_path)
    assert cached.tokens([0, 1, 2]).tokens[::2].tolist() == [*b"abb"]
    rows += [{"text": "c"}, {"text": "d"}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    for source, on_error, expected in (
        (rows, "stop", [b"abb", b"cd"]),
        (path, "stop", [b"abb", b"cd"]),
        (path, "skip", [b"abb", b"ce"]),
    ):
        if on_error == "skip":  # as many documents as rows
            path.write_text(path.read_text().replace('{"text": "d"}', '{\n{"text": "e"}'))
        parts, found = open_rows(source, cache=tmp_path).split("1,1"), []
        for part in parts[:2]:
            options: Any = {"cache": tmp_path, "on_error": on_error, "sequence_length": 4}
            dataset = TextDataset(part, Marked(), **options)
            found.append(bytes(int(dataset[n]["tokens"][0]) for n in range(len(dataset))))
        assert found == expected


# ---- the cache: kills, several processes, changes ----


@pytest.mark.parametrize("limit", [None, 4000])
def test_weak_and_full_file_systems(tmp_path: Path, limit: int | None) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": f"row {n} " * 40} for n in range(400)])
    code = (
        "import json, resource, sys; from tests.online.test_text_dataset import *; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit or -1}, -1)); "
        f"rows = [*map(json.loads, open({str(tmp_path / 'a.jsonl')!r}))]; "
        f"dataset = build(rows, Path({str(tmp_path / 'cache')!r}))"
    )
    options: Any = {"stderr": subprocess.PIPE, "text": True, "env": no_flock(tmp_path)}
    count = 3 if limit is None else 1
    processes = [subprocess.Popen([sys.executable, "-c", code], **options) for _ in range(count)]
    errors = [one.communicate(timeout=100)[1] for one in processes]
    if limit is None:
        assert [one.returncode for one in processes] == [0, 0, 0], errors
    else:
        assert re.search("CacheError: .*cache/rows-.*cannot be written.*Free space", errors[0])


def build(path: Any, cache: Path, workers: int = 1) -> TextDataset:
    options: Any = {"order": "gpt", "seed": 1, "sequence_length": 8, "workers": workers}
    return TextDataset(path, Marked(), cache=cache, **options)


def contents(cache: Path) -> dict[str, bytes]:
    endings = (".bin", ".idx", ".npy")
    return {path.name: path.read_bytes() for path in cache.iterdir() if path.suffix in endings}


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


def test_one_of_three_processes_builds_the_cache(tmp_path: Path) -> None:
    rows = [{"text": f"row {n} " * 40} for n in range(16_000)]  # several chunks of 1 MB
    path, cache = write_rows(tmp_path / "a.jsonl", rows), tmp_path / "cache"
    build(path, tmp_path / "whole")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=build, args=(path, cache, 2)) for _ in range(3)]
    for one in processes:
        one.start()
    end = time.monotonic() + 60
    while not finished_tasks(cache) and any(one.is_alive() for one in processes):
        assert time.monotonic() < end
        time.sleep(0.01)
    processes[0].kill()  # whether it builds or waits
    for one in processes:
        one.join(100)
    assert [one.exitcode for one in processes[1:]] == [0, 0]
    assert contents(cache) == contents(tmp_path / "whole")


def test_a_cache_is_found_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a" * 30}, {"text": "b"}])
    cache = tmp_path / "cache"
    first = build(path, cache).tokens([0])
    os.utime(path, ns=(0, 0))
    moved = path.rename(tmp_path / "b.jsonl")
    cache = cache.rename(tmp_path / "elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr("millrace.online.cached_rows.tokenize", None)
        assert_same_tokens(build(moved, cache).tokens([0]), first)
    [bin_] = cache.glob("*.bin")
    bin_.write_bytes(bin_.read_bytes()[:-2])  # damaged: made again
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


def show_temporary(path: Path) -> None:
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
    code = f"from tests.online.test_text_dataset import *; show_temporary(Path({str(path)!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "millrace-" in result.stdout
    assert not Path(result.stdout.strip()).exists()


def test_wrong_arguments(tmp_path: Path) -> None:
    rows = [{"text": "a"}]
    for options, problem in (
        ({"encoder": BYTES.tokenizer}, "encoder is a Tokenizer: give TextRows"),
        ({"on_error": "skip"}, 'on_error="skip" needs all rows'),
        ({"order": "random", "seed": 1}, "order must be one of gpt, packs"),
        ({"order": "gpt"}, "seed, which this order needs,"),
        ({"order": "packs", "seed": 1, "order_options": {"room": 1}}, "no option room"),
        ({"order": "gpt", "seed": 1, "order_options": {"room": 1}}, "order_options"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"sequence_length": 0}, "sequence_length"),
        ({"rows": iter(rows)}, "StreamDataset"),
        ({"rows": [], "num_samples": 1}, "num_samples is 1, but there are no rows"),
        ({"order_options": {"room": 1}}, "order_options are .*give order"),
    ):
        values: Any = {"rows": rows, "encoder": BYTES, "sequence_length": 4, **options}
        with pytest.raises(ConfigError, match=problem):
            TextDataset(values.pop("rows"), values.pop("encoder"), **values)
    dataset = TextDataset(rows, BYTES, sequence_length=np.int64(2))
    assert dataset[np.int64(0)]["tokens"].tolist() == [ord("a"), EOD]
