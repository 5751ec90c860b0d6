"""The oracle: Megatron-LM's own datasets from the megatron-core package, and data for both sides.

Importing it imports torch, which takes some seconds.
"""

import contextlib
import dataclasses
import importlib
import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import millrace

# torch and megatron-core warn of their own deprecations, and of optional packages, on import.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers as helpers, indexed_dataset
    from megatron.core.datasets.blended_dataset import BlendedDataset as BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

DType = indexed_dataset.DType
IndexedDataset = indexed_dataset.IndexedDataset
IndexedDatasetBuilder = indexed_dataset.IndexedDatasetBuilder

MODULES = (
    "blended_dataset",
    "blended_megatron_dataset_builder",
    "blended_megatron_dataset_config",
    "gpt_dataset",
    "helpers",
    "indexed_dataset",
    "megatron_dataset",
    "utils",
)
"""The modules of `megatron.core.datasets` that `millrace.megatron` replaces."""

SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclasses.dataclass
class Tokenizer:
    """The attributes of a tokenizer that the datasets use."""

    eod: int = 0
    pad_id: int | None = None
    vocab_size: int = 1000

    @property
    def pad(self) -> int:
        if self.pad_id is None:
            raise NotImplementedError("no pad token")
        return self.pad_id

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        return {"eod_token": self.eod} | ({} if self.pad_id is None else {"pad_token": self.pad_id})

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict(dataclasses.asdict(self))


def module_of_megatron(name: str) -> Any:
    """One of `MODULES`."""
    return importlib.import_module(f"megatron.core.datasets.{name}")


def name_of_megatron(name: str) -> Any:
    """The value of a name in the first of `MODULES` that has it."""
    modules = map(module_of_megatron, MODULES)
    return next(vars(module)[name] for module in modules if name in vars(module))


BlendedMegatronDatasetBuilder = name_of_megatron("BlendedMegatronDatasetBuilder")
normalize = name_of_megatron("normalize")
parse_and_normalize_split = name_of_megatron("parse_and_normalize_split")
convert_split_vector_to_split_matrix = name_of_megatron("convert_split_vector_to_split_matrix")
sizes_per_split_and_dataset = name_of_megatron("_get_size_per_split_per_dataset")


def build(config: GPTDatasetConfig, sizes: Sequence[int | None]) -> list[Any]:
    """The datasets of the three splits."""
    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config).build()


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Megatron-LM needs one to build a missing cache: rank 0 does it alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def captured(name: str) -> Iterator[list[str]]:
    """The lines of a logger, which go nowhere else."""
    lines: list[str] = []
    logger, handler = logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def config_of(cache: Path | None, kind: Any = GPTDatasetConfig, **options: Any) -> Any:
    """A configuration of either side; without a cache folder, each prefix has a cache below it."""
    is_per_split = "blend_per_split" in options
    everything: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": 16,
        "blend": None if is_per_split else (["unused"], None),
        "split": None if is_per_split else "1,0,0",
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "path_to_cache": None if cache is None else str(cache),
    } | options
    return kind(**everything)


def gpt_dataset(
    prefix: Path,
    config: GPTDatasetConfig,
    sequences: tuple[int, int],
    num_samples: int | None,
    split: Split = Split.train,
) -> GPTDataset:
    indices = np.arange(*sequences, dtype=np.int32)
    return GPTDataset(IndexedDataset(str(prefix)), str(prefix), indices, num_samples, split, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The inputs of a dataset on both sides."""

    prefix: Path
    sequences: tuple[int, int]
    split: Split = Split.train
    num_samples: int | None = None
    sequence_length: int
    seed: int = 0
    add_extra_token: bool = True
    drop_last: bool = True
    eod: int = 0
    pad: int | None = None
    reset_position_ids: bool = False
    eod_mask_loss: bool = False
    has_attention_mask: bool = False

    def ours(self) -> millrace.GPTDataset:
        return millrace.GPTDataset(
            millrace.IndexedDataset(self.prefix),
            sequence_length=self.sequence_length,
            seed=self.seed,
            num_samples=self.num_samples,
            sequences=self.sequences,
            add_extra_token=self.add_extra_token,
            # Megatron-LM has this option only for the validation split.
            drop_last_partial_sequence=self.drop_last or self.split is not Split.valid,
            eod_token=self.eod,
            # By Megatron-LM's rule, a pad that equals another special token becomes -1.
            pad_token=-1 if self.pad in (None, self.eod) else self.pad,
            reset_position_ids=self.reset_position_ids,
            eod_mask_loss=self.eod_mask_loss,
        )

    def theirs(self, cache: Path) -> GPTDataset:
        config = config_of(
            cache,
            sequence_length=self.sequence_length,
            random_seed=self.seed,
            tokenizer=Tokenizer(eod=self.eod, pad_id=self.pad),
            add_extra_token_to_sequence=self.add_extra_token,
            drop_last_partial_validation_sequence=self.drop_last,
            reset_position_ids=self.reset_position_ids,
            eod_mask_loss=self.eod_mask_loss,
            reset_attention_mask=self.has_attention_mask,
            create_attention_mask=self.has_attention_mask,
        )
        return gpt_dataset(self.prefix, config, self.sequences, self.num_samples, self.split)


def random_lengths(random: np.random.Generator, max_sequences: int = 10_000) -> NDArray[np.int32]:
    """Lengths of 1 to `max_sequences` sequences, mostly few, some of them empty."""
    count = int(np.exp(random.uniform(0, np.log(max_sequences + 1))))
    mean = random.choice([2, 10, 60])
    lengths = random.geometric(1 / mean, size=max(count, 1)).astype(np.int32) - 1
    lengths[random.random(len(lengths)) < random.choice([0, 0, 0.3])] = 0
    if lengths.sum() == 0:
        lengths[random.integers(len(lengths))] = 5
    return lengths


def random_split(random: np.random.Generator) -> str:
    """Shares such as "969,30,1", "0.3,0,0.7" or "99"."""
    kind = random.integers(4)
    if kind == 0:
        shares = [str(share) for share in random.integers(1, 1000, 3)]
    elif kind == 1:
        shares = [repr(float(share)) for share in random.random(3) + 1e-3]
    elif kind == 2:
        shares = [str(share) for share in random.integers(0, 3, random.integers(1, 4))]
        shares[random.integers(len(shares))] = "1"
    else:
        shares = ["969", "30", "1"]
    return ",".join(shares)


def write_sequences(
    prefix: Path,
    lengths: Sequence[int] | NDArray[Any],
    random: np.random.Generator,
    dtype: Any = np.uint16,
    vocabulary: tuple[int, int] = (0, 30),
) -> Path:
    """Writes random tokens in sequences of these lengths, several to a document."""
    tokens = random.integers(*vocabulary, int(np.sum(lengths))).astype(dtype)
    with millrace.IndexedDatasetBuilder(prefix, dtype) as builder:
        place = start = 0
        while place < len(lengths):
            run = [int(length) for length in lengths[place : place + random.integers(1, 20)]]
            builder.add_document(tokens[start : start + sum(run)], run)
            place, start = place + len(run), start + sum(run)
    return prefix


def assert_alike(left: Any, right: Any, where: str = "") -> None:
    """Checks values and dtypes, through lists, tuples and mappings."""
    if isinstance(right, dict):
        assert list(left) == list(right), where
        for key, value in right.items():
            assert_alike(left[key], value, f"{where} {key}")
    elif isinstance(right, (list, tuple)):
        assert len(left) == len(right), where
        for number, pair in enumerate(zip(left, right, strict=True)):
            assert_alike(*pair, f"{where}[{number}]")
    elif isinstance(right, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), f"{where}:\n{left}\n{right}"
    elif isinstance(right, (np.ndarray, np.generic)):
        np.testing.assert_array_equal(left, right, where, strict=True)
    else:
        assert left == right, f"{where}:\n{left!r}\n{right!r}"


def assert_same_indices(ours: millrace.GPTDataset, theirs: GPTDataset) -> None:
    assert len(ours) == len(theirs)
    for name in ("document_index", "sample_index", "shuffle_index"):
        mine, their = getattr(ours.indices, name), getattr(theirs, name)
        np.testing.assert_array_equal(mine, their, err_msg=name, strict=True)


def assert_same_datasets(ours: Any, theirs: Any, place: str = "") -> None:
    """Of datasets, blends, lists of them or None: all indices, and some samples."""
    assert type(ours).__name__ == type(theirs).__name__, place
    if isinstance(theirs, list):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same_datasets(*pair, f"{place}[{number}]")
    elif theirs is not None:
        assert len(ours) == len(theirs), place
        for name in ("dataset_index", "dataset_sample_index"):
            if isinstance(theirs, BlendedDataset):
                left, right = getattr(ours, name), getattr(theirs, name)
                np.testing.assert_array_equal(left, right, f"{place} {name}", strict=True)
        for pair in zip(parts_of(ours), parts_of(theirs), strict=True):
            assert_same_indices(*pair)
        if len(ours) > 0:
            numbers = np.random.default_rng(len(ours)).integers(0, len(ours), 9)
            assert_same_samples(ours, theirs, [0, len(ours) - 1, *numbers.tolist()], place)


def parts_of(dataset: Any) -> list[Any]:
    """The datasets of token files below a dataset, or below a list of them."""
    if isinstance(dataset, list):
        return [part for each in dataset for part in parts_of(each)]
    return [] if dataset is None else list(getattr(dataset, "datasets", [dataset]))


def fresh_sample(dataset: GPTDataset, number: int) -> dict[str, NDArray[Any]]:
    """A sample as if it were the first that the dataset reads.

    Megatron-LM keeps the loss mask of the first sample, with zeros for its padding, for all later
    samples (see test_oracle_samples).
    """
    dataset.masks_and_position_ids_are_cached = False
    return {key: tensor.numpy() for key, tensor in dataset[number].items()}


def assert_same_samples(ours: Any, theirs: Any, numbers: Sequence[int], place: str = "") -> None:
    """Of datasets or of blends."""
    batch = ours.batch(numbers)
    for row, number in enumerate(numbers):
        part, single = (theirs, number), ours[number]
        if isinstance(theirs, BlendedDataset):
            place_in_part = theirs.dataset_sample_index[number]
            part = theirs.datasets[theirs.dataset_index[number]], place_in_part
        sample = fresh_sample(*part)
        for key in SAMPLE_KEYS:
            message = f"{place}: {key} of sample {number}"
            np.testing.assert_array_equal(batch[key][row], sample[key], message, strict=True)
            np.testing.assert_array_equal(single[key], sample[key], message, strict=True)
