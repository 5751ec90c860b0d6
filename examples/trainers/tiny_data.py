"""What all the examples share: arguments, a little data, and a file of losses."""

import argparse
import os
import signal
import time
from pathlib import Path

import numpy as np

import millrace
from millrace.order import PackedOrder

VOCABULARY, SEQUENCE_LENGTH, PACK_LENGTH, GLOBAL_BATCH = 300, 16, 256, 8


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="data, checkpoints and losses go here")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--kill-at", type=int, help="SIGKILL this process after that step")
    options = parser.parse_args()
    options.rank, options.ranks = (
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1)),
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


def make_dataset(options: argparse.Namespace) -> millrace.GPTDataset:
    """Samples of random documents."""
    return millrace.GPTDataset(
        make_token_file(options), sequence_length=SEQUENCE_LENGTH, seed=3, num_samples=400
    )


def make_packs(options: argparse.Namespace) -> millrace.GPTDataset:
    """Packs of whole documents; longer ones are split."""
    data = make_token_file(options)
    lengths = data.sequence_lengths
    order = PackedOrder(lengths, PACK_LENGTH, 3, num_samples=400, long_documents="split")
    return millrace.GPTDataset(
        data,
        sequence_length=PACK_LENGTH,
        add_extra_token=False,
        order=order,
        boundaries="documents",
    )


def make_token_file(options: argparse.Namespace) -> millrace.IndexedDataset:
    """Random documents; rank 0 writes the token file, and the others wait for it."""
    prefix, index = options.folder / "text", options.folder / "text.idx"
    if options.rank == 0 and not index.exists():
        random = np.random.default_rng(7)
        with millrace.IndexedDatasetBuilder(prefix, np.uint16) as builder:
            for length in random.integers(5, 90, 60):
                builder.add_document(random.integers(0, VOCABULARY, length))
    wait_for(index)
    return millrace.IndexedDataset(prefix)


def wait_for(path: Path) -> None:
    """Waits until rank 0 has written a file."""
    while not path.exists():
        time.sleep(0.05)


def log(options: argparse.Namespace, step: int, loss: float) -> None:
    """Adds a line to the losses, exact to the last bit; kills this process where it is asked to."""
    if options.rank == 0:
        with open(options.folder / "losses.txt", "a") as file:
            file.write(f"{step} {float(loss).hex()}\n")
    if step == options.kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
