"""Samples of fixed length, from one token file or the output folder of a global shuffle."""

import os
from functools import partial
from typing import Any

from millrace.checks import check_bool
from millrace.errors import ConfigError, DataError
from millrace.order import GPTIndices, GPTPlan, Order, OrderInputs, SequenceOrder
from millrace.order.gpt import check_seed
from millrace.order.order_plans import build_order, check_range, check_token_dtype
from millrace.samples.dataset import TokenDataset
from millrace.samples.fields import SampleOptions, choose_options
from millrace.samples.loss_ranges import own_ranges
from millrace.samples.stored import StoredTokens, TokenStore
from millrace.shards.metadata import ShardsMetadata
from millrace.shards.shard_reader import Shards
from millrace.storage import Access, Storage
from millrace.store.token_file import TokenFile


class GPTDataset(TokenDataset):
    """Samples of fixed length from one indexed dataset, in Megatron-LM's order or another.

    Args:
        dataset: The token file.
        options: What a sample looks like.
        order: The order of the samples, in place of Megatron-LM's and the next four arguments.
        seed: Seed of the order, 0 to 2**32 - 1.
        num_samples: Least number of samples, for which the sequences are repeated for as many
            epochs as needed. None: one epoch.
        sequences: (start, stop), the range of sequences to draw from (see `split_ranges`). None:
            all.
        drop_last_partial_sequence: Whether to leave out a last sample that the tokens do not fill.
        loss_ranges: "apply": the ranges beside the token file are not trained on (`LossRanges`).
            "ignore": all tokens are. "refuse": all are; an error, if the sidecar names ranges.
        sample_options: The fields of `SampleOptions`, such as `sequence_length`, in place of
            `options`.

    Attributes:
        source: The tokens, in their order.
        order, options: The order of the samples, and what a sample looks like.

    Raises:
        ConfigError: No tokens, too few for a sample, an option outside its limits, or ranges of
            which `loss_ranges` does not speak.
        DataError: Tokens that are not integers, a damaged index, or ranges that do not fit.
    """

    source: StoredTokens
    options: SampleOptions

    def __init__(
        self,
        dataset: TokenStore | TokenFile,
        *,
        options: SampleOptions | None = None,
        order: Order | None = None,
        seed: int | None = None,
        num_samples: int | None = None,
        sequences: tuple[int, int] | None = None,
        drop_last_partial_sequence: bool = True,
        loss_ranges: str = "refuse",
        **sample_options: Any,
    ) -> None:
        options = choose_options(options, sample_options, self)
        if order is None:
            file: Any = dataset.dataset if isinstance(dataset, TokenFile) else dataset
            check_token_dtype(file.dtype, file.prefix)
            sequences = (0, len(file)) if sequences is None else sequences
            inputs = OrderInputs(
                num_sequences=len(file),
                num_tokens=file.num_tokens,
                sequences=check_range(sequences, len(file)),
                num_samples=num_samples,
                sequence_length=options.sequence_length,
                add_extra_token=options.add_extra_token,
                drop_last_partial_sequence=drop_last_partial_sequence,
                seed=check_seed(seed),  # type: ignore[arg-type]
                load_lengths=partial(getattr, file, "sequence_lengths"),
            )
            order = build_order(GPTPlan, inputs, file.prefix)
        elif drop_last_partial_sequence is not True or any(
            one is not None for one in (seed, num_samples, sequences)
        ):
            raise ConfigError(
                "seed, num_samples, sequences and drop_last_partial_sequence belong to "
                "Megatron-LM's order: leave them out where another order is given"
            )
        source = StoredTokens(dataset, order)
        super().__init__(source, options, own_ranges(source, loss_ranges))
        self.order = order

    @property
    def dataset(self) -> Any:
        """The token file, opened."""
        return self.source.store

    @property
    def indices(self) -> GPTIndices:
        """The document, sample and shuffle index of Megatron-LM's order.

        Raises:
            AttributeError: Another order.
        """
        return self.order.indices  # type: ignore[attr-defined, no-any-return]


class ShardedDataset(GPTDataset):
    """Fixed-length sequences from the output folder of `millrace shuffle`: sample n is sequence n.

    The sequences are in random order already: there is no index to build, load or keep in memory,
    and a rank that takes consecutive samples reads consecutive bytes. Samplers, blends, loaders and
    transforms take it like any `GPTDataset`. Folders of the common shuffling script are read too:
    `shard_0000.bin`, ... and a `metadata.json` of version 2.

    A sequence is a whole sample: by default all of its tokens are inputs, and the last label is
    missing and masked, as with Megatron-LM's `add_extra_token_to_sequence=False`. With
    `add_extra_token=True`, its last token is only a label: shuffle with `--seq-len 4097` to train
    on 4,096 tokens that all have a label.

    uint32 tokens are read as int32. Ids from 2**31 on, which `millrace shuffle` and `vocab_size` of
    a loader refuse, would be negative.

    Args:
        folder: The output folder.
        options: What a sample looks like.
        dtype: Dtype of the tokens ("uint16", "uint32", "int32"), for folders whose metadata do not
            say it; None: uint32.
        access: How the shards are read: "mmap", or "file" (positioned reads, for file systems where
            mapping hurts).
        storage: Where the folder is; None: the path says it.
        sample_options: The fields of `SampleOptions`, in place of `options`; by default,
            `add_extra_token` is False, and the sequences give their length.

    Attributes:
        prefix: The folder.
        metadata: Content of its `metadata.json`.

    Raises:
        ConfigError: A folder of documents, or options that do not fit the sequences.
        DataError: Metadata or shards that are missing, damaged or do not agree.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        options: SampleOptions | None = None,
        *,
        dtype: str | None = None,
        access: Access = "mmap",
        storage: Storage | None = None,
        **sample_options: Any,
    ) -> None:
        shards = Shards(folder, access=access, dtype=dtype, storage=storage)
        if len(shards) == 0:
            remedy = "shuffle longer files, or with a smaller --seq-len"
            raise DataError(f"{shards.prefix} has no sequences: {remedy}")
        size = shards.sequence_length
        if options is None:
            sample_options = {"add_extra_token": False, **sample_options}
            has_extra = check_bool("add_extra_token", sample_options["add_extra_token"])
            sample_options.setdefault("sequence_length", size - has_extra)
        options = choose_options(options, sample_options, self)
        length, has_extra = options.sequence_length, options.add_extra_token
        if length + has_extra != size:
            raise ConfigError(
                f"sequence_length is {length}, add_extra_token {has_extra}; the sequences of "
                f"{shards.prefix} have {size} tokens. Give sequence_length {size} without the "
                f"extra token, {size - 1} with it, or shuffle again with another --seq-len"
            )
        order = SequenceOrder(len(shards), sequence_length=length, add_extra_token=has_extra)
        super().__init__(shards, order=order, options=options)

    @property
    def metadata(self) -> ShardsMetadata:
        """What `metadata.json` says."""
        return self.dataset.metadata  # type: ignore[no-any-return]
