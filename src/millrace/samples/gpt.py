"""Samples of fixed length from one token file."""

from __future__ import annotations

from functools import partial
from typing import Any

from numpy.typing import ArrayLike

from millrace.errors import ConfigError
from millrace.options import SampleOptions, choose_options
from millrace.order import GPTIndices, GPTPlan, Order, OrderInputs, Spans
from millrace.order.gpt import check_seed
from millrace.order.plans import build_order, check_range, check_token_dtype
from millrace.samples.dataset import TokenDataset, check_numbers
from millrace.samples.stored import StoredTokens, TokenStore
from millrace.store import IndexedDataset
from millrace.store.token_file import TokenFile

_SINGLE = {"add_extra_token": True, "reset_position_ids": False, "eod_mask_loss": False} | {
    "boundaries": "eod"
}


class GPTDataset(TokenDataset):
    """Samples of fixed length from one indexed dataset, in Megatron-LM's order or another one.

    Args:
        dataset: The token file.
        sequence_length: Tokens to train on in a sample, 1 to 2**31 - 1.
        seed: Seed of the order, 0 to 2**32 - 1.
        num_samples: Least number of samples; the sequences are repeated for as many epochs as that
            takes. None: the samples of one epoch.
        sequences: (start, stop), the range of sequences to draw from (see `split_ranges`); None:
            all.
        eod_token: End-of-document token; the next two options need it.
        reset_position_ids: Whether position ids start again after each EOD.
        eod_mask_loss: Whether the loss mask is 0 where the input is EOD.
        pad_token: Padding token, which is never trained on: where a label equals it, the loss mask
            is 0. None: the token file holds no padding, and every token is trained on.
        drop_last_partial_sequence: Whether to leave out a last sample that the tokens do not fill.
        add_extra_token: Whether a sample has one more token, the last label. Without it the last
            label is missing and masked.
        order: Another order than Megatron-LM's, in place of seed, num_samples, sequences and
            drop_last_partial_sequence.
        boundaries: What tells documents apart: "eod", or "documents" (see `SampleOptions`).
        options: The options of samples as one object, in place of the single ones.

    Attributes:
        source: The tokens, in their order.
        order: The order of the samples.
        options: What a sample looks like.

    Raises:
        ConfigError: No tokens, too few for a sample, or an option outside its limits.
        DataError: Tokens that are not integers, or a damaged index.
    """

    source: StoredTokens
    options: SampleOptions

    def __init__(
        self,
        dataset: TokenStore | TokenFile,
        *,
        sequence_length: int | None = None,
        seed: int | None = None,
        num_samples: int | None = None,
        sequences: tuple[int, int] | None = None,
        eod_token: int | None = None,
        reset_position_ids: bool = False,
        eod_mask_loss: bool = False,
        pad_token: int | None = None,
        drop_last_partial_sequence: bool = True,
        add_extra_token: bool = True,
        boundaries: str = "eod",
        order: Order | None = None,
        options: SampleOptions | None = None,
    ) -> None:
        single = {
            "sequence_length": sequence_length,
            "add_extra_token": add_extra_token,
            "eod_token": eod_token,
            "pad_token": pad_token,
            "reset_position_ids": reset_position_ids,
            "eod_mask_loss": eod_mask_loss,
            "boundaries": boundaries,
        }
        options = choose_options(options, single, _SINGLE)
        if order is None:
            file: Any = dataset.dataset if isinstance(dataset, TokenFile) else dataset
            order = _build_order(
                file, options, seed, num_samples, sequences, drop_last_partial_sequence
            )
        elif (seed, num_samples) != (None, None) or not (
            sequences is None and drop_last_partial_sequence is True
        ):
            raise ConfigError(
                "seed, num_samples, sequences and drop_last_partial_sequence belong to "
                "Megatron-LM's order: leave them out where another order is given"
            )
        super().__init__(StoredTokens(dataset, order), options)
        self.order = order

    @property
    def dataset(self) -> Any:
        """The token file, which is opened for the first sample at the latest."""
        return self.source.store

    @property
    def indices(self) -> GPTIndices:
        """The document index, sample index and shuffle index of Megatron-LM's order.

        Raises:
            AttributeError: Another order.
        """
        indices: GPTIndices = self.order.indices  # type: ignore[attr-defined]
        return indices

    def spans(self, sample_numbers: ArrayLike) -> Spans:
        """Which tokens of which sequences the samples of these numbers are made of.

        Raises:
            ConfigError, IndexError, DataError: As `batch`.
        """
        return self.source.spans(check_numbers(sample_numbers, len(self)))


def _build_order(
    dataset: IndexedDataset,
    options: SampleOptions,
    seed: Any,
    num_samples: int | None,
    sequences: tuple[int, int] | None,
    drop_last_partial_sequence: bool,
) -> Order:
    check_token_dtype(dataset.dtype, dataset.prefix)
    every = (0, len(dataset))
    inputs = OrderInputs(
        num_sequences=len(dataset),
        num_tokens=dataset.num_tokens,
        sequences=check_range(every if sequences is None else sequences, len(dataset)),
        num_samples=num_samples,
        sequence_length=options.sequence_length,
        add_extra_token=options.add_extra_token,
        drop_last_partial_sequence=drop_last_partial_sequence,
        seed=check_seed(seed),
        load_lengths=partial(getattr, dataset, "sequence_lengths"),
    )
    return build_order(GPTPlan, inputs, dataset.prefix)
