"""The feed: samples per second of a loader, against megatron-core's dataset in a torch DataLoader.

Sequence length 4,096, micro batch 8, tokens uint16, page cache warm. A batch has tokens, labels,
loss mask and position ids as torch tensors, from one dataset or from a blend of eight. Ours has no
workers; theirs has none or two. Each run opens the data again and times the same sample numbers,
after a few batches that start workers and fill queues.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    HIGHER,
    Report,
    Row,
    Tokenizer,
    alternate,
    finish,
    number_of_runs,
    parser,
    quiet_megatron,
)

import millrace
from millrace.torch import to_tensors

with quiet_megatron():
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

SEED = 1234
SEQUENCE_LENGTH = 4096
MICRO_BATCH_SIZE = 8
WORKERS = (0, 2)
NUM_BLENDED = 8
MAX_LENGTH = 1200  # lengths are uniform in [2, 1200): 600 on average
PAD = 50303  # does not occur in any document
WARM_UP = 20  # batches
NUM_DOCUMENTS, NUM_BATCHES = 200_000, 3000
QUICK_DOCUMENTS, QUICK_BATCHES = 6_000, 60
BAR = 10

NAMES = ("tokens", "labels", "loss_mask", "position_ids")

NOTES = [
    "Sequence length 4,096, micro batch 8, one data-parallel rank, 200,000 documents of 600 "
    "tokens on average (uint16, 240 MB), page cache warm. Each run opens the data again, so that "
    "the first access to each mapped page counts, and times the same 3,000 batches on both sides, "
    "after 20 that start the workers and fill their queues. The previous batch is kept alive "
    "while the next one is made, as in a training loop.",
    "Theirs: `BlendedMegatronDatasetBuilder`'s dataset in a `torch.utils.data.DataLoader` with a "
    "sampler like `MegatronPretrainingSampler`, default collation, persistent workers, default "
    "prefetching; no attention mask, no resets, no EOD mask. Their indices are arrays in memory "
    "(as on the rank that builds them), which is a little faster than the mapped cache files.",
    "Ours: `millrace.Loader` with `millrace.torch.to_tensors`, in the calling process, without "
    "workers; indices are rebuilt in each run. A DataLoader with workers makes batches while the "
    "training step runs; ours makes each batch on request.",
    "`pin_memory` is off on both sides: this machine has no GPU. The first batches and some from "
    "the middle were compared: equal in values, shapes and dtypes. (Their blend adds a "
    "`dataset_id`.)",
    'The bar applies to each row, so also to the faster of theirs. "pad id" rows: the tokenizer '
    "has a separate pad token, so both sides look for it in every label; otherwise neither does.",
]


@dataclass(frozen=True)
class Case:
    """The data of one comparison.

    Attributes:
        name: Start of the row's label.
        prefixes: Path prefixes: one for a plain dataset, several for a blend.
        num_samples: Number of samples of a blend; None: one epoch of a plain dataset.
        pad: Pad token of the tokenizer, or None.
        bar: Target of the ratio; None: no target.
    """

    name: str
    prefixes: tuple[str, ...]
    num_samples: int | None
    pad: int | None
    bar: float | None

    @property
    def weights(self) -> list[float]:
        return [float(number) for number in range(1, len(self.prefixes) + 1)]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    runs = number_of_runs(options)
    documents = QUICK_DOCUMENTS if options.quick else NUM_DOCUMENTS
    batches = QUICK_BATCHES if options.quick else NUM_BATCHES
    report = Report("The feed: samples per second of a loader", NOTES, runs)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        for case in write_cases(Path(folder), documents, batches):
            print(case.name, flush=True)
            check_equal(case, batches)
            report.rows += rates(case, batches, runs)
    finish(report, options)


# ---- the data ----


def write_cases(folder: Path, num_documents: int, num_batches: int) -> list[Case]:
    single = str(folder / "single_document")
    parts = tuple(str(folder / f"part{number}_document") for number in range(NUM_BLENDED))
    write_documents(single, num_documents, seed=0)
    for number, part in enumerate(parts):
        write_documents(part, num_documents // NUM_BLENDED, seed=number + 1)
    size = (WARM_UP + num_batches) * MICRO_BATCH_SIZE
    return [
        Case("one dataset", (single,), None, None, BAR),
        Case("one dataset, pad id", (single,), None, PAD, BAR),
        Case(f"blend of {NUM_BLENDED}", parts, size, None, None),
    ]


def write_documents(prefix: str, num_documents: int, seed: int) -> None:
    """Writes random documents that end with EOD. Files just written are in the page cache."""
    random = np.random.default_rng(seed)
    with millrace.IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in random.integers(2, MAX_LENGTH, num_documents):
            tokens = random.integers(0, Tokenizer.eod, length, dtype=np.uint16)
            tokens[-1] = Tokenizer.eod
            builder.add_document(tokens)


# ---- ours ----


def our_dataset(case: Case) -> millrace.GPTDataset | millrace.BlendedDataset:
    def dataset(prefix: str, num_samples: int | None) -> millrace.GPTDataset:
        return millrace.GPTDataset(
            millrace.IndexedDataset(prefix),
            sequence_length=SEQUENCE_LENGTH,
            seed=SEED,
            num_samples=num_samples,
            pad_token=case.pad,
        )

    if case.num_samples is None:
        return dataset(case.prefixes[0], None)
    weights = millrace.normalize(case.weights)
    shares = millrace.samples_per_dataset(weights, case.num_samples)
    datasets = [
        dataset(prefix, build) for prefix, (_, build) in zip(case.prefixes, shares, strict=True)
    ]
    return millrace.BlendedDataset(datasets, weights, sum(share for share, _ in shares))


def our_batches(case: Case, consumed_samples: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    return millrace.Loader(
        our_dataset(case),
        micro_batch_size=MICRO_BATCH_SIZE,
        consumed_samples=consumed_samples,
        transform=to_tensors,
    )


# ---- theirs ----


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


def their_dataset(case: Case) -> Any:
    for prefix in case.prefixes:  # so that indices are arrays in memory, not mapped cache files
        shutil.rmtree(Path(prefix) / "cache", ignore_errors=True)
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQUENCE_LENGTH,
        blend=(list(case.prefixes), None if case.num_samples is None else case.weights),
        split="1,0,0",
        tokenizer=Tokenizer(case.pad),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [None, None, None] if case.num_samples is None else [case.num_samples, 0, 0]
    with quiet_megatron():
        builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
        return builder.build()[0]


def their_batches(
    case: Case, num_workers: int, consumed_samples: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    dataset = their_dataset(case)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=PretrainingSampler(len(dataset), consumed_samples, MICRO_BATCH_SIZE),
        num_workers=num_workers,
        pin_memory=False,
        persistent_workers=num_workers > 0,
    )
    return iter(loader)


# ---- the comparison ----


def check_equal(case: Case, num_batches: int) -> None:
    """Compares batches from the start and the middle; raises RuntimeError if the sides differ."""
    for consumed in (0, num_batches // 2 * MICRO_BATCH_SIZE):
        for num_workers in WORKERS:
            ours = itertools.islice(our_batches(case, consumed), 4)
            theirs = itertools.islice(their_batches(case, num_workers, consumed), 4)
            for mine, other in zip(ours, theirs, strict=True):
                if set(mine) != set(NAMES) or set(other) - {"dataset_id"} != set(NAMES):
                    raise RuntimeError(f"outputs {sorted(mine)} against {sorted(other)}")
                for name in NAMES:
                    if mine[name].dtype != other[name].dtype or not torch.equal(
                        mine[name], other[name]
                    ):
                        raise RuntimeError(f"{name} of {case.name} differ after {consumed} samples")


def rates(case: Case, num_batches: int, runs: int) -> list[Row]:
    opens: dict[str, Callable[[], Any]] = {"ours": functools.partial(our_batches, case)}
    for num_workers in WORKERS:
        opens[f"{num_workers} workers"] = functools.partial(their_batches, case, num_workers)
    results = alternate(
        runs, {name: functools.partial(rate, open_, num_batches) for name, open_ in opens.items()}
    )
    ours = results.pop("ours")
    return [
        Row.compare(
            f"{case.name}, against a DataLoader with {name}",
            ours,
            theirs,
            "samples/s",
            better=HIGHER,
            bar=case.bar,
        )
        for name, theirs in results.items()
    ]


def rate(open_batches: Callable[[], Iterator[Any]], num_batches: int) -> float:
    """Samples per second over `num_batches`, after the first `WARM_UP`."""
    batches = open_batches()
    for _ in range(WARM_UP):
        batch = next(batches)
    start = time.perf_counter()
    for _ in range(num_batches):
        batch = next(batches)
    seconds = time.perf_counter() - start
    if len(batch["tokens"]) != MICRO_BATCH_SIZE:
        raise RuntimeError(f"a batch has {len(batch['tokens'])} samples")
    return num_batches * MICRO_BATCH_SIZE / seconds


if __name__ == "__main__":
    main()
