"""torch's own DataLoader with worker processes, over any number of ranks.

The sampler runs in this process and the workers read batches ahead, so the state to save counts
the batches that were trained on: `BatchSampler.state_after(step)`.

    torchrun --nproc-per-node 2 examples/trainers/torch_dataloader.py FOLDER
"""

import tiny_data
import tiny_gpt
import torch
from torch import distributed
from torch.utils.data import DataLoader

import millrace
from millrace.torch import BatchSampler, MapDataset, check_consistency, collate


def main() -> None:
    options = tiny_data.arguments("train with torch's DataLoader")
    if options.ranks > 1:
        distributed.init_process_group("gloo")
    dataset = MapDataset(tiny_data.make_dataset(options))
    model, optimizer = tiny_gpt.make_model()
    step, consumed_samples, checkpoint = 0, 0, options.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dataset.load_state_dict(saved["data"])  # an error if the data are others
        step, consumed_samples = saved["step"], saved["position"]["consumed_samples"]

    sampler = millrace.SequentialSampler(
        len(dataset),
        micro_batch_size=tiny_data.GLOBAL_BATCH // options.ranks,
        data_parallel_rank=options.rank,
        data_parallel_size=options.ranks,
    )
    batches = BatchSampler(sampler, consumed_samples)
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=collate, num_workers=2)
    first = step
    for batch in loader:
        loss = tiny_gpt.train_step(model, optimizer, batch)
        step += 1
        if step % options.save_every == 0 and options.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"step": step, "position": batches.state_after(step - first)}
            state |= {"data": dataset.state_dict()}
            tiny_gpt.save_atomically(state, checkpoint)
        tiny_data.log(options, step, loss)
        if step == options.steps:
            break
    # Any loader at this position can be compared over the ranks, now and then.
    state = batches.state_after(step - first)
    position = millrace.Loader(dataset.dataset, sampler=sampler, prefetch=0, **state)
    check_consistency(position, checksum_batches=1)
    if options.ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
