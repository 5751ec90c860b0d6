"""The output folder of a global shuffle as a dataset."""

from __future__ import annotations

import os

from millrace.checks import flag
from millrace.errors import ConfigError, DataError
from millrace.options import SampleOptions, choose_options
from millrace.order import SequenceOrder
from millrace.samples.gpt import GPTDataset
from millrace.shards.metadata import ShardsMetadata
from millrace.shards.reader import Shards
from millrace.storage import Access

_SINGLE = {"add_extra_token": False, "reset_position_ids": False, "eod_mask_loss": False} | {
    "boundaries": "eod"
}


class ShardedDataset(GPTDataset):
    """Fixed-length sequences from the output folder of `millrace shuffle`: sample n is sequence n.

    The sequences are in random order already, so there is no index to build, to load or to keep in
    memory, and a rank that takes consecutive samples reads consecutive bytes. It is a `GPTDataset`
    in all other respects: samplers, blends, loaders and transforms take it. Folders of the common
    shuffling script are read too: `shard_0000.bin`, ... and a `metadata.json` of version 2.

    A sequence of the folder is a whole sample: by default its tokens are all of its tokens, and the
    last label is missing and masked, as with Megatron-LM's `add_extra_token_to_sequence=False`.
    With `add_extra_token`, its last token is only a label: shuffle with `--seq-len 4097` to train
    on 4,096 tokens that all have a label.

    uint32 tokens are read as int32. Ids from 2**31 on, which `millrace shuffle` refuses, would be
    negative; `vocab_size` of a loader refuses them, too.

    Args:
        folder: The output folder.
        options: The options of samples as one object, in place of the single ones below.
        eod_token: End-of-document token; the next two options need it.
        reset_position_ids: Whether position ids start again after each EOD.
        eod_mask_loss: Whether the loss mask is 0 where the input is EOD.
        pad_token: Padding token, which is never trained on; None: there is no padding.
        add_extra_token: Whether the last token of a sequence is only a label.
        boundaries: What tells documents apart: "eod", or "documents" (see `SampleOptions`).
        dtype: Dtype of the tokens ("uint16", "uint32", "int32"), for folders whose metadata do not
            say it; None: uint32.
        access: How the shards are read: "mmap", or "file" (positioned reads, for file systems where
            mapping hurts).

    Attributes:
        prefix: The folder.
        metadata: What `metadata.json` says.
        order: The order of the samples, that of the folder.
        options: What a sample looks like.

    Raises:
        ConfigError: A folder of documents, or options that do not fit the sequences.
        DataError: Metadata or shards that are missing, damaged or do not agree.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        options: SampleOptions | None = None,
        *,
        eod_token: int | None = None,
        reset_position_ids: bool = False,
        eod_mask_loss: bool = False,
        pad_token: int | None = None,
        add_extra_token: bool = False,
        boundaries: str = "eod",
        dtype: str | None = None,
        access: Access = "mmap",
    ) -> None:
        shards = Shards(folder, access=access, dtype=dtype)
        if len(shards) == 0:
            raise DataError(
                f"{shards.prefix} has no sequences: there is nothing to draw samples from. Shuffle "
                "longer files, or with a smaller --seq-len"
            )
        length = shards.sequence_length - flag("add_extra_token", add_extra_token)
        single = {
            "add_extra_token": add_extra_token,
            "eod_token": eod_token,
            "pad_token": pad_token,
            "reset_position_ids": reset_position_ids,
            "eod_mask_loss": eod_mask_loss,
            "boundaries": boundaries,
        }
        single |= {"sequence_length": length} if options is None else {}
        options = choose_options(options, single, _SINGLE)
        if options.sequence_length + options.add_extra_token != shards.sequence_length:
            raise ConfigError(
                f"sequence_length is {options.sequence_length} and add_extra_token "
                f"{options.add_extra_token}; the sequences of {shards.prefix} have "
                f"{shards.sequence_length} tokens. Give sequence_length {shards.sequence_length} "
                f"without the extra token, or {shards.sequence_length - 1} with it, or shuffle the "
                "data again with another --seq-len"
            )
        order = SequenceOrder(
            len(shards),
            sequence_length=options.sequence_length,
            add_extra_token=options.add_extra_token,
        )
        super().__init__(shards, order=order, options=options)

    @property
    def metadata(self) -> ShardsMetadata:
        """What `metadata.json` says."""
        metadata: ShardsMetadata = self.dataset.metadata
        return metadata
