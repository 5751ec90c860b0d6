"""Hugging Face's Trainer with its own resume, DDP and gradient accumulation.

The Trainer resumes at `global_step * gradient_accumulation_steps` batches, skips them in the
sampler without reading them, and gives each rank the micro batches that Megatron-LM would: all it
needs is the dataset by sample number, in sequential order. `ResumeCheck` refuses a resume with
another number of samples per step, which would start at another sample. See `lightning_trainer.py`
for why one and two ranks have the same losses.

    torchrun --nproc-per-node 2 examples/trainers/huggingface_trainer.py FOLDER
"""

import tiny_data
import tiny_gpt
import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from millrace.huggingface import ResumeCheck, causal_lm_batch
from millrace.torch import MapDataset

MICRO_BATCHES = 2  # in a global batch


class Losses(TrainerCallback):
    def __init__(self, options) -> None:
        self.options = options

    def on_log(self, arguments, state, control, logs, **_):
        if "loss" in logs:
            tiny_data.log(self.options, state.global_step, logs["loss"])


def last_checkpoint(folder):
    """The last one that is whole, or None: its state is the last file that the Trainer writes."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    whole = [path.parent for path in states if path.read_text().endswith("\n}\n")]
    return max(map(str, whole), key=lambda path: int(path.rpartition("-")[2]), default=None)


def train(options, dataset, collator, trainer_class=Trainer, arguments=TrainingArguments, **more):
    """Trains and saves, and resumes where a run has saved."""
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
        use_cache=False,  # with a cache, the model does not look for the documents of a pack
    )
    settings = arguments(
        output_dir=str(options.folder / "checkpoints"),
        max_steps=options.steps,
        save_steps=options.save_every,
        per_device_train_batch_size=tiny_data.GLOBAL_BATCH // MICRO_BATCHES,
        gradient_accumulation_steps=MICRO_BATCHES // options.ranks,
        train_sampling_strategy="sequential",  # the dataset is in its order already
        remove_unused_columns=False,  # the collator takes whole batches
        dataloader_drop_last=True,
        accelerator_config={"split_batches": False, "even_batches": False},
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = trainer_class(
        LlamaForCausalLM(config).double(),
        settings,
        train_dataset=dataset,
        data_collator=collator,
        callbacks=[Losses(options), ResumeCheck()],
        **more,
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(options.folder / "checkpoints"))
    if distributed.is_initialized():
        distributed.destroy_process_group()


def main() -> None:
    options = tiny_data.arguments("train with Hugging Face's Trainer")
    train(options, MapDataset(tiny_data.make_dataset(options)), causal_lm_batch)


if __name__ == "__main__":
    main()
