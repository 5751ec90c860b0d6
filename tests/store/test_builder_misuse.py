"""Builders under threads, forks, signals and odd arguments."""

import contextlib
import gc
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DataError, IndexedDataset, IndexedDatasetBuilder, MillraceError
from millrace.provenance import OriginsWriter
from millrace.store import finalize_together, verify
from tests.store.pairs import names, open_in, output_of, run

# ---- Ctrl-C, then "finalise what there is" ----


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an open file
@pytest.mark.parametrize("kind", ["sequences", "documents", "many", "merge"])
def test_a_pair_finalised_after_ctrl_c_is_whole(tmp_path: Path, kind: str) -> None:
    with IndexedDatasetBuilder(tmp_path / "source") as source:
        for number in range(20_000):
            source.add_document([number])
    tokens = np.arange(700_000, dtype=np.int32)  # more than is checked at a time
    draw = random.Random(kind)
    published = 0
    for number in range(60):
        prefix = tmp_path / f"data{number % 2}"
        builder = IndexedDatasetBuilder(prefix)
        try:
            with interrupted_after(draw.random() * 0.03 + 1e-4):
                end = time.monotonic() + 0.5  # Python drops an interrupt that meets a finalizer
                while time.monotonic() < end:
                    if kind == "sequences":
                        builder.add_sequence(tokens[: draw.randrange(3000)])
                        builder.end_document()
                    elif kind == "documents":
                        builder.add_document(list(range(draw.randrange(300))))
                    elif kind == "many":
                        builder.add_documents(tokens, [350_000, 350_000])
                    else:
                        builder.add_index(tmp_path / "source")
        except KeyboardInterrupt:
            pass
        with contextlib.suppress(ConfigError):  # a document is open, or the builder is closed
            builder.end_document()
        with contextlib.suppress(ConfigError), builder:
            builder.finalize()
            published += 1
        if (tmp_path / f"data{number % 2}.idx").exists():
            assert verify([prefix])[0].problems == []
    if kind in ("sequences", "documents"):
        assert published > 0
    assert not [name for name in names(tmp_path) if ".tmp" in name or ".new" in name]


def test_written_files_are_compared_before_they_are_published(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        builder.add_document([1, 2])
    builder = IndexedDatasetBuilder(tmp_path / "data")
    builder.add_document([3])
    (temporary,) = tmp_path.glob("data.bin.*.tmp")
    with open(temporary, "ab") as file:
        file.write(b"not ours")
    with pytest.raises(DataError, match=r"the \.bin has 8.*nothing is published"):
        builder.finalize()
    assert names(tmp_path) == ["data.bin", "data.idx"]
    assert IndexedDataset(tmp_path / "data")[0].tolist() == [1, 2]


# ---- arguments ----


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.float32])
@pytest.mark.parametrize(
    "tokens",
    [
        (1, 2, 3),
        [np.int64(1), np.uint8(2), 3],
        np.array([1, 2, 3], ">i4"),
        np.array([1, 0, 2, 0, 3])[::2],
        np.frombuffer(b"x" + np.array([1, 2, 3], np.int32).tobytes(), np.int32, offset=1),
    ],
    ids=["tuple", "NumPy's ints", "big-endian", "strided", "unaligned"],
)
def test_tokens_of_every_kind_are_accepted(tmp_path: Path, dtype: Any, tokens: Any) -> None:
    lengths = [np.int64(2), np.uint8(1)]
    with IndexedDatasetBuilder(tmp_path / "data", dtype) as builder:
        builder.add_document(tokens, lengths=lengths)
        builder.add_documents(tokens, lengths)
        builder.add_sequence(tokens)
        builder.end_document()
    dataset = IndexedDataset(tmp_path / "data")
    assert [s.tolist() for s in dataset] == [[1, 2], [3], [1, 2], [3], [1, 2, 3]]
    assert dataset.document_indices.tolist() == [0, 2, 3, 4, 5]


def test_a_token_that_uses_the_builder_itself_is_harmless(tmp_path: Path) -> None:
    """Its `__index__` adds documents, and grows the buffer of its own document."""
    builder = IndexedDatasetBuilder(tmp_path / "data")

    class Busy:
        def __index__(self) -> int:
            builder.add_document(np.arange(300_000))
            return 9

    for tokens in ([1, Busy(), 2], (Busy(),)):
        builder.add_document(tokens)  # type: ignore[arg-type]
    builder.finalize()
    lengths = IndexedDataset(tmp_path / "data").sequence_lengths.tolist()
    assert lengths.count(300_000) == 2
    assert verify([tmp_path / "data"])[0].problems == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("data.bin", {}, "give it without .bin"),
        ("data.idx", {}, "give it without .idx"),
        ("tokens", {}, "tokens.bin is a folder"),
        ("index", {}, "index.idx is a folder"),
        ("sidecar", {}, "sidecar.info.json is a folder"),
        ("data", {"provenance": {"path": Path("x")}}, "cannot be stored as JSON"),
        ("data", {"provenance": {"a": {1, 2}}}, "cannot be stored as JSON"),
        ("data", {"provenance": [1]}, "a dict is needed"),
        ("data", {"dtype": "no dtype"}, "cannot be stored"),
        ("data", {"dtype": np.uint32}, "uint32 cannot be stored"),
        ("none/data", {}, "is not a folder"),
        (3, {}, "must be a path"),
        ("data", {"multimodal": 1}, "multimodal must be True or False, not 1"),
        ("data", {"checksums": 1}, "checksums must be True or False, not 1"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, name: Any, options: Any, message: str
) -> None:
    folders = ["index.idx", "sidecar.info.json", "tokens.bin"]
    for folder in folders:
        (tmp_path / folder).mkdir()
    with pytest.raises(ConfigError, match=re.escape(message)):
        IndexedDatasetBuilder(name if name == 3 else tmp_path / name, **options)
    assert names(tmp_path) == folders


# ---- several builders ----


def test_of_several_builders_all_are_published_or_none(tmp_path: Path) -> None:
    def start(token: int) -> list[IndexedDatasetBuilder]:
        builders = [IndexedDatasetBuilder(tmp_path / name) for name in ("a", "b", "c")]
        for builder in builders:
            builder.add_document([token])
        return builders

    def first_tokens() -> list[int]:
        return [int(IndexedDataset(tmp_path / name)[0][0]) for name in ("a", "b", "c")]

    finalize_together(start(1))
    assert first_tokens() == [1, 1, 1]
    builders = start(2)
    builders[1].add_sequence([2])
    with pytest.raises(ConfigError, match="call end_document"):
        finalize_together(builders)
    builders[1].end_document()
    finalize_together(builders)  # the refusal closed none of them
    assert first_tokens() == [2, 2, 2]
    for broken in range(3):
        builders = start(3)
        os.mkdir(builders[broken]._pair[1].idx)
        with pytest.raises(IsADirectoryError):
            finalize_together(builders)
        assert first_tokens() == [2, 2, 2]
        for path in tmp_path.glob("*.tmp"):
            path.rmdir()
        assert names(tmp_path) == ["a.bin", "a.idx", "b.bin", "b.idx", "c.bin", "c.idx"]


# ---- threads ----


def test_threads_take_turns(tmp_path: Path) -> None:
    code = """
import sys, threading, numpy as np
from millrace import IndexedDatasetBuilder
builder = IndexedDatasetBuilder(sys.argv[1], np.int32, checksums=True)
def add(number):
    for size in range(400):
        builder.add_document([number] * (size % 50))
        builder.add_document(np.full(size * 37, number))
        builder.add_documents(np.full(3000, number), [1000, 2000])
threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
sys.setswitchinterval(1e-5)
[t.start() for t in threads]; [t.join() for t in threads]
builder.finalize()
"""
    output_of(code, tmp_path / "data")
    dataset = IndexedDataset(tmp_path / "data")
    assert verify([tmp_path / "data"])[0].problems == []
    assert dataset.num_documents == 4 * 400 * 4
    assert all(len(np.unique(sequence)) <= 1 for sequence in dataset)


@pytest.mark.parametrize("end", ["abort", "finalize"])
def test_an_end_in_another_thread_ends_every_call(tmp_path: Path, end: str) -> None:
    """`abort` and `finalize` wait for a running call; later calls are refused."""
    builder = IndexedDatasetBuilder(tmp_path / "data")

    def add() -> None:
        while True:
            builder.add_documents(np.arange(600_000), [600_000])

    with ThreadPoolExecutor() as pool:
        adding = pool.submit(add)
        while builder.num_documents < 3:
            pass
        getattr(builder, end)()
        with pytest.raises(MillraceError, match="is closed"):
            adding.result(30)
    assert (verify([tmp_path / "data"])[0].problems == []) == (end == "finalize")


def test_a_call_from_within_a_call_is_refused(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "data")
    refusal = pytest.raises(ConfigError, match="from within one of its own calls")
    with builder._turns.take(), refusal:
        builder.add_document((1, 2))
    builder.add_document([3])
    builder.finalize()
    assert len(IndexedDataset(tmp_path / "data")) == 1


# ---- forks ----


def test_a_forked_child_leaves_its_parents_builder_alone(tmp_path: Path) -> None:
    code = """
import os, sys, numpy as np
from millrace import IndexedDatasetBuilder, MillraceError
builder = IndexedDatasetBuilder(sys.argv[1], np.int32)
builder.add_document(np.arange(1000))
builder._flush()
child = os.fork()
if child == 0:
    for use in (lambda: builder.add_document([1]), lambda: builder.add_document((1,)),
                lambda: builder.add_documents([1], [1]), builder.end_document, builder.finalize,
                lambda: IndexedDatasetBuilder(sys.argv[1])):
        try:
            use()
        except MillraceError as error:
            continue
        sys.exit(3)
    builder.abort()
    sys.exit(0)  # a normal exit, with all its clean-up
assert os.waitpid(child, 0)[1] == 0
builder.add_document([7])
builder.finalize()
"""
    output_of(code, tmp_path / "data")
    assert [len(s) for s in IndexedDataset(tmp_path / "data")] == [1000, 1]
    assert names(tmp_path) == ["data.bin", "data.idx"]


# ---- leftovers ----


def add_much(builder: IndexedDatasetBuilder) -> None:
    builder.add_documents(np.zeros(1_200_000, np.int32), np.ones(1_200_000, np.int64))  # spills


@pytest.mark.parametrize("end", ["finalize", "abort", "drop"])
def test_an_ended_builder_keeps_no_descriptor_and_no_file(tmp_path: Path, end: str) -> None:
    builder: IndexedDatasetBuilder | None = IndexedDatasetBuilder(tmp_path / "data")
    assert builder is not None
    add_much(builder)
    assert len(open_in(tmp_path)) >= 2
    if end == "drop":
        del builder
        gc.collect()
    else:
        getattr(builder, end)()
        assert builder.num_tokens == 1_200_000
    assert open_in(tmp_path) == set()
    assert names(tmp_path) == (["data.bin", "data.idx"] if end == "finalize" else [])


_DAEMON = """
import sys, threading, time
import numpy as np
from millrace import IndexedDatasetBuilder
builder = IndexedDatasetBuilder(sys.argv[1], np.int32, checksums=True)
tokens = np.arange(3_000_000)
def add():
    while True:
        builder.add_document(tokens)
threading.Thread(target=add, daemon=True).start()
time.sleep(float(sys.argv[2]))
"""


def test_a_thread_that_adds_until_the_process_ends_leaves_nothing(tmp_path: Path) -> None:
    for round_ in range(8):
        result = run(_DAEMON, tmp_path / "data", 0.05 + 0.01 * round_)
        assert (result.returncode, result.stderr, names(tmp_path)) == (0, "", [])


def test_the_files_stay_where_the_builder_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with IndexedDatasetBuilder("data") as builder:
        builder.add_document([1, 2])
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert names(tmp_path) == ["data.bin", "data.idx", "elsewhere"]
    assert names(tmp_path / "elsewhere") == []


_STORM = """
import os, signal, sys, threading, time
import numpy as np
from millrace import IndexedDatasetBuilder, MillraceError
prefix, main, rounds = sys.argv[1], threading.main_thread().ident, int(sys.argv[2])

def insist(function):
    while True:
        try:
            return function()
        except KeyboardInterrupt:
            pass

def press(delay, stop):
    time.sleep(delay)
    while not stop.is_set():
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(2e-4)

for number in range(rounds):
    stop = threading.Event()
    thread = threading.Thread(target=press, args=(0.0002 * (number % 50), stop))
    builder = IndexedDatasetBuilder(prefix, np.int32)
    try:
        thread.start()
        while True:
            builder.add_document(np.arange(100_000))
    except KeyboardInterrupt:
        pass
    for step in (builder.abort, stop.set, thread.join):
        insist(step)
    builder = None
    left = os.listdir(os.path.dirname(prefix))
    assert not left, (number, left)
"""


def test_ctrl_c_again_and_again_leaves_nothing(tmp_path: Path) -> None:
    result = run(_STORM, tmp_path / "data", 100)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("character", ["x", "é"])
def test_a_name_that_is_too_long_for_a_sidecar_is_refused_before_any_work(
    tmp_path: Path, character: str
) -> None:
    """The longest name is that of the origins' temporary; the limit counts bytes."""
    longest = tmp_path / (character * (222 // len(character.encode())))
    with IndexedDatasetBuilder(longest, checksums=True) as builder:
        builder.add_document([1, 2])
    with OriginsWriter(longest) as origins:
        origins.add(["web"], [0], [1], [-1])
    size = len(longest.name.encode()) + 1
    with pytest.raises(ConfigError, match=rf"has {size} bytes; in .*, 222 are possible"):
        IndexedDatasetBuilder(f"{longest}x")
    assert len(names(tmp_path)) == 4
