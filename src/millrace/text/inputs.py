"""Which files a job reads: files, folders, patterns, lists of files, standard input."""

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from millrace import checks
from millrace.errors import ConfigError, TextError
from millrace.files import files_below, readable
from millrace.names import is_beside_documents
from millrace.storage import exists, storage_of
from millrace.text import streams
from millrace.text.formats.arrow_tables import Arrow, Parquet
from millrace.text.formats.csv_table import Csv
from millrace.text.formats.separated_records import JsonLines, PlainText
from millrace.text.parts import Format, InputFile

_COMPRESSED_ENDINGS = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz")

# What the `datasets` library writes beside its tables.
_BESIDE_TABLES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_NOTES = re.compile(r"(readme|licen[cs]e|notice|copying|changelog|citation)\b.*", re.IGNORECASE)


def find_inputs(
    inputs: Sequence[str | os.PathLike[str] | InputFile],
    *,
    separator: str | None = None,
    format: Format | None = None,  # noqa: A002
    others: list[str] | None = None,
) -> list[InputFile]:
    """The files of a job, in the order in which they are given.

    Args:
        inputs: Files, folders, patterns (`*`, `?`, `[...]`, and `**` for any folders) and "-" for
            standard input. Of a folder, all files with a known ending are read, sorted by path,
            except hidden files, what this library writes, and notes such as README.md beside
            tables. A file that is given twice is read twice. An `InputFile` stays as it is.
        separator: Text between the documents of plain text files; None: a file is a document.
        format: Format of all files; None: the names and first bytes of files tell it.
        others: List to which files of folders with an unknown ending are appended.

    Raises:
        ConfigError: No inputs, an argument of a wrong type, a pipe that is given twice, or a
            separator without plain text files.
        TextError: A file that cannot be read, a folder without documents, or a pattern that
            matches no file.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "a.jsonl").write_text('{"text": "a"}')
    ...     [file] = find_inputs([folder])
    >>> file.format.name, file.size
    ('jsonl', 13)
    """
    entries = checks.check_list("inputs", inputs, "paths", _check_input)
    if not entries:
        raise ConfigError("there are no inputs; give at least one file, folder or pattern")
    formats: list[Format] = [
        JsonLines(),  # of files whose format nothing tells
        Parquet(),
        Arrow(),
        Csv("csv", ",", (".csv",)),
        Csv("tsv", "\t", (".tsv", ".tab")),
        PlainText(separator),
    ]
    if format is not None:
        if separator is not None:
            raise ConfigError("separator cannot be combined with format: give it to the format")
        if not isinstance(format, Format):
            raise ConfigError(f"format must be a millrace.text.Format, not {checks.shown(format)}")
        formats = [format]
    finder = _Finder(formats, [] if others is None else others)
    files = [file for entry in entries for file in finder.files(entry)]
    if separator is not None and not any(isinstance(one.format, PlainText) for one in files):
        kinds = f"{files[0].path} is read as {files[0].format.name}"
        raise ConfigError(f"separator is for plain text, and {kinds}: leave it out, or name a .txt")
    return files


def _check_input(name: str, value: Any) -> str | InputFile:
    return value if isinstance(value, InputFile) else checks.check_path(name, value)


def read_input_list(path: str | os.PathLike[str]) -> list[str]:
    """The inputs that a file lists, one a line, without blank lines and those that begin with "#".

    Raises:
        TextError: A list that cannot be read, or names nothing.
    """
    path = checks.check_path("path", path)
    with readable(path), streams.open_path(path) as file:
        data = file.read()
    if streams.compression_of(data[: streams.NUM_MAGIC_BYTES]) or b"\0" in data:
        raise TextError(f"{path} is not a list of files; give a text file with a path a line")
    lines = [os.fsdecode(line) for line in data.removeprefix(b"\xef\xbb\xbf").splitlines()]
    inputs = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not inputs:
        raise TextError(f"{path} lists no inputs; write one path on each line")
    return inputs


class _Finder:
    """Finds files of some formats; the first is that of files whose format nothing tells."""

    def __init__(self, formats: Sequence[Format], others: list[str]) -> None:
        self._formats, self._others = formats, others
        self._by_ending = {ending: format_ for format_ in formats for ending in format_.endings}
        self._pipes: dict[tuple[int, int], str] = {}

    def files(self, entry: str | InputFile) -> list[InputFile]:
        return [entry] if isinstance(entry, InputFile) else [*map(self._file, self._expand(entry))]

    def _file(self, path: str) -> InputFile:
        first_bytes = b""
        with readable(path):
            status = streams.status_of(path)
            is_pipe = not streams.is_regular(path, status)
            if not is_pipe:
                with streams.open_path(path) as file:
                    first_bytes = file.read(streams.NUM_MAGIC_BYTES)
        compression = streams.compression_of(first_bytes)
        matching = (format_ for format_ in self._formats if format_.matches(first_bytes))
        format_ = next(matching, None) or self._by_name(path) or self._formats[0]
        if format_.needs_file and (compression or is_pipe):
            kind = f"{compression}-compressed" if compression else "a pipe"
            raise TextError(
                f"{path} is {kind}, and {format_.name} is read from a plain file: make one of it"
            )
        if is_pipe:
            pipe = status.st_dev, status.st_ino
            if pipe in self._pipes:
                other = self._pipes[pipe]
                raise ConfigError(f"{path} is the same pipe as {other}, which is read only once")
            self._pipes[pipe] = path
            return InputFile(path=path, format=format_, size=None, mtime_ns=None)
        identity = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        return InputFile(path=path, format=format_, compression=compression, **identity)

    def _by_name(self, path: str) -> Format | None:
        """The format that the endings of a name tell, or None."""
        name, ending = os.path.splitext(os.path.basename(path).lower())
        if ending in _COMPRESSED_ENDINGS:
            ending = os.path.splitext(name)[1]
        return self._by_ending.get(ending)

    def _expand(self, entry: str) -> Iterator[str]:
        """The paths of one input; those of a folder or a pattern are sorted."""
        if streams.is_remote(entry):
            yield from self._objects(entry)
            return
        paths = [entry]
        if glob.has_magic(entry) and not os.path.lexists(entry):
            literal = entry.split(os.sep)
            paths = sorted(
                path
                for path in glob.glob(entry, recursive=True)
                if not _is_ours(path) and not any(map(_is_ours, {*path.split(os.sep)} - {*literal}))
            )
            if "**" in literal:
                paths = [path for path in paths if not os.path.isdir(path)]
            if not paths:
                raise TextError(f"no file matches the pattern {entry}. Check the path and pattern")
        for path in paths:
            is_folder = entry != streams.STDIN and os.path.isdir(path)
            yield from self._files_of(path) if is_folder else (path,)

    def _objects(self, entry: str) -> list[str]:
        """The objects of a path, a pattern of the last part of a path, or a folder."""
        storage = storage_of(entry)
        if exists(storage, entry):
            return [entry]
        pattern = entry if glob.has_magic(entry) else f"{entry.rstrip('/')}/*"
        start = pattern[: re.search(r"[*?\[]", pattern).start()]  # type: ignore[union-attr]
        paths = [path for path in storage.list(start) if fnmatch.fnmatchcase(path, pattern)]
        if pattern == entry:
            paths = [one for one in paths if not _is_ours(one)]
        else:
            paths = [p for p in paths if self._by_name(p) and not _is_skipped(os.path.basename(p))]
        if not paths:
            raise TextError(f"there are no documents at {entry}. Check the path or pattern")
        return sorted(paths)

    def _files_of(self, folder: str) -> list[str]:
        with readable(folder):
            found = list(files_below(folder, _is_skipped))
        # Not pipes, sockets and devices; a link to a missing file is an error when it is read.
        paths = [one.path for one in found if one.is_file() or not os.path.exists(one.path)]
        formats = {path: self._by_name(path) for path in sorted(paths)}
        files = [path for path, format_ in formats.items() if format_]
        self._others += [path for path, format_ in formats.items() if not format_]
        texts = {path for path in files if isinstance(formats[path], PlainText)}
        if texts != {*files}:
            notes = {path for path in texts if _NOTES.fullmatch(os.path.basename(path))}
            files = [path for path in files if path not in notes]
        if not files:
            raise TextError(
                f"{folder} has no documents: no file in it has a known ending "
                f"({', '.join(self._by_ending)}, or one of these compressed). Name its files, or a "
                "pattern"
            )
        return files


def _is_skipped(name: str) -> bool:
    return name.startswith((".", "_")) or _is_ours(name)


def _is_ours(path: str) -> bool:
    name = os.path.basename(path)
    return is_beside_documents(name) or name in _BESIDE_TABLES
