"""Packed sequences: samples per second, against Streaming, LitData, Grain and datasets.

The same packed corpus in each library's own format, shuffled, micro batch 8, tokens and labels as
int64. A library that is not installed is left out. `pip install '.[torch,peers]'` installs all, in
an environment apart: Streaming needs transformers below 5, and the tests a later one.
"""

import functools
import importlib.machinery
import importlib.metadata
import itertools
import os
import shutil
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HIGHER, Report, Row, alternate, best_of, finish, number_of_runs, parser
from numpy.typing import NDArray

import millrace

SEED = 1234
LENGTHS = (2048, 8192)
MICRO_BATCH_SIZE = 8
WORKERS = (0, 2)
NUM_TOKENS, QUICK_TOKENS = 64_000_000, 1_000_000
WARM_UP = 20  # batches
SECONDS, QUICK_SECONDS = 2.0, 0.2  # of a run
MANY_SAMPLES = 2_000_000  # of ours: more than a run draws
BAR = 5
NAMES = ("tokens", "labels")
PACKAGES = {
    "Streaming": "mosaicml-streaming",
    "LitData": "litdata",
    "Grain": "grain",
    "datasets": "datasets",
}

NOTES = [
    "The corpus: 64 M random tokens (uint16), packed into sequences of 2,048 or 8,192 tokens and "
    "the next one; page cache warm. Micro batch 8, shuffled, tokens and labels int64. Each run "
    "opens the data again, and draws batches for 2 seconds (a peer that ends an epoch is opened "
    "again), after 20 that start workers. The row shows the faster of 0 and 2 workers.",
    "Ours: a token file, `GPTDataset` and `Loader(fields=('tokens', 'labels'), "
    "share_labels=True)`: one thread, no worker processes; NumPy arrays. On every side tokens and "
    "labels are two views of one int64 array. Its order has epochs enough for a run.",
    "MosaicML Streaming: `MDSWriter` with a column ndarray:uint16, a `StreamingDataset` on the "
    "local folder with shuffle=True, a torch DataLoader that collates int64 tensors.",
    "LitData: `optimize` with `TokensLoader`, `StreamingDataset(shuffle=True)` and its "
    "`StreamingDataLoader`; tokens are stored as int32 tensors, as it knows no uint16.",
    "Grain: `MapDataset.source(...)` of an np.memmap, `shuffle`, `map`, `batch`, `to_iter_dataset` "
    "(0 workers: its 16 threads), `mp_prefetch` (2 workers); NumPy arrays.",
    "Hugging Face datasets: an Arrow file of fixed-size lists of uint16, `with_format('torch')`, a "
    "torch DataLoader with shuffle=True that collates int64 tensors.",
    "Each sequence starts with its number: every compared batch was looked up in the corpus, "
    "tokens and labels, and no sequence came twice.",
]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    runs = number_of_runs(options)
    num_tokens = QUICK_TOKENS if options.quick else NUM_TOKENS
    seconds = QUICK_SECONDS if options.quick else SECONDS
    peers = {name: make for name, make in PEERS.items() if is_installed(name)}
    report = Report("Packed sequences: samples per second", list(NOTES), runs, peer="the other")
    for name in PEERS:
        version = importlib.metadata.version(PACKAGES[name]) if name in peers else "not installed"
        report.machine[PACKAGES[name]] = version
        if name not in peers:
            print(f"{name} is left out: {PACKAGES[name]} is not installed")
    if not peers:
        return  # results of an earlier run stay
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        for length in LENGTHS:
            corpus = make_corpus(num_tokens // length, length)
            place = Path(folder) / str(length)
            place.mkdir()
            open_ours = ours(corpus, place)
            sides: dict[str, Callable[[], Iterator[Any]]] = {"ours": open_ours}
            for name, make in peers.items():
                print(f"{length} tokens: writing for {name}", flush=True)
                open_with = make(corpus, place / name)
                for workers in WORKERS:
                    sides[f"{name}, {workers} workers"] = functools.partial(open_with, workers)
            for name, open_batches in sides.items():
                check(name, open_batches(), corpus)
            sides["ours"] = functools.partial(open_ours, MANY_SAMPLES)
            report.rows += rows(length, sides, list(peers), seconds, runs)
            shutil.rmtree(place)
    finish(report, options)


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(PACKAGES[name])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# ---- the corpus ----


def make_corpus(num_sequences: int, length: int) -> NDArray[np.uint16]:
    """Packed sequences with the next token, uint16 [num_sequences, length + 1]: views of a stream.

    The first two tokens of each are its number.
    """
    random = np.random.default_rng(SEED)
    stream = random.integers(0, 50_000, num_sequences * length + 1, dtype=np.uint16)
    numbers = np.arange(num_sequences)
    stream[numbers * length] = numbers >> 16
    stream[numbers * length + 1] = numbers & 0xFFFF
    windows = np.lib.stride_tricks.sliding_window_view(stream, length + 1)
    return windows[::length]


def tokens_and_labels(row: Any) -> dict[str, Any]:
    """A packed sequence, an array or tensor with any first dimensions, as inputs and targets."""
    return {"tokens": row[..., :-1], "labels": row[..., 1:]}


# ---- the sides ----


def ours(corpus: NDArray[np.uint16], folder: Path) -> Callable[..., Iterator[Any]]:
    with millrace.IndexedDatasetBuilder(folder / "ours", np.uint16) as builder:
        builder.add_document(np.append(corpus[:, :-1].ravel(), corpus[-1, -1]))

    def open_batches(num_samples: int | None = None) -> Iterator[Any]:
        dataset = millrace.GPTDataset(
            millrace.IndexedDataset(folder / "ours"),
            sequence_length=corpus.shape[1] - 1,
            seed=SEED,
            num_samples=num_samples,
        )
        return millrace.Loader(
            dataset, micro_batch_size=MICRO_BATCH_SIZE, fields=NAMES, share_labels=True
        )

    return open_batches


def torch_loader(dataset: Any, workers: int, **options: Any) -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=MICRO_BATCH_SIZE,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,  # LitData sets another default
        **options,
    )
    return iter(loader)


def streaming_batches(corpus: NDArray[np.uint16], folder: Path) -> Callable[[int], Iterator[Any]]:
    _without_torchvision()
    import streaming

    width = corpus.shape[1]
    with streaming.MDSWriter(out=str(folder), columns={"row": f"ndarray:uint16:{width}"}) as writer:
        for row in corpus:
            writer.write({"row": np.ascontiguousarray(row)})

    def open_batches(workers: int) -> Iterator[Any]:
        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(
            local=str(folder), shuffle=True, shuffle_seed=SEED, batch_size=MICRO_BATCH_SIZE
        )
        return torch_loader(dataset, workers, collate_fn=_collated)

    return open_batches


def _collated(rows: list[dict[str, NDArray[np.uint16]]]) -> dict[str, torch.Tensor]:
    stacked = np.stack([row["row"] for row in rows]).astype(np.int64)
    return tokens_and_labels(torch.from_numpy(stacked))


def _without_torchvision() -> None:
    """Streaming imports torchvision, for images only, and it may not fit a torch for CPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision  # noqa: F401
        except Exception:
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
            for name in ("", ".datasets", ".transforms", ".transforms.functional"):
                module = types.ModuleType(f"torchvision{name}")
                module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
                sys.modules[module.__name__] = module
            sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
            sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]


def litdata_batches(corpus: NDArray[np.uint16], folder: Path) -> Callable[[int], Iterator[Any]]:
    import litdata

    width = corpus.shape[1]
    np.save(folder.with_suffix(".npy"), corpus.astype(np.int32))
    litdata.optimize(
        fn=functools.partial(_rows_of_file, str(folder.with_suffix(".npy"))),
        inputs=np.array_split(np.arange(len(corpus)), 4),
        output_dir=str(folder),
        chunk_size=width * 1024,
        item_loader=litdata.TokensLoader(),
        num_workers=1,
    )

    def open_batches(workers: int) -> Iterator[Any]:
        dataset = litdata.StreamingDataset(
            str(folder), item_loader=litdata.TokensLoader(block_size=width), shuffle=True, seed=SEED
        )
        loader = litdata.StreamingDataLoader(
            dataset,
            batch_size=MICRO_BATCH_SIZE,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        return (tokens_and_labels(batch.long()) for batch in loader)

    return open_batches


def _rows_of_file(path: str, numbers: NDArray[np.int64]) -> Iterator[torch.Tensor]:
    rows = np.load(path, mmap_mode="r")
    for number in numbers:
        yield torch.from_numpy(np.array(rows[number]))


def grain_batches(corpus: NDArray[np.uint16], folder: Path) -> Callable[[int], Iterator[Any]]:
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # as absl's app.run does; worker processes ask for a flag

    path = folder.with_suffix(".bin")
    np.ascontiguousarray(corpus).tofile(path)

    def open_batches(workers: int) -> Iterator[Any]:
        dataset = (
            grain.MapDataset.source(np.memmap(path, np.uint16, "r", shape=corpus.shape))
            .shuffle(seed=SEED)
            .map(_as_int64)
            .batch(MICRO_BATCH_SIZE)
            .to_iter_dataset()
        )
        if workers:
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        return iter(dataset)

    return open_batches


def _as_int64(row: NDArray[np.uint16]) -> dict[str, NDArray[np.int64]]:
    return tokens_and_labels(row.astype(np.int64))


def datasets_batches(corpus: NDArray[np.uint16], folder: Path) -> Callable[[int], Iterator[Any]]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    width = corpus.shape[1]
    features = datasets.Features({"row": datasets.List(datasets.Value("uint16"), length=width)})
    datasets.disable_progress_bars()
    datasets.Dataset.from_generator(
        lambda: ({"row": row} for row in corpus), features=features, cache_dir=str(folder) + "-tmp"
    ).save_to_disk(str(folder))

    def open_batches(workers: int) -> Iterator[Any]:
        dataset = datasets.load_from_disk(str(folder)).with_format("torch")
        generator = torch.Generator().manual_seed(SEED)
        options = {"shuffle": True, "generator": generator, "collate_fn": _stacked}
        return torch_loader(dataset, workers, **options)

    return open_batches


def _stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return tokens_and_labels(torch.stack([row["row"] for row in rows]).long())


PEERS = {
    "Streaming": streaming_batches,
    "LitData": litdata_batches,
    "Grain": grain_batches,
    "datasets": datasets_batches,
}


# ---- the comparison ----


def check(name: str, batches: Iterator[Any], corpus: NDArray[np.uint16]) -> None:
    """Looks up the rows of some batches in the corpus; RuntimeError if they are not there."""
    numbers_seen: set[int] = set()
    for batch in itertools.islice(batches, 8):
        tokens, labels = (np.asarray(batch[field]) for field in NAMES)
        numbers = tokens[:, 0] * 2**16 + tokens[:, 1]
        is_new = not numbers_seen & set(numbers.tolist())
        numbers_seen |= set(numbers.tolist())
        if not (
            is_new
            and tokens.dtype == labels.dtype == np.int64
            and np.array_equal(tokens, corpus[numbers, :-1])
            and np.array_equal(labels, corpus[numbers, 1:])
        ):
            raise RuntimeError(f"the batches of {name} are not sequences of the corpus")
    if len(numbers_seen) != 8 * MICRO_BATCH_SIZE:
        raise RuntimeError(f"{name} drew {len(numbers_seen)} sequences in 8 batches")


def rows(
    length: int,
    sides: dict[str, Callable[[], Iterator[Any]]],
    peers: list[str],
    seconds: float,
    runs: int,
) -> list[Row]:
    results = alternate(
        runs,
        {
            name: functools.partial(rate, open_batches, seconds)
            for name, open_batches in sides.items()
        },
    )
    found = []
    for peer in peers:
        name, best = best_of({key: results[key] for key in results if key.startswith(peer)})
        label = f"{length} tokens: {name}"
        found.append(Row.compare(label, results["ours"], best, "samples/s", better=HIGHER, bar=BAR))
    return found


def rate(open_batches: Callable[[], Iterator[Any]], seconds: float) -> float:
    """Samples per second for some seconds, after the first `WARM_UP` batches."""
    batches = itertools.chain.from_iterable(open_batches() for _ in itertools.count())
    for _ in range(WARM_UP):
        batch = next(batches)
    num_batches, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        batch = next(batches)
        num_batches += 1
    if len(batch["tokens"]) > MICRO_BATCH_SIZE:
        raise RuntimeError(f"a batch has {len(batch['tokens'])} samples")
    return num_batches * MICRO_BATCH_SIZE / (now - start)


if __name__ == "__main__":
    main()
