"""Ranges of tokens that are not trained on, kept beside a token file.

The ranges of `PREFIX.bin` are a set of arrays, `PREFIX.loss.json` and `PREFIX.loss-ranges.npy` (see
`cache.arrays`). The JSON file holds the fingerprint of the token file: ranges of other data are
refused. The array is int32 [ranges, 3], as `write_loss_ranges` takes it.
"""

import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.cache import arrays
from millrace.checks import check_bool, check_ints, check_path
from millrace.errors import ConfigError, DataError
from millrace.files import checksum
from millrace.samples.dataset import Dataset, TokenDataset
from millrace.samples.stored import StoredTokens
from millrace.samples.tokens import Numbers, TokenBatch
from millrace.store import IndexedDataset, RawTokens

_KIND = "loss_ranges"
_ARRAY = "ranges"


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
        rows = _checked_ranges(ranges, dataset.sequence_lengths)
        key = {"kind": _KIND, "content": dataset.fingerprint, "lengths": dataset.lengths_checksum}
        key["ranges"] = _checksum(rows)
    layout = {_ARRAY: (rows.dtype, rows.shape)}
    arrays.load_or_build(folder, name, key, layout, lambda to: to[_ARRAY].write(0, rows))
    return os.path.join(folder, name + arrays.JSON)


class LossRanges:
    """Takes the loss from ranges of tokens: prompts of chats, licences, boilerplate.

    Where a token of a range is the label, the loss mask is 0. It is still an input, and the token
    after the range is trained on.

    Args:
        dataset: Dataset whose samples are transformed: a `GPTDataset`, or a blend of GPT datasets.
        ranges: The ranges. None: those that `write_loss_ranges` wrote beside each token file. For a
            single token file, also the path prefix of ranges at another place, or integers
            [ranges, 3] as `write_loss_ranges` takes them.
        only: Whether to train on nothing but the ranges.

    Raises:
        ConfigError: Ranges that are not sorted, overlap, or lie outside their sequence; or one set
            of ranges for several token files.
        DataError: Ranges that are missing, damaged, or of other data.
    """

    changes_tokens = False

    def __init__(
        self,
        dataset: Dataset,
        ranges: str | os.PathLike[str] | ArrayLike | None = None,
        *,
        only: bool = False,
    ) -> None:
        self.dataset = dataset
        self.only = check_bool("only", only)
        stores: Any = dataset.stores if isinstance(dataset, TokenDataset) else (None,)
        if any(store is None or isinstance(store._file, RawTokens) for store in stores):
            raise ConfigError(
                f"a {type(dataset).__name__} does not say which tokens of a token file it takes: "
                "ranges need a GPTDataset, or a blend of these; else write a transform of your own"
            )
        files = {store.prefix: store for store in stores}
        if ranges is not None and len(files) != 1:
            raise ConfigError(
                f"there is one set of ranges for {len(files)} token files: write ranges beside "
                "each (write_loss_ranges), or transform each dataset of the blend alone"
            )
        found = {prefix: _ranges_of(store, ranges) for prefix, store in files.items()}
        self._ranges = [found[store.prefix] for store in stores]  # of each source of parts

    def __call__(self, batch: TokenBatch, sample_numbers: Numbers) -> tuple[None, TokenBatch]:
        sequences, offsets = batch.part_sequence, batch.part_offset
        if sequences is None or offsets is None or np.any(sequences < 0):
            raise ConfigError("the samples name no sequences: ranges need an order of sequences")
        counts = batch.part_counts
        sources = np.zeros_like(sequences) if batch.part_source is None else batch.part_source
        marks = np.zeros(len(batch.tokens), np.bool_)
        for source in np.unique(sources).tolist():
            ranges, here = self._ranges[source], sources == source
            try:
                flags = _native.mark_ranges(
                    ranges.arrays[_ARRAY], sequences[here], offsets[here], counts[here]
                )
            except DataError as error:  # a page of the mapped file is gone
                raise DataError(f"{ranges.path}: {error}") from None
            marks[np.repeat(here, counts)] = flags.view(np.bool_)
        return None, batch.untrained(~marks if self.only else marks)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": _KIND, "only": self.only, "ranges": [one.checksum for one in self._ranges]}


class _Ranges(NamedTuple):
    """The ranges of one token file, mapped or in memory."""

    arrays: arrays.ArraySet | dict[str, NDArray[np.int32]]
    checksum: str
    path: str = "the ranges in memory"


def _ranges_of(stored: StoredTokens, ranges: Any) -> _Ranges:
    """Ranges in memory, or those at a path prefix, which must be of the token file."""
    if ranges is not None and not isinstance(ranges, (str, bytes, os.PathLike)):
        rows = _checked_ranges(ranges, stored.store.sequence_lengths)  # type: ignore[union-attr]
        return _Ranges({_ARRAY: rows}, _checksum(rows))
    folder, name = _place(stored.prefix if ranges is None else check_path("ranges", ranges))
    array_set = arrays.load(folder, name)
    path = os.path.join(folder, name + arrays.JSON)
    key = getattr(array_set, "key", None)
    if array_set is None or not isinstance(key, dict) or key.get("kind") != _KIND:
        remedy = "use write_loss_ranges, with an empty list if it has none"
        raise DataError(f"{path} is missing, damaged or of another version: {remedy}")
    data = stored.fingerprint()
    if any(key[name] != data[name] for name in ("content", "lengths")):
        what = f"{path} holds ranges of other data than {stored.prefix}"
        raise DataError(f"{what}: write them again with write_loss_ranges")
    array_set[_ARRAY]  # maps it: damage shows now, not in mid-training
    return _Ranges(array_set, key["ranges"], array_set.path(_ARRAY))


def _place(prefix: str) -> tuple[str, str]:
    folder, name = os.path.split(f"{prefix}.loss")
    return folder or ".", name


def _checksum(rows: NDArray[np.int32]) -> str:
    return checksum([rows.reshape(-1).data])


def _checked_ranges(ranges: ArrayLike, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
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
    is_same, is_first = sequences == before[0], sequences > before[0]
    for is_right, problem in (
        (is_inside, f"names no sequence: the token file has {count}, 0 to {count - 1}"),
        ((starts >= 0) & (starts < stops), "is empty or negative; 0 <= start < stop is needed"),
        (stops <= np.append(lengths, 0)[sequences * is_inside], "ends outside its sequence"),
        (
            is_first | (is_same & (starts >= before[1])),
            "comes after a later one. Sort them: ranges[np.lexsort((ranges[:, 1], ranges[:, 0]))]",
        ),
        (is_first | (starts >= before[2]), "overlaps the one before it: merge the two"),
    ):
        for place in np.flatnonzero(~is_right)[:1].tolist():
            values = tuple(rows[place].tolist())
            raise ConfigError(f"range {place}, (sequence, start, stop) = {values}, {problem}")
    return rows.astype(np.int32)
