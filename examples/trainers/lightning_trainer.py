"""PyTorch Lightning with its own DDP, gradient accumulation and checkpoints.

Two ranks with one micro batch each, or one rank that accumulates two: a sum of two gradients is the
same in both, to the last bit. (More ranks may add them in another order.)

    torchrun --nproc-per-node 2 examples/trainers/lightning_trainer.py FOLDER
"""

import lightning.pytorch as lightning
import tiny_data
import tiny_gpt
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import millrace
from millrace.lightning import DataModule
from millrace.torch import to_tensors

MICRO_BATCHES = 2  # in a global batch


class Model(lightning.LightningModule):
    def __init__(self, options) -> None:
        super().__init__()
        self.gpt, _ = tiny_gpt.make_model()
        self.options, self.losses = options, []

    def configure_optimizers(self):
        return torch.optim.AdamW(self.gpt.parameters(), lr=1e-2)

    def training_step(self, batch, batch_index):
        loss = tiny_gpt.sample_losses(self.gpt, batch).mean()
        self.losses += self.all_gather(loss.detach()).flatten().tolist()
        return loss

    def on_train_batch_end(self, *_):
        if len(self.losses) == MICRO_BATCHES:
            step = self.trainer.global_step
            tiny_data.log(self.options, step, sum(self.losses) / MICRO_BATCHES)
            self.losses = []


def main() -> None:
    options = tiny_data.arguments("train with Lightning")
    dataset = tiny_data.make_dataset(options)

    def train(rank: int, size: int) -> millrace.Loader:
        return millrace.Loader(
            dataset,
            micro_batch_size=tiny_data.GLOBAL_BATCH // MICRO_BATCHES,
            data_parallel_rank=rank,
            data_parallel_size=size,
            transform=to_tensors,
        )

    checkpoints = ModelCheckpoint(
        options.folder, filename="last", every_n_train_steps=options.save_every, save_top_k=1,
        enable_version_counter=False,
    )  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy="ddp" if options.ranks > 1 else "auto",
        accumulate_grad_batches=MICRO_BATCHES // options.ranks,
        max_steps=options.steps,
        precision="64-true",
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = options.folder / "last.ckpt"
    resume_from = str(last) if last.exists() else None
    trainer.fit(Model(options), datamodule=DataModule(train), ckpt_path=resume_from)


if __name__ == "__main__":
    main()
