"""What a checkpoint of Lightning holds where a batch was fetched and not finished."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import numpy as np
import torch

from millrace import ConfigError, CyclicSampler, Loader
from millrace.lightning import DataModule
from millrace.torch import to_tensors


class Numbers:
    def __len__(self) -> int:
        return 40

    def batch(self, sample_numbers: Any) -> dict[str, Any]:
        return {"tokens": np.array(sample_numbers)}

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "numbers"}


class Model(lightning.LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.fails_at, self.batches = fails_at, []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_index: int) -> Any:
        if batch_index == self.fails_at:
            raise RuntimeError("the power is gone")
        self.batches.append(batch["tokens"].tolist())
        return (self.weight * batch["tokens"].float().mean()).sum()

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.batches.append(["validation", *batch["tokens"].tolist()])


def sequential(rank: int, size: int) -> Loader:
    return Loader(Numbers(), micro_batch_size=4, transform=to_tensors)


def endless(rank: int, size: int) -> Loader:
    """Without a length, so Lightning fetches a batch ahead."""
    sampler = CyclicSampler(40, micro_batch_size=4)
    return Loader(Numbers(), sampler=sampler, transform=to_tensors)


def batches(make: Any, steps: int, *, validation: Any = None, **options: Any) -> Any:
    model = Model(options.pop("fails_at", None))
    path, resume = options.pop("save", None), options.pop("resume", None)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    data = DataModule(make, validation=validation)
    try:
        trainer.fit(model, datamodule=data, ckpt_path=resume)
    except RuntimeError as error:
        if str(error) != "the power is gone":
            raise
        trainer.save_checkpoint(path)  # as an OnExceptionCheckpoint does
        return model.batches
    if path is not None:
        trainer.save_checkpoint(path)
    return model.batches


def main() -> None:
    folder = Path(sys.argv[1])
    for make in (sequential, endless):
        expected = batches(make, 6)
        path = folder / f"{make.__name__}.ckpt"
        before = batches(make, 6, fails_at=3, save=path)
        assert len(before) == 3
        after = batches(make, 6, resume=path)
        assert before + after == expected, (make, before, after, expected)
        before = batches(make, 2, save=path)
        assert before + batches(make, 6, resume=path) == expected, make
    path = folder / "end.ckpt"
    assert len(batches(sequential, 10, save=path)) == 10
    assert batches(sequential, 10, resume=path) == []
    assert batches(sequential, -1, max_epochs=1, resume=path) == []
    message = ""
    for options in ({"resume": path}, {}):
        try:
            batches(sequential, 12, **options)
        except ConfigError as error:
            message = str(error)
        assert message.startswith("the training samples end at consumed_samples=40"), message
    validated = batches(
        sequential, 4, validation=sequential, val_check_interval=2, limit_val_batches=1
    )
    assert validated.count(["validation", 0, 1, 2, 3]) == 2, validated


if __name__ == "__main__":
    main()
