"""The input of a shuffle: token files, sorted by domain and path.

They are checked when they are found, then read by pieces.
"""

import contextlib
import itertools
import math
import os
import stat
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from millrace.checks import absolute_path, check_float, check_path, shown
from millrace.errors import ConfigError, DataError
from millrace.files import check_split, files_below, readable
from millrace.names import BIN, JOURNAL, LOSS, LOSS_ARRAY
from millrace.provenance import check_tokenizers, common_tokenizer, read_tokenizer
from millrace.ragged import starts_of
from millrace.store import IndexedDataset
from millrace.store.info import has_mask
from millrace.store.layout import count_tokens
from millrace.store.publish import paths_to_read
from millrace.text import read_input_list as read_lines

Inputs = str | Sequence[tuple[float, str | os.PathLike[str]]]
"""A folder with a folder for each domain, or a list of domains: the weight and path of each."""

DTYPES = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i4")
"""The dtypes of tokens that can be shuffled."""


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A file that holds one array of tokens, as it was when it was found."""

    path: str  # of an indexed dataset, the `.bin`
    prefix: str | None = None  # of an indexed dataset
    dtype: np.dtype[Any]
    byte_offset: int = 0  # of the first token
    num_tokens: int
    num_documents: int = 0  # of an indexed dataset, like the next three
    num_sequences: int = 0
    has_modes: bool = False
    index_mtime_ns: int | None = None
    size: int  # in bytes
    mtime_ns: int
    sidecars: dict[str, list[int]] = field(default_factory=dict)  # size and time by kind

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        """A descriptor of the file; a DataError if it is gone, has changed, or cannot be read."""
        with readable(self.path, DataError):
            # A named pipe in place of the file would wait for a writer.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                yield descriptor
            finally:
                status = os.fstat(descriptor)
                os.close(descriptor)
                if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
                    raise DataError(
                        f"{self.path} changed while the job ran: it has {status.st_size} bytes of "
                        f"time {status.st_mtime_ns} ns, not {self.size} of {self.mtime_ns}. Leave "
                        "the input as it is until the job has ended; begin anew with --restart"
                    )


class Domain(NamedTuple):
    """A domain: its files, sorted by path, and how often each item is taken."""

    name: str
    weight: Fraction
    files: Sequence[TokenFile]


@dataclass(frozen=True)
class Input:
    """The domains, sorted by name, and sentences that the user should read."""

    domains: Sequence[Domain]
    notices: Sequence[str]
    any_tokenizer: bool = False

    @property
    def files(self) -> list[TokenFile]:
        return [file for domain in self.domains for file in domain.files]

    @property
    def slices(self) -> list[slice]:
        """The places of each domain's files among all files."""
        bounds = starts_of(len(domain.files) for domain in self.domains).tolist()
        return [slice(*pair) for pair in itertools.pairwise(bounds)]

    def dtype(self) -> np.dtype[Any]:
        """The dtype of all tokens; a ConfigError if there are two dtypes, or no tokens."""
        files = [file for file in self.files if file.num_tokens > 0]
        if not files:
            raise ConfigError(
                f"the input has no tokens: {len(self.domains)} domains, {len(self.files)} token "
                "files. Give a folder with a folder for each domain, which holds .bin or .npy files"
            )
        first = files[0]
        for file in files:
            if file.dtype != first.dtype:
                raise ConfigError(
                    f"{first.path} holds {first.dtype}, and {file.path} holds {file.dtype}; all "
                    "files must have the same dtype: convert some of them with `millrace convert "
                    "--dtype`, or correct --dtype if they are raw files"
                )
        return first.dtype

    def tokenizer(self) -> dict[str, Any] | None:
        """The tokenizer that all files name; a ConfigError if two differ, or one has a mask."""
        for prefix in filter(None, [file.prefix for file in self.files]):
            check_split(prefix)
            if has_mask(prefix) or os.path.exists(prefix + LOSS):
                raise ConfigError(
                    f"{prefix} has a mask, which a shuffle would lose: train on it as it is, or "
                    "leave the mask out first with `millrace convert --no-loss-ranges`"
                )
        records = [None if f.prefix is None else read_tokenizer(f.prefix) for f in self.files]
        if not self.any_tokenizer:
            check_tokenizers(records)
        return common_tokenizer(records)


def find_domains(inputs: Inputs, *, dtype: str, has_documents: bool = False) -> Input:
    """Finds the token files of an input.

    In a folder, each folder is a domain, with all folders below it; its own files are the domain
    ".". A list has a domain for each path, a folder, a file or the path prefix of an indexed
    dataset, whose last part is the domain's name. Token files are `.npy` arrays, indexed datasets,
    and raw `.bin` files without an `.idx`. Hidden files and other endings are ignored.

    `dtype` is that of raw files. With `has_documents`, all files must be indexed datasets. A
    ConfigError is about the folders and the list, a DataError about a file.
    """
    raw_dtype = np.dtype(dtype)
    domains: list[Domain] = []
    notices: list[str] = []
    entries = _domains_in(inputs) if isinstance(inputs, str) else _domains_of(inputs)
    for name, weight, paths in entries:
        files = [open_token_file(p, raw_dtype, has_documents) for p in _token_paths(paths)]
        notices += _notices_of(files, raw_dtype)
        domains.append(Domain(name, weight, files))
    return Input(sorted(domains, key=lambda domain: domain.name), notices)


def read_input_list(path: str | os.PathLike[str]) -> list[tuple[float, str]]:
    """The domains that a file lists, one on each line: `WEIGHT PATH`.

    Blank lines and lines that begin with "#" are skipped. Relative paths count from the current
    folder.

    Raises:
        ConfigError: A line without weight and path.
        TextError: A list that cannot be read, or lists nothing.
    """
    entries = []
    for line in read_lines(path):
        try:
            weight, entry = line.split(maxsplit=1)
            entries.append((float(weight), entry))
        except ValueError:
            raise ConfigError(
                f"a line of {os.fsdecode(path)} is {shown(line)}; it must be a weight and a path: "
                "2.5 data/web"
            ) from None
    return entries


def _domains_in(folder: str) -> Iterator[tuple[str, Fraction, list[str]]]:
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{shown(folder)} is not a folder; give one with a folder for each domain"
        )
    folder = absolute_path(folder)
    with readable(folder, DataError):
        names = sorted(name for name in os.listdir(folder) if not _is_skipped(name))
    files = []
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            yield name, Fraction(1), _walk(path)
        else:
            files.append(path)
    if any(path.endswith((".bin", ".npy", ".idx")) for path in files):
        yield ".", Fraction(1), files


def _domains_of(entries: Any) -> Iterator[tuple[str, Fraction, list[str]]]:
    if not entries:
        raise ConfigError("the input list is empty; give a weight and a path for each domain")
    paths: dict[str, str] = {}
    for weight, path in map(_weight_and_path, entries):
        absolute = absolute_path(path)
        name = os.path.basename(absolute) or absolute
        if name in paths:
            raise ConfigError(
                f"{paths[name]} and {path} are both the domain {name}: the last part of a path "
                "is the domain's name. Rename one, or list a folder that holds both"
            )
        paths[name] = path
        files = _walk(absolute) if os.path.isdir(absolute) else [_token_path(path, absolute)]
        yield name, weight, files


def _weight_and_path(entry: Any) -> tuple[Fraction, str]:
    try:
        weight, path = entry
        path = check_path("a path of the input list", path or None)
    except (TypeError, ValueError):
        raise ConfigError(
            f"an entry of the input list must be a weight and a path, not {shown(entry)}"
        ) from None
    value = check_float(f"the weight of {path}", weight)
    if not 0 < value < math.inf:
        raise ConfigError(
            f"the weight of {path} must be above 0, not {value:g}; or leave the path out"
        )
    return Fraction(repr(value)), path  # exactly the decimal number that was written


def _token_path(path: str, absolute: str) -> str:
    """The token file of a list's entry; of an indexed dataset, the `.bin`."""
    if absolute.endswith((".npy", ".bin")) and os.path.lexists(absolute):
        return absolute
    prefix = absolute.removesuffix(".idx")
    if os.path.exists(paths_to_read(prefix).idx):
        return prefix + BIN
    raise ConfigError(
        f"{path} does not exist or is not a token file; give a folder, a .bin or .npy file, or the "
        "path prefix of an indexed dataset"
    )


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name.endswith(JOURNAL)


def _walk(folder: str) -> list[str]:
    with readable(folder, DataError):
        return sorted(file.path for file in files_below(folder, _is_skipped))


def _token_paths(paths: Sequence[str]) -> list[str]:
    existing = set(paths)
    for path in paths:
        if path.endswith(".idx") and path[:-4] + BIN not in existing:
            raise DataError(
                f"{path} has no {os.path.basename(path)[:-4]}.bin beside it: restore that file, or "
                "remove the .idx"
            )
    return [p for p in paths if p.endswith((".bin", ".npy")) and not p.endswith(LOSS_ARRAY)]


def _notices_of(files: Sequence[TokenFile], raw_dtype: np.dtype[Any]) -> Iterator[str]:
    folders = {os.path.dirname(file.path) for file in files if file.prefix is not None}
    raw = [f.path for f in files if f.prefix is None and f.path.endswith(".bin")]
    if alone := [path for path in raw if os.path.dirname(path) in folders]:
        yield (
            f"{alone[0]} is read as raw {raw_dtype} ({len(alone):,} such files): it has no .idx, "
            "and other files of its folder have one. If its writer was killed, remove it and "
            "shuffle again"
        )


# ---- token files ----


def open_token_file(path: str, raw_dtype: np.dtype[Any], has_documents: bool) -> TokenFile:
    """Opens and checks a `.bin` or `.npy` file; see `find_domains`."""
    with readable(path, DataError):
        status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file; write it to one, or remove it")
    prefix = path.removesuffix(BIN)
    if prefix != path and os.path.exists(paths_to_read(prefix).idx):
        return _open_indexed(prefix)
    if has_documents:
        raise ConfigError(
            f"{path} has no .idx, so millrace cannot tell where its documents end. --documents "
            "needs that: give indexed datasets (.bin and .idx), or leave --documents out"
        )
    # It is opened so that an error comes now, not in the middle of the job.
    with readable(path, DataError), open(path, "rb"):
        place = _place(path, status.st_size, raw_dtype)
    return TokenFile(path=path, size=status.st_size, mtime_ns=status.st_mtime_ns, **place)


def _place(path: str, size: int, raw_dtype: np.dtype[Any]) -> dict[str, Any]:
    """Place and dtype of the tokens in a raw or NumPy file."""
    if not path.endswith(".npy"):
        return {"dtype": raw_dtype, "num_tokens": count_tokens(path, size, raw_dtype)}
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
            f"{path} has the shape {list(array.shape)}{order}; it must have one dimension, or two "
            "in C order. Save numpy.ascontiguousarray(array) again"
        )
    _check_dtype(path, array.dtype)
    end = array.offset + array.nbytes
    if size != end:
        raise DataError(
            f"{path} has {size} bytes, but its array ends at byte {end}: other data follow, or the "
            "file has just changed. Save each array in a file"
        )
    return {"dtype": array.dtype, "num_tokens": array.size, "byte_offset": array.offset}


def _open_indexed(prefix: str) -> TokenFile:
    paths, sidecars = paths_to_read(prefix), {}
    with readable(prefix, DataError), IndexedDataset(prefix) as dataset:
        for kind, path in zip(("info", "origins"), paths[2:], strict=True):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                sidecars[kind] = [status.st_size, status.st_mtime_ns]
        _check_dtype(prefix, dataset.dtype)
        data, index = dataset.files
        return TokenFile(
            path=paths.bin,
            prefix=prefix,
            dtype=dataset.dtype,
            num_tokens=dataset.num_tokens,
            num_documents=dataset.num_documents,
            num_sequences=len(dataset),
            has_modes=dataset.sequence_modes is not None,
            index_mtime_ns=index.time,
            size=data.size,
            mtime_ns=data.time,
            sidecars=sidecars,
        )


def _check_dtype(path: str, dtype: np.dtype[Any]) -> None:
    if dtype not in DTYPES:
        ending = ".npy" if path.endswith(".npy") else ""
        raise DataError(
            f"{path} holds {dtype}; a shuffle takes uint16, uint32 and int32. Convert it, if its "
            f"ids fit: millrace convert {path} NEW{ending} --dtype int32"
        )
