"""The feed: samples per second of a loader, against Megatron-LM's, a loop in C and a bare memmap.

One process, tokens and labels, sequence lengths 2,048 and 8,192, micro batch 8, tokens uint16, page
cache warm. Each run opens the data again and times the same sample numbers, after a few batches
that start workers and fill queues. The private memory of a training loop is measured at the end.
"""

import ctypes
import functools
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    HIGHER,
    LOWER,
    Report,
    Row,
    Tokenizer,
    alternate,
    best_of,
    finish,
    number_of_runs,
    parser,
    quiet_megatron,
)
from numpy.typing import NDArray

import millrace
from millrace.torch import to_tensors

with quiet_megatron():
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

HERE = Path(__file__).resolve().parent
SEED = 1234
LENGTHS = (2048, 8192)  # of sequences
DTYPES = ("int64", "int32", "file")
MICRO_BATCH_SIZE = 8
WORKERS = (0, 2)
MAX_LENGTH = 1200  # of documents: uniform in [2, 1200), 600 on average
WARM_UP = 20  # batches
NUM_DOCUMENTS, NUM_TOKENS = 200_000, 100_000_000  # tokens that a run draws
QUICK_DOCUMENTS, QUICK_TOKENS = 20_000, 2_000_000
THEIR_SHARE = 10  # megatron-core draws a tenth of the tokens
MEGATRON_BAR = 8
MEMORY_LIMIT = 100.0  # MB
NAMES = ("tokens", "labels")

NOTES = [
    "Micro batch 8, one data-parallel rank, 200,000 documents of 600 tokens on average (uint16, "
    "240 MB), page cache warm. Each run opens the data again, so that the first access to each "
    "mapped page counts, and times 100 M tokens (megatron-core: 10 M), after 20 batches that start "
    "workers and fill queues. The previous batch is kept alive while the next one is made, as in a "
    "training loop.",
    "Ours: `millrace.Loader` with fields=('tokens', 'labels'). 'ahead' are its defaults: a thread "
    "makes batches ahead of their use. 'on demand' is prefetch=0: no thread. 'shared' is ahead, "
    "with labels that are a view of the tokens. Rows with a bar take the faster of ahead and on "
    "demand, as they take the faster of 0 and 2 workers of megatron-core: a loop that only draws "
    "leaves a thread nothing to hide. int64, int32, file: the dtype of the arrays; file is uint16. "
    "Indices are rebuilt in each run.",
    "megatron-core: `BlendedMegatronDatasetBuilder`'s dataset in a `torch.utils.data.DataLoader` "
    "with a sampler like `MegatronPretrainingSampler`, default collation, the faster of 0 and 2 "
    "workers (persistent). It always makes four arrays, tokens and labels int64. Against it, ours "
    "ends with `millrace.torch.to_tensors`.",
    "C loop: `c_loop.c`, gcc -O3 -march=native, one thread, the same sample numbers in the same "
    "order through the same index arrays, new memory for each batch; the loop over batches is in C "
    "too. These rows, and those of np.memmap, have no bar: no training step waits for them.",
    "np.memmap: random offsets into the file, slices, `astype`, `np.stack`, as nanoGPT does: no "
    "documents, no order, no shuffle index.",
    "Equal arrays were compared: all of a batch's from the start and from the middle, with "
    "megatron-core and C; for np.memmap, which draws other samples, dtypes and shapes.",
    "Private memory: Private_Dirty of /proc/self/smaps_rollup (MB) after 2,000 batches, less that "
    "of the same process before the data were opened, after torch was imported. Indices are in a "
    "cache folder and mapped. The other column is the limit.",
]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    runs = number_of_runs(options)
    documents = QUICK_DOCUMENTS if options.quick else NUM_DOCUMENTS
    num_tokens = QUICK_TOKENS if options.quick else NUM_TOKENS
    report = Report("The feed: samples per second of a loader", NOTES, runs, peer="the other")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        prefix = str(Path(folder) / "text_document")
        write_documents(prefix, documents, seed=0)
        for length in LENGTHS:
            num_batches = num_tokens // (length * MICRO_BATCH_SIZE)
            check_against_megatron(prefix, length, num_batches)
            for dtype in DTYPES:
                print(f"sequence length {length}, {dtype}", flush=True)
                check_against_c(prefix, folder, length, dtype, num_batches)
                report.rows += rows(prefix, folder, length, dtype, num_batches, runs)
        report.rows += memory_rows(prefix, folder, options.quick, runs)
    finish(report, options)


# ---- the data ----


def write_documents(prefix: str, num_documents: int, seed: int) -> None:
    """Writes random documents that end with EOD. Files just written are in the page cache."""
    random = np.random.default_rng(seed)
    with millrace.IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in random.integers(2, MAX_LENGTH, num_documents):
            tokens = random.integers(0, Tokenizer.eod, length, dtype=np.uint16)
            tokens[-1] = Tokenizer.eod
            builder.add_document(tokens)


# ---- ours ----


def our_dataset(prefix: str, length: int, num_samples: int | None = None) -> millrace.GPTDataset:
    return millrace.GPTDataset(
        millrace.IndexedDataset(prefix), sequence_length=length, seed=SEED, num_samples=num_samples
    )


def our_batches(
    prefix: str, length: int, dtype: str, num_batches: int, start: int = 0, **options: Any
) -> Iterator[Any]:
    size = (start + WARM_UP + num_batches + 1) * MICRO_BATCH_SIZE
    return millrace.Loader(
        our_dataset(prefix, length, size),
        micro_batch_size=MICRO_BATCH_SIZE,
        consumed_samples=start * MICRO_BATCH_SIZE,
        fields=NAMES,
        token_dtype=dtype,
        **options,
    )


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(np.uint16 if dtype == "file" else dtype)


# ---- megatron-core ----


class PretrainingSampler:
    """Sample numbers of one rank's micro batches, by the rule of `MegatronPretrainingSampler`.

    That class is in Megatron-LM's training code, which is not part of megatron-core.
    """

    def __init__(self, total_samples: int, consumed_samples: int, micro_batch_size: int) -> None:
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size

    def __len__(self) -> int:
        return (self.total_samples - self.consumed_samples) // self.micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            start = self.consumed_samples + step * self.micro_batch_size
            yield list(range(start, start + self.micro_batch_size))


def megatron_batches(
    prefix: str, length: int, num_workers: int, num_batches: int, start: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    # So that indices are arrays in memory, not mapped cache files.
    shutil.rmtree(Path(prefix) / "cache", ignore_errors=True)
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    size = (start + WARM_UP + num_batches + 1) * MICRO_BATCH_SIZE
    with quiet_megatron():
        builder = BlendedMegatronDatasetBuilder(GPTDataset, [size, 0, 0], lambda: True, config)
        dataset = builder.build()[0]
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=PretrainingSampler(len(dataset), start * MICRO_BATCH_SIZE, MICRO_BATCH_SIZE),
        num_workers=num_workers,
        pin_memory=False,
        persistent_workers=num_workers > 0,
    )
    return iter(loader)


# ---- the loop in C ----


class CData(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in "tokens pointers lengths document_index sample_index shuffle_index".split()
    )


def compile_c_loop(folder: str, dtype: str) -> ctypes.CDLL:
    target = Path(folder) / f"c_loop_{dtype}.so"
    if not target.exists():
        types = ["-DTOKEN=uint16_t", f"-DOUT={numpy_dtype(dtype)}_t"]
        options = ["-O3", "-march=native", "-shared", "-fPIC", "-Wall", "-Werror", *types]
        command = ["gcc", *options, "-o", str(target), str(HERE / "c_loop.c")]
        subprocess.run(command, check=True)
    library = ctypes.CDLL(str(target))
    pointers = [ctypes.POINTER(ctypes.c_void_p)] * 2
    library.make_batches.argtypes = [ctypes.POINTER(CData), *[ctypes.c_int64] * 4, *pointers]
    library.release.argtypes = [ctypes.c_void_p]
    return library


class CLoop:
    """The loop in C over a newly opened token file."""

    def __init__(
        self, prefix: str, folder: str, length: int, dtype: str, num_batches: int, start: int = 0
    ) -> None:
        self._library = compile_c_loop(folder, dtype)
        self._length, self._dtype = length, numpy_dtype(dtype)
        size = (start + WARM_UP + num_batches + 1) * MICRO_BATCH_SIZE
        dataset = our_dataset(prefix, length, size)
        file, indices = dataset.dataset, dataset.indices
        self._arrays = {
            "tokens": (file.tokens, np.uint16),
            "pointers": (file.sequence_pointers, np.int64),
            "lengths": (file.sequence_lengths, np.int32),
            "document_index": (indices.document_index, np.int32),
            "sample_index": (indices.sample_index, np.int32),
            "shuffle_index": (indices.shuffle_index, np.uint32),
        }
        for name, (array, expected) in self._arrays.items():
            if array.dtype != expected or not array.flags.c_contiguous:
                raise RuntimeError(f"{name} is {array.dtype}, not contiguous {expected}")
        self._data = CData(*(array.ctypes.data for array, _ in self._arrays.values()))
        self.position = start

    def run(self, num_batches: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The last of the next batches: its tokens and labels."""
        results = ctypes.c_void_p(), ctypes.c_void_p()
        status = self._library.make_batches(
            self._data,
            self.position * MICRO_BATCH_SIZE,
            num_batches,
            MICRO_BATCH_SIZE,
            self._length,
            *map(ctypes.byref, results),
        )
        if status:
            raise MemoryError
        self.position += num_batches
        size = MICRO_BATCH_SIZE * self._length * self._dtype.itemsize
        copies = []
        for result in results:
            data = ctypes.string_at(result, size)
            copies.append(np.frombuffer(data, self._dtype).reshape(MICRO_BATCH_SIZE, -1))
            self._library.release(result)
        return copies[0], copies[1]


# ---- the bare memmap ----


def memmap_batches(prefix: str, length: int, dtype: str) -> Iterator[dict[str, NDArray[Any]]]:
    """Batches from random offsets, as nanoGPT draws them."""
    data = np.memmap(f"{prefix}.bin", np.uint16, "r")
    random = np.random.default_rng(SEED)
    target = numpy_dtype(dtype)
    while True:
        offsets = random.integers(0, len(data) - length, MICRO_BATCH_SIZE).tolist()
        rows = [data[i : i + length] for i in offsets]
        next_rows = [data[i + 1 : i + 1 + length] for i in offsets]
        if target != data.dtype:
            rows = [row.astype(target) for row in rows]
            next_rows = [row.astype(target) for row in next_rows]
        yield {"tokens": np.stack(rows), "labels": np.stack(next_rows)}


# ---- the comparison ----


def check_against_megatron(prefix: str, length: int, num_batches: int) -> None:
    """Compares batches from the start and the middle; raises RuntimeError if the sides differ."""
    for start, num_workers in itertools.product((0, num_batches // 2), WORKERS):
        ours = our_batches(prefix, length, "int64", num_batches, start, transform=to_tensors)
        theirs = megatron_batches(prefix, length, num_workers, num_batches, start)
        for mine, other in itertools.islice(zip(ours, theirs, strict=False), 4):
            for name in NAMES:
                is_same = mine[name].dtype == other[name].dtype
                if not is_same or not torch.equal(mine[name], other[name]):
                    raise RuntimeError(f"{name} differ after {start} batches of {length} tokens")


def check_against_c(prefix: str, folder: str, length: int, dtype: str, num_batches: int) -> None:
    for start in (0, num_batches // 2):
        loop = CLoop(prefix, folder, length, dtype, num_batches, start)
        ours = our_batches(prefix, length, dtype, num_batches, start)
        for mine in itertools.islice(ours, 4):
            for name, other in zip(NAMES, loop.run(1), strict=True):
                if mine[name].dtype != other.dtype or not np.array_equal(mine[name], other):
                    raise RuntimeError(f"{name} differ from C's after {start} batches")
    mine = next(our_batches(prefix, length, dtype, num_batches))
    bare = next(memmap_batches(prefix, length, dtype))
    for name in NAMES:
        if (mine[name].dtype, mine[name].shape) != (bare[name].dtype, bare[name].shape):
            raise RuntimeError(f"{name} of the bare memmap have another form")


def rows(
    prefix: str, folder: str, length: int, dtype: str, num_batches: int, runs: int
) -> list[Row]:
    ours = functools.partial(our_batches, prefix, length, dtype, num_batches)
    few = max(num_batches // THEIR_SHARE, 1)
    sides: dict[str, Callable[[], float]] = {
        "ahead": lambda: rate(ours(), num_batches),
        "on demand": lambda: rate(ours(prefetch=0), num_batches),
        "shared": lambda: rate(ours(share_labels=True), num_batches),
        "as tensors": lambda: rate(ours(transform=to_tensors), num_batches),
        "as tensors, on demand": lambda: rate(ours(transform=to_tensors, prefetch=0), num_batches),
        "C": lambda: rate_of_c(CLoop(prefix, folder, length, dtype, num_batches), num_batches),
        "np.memmap": lambda: rate(memmap_batches(prefix, length, dtype), num_batches),
    }
    for workers in WORKERS:
        batches = functools.partial(megatron_batches, prefix, length, workers, few)
        sides[f"{workers} workers"] = functools.partial(lambda open_: rate(open_(), few), batches)
    results = alternate(runs, sides)

    def best(*names: str) -> tuple[str, list[float]]:
        return best_of({name: results[name] for name in names})

    workers, megatron = best(*(f"{number} workers" for number in WORKERS))
    mode, mine = best("ahead", "on demand")
    _, tensors = best("as tensors", "as tensors, on demand")
    label = f"{length} tokens, {dtype}"
    compare = functools.partial(Row.compare, unit="samples/s", better=HIGHER)
    return [
        compare(f"{label}: megatron-core, {workers}", tensors, megatron, bar=MEGATRON_BAR),
        compare(f"{label}: C loop, ours {mode}", mine, results["C"]),
        *(
            compare(f"{label}: C loop, ours {other}", results[other], results["C"])
            for other in ("ahead", "on demand", "shared")
            if other != mode
        ),
        compare(f"{label}: np.memmap", mine, results["np.memmap"]),
    ]


def rate(batches: Iterator[Any], num_batches: int) -> float:
    """Samples per second over `num_batches`, after the first `WARM_UP`."""
    for _ in range(WARM_UP):
        batch = next(batches)
    start = time.perf_counter()
    for _ in range(num_batches):
        batch = next(batches)
    seconds = time.perf_counter() - start
    if len(batch["tokens"]) != MICRO_BATCH_SIZE:
        raise RuntimeError(f"a batch has {len(batch['tokens'])} samples")
    return num_batches * MICRO_BATCH_SIZE / seconds


def rate_of_c(loop: CLoop, num_batches: int) -> float:
    loop.run(WARM_UP)
    start = time.perf_counter()
    loop.run(num_batches)
    return num_batches * MICRO_BATCH_SIZE / (time.perf_counter() - start)


# ---- private memory ----


def memory_rows(prefix: str, folder: str, is_quick: bool, runs: int) -> list[Row]:
    """A row for each size of the data: tokens in the file, and samples that are drawn from it."""
    result = []
    for num_samples in (100_000, 1_000_000 if is_quick else 100_000_000):
        values = [prefix, str(Path(folder) / "cache"), num_samples]
        command = [sys.executable, str(HERE / "feed_memory.py"), json.dumps(values)]
        subprocess.run([*command, "build"], check=True)
        used = []
        for _ in range(runs):
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            used.append(float(output))
        label = f"private memory, {num_samples:,} samples"
        limit = [MEMORY_LIMIT]
        result.append(Row.compare(label, used, limit, "MB", better=LOWER, bar=1))
    return result


if __name__ == "__main__":
    main()
