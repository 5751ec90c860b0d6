"""torchtitan's data loader interface, saved and restored by torchtitan's own checkpointer.

In a torchtitan configuration, `dataloader=MillraceDataLoader.Config(dataset_path=...,
num_samples=...)` takes the place of its own loader, also of its validator's. Its trainer needs a
GPU, so the loop here is a plain one.

    torchrun --nproc-per-node 2 examples/trainers/torchtitan_loader.py FOLDER
"""

import logging
from dataclasses import dataclass

import tiny_data
import tiny_gpt
from torch import distributed
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader

import millrace
from millrace.torch import CheckpointState, to_tensors


def inputs_and_labels(batch):
    """The pair that torchtitan's trainer takes, with its names."""
    tensors = to_tensors(batch)
    labels = tensors["labels"].masked_fill(tensors["loss_mask"] == 0, -100)
    return {"input": tensors["tokens"], "positions": tensors["position_ids"]}, labels


def document_ids(positions):
    """As torchtitan's masks tell documents apart: a position 0 begins one."""
    return (positions == 0).cumsum(1)


class MillraceDataLoader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        num_samples: int  # at least torchtitan's steps times its global batch
        seed: int = 3
        infinite: bool = True  # the validator sets it: whether samples that end are an error

    transform = staticmethod(inputs_and_labels)

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        self.config = config
        self.loader = millrace.Loader(
            self.dataset(config, seq_len),
            micro_batch_size=local_batch_size,
            data_parallel_rank=dp_rank,
            data_parallel_size=dp_world_size,
            transform=self.transform,
        )
        self.state = CheckpointState(self.loader)

    def dataset(self, config, seq_len):
        return millrace.GPTDataset(
            millrace.IndexedDataset(config.dataset_path),
            sequence_length=seq_len,
            seed=config.seed,
            num_samples=config.num_samples,
        )

    def __iter__(self):
        yield from self.loader
        if self.config.infinite:  # torchtitan would end with a warning, and not save its last steps
            end = f"the samples end at {self.loader.consumed_samples}, before torchtitan's steps"
            raise millrace.ConfigError(f"{end}: give more num_samples, or fewer steps")

    def state_dict(self):
        return self.state.state_dict()

    def load_state_dict(self, state):
        if state:  # torchtitan calls this with nothing where it starts anew
            self.state.load_state_dict(state)


def train(options, config, seq_len) -> None:
    """Trains and saves, and resumes where a run has saved."""
    logging.getLogger("torchtitan").setLevel(logging.WARNING)
    distributed.init_process_group("gloo")
    loader = config.build(
        dp_world_size=options.ranks,
        dp_rank=options.rank,
        tokenizer=None,
        seq_len=seq_len,
        local_batch_size=tiny_data.GLOBAL_BATCH // options.ranks,
    )
    model, optimizer = tiny_gpt.make_model()
    progress = tiny_gpt.Progress()
    checkpointer = CheckpointManager.Config(enable=True, interval=options.save_every).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=tiny_gpt.Moments(optimizer),
        lr_schedulers=tiny_gpt.Progress(),  # there is none: anything with a state
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(options.folder),
    )
    checkpointer.load()
    for inputs, labels in loader:
        batch = {"tokens": inputs["input"], "position_ids": inputs["positions"]}
        batch |= {"labels": labels, "loss_mask": (labels != -100).double()}
        batch["document_ids"] = document_ids(inputs["positions"])
        loss = tiny_gpt.train_step(model, optimizer, batch)
        progress.step += 1
        checkpointer.save(progress.step)
        tiny_data.log(options, progress.step, loss)
        if progress.step == options.steps:
            break
    checkpointer.close()
    distributed.destroy_process_group()


def main() -> None:
    options = tiny_data.arguments("train with torchtitan's loader interface and checkpointer")
    tiny_data.make_token_file(options)
    config = MillraceDataLoader.Config(dataset_path=str(options.folder / "text"), num_samples=400)
    train(options, config, tiny_data.SEQUENCE_LENGTH)


if __name__ == "__main__":
    main()
