"""Megatron-LM's `--dataloader-type external`: loaders take the place of the datasets.

`train_valid_test_datasets_provider` is what changes in `pretrain_gpt.py`; see docs/trainers.md. The
rest of this program stands for Megatron-LM: arguments, parallel state, checkpoints and the loop,
with `--full-validation`.

    torchrun --nproc-per-node 2 examples/trainers/megatron_external.py FOLDER
"""

from types import SimpleNamespace

import tiny_data
import tiny_gpt
import torch
from megatron.core import parallel_state as mpu
from megatron.core.rerun_state_machine import RerunDataIterator
from torch import distributed

import millrace
import millrace.torch

ARGS = SimpleNamespace(
    full_validation=True, consumed_train_samples=0, consumed_valid_samples=0, iteration=0
)


def get_args():
    return ARGS


def make_config():
    return millrace.DatasetConfig(
        blend=([ARGS.prefix], None),
        split="80,20,0",
        sequence_length=tiny_data.SEQUENCE_LENGTH,
        seed=3,
        num_samples=(400, None, 0),
        full_validation=True,
    )


def train_valid_test_datasets_provider(train_val_test_num_samples):
    args, datasets = get_args(), millrace.torch.build_datasets(make_config())
    ranks = {
        "data_parallel_rank": mpu.get_data_parallel_rank(),
        "data_parallel_size": mpu.get_data_parallel_world_size(),
    }
    eval_micro_batch_size = getattr(args, "eval_micro_batch_size", args.micro_batch_size)

    def loader(dataset, micro_batch_size, consumed_samples):
        return dataset and millrace.Loader(
            dataset,
            micro_batch_size=micro_batch_size,
            consumed_samples=consumed_samples,
            transform=millrace.torch.to_tensors,
            **ranks,
        )

    def whole(dataset):  # Megatron-LM iterates over it anew, again and again
        sampler = millrace.FullValidationSampler(len(dataset), pad=True, **ranks)
        steps = millrace.Loader(dataset, sampler=sampler, transform=millrace.torch.to_tensors)
        return millrace.torch.IterableDataset(steps)

    if args.full_validation:
        valid = whole(datasets.valid)
    else:
        consumed_samples = 0 if args.skip_train else args.consumed_valid_samples
        valid = loader(datasets.valid, eval_micro_batch_size, consumed_samples)
    train = loader(datasets.train, args.micro_batch_size, args.consumed_train_samples)
    return train, valid, loader(datasets.test, eval_micro_batch_size, 0)


def cyclic_iter(iterable):
    """What Megatron-LM's training.py makes of a whole validation dataset."""
    while True:
        is_empty = True
        for batch in iterable:
            is_empty = False
            yield batch
        if is_empty:
            raise RuntimeError("cyclic_iter: iterable produced no data")


def evaluate(model, data_iterator, num_steps):
    """The loss of each micro batch of this rank."""
    with torch.no_grad():
        batches = [next(data_iterator) for _ in range(num_steps)]
        return [float(tiny_gpt.sample_losses(model, batch).mean()) for batch in batches]


def main() -> None:
    options = tiny_data.arguments("train as Megatron-LM does with an external loader")
    distributed.init_process_group("gloo")
    mpu.initialize_model_parallel()
    tiny_data.make_token_file(options)
    args = get_args()
    args.prefix = str(options.folder / "text")
    args.micro_batch_size = tiny_data.GLOBAL_BATCH // options.ranks
    model, optimizer = tiny_gpt.make_model()
    checkpoint = options.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        args.iteration, args.consumed_train_samples = saved["iteration"], saved["consumed"]
    train, valid, _ = train_valid_test_datasets_provider((400, None, 0))
    millrace.torch.check_consistency(train, data_parallel_rank=mpu.get_data_parallel_rank())
    data_iterator = RerunDataIterator(train)
    valid_iterator = RerunDataIterator(cyclic_iter(valid))
    while args.iteration < options.steps:
        loss = tiny_gpt.train_step(model, optimizer, next(data_iterator))
        args.iteration += 1
        args.consumed_train_samples += tiny_data.GLOBAL_BATCH
        if args.iteration % options.save_every == 0 and options.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"iteration": args.iteration, "consumed": args.consumed_train_samples}
            tiny_gpt.save_atomically(state, checkpoint)
        tiny_data.log(options, args.iteration, loss)
    losses = evaluate(model, valid_iterator, len(valid))
    assert losses == evaluate(model, valid_iterator, len(valid))  # the same samples again
    train.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
