"""Megatron-LM's `--dataloader-type external`: the loader takes the place of the dataset.

`train_valid_test_datasets_provider` is what changes in `pretrain_gpt.py`; see docs/trainers.md. The
rest of this program stands for Megatron-LM: arguments, parallel state, checkpoints and the loop.

    torchrun --nproc-per-node 2 examples/trainers/megatron_external.py FOLDER
"""

from types import SimpleNamespace

import tiny_data
import tiny_gpt
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator
from torch import distributed

import millrace
from millrace.torch import check_consistency, to_tensors


def train_valid_test_datasets_provider(args, dataset):
    """With `external`, Megatron-LM takes what this returns as iterators of micro batches."""
    train = millrace.Loader(
        dataset,
        micro_batch_size=args.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        consumed_samples=args.consumed_train_samples,
        transform=to_tensors,
    )
    return train, None, None


def main() -> None:
    options = tiny_data.arguments("train as Megatron-LM does with an external loader")
    distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    args = SimpleNamespace(
        micro_batch_size=tiny_data.GLOBAL_BATCH // options.ranks,
        global_batch_size=tiny_data.GLOBAL_BATCH,
        consumed_train_samples=0,
        iteration=0,
    )
    model, optimizer = tiny_gpt.make_model()
    checkpoint = options.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        args.iteration, args.consumed_train_samples = saved["iteration"], saved["consumed"]
    train, _, _ = train_valid_test_datasets_provider(args, tiny_data.make_dataset(options))
    check_consistency(train, data_parallel_rank=parallel_state.get_data_parallel_rank())
    data_iterator = RerunDataIterator(iter(train))
    while args.iteration < options.steps:
        loss = tiny_gpt.train_step(model, optimizer, next(data_iterator))
        args.iteration += 1
        args.consumed_train_samples += args.global_batch_size
        if args.iteration % options.save_every == 0 and options.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"iteration": args.iteration, "consumed": args.consumed_train_samples}
            tiny_gpt.save_atomically(state, checkpoint)
        tiny_data.log(options, args.iteration, loss)
    train.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
