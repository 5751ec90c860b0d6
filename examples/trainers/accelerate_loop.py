"""A loop with Hugging Face Accelerate, whose checkpoints hold the loader's state.

`prepare` is for the model and the optimizer. The loader is left out of it: Accelerate would divide
its batches among the ranks once more. `register_for_checkpointing` saves and restores it.

    torchrun --nproc-per-node 2 examples/trainers/accelerate_loop.py FOLDER
"""

import shutil

import tiny_data
import tiny_gpt
from accelerate import Accelerator
from torch import distributed

import millrace
from millrace.torch import to_device


def main() -> None:
    options = tiny_data.arguments("train with Accelerate")
    accelerator = Accelerator(cpu=True)
    loader = millrace.Loader(
        tiny_data.make_dataset(options),
        micro_batch_size=tiny_data.GLOBAL_BATCH // accelerator.num_processes,
        data_parallel_rank=accelerator.process_index,
        data_parallel_size=accelerator.num_processes,
        prepare=to_device(accelerator.device),
    )
    model, optimizer = accelerator.prepare(*tiny_gpt.make_model())
    progress = tiny_gpt.Progress()
    accelerator.register_for_checkpointing(loader, progress)
    checkpoint = options.folder / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    for batch in loader:
        loss = tiny_gpt.train_step(accelerator.unwrap_model(model), optimizer, batch)
        progress.step += 1
        if progress.step % options.save_every == 0:
            accelerator.save_state(str(options.folder / "new"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                shutil.rmtree(checkpoint, ignore_errors=True)
                (options.folder / "new").rename(checkpoint)
            accelerator.wait_for_everyone()
        tiny_data.log(options, progress.step, loss)
        if progress.step == options.steps:
            break
    loader.close()
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
