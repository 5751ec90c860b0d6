"""Ways to read a file: whole, in parts, unpacked into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millrace.text import (
    InputFile,
    Part,
    Query,
    check_keys,
    find_inputs,
    parts_of,
    pieces_of,
    read_documents,
)


@dataclass
class Reading:
    """Documents with their lines, offsets and ids, and what was rejected."""

    texts: list[list[Any]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    byte_offsets: list[int] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)
    rejected: list[tuple[int, int, str, bytes]] = field(default_factory=list)
    num_lines: int = 0
    num_bytes: int = 0

    @property
    def reasons(self) -> list[str]:
        return [reason for _, _, reason, _ in self.rejected]


def read_part(part: Part, keys: Sequence[str] = ("text",), **options: Any) -> Reading:
    reading = Reading(texts=[[] for _ in keys])

    def reject(line: int, byte_offset: int, reason: str, data: bytes) -> None:
        reading.rejected.append((line, byte_offset, reason, data))

    if "max_document_size" in options:
        options["max_size"] = options.pop("max_document_size")
    query = Query(**{"keys": check_keys(keys), "reject": reject, **options})
    for batch in read_documents(part, query):
        for column, texts in zip(reading.texts, batch.texts, strict=True):
            assert len(texts) == len(batch.ids) == len(batch.lines) == len(batch.byte_offsets)
            column += texts
        reading.lines += batch.lines.tolist()
        reading.byte_offsets += batch.byte_offsets.tolist()
        reading.ids += batch.ids
        reading.num_lines += batch.num_lines
        reading.num_bytes += batch.num_bytes
    return reading


def joined(readings: Iterable[Reading], keys: Sequence[str] = ("text",)) -> Reading:
    """Readings of consecutive parts as one, with lines that count from the first part's."""
    whole = Reading(texts=[[] for _ in keys])
    for reading in readings:
        for column, texts in zip(whole.texts, reading.texts, strict=True):
            column += texts
        whole.lines += [whole.num_lines + line for line in reading.lines]
        whole.byte_offsets += reading.byte_offsets
        whole.ids += reading.ids
        whole.rejected += [(whole.num_lines + line, *others) for line, *others in reading.rejected]
        whole.num_lines += reading.num_lines
        whole.num_bytes += reading.num_bytes
    return whole


def read_file(path: Path | str, keys: Sequence[str] = ("text",), **options: Any) -> Reading:
    """All documents of a file."""
    [file] = find_inputs([path], separator=options.pop("separator", None))
    [part] = parts_of(file, 1 << 40)
    return read_part(part, keys, **options)


def read_in_parts(
    path: Path | str, size: int, keys: Sequence[str] = ("text",), **options: Any
) -> Reading:
    [file] = find_inputs([path])
    return joined([read_part(part, keys, **options) for part in parts_of(file, size)], keys)


def unpack(file: InputFile, folder: Path, size: int, **options: Any) -> list[Part]:
    """The pieces of a file, each written to the folder."""
    parts = []
    for number, piece in enumerate(pieces_of(file, size, **options)):
        path = folder / f"piece{number}"
        with open(path, "wb") as output:
            output.writelines(piece.chunks)
        parts.append(replace(piece.part, path=str(path)))
    return parts


def read_in_pieces(
    path: Path | str,
    folder: Path,
    size: int,
    keys: Sequence[str] = ("text",),
    separator: str | None = None,
    **options: Any,
) -> Reading:
    """The documents of a file's pieces; checks the first line of each."""
    [file] = find_inputs([path], separator=separator)
    folder.mkdir(exist_ok=True)
    readings = []
    line = None
    limit = {name: options[name] for name in ("max_document_size",) if name in options}
    for part in unpack(file, folder, size, **limit):
        reading = read_part(part, keys, **options)
        assert part.first_line is not None
        assert line is None or part.first_line == line
        has_header = part.format.name == "csv"  # which every piece repeats
        line = part.first_line + reading.num_lines - has_header
        shift = part.first_line - 1
        reading.lines = [shift + each for each in reading.lines]
        reading.rejected = [(shift + each, *others) for each, *others in reading.rejected]
        readings.append(reading)
    whole = Reading(texts=[[] for _ in keys])
    for reading in readings:
        for column, texts in zip(whole.texts, reading.texts, strict=True):
            column += texts
        whole.lines += reading.lines
        whole.byte_offsets += reading.byte_offsets
        whole.ids += reading.ids
        whole.rejected += reading.rejected
        whole.num_bytes += reading.num_bytes
    if line is not None:
        whole.num_lines = line - 1
    return whole
