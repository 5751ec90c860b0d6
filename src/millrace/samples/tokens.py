"""The token batch, and where token batches come from.

    source.tokens(sample_numbers)  ->  transforms  ->  rows(batch, options, form)

A `TokenBatch` is the tokens of some samples and what is known of each token. A `TokenSource` gives
the batch of any sample numbers, a `TokenStream` the one after a small state.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from millrace.checks import shown
from millrace.errors import ConfigError
from millrace.options import SampleOptions

Numbers = NDArray[np.int64]
Field = tuple[str, NDArray[Any]]
"""What an array is by ("token", "part" or "sample"), and the array."""

_PART_ARRAYS = {"part_source": np.int32, "part_sequence": np.int64, "part_offset": np.int64}
_TOKEN_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")  # that the core reads
_KINDS = {"iu": "integers", "b": "bools"}


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The tokens of some samples, one sample after the other.

    A *part* is a run of tokens that come from one document.

    Args:
        tokens: Tokens of all samples, the last labels included: [n] of an integer dtype.
        ends: Where each sample ends among them: int64 [batch].
        trained: Whether each token has a loss where it is the label: bool [n]. None: all have.
        part_starts: Where each part starts among the tokens: int64 [parts], ascending. A sample
            with tokens starts a part. None: the parts are not known.
        part_source: Source that each part is from (of the datasets of a blend): int32 [parts].
        part_sequence: Sequence, or row, of its source that each part is from: int64 [parts], -1
            where that is not known.
        part_offset: First token of the part in that sequence, or without sequences in the stored
            token stream: int64 [parts].
        fields: The source's own arrays by name: (kind, array). An array has an entry for each
            "token", "part" or "sample".

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
        count = len(self._set("tokens", "iu"))
        bounds = np.append(0, self._set("ends", "iu", np.int64))
        if bounds[-1] != count or np.any(bounds[1:] < bounds[:-1]):
            raise ConfigError(
                f"ends are {shown(self.ends.tolist())} for {count} tokens; they must not go "
                "backwards, and the last one must be the number of tokens"
            )
        if self.trained is not None:
            self._set("trained", "b", np.bool_, count)
        num_parts = 0
        if self.part_starts is not None:
            starts = self._set("part_starts", "iu", np.int64)
            num_parts = len(starts)
            edges = np.concatenate(([-1], starts, [count]))
            firsts = bounds[:-1][bounds[1:] > bounds[:-1]]
            if np.any(edges[1:] <= edges[:-1]) or not np.isin(firsts, starts).all():
                raise ConfigError(
                    f"part_starts are {shown(starts.tolist())}; they must ascend below {count}, "
                    f"and a part must start with each sample: at {shown(firsts.tolist())}"
                )
        for name, dtype in _PART_ARRAYS.items():
            if getattr(self, name) is not None:
                self._set(name, "iu", dtype, num_parts)
        sizes = {"token": count, "part": num_parts, "sample": len(self.ends)}
        for name, (kind, array) in self.fields.items():
            if kind not in sizes:
                raise ConfigError(
                    f"the field {name!r} must be by token, part or sample, not {kind!r}"
                )
            if len(array) != sizes[kind]:
                raise ConfigError(
                    f"the field {name!r} has {len(array)} entries; it must have {sizes[kind]}, one "
                    f"for each {kind}"
                )

    def _set(
        self, name: str, kinds: str, dtype: Any = None, size: int | None = None
    ) -> NDArray[Any]:
        """Keeps a vector as an array of a dtype; a ConfigError for what is not one."""
        array = np.asarray(getattr(self, name))
        is_ok = array.ndim == 1 and (array.dtype.kind in kinds or array.size == 0)
        if not is_ok or (size is not None and len(array) != size):
            raise ConfigError(
                f"{name} must be {_KINDS[kinds]} [{'n' if size is None else size}], not "
                f"{array.dtype} {list(array.shape)}"
            )
        if dtype is None:
            dtype = array.dtype if array.dtype.name in _TOKEN_DTYPES else np.int64
        array = np.ascontiguousarray(array, dtype)
        object.__setattr__(self, name, array)
        return array

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.ends)

    @property
    def sizes(self) -> Numbers:
        """Number of tokens of each sample: int64 [batch]."""
        return np.diff(self.ends, prepend=0)

    @property
    def part_counts(self) -> Numbers:
        """Number of tokens of each part: int64 [parts]."""
        return np.diff(self._starts, append=len(self.tokens))

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
        return replace(self, fields={**self.fields, name: (kind, array)})

    def untrained(self, marks: NDArray[np.bool_]) -> TokenBatch:
        """The same batch in which the marked tokens, bool [n], are not trained on either."""
        trained = ~marks if self.trained is None else self.trained & ~marks
        return replace(self, trained=trained)

    def select(self, rows: NDArray[Any]) -> TokenBatch:
        """The batch of some of the samples, in another order.

        Args:
            rows: Places of the samples in this batch: integers [samples].
        """
        sizes = self.sizes[rows]
        take = _ranges((self.ends - self.sizes)[rows], sizes)
        ends = np.cumsum(sizes, dtype=np.int64)
        picks: dict[str, NDArray[Any]] = {"token": take, "sample": rows}
        arrays: dict[str, Any] = {}
        if self.part_starts is not None:
            bounds = self.part_bounds
            picks["part"] = _ranges(bounds[:-1][rows], np.diff(bounds)[rows])
            counts = self.part_counts[picks["part"]]
            arrays = {"part_starts": np.cumsum(counts) - counts}
            arrays |= {name: _picked(getattr(self, name), picks["part"]) for name in _PART_ARRAYS}
        own = {name: (kind, array[picks[kind]]) for name, (kind, array) in self.fields.items()}
        trained = _picked(self.trained, take)
        return TokenBatch(self.tokens[take], ends, trained, **arrays, fields=own)

    def moved(self, take: Numbers, new: TokenBatch) -> TokenBatch:
        """The batch after a transform has moved its tokens: all that is known of a token follows.

        Args:
            take: Old place of each new token: int64 [n], -1 for an inserted one.
            new: The new tokens and their samples' ends. Its `trained` and its fields of tokens
                count for inserted tokens alone, which are else trained on, and 0 in fields. It
                brings fields that this batch does not have.
        """
        if take.shape != new.tokens.shape or np.any((take < -1) | (take >= len(self.tokens))):
            raise ConfigError(
                f"take must have {len(new.tokens)} entries between -1 and {len(self.tokens) - 1}, "
                f"not {shown(take.tolist())}"
            )
        is_inserted = take < 0

        def follow(old: NDArray[Any], inserted: NDArray[Any] | None, default: Any) -> NDArray[Any]:
            moved = old[take] if len(old) > 0 else np.zeros((len(take), *old.shape[1:]), old.dtype)
            moved[is_inserted] = default if inserted is None else inserted[is_inserted]
            return moved

        trained = new.trained
        if self.trained is not None:
            trained = follow(self.trained, new.trained, True)
        own = dict(new.fields)
        for name, (kind, array) in self.fields.items():
            inserted = own.get(name, (kind, None))[1]
            own[name] = (kind, follow(array, inserted, 0) if kind == "token" else array)
        if self.part_starts is None:
            return replace(new, trained=trained, fields=own)
        # A token is in its old part; an inserted one in that of the next token, or the last one.
        parts = np.repeat(np.arange(len(self.part_starts)), self.part_counts)
        place = np.where(is_inserted, len(take), np.arange(len(take)))
        following = np.minimum.accumulate(place[::-1])[::-1]
        rows = np.repeat(np.arange(len(new)), new.sizes)
        sample_ends = new.ends[rows]
        preceding = np.maximum.accumulate(np.where(is_inserted, -1, np.arange(len(take))))
        near = np.where(following < sample_ends, following, np.maximum(preceding, 0))
        part = parts[take[near]] if len(parts) > 0 else np.zeros(len(take), np.int64)
        is_start = (np.diff(part, prepend=-1) != 0) | (np.diff(rows, prepend=-1) != 0)
        starts = np.flatnonzero(is_start)
        picks = part[starts]
        arrays: dict[str, Any] = {
            name: _picked(getattr(self, name), picks) for name in _PART_ARRAYS
        }
        own = {
            name: (kind, array[picks] if kind == "part" else array)
            for name, (kind, array) in own.items()
        }
        return replace(new, trained=trained, part_starts=starts, **arrays, fields=own)


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    """The samples of several batches, one batch after the other; at least one batch.

    Parts are known, and a field is there, where they are in all batches.
    """
    if len(batches) == 1:
        return batches[0]
    shifts = np.cumsum([0, *(len(batch.tokens) for batch in batches)])[:-1].tolist()
    pairs = list(zip(batches, shifts, strict=True))
    arrays: dict[str, Any] = {
        "tokens": np.concatenate([batch.tokens for batch in batches]),
        "ends": np.concatenate([batch.ends + shift for batch, shift in pairs]),
    }
    if any(batch.trained is not None for batch in batches):
        arrays["trained"] = np.concatenate(
            [
                np.ones(len(batch.tokens), np.bool_) if batch.trained is None else batch.trained
                for batch in batches
            ]
        )
    if all(batch.part_starts is not None for batch in batches):
        arrays["part_starts"] = np.concatenate([batch._starts + shift for batch, shift in pairs])
        for name, dtype in _PART_ARRAYS.items():
            columns = [getattr(batch, name) for batch in batches]
            if any(column is not None for column in columns):
                arrays[name] = np.concatenate(
                    [
                        np.full(len(batch._starts), -1, dtype) if column is None else column
                        for batch, column in zip(batches, columns, strict=True)
                    ]
                )
    own = {
        name: (kind, np.concatenate([batch.fields[name][1] for batch in batches]))
        for name, (kind, _) in batches[0].fields.items()
        if all(batch.fields.get(name, ("",))[0] == kind for batch in batches)
        and (kind != "part" or "part_starts" in arrays)
    }
    return TokenBatch(**arrays, fields=own)


def split_at_eod(batch: TokenBatch, eod_token: int) -> TokenBatch:
    """The batch with other parts: a part ends with an EOD, or with its sample."""
    is_last = batch.tokens == eod_token
    is_last[batch.ends[batch.sizes > 0] - 1] = True
    starts = np.append(0, np.flatnonzero(is_last) + 1)[:-1] if len(is_last) > 0 else batch.ends[:0]
    own = {name: entry for name, entry in batch.fields.items() if entry[0] != "part"}
    return TokenBatch(batch.tokens, batch.ends, batch.trained, starts, fields=own)


def without_parts(batch: TokenBatch) -> TokenBatch:
    """The batch without what is known of its parts."""
    own = {name: entry for name, entry in batch.fields.items() if entry[0] != "part"}
    return TokenBatch(batch.tokens, batch.ends, batch.trained, fields=own)


@runtime_checkable
class TokenSource(Protocol):
    """Token batches by sample number: stored tokens in an order, a packer, texts tokenised."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """The tokens of some samples; each sample depends on its number alone.

        Args:
            sample_numbers: int64 [batch], each in [0, len).
        """
        ...

    def fingerprint(self, consumed_samples: int | None = None) -> Mapping[str, Any]:
        """What decides the samples, as plain values, for comparison with a saved state.

        Args:
            consumed_samples: Number of samples that a run has drawn, which must not change; what
                decides later samples alone may be left out. None: all samples.
        """
        ...


class StoredSource:
    """Base of the sources that read stored tokens: what they offer besides token batches.

    Attributes:
        num_sources: Number of stores that `part_source` counts.
        is_remote: Whether the bytes come from elsewhere than local files, by readers that prefetch.
        file_dtype: Dtype of the stored tokens. None: not known.
    """

    num_sources: int = 1
    is_remote: bool = False
    file_dtype: np.dtype[Any] | None = None

    def gather(self, sample_numbers: Numbers, options: SampleOptions, form: Any) -> Any:
        """The arrays of a batch by one call of the core; None where that cannot be."""
        return None

    def documents(self, part_sources: NDArray[np.int32], part_sequences: Numbers) -> Numbers:
        """The documents in their token files that sequences belong to: int64 [parts]."""
        raise ConfigError(
            "the samples come from no token file: leave out document_numbers, or give the token "
            "batch a field of that name"
        )

    def prefetch(self, sample_numbers: Numbers) -> None:
        """Tells the storage that these samples are read soon, and does not wait for it."""


class TokenStream(Protocol):
    """Token batches without numbers: a generator, a cursor, a streaming dataset."""

    def read(self, state: Any, count: int) -> tuple[TokenBatch, Any]:
        """The next samples after a state, and the state behind them.

        Args:
            state: A state that `read` has returned: small plain values. None: the beginning.
            count: Number of samples; fewer are returned where the stream ends.
        """
        ...

    def fingerprint(self, consumed_samples: int | None = None) -> Mapping[str, Any]:
        """See `TokenSource.fingerprint`."""
        ...


def fingerprint_of(source: Any, consumed_samples: int | None) -> dict[str, Any]:
    """The fingerprint of a source, order or dataset, whose method may take no argument."""
    method = source.fingerprint
    takes_count = "consumed_samples" in inspect.signature(method).parameters
    fingerprint = method(consumed_samples) if takes_count else method()
    if not isinstance(fingerprint, Mapping):
        raise ConfigError(
            f"the {type(source).__name__}'s fingerprint is {shown(fingerprint)}; return a dict"
        )
    return dict(fingerprint)


def check_tokens(name: str, batch: Any, num_samples: int) -> TokenBatch:
    """What a source or a transform returned, if it is a token batch of so many samples."""
    if not isinstance(batch, TokenBatch):
        raise ConfigError(f"{name} returned {shown(batch)}; a TokenBatch is needed")
    if len(batch) != num_samples:
        raise ConfigError(f"{name} returned {len(batch)} samples; {num_samples} were asked for")
    return batch


def _ranges(starts: Numbers, counts: Numbers) -> Numbers:
    """The numbers of some ranges, one range after the other."""
    shifts = starts - (np.cumsum(counts) - counts)
    return np.repeat(shifts, counts) + np.arange(int(counts.sum()))


def _picked(array: NDArray[Any] | None, places: Numbers) -> NDArray[Any] | None:
    return None if array is None else array[places]
