"""The token batch, and where token batches come from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from millrace.checks import check_choice, shown
from millrace.errors import ConfigError
from millrace.ragged import sizes_of, spread

Numbers = NDArray[np.int64]
Field = tuple[str, NDArray[Any]]
"""What an array is by ("token", "part" or "sample"), and the array."""

_COLUMNS: dict[str, tuple[str, Any]] = {
    "trained": ("token", np.bool_),
    "part_source": ("part", np.int32),
    "part_sequence": ("part", np.int64),
    "part_offset": ("part", np.int64),
}
_TOKEN_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")  # that the core reads


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The tokens of some samples, one sample after the other.

    A *part* is a run of tokens that come from one document.

    Args:
        tokens: Tokens of all samples, the last labels included: [n] of an integer dtype.
        ends: Where each sample ends among the tokens: int64 [batch].
        trained: Whether each token has a loss where it is the label: bool [n]. None: all have.
        part_starts: Where each part starts among the tokens: int64 [parts], ascending. A sample
            with tokens starts a part. None: the parts are not known.
        part_source: Source of each part, among the datasets of a blend: int32 [parts].
        part_sequence: Sequence, or row, of each part in its source: int64 [parts], -1 where that is
            not known.
        part_offset: First token of each part in its sequence, or without sequences in the stored
            token stream: int64 [parts].
        fields: The source's own arrays by name: (kind, array), with an entry for each "token",
            "part" or "sample".

    Raises:
        ConfigError: Arrays that do not fit each other.

    Example:
        >>> batch = TokenBatch(np.array([5, 6, 7, 8, 9]), np.array([2, 5]))
        >>> batch.select(np.array([1, 0])).tokens
        array([7, 8, 9, 5, 6])
    """

    tokens: NDArray[Any]
    ends: Numbers
    trained: NDArray[np.bool_] | None = None
    part_starts: Numbers | None = None
    part_source: NDArray[np.int32] | None = None
    part_sequence: Numbers | None = None
    part_offset: Numbers | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self._set("tokens"))
        bounds = np.append(0, self._set("ends", np.int64))
        if bounds[-1] != count or np.any(np.diff(bounds) < 0):
            raise ConfigError(
                f"ends are {shown(self.ends.tolist())} for {count} tokens; they must not go "
                "backwards, and the last one must be the number of tokens"
            )
        num_parts = 0
        if self.part_starts is not None:
            starts = self._set("part_starts", np.int64)
            num_parts = len(starts)
            firsts = bounds[:-1][np.diff(bounds) > 0]
            is_ascending = np.all(np.diff(starts, prepend=-1, append=count) > 0)
            if not is_ascending or not np.isin(firsts, starts).all():
                raise ConfigError(
                    f"part_starts are {shown(starts.tolist())}; they must ascend below {count}, "
                    f"and a part must start with each sample: at {shown(firsts.tolist())}"
                )
        sizes = {"token": count, "part": num_parts, "sample": len(self.ends)}
        for name, (kind, dtype) in _COLUMNS.items():
            if getattr(self, name) is not None:
                self._set(name, dtype, sizes[kind])
        for name, (kind, array) in self.fields.items():
            check_choice(f"the field {name!r}", kind, tuple(sizes))
            if len(array) != (size := sizes[kind]):
                what = f"the field {name!r} has {len(array)} entries"
                raise ConfigError(f"{what}; it must have {size}, one for each {kind}")

    def _set(self, name: str, dtype: Any = None, size: Any = None) -> NDArray[Any]:
        """Keeps a vector as an array of a dtype."""
        array = np.asarray(getattr(self, name))
        kinds, needed = ("b", "bools") if dtype is np.bool_ else ("iu", "integers")
        is_ok = array.ndim == 1 and (array.dtype.kind in kinds or array.size == 0)
        if not is_ok or (size is not None and len(array) != size):
            needed += f" [{'n' if size is None else size}]"
            raise ConfigError(f"{name} must be {needed}, not {array.dtype} {list(array.shape)}")
        if dtype is None:
            dtype = array.dtype if array.dtype.name in _TOKEN_DTYPES else np.int64
        vars(self)[name] = array = np.ascontiguousarray(array, dtype)
        return array

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.ends)

    @property
    def sizes(self) -> Numbers:
        """Number of tokens of each sample: int64 [batch]."""
        return sizes_of(self.ends)

    @property
    def part_counts(self) -> Numbers:
        """Number of tokens of each part: int64 [parts]."""
        starts = self._starts
        return np.append(starts[1:], len(self.tokens)) - starts

    @property
    def part_bounds(self) -> Numbers:
        """Sample i has the parts part_bounds[i] up to part_bounds[i + 1]: int64 [batch + 1]."""
        return np.searchsorted(self._starts, np.append(0, self.ends))

    @property
    def _starts(self) -> Numbers:
        if self.part_starts is None:
            raise ConfigError("the token batch has no part_starts, so its documents are not known")
        return self.part_starts

    def with_field(self, name: str, kind: str, array: NDArray[Any]) -> TokenBatch:
        """The same batch with one more field."""
        return self.with_arrays(fields={**self.fields, name: (kind, array)})

    def with_arrays(self, **arrays: Any) -> TokenBatch:
        """The same batch with other arrays, of the dtypes and sizes that they must have.

        They are not checked: that would take longer than most uses of a batch.
        """
        batch = object.__new__(TokenBatch)
        batch.__dict__.update(self.__dict__, **arrays)
        return batch

    def untrained(self, marks: NDArray[np.bool_]) -> TokenBatch:
        """The same batch in which the marked tokens, bool [n], are not trained on either."""
        trained = ~marks if self.trained is None else self.trained & ~marks
        return self.with_arrays(trained=trained)

    def select(self, rows: NDArray[Any]) -> TokenBatch:
        """The batch of some of the samples, in another order.

        Args:
            rows: Places of the samples in this batch: integers [samples].
        """
        if len(rows) == len(self) and (rows == np.arange(len(rows))).all():
            return self
        sizes = self.sizes
        picks = {"sample": rows, "token": _ranges((self.ends - sizes)[rows], sizes[rows])}
        starts = None
        if self.part_starts is not None:
            bounds = self.part_bounds
            firsts = bounds[:-1][rows]
            picks["part"] = _ranges(firsts, bounds[1:][rows] - firsts)
            counts = self.part_counts[picks["part"]]
            starts = np.cumsum(counts) - counts
        columns = {
            name: (kind, array[picks[kind]]) for name, (kind, array) in self._columns().items()
        }
        return _from_columns(self.tokens[picks["token"]], np.cumsum(sizes[rows]), starts, columns)

    def moved(self, take: Numbers, new: TokenBatch) -> TokenBatch:
        """The batch after a transform has moved its tokens: all that is known of a token follows.

        Args:
            take: Old place of each new token: int64 [n], -1 for an inserted one.
            new: The new tokens and their samples' ends, with fields that this batch does not have.
                Its `trained` and its fields of tokens count for inserted tokens alone; without
                them, these are trained on, and 0 in fields.
        """
        if take.shape != new.tokens.shape or np.any((take < -1) | (take >= len(self.tokens))):
            limits = f"{len(new.tokens)} entries between -1 and {len(self.tokens) - 1}"
            raise ConfigError(f"take must have {limits}, not {shown(take.tolist())}")
        is_inserted = take < 0
        columns = new._columns()
        starts, parts = None, take
        if self.part_starts is not None:
            part_of_token, _ = spread(self.part_counts)
            of_place = np.append(part_of_token, 0)[take[_near_places(is_inserted, new)]]
            pairs = np.stack((of_place, spread(new.sizes)[0]))
            starts = np.flatnonzero(np.any(np.diff(pairs, prepend=-1), axis=0))
            parts = of_place[starts]
        for name, (kind, array) in self._columns().items():
            if kind == "part":
                array = array[parts]
            elif kind == "token":
                default = np.full((1, *array.shape[1:]), name == "trained", array.dtype)
                array = np.concatenate((array, default))[take]
                if name in columns:
                    array[is_inserted] = columns[name][1][is_inserted]
            columns[name] = kind, array
        return _from_columns(new.tokens, new.ends, starts, columns)

    def kept(self, new: TokenBatch) -> TokenBatch:
        """The batch after a transform that moves no token: with what the new one does not tell."""
        old = self if new.part_starts is None else without_parts(self)
        starts = old.part_starts if new.part_starts is None else new.part_starts
        return _from_columns(new.tokens, new.ends, starts, old._columns() | new._columns())

    def _columns(self) -> dict[str, Field]:
        """All that is known of tokens, parts and samples, by name."""
        columns: dict[str, Field] = dict(self.fields)
        for name, (kind, _) in _COLUMNS.items():
            if (array := getattr(self, name)) is not None:
                columns[name] = kind, array
        return columns


EMPTY = TokenBatch(np.empty(0, np.int64), np.empty(0, np.int64))
"""A batch of no samples, to make others of by `with_arrays`."""


def _from_columns(
    tokens: NDArray[Any], ends: Numbers, starts: Numbers | None, columns: dict[str, Field]
) -> TokenBatch:
    """A batch of all that is known: nothing of parts without their starts."""
    if starts is None:
        columns = {name: entry for name, entry in columns.items() if entry[0] != "part"}
    own = {name: columns.pop(name, (None, None))[1] for name in _COLUMNS}
    return EMPTY.with_arrays(tokens=tokens, ends=ends, part_starts=starts, fields=columns, **own)


def _near_places(is_inserted: NDArray[np.bool_], batch: TokenBatch) -> Numbers:
    """For each token itself; for an inserted one the next old one of its sample, or the last."""
    numbers = np.arange(len(is_inserted))
    following = np.minimum.accumulate(np.where(is_inserted, len(numbers), numbers)[::-1])[::-1]
    preceding = np.maximum.accumulate(np.where(is_inserted, 0, numbers))
    return np.where(following < np.repeat(batch.ends, batch.sizes), following, preceding)


def _ranges(starts: Numbers, counts: Numbers) -> Any:
    """The places of some ranges; a slice if each starts where the one before it ends."""
    stops = starts + counts
    if len(starts) > 0 and (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1]))
    rows, places = spread(counts)
    return starts[rows] + places


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    """The samples of several batches, one batch after the other; at least one batch.

    Parts are known, and a field is there, where they are in all batches; a part without a sequence
    has sequence -1.
    """
    shifts = np.cumsum([0, *(len(batch.tokens) for batch in batches)])[:-1].tolist()
    pairs = list(zip(batches, shifts, strict=True))
    starts = None
    if all(batch.part_starts is not None for batch in batches):
        starts = np.concatenate([batch._starts + shift for batch, shift in pairs])
    known = [batch._columns() for batch in batches]
    names = dict.fromkeys(name for columns in known for name in columns)
    for batch, columns in zip(batches, known, strict=True):
        sizes = {"token": len(batch.tokens), "part": 0 if starts is None else len(batch._starts)}
        for name in _COLUMNS.keys() & names:
            kind, dtype = _COLUMNS[name]
            columns.setdefault(name, (kind, np.full(sizes[kind], -1, dtype)))  # -1 is True, too
    merged = {
        name: (known[0][name][0], np.concatenate([columns[name][1] for columns in known]))
        for name in names
        if len({columns.get(name, ("",))[0] for columns in known}) == 1
    }
    tokens = np.concatenate([batch.tokens for batch in batches])
    ends = np.concatenate([batch.ends + shift for batch, shift in pairs])
    return _from_columns(tokens, ends, starts, merged)


def without_parts(batch: TokenBatch) -> TokenBatch:
    return _from_columns(batch.tokens, batch.ends, None, batch._columns())


def split_at_eod(batch: TokenBatch, eod_token: int) -> TokenBatch:
    """The batch with other parts: a part ends with an EOD, or with its sample."""
    is_last = batch.tokens == eod_token
    is_last[batch.ends[batch.sizes > 0] - 1] = True
    starts = np.append(0, np.flatnonzero(is_last) + 1)[: int(is_last.sum())]
    return without_parts(batch).with_arrays(part_starts=starts)


@runtime_checkable
class TokenSource(Protocol):
    """Token batches by sample number: stored tokens in an order, a packer, texts tokenised."""

    def __len__(self) -> int:
        """The number of samples."""

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """The tokens of some samples; each sample depends on its number alone.

        Args:
            sample_numbers: int64 [batch], each in [0, len).
        """

    def fingerprint(self, consumed_samples: int | None = None) -> Mapping[str, Any]:
        """What decides the samples, as plain values, for comparison with a saved state.

        Args:
            consumed_samples: Number of samples that a run has drawn, which must not change; what
                decides later samples alone may be left out. None: all samples.
        """


@runtime_checkable
class TokenStream(Protocol):
    """Token batches without numbers: a generator, a cursor, a streaming dataset."""

    def read(self, state: Any, count: int) -> tuple[TokenBatch, Any]:
        """The next samples after a state, and the state behind them.

        Args:
            state: State that `read` has returned: small plain values. None: the beginning.
            count: Number of samples; the stream returns fewer where it ends.
        """

    def fingerprint(self, consumed_samples: int | None = None) -> Mapping[str, Any]:
        """See `TokenSource.fingerprint`."""


def fingerprint_of(source: Any, consumed_samples: int | None) -> dict[str, Any]:
    """The fingerprint of a source, order or dataset, whose method may take no argument."""
    method = source.fingerprint
    takes_count = _takes_count(getattr(method, "__func__", method))
    fingerprint = method(consumed_samples) if takes_count else method()
    if not isinstance(fingerprint, Mapping):
        name = type(source).__name__
        raise ConfigError(f"the {name}'s fingerprint is {shown(fingerprint)}; return a dict")
    return dict(fingerprint)


@functools.lru_cache(maxsize=256)  # a signature takes 20 us, and a blend has thousands of datasets
def _takes_count(method: Any) -> bool:
    return "consumed_samples" in inspect.signature(method).parameters


def check_tokens(name: str, batch: Any, num_samples: int) -> TokenBatch:
    """The answer of a source or a transform, if it is a token batch of so many samples."""
    if not isinstance(batch, TokenBatch):
        raise ConfigError(f"{name} returned {shown(batch)}; a TokenBatch is needed")
    if len(batch) != num_samples:
        raise ConfigError(f"{name} returned {len(batch)} samples; {num_samples} were asked for")
    return batch
