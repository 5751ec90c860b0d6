"""Which files a job reads: files, folders, patterns, lists of files, standard input."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millrace import checks
from millrace.errors import ConfigError, TextError
from millrace.names import is_beside_documents
from millrace.text.records import NOT_UNICODE, is_unicode
from millrace.text.streams import NUM_MAGIC_BYTES, STDIN, compression_of, is_of_a_process, readable

FORMATS = ("jsonl", "parquet", "arrow", "csv", "tsv", "text")
TABLE_FORMATS = ("parquet", "arrow")  # their documents are rows, not lines

_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".tex": "text",
}
_COMPRESSED_ENDINGS = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz")
_PARQUET_MAGIC = b"PAR1"
_ARROW_FILE_MAGIC = b"ARROW1"

# What the `datasets` library writes beside its tables.
_BESIDE_TABLES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_NOTES = re.compile(r"(readme|licen[cs]e|notice|copying|changelog|citation)\b.*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file that holds documents.

    Attributes:
        path: Path of the file; "-" for standard input.
        format: Format of the decompressed file, one of `FORMATS`.
        compression: "gzip", "zstd", "bz2", "xz", or empty. The first bytes of a regular file tell
            it. It is empty for a pipe, whose compression shows when it is read.
        size: Size on disk in bytes; None for a pipe.
        mtime_ns: Time of the last change; None for a pipe.
        is_divisible: Whether `parts_of` can cut the file.
    """

    path: str
    format: str
    compression: str = ""
    size: int | None
    mtime_ns: int | None
    is_divisible: bool

    @property
    def is_pipe(self) -> bool:
        """Whether the file can be read only once, from start to end."""
        return self.size is None

    @property
    def has_pieces(self) -> bool:
        """Whether `pieces_of` can unpack the file."""
        return self.format in ("jsonl", "csv", "tsv", "text") and not self.is_divisible


def find_inputs(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    separator: str | None = None,
    others: list[str] | None = None,
) -> list[InputFile]:
    """The files of a job, in the order in which they are given.

    Args:
        inputs: Files, folders, patterns (`*`, `?`, `[...]`, and `**` for any folders) and "-" for
            standard input. Of a folder, all files with a known ending are read, sorted by path;
            hidden files and what this library writes are left out, and so are notes such as
            README.md beside tables. A file that is given twice is read twice.
        separator: Text between the documents of plain text files, for checks.
        others: List to which the files of folders are appended whose ending is not known.

    Raises:
        ConfigError: No inputs, an argument of a wrong type, or a pipe that is given twice.
        TextError: A file that is missing or cannot be read, a folder without documents, or a
            pattern that matches no file.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "a.jsonl").write_text('{"text": "a"}')
    ...     [file] = find_inputs([folder])
    >>> file.format, file.size
    ('jsonl', 13)
    """
    paths = checks.paths("inputs", inputs)
    for path in paths:
        if "\0" in path:
            raise ConfigError(f"one of inputs is {checks.shown(path)}, which no file can have")
    if not paths:
        raise ConfigError("there are no inputs; give at least one file, folder or pattern")
    if separator is not None and (not isinstance(separator, str) or not separator):
        raise ConfigError(f"separator is {checks.shown(separator)}; give a text, not an empty one")
    if separator is not None and not is_unicode(separator):
        raise ConfigError(f"separator is {separator!r}, which is {NOT_UNICODE}")
    others = [] if others is None else others
    files = [input_file(path) for entry in paths for path in _expand(entry, others)]
    pipes: dict[tuple[int, int], str] = {}
    for file in files:
        if file.is_pipe:
            with readable(file.path):
                status = os.fstat(0) if file.path == STDIN else os.stat(file.path)
            identity = status.st_dev, status.st_ino
            if identity in pipes:
                other = pipes[identity]
                problem = "is given twice" if other == file.path else f"is the same pipe as {other}"
                raise ConfigError(f"{file.path} {problem}, but a pipe can be read only once")
            pipes[identity] = file.path
    return files


def read_input_list(path: str | os.PathLike[str]) -> list[str]:
    """The inputs that a file lists, one a line.

    Blank lines and lines that begin with "#" are skipped. Relative paths count from the current
    folder, as on the command line.

    Raises:
        TextError: A list that cannot be read, is not UTF-8, or names nothing.
    """
    path = checks.one_path("path", path)
    with readable(path), open(0 if path == STDIN else path, "rb", closefd=path != STDIN) as file:
        data = file.read()
    if compression_of(data[:NUM_MAGIC_BYTES]) or b"\0" in data:
        raise TextError(f"{path} is not a list of files; give a text file with a path a line")
    lines = [os.fsdecode(line) for line in data.removeprefix(b"\xef\xbb\xbf").splitlines()]
    inputs = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not inputs:
        raise TextError(f"{path} lists no inputs; write one path on each line")
    return inputs


def input_file(path: str) -> InputFile:
    """Format, compression and size of one file.

    Raises:
        TextError: A file that is missing, cannot be read or has no reader.
    """
    if path == STDIN:
        return InputFile(path=path, format="jsonl", size=None, mtime_ns=None, is_divisible=False)
    with readable(path):
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise TextError(f"{path} is a folder; name its files")
        if not stat.S_ISREG(status.st_mode) or is_of_a_process(path):
            if not os.access(path, os.R_OK):
                raise PermissionError(13, os.strerror(13))
            format_ = _format_of(path)
            if format_ in TABLE_FORMATS:
                raise TextError(
                    f"{path} is not a regular file, and {format_} cannot be read from a pipe. "
                    "Write it to a file first"
                )
            return InputFile(
                path=path, format=format_, size=None, mtime_ns=None, is_divisible=False
            )
        with open(path, "rb", buffering=0) as file:
            first_bytes = file.read(NUM_MAGIC_BYTES)
    compression = compression_of(first_bytes)
    format_ = _format_of(path, first_bytes)
    if compression and format_ in TABLE_FORMATS:
        raise TextError(
            f"{path} is a {compression}-compressed {format_} file. Decompress it: the format has "
            "a compression inside"
        )
    return InputFile(
        path=path,
        format=format_,
        compression=compression,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        is_divisible=_is_divisible(path, format_, compression, first_bytes),
    )


def _format_of(path: str, first_bytes: bytes = b"") -> str:
    if first_bytes.startswith(_PARQUET_MAGIC):
        return "parquet"
    if first_bytes.startswith(_ARROW_FILE_MAGIC):
        return "arrow"
    return _format_by_name(path) or "jsonl"


def _format_by_name(path: str) -> str:
    """The format that the endings of a name tell; empty for an unknown ending."""
    name, ending = os.path.splitext(os.path.basename(path).lower())
    if ending in _COMPRESSED_ENDINGS:
        ending = os.path.splitext(name)[1]
    return _ENDINGS.get(ending, "")


def _is_divisible(path: str, format_: str, compression: str, first_bytes: bytes) -> bool:
    if format_ == "parquet":
        from millrace.text import tables

        return tables.num_row_groups(path) > 1
    if format_ == "arrow":
        return first_bytes.startswith(_ARROW_FILE_MAGIC)
    return format_ == "jsonl" and not compression


def _expand(entry: str, others: list[str]) -> Iterator[str]:
    """The paths of one input: of a folder and of a pattern, sorted."""
    if entry == STDIN:
        yield entry
    elif os.path.isdir(entry):
        yield from _files_of(entry, others)
    elif os.path.lexists(entry) or not glob.has_magic(entry):
        yield entry
    else:
        literal = entry.split(os.sep)
        paths = sorted(
            path
            for path in glob.glob(entry, recursive=True)
            if not _is_ours(path) and not any(map(_is_ours, {*path.split(os.sep)} - {*literal}))
        )
        is_deep = "**" in literal
        files = [path for path in paths if not os.path.isdir(path)]
        if not (files if is_deep else paths):
            raise TextError(f"no file matches the pattern {entry}. Check the path and the pattern")
        for path in files if is_deep else paths:
            yield from _files_of(path, others) if os.path.isdir(path) else (path,)


def _files_of(folder: str, others: list[str]) -> list[str]:
    paths = sorted(_walk(folder, ()))
    files = [path for path in paths if _format_by_name(path)]
    others += [path for path in paths if not _format_by_name(path)]
    if any(_format_by_name(path) != "text" for path in files):
        files = [path for path in files if not _is_note(path)]
    if not files:
        raise TextError(
            f"{folder} has no documents: no file in it has a known ending "
            f"({', '.join(_ENDINGS)}, or one of these compressed). Name its files, or a pattern"
        )
    return files


def _walk(folder: str, parents: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """The files that may be documents, also behind links, but not links to a parent folder."""
    with readable(folder):
        status = os.stat(folder)
        identity = status.st_dev, status.st_ino
        if identity in parents:
            return
        with os.scandir(folder) as scan:
            entries = list(scan)
    for entry in entries:
        if entry.name.startswith((".", "_")) or _is_ours(entry.name):
            continue
        if entry.is_dir():
            yield from _walk(entry.path, (*parents, identity))
        elif not _is_special(entry):
            yield entry.path


def _is_special(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a pipe, socket or device. A link to a missing file is not."""
    with contextlib.suppress(FileNotFoundError):
        return not stat.S_ISREG(entry.stat().st_mode)
    return False


def _is_ours(path: str) -> bool:
    name = os.path.basename(path)
    return is_beside_documents(name) or name in _BESIDE_TABLES


def _is_note(path: str) -> bool:
    return _format_by_name(path) == "text" and bool(_NOTES.fullmatch(os.path.basename(path)))
