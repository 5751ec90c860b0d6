"""Which sizes and data Hugging Face's Trainer resumes with: huggingface_cases.py FOLDER."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "trainers"))
import huggingface_trainer
import tiny_data

import millrace
from millrace.huggingface import causal_lm_batch
from millrace.torch import MapDataset


def train(steps: int, batch: int, accumulation: int, seed: int = 3) -> None:
    options = tiny_data.arguments("")
    options.steps = options.save_every = steps
    tiny_data.GLOBAL_BATCH = batch * accumulation
    huggingface_trainer.MICRO_BATCHES = accumulation
    tokens = tiny_data.make_token_file(options)
    dataset = millrace.GPTDataset(tokens, sequence_length=16, seed=seed, num_samples=100)
    huggingface_trainer.train(options, MapDataset(dataset), causal_lm_batch)


if __name__ == "__main__":
    # Without process groups, of which several in one process have once not come to an end.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    for steps, *sizes in (2, 4, 2), (4, 8, 1), (7, 2, 4):
        train(steps, *sizes)
    packs = tiny_data.make_packs(tiny_data.arguments(""))
    batch = next(millrace.Loader(packs, micro_batch_size=2, transform=causal_lm_batch))
    same = causal_lm_batch(MapDataset(packs).__getitems__([0, 1]))
    assert {name: one.tolist() for name, one in batch.items()} == {
        name: one.tolist() for name, one in same.items()
    }
    for message, *arguments in (
        ("sample 56 of epoch 0; the Trainer would resume at sample 28 of epoch 0", 4, 1),
        ("seed: saved 3, now 4", 4, 2, 4),
    ):
        with pytest.raises(millrace.ResumeError, match=message):
            train(9, *arguments)
