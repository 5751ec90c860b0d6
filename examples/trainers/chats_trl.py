"""TRL's SFTTrainer on packs of whole chats, as in `chats_huggingface.py`.

torchrun --nproc-per-node 2 examples/trainers/chats_trl.py FOLDER
"""

from functools import partial

import huggingface_trainer
import tiny_chats
import tiny_data
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from millrace.outputs import FinishedDataset, padding_free
from millrace.torch import MapDataset, collate


class PackTrainer(SFTTrainer):
    """Trains on a `MapDataset`: TRL's own takes, when it is made, only what it would tokenise."""

    def __init__(self, *args, train_dataset, eval_dataset=None, **more):
        first = Dataset.from_list([{"input_ids": [0], "labels": [0]}])
        super().__init__(*args, train_dataset=first, **more)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset


def main() -> None:
    options = tiny_data.arguments("fine-tune on chats with TRL's SFTTrainer")
    packs = tiny_chats.pack_chats(tiny_chats.make_chats(options), tiny_data.PACK_LENGTH)
    batches = FinishedDataset(packs, padding_free)
    huggingface_trainer.train(
        options,
        MapDataset(batches, fields=("input_ids", "labels", "position_ids")),
        collate,
        PackTrainer,
        partial(
            SFTConfig,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            bf16=False,  # which a CPU may lack
        ),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())),
    )


if __name__ == "__main__":
    main()
