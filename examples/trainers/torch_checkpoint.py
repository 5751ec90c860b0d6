"""A loop of your own whose model, optimizer and loader torch.distributed.checkpoint saves.

torchrun --nproc-per-node 2 examples/trainers/torch_checkpoint.py FOLDER
"""

import tiny_data
import tiny_gpt
from torch import distributed
from torch.distributed import checkpoint

import millrace
from millrace.torch import CheckpointState, to_tensors


def main() -> None:
    options = tiny_data.arguments("train with a loader saved by torch.distributed.checkpoint")
    if options.ranks > 1:
        distributed.init_process_group("gloo")
    model, optimizer = tiny_gpt.make_model()
    loader = millrace.Loader(
        tiny_data.make_dataset(options),
        micro_batch_size=tiny_data.GLOBAL_BATCH // options.ranks,
        data_parallel_rank=options.rank,
        data_parallel_size=options.ranks,
        transform=to_tensors,
    )
    progress = tiny_gpt.Progress()
    states = {"model": model, "optimizer": tiny_gpt.Moments(optimizer), "step": progress}
    states["loader"] = CheckpointState(loader)
    folders = sorted(options.folder.glob("step-*/.metadata"), key=lambda path: path.stat().st_mtime)
    if folders:
        checkpoint.load(states, checkpoint_id=folders[-1].parent)
    for batch in loader:
        loss = tiny_gpt.train_step(model, optimizer, batch)
        progress.step += 1
        if progress.step % options.save_every == 0:
            checkpoint.save(states, checkpoint_id=options.folder / f"step-{progress.step}")
        tiny_data.log(options, progress.step, loss)
        if progress.step == options.steps:
            break
    if options.ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
