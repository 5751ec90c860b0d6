"""The transform that takes the loss from ranges of tokens; `cache.loss_files` has the files."""

import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.cache import arrays
from millrace.cache.loss_files import ARRAY, KIND, checked_ranges, ranges_checksum, read_loss_ranges
from millrace.checks import check_bool, check_choice, check_path
from millrace.errors import ConfigError, DataError
from millrace.samples.dataset import Dataset
from millrace.samples.stored import StoredTokens
from millrace.samples.tokens import Numbers, TokenBatch
from millrace.store import RawTokens
from millrace.store.info import has_mask

LOSS_CHOICES = ("refuse", "apply", "ignore")


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
        dataset: Dataset | StoredTokens,
        ranges: str | os.PathLike[str] | ArrayLike | None = None,
        *,
        only: bool = False,
    ) -> None:
        self.dataset = dataset
        self.only = check_bool("only", only)
        stores: Any = getattr(dataset, "stores", (None,))
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
        counts, sources = batch.part_counts, batch.part_source
        if sources is None or len(self._ranges) == 1:
            marks = self._ranges[0].marks(sequences, offsets, counts)
        else:
            marks = np.zeros(len(batch.tokens), np.bool_)
            for source in np.unique(sources).tolist():
                here = sources == source
                own = self._ranges[source].marks(sequences[here], offsets[here], counts[here])
                marks[np.repeat(here, counts)] = own
        return None, batch.untrained(~marks if self.only else marks)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": KIND, "only": self.only, "ranges": [one.checksum for one in self._ranges]}


def own_ranges(source: StoredTokens, loss_ranges: str) -> list[LossRanges]:
    """The transform by the ranges of the token file, if `loss_ranges` wants them applied."""
    if check_choice("loss_ranges", loss_ranges, LOSS_CHOICES) == "apply":
        return [LossRanges(source)]
    record = getattr(source._file, "record", None)  # of a run: of thousands of files, perhaps
    storage = getattr(source._file, "storage", None)
    is_masked = has_mask(source.prefix, storage) if record is None else record.has_mask
    if loss_ranges == "refuse" and is_masked:
        raise ConfigError(
            f"{source.prefix}.info.json says which tokens are not trained on: give "
            'loss_ranges="apply" to leave them out of the loss, or "ignore" to train on all tokens'
        )
    return []


class _Ranges(NamedTuple):
    """The ranges of one token file, mapped or in memory."""

    arrays: arrays.ArraySet | dict[str, NDArray[np.int32]]
    checksum: str
    path: str = "the ranges in memory"

    def marks(self, sequences: Numbers, offsets: Numbers, counts: Numbers) -> NDArray[np.bool_]:
        """Which tokens of some parts are in a range: bool [tokens]."""
        try:
            flags = _native.mark_ranges(self.arrays[ARRAY], sequences, offsets, counts)
        except DataError as error:  # a page of the mapped file is gone
            raise DataError(f"{self.path}: {error}") from None
        return flags.view(np.bool_)


def _ranges_of(stored: StoredTokens, ranges: Any) -> _Ranges:
    """Ranges in memory, or those at a path prefix, which must be of the token file."""
    if ranges is not None and not isinstance(ranges, (str, bytes, os.PathLike)):
        rows = checked_ranges(ranges, stored.store.sequence_lengths)  # type: ignore[union-attr]
        return _Ranges({ARRAY: rows}, ranges_checksum(rows))
    path = None if ranges is None else check_path("ranges", ranges)
    array_set = read_loss_ranges(stored._file, path)  # type: ignore[arg-type]
    return _Ranges(array_set, array_set.key["ranges"], array_set.path(ARRAY))
