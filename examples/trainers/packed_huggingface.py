"""Hugging Face's Trainer on packs of whole documents, told apart by their position ids.

A batch is one row without padding. There is no attention mask: the model finds the documents where
position ids start again (with FlashAttention by `cu_seq_lens_q` and the like). The Trainer divides
by the number of labels in the whole step, which it counts itself.

    torchrun --nproc-per-node 2 examples/trainers/packed_huggingface.py FOLDER
"""

import tiny_data
import tiny_gpt
import torch
from torch import distributed
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from millrace.outputs import padding_free
from millrace.torch import to_tensors

MICRO_BATCHES = 2  # in a global batch
ARRAYS = ("input_ids", "labels", "position_ids")


class Packs(Dataset):
    """The numbers of the packs: `collate` reads a whole batch of them at once."""

    def __init__(self, packs) -> None:
        self.packs = packs

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, number: int) -> int:
        return number

    def collate(self, numbers):
        batch = padding_free(self.packs.tokens(numbers))
        return to_tensors({name: batch[name] for name in ARRAYS})


class Losses(TrainerCallback):
    def __init__(self, options) -> None:
        self.options = options

    def on_log(self, arguments, state, control, logs, **_):
        if "loss" in logs:
            tiny_data.log(self.options, state.global_step, logs["loss"])


def main() -> None:
    options = tiny_data.arguments("train on packs with Hugging Face's Trainer")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    width = tiny_gpt.WIDTH
    config = LlamaConfig(
        vocab_size=tiny_data.VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=tiny_data.PACK_LENGTH,
        use_cache=False,  # with a cache, the model does not look for documents
    )
    arguments = TrainingArguments(
        output_dir=str(options.folder / "checkpoints"),
        max_steps=options.steps,
        save_steps=options.save_every,
        per_device_train_batch_size=tiny_data.GLOBAL_BATCH // MICRO_BATCHES,
        gradient_accumulation_steps=MICRO_BATCHES // options.ranks,
        train_sampling_strategy="sequential",  # the packs are in their order already
        remove_unused_columns=False,
        dataloader_drop_last=True,
        accelerator_config={"split_batches": False, "even_batches": False},
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = Packs(tiny_data.make_packs(options))
    trainer = Trainer(
        LlamaForCausalLM(config).double(),
        arguments,
        train_dataset=data,
        data_collator=data.collate,
        callbacks=[Losses(options)],
    )
    last = arguments.output_dir if (options.folder / "checkpoints").exists() else None
    trainer.train(resume_from_checkpoint=get_last_checkpoint(last) if last else None)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
