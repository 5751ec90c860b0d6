"""Ranges of tokens that are not trained on, kept beside a token file.

The ranges of `PREFIX.bin` are a set of arrays, `PREFIX.loss.json` and `PREFIX.loss-ranges.npy` (see
`cache.arrays`). The JSON file holds the fingerprint of the token file: ranges of other data are
refused. The array is int32 [ranges, 3], as `write_loss_ranges` takes it.

The sidecar of a pair that `millrace tokenize --chat` wrote, or that was made of such pairs, says
that ranges belong to it, so that nobody trains on all of its tokens without saying so.
"""

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.cache import arrays
from millrace.checks import SCHEME, check_ints, check_path
from millrace.errors import ConfigError, DataError
from millrace.files import checksum
from millrace.names import LOSS, LOSS_ARRAY
from millrace.storage import BUCKET_SCHEMES, exists, storage_of
from millrace.store import IndexedDataset
from millrace.store.info import has_mask
from millrace.store.token_file import TokenFile

KIND = "loss_ranges"
ARRAY = "ranges"


def write_loss_ranges(
    prefix: str | os.PathLike[str], ranges: ArrayLike, *, path: str | os.PathLike[str] | None = None
) -> str:
    """Writes the ranges of a token file, in place of those that are there: whole or not at all.

    Args:
        prefix: Path prefix of the token file.
        ranges: Integers [ranges, 3], a row (sequence, start, stop) for each range: tokens start up
            to stop, without stop, of that sequence. Sorted by sequence and start, without overlap;
            it may be empty.
        path: Path prefix of the files to write; None: beside the token file, at its prefix.

    Returns:
        The path of the JSON file.

    Raises:
        ConfigError: Ranges that are not sorted, overlap, or lie outside their sequence.
        DataError: A token file that is missing or damaged.
        OSError: A folder that cannot be written.

    Example:
        >>> import tempfile
        >>> from millrace import IndexedDatasetBuilder
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with IndexedDatasetBuilder(f"{folder}/chat", np.uint16) as builder:
        ...         builder.add_document([1, 2, 3, 4, 5])
        ...     path = write_loss_ranges(f"{folder}/chat", [(0, 0, 3)])
        ...     sorted(os.listdir(folder))
        ['chat.bin', 'chat.idx', 'chat.loss-ranges.npy', 'chat.loss.json']
    """
    prefix = check_path("prefix", prefix)
    folder, name = _place(prefix if path is None else check_path("path", path))
    with IndexedDataset(prefix) as dataset:
        rows = checked_ranges(ranges, dataset.sequence_lengths)
        key = {"kind": KIND, "content": dataset.fingerprint, "lengths": dataset.lengths_checksum}
        key["ranges"] = ranges_checksum(rows)
    arrays.store(folder, name, key, {ARRAY: rows})
    return os.path.join(folder, name + arrays.JSON)


def read_loss_ranges(file: IndexedDataset | TokenFile, path: str | None = None) -> arrays.ArraySet:
    """The ranges beside a token file, or at a path prefix; DataError unless they are its own."""
    path = file.prefix if path is None else path
    array_set = _ranges_at(path, file.storage, LOSS, LOSS_ARRAY)
    key = array_set.key
    if (key["content"], key["lengths"]) != (file.fingerprint, file.lengths_checksum):
        what = f"{path}{LOSS} holds ranges of other data than {file.prefix}"
        raise DataError(f"{what}: write them again with write_loss_ranges")
    array_set[ARRAY]  # maps it: damage shows now, not in mid-training
    return array_set


def loss_checksum(prefix: str, storage: Any = None) -> str:
    """The checksum of the ranges beside a token file, which is not opened for it."""
    return str(_ranges_at(prefix, storage, LOSS).key["ranges"])


def _ranges_at(path: str, storage: Any, *suffixes: str) -> arrays.ArraySet:
    """The ranges at a path prefix, of whatever data, in a bucket a copy of those of their files;
    DataError if there are none."""
    folder, name = _place(path)
    if (scheme := SCHEME.match(path)) and scheme[1] in BUCKET_SCHEMES:
        buckets: Any = storage_of(path, storage)
        with contextlib.suppress(FileNotFoundError):
            folder = getattr(buckets, "base", buckets).copied([path + one for one in suffixes])
    array_set = arrays.load(folder, name)
    key = getattr(array_set, "key", None)
    if array_set is None or not isinstance(key, dict) or key.get("kind") != KIND:
        remedy = "write it again, or use write_loss_ranges; an empty list trains on all tokens"
        raise DataError(f"{path}{LOSS} is missing, damaged or of another version: {remedy}")
    return array_set


def has_ranges(prefix: str) -> bool:
    """Whether ranges belong to a token file, by its sidecar, or lie beside it."""
    return has_mask(prefix) or exists(storage_of(prefix), prefix + LOSS)


def joined_ranges(
    parts: Iterable[tuple[IndexedDataset, tuple[int, int] | None]],
) -> NDArray[np.int32] | None:
    """The ranges of token files that are joined, from each some documents, or (None) all.

    None, if no token file has any; a DataError for those that are damaged or of other data.
    """
    tables, num_sequences = [], 0
    for dataset, documents in parts:
        start, stop = dataset.check_documents(*(documents or (0, dataset.num_documents)))
        if has_ranges(dataset.prefix):
            ranges = read_loss_ranges(dataset)
            if problems := ranges.damage(contents=True):
                raise DataError("; ".join(problems))
            rows = ranges[ARRAY]
            own = slice(*np.searchsorted(rows[:, 0], [start, stop]))
            tables.append(rows[own] + np.array([num_sequences - start, 0, 0], np.int32))
        num_sequences += stop - start
    return np.concatenate(tables) if tables else None


def _place(prefix: str) -> tuple[str, str]:
    folder, name = os.path.split(f"{prefix}.loss")
    return folder or ".", name


def ranges_checksum(rows: NDArray[np.int32]) -> str:
    return checksum([rows.reshape(-1).data])


def checked_ranges(ranges: ArrayLike, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """The ranges as int32 [ranges, 3]; ConfigError if they do not fit the sequences."""
    try:
        table = np.asarray(ranges)
    except (TypeError, ValueError):  # rows of several lengths
        table = np.empty(1)
    if table.size > 0 and (table.shape[1:] != (3,) or table.dtype.kind not in "iuO"):
        kind = f"{table.dtype} of shape {list(table.shape)}"
        raise ConfigError(f"the ranges are {kind}; rows of three integers are needed")
    rows = check_ints("the ranges", table.reshape(-1)).reshape(-1, 3)
    sequences, starts, stops = rows.T

    count = len(lengths)
    is_inside = (sequences >= 0) & (sequences < count)
    before = np.vstack(([[-1, 0, 0]], rows[:-1])).T  # of each range, the one before it
    for is_right, problem in (
        (is_inside, f"names no sequence: the token file has {count}, 0 to {count - 1}"),
        ((starts >= 0) & (starts < stops), "is empty or negative; 0 <= start < stop is needed"),
        (stops <= np.append(lengths, 0)[sequences * is_inside], "ends outside its sequence"),
        (
            (sequences > before[0]) | (sequences == before[0]) & (starts >= before[2]),
            "does not lie behind the one before it. Sort them (ranges[np.lexsort((ranges[:, 1], "
            "ranges[:, 0]))]), and merge those that overlap",
        ),
    ):
        for place in np.flatnonzero(~is_right)[:1].tolist():
            values = tuple(rows[place].tolist())
            raise ConfigError(f"range {place}, (sequence, start, stop) = {values}, {problem}")
    return rows.astype(np.int32)
