"""Megatron-LM's order of one dataset.

A sample number k becomes tokens in three steps: the *shuffle index* maps k to a row j of the
*sample index*; rows j and j + 1 are two places (document, offset) in the *document index*, which
holds the sequences of all epochs in shuffled order; the tokens between the places are the sample.
"Document" is Megatron-LM's word here: the entries are sequences of the token file.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import flag, shown, whole, whole_numbers
from millrace.deferred import Deferred
from millrace.dtypes import sample_index_dtype, shuffle_index_dtype
from millrace.errors import ConfigError
from millrace.order.spans import RULES_VERSION, Spans

FINAL_EPOCH_THRESHOLD = 0.80
"""A final epoch is shuffled separately if a smaller share of its samples than this is needed."""

MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class GPTPlan:
    """Epochs and samples, known before any index is built.

    Attributes:
        num_tokens_per_epoch: Number of tokens in the range of sequences.
        num_samples: Number of samples, at least as many as asked for.
        num_epochs: The smallest number of epochs that holds the samples asked for.
        num_samples_before_final_epoch: Where the shuffle is cut; None: all is one shuffle.
        sequence_length: Tokens to train on in a sample.
        add_extra_token: Whether a sample has one more token, for the last label.
        allow_partial: Whether the last sample may be shorter.
    """

    num_tokens_per_epoch: int
    num_samples: int
    num_epochs: int
    num_samples_before_final_epoch: int | None
    sequence_length: int
    add_extra_token: bool
    allow_partial: bool

    def num_index_bytes(self, num_sequences: int) -> int:
        """Bytes of the three indices of a range of sequences, in their smallest dtypes."""
        return 4 * num_sequences * self.num_epochs + (8 + 4) * self.num_samples + 8


class GPTIndices(NamedTuple):
    """The indices of one dataset and split.

    Attributes:
        document_index: int32 [epochs * sequences].
        sample_index: int32 (int64 past 2**31 - 1 documents) [samples + 1, 2].
        shuffle_index: uint32 (int64 from 2**32 - 2 samples on) [samples].
    """

    document_index: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]


class GPTOrder:
    """Megatron-LM's order of a range of sequences: samples of fixed length, shuffled.

    Args:
        plan: Epochs and samples of the range.
        sequences: (start, stop), the range of sequences.
        seed: Seed of the shuffles.
        lengths: Lengths of all sequences of the token file: int32 [sequences], in tokens.
        indices: The three indices. Both are loaded at the first sample.
    """

    def __init__(
        self,
        plan: GPTPlan,
        *,
        sequences: tuple[int, int],
        seed: int,
        lengths: Deferred[NDArray[np.int32]],
        indices: Deferred[GPTIndices],
    ) -> None:
        self.plan = plan
        self.sequences = sequences
        self.seed = seed
        self._lengths = lengths
        self._indices = indices
        self._core: _native.Order | None = None

    def __len__(self) -> int:
        return self.plan.num_samples

    @property
    def indices(self) -> GPTIndices:
        """The document index, sample index and shuffle index."""
        return self._indices.value

    @property
    def core(self) -> _native.Order:
        """The same order in the native core."""
        if self._core is None:
            self._core = _native.gpt_order(
                self._lengths.value,
                *self.indices,
                sequence_length=self.plan.sequence_length,
                add_extra_token=self.plan.add_extra_token,
            )
        return self._core

    def spans(self, sample_numbers: ArrayLike) -> Spans:
        """The spans of some samples.

        Args:
            sample_numbers: Integers [batch], each in [0, len).

        Raises:
            ConfigError: Sample numbers that are not integers.
            ValueError: No such sample, or an index that points outside its arrays.
        """
        numbers = whole_numbers("sample numbers", sample_numbers)
        return Spans(*_native.spans(self.core, numbers))

    def fingerprint(self) -> dict[str, Any]:
        """What decides the spans, apart from the sequence lengths."""
        plan = self.plan
        return {
            "kind": "gpt",
            "rules": RULES_VERSION,
            "sequences": list(self.sequences),
            "num_samples": plan.num_samples,
            "num_epochs": plan.num_epochs,
            "samples_before_final_epoch": plan.num_samples_before_final_epoch,
            "seed": self.seed,
            "sequence_length": plan.sequence_length,
            "add_extra_token": plan.add_extra_token,
        }

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_core": None}  # made again where it is needed


def plan_gpt(
    num_tokens_per_epoch: int,
    num_samples: int | None,
    sequence_length: int,
    *,
    add_extra_token: bool = True,
    drop_last_partial_sequence: bool = True,
) -> GPTPlan:
    """Epochs and samples, in exact integers, by Megatron-LM's rules.

    Args:
        num_tokens_per_epoch: Number of tokens in the range of sequences.
        num_samples: Least number of samples; None: the samples of one epoch.
        sequence_length: Tokens to train on in a sample.
        add_extra_token: Whether a sample has one more token, so that the last one has a label.
        drop_last_partial_sequence: Whether to leave out a last sample that the tokens do not fill.
            (Megatron-LM counts it in 32-bit floats, and miscounts from 2**24 tokens on.)

    Raises:
        ConfigError: No tokens, too few for one sample, or a number outside its limits.
    """
    add_extra_token = flag("add_extra_token", add_extra_token)
    drops_partial = flag("drop_last_partial_sequence", drop_last_partial_sequence)
    extra = 1 if add_extra_token else 0
    sequence_length = whole("sequence_length", sequence_length, 1)
    if num_samples is not None:
        num_samples = whole("num_samples", num_samples, 0)
    num_tokens_per_epoch = whole("num_tokens_per_epoch", num_tokens_per_epoch)
    if num_tokens_per_epoch <= 0:
        raise ConfigError(
            f"the split holds {shown(num_tokens_per_epoch)} tokens; there is nothing to draw "
            "samples from. Give it a larger share, more documents, or leave it out"
        )
    requested = 0 if num_samples is None else num_samples * sequence_length + extra
    num_epochs = max(1, -(-requested // num_tokens_per_epoch))
    tokens = num_epochs * num_tokens_per_epoch - extra
    available = tokens // sequence_length
    if not drops_partial:
        available = -(-tokens // sequence_length)
    if available < 1:
        raise ConfigError(
            f"sequence_length {shown(sequence_length)} (and {extra} extra token) leaves no sample: "
            f"the split holds {shown(num_tokens_per_epoch)} tokens. Choose a shorter "
            "sequence_length, or more documents"
        )
    cut = None
    if num_epochs > 1 and num_samples is not None:
        before = ((num_epochs - 1) * num_tokens_per_epoch - extra) // sequence_length
        per_epoch = (num_tokens_per_epoch - extra) // sequence_length
        if num_samples - before < int(FINAL_EPOCH_THRESHOLD * per_epoch):
            cut = before
    return GPTPlan(
        num_tokens_per_epoch=num_tokens_per_epoch,
        num_epochs=num_epochs,
        num_samples=available,
        num_samples_before_final_epoch=cut,
        sequence_length=sequence_length,
        add_extra_token=add_extra_token,
        allow_partial=not drops_partial,
    )


def check_seed(seed: int) -> int:
    """The seed as an int; raises ConfigError for one that `RandomState` does not accept."""
    return whole("the seed", seed, 0, MAX_SEED)


def check_range(sequences: tuple[int, int], num_sequences: int) -> tuple[int, int]:
    """A range of sequences as ints; raises ConfigError for one outside the file."""
    try:
        start, stop = sequences
    except (TypeError, ValueError):
        raise ConfigError(
            f"the range of sequences is {shown(sequences)}; give (start, stop)"
        ) from None
    start, stop = (whole("an end of the range of sequences", end) for end in (start, stop))
    if not 0 <= start <= stop <= num_sequences or stop > _native.MAX_INT32 + 1:
        raise ConfigError(
            f"the range of sequences is ({shown(start)}, {shown(stop)}); the file has "
            f"{num_sequences}, and at most {_native.MAX_INT32 + 1} can be numbered (int32)"
        )
    return start, stop


def build_gpt_indices(
    sequence_lengths: NDArray[np.int32],
    sequences: tuple[int, int],
    plan: GPTPlan,
    seed: int,
) -> GPTIndices:
    """The document, sample and shuffle index, equal to Megatron-LM's for every seed.

    One `RandomState(seed)` draws both shuffles, first the document index. The shuffle index needs
    no tokens: another thread draws it while the sample index is built.

    Args:
        sequence_lengths: Lengths of all sequences of the file: int32 [sequences], in tokens. Other
            integer types, byte orders and strides are converted first.
        sequences: (start, stop), the range to draw from.
        plan: Plan of the range, from `plan_gpt`.
        seed: Seed, 0 to 2**32 - 1.

    Raises:
        ConfigError: A seed or range outside its limits.
    """
    start, stop = check_range(sequences, len(sequence_lengths))
    sequence_lengths = _lengths(sequence_lengths)
    random = np.random.RandomState(check_seed(seed))
    cut = plan.num_samples_before_final_epoch
    final_epochs = 0 if cut is None else 1
    document_index = _native.shuffled_ranges(
        [(start, stop, plan.num_epochs - final_epochs), (start, stop, final_epochs)],
        np.int32,
        random,
    )
    num_first = plan.num_samples if cut is None else cut
    with ThreadPoolExecutor(1) as pool:
        shuffle_index = pool.submit(
            _native.shuffled_ranges,
            [(0, num_first, 1), (num_first, plan.num_samples, 1)],
            shuffle_index_dtype(plan.num_samples),
            random,
        )
        sample_index = _native.sample_index(
            sequence_lengths,
            document_index,
            plan.sequence_length,
            plan.num_samples,
            add_extra_token=plan.add_extra_token,
            allow_partial=plan.allow_partial,
            dtype=sample_index_dtype(len(document_index)),
        )
        return GPTIndices(
            document_index=document_index,
            sample_index=sample_index,
            shuffle_index=shuffle_index.result(),
        )


def _lengths(values: NDArray[Any]) -> NDArray[np.int32]:
    """Contiguous int32. The lengths in a mapped index are (if unaligned), and may be large."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.flags.c_contiguous:
        return values
    lengths = whole_numbers("the sequence lengths", values)
    if lengths.size > 0 and not 0 <= lengths.min() <= lengths.max() <= _native.MAX_INT32:
        raise ConfigError(
            f"the sequence lengths go from {lengths.min()} to {lengths.max()}; 0 to "
            f"{_native.MAX_INT32} is possible"
        )
    return lengths.astype(np.int32)
