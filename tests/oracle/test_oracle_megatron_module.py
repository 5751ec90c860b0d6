"""`millrace.megatron` beside Megatron-LM: the same source text runs over both."""

import dataclasses
import logging
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle_megatron as oracle
import pytest
import torch
from tests.conftest import results_of_processes

import millrace
import millrace.megatron as ours
from millrace.errors import ConfigError, DataError
from millrace.megatron import errors

pytestmark = pytest.mark.filterwarnings(
    "ignore:The pad token id in the tokenizer collides with another special token id:UserWarning"
)

# After a failed opening it raises at some later time.
oracle.IndexedDataset.__del__ = lambda self: None

# These belong to Megatron-LM's training program: test_oracle_samplers.py, test_oracle_sft.py.
PROGRAM = ("build_pretraining_data_loader", "IGNORE_INDEX", "SFTDataset", "SFTLowLevelDataset")
OUR_NAMES = {n: getattr(ours, n) for n in ours.__all__ if n not in (*PROGRAM, "SFTTokenizer")}
THEIR_NAMES = {
    name: oracle.helpers if name == "helpers" else oracle.name_of_megatron(name)
    for name in OUR_NAMES
}


SIDES = (SimpleNamespace(**OUR_NAMES), SimpleNamespace(**THEIR_NAMES))


def on_both(work: Callable[[Any], Any]) -> tuple[Any, Any]:
    return work(SIDES[0]), work(SIDES[1])


def config(side: Any, cache: Path | None = None, **options: Any) -> Any:
    return oracle.config_of(
        cache, side.GPTDatasetConfig, **({"create_attention_mask": True} | options)
    )


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A token file of 60 sequences in several documents."""
    random = np.random.default_rng(1)
    lengths = random.integers(0, 40, 60)
    return oracle.write_sequences(tmp_path / "data", lengths, random, np.int32, (0, 12))


def gpt(side: Any, prefix: Path, cache: Path, kind: Any = None, **options: Any) -> Any:
    num_samples = options.pop("num_samples", 50)
    split = options.pop("index_split", "train")
    indices = options.pop("indices", np.arange(60, dtype=np.int32))
    dataset = side.IndexedDataset(str(prefix), mmap=options.get("mmap_bin_files", True))
    return (kind or side.GPTDataset)(
        dataset,
        str(prefix),
        indices,
        num_samples,
        side.Split[split],
        config(side, cache, **options),
    )


def test_every_name_is_there() -> None:
    fields = [[f.name for f in dataclasses.fields(s.GPTDatasetConfig)] for s in SIDES]
    assert fields[0] == [*fields[1], "inter_document_masking", "sft_release", "loss_ranges"]
    for field in dataclasses.fields(oracle.GPTDatasetConfig):
        mine = next(f for f in dataclasses.fields(ours.GPTDatasetConfig) if f.name == field.name)
        assert (mine.default, mine.init) == (field.default, field.init), field.name


def samples_of(dataset: Any) -> list[Any]:
    return [dataset[number] for number in range(len(dataset))]


def build(side: Any, sizes: Any, made: Any, kind: Any = None) -> Any:
    kind = kind or side.GPTDataset
    return side.BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, made).build()


# ---- code written for Megatron-LM ----

SUBCLASSES = '''
class Windows(MegatronDataset):
    """Halves of whole documents, in a shuffled order."""

    def __init__(self, dataset, dataset_path, indices, num_samples, index_split, config):
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        random = numpy.random.RandomState(config.random_seed)
        self.order = random.permutation(len(indices))

    @staticmethod
    def numel_low_level_dataset(low_level_dataset):
        return low_level_dataset.document_indices.shape[0] - 1

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    @staticmethod
    def _key_config_attributes():
        return super(Windows, Windows)._key_config_attributes() + ["mmap_bin_files"]

    def __len__(self):
        return len(self.order)

    def __getitem__(self, idx):
        document = self.indices[self.order[idx]]
        first, last = self.dataset.get_document_indices()[document : document + 2]
        index, reader = self.dataset.index, self.dataset.bin_reader
        count = int(index.sequence_lengths[first:last].sum())
        tokens = reader.read(
            dtype=index.dtype, count=count, offset=int(index.sequence_pointers[first])
        )
        parts = [self.dataset.get(int(i)) for i in range(first, last)]
        whole = numpy.concatenate(parts)
        assert numpy.array_equal(tokens, whole)
        assert numpy.array_equal(numpy.concatenate(self.dataset[first:last]), whole)
        half = torch.from_numpy(whole[: len(whole) // 2].astype(numpy.int64))
        return {"text": half, "pad": self._pad_token_id, "split": self.index_split == Split.valid}


class Backwards(GPTDataset):
    """Samples whose tokens are read from the end."""

    def _query_document_sample_shuffle_indices(self, idx):
        text, documents = super()._query_document_sample_shuffle_indices(idx)
        return text[::-1].copy(), documents


class Doubled(GPTDataset):
    """Samples with one more output, the sequences that they are from."""

    def __getitem__(self, idx):
        sample = super().__getitem__(idx)
        _, documents = self._query_document_sample_shuffle_indices(0 if idx is None else idx)
        first = self.dataset.get(documents[0])
        return {**sample, "documents": documents, "first": first.sum(), "rows": len(self)}
'''


def subclasses(side: Any) -> dict[str, Any]:
    names = {"numpy": np, "torch": torch, **vars(side), "__name__": __name__}
    exec(SUBCLASSES, names)
    return names


@pytest.mark.parametrize("mapped", [True, False])
def test_a_subclass_written_for_megatron_runs(prefix: Path, tmp_path: Path, mapped: bool) -> None:
    def work(side: Any) -> Any:
        options = {"blend": ([str(prefix)], None), "split": "3,2,1", "mmap_bin_files": mapped}
        splits = build(side, [None] * 3, config(side, **options), subclasses(side)["Windows"])
        return [
            [len(split), split.unique_description_hash, split.indices, *samples_of(split)]
            for split in splits
            if split is not None
        ]

    oracle.assert_alike(*on_both(work))


@pytest.mark.parametrize("name", ["Backwards", "Doubled"])
@pytest.mark.parametrize("extra", [True, False])
def test_a_gpt_subclass_written_for_megatron_runs(
    prefix: Path, tmp_path: Path, name: str, extra: bool
) -> None:
    def work(side: Any) -> Any:
        flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        options = dict.fromkeys(flags, True) | {"add_extra_token_to_sequence": extra}
        folder = tmp_path / f"cache-{side is SIDES[0]}"
        dataset = gpt(side, prefix, folder, subclasses(side)[name], **options)
        return [*samples_of(dataset), dataset[None]]

    oracle.assert_alike(*on_both(work))


@pytest.mark.parametrize("num_samples", [None, 40, 210, -1])
def test_any_choice_of_sequences(prefix: Path, tmp_path: Path, num_samples: int | None) -> None:
    """Indices that are not a range, as a subclass or a tool may give them."""
    random = np.random.default_rng(5)
    for indices in (random.permutation(60)[:40], np.array([7, 7, 3, 5]), np.array([9, 8, 7])):
        options = {"indices": indices.astype(np.int32), "num_samples": num_samples}
        made = [
            gpt(side, prefix, tmp_path / f"{number}-{len(indices)}", **options)
            for number, side in enumerate(SIDES)
        ]
        for name in ("document_index", "sample_index", "shuffle_index"):
            oracle.assert_alike(*(getattr(dataset, name) for dataset in made))
        oracle.assert_alike(*map(samples_of, made))


def test_indices_that_are_replaced_are_used(prefix: Path, tmp_path: Path) -> None:
    dataset = gpt(SIDES[0], prefix, tmp_path)
    first, second = dataset[0]["tokens"], dataset[1]["tokens"]
    dataset.shuffle_index = dataset.shuffle_index[::-1].copy()
    assert torch.equal(dataset[-1]["tokens"], first)
    assert torch.equal(dataset[len(dataset) - 2]["tokens"], second)


# ---- token files ----


def test_the_dtypes_are_alike() -> None:
    def work(side: Any) -> Any:
        kind = side.DType
        codes = {code: kind.dtype_from_code(code) for code in range(1, 9)}
        return (
            codes,
            [kind.code_from_dtype(dtype) for dtype in codes.values()],
            [kind.size(code) for code in codes],
            [kind.size(dtype) for dtype in codes.values()],
            [kind.optimal_dtype(size) for size in (None, 0, 65499, 65500, 10**6)],
            [(member.name, member.value) for member in kind],
        )

    oracle.assert_alike(*on_both(work))


def test_expected_counts_are_checked(prefix: Path) -> None:
    entries = len(millrace.IndexedDataset(prefix).document_indices)
    for side in SIDES:
        counts = {"sequences_per_dataset": (60, entries)}
        assert len(side.IndexedDataset(str(prefix), dtype_code=4, **counts)) == 60
        with pytest.raises((AssertionError, ValueError)):
            side.IndexedDataset(str(prefix), sequences_per_dataset=(59, entries), dtype_code=4)
    # The code that a vocabulary of 65,500 to 65,536 gives is uint16's, though the file is int32.
    assert ours.IndexedDataset(str(prefix), dtype_code=8, **counts).index.dtype is np.int32


# ---- errors ----


ONE: Any = (["a", "b"], [1.0, 2.0])
BAD_CONFIGS: list[dict[str, Any]] = [
    {"tokenizer": None},
    {"reset_position_ids": None},
    {"reset_attention_mask": None},
    {"eod_mask_loss": None},
    {"split": None},
    {"blend": (["a", "b"], [1.0])},
    {"split": "1,2,3,4"},
    {"blend": ONE, "split": "1,0,0", "blend_per_split": [ONE, None, None]},
    {"split": "1,0,0", "blend_per_split": [ONE, None, None]},
    {"blend_per_split": [ONE, None]},
    {"blend_per_split": [(["a"], [1.0, 2.0]), None, None]},
    {"fast_cache_load": True},
    {"defer_npy_index_mmap": True},
    {"fast_cache_load": True, "path_to_cache": "cache"},
    {"sequences_per_dataset": {}, "tokenizer": oracle.Tokenizer(vocab_size=None)},  # type: ignore[arg-type]
]


def raised(work: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        work()
    return caught.value


def assert_raises_alike(work: Callable[[Any], Any]) -> BaseException:
    """Our error, which is of Megatron-LM's class too."""
    mine, their = on_both(lambda side: raised(lambda: work(side)))
    assert isinstance(mine, type(their)), (mine, their)
    return mine


@pytest.mark.parametrize("options", BAD_CONFIGS, ids=str)
def test_bad_configurations_are_assertions(options: dict[str, Any]) -> None:
    error = assert_raises_alike(lambda side: config(side, **options))
    assert isinstance(error, ConfigError)
    assert isinstance(error, AssertionError)
    assert len(str(error)) > 10


@pytest.mark.parametrize(
    ("datasets", "weights", "size"),
    [
        ("ab", [1.0], 4),
        ("ab", [1.0, 0.0], 4),
        ("ab", [1.0, -1.0], 4),
        ("ab", [1, 1.0], 4),
        ("ac", [1.0, 1.0], 4),
        ("ad", [1.0, 1.0], 4),
        ("ab", [1.5, 2.0], None),
        ("ab", [0.5, 0.5], 10_000),
        ("ab", [1, 100_000], None),
        ("", [], 4),
        ("", [], None),
    ],
)
def test_bad_blends_raise_alike(
    prefix: Path, tmp_path: Path, datasets: str, weights: list[float], size: int | None
) -> None:
    def work(side: Any) -> Any:
        made = {
            "a": lambda: gpt(side, prefix, tmp_path),
            "b": lambda: gpt(side, prefix, tmp_path, num_samples=10),
            "c": lambda: gpt(side, prefix, tmp_path, index_split="test"),
            "d": lambda: gpt(side, prefix, tmp_path, subclasses(side)["Doubled"]),
        }
        side.BlendedDataset([made[name]() for name in datasets], weights, size, config(side))

    assert_raises_alike(work)


@pytest.mark.parametrize(
    ("blend", "sizes"),
    [
        ((["p", "p"], [1.0, 2.0]), [None, 5, 5]),
        ((["p", "missing"], [1.0, 2.0]), [5, 5, 5]),
        ((["missing"], None), [5, 5, 5]),
        ((["p", "p"], [0.0, 0.0]), [5, 5, 5]),
        ((["p", "p"], [1.0, 2.0]), [5]),
        (([], None), [5, 5, 5]),
    ],
)
@pytest.mark.parametrize("per_split", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_bad_builders_raise_alike(
    prefix: Path, blend: Any, sizes: list[int | None], per_split: bool
) -> None:
    names = [str(prefix) if name == "p" else name for name in blend[0]]

    def work(side: Any) -> Any:
        options: dict[str, Any] = {"blend": (names, blend[1]), "split": "1,1,1"}
        if per_split:
            options = {"blend_per_split": [(names, blend[1])] * 3}
        build(side, sizes, config(side, **options))

    assert_raises_alike(work)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_other_errors_are_alike(prefix: Path, tmp_path: Path) -> None:
    # Theirs opens by multi-storage-client, if that is installed, and meets no error before the end.
    with pytest.raises(FileNotFoundError):
        SIDES[0].IndexedDatasetBuilder(str(tmp_path / "no" / "x.bin"))
    (tmp_path / "bad.bin").write_bytes(b"1234")
    (tmp_path / "bad.idx").write_bytes(b"no index of any kind, but long enough to look at")
    at = {id(side): side.IndexedDataset(str(prefix)) for side in SIDES}
    for work in (
        lambda side: side.IndexedDataset(str(tmp_path / "none")),
        lambda side: side.IndexedDataset(str(tmp_path / "bad")),
        lambda side: side.IndexedDataset(str(prefix), multimodal=True),
        lambda side: at[id(side)][0:8:2],
        lambda side: at[id(side)][60],
        lambda side: at[id(side)][60:],
        lambda side: at[id(side)]["a"],
        lambda side: at[id(side)].get(61),
        lambda side: side.DType.dtype_from_code(9),
        lambda side: side.DType.code_from_dtype(np.complex64),
        lambda side: side.DType.size("a" if side is SIDES[0] else str),
        lambda side: merge_of_another_dtype(side, tmp_path, prefix),
        lambda side: side.get_blend_from_list(["a", "x", "0.5", "y"]),
        lambda side: side.get_blend_from_list([]),
        lambda side: side.parse_and_normalize_split("1.2.3"),
        lambda side: side._get_size_per_split_per_dataset([0.5, 0.6], [1, 2]),
        lambda side: side._get_size_per_split_per_dataset([0.5, 0.5], [1, None]),
        lambda side: gpt(side, prefix, tmp_path, random_seed=2**32),
        lambda side: gpt(side, prefix, tmp_path, random_seed=-1),
        lambda side: gpt(side, prefix, Path(f"{prefix}.bin"), random_seed=-1),  # no folder either
        lambda side: side.MockGPTDataset(None, None, None, 1, side.Split.train, config(side)),
        lambda side: gpt(side, prefix, tmp_path)[10_000],
        lambda side: gpt(side, prefix, tmp_path)[-10_000],
    ):
        assert_raises_alike(work)


def merge_of_another_dtype(side: Any, folder: Path, prefix: Path) -> None:
    builder = side.IndexedDatasetBuilder(str(folder / f"m{side is SIDES[0]}.bin"), np.uint16)
    try:
        builder.add_index(str(prefix))
    finally:
        builder._builder.abort() if side is SIDES[0] else builder.data_file.close()


def test_samples_of_no_tokens_are_an_assertion(prefix: Path, tmp_path: Path) -> None:
    """Megatron-LM would add epochs for ever."""
    with pytest.raises(AssertionError, match="0 tokens"):
        gpt(SIDES[0], prefix, tmp_path, indices=np.arange(0, dtype=np.int32))


# ---- the functions ----


@pytest.mark.parametrize("seed", range(40))
def test_functions_of_numbers_are_alike(seed: int) -> None:
    random = np.random.default_rng([50, seed])
    vector, other = random.random(3).tolist(), random.random(3).tolist()
    vector[random.integers(3)] = 0.0
    weights = random.random(int(random.integers(1, 40))) + 0.001
    sizes = random.integers(1, 40, len(weights))
    total = int(sizes.sum())
    split = ",".join(str(share) for share in random.integers(0, 5, 3)) + "1"
    lengths = oracle.random_lengths(random, 200)
    documents = random.permutation(len(lengths)).astype(np.int32)
    sequence_length, extra = int(random.integers(1, 30)), bool(random.integers(2))
    if lengths[documents[-1]] == 0:
        lengths[documents[-1]] = 1
    walk = lengths, documents, sequence_length, 1, int(lengths.sum())

    def work(side: Any) -> Any:
        blend = np.zeros(total, np.int16), np.zeros(total, np.int64)
        exhaustive = np.zeros(total, np.int16), np.zeros(total, np.int64)
        normalized = side.normalize(weights.tolist())
        side.build_blending_indices(*blend, normalized, len(weights), total, False)
        side.helpers.build_exhaustive_blending_indices(*exhaustive, sizes.tolist(), len(sizes))
        return [
            normalized,
            side.normalize(vector),
            side.parse_and_normalize_split(split),
            side.convert_split_vector_to_split_matrix(side.normalize(vector)),
            side.convert_split_vector_to_split_matrix(*map(side.normalize, (vector, other))),
            side._get_size_per_split_per_dataset(normalized, [0, 7, 1000], 0.005),
            blend,
            exhaustive,
            [side.build_sample_idx(*walk, drop, extra) for drop in (True, False)],
            side.helpers.build_sample_idx_int64(*walk, True, int(extra)),
        ]

    oracle.assert_alike(*on_both(work))


@pytest.mark.parametrize("seed", range(20))
def test_separate_masks_are_alike(seed: int) -> None:
    random = np.random.default_rng([51, seed])
    data = torch.from_numpy(random.integers(0, 4, int(random.integers(1, 40))))
    for number in range(16):
        options = [bool(number & bit) for bit in (1, 2, 4, 8)]
        made = on_both(lambda s, o=options: list(s._get_ltor_masks_and_position_ids(data, 2, *o)))
        oracle.assert_alike(*made)


def test_arrays_that_cannot_be_written_to_are_refused() -> None:
    good = np.zeros(4, np.int16), np.zeros(4, np.int64)
    with pytest.raises(AssertionError, match=r"is int64 \[4\]; int16 \[4\]"):
        ours.build_blending_indices(good[1], good[1], [1.0], 1, 4, False)
    with pytest.raises(AssertionError, match=r"int16 \[5\] is needed"):
        ours.build_exhaustive_blending_indices(*good, [5], 1)


# ---- inter-document masking ----


@pytest.mark.parametrize("seed", range(12))
def test_document_bounds_follow_from_the_parts(seed: int, tmp_path: Path) -> None:
    """megatron-core 0.16.1 lacks the option: this test states the rule."""
    random = np.random.default_rng([52, seed])
    lengths = random.integers(0, 12, 60)
    lengths[random.random(60) < 0.3] = 0
    prefix = oracle.write_sequences(tmp_path / "data", lengths, random, np.uint16, (0, 9))
    extra, length = bool(seed % 2), int(random.integers(1, 40))
    dataset, plain = (
        gpt(
            SIDES[0],
            prefix,
            tmp_path / "cache",
            index_split="valid",
            num_samples=None,
            sequence_length=length,
            add_extra_token_to_sequence=extra,
            drop_last_partial_validation_sequence=False,
            **more,
        )
        for more in ({"inter_document_masking": True, "create_attention_mask": True}, {})
    )
    for number in [*range(len(dataset)), None]:
        sample = dataset[number]
        row = int(dataset.shuffle_index[number or 0])
        (first, start), (last, stop) = dataset.sample_index[row : row + 2].tolist()
        parts = [int(lengths[dataset.document_index[place]]) for place in range(first, last + 1)]
        parts[-1] = stop + extra
        parts[0] -= start
        if extra:
            parts[-1] -= 1
            if parts[-1] == 0:
                parts.pop()
        if sum(parts) < length:
            parts = [*parts[:-1], (parts or [0])[-1] + length - sum(parts)]
        if len(parts) > length:
            parts = [part for part in parts if part > 0]
        bounds = np.cumsum([0, *parts])
        expected = np.append(bounds, [length] * (length + 1 - len(bounds)))
        assert list(sample) == [
            "tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen",
        ]  # fmt: skip
        oracle.assert_alike(sample["cu_seqlens"], torch.from_numpy(expected.astype(np.int32)))
        oracle.assert_alike(sample["max_seqlen"], torch.tensor(max(parts), dtype=torch.int32))
        positions = [place for part in parts for place in range(part)]
        oracle.assert_alike(sample["position_ids"], torch.tensor(positions, dtype=torch.int64))
        for name in ("tokens", "labels", "loss_mask"):
            oracle.assert_alike(sample[name], plain[number][name])


@pytest.mark.parametrize("version", [None, "0.16.1", "0.18.2", "0.19.0", "1.0.0rc1"])
def test_a_hook_returns_what_the_imported_release_does(
    version: Any, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__version__=version))
    for is_masked in (False, True):
        dataset = gpt(SIDES[0], prefix, tmp_path / "cache", inter_document_masking=is_masked)
        text, documents, *lengths = dataset._query_document_sample_shuffle_indices(3)
        assert len(lengths) == (is_masked or version in ("0.19.0", "1.0.0rc1"))
        assert all(len(one) == len(documents) and sum(one) == len(text) for one in lengths)


@pytest.mark.parametrize("more", [[[17]], [], [[17, 1]], [[0]]])
def test_the_bounds_are_those_of_a_hook(more: list[Any], prefix: Path, tmp_path: Path) -> None:
    class One(ours.GPTDataset):
        def _query_document_sample_shuffle_indices(self, idx: Any) -> Any:
            return *super()._query_document_sample_shuffle_indices(idx)[:2], *more

    options = {"sequence_length": 16, "inter_document_masking": True}
    dataset = gpt(SIDES[0], prefix, tmp_path / "cache", One, **options)
    if more == [[17]]:
        assert dataset[3]["cu_seqlens"].tolist() == [0] + [16] * 16
        assert dataset[3]["position_ids"].tolist() == [*range(dataset[3]["max_seqlen"])]
    else:
        with pytest.raises(ConfigError, match=r"third value of One\._query"):
            dataset[3]


# ---- caches ----


def test_a_damaged_cache_is_built_again(
    prefix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every kind of damage: tests/cache/test_megatron.py."""
    cache = tmp_path / "cache"
    first = gpt(SIDES[0], prefix, cache)
    whole = {path: path.read_bytes() for path in sorted(cache.iterdir())}
    assert len(whole) == 4
    logging.getLogger("millrace.megatron").setLevel(logging.INFO)
    for path in whole:
        path.write_bytes(whole[path][:-3])
        caplog.clear()
        again = gpt(SIDES[0], prefix, cache)
        oracle.assert_alike(again.shuffle_index, np.asarray(first.shuffle_index))
        assert {path: path.read_bytes() for path in sorted(cache.iterdir())} == whole
        assert "do not fit" in caplog.text
        assert "Build and save the GPTDataset train indices" in caplog.text
    caplog.clear()
    gpt(SIDES[0], prefix, cache)
    assert "Load the GPTDataset train indices" in caplog.text
    assert "> total number of samples: " in caplog.text


def test_a_cache_of_other_options_under_the_same_name_is_built_again(
    prefix: Path, tmp_path: Path
) -> None:
    """The hash in Megatron-LM's names does not cover the extra token and the partial sample."""
    options: dict[str, Any] = {"index_split": "valid", "num_samples": None, "sequence_length": 7}
    for kind in (
        {"add_extra_token_to_sequence": False},
        {"drop_last_partial_validation_sequence": False},
        {"sequence_length": 8},
        {},
    ):
        shared = gpt(SIDES[0], prefix, tmp_path / "shared", **(options | kind))
        alone = gpt(SIDES[1], prefix, tmp_path / str(kind), **(options | kind))
        oracle.assert_alike(samples_of(shared), samples_of(alone))


def test_options_that_trust_the_cache_name_missing_or_damaged_files(
    prefix: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    options: dict[str, Any] = {
        "blend_per_split": [([str(prefix)], None), None, None],
        "path_to_cache": str(cache),
    }

    def train(side: Any, **more: Any) -> Any:
        return build(side, [20, 0, 0], config(side, **(options | more)))[0]

    error = assert_raises_alike(lambda side: train(side, fast_cache_load=True))
    assert isinstance(error, FileNotFoundError)
    assert "fast_cache_load" in str(error)
    assert_raises_alike(lambda side: train(side, defer_npy_index_mmap=True)[0])
    train(SIDES[0])
    for path in sorted(cache.glob("*.npy")):
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        for option in ("fast_cache_load", "defer_npy_index_mmap"):
            with pytest.raises(DataError, match="do not fit"):
                train(SIDES[0], **{option: True})[0]
        path.write_bytes(content)


def test_a_cache_folder_that_cannot_be_written_works_if_it_has_the_files(
    prefix: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    gpt(SIDES[0], prefix, cache)
    with pytest.MonkeyPatch.context() as patch:
        # Tests may run as root, for whom folders without write permission can be written.
        def refuse(path: Any, *arguments: Any, **named: Any) -> Any:
            raise PermissionError(13, "read-only", path)

        for name in ("makedirs", "mkdir", "rename", "unlink"):
            patch.setattr(os, name, refuse)
        gpt(SIDES[0], prefix, cache)
        with pytest.raises(PermissionError):
            gpt(SIDES[0], prefix, cache, random_seed=8)


@pytest.mark.parametrize("pad", [None, 4])
def test_a_pad_token_of_none_masks_no_token(prefix: Path, tmp_path: Path, pad: Any) -> None:
    class Tokenizer(oracle.Tokenizer):
        @property
        def pad(self) -> Any:
            return pad

    made = [
        gpt(side, prefix, tmp_path / str(number), tokenizer=Tokenizer(pad_id=pad))
        for number, side in enumerate(SIDES)
    ]
    mine = [{key: value.numpy() for key, value in s.items()} for s in samples_of(made[0])]
    oracle.assert_alike(
        mine, [oracle.fresh_sample(made[1], number) for number in range(len(made[1]))]
    )


# ---- processes ----


def first_tokens(dataset: Any) -> Any:
    return None if dataset is None else [dataset[i]["tokens"].tolist() for i in range(9)]


def run_rank(rank: int, prefix: Path, folder: Path, results: Any) -> None:
    """One rank of two: builds a blend and a single dataset with both modules."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    with oracle.captured("millrace.megatron") as lines:
        for on_all in (True, False):
            for mine, side in zip((True, False), SIDES, strict=True):
                found[on_all, mine] = []
                for blend in (([str(prefix), f"{prefix}2"], [3.0, 1.0]), ([str(prefix)], None)):
                    cache = folder / f"cache-{on_all}-{mine}"
                    options = {"blend": blend, "split": "2,1,0", "num_dataset_builder_threads": 2}
                    needs_it = lambda on_all=on_all: rank == 0 or on_all  # noqa: E731
                    what = side.GPTDataset, [30, 9, 0], needs_it, config(side, cache, **options)
                    datasets = side.BlendedMegatronDatasetBuilder(*what).build()
                    found[on_all, mine].append([first_tokens(dataset) for dataset in datasets])
        failure = fail_to_cache(prefix, folder)
    results.put((rank, found, [line for line in lines if line.startswith("Build and")], failure))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def fail_to_cache(prefix: Path, folder: Path) -> tuple[str, str]:
    """The error on this rank if rank 0 cannot write the cache, and its cause."""
    (folder / "file").touch()
    made = config(SIDES[0], folder / "file", blend=([str(prefix)], None))
    error = raised(lambda: build(ours, [5, 0, 0], made))
    return type(error).__name__, type(error.__cause__).__name__


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_ranks_build_one_after_the_other(prefix: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(9)
    oracle.write_sequences(Path(f"{prefix}2"), random.integers(5, 40, 30), random, np.int32, (0, 9))
    ranks = [(rank, prefix, tmp_path) for rank in range(2)]
    answers = {answer[0]: answer[1:] for answer in results_of_processes("fork", run_rank, ranks)}
    for on_all in (True, False):
        for rank in (0, 1):
            found = answers[rank][0][on_all, True]
            assert found == answers[rank][0][on_all, False]
            if rank == 0 or on_all:
                assert [len(split or ()) for blend in found for split in blend] == [9, 9, 0] * 2
            else:
                assert found == [[None] * 3] * 2
        mine, their = (
            {path.name: path.read_bytes() for path in (tmp_path / f"cache-{on_all}-{m}").iterdir()}
            for m in (True, False)
        )
        assert mine == their
    # Rank 0 builds all, twice: four datasets, two blends, and two datasets without a blend.
    assert len(answers[0][1]) == 2 * 8
    assert answers[1][1] == []
    assert answers[0][2] == ("BuildError", "FileExistsError")
    assert answers[1][2][0] == "BuildError"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("context", "cached"), [("fork", False), ("spawn", True)])
def test_workers_of_a_data_loader_read_it(
    prefix: Path, tmp_path: Path, context: str, cached: bool
) -> None:
    made = config(
        SIDES[0],
        tmp_path / "cache",
        blend=([str(prefix), str(prefix)], [1.0, 2.0]),
        path_to_cache=str(tmp_path / "cache") if cached else "",
        reset_attention_mask=True,
        # A class of this module would make the workers import Megatron-LM.
        tokenizer=SimpleNamespace(eod=0, vocab_size=1000, unique_identifiers={"name": "none"}),
    )
    dataset = build(ours, [20, 0, 0], made)[0]
    dataset[0]  # the core's objects are not pickled
    if cached:
        assert len(pickle.dumps(dataset)) < 20_000
    how = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": context}
    loader = torch.utils.data.DataLoader(dataset, **how)
    rows = [row for batch in loader for row in batch["tokens"]]
    for one in (dataset, pickle.loads(pickle.dumps(dataset))):
        oracle.assert_alike(rows, [sample["tokens"] for sample in samples_of(one)])


# ---- where Megatron-LM fails ----


@pytest.mark.parametrize("kind", ["file", "mapped", "samples"])
@pytest.mark.parametrize("change", ["tokens", "lengths"])
def test_a_pickle_refuses_other_data_than_were_pickled(
    kind: str, change: str, tmp_path: Path
) -> None:
    """Megatron-LM's opens the files that are at the path now."""

    def write(first: int, lengths: tuple[int, int]) -> None:
        with millrace.IndexedDatasetBuilder(tmp_path / "data", np.int32) as builder:
            for length in lengths:
                builder.add_document(np.arange(first, first + length))

    write(1, (30, 20))
    made: Any = ours.IndexedDataset(str(tmp_path / "data"), mmap=kind != "file")
    if kind == "samples":
        options = {"sequence_length": 8, "indices": np.arange(2, dtype=np.int32)}
        made = gpt(SIDES[0], tmp_path / "data", tmp_path / "cache", **options)
    pickled = pickle.dumps(made)
    write(1, (30, 20))
    oracle.assert_alike(pickle.loads(pickled)[1], made[1])  # the same content in other files
    write(*((7, (30, 20)) if change == "tokens" else (1, (20, 30))))
    with pytest.raises(errors.DataAssertionError, match="other data than"):
        pickle.loads(pickled)


def test_a_split_without_tokens_is_empty_at_any_length(prefix: Path, tmp_path: Path) -> None:
    """At length 1, with the extra token, Megatron-LM writes before the start of an array."""
    options: dict[str, Any] = {"indices": np.arange(0, dtype=np.int32), "num_samples": None}
    deferred = options | {"defer_npy_index_mmap": True}
    for length in (1, 2):
        for more in (options, deferred):
            dataset = gpt(SIDES[0], prefix, tmp_path, sequence_length=length, **more)
            assert len(dataset) == 0
            with pytest.raises(IndexError):
                dataset[0]
    their = gpt(SIDES[1], prefix, tmp_path, **deferred)  # its deferred length is below 0
    with pytest.raises(ValueError, match="should return >= 0"):
        len(their)


def test_a_cached_blend_needs_no_process_group(prefix: Path, tmp_path: Path) -> None:
    def work(side: Any) -> Any:
        folder = tmp_path / str(side is SIDES[0])
        parts = [gpt(side, prefix, folder) for _ in range(2)]
        return side.BlendedDataset(parts, [1.0, 3.0], 40, config(side, folder))

    blend = work(SIDES[0])
    assert len(blend) == 40
    assert blend[3]["dataset_id"].dtype == np.int16
    with pytest.raises(ValueError, match="process group"):
        work(SIDES[1])


def test_weights_that_are_whole_floats_are_sizes(prefix: Path, tmp_path: Path) -> None:
    def work(side: Any, weights: list[Any]) -> Any:
        parts = [gpt(side, prefix, tmp_path / str(side is SIDES[0])) for _ in range(2)]
        return side.BlendedDataset(parts, weights, None, config(side, path_to_cache=""))

    mine, their = work(SIDES[0], [10.0, 20.0]), work(SIDES[1], [10, 20])
    oracle.assert_alike(mine.dataset_index, their.dataset_index)
    oracle.assert_alike(mine.dataset_sample_index, their.dataset_sample_index)
    with pytest.raises(TypeError):
        work(SIDES[1], [10.0, 20.0])


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_modes_are_kept(tmp_path: Path) -> None:
    with_modes, plain = tmp_path / "modes", tmp_path / "plain"
    builder = ours.IndexedDatasetBuilder(f"{with_modes}.bin", np.uint16, True)
    builder.add_document(np.arange(5), [2, 3])
    builder.finalize(f"{with_modes}.idx")
    dataset = ours.IndexedDataset(str(with_modes), multimodal=True)
    assert dataset.sequence_modes.tolist() == [0, 0]
    with pytest.raises(ValueError, match="ambiguous"):
        _ = oracle.IndexedDataset(str(with_modes), multimodal=True).sequence_modes
    their = oracle.IndexedDatasetBuilder(f"{plain}-theirs.bin", np.uint16, True)
    with pytest.raises(TypeError):
        their.add_document(np.arange(5), [2, 3])
    their.data_file.close()
    merged = ours.IndexedDatasetBuilder(f"{plain}.bin", np.uint16)
    with pytest.raises(ConfigError, match="or neither"):
        merged.add_index(str(with_modes))
    merged._builder.abort()
    with pytest.raises(AssertionError, match="without multimodal"):
        _ = ours.IndexedDataset(str(with_modes)).sequence_modes


def test_arrays_outlive_their_dataset(prefix: Path) -> None:
    expected = millrace.IndexedDataset(prefix)[5].tolist()
    arrays = [ours.IndexedDataset(str(prefix))[5] for _ in range(50)]
    assert all(array.tolist() == expected for array in arrays)


def test_weights_without_a_sum_are_refused_at_once() -> None:
    for split in ("0,0,0", "", "0.0"):
        with pytest.raises(AssertionError, match="not all 0"):
            ours.parse_and_normalize_split(split)
    for weights in ([0.0, 0.0], [1.0, -1.0], [float("inf"), 1.0], [float("nan")]):
        with pytest.raises(AssertionError, match="not all 0"):
            ours.normalize(weights)
    assert ours.normalize(["1", 3]) == [0.25, 0.75]  # words are numbers, as in Megatron-LM


def test_a_builder_keeps_to_its_prefix(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"end in \.bin"):
        ours.IndexedDatasetBuilder(str(tmp_path / "data"))
    builder = ours.IndexedDatasetBuilder(str(tmp_path / "data.bin"))
    with pytest.raises(AssertionError, match=r"data\.idx, not"):
        builder.finalize(str(tmp_path / "other.idx"))
    builder.finalize(str(tmp_path / "data.idx"))


def test_a_damaged_index_is_an_error_in_the_sample(prefix: Path, tmp_path: Path) -> None:
    dataset = gpt(SIDES[0], prefix, tmp_path)
    dataset.document_index = np.full_like(dataset.document_index, 10_000)
    with pytest.raises(DataError, match="points outside"):
        dataset[0]
    with pytest.raises(ConfigError, match="requested"):
        dataset.dataset.get(3, 0, 10_000)
    with pytest.raises(DataError, match="damaged"):
        dataset.dataset.bin_reader.read(np.int32, 10**6, 0)
