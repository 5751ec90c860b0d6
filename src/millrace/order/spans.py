"""What an order is: a function from sample numbers to token spans."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import MAX_INT64, check_bool, check_int, check_ints
from millrace.deferred import cached_property
from millrace.errors import ConfigError
from millrace.ragged import spread

RULES_VERSION = 1
"""Version of the rules of all orders. It rises when the same inputs would give another order;
cached indices of another version are not used."""


class Spans(NamedTuple):
    """The tokens of some samples, as runs of tokens in sequences, or in the whole token file.

    Attributes:
        sequences: Sequence of each span: int64 [spans]. None: offsets count from the file's first
            token, and no index of sequences is needed.
        offsets: First token of each span in its sequence, or in the file: int64 [spans].
        counts: Number of tokens of each span: int64 [spans].
        bounds: Ends of the samples' spans: int64 [samples + 1]. Sample i has the spans bounds[i] up
            to bounds[i + 1].
    """

    sequences: NDArray[np.int64] | None
    offsets: NDArray[np.int64]
    counts: NDArray[np.int64]
    bounds: NDArray[np.int64]


class Order(Protocol):
    """What decides which tokens come when: a pure function of the sample number.

    An order may also have `core`, an order of the native core (`millrace._native.gpt_order`), with
    which a batch is one call.
    """

    def __len__(self) -> int:
        """The number of samples."""

    def spans(self, sample_numbers: NDArray[np.int64]) -> Spans:
        """The spans of some samples.

        Args:
            sample_numbers: int64 [batch], each in [0, len).
        """

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the spans, as plain values, for comparison with a saved state.

        Args:
            consumed_samples: Number of samples that were drawn; what decides only later samples
                may be left out. None: all samples. An order may lack this argument if all its
                samples depend on the same values.
        """


class CoreOrder:
    """An order with a `core`, which no pickle holds."""

    @cached_property
    def core(self) -> _native.Order:
        raise NotImplementedError

    def spans(self, sample_numbers: ArrayLike) -> Spans:
        """The spans of some samples; a ValueError for an index that points outside its arrays."""
        return core_spans(self.core, check_ints("sample numbers", sample_numbers))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "core"}


def core_spans(
    core: _native.Order,
    sample_numbers: NDArray[np.int64],
    tokens: _native.TokenSource | None = None,
) -> Spans:
    """The spans of some samples of an order of the core; with tokens, cut at their sequences."""
    spans = Spans(*_native.spans(core, sample_numbers, tokens))
    is_whole_file = len(spans.offsets) > 0 and spans.sequences[0] < 0  # type: ignore[index]
    return spans._replace(sequences=None) if is_whole_file else spans


class SequenceOrder(CoreOrder):
    """Sequences of one length as samples: sample n is sequence n. It needs no index.

    Args:
        num_samples: Number of sequences.
        sequence_length, add_extra_token: As in `OrderInputs`.
    """

    def __init__(
        self, num_samples: int, *, sequence_length: int, add_extra_token: bool = False
    ) -> None:
        self.num_samples = check_int("num_samples", num_samples, 0, MAX_INT64)
        self.sequence_length = check_int("sequence_length", sequence_length, 1, MAX_INT64 - 1)
        self.add_extra_token = check_bool("add_extra_token", add_extra_token)

    def __len__(self) -> int:
        return self.num_samples

    @cached_property
    def core(self) -> _native.Order:
        return _native.SequenceOrder(self.num_samples, self.sequence_length + self.add_extra_token)

    def epochs(self, num_samples: int) -> float:
        """Epochs that so many samples are."""
        return num_samples / max(self.num_samples, 1)

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        names = ("num_samples", "sequence_length", "add_extra_token")
        values = {name: getattr(self, name) for name in names}
        return {"kind": "sequences", "rules": RULES_VERSION, **values}


def checked_spans(order: Order, sample_numbers: NDArray[np.int64]) -> Spans:
    """The spans of some samples; ConfigError if their arrays do not go together."""
    sequences, *others = order.spans(sample_numbers)
    offsets, counts, bounds = (
        check_ints(f"the {name} of spans", column)
        for name, column in zip(Spans._fields[1:], others, strict=True)
    )
    if sequences is not None:
        sequences = check_ints("the sequences of spans", sequences)
    sizes = {len(column) for column in (sequences, offsets, counts) if column is not None}
    num_bounds = len(sample_numbers) + 1
    is_whole = len(bounds) == num_bounds and (bounds[0], bounds[-1]) == (0, len(counts))
    if len(sizes) > 1 or not is_whole or np.any(bounds[1:] < bounds[:-1]):
        raise ConfigError(
            f"the order returned {sorted(sizes)} spans, with bounds {bounds}; it must return "
            f"{num_bounds} bounds, from 0 up to the number of spans"
        )
    return Spans(sequences, offsets, counts, bounds)


def join_spans(parts: Sequence[Spans], order: NDArray[np.int64]) -> Spans:
    """The spans of the samples of all parts, whose numbers among these `order` has.

    Each part numbers sequences of its own; `sequences` is None if that of a part is.
    """
    sizes = np.concatenate([np.diff(part.bounds) for part in parts])
    rows, places = spread(sizes[order])
    take = (np.cumsum(sizes) - sizes)[order][rows] + places
    sequences = [part.sequences for part in parts if part.sequences is not None]
    return Spans(
        np.concatenate(sequences)[take] if len(sequences) == len(parts) else None,
        np.concatenate([part.offsets for part in parts])[take],
        np.concatenate([part.counts for part in parts])[take],
        np.append(0, np.cumsum(sizes[order])),
    )
