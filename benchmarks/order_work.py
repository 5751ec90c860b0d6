"""The work that `bench_order.py` measures, one task per process.

    python order_work.py '{"work": "indices", "side": "ours", "lengths": "lengths.npy", ...}'

prints a JSON object: the seconds, the growth of the process's peak memory (VmHWM) after imports and
inputs, and a digest of the results, which shows that both sides did the same work. Reading inputs,
importing and hashing are not timed.

In a virtual machine, memory that the guest has not used for some seconds may have to be fetched
from the host page by page: 0.9 s for the first 400 MB on this machine, for any process. To keep
this out of the times, another process fills `fill_mib` of memory and ends just before.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import Tokenizer, memory_kib, quiet_megatron

SEED = 1234

Arrays = tuple[Any, ...]
Work = Callable[[], Arrays]


def shuffle_ours(task: dict[str, Any]) -> Work:
    """The numbers from 0 to n - 1, shuffled by `RandomState.shuffle`'s rule."""
    from millrace import _native

    random = np.random.RandomState(SEED)
    return lambda: (
        _native.shuffled_ranges([(0, task["size"], 1)], np.uint32, random),
        *_state(random),
    )


def shuffle_theirs(task: dict[str, Any]) -> Work:
    """The same with Megatron-LM's shuffle index."""
    with quiet_megatron():
        from megatron.core.datasets.gpt_dataset import _build_shuffle_index

    random, size = np.random.RandomState(SEED), task["size"]
    return lambda: (_build_shuffle_index(size, size, random), *_state(random))


def _state(random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """The generator's state after the shuffle, because later shuffles depend on it."""
    _, key, position, *_ = random.get_state()
    return key, np.array([position])


def indices_ours(task: dict[str, Any]) -> Work:
    """The sum of the lengths, then the document, sample and shuffle index."""
    from millrace.order import build_gpt_indices, plan_gpt

    lengths = np.load(task["lengths"])

    def work() -> Arrays:
        num_tokens = int(np.sum(lengths, dtype=np.int64))
        plan = plan_gpt(num_tokens, task["num_samples"], task["sequence_length"])
        indices = build_gpt_indices(lengths, (0, len(lengths)), plan, SEED)
        return indices.document_index, indices.sample_index, indices.shuffle_index

    return work


def indices_theirs(task: dict[str, Any]) -> Work:
    """The same with the constructor of `GPTDataset`, which builds the indices and little else.

    The configuration has no blend (`mock`), the only case without a cache on disk; the lengths are
    still ours. The range of sequences, which Megatron-LM's builder makes beforehand and keeps,
    counts as an input.
    """
    with quiet_megatron():
        from megatron.core.datasets import helpers  # noqa: F401  (otherwise imported during the measurement)
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=task["sequence_length"],
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dataset = _Lengths(np.load(task["lengths"]))
    sequences = np.arange(len(dataset.sequence_lengths), dtype=np.int32)

    def work() -> Arrays:
        with quiet_megatron():
            gpt = GPTDataset(dataset, None, sequences, task["num_samples"], Split.train, config)
        return gpt.document_index, gpt.sample_index, gpt.shuffle_index

    return work


def blend_ours(task: dict[str, Any]) -> Work:
    """A blend by random weights, or of datasets of random sizes until all are used up."""
    from millrace import _native

    shares = _shares(task)
    if task["exhausts"]:
        return lambda: _native.blend_by_sizes(shares)
    return lambda: _native.blend_by_weights(shares, task["size"])


def blend_theirs(task: dict[str, Any]) -> Work:
    """The same with Megatron-LM's helpers and the arrays that its `BlendedDataset` allocates."""
    with quiet_megatron():
        from megatron.core.datasets import helpers

    shares = _shares(task).tolist()
    count, size = len(shares), task["size"]

    def work() -> Arrays:
        dataset_index = np.zeros(size, np.int16)
        dataset_sample_index = np.zeros(size, np.int64)
        if task["exhausts"]:
            helpers.build_exhaustive_blending_indices(
                dataset_index, dataset_sample_index, shares, count
            )
        else:
            helpers.build_blending_indices(
                dataset_index, dataset_sample_index, shares, count, size, False
            )
        return dataset_index, dataset_sample_index

    return work


def _shares(task: dict[str, Any]) -> np.ndarray:
    """Random weights with the sum 1, or random sizes with the sum `task["size"]`."""
    weights = np.random.default_rng(task["datasets"]).random(task["datasets"]) + 1e-3
    if task.get("nearly_equal"):
        weights = 1 + 1e-3 * weights
    weights /= weights.sum()
    if not task["exhausts"]:
        return weights
    sizes = 1 + np.floor(weights * (task["size"] - len(weights))).astype(np.int64)
    sizes[0] += task["size"] - sizes.sum()
    return sizes


class _Lengths:
    """The only attribute of an indexed dataset that the three indices need."""

    def __init__(self, sequence_lengths: np.ndarray) -> None:
        self.sequence_lengths = sequence_lengths


PREPARE = {
    ("shuffle", "ours"): shuffle_ours,
    ("shuffle", "theirs"): shuffle_theirs,
    ("indices", "ours"): indices_ours,
    ("indices", "theirs"): indices_theirs,
    ("blend", "ours"): blend_ours,
    ("blend", "theirs"): blend_theirs,
}


def peak_mib() -> float:
    return memory_kib("VmHWM") / 1024


def fill_memory(mib: int) -> None:
    """Fills memory in another process, so that the host provides the pages that we use next."""
    program = f"import numpy; numpy.ones(({mib}, 2**20), numpy.uint8)"
    subprocess.run([sys.executable, "-c", program], check=True)


def digest(arrays: Arrays) -> str:
    """A digest of dtypes, shapes and bytes."""
    result = hashlib.blake2b(digest_size=16)
    for array in arrays:
        result.update(f"{array.dtype} {array.shape}".encode())
        result.update(np.ascontiguousarray(array).data)
    return result.hexdigest()


def main() -> None:
    task = json.loads(sys.argv[1])
    if task.get("one_core"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    work = PREPARE[task["work"], task["side"]](task)
    fill_memory(task["fill_mib"])
    before = peak_mib()
    start = time.perf_counter()
    arrays = work()
    seconds = time.perf_counter() - start
    peak = peak_mib() - before
    result = {
        "seconds": seconds,
        "peak_mib": peak,
        "returned_mib": sum(array.nbytes for array in arrays) / 2**20,
        "digest": digest(arrays),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
