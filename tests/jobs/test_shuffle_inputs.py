"""The inputs of a shuffle: domains, sequences, and what can be wrong with them."""

import os
import pickle
import random
import resource
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace import _native
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.shuffling.domains import read_input_list
from millrace.shuffling.shuffle_items import SequenceItems, WeightedUnits
from tests.conftest import write_documents
from tests.jobs.shuffle_cases import Case, make_case, sequence_items


def write_raw(path: Path, tokens: Sequence[int] | NDArray[Any], dtype: str = "int32") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(tokens, dtype).tofile(path)


def read_all(items: SequenceItems, numbers: NDArray[np.int64] | None = None) -> list[list[int]]:
    """All items, read to shuffled places of a buffer."""
    numbers = np.arange(items.num_items) if numbers is None else numbers
    sizes = items.sizes(numbers)
    places = np.random.default_rng(1).permutation(len(numbers))
    starts = np.empty(len(numbers), np.int64)
    starts[places] = np.cumsum(sizes[places]) - sizes[places]
    buffer = np.full(int(sizes.sum()) + 3, 77, items.dtype)
    items.read(numbers, buffer[1:-2], starts)
    assert buffer[0] == 77
    assert buffer[-2:].tolist() == [77, 77]
    return [
        buffer[1 + start : 1 + start + size].tolist()
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
    ]


def test_items_are_the_sequences_of_all_files_in_order() -> None:
    """They are what `shuffle_cases` makes of the files, by slices and loops."""
    for number in range(120):
        choices = random.Random(number)
        with tempfile.TemporaryDirectory() as name:
            case = make_case(Path(name), choices)
            inputs = case.options["input_dir"] or case.options["input_list"]
            options = {key: case.options[key] for key in ("seq_len", "dtype", "carry")}
            if case.is_refused:
                with pytest.raises(ConfigError, match=r"gives no sequence|no tokens"):
                    sequence_items(inputs, **options)
                continue
            items = pickle.loads(pickle.dumps(sequence_items(inputs, **options)))
            expected = [item.sequences[0].tolist() for item in case.items]
            assert items.dtype == case.dtype
            assert read_all(items) == expected
            some = sorted(choices.sample(range(len(expected)), len(expected) // 3))
            assert read_all(items, np.array(some, np.int64)) == [expected[n] for n in some]
            check_counts(items, Path(name), case)


def check_counts(items: SequenceItems, folder: Path, case: Case) -> None:
    assert items.domain_stats == case.domain_stats
    assert items.num_items == len(case.items)
    for domain in items.domains:
        members = [row for row in items.inputs if row["domain"] == domain.name]
        files = [path for path in (folder / domain.name).iterdir() if path.suffix != ".idx"]
        assert len(members) == domain.num_files == len(files)
        assert sum(row["num_tokens"] for row in members) == domain.num_tokens
        assert 0 <= domain.num_left <= domain.num_tokens
        is_noticed = any(f"domain {domain.name} gives" in notice for notice in items.notices)
        assert is_noticed == (domain.num_items == 0)


def test_many_weighted_units_do_not_overflow() -> None:
    count = 2**40
    units = WeightedUnits([count], [Fraction(1, 2)])
    assert units.units(np.array([2**39 - 1])).tolist() == [2**40 - 2]


# ---- finding files ----


def test_domains_are_folders_and_are_sorted_by_path(tmp_path: Path) -> None:
    for place, path in enumerate(["b/x.bin", "b/deep/er/y.bin", "B/z.bin", "loose.bin", "b/X.bin"]):
        write_raw(tmp_path / path, [place, place])
    for path in (".hidden/a.bin", "b/.hidden.bin", "b/notes.txt", "b/x.bin.tmp", "c.journal/a.bin"):
        write_raw(tmp_path / path, [9, 9])
    items = sequence_items(tmp_path, seq_len=2, dtype="int32")
    rows = [f"{row['domain']} {row['path']}" for row in items.inputs]
    paths = [". loose.bin", "B B/z.bin", "b b/X.bin", "b b/deep/er/y.bin", "b b/x.bin"]
    assert rows == [path.replace(" ", f" {tmp_path}/") for path in paths]
    assert read_all(items) == [[n, n] for n in (3, 2, 4, 1, 0)]
    assert items.notices == []


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    write_raw(tmp_path / "elsewhere" / "x.bin", [1, 2])
    (tmp_path / "in" / "web").mkdir(parents=True)
    (tmp_path / "in" / "web" / "circle").symlink_to(tmp_path / "in" / "web")
    for name in ("a", "b"):
        (tmp_path / "in" / "web" / name).symlink_to(tmp_path / "elsewhere")
    items = sequence_items(tmp_path / "in", seq_len=1, dtype="int32")
    assert read_all(items) == [[1], [2]] * 2


def test_domains_without_sequences_count_nothing_and_are_noticed(tmp_path: Path) -> None:
    write_raw(tmp_path / "a" / "x.bin", range(3001))
    write_raw(tmp_path / "short" / "x.bin", [1])
    write_raw(tmp_path / "short" / "empty.bin", [])
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "x.jsonl").write_text("{}")
    items = sequence_items(tmp_path, seq_len=2, dtype="int32")
    assert items.table("sequences").splitlines() == [
        "domain  files  sequences  tokens  tokens left out",
        "a           1      1,500   3,001                1",
        "empty       0          0       0                0",
        "short       2          0       1                1",
        "texts       0          0       0                0",
        "total       3      1,500   3,002                2",
    ]
    notices = {notice.split()[1]: notice for notice in items.notices}
    assert sorted(notices) == ["empty", "short", "texts"]
    assert "its 0 files have 0 tokens" in notices["texts"]
    assert "gives no sequence of 2 tokens" in notices["short"]


def test_raw_tokens_beside_indexed_ones_are_noticed(tmp_path: Path) -> None:
    write_raw(tmp_path / "a" / "raw" / "z.bin", [5, 6])
    for name in "xy":
        write_documents(tmp_path / "a" / name, [[1, 2]], np.int32)
    assert sequence_items(tmp_path, seq_len=2, dtype="int32").notices == []
    (tmp_path / "a" / "y.idx").unlink()
    (notice,) = sequence_items(tmp_path, seq_len=2, dtype="int32").notices
    assert notice.startswith(f"{tmp_path}/a/y.bin is read as raw int32")


def test_thousands_of_files_need_few_descriptors(tmp_path: Path) -> None:
    for number in range(300):
        write_raw(tmp_path / "web" / f"{number:04}.bin", [number, number + 1, number + 2])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (min(soft, len(os.listdir("/proc/self/fd")) + 8), hard)
    )
    try:
        items = sequence_items(tmp_path, seq_len=2, dtype="int32", carry=True)
        stream = np.arange(300)[:, None] + np.arange(3)
        assert read_all(items) == stream.reshape(-1, 2).tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- lists with weights ----


def test_a_list_names_folders_files_and_prefixes(tmp_path: Path) -> None:
    write_raw(tmp_path / "raw" / "x.bin", [1, 2])
    write_documents(tmp_path / "pair", [[3], [4]], np.int32)
    np.save(tmp_path / "array.npy", np.array([5, 6], np.int32))
    listing = tmp_path / "list.txt"
    listing.write_text(
        f"# weights\n\n1 {tmp_path}/raw/\n2.5\t{tmp_path}/pair\n0.5 {tmp_path}/array.npy\n"
    )
    entries = read_input_list(listing)
    assert [weight for weight, _ in entries] == [1, 2.5, 0.5]
    items = sequence_items(entries, seq_len=1, dtype="int32")
    assert items.domain_stats == {"array.npy": 1, "pair": 5, "raw": 2}
    assert read_all(items) == [[n] for n in (5, 3, 4, 3, 4, 3, 1, 2)]


def test_weights_are_exact_decimals(tmp_path: Path) -> None:
    write_raw(tmp_path / "a" / "x.bin", range(10))
    items = sequence_items([(2.3, tmp_path / "a")], seq_len=1, dtype="int32")
    assert items.num_items == 23


NO_PAIR = "must be a weight and a path"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "is empty"),
        ([(1, "none")], "does not exist"),
        ([(1, "a/web"), (1, "b/web")], "both the domain web"),
        (["a"], NO_PAIR),
        ([(1, "")], NO_PAIR),
        *(([(weight, "a")], "weight of a ") for weight in (0, -1, np.nan, np.inf, "2", None)),
        ("", "lists no inputs"),
        ("data/web\n", NO_PAIR),
        ("1 a\nx data/web\n", "'x data/web'"),
    ],
)
def test_bad_lists_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for domain in "ab":
        write_raw(tmp_path / domain / "web" / "x.bin", [1])
    is_text = isinstance(entries, str)
    Path("list").write_text(entries if is_text else "")
    with pytest.raises(MillraceError, match=message):
        sequence_items(read_input_list("list") if is_text else entries, 1, "int32")


# ---- bad files ----


NOT_READ = "not an array that can be read"
CONVERT = "millrace convert .*"
BAD_FILES: list[tuple[str, Any, str]] = [
    ("fortran.npy", np.asfortranarray(np.zeros((2, 3), np.int32)), "in Fortran order"),
    ("scalar.npy", np.array(3, np.int32), r"the shape \[\]"),
    ("three.npy", np.zeros((1, 1, 1), np.int32), r"the shape \[1, 1, 1\]"),
    ("floats.npy", np.zeros(3), f"float64.*{CONVERT}floats.npy NEW.npy --dtype int32"),
    ("wide.npy", np.zeros(3, np.int64), f"int64.*{CONVERT}wide.npy NEW.npy --dtype int32"),
    ("big.npy", np.zeros(3, ">i4"), f"holds >i4.*{CONVERT}big.npy NEW.npy --dtype int32"),
    ("objects.npy", np.array([None]), NOT_READ),
    ("cut.npy", 200, NOT_READ),
    ("longer.npy", 529, "has 529 bytes, but its array ends at byte 528"),
    ("text.npy", b"no array", NOT_READ),
    ("empty.npy", b"", NOT_READ),
    ("odd.bin", b"1234567", "7 bytes, which is not a multiple of 4, the size of uint32"),
    ("lonely.idx", b"", "no lonely.bin beside it"),
    ("dangling.bin", lambda path: path.symlink_to("missing"), "cannot be read: No such file"),
    ("pipe.bin", os.mkfifo, "not a regular file"),
    (
        "damaged.bin",
        lambda path: [path.with_suffix(end).touch() for end in (".bin", ".idx")],
        "truncated",
    ),
    (
        "doubles.bin",
        lambda path: write_documents(path.with_suffix(""), [[1]], "float64"),
        f"doubles holds float64.*{CONVERT}doubles NEW --dtype int32",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_bad_files_are_named_with_a_remedy(
    tmp_path: Path, name: str, content: Any, message: str
) -> None:
    """The content is an array, the size of one that is cut short or longer, bytes, or a writer."""
    path = tmp_path / "web" / name
    path.parent.mkdir()
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        is_size = isinstance(content, int)
        np.save(path, np.zeros(100, np.int32) if is_size else content, allow_pickle=True)
        os.truncate(path, content if is_size else path.stat().st_size)
    with pytest.raises(DataError, match=message) as error:
        sequence_items(tmp_path, seq_len=1)
    assert path.stem in str(error.value)


def test_inputs_without_sequences_are_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "a" / "x.bin", [1, 2, 3])
    (tmp_path / "nothing").mkdir()
    for name, message in (
        ("", "gives no sequence of 4 tokens: its 1 files have 3 tokens"),
        ("missing", "is not a folder"),
        ("nothing", "has no tokens: 0 domains"),
    ):
        with pytest.raises(ConfigError, match=message):
            sequence_items(tmp_path / name, seq_len=4, dtype="int32")


def test_files_of_two_kinds_are_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "a" / "x.bin", [1, 2, 3])
    write_raw(tmp_path / "a" / "nothing.bin", [])
    np.save(tmp_path / "a" / "y.npy", np.zeros(3, np.uint16))
    with pytest.raises(ConfigError, match=r"x.bin holds int32, and .*y.npy holds uint16"):
        sequence_items(tmp_path, seq_len=1, dtype="int32")


def test_large_ids_are_found_when_they_are_read(tmp_path: Path) -> None:
    write_raw(tmp_path / "a" / "x.bin", [1, 2, 3], "uint32")
    write_raw(tmp_path / "a" / "y.bin", [2**31 - 1, 4, 2**31, 5], "uint32")
    for carry, numbers in ((False, [0, 2]), (True, [0, 2, 1])):
        items = sequence_items(tmp_path, seq_len=2, carry=carry)
        read_all(items, np.array(numbers[:1]))
        with pytest.raises(DataError, match=r"y.bin holds the token 2147483648 at position 2"):
            read_all(items, np.array(sorted(numbers)))


# ---- files that change ----


CHANGES = ["touch", "append", "truncate", "replace", "remove", "read", "pipe", "touch later"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tmp_path / "in" / "a" / "x.bin"
    write_raw(path, range(10))
    write_raw(tmp_path / "other", range(11))
    items = sequence_items(tmp_path / "in", seq_len=2, dtype="int32")
    read_pieces = _native.read_pieces

    def read_and_touch(*arguments: Any, **options: Any) -> int:
        bits = read_pieces(*arguments, **options)
        os.utime(path, ns=(0, 0))
        return bits

    if change == "touch":
        os.utime(path, ns=(0, 0))
    elif change == "touch later":
        monkeypatch.setattr(_native, "read_pieces", read_and_touch)
    elif change in ("append", "truncate"):
        os.truncate(path, 44 if change == "append" else 8)
    elif change == "replace":
        (tmp_path / "other").rename(path)
    else:
        path.unlink()
        if change == "read":
            path.mkdir()
        elif change == "pipe":  # without a writer: to open it would take forever
            os.mkfifo(path)
    with pytest.raises(DataError, match=r"x\.bin (changed while|cannot be read: No such)"):
        read_all(items)


def test_files_and_sequences_beyond_2_gb(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.bin"
    path.parent.mkdir()
    with open(path, "wb") as file:  # a sparse file
        file.truncate(2**34 + 40)
        file.seek(2**34)
        file.write(np.arange(10, dtype=np.uint32).tobytes())
    items = sequence_items(tmp_path, seq_len=5)
    count = (2**32 + 10) // 5
    assert (items.num_items, items.domains[0].num_left) == (count, 1)
    assert read_all(items, np.array([0, count - 1])) == [[0] * 5, [4, 5, 6, 7, 8]]
    items = sequence_items([(2.5, tmp_path / "a")], seq_len=5)
    assert items.num_items == 5 * count // 2
    assert read_all(items, np.array([2 * count - 1])) == [[4, 5, 6, 7, 8]]
    items = sequence_items(tmp_path, seq_len=2**22)
    assert max(read_all(items, np.array([1023]))[0]) == 0
