"""Which files a shuffle reads: the token files of each domain, sorted by domain and path."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from millrace.checks import absolute_path, one_path, printable, real, shown
from millrace.errors import ConfigError, DataError
from millrace.files import is_of_the_process
from millrace.jobs.shuffling.items import Items
from millrace.store import IndexedDataset
from millrace.store.publish import bin_path, idx_path, paths_to_read
from millrace.store.tokenizers import common_tokenizer, read_tokenizer, tokenizer_conflict

Inputs = str | os.PathLike[str] | Sequence[tuple[float, str | os.PathLike[str]]]
"""A folder with a folder for each domain, or a list of domains: the weight and path of each."""

DTYPES = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i4")

_JOURNAL = ".journal"
_NAMES_IN_NOTICE = 3

# Endings of files that belong to token files, or that are left of writing them.
_SIDECARS = (".idx", ".info.json", ".origins.parquet", ".csv.gz", ".new", ".tmp", ".lock")


@dataclass(frozen=True, kw_only=True)
class TokenArray:
    """A file that holds one array of tokens.

    Attributes:
        path: Absolute path; of an indexed dataset, of the `.bin`.
        prefix: Path prefix of the indexed dataset; None: a raw or a NumPy file.
        dtype: Dtype of the tokens.
        byte_offset: Where the first token starts.
        num_tokens: Number of tokens.
        num_documents, num_sequences: Numbers of an indexed dataset; 0 for other files.
        has_modes: Whether the sequences of an indexed dataset have modes.
        size: Size of the file in bytes.
        mtime_ns: Time of its last change, in nanoseconds.
        index_mtime_ns: Time of the last change of the `.idx`; None: there is none.
        sidecars: Size and time of the last change of each sidecar that there is: "info", "origins".
    """

    path: str
    prefix: str | None = None
    dtype: np.dtype[Any]
    byte_offset: int = 0
    num_tokens: int
    num_documents: int = 0
    num_sequences: int = 0
    has_modes: bool = False
    size: int
    mtime_ns: int
    index_mtime_ns: int | None = None
    sidecars: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class InputDomain:
    """A domain of the input.

    Attributes:
        name: Name of the domain.
        weight: How often each item is taken; with 5/2, twice, and every second one a third time.
        files: Its files, sorted by path.
    """

    name: str
    weight: Fraction
    files: tuple[TokenArray, ...]


def find_domains(
    inputs: Inputs, *, dtype: DTypeLike, documents_for: str = ""
) -> tuple[list[InputDomain], list[str]]:
    """The domains of an input, sorted by name.

    In a folder, each folder is a domain, with all folders below it; the files of the folder are the
    domain ".". A list has a domain for each path, a folder, a file or the path prefix of an indexed
    dataset, whose last part is the domain's name. Token files are `.npy` arrays, indexed datasets,
    and raw `.bin` files without an `.idx`. Hidden files and other endings are ignored.

    Args:
        inputs: A folder, or a list of weights and paths.
        dtype: Dtype of raw files: uint16, uint32 or int32.
        documents_for: Reason why documents are needed, for the message about a file without an
            `.idx`; empty: they are not needed.

    Returns:
        The domains, and sentences about the input that a user should read.

    Raises:
        ConfigError: A folder or path that is missing, a weight that is not positive, two domains of
            one name, files of different dtypes or tokenizers, or a file without documents.
        DataError: A file that is damaged, cannot be read, or has a dtype that is not possible.
    """
    finder = _Finder(_raw_dtype(dtype), documents_for)
    if isinstance(inputs, (str, bytes, os.PathLike)):
        domains = finder.domains_of_folder(one_path("input_dir", inputs))
    else:
        domains = finder.domains_of_list(inputs)
    domains.sort(key=lambda domain: domain.name)
    return domains, finder.all_notices()


def read_input_list(path: str | os.PathLike[str]) -> list[tuple[float, str]]:
    """The domains that a file lists, one on each line: `WEIGHT PATH`.

    Blank lines and lines that begin with "#" are skipped. Relative paths count from the current
    folder, as on the command line.

    Raises:
        ConfigError: A list that cannot be read or lists nothing, or a line without weight and path.
    """
    path = one_path("path", path)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    entries = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        text = os.fsdecode(line).strip()
        if not text or text.startswith("#"):
            continue
        try:
            weight, entry = text.split(maxsplit=1)
            entries.append((float(weight), entry))
        except ValueError:
            raise ConfigError(
                f"line {number} of {path} is {shown(text)}; write a weight and a path: 2.5 data/web"
            ) from None
    if not entries:
        raise ConfigError(f"{path} lists no inputs; write a weight and a path on each line")
    return entries


def format_domains(items: Items) -> str:
    """A table of the domains, for people."""
    unit = "documents" if items.item_size is None else "sequences"
    rows = [
        (
            printable(domain.name),
            domain.num_files,
            domain.num_items,
            domain.num_tokens,
            domain.num_left,
        )
        for domain in items.domains
    ]
    totals = [sum(column) for column in list(zip(*rows, strict=True))[1:]]
    table = [["domain", "files", unit, "tokens", "tokens left out"]]
    table += [[name, *(f"{value:,}" for value in values)] for name, *values in rows]
    table.append(["total", *(f"{value:,}" for value in totals)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        for name, *cells in table
    )


def common_dtype(domains: Sequence[InputDomain]) -> np.dtype[Any]:
    """The dtype of all files that hold tokens; a ConfigError if there are two, or no tokens."""
    files = [file for domain in domains for file in domain.files if file.num_tokens > 0]
    if not files:
        raise ConfigError(
            f"the input has no tokens: {len(domains)} domains, "
            f"{sum(len(domain.files) for domain in domains)} token files. Give a folder with a "
            "folder for each domain, which holds .bin or .npy files"
        )
    for file in files:
        if file.dtype != files[0].dtype:
            raise ConfigError(
                f"{files[0].path} holds {files[0].dtype}, and {file.path} holds {file.dtype}; all "
                "files must have the same dtype: convert some of them with "
                "`millrace convert --dtype`, or correct --dtype if they are raw files"
            )
    return files[0].dtype


def tokenizer_of(domains: Sequence[InputDomain]) -> dict[str, Any] | None:
    """The tokenizer that all files name; a ConfigError if two files name different ones."""
    prefixes = [file.prefix for domain in domains for file in domain.files]
    records = [None if prefix is None else read_tokenizer(prefix) for prefix in prefixes]
    if conflict := tokenizer_conflict(records):
        raise ConfigError(
            f"{conflict}. Tokenize one of them again; if the tokenizers are the same in truth, "
            "remove the .info.json of one of them"
        )
    return common_tokenizer(records)


def _raw_dtype(value: DTypeLike) -> np.dtype[Any]:
    with contextlib.suppress(TypeError, ValueError):
        dtype = np.dtype(value)
        if dtype in DTYPES:
            return dtype
    raise ConfigError(f"dtype is {shown(value)}; it is one of uint16, uint32, int32")


class _Finder:
    """Finds domains, and gathers what a user should know about them."""

    def __init__(self, dtype: np.dtype[Any], documents_for: str) -> None:
        self.notices: list[str] = []
        self._dtype = dtype
        self._documents_for = documents_for
        self._paths: dict[tuple[int, int], str] = {}  # of the files by device and inode
        self._duplicates: list[tuple[str, str]] = []  # paths of one file

    def all_notices(self) -> list[str]:
        if not self._duplicates:
            return self.notices
        path, other = self._duplicates[0]
        count = len(self._duplicates)
        more = f", and so are {count - 1:,} more" if count > 1 else ""
        return [*self.notices, f"{path} is the same file as {other}{more}: both are read"]

    def domains_of_folder(self, folder: str) -> list[InputDomain]:
        if not os.path.isdir(folder):
            raise ConfigError(
                f"{shown(folder)} is not a folder; give one with a folder for each domain"
            )
        folder = absolute_path(folder)
        domains, paths = [], []
        for entry in _scan(folder):
            if os.path.isdir(entry.path):
                domains.append(self._domain(entry.name, Fraction(1), list(_walk(entry.path))))
            else:
                paths.append(entry.path)
        if any(path.endswith((".bin", ".npy", ".idx")) for path in paths):
            domains.append(self._domain(".", Fraction(1), paths))
        return domains

    def domains_of_list(self, entries: Any) -> list[InputDomain]:
        pairs = [_weight_and_path(entry) for entry in entries]
        if not pairs:
            raise ConfigError("the input list is empty; give a weight and a path for each domain")
        paths: dict[str, str] = {}
        domains = []
        for weight, path in pairs:
            absolute = absolute_path(path)
            name = os.path.basename(absolute) or absolute
            if name in paths:
                raise ConfigError(
                    f"{paths[name]} and {path} are both the domain {name}: the last part of a path "
                    "is the domain's name. Rename one, or list a folder that holds both"
                )
            paths[name] = path
            if os.path.isdir(absolute):
                domains.append(self._domain(name, weight, list(_walk(absolute))))
            else:
                domains.append(self._domain(name, weight, [_token_file(path, absolute)]))
        return domains

    def _domain(self, name: str, weight: Fraction, paths: list[str]) -> InputDomain:
        paths.sort()
        indices = {path for path in paths if path.endswith(".idx")}
        missing = indices.difference(path[:-4] + ".idx" for path in paths if path.endswith(".bin"))
        if missing:
            path = min(missing)
            raise DataError(
                f"{path} has no {os.path.basename(path)[:-4]}.bin beside it: restore that file, or "
                "remove the .idx"
            )
        files = [self._open(path) for path in paths if path.endswith((".bin", ".npy"))]
        folders = {os.path.dirname(file.path) for file in files if file.prefix is not None}
        raw = [f.path for f in files if f.prefix is None and f.path.endswith(".bin")]
        if lonely := [path for path in raw if os.path.dirname(path) in folders]:
            more = f" (and {len(lonely) - 1:,} more)" if len(lonely) > 1 else ""
            self.notices.append(
                f"{lonely[0]}{more} is read as raw {self._dtype}: it has no .idx, and other files "
                "of its folder have one. If its writer was killed, remove it and shuffle again"
            )
        if not files:
            others = [os.path.basename(p) for p in paths if not p.endswith(_SIDECARS)]
            names = ", ".join(others[:_NAMES_IN_NOTICE])
            more = ", ..." if len(others) > _NAMES_IN_NOTICE else ""
            hint = f"; files with other endings are ignored ({names}{more})" if others else ""
            self.notices.append(f"domain {name} has no .bin or .npy files{hint}")
        return InputDomain(name=name, weight=weight, files=tuple(files))

    def _open(self, path: str) -> TokenArray:
        with _as_data_error(path):
            status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file; write it to one, or remove it")
        other = self._paths.setdefault((status.st_dev, status.st_ino), path)
        if other != path:
            self._duplicates.append((path, other))
        if path.endswith(".bin") and os.path.exists(paths_to_read(path[:-4]).idx):
            return _open_indexed(path[:-4])
        if self._documents_for:
            raise ConfigError(
                f"{path} has no .idx, so its documents are not known, but {self._documents_for}"
            )
        if path.endswith(".npy"):
            return _open_array(path, status)
        return _open_raw(path, status, self._dtype)


def _weight_and_path(entry: Any) -> tuple[Fraction, str]:
    try:
        weight, path = entry
    except (TypeError, ValueError):
        raise ConfigError(
            f"an entry of the input list is {shown(entry)}; give a weight and a path"
        ) from None
    path = one_path("a path of the input list", path)
    if not path:
        raise ConfigError("a path of the input list is empty; give a weight and a path")
    value = real(f"the weight of {path}", weight)
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"the weight of {path} is {value:g}; give a number above 0, or leave the path out"
        )
    return Fraction(repr(value)), path  # exactly the decimal number that was written


def _token_file(path: str, absolute: str) -> str:
    """The file of a list's entry: a token file, or the `.bin` of an indexed dataset."""
    if absolute.endswith((".npy", ".bin")) and os.path.lexists(absolute):
        return absolute
    prefix = absolute.removesuffix(".idx")
    if os.path.exists(paths_to_read(prefix).idx):
        return bin_path(prefix)
    if os.path.exists(absolute):
        raise ConfigError(f"{path} is not a token file; give a .bin or .npy file, or a folder")
    raise ConfigError(
        f"{path} does not exist, and neither does {idx_path(path)}; give a folder, a .bin or .npy "
        "file, or the path prefix of an indexed dataset"
    )


def _scan(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted by name, without hidden ones and the journals of jobs."""
    with _as_data_error(folder), os.scandir(folder) as entries:
        return sorted(
            (
                entry
                for entry in entries
                if not entry.name.startswith(".") and not entry.name.endswith(_JOURNAL)
            ),
            key=lambda entry: entry.name,
        )


def _walk(folder: str, parents: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """The files below a folder, also behind links, but not behind links to a parent folder."""
    with _as_data_error(folder):
        status = os.stat(folder)
    identity = status.st_dev, status.st_ino
    if identity in parents:
        return
    for entry in _scan(folder):
        if os.path.isdir(entry.path):
            yield from _walk(entry.path, (*parents, identity))
        else:
            yield entry.path


@contextlib.contextmanager
def _as_data_error(path: str) -> Iterator[None]:
    """Makes an OSError about a file a DataError that names it."""
    try:
        yield
    except OSError as error:
        if is_of_the_process(error):
            raise
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


# ---- the files ----


def _open_raw(path: str, status: os.stat_result, dtype: np.dtype[Any]) -> TokenArray:
    with _as_data_error(path), open(path, "rb"):
        pass  # a file that cannot be read is an error now, not in the middle of the job
    if status.st_size % dtype.itemsize:
        raise DataError(
            f"{path} has {status.st_size} bytes, which is not a multiple of {dtype.itemsize}, the "
            f"size of {dtype}: it is truncated, or has another dtype. Write it again, or correct "
            "--dtype"
        )
    return TokenArray(
        path=path,
        dtype=dtype,
        num_tokens=status.st_size // dtype.itemsize,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _open_array(path: str, status: os.stat_result) -> TokenArray:
    with _as_data_error(path):
        try:
            array: Any = np.lib.format.open_memmap(path, mode="r")
        except (ValueError, TypeError, OverflowError, SyntaxError, tokenize.TokenError) as error:
            raise DataError(
                f"{path} is not an array that can be read: {error}. Give a file that `numpy.save` "
                "wrote from integers; it may be truncated"
            ) from None
    if array.ndim not in (1, 2) or not array.flags.c_contiguous:
        order = "" if array.flags.c_contiguous else ", in Fortran order"
        raise DataError(
            f"{path} has the shape {list(array.shape)}{order}; one dimension is needed, or two in "
            "C order. Save numpy.ascontiguousarray(array) again"
        )
    _check_dtype(path, array.dtype)
    end = array.offset + array.nbytes
    if status.st_size != end:
        raise DataError(
            f"{path} has {status.st_size} bytes, but its array ends at byte {end}: other data "
            "follow, or the file has just changed. Save each array in a file"
        )
    return TokenArray(
        path=path,
        dtype=array.dtype,
        byte_offset=array.offset,
        num_tokens=array.size,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _open_indexed(prefix: str) -> TokenArray:
    paths = paths_to_read(prefix)
    with _as_data_error(prefix):
        # Before it is opened: if it is replaced meanwhile, reading it notices.
        data, index = os.stat(paths.bin), os.stat(paths.idx)
        sidecars = {}
        for name, path in zip(("info", "origins"), paths.sidecars, strict=True):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                sidecars[name] = [status.st_size, status.st_mtime_ns]
        with IndexedDataset(prefix) as dataset:
            _check_dtype(prefix, dataset.dtype)
            return TokenArray(
                path=paths.bin,
                prefix=prefix,
                dtype=dataset.dtype,
                num_tokens=dataset.num_tokens,
                num_documents=dataset.num_documents,
                num_sequences=len(dataset),
                has_modes=dataset.sequence_modes is not None,
                size=data.st_size,
                mtime_ns=data.st_mtime_ns,
                index_mtime_ns=index.st_mtime_ns,
                sidecars=sidecars,
            )


def _check_dtype(path: str, dtype: np.dtype[Any]) -> None:
    if dtype in DTYPES:
        return
    if dtype.newbyteorder("<") in DTYPES:
        raise DataError(
            f"{path} holds big-endian {dtype.newbyteorder('=')}; save it again as little-endian: "
            f"array.astype('{dtype.newbyteorder('<').str}')"
        )
    ending = ".npy" if path.endswith(".npy") else ""
    raise DataError(
        f"{path} holds {dtype}; a shuffle takes uint16, uint32 and int32. Convert it, if its ids "
        f"fit: millrace convert {path} NEW{ending} --dtype int32"
    )
