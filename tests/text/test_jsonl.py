"""JSONL: which lines there are, and what they mean."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from tests.text.reading import read_data, read_file, read_in_parts

BOM = b"\xef\xbb\xbf"


pieces_of_files = st.lists(
    st.sampled_from(
        [b"\n", b"\r\n", b" ", b"{}", BOM, b'{"text": "a"}', b'{"text": "bc\xc3\xa9"}', b"x"]
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(
    chunks=pieces_of_files,
    size=st.integers(1, 30),
    block_size=st.integers(1, 40),
    limit=st.integers(1, 20) | st.just(99),
)
def test_parts_share_out_the_lines(
    tmp_path_factory: pytest.TempPathFactory,
    chunks: list[bytes],
    size: int,
    block_size: int,
    limit: int,
) -> None:
    """Wherever a file is cut, each line is read once, with its number, offset and bytes; of one
    beyond the limit, none is kept."""
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.write_bytes(b"".join(chunks))
    expected, place = {}, 0
    for number, line in enumerate(path.read_bytes().split(b"\n")):
        data = line.removeprefix(BOM) if number == 0 else line
        if data.strip() or len(data) > limit:
            expected[number] = place + len(line) - len(data), data if len(data) <= limit else b""
        place += len(line) + 1
    reading = read_in_parts(path, size, block_size=block_size, max_document_size=limit)
    assert reading == read_file(path, max_document_size=limit)
    found = {line: (offset, data) for line, offset, _, data in reading.rejected}
    for line, offset in zip(reading.lines, reading.byte_offsets, strict=True):
        found[line] = offset, expected[line][1]
    assert found == expected
    assert reading.num_bytes == path.stat().st_size


def test_parts_of_an_object(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\nx\n' * 9)
    assert read_in_parts(f"file://{tmp_path}/a.jsonl", 20) == read_file(tmp_path / "a.jsonl")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def json_lines(draw: Any) -> bytes:
    """Lines of JSON, and lines that are nearly JSON."""
    text = draw(st.text(st.characters(exclude_categories=()), max_size=8) | values)
    record = {"text": text, "id": draw(values), "text2": draw(values)}
    line = json.dumps(record, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(line)))
        change = draw(
            st.binary(max_size=2)
            | st.sampled_from(
                [b"NaN", b"-Infinity", b"1e999", b"9" * 30, b'"text": "z", ', b"\\ud800"]
            )
        )
        line = line[:place] + change + line[place + draw(st.integers(0, 2)) :]
    return line.replace(b"\n", b" ")


def json_document(line: bytes) -> Any:
    """The text and the id of a line by Python's json; None if it is not a document."""
    try:
        record = json.loads(line.decode())
        text, id_ = record["text"], record.get("id")
        for item in text if isinstance(text, list) else [text]:
            item.encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if isinstance(id_, str):
        return text, id_ if id_.encode(errors="ignore").decode() == id_ else None
    return text, json.dumps(id_) if type(id_) in (int, float) else None


@settings(max_examples=400, deadline=None)
@given(lines=st.lists(json_lines(), max_size=4))
@example(
    lines=[b'{"text": "a", "text": "b"}', b'{"text": "\\ud83d\\ude00"}', b'["text"]', b'"text"']
)
@example(
    lines=[b'{"x": NaN, "text": "a"}', b'{"x": "\\ud800", "text": "a"}', b'{"text": "\\udc00"}']
)
def test_json_means_what_pythons_json_means(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(b"0\n" + b"".join(line + b"\n" for line in lines))
    reading = read_file(path)
    expected = {
        number: document
        for number, line in enumerate(lines, start=1)
        if (document := json_document(line)) is not None
    }
    documents = zip(reading.texts[0], reading.ids, strict=True)
    assert dict(zip(reading.lines, documents, strict=True)) == expected
    bad = {n for n, line in enumerate(lines, 1) if line.strip() and n not in expected} | {0}
    assert {line for line, *_ in reading.rejected} == bad
    assert all(data == ([b"0", *lines])[line] for line, _, _, data in reading.rejected)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": 1}', 'the value of "text" is 1, not a string or a list'),
        (b'{"text": null}', "is null, not"),
        (b'{"text": ["a", 1]}', "is ['a', 1], not"),
        (b'{"a": 1}', 'there is no key "text"; its keys are: a'),
        (b"[1]", "a JSON list, not an object"),
        (b'{"text": "a"', "not valid JSON (Expecting ',' delimiter: line 1 column 13"),
        (b'{"text": "\xff"}', "byte 11 is not UTF-8"),
        (b'{"text": "\\udce9"}', "half of a surrogate pair"),
        (b'{"text": ["a", "\\udce9"]}', "half of a surrogate pair"),
        (b"[" * 100000, "not valid JSON (maximum recursion depth"),
    ],
)
def test_a_bad_line_is_rejected_and_reading_goes_on(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    reading = read_data(tmp_path, b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    assert reading.texts == [["a", "b"]]
    assert reading.lines == [0, 2]
    [(number, offset, text, data)] = reading.rejected
    assert (number, offset, data) == (1, 14, line)
    assert reason in text


def test_keys_are_literal_before_dots_reach_into_objects(tmp_path: Path) -> None:
    data = (
        '{"doc.text": "literal", "doc": {"text": "nested"}}\n{"doc": {"text": "nested"}}\n'
        '{"doc": ["text"]}\n{"doc": {}}\n'
    )
    reading = read_data(tmp_path, data, ["doc.text"], id_key="doc.text")
    assert reading.texts == [["literal", "nested"]]
    assert reading.ids == ["literal", "nested"]
    assert len(reading.rejected) == 2


def test_the_id_of_a_line_that_python_cannot_nest(tmp_path: Path) -> None:
    data = '{"id": 7.5, "text": "a", "deep": ' + "[" * 1000 + "]" * 1000 + "}"
    assert read_data(tmp_path, data).ids == ["7.5"]


def test_empty_documents_are_rejected_on_request(tmp_path: Path) -> None:
    data = '{"a": "", "b": ""}\n{"a": "", "b": "x"}\n{"a": [""], "b": []}\n'
    reading = read_data(tmp_path, data, ["b", "a"])
    assert (reading.texts, reading.lines) == ([["", "x", []], ["", "", [""]]], [0, 1, 2])
    reading = read_data(tmp_path, data, ["a", "b"], skip_empty=True)
    assert reading.lines == [1]
    assert reading.reasons == ["the document is empty"] * 2
