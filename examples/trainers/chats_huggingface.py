"""Hugging Face's Trainer on packs of whole chats, told apart by their position ids.

The model is trained on what the assistant says. A batch is one row without padding. There is no
attention mask: the model finds the chats where position ids start again (with FlashAttention by
`cu_seq_lens_q` and the like). The Trainer divides by the number of labels in the whole step, which
it counts itself. Packs of a token file, as `tiny_data.make_packs` has them, go the same way.

    torchrun --nproc-per-node 2 examples/trainers/chats_huggingface.py FOLDER
"""

import huggingface_trainer
import tiny_chats
import tiny_data

from millrace.outputs import FinishedDataset, padding_free
from millrace.torch import MapDataset, collate


def main() -> None:
    options = tiny_data.arguments("fine-tune on chats with Hugging Face's Trainer")
    packs = tiny_chats.pack_chats(tiny_chats.make_chats(options), tiny_data.PACK_LENGTH)
    batches = FinishedDataset(packs, padding_free)
    dataset = MapDataset(batches, fields=("input_ids", "labels", "position_ids"))
    huggingface_trainer.train(options, dataset, collate)


if __name__ == "__main__":
    main()
