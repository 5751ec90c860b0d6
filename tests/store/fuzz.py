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
import contextlib
import dataclasses
import faulthandler
import itertools
import json
import mmap
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
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
TIME_LIMIT = 20.0  # seconds for a case, which takes a millisecond or two: else it is a hang
NOW = struct.Struct("<qq")  # the case that a process runs, and the process
ADDRESS_SPACE = 256 << 20  # bytes that all cases of a process may take beyond its start
RESIDENT = 16 << 20  # bytes by which one case may raise the peak of the process
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


# ---- mutations of the bytes of a file ----

Draw = random.Random
COUNTS = (0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63)
INT32 = (-1, 0, 1, 2, -(2**31), 2**31 - 1, -2, 7, 1000, 10**6, -1000)
INT64 = (-1, 0, 1, 2, 3, 4, 8, 2**31, 2**32, 2**40, 2**62, -(2**63), 2**63 - 1, -8, 10**6)
ODD = (None, True, -1, 0, 2**70, 1e308, float("nan"), "", "x", "é" * 20, [], {}, [[]], 4194304)
NOT_JSON = (b"", b"\xff\xfe", b"{", b"[" * 100_000, b"nul", b'{"version": 1}', b"9" * 5000)


def place_in(draw: Draw, data: bytearray) -> int:
    return draw.randrange(len(data)) if data else 0


def flip(draw: Draw, data: bytearray) -> bytearray:
    for _ in range(draw.choice((1, 1, 2, 8)) if data else 0):
        data[place_in(draw, data)] ^= 1 << draw.randrange(8)
    return data


def truncate(draw: Draw, data: bytearray) -> bytearray:
    few = max(0, len(data) - draw.choice((1, 2, 4, 8)))
    return data[: place_in(draw, data) if draw.random() < 0.6 else few]


def extend(draw: Draw, data: bytearray) -> bytearray:
    size = draw.choice((1, 2, 3, 4, 8, 12, 100, 5000))
    return data + draw.choice((bytes(size), draw.randbytes(size), data[:size]))


def garbage(draw: Draw, data: bytearray) -> bytearray:
    keep = draw.choice((0, 0, 9, 17, 18, 34, place_in(draw, data)))
    size = draw.choice((len(data), len(data), draw.randrange(300)))
    return data[:keep] + draw.randbytes(max(0, size - keep))


def zero(draw: Draw, data: bytearray) -> bytearray:
    start = place_in(draw, data)
    stop = min(len(data), start + draw.choice((1, 4, 8, 16, 100, 4096)))
    data[start:stop] = bytes(stop - start)
    return data


def move(draw: Draw, data: bytearray) -> bytearray:
    """A piece of a file is lost, duplicated or moved."""
    start, size = place_in(draw, data), draw.choice((1, 2, 4, 8, 12, 64))
    piece, kind = data[start : start + size], draw.randrange(3)
    if kind != 1:
        del data[start : start + size]
    if kind != 0:
        at = place_in(draw, data)
        data[at:at] = piece
    return data


# ---- mutations of an index: of one whose header does not fit it, none ----


def counts_of(data: bytearray) -> tuple[int, int]:
    """The header's counts; zeros if they do not fit the file."""
    if len(data) < HEADER.size:
        return 0, 0
    count, entries = HEADER.unpack_from(data)[3:]
    return (count, entries) if HEADER.size + 12 * count + 8 * entries <= len(data) else (0, 0)


def counts(draw: Draw, data: bytearray) -> bytearray:
    count, entries = counts_of(data)
    if entries == 0:
        return data
    kind, step = draw.randrange(4), draw.choice((-2, -1, 1, 2))
    count, entries = (
        (draw.choice(COUNTS), entries),
        (count, draw.choice(COUNTS)),
        (count + draw.randint(-3, 3), entries),
        # The file's size stays right: two sequences take what three entries take.
        (count + 2 * step, entries - 3 * step),
    )[kind]
    struct.pack_into("<QQ", data, 18, max(0, count), max(0, entries))
    return data


def dtype_code(draw: Draw, data: bytearray) -> bytearray:
    if len(data) > 17:
        data[17] = draw.randrange(12)
    return data


def modes(draw: Draw, data: bytearray) -> bytearray:
    """Modes are dropped, or added."""
    count, entries = counts_of(data)
    end = HEADER.size + 12 * count + 8 * entries
    return data[:end] + (b"" if len(data) > end else bytes(count))


def entry(draw: Draw, data: bytearray) -> bytearray:
    """Changes one or two of the lengths, the pointers or the document entries."""
    count, entries = counts_of(data)
    code, place, size, extremes = draw.choice(
        (
            ("<i", HEADER.size, count, INT32),
            ("<q", HEADER.size + 4 * count, count, (*INT64, *range(12, 500, 12))),
            ("<q", HEADER.size + 12 * count, entries, INT64),
        )
    )
    if size == 0:
        return data
    width = struct.calcsize(code)
    at = [place + width * draw.randrange(size) for _ in range(2)]
    first, second = (struct.unpack_from(code, data, place)[0] for place in at)
    step = draw.choice((1, 2, 5, 2**30, -(2**30)))
    values = draw.choice(
        (
            (draw.choice(extremes), second),
            (first + draw.choice((-8, -4, -2, -1, 1, 2, 4, 8)), second),
            (second, first),  # out of order
            (first + step, second - step),  # the sum stays right
        )
    )
    half = 2 ** (8 * width - 1)
    for place, value in zip(at, values, strict=True):
        struct.pack_into(code, data, place, (value + half) % (2 * half) - half)
    return data


# ---- mutations of a pair, of which there is another ----


def nothing(draw: Draw, pair: Pair, other: Pair) -> None:
    pass


def swap(draw: Draw, pair: Pair, other: Pair) -> None:
    for name in draw.choice((("bin",), ("idx",), ("bin", "idx"), ("info",))):
        setattr(pair, name, getattr(other, name))


def remove(draw: Draw, pair: Pair, other: Pair) -> None:
    setattr(pair, some_file(draw), None)


def last_pointer_and_size(draw: Draw, pair: Pair, other: Pair) -> None:
    """The end of the last sequence fits the `.bin`, but not what lies before it."""
    data, tokens = bytearray(pair.idx or b""), pair.bin or b""
    count, step = counts_of(data)[0], draw.choice((-9, -4, -3, -2, -1, 1, 2, 3, 4, 8))
    if count > 0 and len(tokens) + step >= 0:
        place = HEADER.size + 4 * count + 8 * (count - 1)
        last = struct.unpack_from("<q", data, place)[0] % 2**62
        struct.pack_into("<q", data, place, last + step)
        pair.idx = bytes(data)
        pair.bin = tokens[:step] if step < 0 else tokens + bytes(step)


def sidecar(draw: Draw, pair: Pair, other: Pair) -> None:
    """Another value anywhere in the JSON, or text that is not JSON."""
    try:
        content = json.loads(pair.info or b"{}")
    except (ValueError, RecursionError):
        content = {}
    kind = draw.randrange(8)
    if kind == 0:
        pair.info = draw.choice(NOT_JSON)
        return
    node, parent, key = content, None, None
    for _ in range(draw.choice((1, 2, 3, 3, 4))):
        if isinstance(node, (dict, list)) and node:
            parent = node
            key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
            node = parent[key]
    if kind == 1 or parent is None:
        content = draw.choice(ODD)
    elif kind == 2:
        del parent[key]
    else:
        parent[key] = draw.choice(ODD)
    pair.info = json.dumps(content).encode()


def some_file(draw: Draw) -> str:
    return draw.choices(("bin", "idx", "info"), (2, 6, 1))[0]


OF_FILE = {flip: 10, truncate: 5, extend: 4, garbage: 4, zero: 4, move: 4}
OF_INDEX = {counts: 8, dtype_code: 3, modes: 2, entry: 27}
OF_PAIR = {nothing: 2, swap: 6, remove: 1, last_pointer_and_size: 4, sidecar: 8}
WEIGHTS: dict[Any, int] = {**OF_FILE, **OF_INDEX, **OF_PAIR}


def mutate(draw: Draw, pair: Pair, other: Pair) -> list[str]:
    """Mutates a pair once or a few times; returns the names of the mutations, and of the files."""
    names = []
    for function in draw.choices(
        list(WEIGHTS), list(WEIGHTS.values()), k=draw.choice((1, 1, 1, 1, 2, 2, 3))
    ):
        name = "pair"
        if function in OF_PAIR:
            function(draw, pair, other)
        else:
            name = some_file(draw) if function in OF_FILE else "idx"
            data = getattr(pair, name)
            if data is not None:
                setattr(pair, name, bytes(function(draw, bytearray(data))))
        names.append(f"{function.__name__}: {name}")
    return names


# ---- one case ----


def case_of(
    seed: int, number: int, folder: Path, cache: dict[int, Any]
) -> tuple[Pair, Pair, list[str], Draw]:
    """The pair of a case, its mutant, the mutations and their generator; groups share pairs."""
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
    mutant = dataclasses.replace(first)
    return first, mutant, mutate(draw, mutant, second), draw


def run_case(seed: int, number: int, folder: Path, cache: dict[int, Any]) -> None:
    """Runs one case.

    Raises:
        FindingError: the library did what it must not do; so is any exception but ALLOWED.
    """
    original, mutant, _, draw = case_of(seed, number, folder, cache)
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

    mapped, filed = (
        attempt(millrace.IndexedDataset, prefix, access=access) for access in ("mmap", "file")
    )
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


def attempt(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of a function; None if it raises an allowed error."""
    try:
        return function(*arguments, **options)
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
    shown, item = min(count, MAX_READS), dataset.__getitem__
    single = [attempt(item, i) for i in range(shown)]
    if content is not None:
        check_header(dataset, content)
        expect("[i]", single, content.sequences[:shown])
    for i in range(shown):
        expect("get(i)", attempt(dataset.get, i), single[i])
        expect("[-i]", attempt(item, i - count), single[i])
        if single[i] is not None and len(single[i]):
            start = draw.randrange(len(single[i]))
            stop = draw.randint(start, len(single[i]))
            part = attempt(dataset.get, i, start, stop - start)
            expect("get(i, offset, length)", part, single[i][start:stop])
    if count <= MAX_READS:
        ends = [draw.randint(-count - 1, count + 1) for _ in range(2)]
        step = draw.choice((None, 1, 2, -1, -3, 7))
        spans = slice(None), slice(None, None, -1), slice(*sorted(ends)), slice(*ends, step)
        for span in spans:
            expect(f"[{span}]", attempt(item, span), whole(single[span]))
        expect("iteration", attempt(list, dataset), whole(single))
        ids = [draw.randint(-count, count - 1) for _ in range(draw.randrange(12))] if count else []
        for numbers in (list(range(count)), ids):
            parts = [single[number] for number in numbers]
            flat, offsets = attempt(dataset.read, numbers) or (None, None)
            expect("read(ids)", flat, joined(parts, dataset.dtype))
            if offsets is not None:
                bounds = np.cumsum([0, *map(len, parts)])
                expect("read(ids) offsets", offsets, bounds.astype(np.int64))
            expect("[ids]", attempt(item, np.array(numbers, np.int64)), whole(parts))
    entries = dataset.document_indices.tolist()
    for number in range(min(dataset.num_documents, MAX_READS)):
        document = attempt(dataset.document, number)
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
    attempt(dataset.info)
    if len(dataset.fingerprint) != 32:
        raise FindingError("the fingerprint is no fingerprint")
    # Copies: the caller compares them when the other dataset has been read too.
    return [None if part is None else part.copy() for part in single]


def check_header(dataset: millrace.IndexedDataset, content: Content) -> None:
    modes, documents = dataset.sequence_modes, content.document_indices
    num_tokens = sum(map(len, content.sequences))
    actual = dataset.dtype, len(dataset), dataset.num_tokens, dataset.num_documents
    lists = dataset.document_indices.tolist(), None if modes is None else modes.tolist()
    expected = content.dtype, len(content.sequences), num_tokens, len(documents) - 1
    if (actual, lists) != (expected, (documents, content.modes)):
        raise FindingError(f"the header: {actual}, {lists}, expected {expected}, {content}")


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


def run_measured(seed: int, number: int, folder: Path, cache: dict[int, Any]) -> str | None:
    """Runs a case, and watches its memory; returns what was wrong."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        run_case(seed, number, folder, cache)
    except Exception:
        return traceback.format_exc(limit=-8)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    is_much = grown > RESIDENT and not IS_SANITIZED
    return f"the peak of the memory grew by {grown} bytes" if is_much else None


def run_child(seed: int, start: int, stop: int, folder: Path) -> None:
    """Runs cases, writes the current one and the process to `folder/now`, and prints findings."""
    faulthandler.enable()
    publish._PAUSE = 0  # type: ignore[misc]  # seconds that no one publishes in
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * mmap.PAGESIZE
    limit = taken + ADDRESS_SPACE
    if not IS_SANITIZED:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    cache: dict[int, Any] = {}
    with open(folder / "now", "r+b") as file, mmap.mmap(file.fileno(), NOW.size) as now:
        for number in range(start, stop):
            NOW.pack_into(now, 0, number, os.getpid())
            faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
            if (problem := run_measured(seed, number, folder, cache)) is not None:
                print(json.dumps([number, problem]), flush=True)


def fuzz(cases: int, seed: int, folder: Path) -> dict[int, str]:
    """The findings by their case, which run in a process; if it dies, another goes on."""
    findings: dict[int, str] = {}
    start = 0
    while start < cases:
        (folder / "now").write_bytes(NOW.pack(start, 0))
        arguments = ["--seed", str(seed), "--child", str(folder), str(start), str(cases)]
        child = subprocess.run(
            [sys.executable, "-m", "tests.store.fuzz", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            # Each malloc arena reserves 64 MiB of the address space, which is limited here.
            env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        )
        findings |= dict(map(json.loads, child.stdout.splitlines()))
        if child.returncode == 0:
            break
        number, _ = NOW.unpack((folder / "now").read_bytes())
        is_hang = child.stderr.startswith("Timeout")
        what = "a hang" if is_hang else f"a crash: exit status {child.returncode}"
        findings[number] = f"{what}\n{child.stderr[-3000:]}"
        start = number + 1
    return findings


def report(findings: dict[int, str], seed: int) -> str:
    """The first findings, each with its case."""
    first = list(findings.items())[:10]
    return "\n".join(f"== --seed {seed} --only {number}: {what}" for number, what in first)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this case alone, in this process")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        folder, start, stop = options.child
        run_child(options.seed, int(start), int(stop), Path(folder))
        return 0
    with tempfile.TemporaryDirectory(prefix="millrace-fuzz-", dir="/dev/shm") as name:
        if options.only is not None:
            print("\n".join(case_of(options.seed, options.only, Path(name), {})[2]), flush=True)
            run_case(options.seed, options.only, Path(name), {})
            return 0
        findings = fuzz(options.cases, options.seed, Path(name))
    print(report(findings, options.seed))
    print(f"{options.cases} cases, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
