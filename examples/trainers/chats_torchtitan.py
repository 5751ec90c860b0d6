"""Packs of whole chats behind torchtitan's data loader interface.

The model is trained on what the assistant says. Packs of a token file, as `tiny_data.make_packs`
has them, go the same way.

    torchrun --nproc-per-node 2 examples/trainers/chats_torchtitan.py FOLDER
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tiny_chats
import tiny_data
import torchtitan_loader

from millrace.outputs import FinishedDataset, torchtitan
from millrace.torch import to_tensors


class ChatDataLoader(torchtitan_loader.MillraceDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan_loader.MillraceDataLoader.Config):
        """torchtitan's `Config.build()` makes the class around it, so each loader has its own."""

    @staticmethod
    def transform(batch):
        """The pair that torchtitan's trainer takes."""
        tensors = to_tensors(batch)
        labels = tensors.pop("labels")
        return tensors, labels

    def dataset(self, config, seq_len):
        packs = tiny_chats.pack_chats(Path(config.dataset_path), seq_len, config.num_samples)
        return FinishedDataset(packs, partial(torchtitan, sequence_length=seq_len))


def main() -> None:
    options = tiny_data.arguments("fine-tune on chats with torchtitan's loader interface")
    chats = str(tiny_chats.make_chats(options))
    config = ChatDataLoader.Config(dataset_path=chats, num_samples=400)
    torchtitan_loader.train(options, config, tiny_data.PACK_LENGTH)


if __name__ == "__main__":
    main()
