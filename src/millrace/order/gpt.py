"""Megatron-LM's order of one dataset.

A sample number k becomes tokens in three steps: the *shuffle index* maps k to a row j of the
*sample index*; rows j and j + 1 are two places (document, offset) in the *document index*, which
holds the sequences of all epochs in shuffled order; the tokens between the places are the sample.
"Document" is Megatron-LM's word here: the entries are sequences of the token file.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import check_bool, check_int, check_ints, check_within, shown
from millrace.deferred import Deferred, cached_property
from millrace.errors import ConfigError
from millrace.order.order_plans import NOT_IN_KEY, Arrays, Layout, OrderInputs, check_range
from millrace.order.spans import RULES_VERSION, CoreOrder

FINAL_EPOCH_THRESHOLD = 0.80
"""A final epoch is shuffled separately if less than this part of its samples is needed."""

MAX_SEED = 2**32 - 1


def sample_index_dtype(num_documents: int) -> np.dtype[Any]:
    """The dtype of a sample index over a document index of `num_documents` entries."""
    return np.dtype(np.int32 if num_documents < 2**31 else np.int64)


def shuffle_index_dtype(num_samples: int) -> np.dtype[Any]:
    """The dtype of a shuffle index of `num_samples` samples."""
    return np.dtype(np.uint32 if num_samples < 2**32 - 2 else np.int64)


@dataclass(frozen=True, kw_only=True)
class GPTPlan:
    """Epochs and samples, known before any index is built: Megatron-LM's `OrderPlan`.

    Attributes:
        num_tokens_per_epoch: Number of tokens in the range of sequences.
        num_samples: Number of samples, at least as many as requested.
        num_epochs: Smallest number of epochs that holds the requested samples.
        num_samples_before_final_epoch: Where the shuffle is cut; None: it is one shuffle.
        sequence_length: Tokens to train on in a sample.
        add_extra_token: Whether a sample has one more token, for the last label.
        allow_partial: Whether the last sample may be shorter.
    """

    num_tokens_per_epoch: int = field(metadata=NOT_IN_KEY)
    num_samples: int
    num_epochs: int
    num_samples_before_final_epoch: int | None
    sequence_length: int = field(metadata=NOT_IN_KEY)
    add_extra_token: bool = field(metadata=NOT_IN_KEY)
    allow_partial: bool

    @classmethod
    def of(cls, inputs: OrderInputs) -> "GPTPlan":
        """See `OrderPlan.of` and `plan_gpt`.

        Raises:
            DataError: Lengths of more tokens than the token file holds.
        """
        return plan_gpt(
            inputs.count_tokens(),
            inputs.num_samples,
            inputs.sequence_length,
            add_extra_token=inputs.add_extra_token,
            drop_last_partial_sequence=inputs.drop_last_partial_sequence,
        )

    def arrays(self, inputs: OrderInputs) -> Layout:
        start, stop = inputs.sequences
        num_entries, num_samples = (stop - start) * self.num_epochs, self.num_samples
        return {
            "document_index": (np.int32, (num_entries,)),
            "sample_index": (sample_index_dtype(num_entries), (num_samples + 1, 2)),
            "shuffle_index": (shuffle_index_dtype(num_samples), (num_samples,)),
        }

    def build(self, inputs: OrderInputs) -> Arrays:
        return build_gpt_indices(inputs.lengths, inputs.sequences, self, inputs.seed)._asdict()

    def load(self, inputs: OrderInputs, arrays: Deferred[Arrays]) -> "GPTOrder":
        return GPTOrder(self, inputs, arrays)


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


class GPTOrder(CoreOrder):
    """Megatron-LM's order of a range of sequences: samples of fixed length, shuffled.

    Args:
        plan: Epochs and samples of the range.
        inputs: The range, its sequence lengths, and the seed of the shuffles.
        arrays: The three indices by their names, which are loaded at the first sample.
    """

    def __init__(self, plan: GPTPlan, inputs: OrderInputs, arrays: Deferred[Arrays]) -> None:
        self.plan, self.inputs, self._arrays = plan, inputs, arrays

    def __len__(self) -> int:
        return self.plan.num_samples

    @property
    def indices(self) -> GPTIndices:
        return GPTIndices(**self._arrays.value)

    @cached_property
    def core(self) -> _native.Order:
        return _native.gpt_order(
            self.inputs.lengths,
            *self.indices,
            sequence_length=self.plan.sequence_length,
            add_extra_token=self.plan.add_extra_token,
        )

    def epochs(self, num_samples: int) -> float:
        """Epochs that so many samples are: a share of all but the last one are mixed."""
        return num_samples * self.plan.sequence_length / self.plan.num_tokens_per_epoch

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides all spans, apart from the sequence lengths."""
        plan = self.plan
        return {
            "kind": "gpt",
            "rules": RULES_VERSION,
            "sequences": list(self.inputs.sequences),
            "num_samples": plan.num_samples,
            "num_epochs": plan.num_epochs,
            "samples_before_final_epoch": plan.num_samples_before_final_epoch,
            "seed": self.inputs.seed,
            "sequence_length": plan.sequence_length,
            "add_extra_token": plan.add_extra_token,
        }


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
    extra = int(check_bool("add_extra_token", add_extra_token))
    drops_partial = check_bool("drop_last_partial_sequence", drop_last_partial_sequence)
    sequence_length = check_int("sequence_length", sequence_length, 1)
    per_epoch = check_int("num_tokens_per_epoch", num_tokens_per_epoch)
    if per_epoch <= 0:
        raise ConfigError(
            f"the split holds {shown(per_epoch)} tokens: give it a larger share, or leave it out"
        )
    requested = 0
    if num_samples is not None:
        num_samples = check_int("num_samples", num_samples, 0)
        requested = num_samples * sequence_length + extra
    num_epochs = max(1, -(-requested // per_epoch))
    tokens = num_epochs * per_epoch - extra
    available = tokens // sequence_length if drops_partial else -(-tokens // sequence_length)
    if available < 1:
        raise ConfigError(
            f"sequence_length {shown(sequence_length)} (and {extra} extra token) leaves no sample: "
            f"the split holds {shown(per_epoch)} tokens. Choose a shorter one, or more documents"
        )
    cut = None
    if num_epochs > 1 and num_samples is not None:
        before = (tokens - per_epoch) // sequence_length
        threshold = int(FINAL_EPOCH_THRESHOLD * ((per_epoch - extra) // sequence_length))
        cut = before if num_samples - before < threshold else None
    return GPTPlan(
        num_tokens_per_epoch=per_epoch,
        num_epochs=num_epochs,
        num_samples=available,
        num_samples_before_final_epoch=cut,
        sequence_length=sequence_length,
        add_extra_token=bool(extra),
        allow_partial=not drops_partial,
    )


def check_seed(seed: int) -> int:
    """The seed as an int; ConfigError for one that `RandomState` does not accept."""
    return check_int("the seed", seed, 0, MAX_SEED)


def build_gpt_indices(
    sequence_lengths: NDArray[np.int32], sequences: tuple[int, int], plan: GPTPlan, seed: int
) -> GPTIndices:
    """The document, sample and shuffle index, equal to Megatron-LM's for every seed.

    One `RandomState(seed)` draws the document index, then the shuffle index, in another thread
    while the sample index is built.

    Args:
        sequence_lengths: Lengths of all sequences of the file: int32 [sequences], in tokens. Other
            integer types, byte orders and strides are converted.
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
    num_first, final_epochs = (plan.num_samples, 0) if cut is None else (cut, 1)
    epochs = [(start, stop, plan.num_epochs - final_epochs), (start, stop, final_epochs)]
    document_index = _native.shuffled_ranges(epochs, np.int32, random)
    samples = [(0, num_first, 1), (num_first, plan.num_samples, 1)]
    dtype = shuffle_index_dtype(plan.num_samples)
    with ThreadPoolExecutor(1) as pool:
        shuffle_index = pool.submit(_native.shuffled_ranges, samples, dtype, random)
        sample_index = _native.sample_index(
            sequence_lengths,
            document_index,
            plan.sequence_length,
            plan.num_samples,
            add_extra_token=plan.add_extra_token,
            allow_partial=plan.allow_partial,
            dtype=sample_index_dtype(len(document_index)),
        )
        return GPTIndices(document_index, sample_index, shuffle_index.result())


def build_gpt_indices_of(
    sequence_lengths: NDArray[np.int32], numbers: NDArray[np.int32], plan: GPTPlan, seed: int
) -> GPTIndices:
    """`build_gpt_indices` of any choice of sequences.

    Args:
        numbers: Numbers of the sequences: int32 [chosen].
    """
    start = int(numbers[0]) if len(numbers) > 0 else 0
    stop = start + len(numbers)
    if start >= 0 and np.array_equal(numbers, np.arange(start, stop)):
        return build_gpt_indices(sequence_lengths, (start, stop), plan, seed)
    # A shuffle moves places, whatever they hold: shuffle the numbers 0 to n - 1, then look up.
    lengths = np.ascontiguousarray(sequence_lengths[numbers])
    places = build_gpt_indices(lengths, (0, len(numbers)), plan, seed)
    return places._replace(document_index=np.asarray(numbers, np.int32)[places.document_index])


def _lengths(values: NDArray[Any]) -> NDArray[np.int32]:
    """Contiguous int32, without a copy of a mapped index's lengths, which may be unaligned."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.flags.c_contiguous:
        return values
    lengths = check_ints("the sequence lengths", values)
    for length in (lengths.min(), lengths.max()) if lengths.size > 0 else ():
        check_within("the sequence lengths", int(length), 0, _native.MAX_INT32)
    return lengths.astype(np.int32)
