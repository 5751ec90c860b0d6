"""The input of a shuffle: token files, sorted by domain and path."""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from millrace.checks import absolute_path, check_float, check_path, shown
from millrace.errors import ConfigError, DataError
from millrace.files import files_below
from millrace.names import BIN, JOURNAL
from millrace.provenance import common_tokenizer, read_tokenizer, tokenizer_conflict
from millrace.ragged import starts_of
from millrace.shuffling.token_files import TokenFile, open_token_file, read_errors_of
from millrace.store.publish import paths_to_read
from millrace.text import read_input_list as read_lines

Inputs = str | Sequence[tuple[float, str | os.PathLike[str]]]
"""A folder with a folder for each domain, or a list of domains: the weight and path of each."""


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
        """The tokenizer that all files name; a ConfigError if two files differ."""
        records = [None if f.prefix is None else read_tokenizer(f.prefix) for f in self.files]
        if conflict := tokenizer_conflict(records):
            raise ConfigError(
                f"{conflict}. Tokenize one of them again. If they are in fact the same tokenizer, "
                "delete the .info.json file of one of them"
            )
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
    with read_errors_of(folder):
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
    except (TypeError, ValueError):
        path = ""
    path = check_path("a path of the input list", path)
    if not path:
        raise ConfigError(
            f"an entry of the input list must be a weight and a path, not {shown(entry)}"
        )
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
    with read_errors_of(folder):
        return sorted(file.path for file in files_below(folder, _is_skipped))


def _token_paths(paths: Sequence[str]) -> list[str]:
    existing = set(paths)
    for path in paths:
        if path.endswith(".idx") and path[:-4] + BIN not in existing:
            raise DataError(
                f"{path} has no {os.path.basename(path)[:-4]}.bin beside it: restore that file, or "
                "remove the .idx"
            )
    return [path for path in paths if path.endswith((".bin", ".npy"))]


def _notices_of(files: Sequence[TokenFile], raw_dtype: np.dtype[Any]) -> Iterator[str]:
    folders = {os.path.dirname(file.path) for file in files if file.prefix is not None}
    raw = [f.path for f in files if f.prefix is None and f.path.endswith(".bin")]
    if alone := [path for path in raw if os.path.dirname(path) in folders]:
        yield (
            f"{alone[0]} is read as raw {raw_dtype} ({len(alone):,} such files): it has no .idx, "
            "and other files of its folder have one. If its writer was killed, remove it and "
            "shuffle again"
        )
