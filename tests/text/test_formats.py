"""Every format: whole, in parts and in pieces."""

import csv
import gzip
import io
import itertools
import json
import lzma
import sys
import tracemalloc
import uuid
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings, strategies as st
from pyarrow import parquet

from millrace import ConfigError, TextError
from millrace.text import find_inputs, parts_of, pieces_of
from millrace.text.formats.arrow_tables import records_of
from tests.text.reading import COMPRESS, read_file, read_in_parts, read_in_pieces, zstd

TEXTS = ["the water", "", "turns\nthe mill", "水車 🌊", '"quoted", and\r\nmore', "a" * 300]
DATA = b"".join(
    json.dumps({"text": text, "id": i}).encode() + b"\n" for i, text in enumerate(TEXTS * 3)
)
EMPTY_FRAME = b"\x5a\x2a\x4d\x18\x03\x00\x00\x00abc"  # zstd's skippable frame


@pytest.fixture(params=["isal", "zlib"])
def gzip_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each library that reads gzip, if it is installed."""
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    else:
        pytest.importorskip("isal")
    return str(request.param)


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("block_size", [7, 1 << 20])
def test_compressed_files_of_any_name(tmp_path: Path, compression: str, block_size: int) -> None:
    """Also of several streams, one after the other."""
    compress = COMPRESS[compression]
    path = tmp_path / "a.anything"
    path.write_bytes(compress(DATA[:100]) + compress(b"") + compress(DATA[100:]))
    [file] = find_inputs([path])
    assert (file.format.name, file.compression) == ("jsonl", compression)
    assert file.format.has_pieces(file)
    assert parts_of(file, 9) == [file.part()]
    reading = read_file(path, block_size=block_size)
    plain = tmp_path / "plain"
    plain.write_bytes(DATA)
    expected = read_file(plain)
    assert reading.texts == expected.texts == [TEXTS * 3]
    assert reading.byte_offsets == expected.byte_offsets
    assert reading.num_bytes == path.stat().st_size
    for size in (1, 100, 10000):
        assert read_in_pieces(path, tmp_path / f"pieces{size}", size) == reading
        pieces = [b"".join(piece.chunks) for piece in pieces_of(file, size)]
        assert b"".join(pieces) == DATA
        assert all(len(piece) < size + 1000 for piece in pieces)


def test_padding_frames_without_text_and_long_windows(tmp_path: Path, gzip_library: str) -> None:
    path, names = tmp_path / "a", zstd.CompressionParameter
    long = {names.window_log: 28, names.enable_long_distance_matching: 1}
    for data in (
        gzip.compress(DATA[:90]) + b"\0" * 70 + gzip.compress(DATA[90:]) + b"\0" * 512,
        lzma.compress(DATA[:90]) + b"\0" * 8 + lzma.compress(DATA[90:]) + b"\0" * 4,
        EMPTY_FRAME + zstd.compress(DATA[:90]) + EMPTY_FRAME + zstd.compress(DATA[90:]),
        zstd.compress(DATA, options=long),
    ):
        path.write_bytes(data)
        assert read_file(path).texts == [TEXTS * 3]


@pytest.mark.parametrize("compression", COMPRESS)
def test_damaged_and_truncated_compressed_files_are_refused(
    tmp_path: Path, compression: str, gzip_library: str
) -> None:
    path = tmp_path / "a"
    stream = COMPRESS[compression](DATA)
    whole, two = len(stream), stream + stream
    sizes = {*range(12, len(two), 7), *range(whole - 9, whole + 9), len(two) - 1} - {whole}
    for data in (
        *(two[:size] for size in sizes),
        stream[:40] + b"abc" + stream[43:],
        stream + b"garbage after the end",
        stream + stream[:-20] + b"x" * 20,
    ):
        path.write_bytes(data)
        with pytest.raises(TextError, match=f"{path}: the compressed data"):
            read_file(path)


def write_table(path: Path, columns: dict[str, Any], rows: int = 1000) -> Path:
    """A Parquet file (.parquet), an Arrow file (.arrow) or an Arrow stream (.arrows)."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=rows)
        return path
    open_ = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
    with open_(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.arrows"])
def test_tables_by_groups_of_rows(tmp_path: Path, name: str) -> None:
    texts = [f"{i} é" * (i % 5) for i in range(100)]
    columns = {"other": list(range(100)), "text": texts, "id": list(range(100))}
    path = write_table(tmp_path / name, columns, 7)
    if name == "a.arrows":
        path = path.rename(
            tmp_path / "data-00000-of-00001.arrow"
        )  # as `datasets` names its streams
    [file] = find_inputs([path])
    assert not file.format.has_pieces(file)
    reading = read_file(path)
    assert reading.texts == [texts]
    assert reading.lines == list(range(100))
    assert reading.byte_offsets == [-1] * 100
    assert reading.ids == [str(i) for i in range(100)]
    assert reading.num_lines == 100
    if name != "a.arrows":  # which ends with a mark
        assert reading.num_bytes == path.stat().st_size
    parts = parts_of(file, 1)
    assert len(parts) == (1 if name == "a.arrows" else 15)
    if name == "a.parquet":
        assert len(parts_of(file, 1 << 40)) == 1
    for size in (1, 700, 1 << 40):
        in_parts = read_in_parts(path, size)
        in_parts.num_bytes = reading.num_bytes
        assert in_parts == reading


TYPES = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
TYPES += [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.binary_view()]


@pytest.mark.parametrize("type_", TYPES, ids=str)
def test_columns_of_text(tmp_path: Path, type_: Any) -> None:
    values = [b"a", b"", "é".encode() * 100, None]
    is_binary = "binary" in str(type_)
    column = pa.array(values if is_binary else [v and v.decode() for v in values], type_)
    for name in ("a.arrows", "a.parquet")[: 1 if "view" in str(type_) else 2]:
        reading = read_file(write_table(tmp_path / name, {"text": column}))
        assert reading.texts == [["a", "", "é" * 100]]
        assert reading.lines == [0, 1, 2]
        [(line, offset, reason, data)] = reading.rejected
        assert (line, offset, data) == (3, -1, b'{"text": null}')
        assert 'the value of "text" is null, not a string' in reason


def test_nested_columns_and_lists(tmp_path: Path) -> None:
    docs = [{"text": "a", "n": 1}, None, {"text": None, "n": 2}, {"text": "b", "n": 3}]
    lists = [["x", "y"], [], ["z"], ["w", None]]
    path = write_table(tmp_path / "a.parquet", {"doc": docs, "parts": lists})
    assert read_file(path, ["doc.text"]).texts == [["a", "b"]]
    reading = read_file(path, ["parts"], id_key="doc.n")
    assert reading.texts == [[["x", "y"], [], ["z"]]]
    assert reading.ids == ["1", None, "2"]
    assert "is ['w', None], not a string or a list of strings" in reading.reasons[0]
    columns = {"doc.text": ["literal"], "doc": [{"text": "nested"}]}
    assert read_file(write_table(path, columns), ["doc.text"]).texts == [["literal"]]


def test_rows_that_are_not_utf8_or_too_long(tmp_path: Path) -> None:
    good = pa.array([b"a", b"\xff\xfe", "é".encode() * 50, b"b"])
    strings = pa.Array.from_buffers(pa.string(), 4, good.buffers())
    lists = pa.ListArray.from_arrays([0, 1, 2, 3, 4], strings)
    for column in (good, strings, lists):
        path = write_table(tmp_path / "a.parquet", {"text": column})
        reading = read_file(path, max_document_size=99)
        assert reading.lines == [0, 3]
        assert "not UTF-8" in reading.reasons[0]
        assert "longer than 99 bytes" in reading.reasons[1]
        assert "\\udcff" in reading.rejected[0][3].decode()


ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
UUIDS = getattr(pa, "uuid", lambda: pa.binary(16))()  # pyarrow has them since version 18


@pytest.mark.parametrize(
    ("value", "type_", "text"),
    [
        (1, pa.time64("ns"), "00:00:00.000000001"),
        (1, pa.timestamp("ns"), "1970-01-01 00:00:00.000000001"),
        (1, pa.timestamp("us", "UTC"), "1970-01-01 00:00:00.000001Z"),
        (10**6, pa.duration("ns"), "1000000"),
        (1, pa.date32(), "1970-01-02"),
        (Decimal("1.50"), pa.decimal128(5, 2), "1.50"),
        (ID.bytes, pa.binary(16), str(ID)),
        (ID.bytes, UUIDS, str(ID)),
        (b"\xff\x00", pa.binary(), "ff00"),
        (b"a7", pa.binary(), "a7"),
        (1.5, pa.float64(), "1.5"),
        ([1], pa.list_(pa.time64("ns")), None),
        ((1, 2, 3), pa.month_day_nano_interval(), None),
    ],
)
def test_ids_of_any_type(tmp_path: Path, value: Any, type_: Any, text: str | None) -> None:
    columns = {"text": ["a", "b"], "id": pa.array([value, None], type_)}
    for name in ("a.parquet", "a.arrow")["interval" in str(type_) :]:
        assert read_file(write_table(tmp_path / name, columns)).ids == [text, None]


def test_records_hold_times_as_text() -> None:
    time, text = 1_700_000_000_123_456_789, "2023-11-14 22:13:20.123456789"
    odd = pa.array([time, None], pa.timestamp("ns"))
    broken = pa.array([b"a\xff", b"b"]).cast(pa.string(), safe=False)
    columns = {
        "time": odd,
        "late": pa.array([10**7, 0], pa.date32()),
        "zone": pa.array([1, 2], pa.timestamp("us", tz="Mars/Base")),
        "list": pa.array([[time, None], None], pa.list_(pa.timestamp("ns"))),
        "interval": pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
        "struct": pa.StructArray.from_arrays([odd, broken], ["a", "b"]),
    }
    first, second = records_of(pa.table(columns), "table")
    zones = ["1970-01-01 00:00:00.000001", "1970-01-01 00:00:00.000002"]
    assert [*first.values()] == [
        text,
        "29349-01-26",
        zones[0],
        [text, None],
        (1, 2, 3),
        {"a": text, "b": b"a\xff"},
    ]
    assert [*second.values()] == [None, "1970-01-01", zones[1], None, None, {"a": None, "b": "b"}]


@pytest.mark.parametrize(("name", "least"), [("a.parquet", 4), ("a.arrows", 0)])
def test_damaged_tables_are_refused(tmp_path: Path, name: str, least: int) -> None:
    path = write_table(tmp_path / name, {"text": [str(i) for i in range(1000)]}, 100)
    data = path.read_bytes()
    for size in range(least, len(data) - 8, 101):
        path.write_bytes(data[:size])
        with pytest.raises(TextError, match=f"{path} "):
            read_file(path)


def test_tables_without_the_column_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", {"n": [1], "s": [{"a": "b"}]})
    (tmp_path / "a.csv").write_text("a,b,b\n1,2,3\n")
    for name, key, message in [
        ("a.parquet", "text", 'has no single column "text" of texts; its columns are: n, s'),
        ("a.parquet", "s.b", r'has no single column "s\.b"'),
        ("a.parquet", "n", 'column "n" of texts, but of int64'),
        ("a.csv", "text", '"text" of texts; its columns are: a, b, b'),
        ("a.csv", "b", 'has no single column "b" of texts'),
    ]:
        with pytest.raises(TextError, match=message):
            read_file(tmp_path / name, [key])


csv_pieces = st.sampled_from(
    ["", "a", '"', '""', ",", "\n", "\r", "\r\n", '"a,b"', '"a\nb"', '"a\rb"', '"a""\r\nb"']
    + ["é", "x" * 9, "\xff", "\x85", "\v", '"b",', "a,b\n", "a,b\r", "a,b\r\n"]
    + ["\0"] * (sys.version_info >= (3, 11))
)


def rows_of(table: str, delimiter: str) -> list[tuple[list[str], str]]:
    """What Python's csv makes of a table: the fields and the characters of each row."""
    lines = list(io.StringIO(table, newline=""))
    reader = csv.reader(lines, delimiter=delimiter)
    starts = [0]
    return [
        (fields, "".join(lines[starts[-1] : starts.append(reader.line_num) or starts[-1]]))
        for fields in reader
    ]


@settings(max_examples=120, deadline=None)
@example("a.csv", ["a", ",", '"', "b"], 9, 9, 30)  # a quote stays open
@given(
    name=st.sampled_from(["a.csv", "a.tsv", "a.csv.gz"]),
    pieces=st.lists(csv_pieces, max_size=14),
    size=st.integers(1, 30),
    block_size=st.integers(1, 30),
    limit=st.integers(10, 30),  # the header, with a mark
)
def test_csv_rows_are_those_of_pythons_csv(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    pieces: list[str],
    size: int,
    block_size: int,
    limit: int,
) -> None:
    """Whatever ends the lines, and whatever the sizes of buffers, pieces and the longest row."""
    folder = tmp_path_factory.mktemp("csv")
    path, delimiter = folder / name, "\t" if name == "a.tsv" else ","
    table = "".join(["text,b\n", *pieces]).replace(",", delimiter)  # a character for each byte
    data = b"\xef\xbb\xbf" * (size % 2) + table.encode("latin-1")
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    rows = rows_of(table, delimiter)
    has_open_quote = rows_of(table + "\nend", delimiter)[-1][0] != ["end"]
    documents, rejected = {}, {}
    for number, (fields, row) in enumerate(rows[1:], start=1):
        is_last = has_open_quote and number == len(rows) - 1
        try:
            if len(fields) == 2 and not is_last:
                text, id_ = (field.encode("latin-1") for field in fields)
                documents[number] = text.decode(), id_.decode(errors="replace")
            elif fields:
                raise ValueError
        except ValueError:
            rejected[number] = row.encode("latin-1")

    def check(**options: Any) -> None:
        whole = read_file(path, block_size=block_size, id_key="b", **options)
        assert (whole.num_lines, whole.num_bytes) == (len(rows), path.stat().st_size)
        pieces = read_in_pieces(path, folder / "pieces", size, id_key="b", **options)
        for reading in (whole, pieces):
            read = zip(reading.texts[0], reading.ids, strict=True)
            assert dict(zip(reading.lines, read, strict=True)) == documents
            assert {*reading.byte_offsets} <= {-1}
            assert {number: data for number, _, _, data in reading.rejected} == rejected

    check()
    long_rows = (number for number, (_, row) in enumerate(rows, 1) if len(row) > limit)
    number = next(long_rows, None)
    if number is None:
        check(max_document_size=limit)
    else:
        with pytest.raises(TextError, match=f"row {number}: .* longer than {limit} bytes"):
            check(max_document_size=limit)


def test_a_csv_row_too_long_for_memory_is_refused(tmp_path: Path) -> None:
    """A row of many lines, one of a long line, and one whose quote is never closed."""
    path, options = tmp_path / "a.csv", {"max_document_size": 1000, "block_size": 700}
    pieces = partial(read_in_pieces, path, tmp_path / "p", 500)
    for row in ('"' + "water\n" * 100_000 + '"', '"' + "mill, " * 40_000 + '"', '"' + "\n" * 9_999):
        path.write_text(f"text,b\na,2\n{row},3\nc,4\n")
        for read in (partial(read_file, path), pieces):
            tracemalloc.start()
            with pytest.raises(TextError, match=r"a\.csv, row 3: .* longer than 1000 bytes"):
                read(**options)
            assert tracemalloc.get_traced_memory()[1] < 200_000
            tracemalloc.stop()


def test_a_csv_row_of_many_lines_takes_12_bytes_for_each_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.text.streams.BLOCK_SIZE", 7_000)
    size, path = 400_000, tmp_path / "a.csv"
    path.write_text('text\n"' + "a\n" * (size // 2) + '"\n')
    tracemalloc.start()
    for piece in pieces_of(find_inputs([path])[0], size):
        for _ in piece.chunks:
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * size + 500_000


def test_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\n\n")
    assert read_file(path).texts == [["one\r\n\ntwo\n\n"]]
    reading = read_file(path, separator="\n\n")
    assert (reading.texts, reading.byte_offsets) == ([["one\r", "two"]], [3, 9])
    path.write_bytes(b"")
    assert read_file(path).texts == [[""]]
    assert read_file(path, separator="|").texts == [[]]
    assert read_file(path, skip_empty=True).reasons == ["the document is empty"]
    assert read_in_pieces(path, tmp_path / "q", 5).texts == [[""]]
    path.write_bytes(b"a|b\xff|c")
    assert read_file(path, separator="|").texts == [["a", "c"]]
    assert "byte 2 of the text is not UTF-8" in read_file(path, separator="|").reasons[0]
    with pytest.raises(ConfigError, match='only the key "text"'):
        read_file(path, ["content"])


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("a\n|", max_size=30),
    separator=st.sampled_from(["\n", "\n\n", "|", "a|a", "|||"]),
    block_size=st.integers(1, 9),
    limit=st.integers(1, 9),
)
def test_separators_split_from_left_to_right(
    tmp_path_factory: pytest.TempPathFactory, text: str, separator: str, block_size: int, limit: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    path = folder / "a.txt"
    path.write_text(text)
    texts = text.split(separator)
    if not texts[-1]:
        texts.pop()
    reading = read_file(path, separator=separator, block_size=block_size)
    offsets = [*itertools.accumulate((len(t) + len(separator) for t in texts[:-1]), initial=0)]
    pieces = read_in_pieces(path, folder / "pieces", limit, separator=separator)
    for read in (reading, pieces):
        assert read.texts == [texts]
        assert read.byte_offsets == offsets[: len(texts)]
        assert read.lines == [text[:offset].count("\n") for offset in read.byte_offsets]
    short = read_file(path, separator=separator, block_size=block_size, max_document_size=limit)
    assert short.texts == [[text for text in texts if len(text) <= limit]]
    long_offsets = [at for text, at in zip(texts, offsets, strict=False) if len(text) > limit]
    assert [(at, data) for _, at, _, data in short.rejected] == [(at, b"") for at in long_offsets]
