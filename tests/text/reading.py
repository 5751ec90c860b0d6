"""Ways to read a file: whole, in parts, unpacked into pieces."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millrace.text import (
    Part,
    Query,
    check_keys,
    find_inputs,
    first_line_of,
    parts_of,
    pieces_of,
    read_documents,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


@dataclass
class Reading:
    """Documents with their lines, offsets and ids, and what was rejected."""

    texts: list[list[Any]]
    lines: list[int] = field(default_factory=list)
    byte_offsets: list[int] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)
    rejected: list[tuple[int, int, str, bytes]] = field(default_factory=list)
    num_lines: int = 0
    num_bytes: int = 0

    @property
    def reasons(self) -> list[str]:
        return [reason for _, _, reason, _ in self.rejected]

    def add(self, other: Reading, first: int) -> None:
        """Appends what comes after it, whose lines count from `first`."""
        for column, texts in zip(self.texts, other.texts, strict=True):
            column += texts
        self.lines += [first + line for line in other.lines]
        self.byte_offsets += other.byte_offsets
        self.ids += other.ids
        self.rejected += [(first + line, *others) for line, *others in other.rejected]
        self.num_lines += other.num_lines
        self.num_bytes += other.num_bytes


def read_part(part: Part, keys: Sequence[str] = ("text",), **options: Any) -> Reading:
    reading = Reading([[] for _ in keys])

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


def read_file(path: Path | str, keys: Sequence[str] = ("text",), **options: Any) -> Reading:
    """All documents of a file."""
    [file] = find_inputs([path], separator=options.pop("separator", None))
    [part] = parts_of(file, 1 << 40)
    return read_part(part, keys, **options)


def read_data(folder: Path, data: bytes | str, *arguments: Any, **options: Any) -> Reading:
    """All documents of JSON lines."""
    path = folder / "a.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_file(path, *arguments, **options)


def read_in_parts(
    path: Path | str, size: int, keys: Sequence[str] = ("text",), **options: Any
) -> Reading:
    [file] = find_inputs([path])
    whole = Reading([[] for _ in keys])
    for part in parts_of(file, size):
        reading, first = read_part(part, keys, **options), whole.num_lines
        assert not reading.num_lines or first_line_of(part) == first + file.format.first_line
        whole.add(reading, first)
    return whole


def read_in_pieces(
    path: Path | str, folder: Path, size: int, separator: str | None = None, **options: Any
) -> Reading:
    """The documents of a file's pieces; checks the first line of each."""
    [file] = find_inputs([path], separator=separator)
    folder.mkdir(exist_ok=True)
    whole, line = Reading([[]]), None
    limit = {name: options[name] for name in ("max_document_size",) if name in options}
    for number, piece in enumerate(pieces_of(file, size, **limit)):
        path = folder / f"{number}"
        path.write_bytes(b"".join(piece.chunks))
        part = replace(piece.part, file=replace(piece.part.file, path=str(path)))
        reading = read_part(part, **options)
        assert part.first_line is not None
        assert line in (None, part.first_line)
        # Every piece of a CSV file repeats the header.
        line = part.first_line + reading.num_lines - (part.file.format.name in ("csv", "tsv"))
        whole.add(reading, part.first_line - 1)
        whole.num_lines = line - 1
    return whole
