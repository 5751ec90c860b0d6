"""Packs of whole documents, dealt to the ranks by their work.

A step is a global batch. Each rank knows how many tokens that trains on before the step, without
asking the others, and divides by it: so loss and gradients are those of the undealt batch, but for
the order of sums. The state is one number; other ranks deal the same batches in another way.

    torchrun --nproc-per-node 2 examples/trainers/packed_balance.py FOLDER
"""

import tiny_data
import tiny_gpt
import torch
from torch import distributed, nn

import millrace
from millrace.feed import BalancedSampler, DocumentCosts
from millrace.outputs import count_targets
from millrace.torch import to_tensors

FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "document_ids")


def train_step(model, optimizer, batch, num_targets: int) -> float:
    """One step; the mean loss of the targets of the global batch."""
    optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch["tokens"])):  # a micro batch of one pack
        one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        logits = model(one["tokens"], one["position_ids"], one["document_ids"])
        losses = nn.functional.cross_entropy(
            logits.transpose(1, 2), one["labels"], reduction="none"
        )
        loss = (losses * one["loss_mask"]).sum() / num_targets
        loss.backward()
        total += loss.detach()
    if distributed.is_initialized():
        for tensor in (total, *(parameter.grad for parameter in model.parameters())):
            distributed.all_reduce(tensor)
    optimizer.step()
    return total.item()


def main() -> None:
    options = tiny_data.arguments("train on balanced packs")
    if options.ranks > 1:
        distributed.init_process_group("gloo")
    packs = tiny_data.make_packs(options)
    sampler = BalancedSampler(
        len(packs),
        costs=DocumentCosts(spans=packs.spans, linear=10.0),
        global_batch_size=tiny_data.GLOBAL_BATCH,
        micro_batch_size=1,
        data_parallel_rank=options.rank,
        data_parallel_size=options.ranks,
    )
    loader = millrace.Loader(packs, sampler=sampler, fields=FIELDS, transform=to_tensors)
    model, optimizer = tiny_gpt.make_model()
    step, checkpoint = 0, options.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        step = saved["step"]
    while step < options.steps:
        start = loader.consumed_samples
        numbers = range(start, sampler.consumed_after(start))
        num_targets = max(count_targets(packs.spans(numbers)), 1)
        loss = train_step(model, optimizer, next(loader), num_targets)
        step += 1
        if step % options.save_every == 0 and options.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            tiny_gpt.save_atomically(
                {**state, "data": loader.state_dict(), "step": step}, checkpoint
            )
        tiny_data.log(options, step, loss)
    if options.ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
