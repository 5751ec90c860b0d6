"""Where a run of Lightning goes on after each kind of checkpoint.

lightning_cases.py FOLDER CASES
"""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from millrace import ConfigError, CyclicSampler, Loader
from millrace.feed import SampleOptions, StreamDataset, TokenBatch
from millrace.lightning import DataModule
from millrace.torch import to_tensors


class Numbers:
    def __len__(self) -> int:
        return 40

    def batch(self, sample_numbers: Any) -> dict[str, Any]:
        return {"tokens": np.array(sample_numbers)}

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "numbers"}


class Counting(Numbers):
    def read(self, state: Any, count: int) -> Any:
        start = state or 0
        count = min(count, 40 - start)
        tokens = np.repeat(np.arange(start, start + count), 2)
        return TokenBatch(tokens, 2 * np.arange(1, count + 1)), start + count


class Model(lightning.LightningModule):
    estimates_steps = False

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.fails_at, self.batches = fails_at, []

    def configure_optimizers(self) -> Any:
        if Model.estimates_steps:  # Lightning asks for len before it restores its counts
            assert self.trainer.estimated_stepping_batches >= 1
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_index: int) -> Any:
        if batch_index == self.fails_at:
            raise RuntimeError("the power is gone")
        self.batches.append(batch["tokens"].tolist())
        return (self.weight * batch["tokens"].float().mean()).sum()

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.batches.append(["validation", *batch["tokens"].tolist()])


def of_size(size: int, start: int = 0) -> Any:
    options = {"micro_batch_size": size, "consumed_samples": start, "transform": to_tensors}
    return lambda *_: Loader(Numbers(), **options)


sequential = of_size(4)


def endless(rank: int, size: int) -> Loader:
    """Without a length, so Lightning fetches a batch ahead."""
    sampler = CyclicSampler(40, micro_batch_size=4)
    return Loader(Numbers(), sampler=sampler, transform=to_tensors)


def streamed(rank: int, size: int) -> Loader:
    dataset = StreamDataset(Counting(), SampleOptions(sequence_length=1))
    return Loader(dataset, micro_batch_size=4, transform=to_tensors)


def batches(make: Any, steps: int = -1, *, validation: Any = None, **options: Any) -> Any:
    model = Model(options.pop("fails_at", None))
    path, resume = options.pop("save", None), options.pop("resume", None)
    data = options.pop("data", None) or DataModule(make, validation=validation)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing="callbacks" in options,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    try:
        trainer.fit(model, datamodule=data, ckpt_path=resume, weights_only=True)
    except RuntimeError as error:
        if str(error) != "the power is gone":
            raise
    if path is not None:
        trainer.save_checkpoint(path)  # after an error, as an OnExceptionCheckpoint does
    return model.batches


def trained(batches: list[Any]) -> list[Any]:
    return [batch for batch in batches if batch[0] != "validation"]


def steps(first: int, last: int) -> list[list[int]]:
    return [list(range(4 * step, 4 * step + 4)) for step in range(first, last)]


def epochs(folder: Path) -> None:
    """Epochs of three batches; the run resumes with epochs of two, so no count may be reused."""
    whole = {"limit_train_batches": 3, "max_epochs": 2}
    rest = {"limit_train_batches": 2, "max_epochs": 4}
    validated = {"validation": sequential, "limit_val_batches": 1}
    for name, options in {
        "end": {},
        "accumulating": {"accumulate_grad_batches": 2},
        "validated": validated,
        "in between": {**validated, "val_check_interval": 1},
        "fails": {"fails_at": 1},
    }.items():
        path = folder / name
        callbacks = [ModelCheckpoint(path, save_last=True)]
        callbacks += [OnExceptionCheckpoint(path)] * (name == "fails")
        options = {"save": path / "after.ckpt", "callbacks": callbacks, **whole, **options}
        before = trained(batches(sequential, **options))
        assert before == steps(0, len(before)), name
        assert len(before) == (1 if name == "fails" else 6), name
        for saved in sorted(path.glob("*.ckpt")):
            after = batches(sequential, **rest, resume=saved)
            assert len(after) >= 3, (saved, after)
            assert after == steps(len(before), len(before) + len(after)), (saved, after)
            state = torch.load(saved, weights_only=True)["DataModule"]
            assert state["consumed_samples"] == 4 * len(before), saved
        assert len(list(path.glob("*.ckpt"))) == (2 if name == "fails" else 3)

    saved = torch.load(folder / "end" / "last.ckpt", weights_only=True)
    del saved["DataModule"]  # of a class of another name, by which Lightning keeps states
    torch.save(saved, folder / "old.ckpt")
    assert batches(sequential, **rest, resume=folder / "old.ckpt")[:1] == steps(6, 7)

    # One data module in several runs.
    data = DataModule(sequential, validation=sequential)
    assert trained(batches(sequential, 4, fails_at=1, data=data)) == steps(0, 1)
    assert trained(batches(sequential, 4, data=data)) == steps(1, 5)  # what failed comes again
    saved = folder / "end" / "last.ckpt"
    trainer = lightning.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    trainer.validate(Model(), data, ckpt_path=saved)
    assert trained(batches(sequential, 1, data=data)) == steps(5, 6)
    assert trained(batches(sequential, data=data, resume=saved, **rest))[:1] == steps(6, 7)


def unfinished(folder: Path) -> None:
    for make in (sequential, endless, streamed):
        expected = batches(make, 6)
        path = folder / f"{make.__name__}.ckpt"
        before = batches(make, 6, fails_at=3, save=path)
        assert len(before) == 3
        after = batches(make, 6, resume=path)
        assert before + after == expected, (make, before, after, expected)
        before = batches(make, 2, save=path)
        assert before + batches(make, 6, resume=path) == expected, make
        state = torch.load(path, weights_only=True)["DataModule"]
        assert state.get("stream", {}).get("state") == (8 if make is streamed else None)
    assert len(batches(streamed, max_epochs=1)) == 10
    path = folder / "end.ckpt"
    assert len(batches(sequential, 10, save=path)) == 10
    assert batches(sequential, 10, resume=path) == []
    assert batches(sequential, -1, max_epochs=1, resume=path) == []
    for options in ({"resume": path}, {}):
        with pytest.raises(ConfigError, match=r"^the training samples end at consumed_samples=40"):
            batches(sequential, 12, **options)
    options = {"validation": sequential, "val_check_interval": 2, "limit_val_batches": 1}
    validated = batches(sequential, 4, **options)
    assert validated.count(["validation", 0, 1, 2, 3]) == 2, validated


def sizes(folder: Path) -> None:  # an epoch goes on to its end and its validation
    Model.estimates_steps = True
    cases: Any = ((4, 8, 0, {}), (8, 4, 0, {}), (4, 8, 8, {}))
    cases += ((2, 8, 0, {"accumulate_grad_batches": 2}),)
    cases += ((4, 8, 0, {"limit_train_batches": 5, "max_epochs": 2}),)
    for number, (first, second, start, options) in enumerate(cases):
        options = {"max_epochs": 1, "validation": sequential, **options}
        path = folder / str(number)
        saves = ModelCheckpoint(path, "{step}", every_n_train_steps=2, save_top_k=-1)
        make, fail = of_size(first, start), 3 if first == 8 else 4
        batches(make, **options, fails_at=fail, save=path / "failed", callbacks=[saves])
        for saved in path.iterdir():
            after = batches(of_size(second), **options, resume=saved)
            samples = [sample for batch in trained(after) for sample in batch]
            assert samples == list(range(samples[0], 40)), (saved, after)
            assert "validation" in [batch[0] for batch in after], (saved, after)
    with pytest.raises(ConfigError, match=r"^a CyclicSampler has no end, so max_epochs=2 would"):
        batches(endless, max_epochs=2)


if __name__ == "__main__":
    {"epochs": epochs, "unfinished": unfinished, "sizes": sizes}[sys.argv[2]](Path(sys.argv[1]))
