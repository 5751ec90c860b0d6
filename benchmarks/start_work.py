"""One start of a training run's data, in a fresh process.

    python start_work.py '{"side": "ours", "folder": "/tmp/x", "cache": "/tmp/y", ...}'

builds the datasets of a blend, draws one micro batch, and prints a JSON object: the seconds of both
steps together, and a digest of the batch. Imports are not timed, nor is the process group that
Megatron-LM needs to build a cache.
"""

import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Tokenizer, quiet_megatron

SEED, SEQUENCE_LENGTH, MICRO_BATCH, THREADS = 1234, 1024, 8, 2

Batch = dict[str, Any]


def weights_of(count: int) -> list[float]:
    weights: list[float] = (np.random.default_rng(1).random(count) + 0.1).tolist()
    return weights


def start_ours(task: dict[str, Any], prefixes: list[str]) -> Callable[[], Batch]:
    import millrace
    from millrace.torch import to_tensors

    weights = weights_of(len(prefixes))

    def start() -> Batch:
        config = millrace.DatasetConfig(
            sequence_length=SEQUENCE_LENGTH,
            seed=SEED,
            num_samples=(task["num_samples"], None, None),
            blend_per_split=[(prefixes, weights), None, None],
            cache=task["cache"],
            trust_cache=task["trusts"],
            num_threads=THREADS,
        )
        train = millrace.build_datasets(config).train
        loader = millrace.Loader(train, micro_batch_size=MICRO_BATCH, transform=to_tensors)
        batch: Batch = next(loader)
        return batch

    return start


def start_instant(task: dict[str, Any], prefixes: list[str]) -> Callable[[], Batch]:
    """The instant order of the same sources, from a run file in the cache folder."""
    import millrace
    from millrace import run
    from millrace.torch import to_tensors

    path = Path(task["cache"]) / "run.yaml"
    lines = ["order: instant", f"seed: {SEED}", f"seq-length: {SEQUENCE_LENGTH}", "dtype: uint16"]
    lines += ["sources:"]
    lines += [
        f"  {Path(prefix).name}: {{prefix: {prefix}, weight: {weight!r}}}"
        for prefix, weight in zip(prefixes, weights_of(len(prefixes)), strict=True)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines))

    def start() -> Batch:
        config = run.config_from(run.read_arguments(path))
        train = millrace.build_datasets(config).train
        loader = millrace.Loader(train, micro_batch_size=MICRO_BATCH, transform=to_tensors)
        batch: Batch = next(loader)
        return batch

    return start


def start_theirs(task: dict[str, Any], prefixes: list[str]) -> Callable[[], Batch]:
    import torch

    with quiet_megatron():
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    warnings.simplefilter("ignore")
    weights = weights_of(len(prefixes))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{task['meeting']}", rank=0, world_size=1
    )

    def start() -> Batch:
        config = GPTDatasetConfig(
            random_seed=SEED,
            sequence_length=SEQUENCE_LENGTH,
            blend_per_split=[(prefixes, weights), None, None],
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            path_to_cache=task["cache"],
            num_dataset_builder_threads=THREADS,
            fast_cache_load=task["trusts"],
            defer_npy_index_mmap=task["trusts"],
        )
        sizes = [task["num_samples"], 0, 0]
        train = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
        loader = torch.utils.data.DataLoader(
            torch.utils.data.Subset(train, range(MICRO_BATCH)), batch_size=MICRO_BATCH
        )
        batch: Batch = next(iter(loader))
        return batch

    return start


def main() -> None:
    task = json.loads(sys.argv[1])
    prefixes = sorted(str(path)[: -len(".idx")] for path in Path(task["folder"]).glob("*.idx"))
    sides = {"ours": start_ours, "theirs": start_theirs, "instant": start_instant}
    start = sides[task["side"]](task, prefixes)
    before = time.perf_counter()
    batch = start()
    seconds = time.perf_counter() - before
    digest = hashlib.sha256()
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        digest.update(np.ascontiguousarray(batch[name].numpy()).tobytes())
    print(json.dumps({"seconds": seconds, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main()
