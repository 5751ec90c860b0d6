"""Packs of whole documents behind torchtitan's data loader interface.

Its masks tell documents apart where positions start again.

    torchrun --nproc-per-node 2 examples/trainers/packed_torchtitan.py FOLDER
"""

from dataclasses import dataclass
from functools import partial

import tiny_data
import torchtitan_loader

import millrace
from millrace.order import PackedOrder
from millrace.outputs import FinishedDataset, torchtitan
from millrace.torch import to_tensors


def inputs_and_labels(batch):
    """The pair that torchtitan's trainer takes."""
    tensors = to_tensors(batch)
    labels = tensors.pop("labels")
    return tensors, labels


class PackedDataLoader(torchtitan_loader.MillraceDataLoader):
    transform = staticmethod(inputs_and_labels)

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan_loader.MillraceDataLoader.Config):
        long_documents: str = "split"

    def dataset(self, config, seq_len):
        data = millrace.IndexedDataset(config.dataset_path)
        order = PackedOrder(
            data.sequence_lengths,
            seq_len,
            config.seed,
            num_samples=config.num_samples,
            long_documents=config.long_documents,
        )
        packs = millrace.GPTDataset(
            data,
            sequence_length=seq_len,
            add_extra_token=False,
            order=order,
            boundaries="documents",
        )
        return FinishedDataset(packs, partial(torchtitan, sequence_length=seq_len))


if __name__ == "__main__":
    torchtitan_loader.main(PackedDataLoader, tiny_data.PACK_LENGTH)
