"""Which files a job reads: files, folders, patterns, lists of files, standard input."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence

from millrace import checks
from millrace.errors import ConfigError, TextError
from millrace.names import is_beside_documents
from millrace.text.formats import PlainText, known_formats
from millrace.text.parts import Format, InputFile
from millrace.text.streams import NUM_MAGIC_BYTES, STDIN, compression_of, is_of_a_process, readable

_COMPRESSED_ENDINGS = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz")

# What the `datasets` library writes beside its tables.
_BESIDE_TABLES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_NOTES = re.compile(r"(readme|licen[cs]e|notice|copying|changelog|citation)\b.*", re.IGNORECASE)


def find_inputs(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    separator: str | None = None,
    format: Format | None = None,  # noqa: A002
    others: list[str] | None = None,
) -> list[InputFile]:
    """The files of a job, in the order in which they are given.

    Args:
        inputs: Files, folders, patterns (`*`, `?`, `[...]`, and `**` for any folders) and "-" for
            standard input. Of a folder, all files with a known ending are read, sorted by path;
            hidden files and what this library writes are left out, and so are notes such as
            README.md beside tables. A file that is given twice is read twice.
        separator: Text between the documents of plain text files; None: a file is a document.
        format: Format of all files; None: the names and first bytes of files tell it.
        others: List to which the files of folders are appended whose ending is not known.

    Raises:
        ConfigError: No inputs, an argument of a wrong type, or a pipe that is given twice.
        TextError: A file that is missing or cannot be read, a folder without documents, or a
            pattern that matches no file.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "a.jsonl").write_text('{"text": "a"}')
    ...     [file] = find_inputs([folder])
    >>> file.format.name, file.size
    ('jsonl', 13)
    """
    paths = checks.paths("inputs", inputs)
    for path in paths:
        if "\0" in path:
            raise ConfigError(f"one of inputs is {checks.shown(path)}, which no file can have")
    if not paths:
        raise ConfigError("there are no inputs; give at least one file, folder or pattern")
    formats = _Formats(known_formats(separator))
    if format is not None:
        if separator is not None:
            raise ConfigError("separator cannot be combined with format: give it to the format")
        if not isinstance(format, Format):
            raise ConfigError(
                f"format must be an instance of a subclass of millrace.text.Format, not "
                f"{checks.shown(format)}"
            )
        formats = _Formats([format])
    others = [] if others is None else others
    files = [
        formats.input_file(path) for entry in paths for path in _expand(entry, formats, others)
    ]
    _check_pipes(files)
    return files


def _check_pipes(files: Sequence[InputFile]) -> None:
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


class _Formats:
    """The formats that files may have; the first is that of files whose format nothing tells."""

    def __init__(self, formats: Sequence[Format]) -> None:
        self._formats = formats
        self.by_ending = {ending: format_ for format_ in formats for ending in format_.endings}

    def by_name(self, path: str) -> Format | None:
        """The format that the endings of a name tell; None for an unknown ending."""
        name, ending = os.path.splitext(os.path.basename(path).lower())
        if ending in _COMPRESSED_ENDINGS:
            ending = os.path.splitext(name)[1]
        return self.by_ending.get(ending)

    def format_of(self, path: str, first_bytes: bytes) -> Format:
        for format_ in self._formats:
            if format_.matches(first_bytes):
                return format_
        return self.by_name(path) or self._formats[0]

    def input_file(self, path: str) -> InputFile:
        """Format, compression and size of one file.

        Raises:
            TextError: A file that is missing, cannot be read or has no reader.
        """
        if path == STDIN:
            return self._pipe(path)
        with readable(path):
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode):
                raise TextError(f"{path} is a folder; name its files")
            if not stat.S_ISREG(status.st_mode) or is_of_a_process(path):
                if not os.access(path, os.R_OK):
                    raise PermissionError(13, os.strerror(13))
                return self._pipe(path)
            with open(path, "rb", buffering=0) as file:
                first_bytes = file.read(NUM_MAGIC_BYTES)
        compression = compression_of(first_bytes)
        format_ = self.format_of(path, first_bytes)
        if compression and format_.needs_file:
            raise TextError(
                f"{path} is a {compression}-compressed {format_.name} file. Decompress it: the "
                "format has a compression inside"
            )
        return InputFile(
            path=path,
            format=format_,
            compression=compression,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
        )

    def _pipe(self, path: str) -> InputFile:
        format_ = self.format_of(path, b"")
        if format_.needs_file:
            raise TextError(
                f"{path} is not a regular file, and {format_.name} cannot be read from a pipe. "
                "Write it to a file first"
            )
        return InputFile(path=path, format=format_, size=None, mtime_ns=None)


def _expand(entry: str, formats: _Formats, others: list[str]) -> Iterator[str]:
    """The paths of one input: of a folder and of a pattern, sorted."""
    if entry == STDIN:
        yield entry
    elif os.path.isdir(entry):
        yield from _files_of(entry, formats, others)
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
            yield from _files_of(path, formats, others) if os.path.isdir(path) else (path,)


def _files_of(folder: str, formats: _Formats, others: list[str]) -> list[str]:
    paths = sorted(_walk(folder, ()))
    files = [path for path in paths if formats.by_name(path)]
    others += [path for path in paths if not formats.by_name(path)]
    texts = {path for path in files if isinstance(formats.by_name(path), PlainText)}
    if texts != {*files}:
        files = [path for path in files if path not in texts or not _is_note(path)]
    if not files:
        raise TextError(
            f"{folder} has no documents: no file in it has a known ending "
            f"({', '.join(formats.by_ending)}, or one of these compressed). Name its files, or a "
            "pattern"
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
    return bool(_NOTES.fullmatch(os.path.basename(path)))
