"""The twin law for read_pieces, with reads that come back short and files that end early."""

import errno
import functools
import itertools
import operator
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.kernels import reference
from tests.kernels.twins import int64

from millrace import _native

# Around the pieces of one call (1,024 entries), the gap that is read over (4,096 bytes) and powers
# of two.
COUNTS = sorted({0, 1, 2, 3} | {2**k + d for k in (2, 9, 10, 11) for d in (-1, 0, 1, 2)})
GAPS = (0, 1, 511, 512, 513, 4095, 4096, 4097, 10_000)


def read_into(
    buffer: np.ndarray,
    path: Path,
    offsets: Any,
    sizes: Any,
    targets: Any,
    module: Any = _native,
    **options: Any,
) -> int:
    with open(path, "rb") as file:
        columns = int64(offsets), int64(sizes), buffer, int64(targets)
        bits: int = module.read_pieces(file.fileno(), *columns, **options)
    return bits


def read(module: Any, path: Path, offsets: Any, sizes: Any, targets: Any, size: int) -> np.ndarray:
    """The buffer of `size` bytes after a read into it; what is not written stays 7."""
    buffer = np.full(size, 7, np.uint8)
    read_into(buffer, path, offsets, sizes, targets, module)
    return buffer


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=200)
def test_pieces_equal_their_twin(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, 300))
    content = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    path = tmp_path_factory.mktemp("pieces") / "data"
    path.write_bytes(content.tobytes())
    starts = data.draw(st.lists(st.integers(0, size), max_size=30))
    pieces = [(start, data.draw(st.integers(0, min(size - start, 40)))) for start in starts]
    # Each piece has a place of its own, in any order and with free bytes in between.
    targets, end = [0] * len(pieces), 0
    for place in data.draw(st.permutations(range(len(pieces)))):
        targets[place] = end + data.draw(st.integers(0, 2))
        end = targets[place] + pieces[place][1]
    offsets, sizes = [p[0] for p in pieces], [p[1] for p in pieces]
    expected = read(reference, path, offsets, sizes, targets, end + 3)
    actual = read(_native, path, offsets, sizes, targets, end + 3)
    np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("gap", GAPS)
def test_any_number_of_neighbours_and_any_gap(tmp_path: Path, count: int, gap: int) -> None:
    width = 3
    with open(tmp_path / "data", "wb") as file:
        for number in range(count):
            file.seek(number * (width + gap))
            file.write(np.array([number % 251, number // 251, 1], np.uint8).tobytes())
    offsets = int64(range(count)) * (width + gap)
    sizes = np.full(count, width, np.int64)
    random = np.random.default_rng(count)
    for targets in (
        width * random.permutation(count),
        width * int64(range(count)),  # neighbours in the file and in the buffer
        width * (int64(range(count)) // 2 * 2 + 1 - int64(range(count)) % 2),
    ):
        size = width * (count + 1)
        actual = read(_native, tmp_path / "data", offsets, sizes, targets, size)
        expected = read(reference, tmp_path / "data", offsets, sizes, targets, size)
        np.testing.assert_array_equal(actual, expected, strict=True)
        order = random.permutation(count)
        shuffled = read(
            _native, tmp_path / "data", offsets[order], sizes[order], targets[order], size
        )
        np.testing.assert_array_equal(shuffled, expected, strict=True)


def test_pieces_beyond_4_gib_are_read(tmp_path: Path) -> None:
    places = [2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5, 2**40]
    with open(tmp_path / "data", "wb") as file:  # with holes
        for number, place in enumerate(places):
            file.seek(place)
            file.write(bytes([number + 1]))
    actual = read(_native, tmp_path / "data", places, [1] * 5, [4, 3, 2, 1, 0], 5)
    assert actual.tolist() == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("offset", "size", "target"),
    [
        (-1, 1, 0),
        (0, -1, 0),
        (0, 1, -1),
        (0, 11, 0),
        (0, 1, 10),
        (0, 0, 11),
        (0, 5, 6),
        (0, 2**62, 2**62),
        (0, 2**63 - 1, 2**63 - 1),
        (2**63 - 1, 1, 0),
        (5, 2**63 - 1, 0),
        (-(2**63), 1, 0),
        (0, 1, -(2**63)),
        (0, -(2**63), 2**63 - 1),
    ],
)
def test_a_piece_outside_is_refused_before_anything_is_read(
    tmp_path: Path, offset: int, size: int, target: int
) -> None:
    (tmp_path / "data").write_bytes(bytes(range(20)))
    buffer = np.full(10, 7, np.uint8)
    for module in (_native, reference):
        with pytest.raises(ValueError, match="outside"):
            read_into(buffer, tmp_path / "data", [0, offset], [1, size], [0, target], module)
    assert buffer.tolist() == [7] * 10


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_the_or_of_words_equals_its_twin(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Also of more pieces than are read before their words are looked at."""
    words = np.zeros(1 << data.draw(st.integers(0, 18)), np.uint32)
    for place in data.draw(st.lists(st.integers(0, len(words) - 1), max_size=4)):
        words[place] |= 1 << data.draw(st.integers(0, 31))
    path = tmp_path_factory.mktemp("words") / "data"
    path.write_bytes(words.tobytes())
    bounds = sorted(data.draw(st.lists(st.integers(0, len(words)), min_size=2, max_size=20)))
    pairs = data.draw(st.permutations(list(itertools.pairwise(bounds))[::2]))
    starts, stops = int64([pair[0] for pair in pairs]), int64([pair[1] for pair in pairs])
    columns = path, 4 * starts, 4 * (stops - starts), 4 * starts
    expected = [int(np.bitwise_or.reduce(words[start:stop])) for start, stop in pairs]
    for module in (_native, reference):
        buffer = np.zeros(len(words) * 4, np.uint8)
        bits = read_into(buffer, *columns, module, or_words=True)
        assert bits == functools.reduce(operator.or_, expected, 0)
        assert read_into(buffer, *columns, module) == 0


def test_pieces_that_are_not_of_words_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(20))
    buffer = np.full(10, 7, np.uint8)
    for module in (_native, reference):
        with pytest.raises(ValueError, match="not 32-bit words"):
            read_into(buffer, tmp_path / "data", [0, 4], [4, 6], [0, 4], module, or_words=True)
    assert buffer.tolist() == [7] * 10


def test_arrays_of_other_sizes_and_a_buffer_to_read_only_are_refused() -> None:
    one, two, buffer = int64([0]), int64([0, 0]), np.zeros(4, np.uint8)
    for offsets, sizes, targets in ((one, one, two), (one, two, one), (two, one, one)):
        with pytest.raises(ValueError, match="differ in size"):
            _native.read_pieces(0, offsets, sizes, buffer, targets)
    buffer.flags.writeable = False
    with pytest.raises(TypeError, match="incompatible"):
        _native.read_pieces(0, one, one, buffer, one)


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 6), (3, 5), (4, 2), (5, 1), (6, 1), (2000, 3), (2**40, 1)]
)
def test_a_file_that_ends_inside_a_piece_is_refused(tmp_path: Path, offset: int, size: int) -> None:
    (tmp_path / "data").write_bytes(b"12345")
    buffer = np.zeros(20, np.uint8)
    columns = tmp_path / "data", [0, offset, 2**50], [2, size, 0], [10, 0, 0]
    for module in (_native, reference):
        with pytest.raises(ValueError, match="the file ends at byte 5") as caught:
            read_into(buffer, *columns, module)
        if module is _native:
            assert f"piece 1 has {size} bytes from byte {offset} on" in str(caught.value)
    assert read(_native, tmp_path / "data", [2**40], [0], [5], 5).tolist() == [7] * 5


def test_a_read_that_fails_is_an_os_error(tmp_path: Path) -> None:
    one, buffer = int64([1]), np.zeros(4, np.uint8)
    folder = os.open(tmp_path, os.O_RDONLY)
    reader, writer = os.pipe()
    try:
        numbers = {-1: errno.EBADF, folder: errno.EISDIR, reader: errno.ESPIPE}
        for descriptor, number in numbers.items():
            with pytest.raises(OSError, match=os.strerror(number)) as caught:
                _native.read_pieces(descriptor, one, one, buffer, one)
            assert caught.value.errno == number
    finally:
        for descriptor in (folder, reader, writer):
            os.close(descriptor)


def test_reads_that_come_back_short_are_continued() -> None:
    """One read of /proc/self/smaps returns a few pages at most, and never half a line."""
    path = Path("/proc/self/smaps")
    size = len(path.read_bytes()) // 2
    offsets = np.arange(0, size - 16, 16)
    buffer = np.zeros(size, np.uint8)
    read_into(buffer, path, offsets, np.full(len(offsets), 16), offsets[::-1].copy())
    lines = buffer[: 16 * len(offsets)].reshape(-1, 16)[::-1].tobytes().split(b"\n")[:-1]
    assert len(lines) > 100
    assert all(re.match(rb"[0-9a-f]+-[0-9a-f]+ |[A-Z][A-Za-z_]*:", line) for line in lines)


def test_the_gil_is_free_and_signals_do_no_harm() -> None:
    """Another thread counts while long reads run, which a signal cuts short."""
    ticks, is_done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not is_done.wait(1e-4):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        buffer = np.ones(1 << 26, np.uint8)
        for _ in range(5):
            read_into(buffer, Path("/dev/zero"), [0], [1 << 26], [0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        is_done.set()
        thread.join()
    assert ticks > 0
    assert not buffer.any()


@pytest.mark.parametrize("size", [1 << 12, 1 << 20, 20 << 20])
def test_a_cold_file_is_read_as_a_warm_one_is(tmp_path: Path, size: int) -> None:
    """Pages that are not in memory are prefetched: the bytes are the same."""
    content = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    with open(tmp_path / "data", "wb") as file:
        file.write(content.tobytes())
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    random = np.random.default_rng(0)
    offsets = np.sort(random.integers(0, size, 3000))
    sizes = np.minimum(random.integers(0, 5000, 3000), size - offsets)
    targets = np.cumsum(sizes) - sizes
    actual = read(_native, tmp_path / "data", offsets, sizes, targets, int(sizes.sum()))
    expected = _native.copy_pieces(content, offsets, sizes)
    np.testing.assert_array_equal(actual, expected, strict=True)
