"""torchtitan's way: a stateful loader of (inputs, labels), saved by torch.distributed.checkpoint.

torchrun --nproc-per-node 2 examples/trainers/torch_checkpoint.py FOLDER
"""

import tiny_gpt
import torch
from torch import distributed
from torch.distributed import checkpoint

import millrace
from millrace.torch import to_tensors


def inputs_and_labels(batch):
    """The pair that torchtitan's trainer takes; its own names are "input" and "positions"."""
    tensors = to_tensors(batch)
    labels = tensors["labels"].masked_fill(tensors["loss_mask"] == 0, -100)
    return {"input": tensors["tokens"], "positions": tensors["position_ids"]}, labels


def main() -> None:
    options = tiny_gpt.arguments("train with a loader saved by torch.distributed.checkpoint")
    if options.ranks > 1:
        distributed.init_process_group("gloo")
    model, optimizer = tiny_gpt.make_model()
    loader = millrace.Loader(
        tiny_gpt.make_dataset(options),
        micro_batch_size=tiny_gpt.GLOBAL_BATCH // options.ranks,
        data_parallel_rank=options.rank,
        data_parallel_size=options.ranks,
        transform=inputs_and_labels,
    )
    progress = Progress()
    # A loader has state_dict and load_state_dict: it is what torch calls Stateful.
    states = {"model": model, "optimizer": Moments(optimizer), "loader": loader, "step": progress}
    folders = sorted(options.folder.glob("step-*/.metadata"), key=lambda path: path.stat().st_mtime)
    if folders:
        checkpoint.load(states, checkpoint_id=folders[-1].parent)
    for inputs, labels in loader:
        batch = {"tokens": inputs["input"], "position_ids": inputs["positions"]}
        batch |= {"labels": labels, "loss_mask": torch.ones(labels.shape)}
        loss = tiny_gpt.train_step(model, optimizer, batch)
        progress.step += 1
        if progress.step % options.save_every == 0:
            checkpoint.save(states, checkpoint_id=options.folder / f"step-{progress.step}")
        tiny_gpt.log(options, progress.step, loss)
        if progress.step == options.steps:
            break
    if options.ranks > 1:
        distributed.destroy_process_group()


class Progress:
    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


class Moments:
    """An optimizer whose state exists before the first step, as the checkpoint's reader needs."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def state_dict(self):
        return {
            str(number): state for number, state in self.optimizer.state_dict()["state"].items()
        }

    def load_state_dict(self, state):
        groups = self.optimizer.state_dict()["param_groups"]
        numbered = {int(number): entry for number, entry in state.items()}
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})


if __name__ == "__main__":
    main()
