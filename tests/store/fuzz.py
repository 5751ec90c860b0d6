"""Damaged token files by the hundred thousand: `python -m tests.store.fuzz --cases 100000`.

A case is a small valid pair, mutated, and everything that a reader may do with it. What must come
of it is decided by a parser of this module's own, which knows the format and nothing of millrace:

- a pair that is valid by the format is read exactly as the format says, and `verify` is content
  (also where the mutation has made one valid pair into another: without checksums no one can tell);
- of any other pair, and of any whose sidecar has checksums that the bytes no longer match, `verify`
  names a problem; reads and samples raise MillraceError or IndexError, or give what lies in the
  file, the same by every access path; a merge refuses it;
- no case ends the process, hangs, raises anything else, or takes memory beyond the files' size.

Cases run in processes of their own, so that a crash is a finding with a number. One case again:
`python -m tests.store.fuzz --seed SEED --only NUMBER`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import itertools
import json
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import millrace
from millrace.store import DTYPES, publish, verify

ROOT = Path(__file__).parent.parent.parent
HEADER = struct.Struct("<9sQBQQ")
GROUP = 32  # cases that start from the same two pairs: making pairs costs more than a case
MAX_READS = 64  # sequences of a mutant that are read one by one
TIME_LIMIT = (
    20.0  # seconds for a case, before it counts as a hang; a case takes a millisecond or two
)
ADDRESS_SPACE = 256 << 20  # bytes that all cases of a process may take beyond its start
RESIDENT = 16 << 20  # bytes by which one case may raise the peak of the process
TRACED_EVERY = 16  # cases: tracing every allocation makes a case three times as slow
VERIFY_BUFFER = 4 << 20  # bytes: a block, which each thread of verify holds for a file of any size
IS_SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # its own memory exceeds all limits
ALLOWED = (millrace.MillraceError, IndexError)

Sequence_ = NDArray[Any]


class FindingError(AssertionError):
    """A wrong behaviour of the library."""


# ---- pairs, and what they hold by the format ----


@dataclasses.dataclass
class Pair:
    """The files of a pair, as bytes; a file that is None is missing."""

    bin: bytes | None
    idx: bytes | None
    info: bytes | None

    def copy(self) -> Pair:
        return dataclasses.replace(self)


@dataclasses.dataclass
class Content:
    """The content of a valid pair."""

    dtype: np.dtype[Any]
    sequences: list[Sequence_]
    document_indices: list[int]
    modes: list[int] | None


def parse(pair: Pair) -> Content | None:
    """The content of the pair by the format; None if it is not valid."""
    data, index = pair.bin, pair.idx
    if data is None or index is None or len(index) < HEADER.size:
        return None
    magic, version, code, count, entries = HEADER.unpack_from(index)
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in DTYPES or entries < 1:
        return None
    rest = len(index) - HEADER.size - 12 * count - 8 * entries
    if rest not in (0, count):
        return None
    place = HEADER.size
    lengths = np.frombuffer(index, "<i4", count, place).tolist()
    pointers = np.frombuffer(index, "<i8", count, place + 4 * count).tolist()
    documents = np.frombuffer(index, "<i8", entries, place + 12 * count).tolist()
    modes = np.frombuffer(index, "<i1", rest, place + 12 * count + 8 * entries).tolist()
    dtype, end = DTYPES[code], 0
    for length, pointer in zip(lengths, pointers, strict=True):
        if length < 0 or pointer != end:
            return None
        end += length * dtype.itemsize
    if end != len(data) or documents[0] != 0 or documents[-1] != count:
        return None
    if any(left > right for left, right in itertools.pairwise(documents)):
        return None
    return Content(
        dtype=dtype,
        sequences=[
            np.frombuffer(data, dtype, length, pointer) if length else np.empty(0, dtype)
            for length, pointer in zip(lengths, pointers, strict=True)
        ],
        document_indices=documents,
        modes=modes if rest else None,
    )


def make_pair(draw: random.Random, folder: Path, like: Content | None = None) -> Pair:
    """A pair by the builder; `like`: the pair whose dtype and lengths it shares."""
    prefix = folder / "made"
    if like is None:
        dtype = draw.choice(list(DTYPES.values()))
        documents = [
            [draw.choice((0, 1, 2, 3, 5, 9, 17)) for _ in range(draw.choice((0, 1, 1, 1, 2, 4)))]
            for _ in range(draw.choice((0, 1, 2, 3, 6, 12)))
        ]
        multimodal = draw.random() < 0.3
    else:
        dtype, multimodal = like.dtype, like.modes is not None
        ends, lengths = like.document_indices, [len(part) for part in like.sequences]
        documents = [lengths[a:b] for a, b in itertools.pairwise(ends)]
    total = sum(map(sum, documents))
    if dtype.kind == "f":
        tokens = np.array([draw.gauss(0, 1e6) for _ in range(total)], dtype)
    else:
        limits = np.iinfo(dtype)
        top = min(limits.max, draw.choice((10, 1000, limits.max)))
        tokens = np.array([draw.randint(0, top) for _ in range(total)], dtype)
    modes = [[draw.randint(-128, 127) for _ in lengths] for lengths in documents]
    place = 0
    builder = millrace.IndexedDatasetBuilder(
        prefix, dtype, multimodal=multimodal, checksums=draw.random() < 0.5
    )
    with builder:
        for number, lengths in enumerate(documents):
            part = tokens[place : place + sum(lengths)]
            builder.add_document(part, lengths, modes[number] if multimodal else None)
            place += sum(lengths)
    pair = Pair(
        *(read_and_unlink(f"{prefix}{suffix}") for suffix in (".bin", ".idx", ".info.json"))
    )
    content = parse(pair)
    if content is None or content.document_indices[-1] != sum(map(len, documents)):
        raise FindingError("the builder wrote an invalid pair")
    if b"".join(part.tobytes() for part in content.sequences) != tokens.tobytes():
        raise FindingError("the builder wrote other tokens than it was given")
    if multimodal and content.sequences and content.modes != [m for part in modes for m in part]:
        raise FindingError("the builder wrote other modes than it was given")
    return pair


def read_and_unlink(path: str) -> bytes | None:
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    os.unlink(path)
    return data


# ---- mutations: each changes a pair in place, and returns its own name ----

COUNTS = (0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63)
INT32 = (-1, 0, 1, 2, -(2**31), 2**31 - 1, -2, 7, 1000, 10**6, -1000)
INT64 = (-1, 0, 1, 2, 3, 4, 8, 2**31, 2**32, 2**40, 2**62, -(2**63), 2**63 - 1, -8, 10**6)


class Mutator:
    """Mutations of one pair, drawn from one generator."""

    def __init__(self, draw: random.Random, pair: Pair, other: Pair) -> None:
        self.draw, self.pair, self.other = draw, pair, other
        self.names: list[str] = []

    def mutate(self) -> None:
        kinds = (
            (self.flip, 10),
            (self.truncate, 5),
            (self.extend, 4),
            (self.swap, 6),
            (self.count, 8),
            (self.dtype_code, 3),
            (self.length, 9),
            (self.pointer, 9),
            (self.last_pointer_and_size, 4),
            (self.document, 9),
            (self.garbage, 4),
            (self.zero, 4),
            (self.move, 4),
            (self.drop_or_add_modes, 2),
            (self.sidecar, 8),
            (self.remove, 1),
            (self.nothing, 2),
        )
        functions, weights = zip(*kinds, strict=True)
        for _ in range(self.draw.choice((1, 1, 1, 1, 2, 2, 3))):
            function: Callable[[], str] = self.draw.choices(functions, weights)[0]
            self.names.append(f"{function.__name__}: {function()}")

    def _file(self) -> str:
        return self.draw.choices(("bin", "idx", "info"), (2, 6, 1))[0]

    def _get(self, name: str) -> bytearray:
        return bytearray(getattr(self.pair, name) or b"")

    def _set(self, name: str, data: bytes | bytearray) -> None:
        if getattr(self.pair, name) is not None:
            setattr(self.pair, name, bytes(data))

    def _place(self, data: Sequence[Any] | bytearray) -> int:
        return self.draw.randrange(len(data)) if len(data) else 0

    def nothing(self) -> str:
        return ""

    def flip(self) -> str:
        name = self._file()
        data = self._get(name)
        places = [self._place(data) for _ in range(self.draw.choice((1, 1, 2, 8)))]
        for place in places:
            if data:
                data[place] ^= 1 << self.draw.randrange(8)
        self._set(name, data)
        return f"{name} {places}"

    def truncate(self) -> str:
        name = self._file()
        data = self._get(name)
        size = (
            self._place(data)
            if self.draw.random() < 0.6
            else max(0, len(data) - self.draw.choice((1, 2, 4, 8)))
        )
        self._set(name, data[:size])
        return f"{name} to {size}"

    def extend(self) -> str:
        name = self._file()
        data = self._get(name)
        size = self.draw.choice((1, 2, 3, 4, 8, 12, 100, 5000))
        more = (bytes(size), self.draw.randbytes(size), bytes(data[:size]))[self.draw.randrange(3)]
        self._set(name, data + more)
        return f"{name} by {len(more)}"

    def swap(self) -> str:
        names = self.draw.choice((("bin",), ("idx",), ("bin", "idx"), ("info",)))
        for name in names:
            setattr(self.pair, name, getattr(self.other, name))
        return " ".join(names)

    def _counts(self) -> tuple[int, int] | None:
        """The header's counts, if they fit the file."""
        data = self._get("idx")
        if len(data) < HEADER.size:
            return None
        count, entries = HEADER.unpack_from(data)[3:]
        if HEADER.size + 12 * count + 8 * entries > len(data):
            return None
        return count, entries

    def count(self) -> str:
        data, counts = self._get("idx"), self._counts()
        if counts is None:
            return "no header"
        kind = self.draw.randrange(4)
        count, entries = counts
        if kind == 0:
            count = self.draw.choice(COUNTS)
        elif kind == 1:
            entries = self.draw.choice(COUNTS)
        elif kind == 2:
            count, entries = max(0, count + self.draw.randint(-3, 3)), entries
        else:  # the file's size stays right: two sequences take what three entries take
            step = self.draw.choice((-2, -1, 1, 2))
            count, entries = max(0, count + 2 * step), max(0, entries - 3 * step)
        struct.pack_into("<QQ", data, 18, count % 2**64, entries % 2**64)
        self._set("idx", data)
        return f"{count} sequences, {entries} entries"

    def dtype_code(self) -> str:
        data = self._get("idx")
        code = self.draw.randrange(12)
        if len(data) > 17:
            data[17] = code
        self._set("idx", data)
        return str(code)

    def _column(self, name: str) -> tuple[bytearray, str, int, int]:
        """The index, a column's type, its first byte and its number of entries."""
        count, entries = self._counts() or (0, 0)
        return {
            "lengths": (self._get("idx"), "<i", HEADER.size, count),
            "pointers": (self._get("idx"), "<q", HEADER.size + 4 * count, count),
            "documents": (self._get("idx"), "<q", HEADER.size + 12 * count, entries),
        }[name]

    def _change(self, name: str, extremes: tuple[int, ...]) -> str:
        data, code, start, count = self._column(name)
        if count == 0:
            return "no entry"
        width, bits = struct.calcsize(code), 8 * struct.calcsize(code)
        at = [start + width * self.draw.randrange(count) for _ in range(2)]
        values = [struct.unpack_from(code, data, place)[0] for place in at]
        kind = self.draw.randrange(4)
        if kind == 0:
            values[0] = self.draw.choice(extremes)
        elif kind == 1:
            values[0] += self.draw.choice((-8, -4, -2, -1, 1, 2, 4, 8))
        elif kind == 2:  # out of order
            values.reverse()
        else:  # the sum stays right
            step = self.draw.choice((1, 2, 5, 2**30, -(2**30)))
            values = [values[0] + step, values[1] - step]
        for place, value in zip(at, values, strict=True):
            wrapped = (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
            struct.pack_into(code, data, place, wrapped)
        self._set("idx", data)
        return f"{name} at {at}: {values}"

    def length(self) -> str:
        return self._change("lengths", INT32)

    def pointer(self) -> str:
        return self._change("pointers", (*INT64, len(self._get("bin")), len(self._get("bin")) - 1))

    def document(self) -> str:
        return self._change("documents", INT64)

    def last_pointer_and_size(self) -> str:
        """The end of the last sequence fits the `.bin`, but not what lies before it."""
        data, code, start, count = self._column("pointers")
        if count == 0:
            return "no entry"
        step = self.draw.choice((-9, -4, -3, -2, -1, 1, 2, 3, 4, 8))
        tokens = self._get("bin")
        if len(tokens) + step < 0:
            return "too small"
        place = start + 8 * (count - 1)
        struct.pack_into(code, data, place, struct.unpack_from(code, data, place)[0] % 2**62 + step)
        self._set("idx", data)
        self._set("bin", tokens[:step] if step < 0 else tokens + bytes(step))
        return str(step)

    def garbage(self) -> str:
        name = self._file()
        data = self._get(name)
        keep = self.draw.choice((0, 0, 9, 17, 18, 34, self._place(data)))
        size = self.draw.choice((len(data), len(data), self.draw.randrange(300)))
        self._set(name, data[:keep] + self.draw.randbytes(max(0, size - keep)))
        return f"{name}, {keep} of {size} bytes kept"

    def zero(self) -> str:
        name = self._file()
        data = self._get(name)
        start = self._place(data)
        stop = min(len(data), start + self.draw.choice((1, 4, 8, 16, 100, 4096)))
        data[start:stop] = bytes(stop - start)
        self._set(name, data)
        return f"{name} {start} to {stop}"

    def move(self) -> str:
        """A piece of a file is lost, duplicated or moved."""
        name = self._file()
        data = self._get(name)
        start, size = self._place(data), self.draw.choice((1, 2, 4, 8, 12, 64))
        piece = data[start : start + size]
        kind = self.draw.randrange(3)
        if kind != 1:
            del data[start : start + size]
        if kind != 0:
            at = self._place(data)
            data[at:at] = piece
        self._set(name, data)
        return f"{name} {start}, {size} bytes, kind {kind}"

    def drop_or_add_modes(self) -> str:
        data, counts = self._get("idx"), self._counts()
        if counts is None:
            return "no header"
        end = HEADER.size + 12 * counts[0] + 8 * counts[1]
        self._set("idx", data[:end] + (b"" if len(data) > end else bytes(counts[0])))
        return f"from byte {end}"

    def sidecar(self) -> str:
        """Another value anywhere in the JSON, or text that is not JSON."""
        try:
            document = json.loads(self.pair.info or b"{}")
        except (ValueError, RecursionError):
            document = {}
        odd: tuple[Any, ...] = (
            *(
                None,
                True,
                -1,
                0,
                2**70,
                1e308,
                "",
                "x",
                [],
                {},
                [[]],
                {"size": 1},
                "é" * 20,
                4194304,
            ),
            float("nan"),
        )
        kind = self.draw.randrange(8)
        if kind == 0:
            raw = self.draw.choice(
                (b"", b"\xff\xfe", b"{", b"[" * 100_000, b"nul", b'{"version": 1}', b"9" * 5000)
            )
            self.pair.info = raw
            return repr(raw[:20])
        if kind == 1:
            document = self.draw.choice(odd)
        else:
            node, key = document, None
            for _ in range(self.draw.choice((1, 2, 3, 3, 4))):
                if not isinstance(node, (dict, list)) or not node:
                    break
                keys = list(node) if isinstance(node, dict) else range(len(node))
                parent, key = node, self.draw.choice(keys)
                node = parent[key]
            if key is None:
                return "nothing to change"
            if kind == 2:
                del parent[key]
            else:
                parent[key] = self.draw.choice(odd)
        self.pair.info = json.dumps(document).encode()
        return self.pair.info[:60].decode()

    def remove(self) -> str:
        name = self._file()
        setattr(self.pair, name, None)
        return name


# ---- one case ----


def case_of(seed: int, number: int, folder: Path, cache: dict[int, Any]) -> tuple[Pair, Mutator]:
    """The pair of a case and its mutant. Cases of a group share their pairs."""
    group = number // GROUP
    if group not in cache:
        cache.clear()
        draw = random.Random(f"pairs {seed} {group}")
        first = make_pair(draw, folder)
        like = parse(first) if draw.random() < 0.6 else None
        cache[group] = first, make_pair(draw, folder, like)
    first, second = cache[group]
    draw = random.Random(f"case {seed} {number}")
    if draw.random() < 0.3:
        first, second = second, first
    mutator = Mutator(draw, first.copy(), second)
    mutator.mutate()
    return first, mutator


def run_case(seed: int, number: int, folder: Path, cache: dict[int, Any]) -> None:
    """Runs one case.

    Raises:
        FindingError: the library did what it must not do; so is any exception but ALLOWED.
    """
    original, mutator = case_of(seed, number, folder, cache)
    mutant, draw = mutator.pair, mutator.draw
    prefix = str(folder / "mutant")
    for name, suffix in (("bin", ".bin"), ("idx", ".idx"), ("info", ".info.json")):
        # A new file: the mappings of the last case's datasets may live on.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(prefix + suffix)
        data = getattr(mutant, name)
        if data is not None:
            with open(prefix + suffix, "wb", buffering=0) as file:
                file.write(data)
    content = parse(mutant)
    has_checksums = mutant.info is not None and mutant.info == original.info
    is_changed = (mutant.bin, mutant.idx) != (original.bin, original.idx)

    report = verify([prefix], threads=1)[0]
    must_find = content is None or (has_checksums and is_changed)
    if must_find and not report.problems:
        raise FindingError(f"verify finds nothing; valid by the format: {content is not None}")
    if not must_find and report.problems and mutant.info in (None, original.info):
        raise FindingError(f"verify finds a problem in a valid pair: {report.problems}")
    if has_checksums and mutant.bin is not None and not report.has_checksums:
        raise FindingError("verify does not see the checksums")

    mapped = attempt(lambda: millrace.IndexedDataset(prefix, access="mmap"))
    filed = attempt(lambda: millrace.IndexedDataset(prefix, access="file"))
    if (mapped is None) != (filed is None) or (mapped is None and content is not None):
        raise FindingError(f"opened by mmap: {mapped}, by file: {filed}, valid: {bool(content)}")
    if mapped is None or filed is None:
        return
    reads = [check_reads(dataset, content, draw.getrandbits(32)) for dataset in (mapped, filed)]
    if not same(*reads):
        raise FindingError("mmap and file read different sequences")
    options = {
        "sequence_length": draw.choice((1, 2, 4, 8)),
        "num_samples": draw.choice((None, None, 1, 30)),
        "seed": number,
        "pad_token": draw.choice((None, 3)),
        "add_extra_token": draw.random() < 0.8,
        "drop_last_partial_sequence": draw.random() < 0.8,
    }
    batches = [all_samples(dataset, options) for dataset in (mapped, filed)]
    if not same(*batches):
        raise FindingError("mmap and file give different samples")
    if number % 8 == 0:
        check_merge(mapped, content, str(folder / "merged"))


def attempt(function: Callable[[], Any]) -> Any:
    """The result of a function; None if it raises an allowed error."""
    try:
        return function()
    except ALLOWED:
        return None


def same(left: Any, right: Any) -> bool:
    """Whether both are None, or arrays (or lists of them) that are equal to the bit."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left is None and right is None


def joined(parts: list[Any], dtype: np.dtype[Any]) -> Any:
    if any(part is None for part in parts):
        return None
    return np.concatenate([np.empty(0, dtype), *parts])


def check_reads(
    dataset: millrace.IndexedDataset, content: Content | None, seed: int
) -> list[Sequence_ | None]:
    """Checks that every way to read gives the same as single reads, or refuses as they do."""
    draw, count = random.Random(seed), len(dataset)
    shown = min(count, MAX_READS)
    single = [attempt(lambda i=i: dataset[i]) for i in range(shown)]
    if content is not None:
        check_header(dataset, content)
        expect("[i]", single, content.sequences[:shown])
    for i in range(shown):
        expect("get(i)", attempt(lambda i=i: dataset.get(i)), single[i])
        expect("[-i]", attempt(lambda i=i: dataset[i - count]), single[i])
        if single[i] is not None and len(single[i]):
            start = draw.randrange(len(single[i]))
            stop = draw.randint(start, len(single[i]))
            part = attempt(lambda i=i, a=start, b=stop: dataset.get(i, a, b - a))
            expect("get(i, offset, length)", part, single[i][start:stop])
    if count <= MAX_READS:
        ends = [draw.randint(-count - 1, count + 1) for _ in range(2)]
        steps = (None, 1, 2, -1, -3, 7)
        for span in (
            slice(None),
            slice(None, None, -1),
            slice(*sorted(ends)),
            slice(*ends, draw.choice(steps)),
        ):
            expect(f"[{span}]", attempt(lambda span=span: dataset[span]), whole(single[span]))
        expect("iteration", attempt(lambda: list(dataset)), whole(single))
        ids = [draw.randint(-count, count - 1) for _ in range(draw.randrange(12))] if count else []
        for numbers in (list(range(count)), ids):
            parts = [single[number] for number in numbers]
            result = attempt(lambda numbers=numbers: dataset.read(numbers))
            flat = None if result is None else result[0]
            expect("read(ids)", flat, joined(parts, dataset.dtype))
            if result is not None:
                bounds = np.cumsum([0, *map(len, parts)])
                expect("read(ids) offsets", result[1], bounds.astype(np.int64))
            lists = attempt(lambda numbers=numbers: dataset[np.array(numbers, np.int64)])
            expect("[ids]", lists, whole(parts))
    entries = dataset.document_indices.tolist()
    for number in range(min(dataset.num_documents, MAX_READS)):
        document = attempt(lambda number=number: dataset.document(number))
        first, last = entries[number : number + 2]
        if not 0 <= first <= last <= count:
            expect("document(j)", document, None)
        elif count <= MAX_READS:
            expect("document(j)", document, joined(single[first:last], dataset.dtype))
    lengths = attempt(lambda: dataset.document_lengths)
    if content is not None:
        sizes = [
            sum(len(part) for part in content.sequences[a:b])
            for a, b in itertools.pairwise(entries)
        ]
        expect("document_lengths", lengths, np.array(sizes, np.int64))
    for index in (count, -count - 1, 2**40):
        try:
            dataset[index]
        except IndexError:
            continue
        raise FindingError(f"[{index}] of {count} sequences is no IndexError")
    attempt(lambda: dataset.info())
    if len(dataset.fingerprint) != 32:
        raise FindingError("the fingerprint is no fingerprint")
    # Copies: the caller compares them when the other dataset has been read too.
    return [None if part is None else part.copy() for part in single]


def check_header(dataset: millrace.IndexedDataset, content: Content) -> None:
    modes = dataset.sequence_modes
    actual = (
        dataset.dtype,
        len(dataset),
        dataset.num_documents,
        dataset.document_indices.tolist(),
        None if modes is None else modes.tolist(),
        dataset.num_tokens,
    )
    expected = (
        content.dtype,
        len(content.sequences),
        len(content.document_indices) - 1,
        content.document_indices,
        content.modes,
        sum(map(len, content.sequences)),
    )
    if actual != expected:
        raise FindingError(f"the header: {actual}, expected {expected}")


def whole(parts: list[Any]) -> list[Any] | None:
    return None if any(part is None for part in parts) else list(parts)


def expect(what: str, actual: Any, expected: Any) -> None:
    if not same(actual, expected):
        raise FindingError(f"{what} gives {actual!r}, expected {expected!r}")


def all_samples(dataset: millrace.IndexedDataset, options: dict[str, Any]) -> list[Any] | None:
    """All samples in one batch; None if the dataset or the batch is refused."""
    try:
        samples = millrace.GPTDataset(dataset, **options)
        batch = samples.batch(np.arange(min(len(samples), 10_000)))
    except millrace.MillraceError:
        return None
    return [batch[name] for name in sorted(batch)]


def check_merge(dataset: millrace.IndexedDataset, content: Content | None, prefix: str) -> None:
    """Checks that a merge copies a valid pair, and never makes an invalid one valid."""
    try:
        with millrace.IndexedDatasetBuilder(
            prefix, dataset.dtype, multimodal=dataset.sequence_modes is not None
        ) as builder:
            builder.add_index(dataset.prefix)
    except millrace.MillraceError:
        if content is not None:
            raise
        return
    merged = parse(Pair(*(read_and_unlink(prefix + suffix) for suffix in (".bin", ".idx")), None))
    if content is None:
        if merged is not None:
            raise FindingError("a merge made a valid pair of an invalid one")
    elif (
        merged is None
        or not same(merged.sequences, content.sequences)
        or (merged.document_indices, merged.modes) != (content.document_indices, content.modes)
    ):
        raise FindingError("a merge changed a valid pair")


# ---- processes ----


@dataclasses.dataclass
class Finding:
    """A wrong behaviour, and its case."""

    number: int
    what: str  # cases of the same cause have the same
    detail: str


def run_measured(seed: int, number: int, folder: Path, cache: dict[int, Any]) -> Finding | None:
    """Runs a case, and watches its memory."""
    traced = number % TRACED_EVERY == 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if traced:
        case_of(seed, number, folder, cache)  # what making the pairs takes does not count
        tracemalloc.start()
    try:
        run_case(seed, number, folder, cache)
        if traced and tracemalloc.get_traced_memory()[1] > 2 * VERIFY_BUFFER + (2 << 20):
            most = tracemalloc.get_traced_memory()[1]
            return Finding(number, "memory: too much was allocated", f"{most} bytes at once")
    except Exception as error:
        return Finding(number, signature(error), traceback.format_exc(limit=-8))
    finally:
        tracemalloc.stop()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    if grown > RESIDENT and not IS_SANITIZED:
        return Finding(number, "memory: the peak grew", f"by {grown} bytes")
    return None


def signature(error: BaseException) -> str:
    """The cause: the error's type, and the last line of millrace (or of this file)."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "millrace" in frame.filename] or frames
    text = str(error).split(",")[0].split(":")[0][:80] if isinstance(error, FindingError) else ""
    text = text.split(" gives ")[0]
    return f"{type(error).__name__} {text} in {Path(ours[-1].filename).name}, {ours[-1].name}"


def run_child(seed: int, start: int, stop: int, folder: Path) -> None:
    """Runs cases, writes the current one to `folder/now`, and prints findings as JSON."""
    faulthandler.enable()
    publish._PAUSE = 0  # type: ignore[misc]  # seconds that no one publishes in
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * mmap.PAGESIZE
    limit = taken + ADDRESS_SPACE
    if not IS_SANITIZED:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    cache: dict[int, Any] = {}
    with open(folder / "now", "r+b") as file, mmap.mmap(file.fileno(), 8) as now:
        for number in range(start, stop):
            struct.pack_into("<q", now, 0, number)
            finding = run_measured(seed, number, folder, cache)
            if finding is not None:
                print(json.dumps(dataclasses.asdict(finding)), flush=True)


class Child:
    """A process that runs a range of cases; if it dies, another goes on with the next case."""

    def __init__(self, seed: int, start: int, stop: int) -> None:
        self.seed, self.next, self.stop = seed, start, stop
        self.findings: list[Finding] = []
        parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="millrace-fuzz-", dir=parent)
        self.folder = Path(self._folder.name)
        self._process: subprocess.Popen[bytes] | None = None

    def poll(self) -> bool:
        """Starts, watches and ends the process; returns whether all cases are done."""
        if self._process is None:
            if self.next >= self.stop:
                return True
            self._start()
            return False
        assert self._process is not None
        now = self.now()
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        code = self._process.poll()
        if code is None and time.monotonic() - self._since < TIME_LIMIT:
            return False
        hung = code is None
        if hung:
            self._process.send_signal(signal.SIGABRT)  # faulthandler then says where it was
            self._process.wait()
        self._process = None
        lines = (self.folder / "out").read_text().splitlines()
        self.findings += [Finding(**json.loads(line)) for line in lines]
        self.next = self.stop if code == 0 else self.now() + 1
        if code != 0:
            trace = (self.folder / "err").read_text()
            what = "a hang" if hung else f"a crash: exit status {code}"
            where = [line for line in trace.splitlines() if "millrace" in line and "File" in line]
            self.findings.append(
                Finding(self.now(), f"{what} {where[0].strip() if where else ''}", trace[-3000:])
            )
        return False

    def _start(self) -> None:
        (self.folder / "now").write_bytes(struct.pack("<q", self.next))
        self._seen, self._since = self.next, time.monotonic()
        arguments = ["--child", str(self.folder), str(self.next), str(self.stop)]
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.store.fuzz", "--seed", str(self.seed), *arguments],
                cwd=ROOT,
                stdout=out,
                stderr=err,
                # Each malloc arena reserves 64 MiB of the address space, which is limited here.
                env=os.environ | {"MALLOC_ARENA_MAX": "1"},
            )

    def now(self) -> int:
        number: int = struct.unpack("<q", (self.folder / "now").read_bytes())[0]
        return number

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def fuzz(cases: int, seed: int, workers: int = 1, first: int = 0) -> list[Finding]:
    """Runs cases `first` to `first + cases` in that many processes at once."""
    bounds = [first + cases * number // workers for number in range(workers + 1)]
    children = [Child(seed, a, b) for a, b in itertools.pairwise(bounds)]
    try:
        running = children
        while running:
            running = [child for child in running if not child.poll()]
            time.sleep(0.02)
        return [finding for child in children for finding in child.findings]
    finally:
        for child in children:
            child.close()


def report(findings: list[Finding], seed: int) -> str:
    """The findings by cause: how often, the first cases, and one in detail."""
    causes = collections.defaultdict(list)
    for finding in findings:
        causes[finding.what].append(finding)
    lines = []
    for what, same_cause in sorted(causes.items(), key=lambda item: -len(item[1])):
        numbers = ", ".join(str(finding.number) for finding in same_cause[:5])
        lines.append(f"== {len(same_cause)} x {what}\n   --seed {seed} --only {numbers}")
        lines.append(same_cause[0].detail)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this case alone, in this process")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        folder, start, stop = options.child
        run_child(options.seed, int(start), int(stop), Path(folder))
        return 0
    if options.only is not None:
        with tempfile.TemporaryDirectory() as name:
            _, mutator = case_of(options.seed, options.only, Path(name), {})
            print("\n".join(mutator.names), flush=True)
            run_case(options.seed, options.only, Path(name), {})
        return 0
    started = time.monotonic()
    findings = fuzz(options.cases, options.seed, options.workers, options.first)
    seconds = time.monotonic() - started
    print(report(findings, options.seed))
    print(
        f"{options.cases} cases, {len(findings)} findings, {seconds:.0f} s, "
        f"{options.cases / seconds:.0f} cases a second on {options.workers} workers"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
