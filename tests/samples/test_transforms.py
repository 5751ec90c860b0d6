"""Transforms of samples: fill-in-the-middle, ranges without loss, and the guard against repeats."""

import os
import pickle
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import (
    BlendedDataset,
    ConfigError,
    DataError,
    FillInMiddle,
    GPTDataset,
    IndexedDataset,
    Loader,
    LossRanges,
    RepeatGuard,
    ResumeError,
    TransformedDataset,
    ViewChangeWarning,
    write_loss_ranges,
)
from millrace.samples import TokenBatch
from millrace.samples.fields import BatchForm, SampleOptions
from millrace.store import RawTokens
from tests.conftest import write_documents
from tests.kernels import reference
from tests.store.pairs import output_of

EOD, PREFIX, MIDDLE, SUFFIX = 0, 90_001, 90_002, 90_003
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
FIM: dict[str, Any] = {
    "rate": 0.7,
    "prefix_token": PREFIX,
    "middle_token": MIDDLE,
    "suffix_token": SUFFIX,
    "seed": 5,
}
LENGTHS = (30, 1, 75, 9, 120, 14, 2, 51)
RANGES = [(0, 3, 20), (2, 0, 40), (4, 100, 121)]


def write_numbered(prefix: Path, lengths: Sequence[int] = LENGTHS, first: int = 1) -> str:
    """Writes documents in which each token but EOD is there once: first, first + 1, ..."""
    bounds = np.cumsum([first, *lengths])
    documents = [[*range(start, stop), EOD] for start, stop in pairwise(bounds.tolist())]
    write_documents(prefix, documents, np.int32)
    return str(prefix)


def gpt(prefix: str, access: Any = "mmap", **options: Any) -> GPTDataset:
    everything = {"sequence_length": 24, "seed": 3, "num_samples": 40, "eod_token": EOD} | options
    return GPTDataset(IndexedDataset(prefix, access=access), **everything)


def blend_of(prefixes: Sequence[str], **options: Any) -> BlendedDataset:
    datasets = [gpt(prefix, **options) for prefix in prefixes]
    return BlendedDataset(datasets, [1.0] * len(datasets), 40)


def rows_equal(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], strict=True)


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    prefixes = [write_numbered(folder / "a"), write_numbered(folder / "b", first=1000)]
    for prefix in prefixes:
        write_loss_ranges(prefix, RANGES)
    return prefixes


def slow_flags(dataset: Any, numbers: Any) -> np.ndarray:
    """1 for each token of some samples that is not in RANGES."""
    flags = [np.empty(0, np.uint8)]
    for number in numbers:
        source = dataset
        if isinstance(dataset, BlendedDataset):
            source = dataset.datasets[dataset.dataset_index[number]]
            number = dataset.dataset_sample_index[number]
        ranges = np.array(RANGES, np.int32)
        flags.append(1 - reference.mark_ranges(ranges, *source.spans([number])[:3]))
    return np.concatenate(flags)


# ---- fill-in-the-middle ----


@pytest.mark.parametrize("kind", ["mmap", "file", "blend"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reset_position_ids": True, "eod_mask_loss": True},
        {"add_extra_token": False},
        {"pad_token": 7, "num_samples": None, "drop_last_partial_sequence": False},
    ],
)
def test_a_batch_equals_the_slow_model(two_files: list[str], kind: str, options: dict) -> None:
    dataset: Any
    if kind == "blend":
        dataset = BlendedDataset([gpt(prefix, **options) for prefix in two_files])
    else:
        dataset = gpt(two_files[0], kind, **options)
    fill = FillInMiddle(**FIM, eod_token=EOD, pad_token=options.get("pad_token"))
    guard = RepeatGuard(max_period=2, min_repeats=2)
    numbers = np.arange(len(dataset))
    batch = TransformedDataset(dataset, [LossRanges(dataset), fill, guard]).batch(numbers)

    tokens = dataset.tokens(numbers)
    ends = tokens.ends
    moved, take = reference.fill_in_middle(
        tokens.tokens.astype(np.int64),
        ends,
        numbers,
        spm_rate=0.5,
        eod_token=EOD,
        pad_token=options.get("pad_token"),
        **FIM,
    )
    flags = np.append(slow_flags(dataset, numbers), np.uint8(1))[take]  # inserted: trained on
    flags &= 1 - reference.mark_repeats(moved, ends, 2, 2, False)
    source = dataset.datasets[0] if kind == "blend" else dataset
    rows = dict(zip(FIELDS, reference.fill_rows(moved, ends, source.options), strict=True))
    rows["loss_mask"] = reference.mask_losses(rows["loss_mask"], flags, ends)
    rows_equal(batch, rows)
    assert np.isin([PREFIX, MIDDLE, SUFFIX], batch["tokens"]).all()
    assert 0 < batch["loss_mask"].mean() < 1


def test_a_sample_does_not_depend_on_its_batch(two_files: list[str]) -> None:
    dataset = blend_of(two_files)
    fill = FillInMiddle(**FIM, eod_token=EOD)
    transformed = TransformedDataset(dataset, [LossRanges(dataset), fill])
    whole = transformed.batch(np.arange(40))
    groups = np.split(np.random.default_rng(1).permutation(40), [1, 5, 20])
    with ThreadPoolExecutor(3) as threads:
        for group, batch in zip(groups, threads.map(transformed.batch, groups), strict=True):
            rows_equal(batch, {name: array[group] for name, array in whole.items()})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (FillInMiddle, {"rate": 1.5}, r"rate must be between 0 and 1, not 1.5"),
        (FillInMiddle, {"rate": float("nan")}, r"rate must be between 0 and 1, not nan"),
        (FillInMiddle, {"spm_rate": -0.1}, r"spm_rate must be between 0 and 1, not -0.1"),
        (FillInMiddle, {"middle_token": PREFIX}, "prefix_token and middle_token are both"),
        (
            FillInMiddle,
            {"suffix_token": 0, "eod_token": 0},
            "suffix_token and eod_token are both 0",
        ),
        (FillInMiddle, {"pad_token": MIDDLE}, "middle_token and pad_token are both 90002"),
        (FillInMiddle, {"prefix_token": -1}, "prefix_token must be between 0 and .* not -1"),
        (FillInMiddle, {"prefix_token": 2**63}, "prefix_token .* 0 and .* not 9223372036854775808"),
        (FillInMiddle, {"seed": -1}, "seed must be .* not -1"),
        (RepeatGuard, {"max_period": 0}, "max_period must be between 1 and .* not 0"),
        (RepeatGuard, {"min_repeats": 1}, "min_repeats must be between 2 and .* not 1"),
        (RepeatGuard, {"whole_sample": 1}, "whole_sample must be True or False, not 1"),
    ],
)
def test_wrong_options_are_refused(kind: Any, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**(FIM if kind is FillInMiddle else {}) | options)


# ---- other arrays ----


def form_of(*fields: str, **options: Any) -> BatchForm:
    return BatchForm(fields=fields or FIELDS, **options)


def test_tokens_that_do_not_fit_dtype_or_vocabulary_are_refused(two_files: list[str]) -> None:
    dataset = blend_of(two_files, reset_position_ids=True)
    transformed = TransformedDataset(
        dataset, [LossRanges(dataset), FillInMiddle(**FIM, eod_token=EOD)]
    )
    numbers = np.arange(40)
    with pytest.raises(DataError, match=rf"sample \d+: token id {PREFIX} is outside"):
        transformed.batch(numbers, form_of(vocab_size=PREFIX))
    everything = [FillInMiddle(**(FIM | {"rate": 1, "prefix_token": 2**40}))]
    with pytest.raises(DataError, match=f"token id {2**40} is outside"):
        TransformedDataset(dataset, everything).batch(numbers, form_of(token_dtype="int32"))
    with pytest.raises(ConfigError, match=r"go from 0 to 1099511627776; .* dtype is int32"):
        TransformedDataset(dataset, everything).batch(numbers, form_of(token_dtype="file"))


def test_fields_of_documents(two_files: list[str]) -> None:
    """What only masks leaves them alone; where tokens have moved, EOD tells documents apart."""
    names = ("document_ids", "cu_seqlens", "max_seqlen", "attention_mask")
    numbers = np.arange(40)
    dataset = blend_of(two_files, reset_position_ids=True)
    fields = form_of("tokens", *names, "sample_numbers", "dataset_numbers", "document_numbers")
    masked = TransformedDataset(dataset, [LossRanges(dataset)])
    rows_equal(masked.batch(numbers, fields), dataset.batch(numbers, fields))

    fill = FillInMiddle(**FIM, eod_token=EOD)
    transformed = TransformedDataset(dataset, [fill])
    form = form_of("position_ids", *names, "sample_numbers", "dataset_numbers")
    batch = transformed.batch(numbers, form)
    assert list(batch) == list(form.fields)
    assert np.array_equal(batch["sample_numbers"], numbers)
    assert np.array_equal(batch["dataset_numbers"], dataset.dataset_index[:40])
    starts = np.flatnonzero(batch["position_ids"] == 0)
    assert np.array_equal(batch["cu_seqlens"], [*starts, 40 * 24])
    assert batch["max_seqlen"] == np.diff(batch["cu_seqlens"]).max()
    is_start = batch["position_ids"] == 0
    assert np.array_equal(batch["document_ids"], np.cumsum(is_start, axis=1) - 1)
    ids = batch["document_ids"]
    is_hidden = (ids[:, :, None] != ids[:, None, :]) | ~np.tri(24, dtype=bool)
    assert np.array_equal(batch["attention_mask"][:, 0], is_hidden)

    with pytest.raises(ConfigError, match="document_numbers are not known"):
        transformed.batch(numbers, form_of("tokens", "document_numbers"))
    without_eod = gpt(two_files[0], eod_token=None)
    with pytest.raises(ConfigError, match="give the dataset its eod_token"):
        TransformedDataset(without_eod, [fill]).batch(numbers, form_of("cu_seqlens"))
    alone = BlendedDataset([TransformedDataset(gpt(two_files[0]), [fill]), gpt(two_files[1])])
    batch = alone.batch(range(40), form_of("tokens", "cu_seqlens", token_dtype="file"))
    assert batch["tokens"].dtype == np.int32
    assert set(np.flatnonzero(batch["tokens"].ravel() == EOD) + 1) <= set(batch["cu_seqlens"])


# ---- ranges without loss ----


def losses_by_token(batch: dict) -> dict[int, set[float]]:
    """The losses that each label other than EOD has in a batch."""
    losses: dict[int, set[float]] = {}
    labels, masks = batch["labels"].ravel().tolist(), batch["loss_mask"].ravel().tolist()
    for label, loss in zip(labels, masks, strict=True):
        losses.setdefault(label, set()).add(loss)
    losses.pop(EOD, None)
    return losses


@st.composite
def range_rows(draw: Any) -> list[tuple[int, int, int]]:
    rows = []
    for sequence, length in enumerate(LENGTHS):
        edges = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        rows += [(sequence, *pair) for pair in zip(edges[::2], edges[1::2], strict=False)]
    return rows


@settings(max_examples=40, deadline=None)
@given(range_rows(), st.booleans(), st.booleans())
def test_a_label_in_a_range_has_no_loss(
    two_files: list[str], ranges: list[tuple[int, int, int]], only: bool, fills: bool
) -> None:
    """Also where the tokens have moved: each token carries its flag with it."""
    dataset = gpt(two_files[0])
    transforms: list[Any] = [LossRanges(dataset, ranges, only=only)]
    if fills:
        transforms.append(FillInMiddle(**FIM, eod_token=EOD))
    batch = TransformedDataset(dataset, transforms).batch(range(40))
    starts = np.append(1, 1 + np.cumsum(LENGTHS))
    inside = {
        token
        for sequence, start, stop in ranges
        for token in range(starts[sequence] + start, starts[sequence] + stop)
    }
    for token, losses in losses_by_token(batch).items():
        is_inserted = token > 90_000
        assert losses == {float(is_inserted or (token in inside) == only)}, token


def test_ranges_lie_beside_each_file_of_a_blend(tmp_path: Path) -> None:
    prefixes = [write_numbered(tmp_path / "a"), write_numbered(tmp_path / "b", first=1000)]
    path = write_loss_ranges(prefixes[0], [(0, 0, 30), (4, 5, 6)])
    assert path == prefixes[0] + ".loss.json"
    dataset = BlendedDataset([blend_of(prefixes), gpt(prefixes[1])], [0.6, 0.4], 40)
    with pytest.raises(DataError, match=r"b\.loss\.json is missing.*an empty list trains on all"):
        LossRanges(dataset)
    write_loss_ranges(prefixes[1], [])
    batch = TransformedDataset(dataset, [LossRanges(dataset)]).batch(range(40))
    masked = {token for token, losses in losses_by_token(batch).items() if losses == {0.0}}
    drawn = set(losses_by_token(batch))
    assert masked == (set(range(1, 31)) | {1 + sum(LENGTHS[:4]) + 5}) & drawn
    assert len(masked) > 10
    write_loss_ranges(prefixes[1], [(0, 0, 30)])  # in place of those before
    batch = TransformedDataset(dataset, [LossRanges(dataset)]).batch(range(40))
    assert losses_by_token(batch)[1010] == {0.0}
    with pytest.raises(ConfigError, match="one set of ranges for 2 token files"):
        LossRanges(dataset, [(0, 0, 3)])


def test_datasets_of_a_blend_may_be_transformed_alone(two_files: list[str]) -> None:
    first, second = (gpt(prefix) for prefix in two_files)
    transformed = TransformedDataset(first, [LossRanges(first, [(2, 0, 75)])])
    blend = BlendedDataset([transformed, second], [0.5, 0.5], 40)
    plain = BlendedDataset([first, second], [0.5, 0.5], 40)
    batch, expected = blend.batch(range(40)), plain.batch(range(40))
    assert np.array_equal(batch["tokens"], expected["tokens"])
    assert (batch["loss_mask"].mean(), expected["loss_mask"].mean()) != (1, 1)
    both = TransformedDataset(blend, [ODD_TOKENS_ONLY]).batch(range(40))["loss_mask"]
    assert np.array_equal(both, batch["loss_mask"] * (batch["labels"] % 2))


def test_ranges_at_another_path(tmp_path: Path) -> None:
    prefix = write_numbered(tmp_path / "data")
    write_loss_ranges(prefix, [(0, 2, 4)], path=str(tmp_path / "other" / "masks"))
    assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx", "other"]
    dataset = gpt(prefix)
    ranges = LossRanges(dataset, tmp_path / "other" / "masks")
    in_memory = LossRanges(dataset, np.array([[0, 2, 4]], np.uint16))
    assert ranges.fingerprint() == in_memory.fingerprint()
    with pytest.raises(DataError, match=r"data\.loss\.json is missing"):
        LossRanges(dataset)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 4, 8), (0, 6, 9)], r"range 1, .* = \(0, 6, 9\), does not lie behind .* Sort"),
        ([(0, 4, 8), (0, 4, 8)], "range 1, .* merge those that overlap"),
        ([(0, 6, 8), (0, 2, 5)], r"range 1, .* does not lie behind the one before it. Sort"),
        ([(1, 0, 1), (0, 2, 5)], "range 1, .* does not lie behind"),
        ([(8, 0, 1)], "names no sequence: the token file has 8, 0 to 7"),
        ([(-1, 0, 1)], "names no sequence"),
        ([(2**40, 0, 1)], "names no sequence"),
        ([(0, 0, 32)], r"range 0, .* = \(0, 0, 32\), ends outside its sequence"),
        ([(0, 3, 3)], "is empty or negative"),
        ([(0, -1, 3)], "is empty or negative"),
        ([(0, 0, 2**40)], "ends outside its sequence"),
        ([(0, 0.0, 2.5)], r"are float64 of shape \[1, 3\]; rows of three integers"),
        ([(0, 1)], r"shape \[1, 2\]; rows of three integers"),
        ([0, 1, 2], r"shape \[3\]; rows of three integers"),
        ([(0, 1), (2,)], "rows of three integers"),
    ],
)
def test_wrong_ranges_are_refused(tmp_path: Path, ranges: Any, message: str) -> None:
    prefix = write_numbered(tmp_path / "data")
    for use in (lambda: write_loss_ranges(prefix, ranges), lambda: LossRanges(gpt(prefix), ranges)):
        with pytest.raises(ConfigError, match=message):
            use()
    assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]


def test_ranges_of_other_data_are_refused(tmp_path: Path) -> None:
    prefix = write_numbered(tmp_path / "data")
    other = write_numbered(tmp_path / "other", first=50)
    write_loss_ranges(prefix, [(0, 2, 4)])
    with pytest.raises(DataError, match=r"data\.loss\.json holds ranges of other data"):
        LossRanges(gpt(other), prefix)
    for ending in (".bin", ".idx"):  # by another tool: ours would remove the ranges
        os.replace(other + ending, prefix + ending)
    with pytest.raises(DataError, match=r"data\.loss\.json holds ranges of other data"):
        LossRanges(gpt(prefix))
    write_numbered(tmp_path / "data", first=2)
    assert not os.path.exists(prefix + ".loss.json")


@pytest.mark.parametrize("damage", ["truncated", "changed", "no json", "other json"])
def test_damaged_ranges_are_refused(tmp_path: Path, damage: str) -> None:
    prefix = write_numbered(tmp_path / "data")
    write_loss_ranges(prefix, [(0, 2, 4), (2, 0, 9)])
    array, record = tmp_path / "data.loss-ranges.npy", tmp_path / "data.loss.json"
    if damage == "truncated":
        array.write_bytes(array.read_bytes()[:-4])
    elif damage == "changed":
        array.write_bytes(array.read_bytes()[:-4] + b"\x05\0\0\0")
    elif damage == "no json":
        record.unlink()
    else:
        record.write_text('{"kind": "loss_ranges"}')
    with pytest.raises(DataError, match=r"data\.loss"):
        LossRanges(gpt(prefix))


def test_ranges_that_are_cut_short_in_use_are_an_error(tmp_path: Path) -> None:
    prefix = write_numbered(tmp_path / "data", [2] * 9000)
    write_loss_ranges(prefix, [(sequence, 0, 1) for sequence in range(9000)])
    code = """
import os, sys
from millrace import *
dataset = GPTDataset(IndexedDataset(sys.argv[1]), sequence_length=24, seed=3)
transformed = TransformedDataset(dataset, [LossRanges(dataset)])
transformed.batch(range(100))
os.truncate(sys.argv[1] + ".loss-ranges.npy", 5000)
try:
    for _ in range(1000):
        transformed.batch(range(100))
except DataError as error:
    print("refused:", error)
"""
    message = r"refused:.*data\.loss-ranges\.npy.*(shorter|cut short)"
    assert re.search(message, output_of(code, prefix))


def test_a_pickle_maps_its_ranges_again(two_files: list[str]) -> None:
    dataset = blend_of(two_files)
    transformed = TransformedDataset(dataset, [LossRanges(dataset)])
    pickled = pickle.dumps(transformed)
    rows_equal(pickle.loads(pickled).batch(range(40)), transformed.batch(range(40)))
    code = "print(pickle.loads(eval(sys.argv[1])).batch(range(40))['loss_mask'].sum())"
    total = float(output_of(f"import pickle, sys\n{code}", pickled))
    assert total == transformed.batch(range(40))["loss_mask"].sum()


# ---- the guard against repeats ----


def test_repeats_have_no_loss(tmp_path: Path) -> None:
    document = [*range(10, 20), *[5, 6] * 8, *range(30, 39)]
    write_documents(tmp_path / "data", [document])
    dataset = gpt(str(tmp_path / "data"), num_samples=None, sequence_length=len(document) - 1)
    for guard, expected in (
        (RepeatGuard(max_period=2, min_repeats=8), [1] * 9 + [0] * 16 + [1] * 9),
        (RepeatGuard(max_period=2, min_repeats=8, whole_sample=True), [0] * 34),
        (RepeatGuard(max_period=2, min_repeats=9), [1] * 34),
        (RepeatGuard(max_period=1, min_repeats=2), [1] * 34),
        (RepeatGuard(), [1] * 34),
    ):
        batch = TransformedDataset(dataset, [guard]).batch([0])
        assert batch["loss_mask"][0].tolist() == expected
        assert batch["tokens"][0].tolist() == document[:-1]


# ---- together ----


@dataclass
class Own:
    """A user's transform."""

    function: Callable[[TokenBatch], Any]
    changes_tokens: bool = False

    def __call__(self, batch: TokenBatch, sample_numbers: np.ndarray) -> Any:
        return self.function(batch)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "own"}


ODD_TOKENS_ONLY = Own(lambda batch: (None, batch.untrained(batch.tokens % 2 == 0)))


class Counting:
    """A user's dataset: sample k has the tokens 10 k, 10 k + 1, ..., 10 k + 8."""

    options = SampleOptions(sequence_length=8)

    def __len__(self) -> int:
        return 9

    def tokens(self, sample_numbers: Any) -> TokenBatch:
        tokens = 10 * np.asarray(sample_numbers)[:, None] + np.arange(9)
        return TokenBatch(tokens.reshape(-1), 9 * np.arange(1, len(tokens) + 1))

    def batch(self, sample_numbers: Any) -> dict[str, np.ndarray]:
        rows = self.tokens(sample_numbers).tokens.reshape(-1, 9)
        return {"tokens": rows[:, :-1], "loss_mask": np.ones((len(rows), 8), np.float32)}

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "counting"}


def test_a_dataset_of_ones_own() -> None:
    numbers = np.array([3, 1])
    odd = TransformedDataset(Counting(), [ODD_TOKENS_ONLY]).batch(numbers)
    assert odd["tokens"].tolist() == [[*range(30, 38)], [*range(10, 18)]]
    assert odd["loss_mask"].tolist() == [[1, 0] * 4] * 2
    transforms = [ODD_TOKENS_ONLY, FillInMiddle(**(FIM | {"rate": 1}))]
    filled = TransformedDataset(Counting(), transforms)
    batch = filled.batch(numbers, BatchForm(fields=("labels", "loss_mask"), token_dtype="file"))
    is_known = batch["labels"] < PREFIX
    assert np.array_equal(batch["loss_mask"][is_known], batch["labels"][is_known] % 2)
    assert filled.fingerprint()["transforms"][0]["kind"] == "fill_in_middle"


def test_a_dataset_may_keep_the_batches_that_it_returns() -> None:
    class Keeping(Counting):
        options: Any = None

        def __init__(self) -> None:
            self.kept = super().batch([3, 1])

        def batch(self, sample_numbers: Any) -> dict[str, np.ndarray]:
            return self.kept

    dataset = Keeping()
    nothing = Own(lambda batch: (None, batch.untrained(batch.tokens >= 0)))
    assert not TransformedDataset(dataset, [nothing]).batch([3, 1])["loss_mask"].any()
    assert dataset.batch([3, 1])["loss_mask"].all()


@pytest.mark.parametrize("boundaries", ["eod", "documents"])
@pytest.mark.parametrize("changes_tokens", [False, True])
def test_what_is_known_of_tokens_stays_where_none_has_moved(
    two_files: list[str], boundaries: str, changes_tokens: bool
) -> None:
    """Also if the transform returns nothing but tokens and ends."""
    dataset = gpt(two_files[0], boundaries=boundaries, loss_ranges="apply")
    mark = Own(lambda batch: (None, batch.with_field("own", "token", batch.tokens)))
    known: list[dict[str, Any]] = []
    for take in (None, np.arange(40 * 25)):
        own = Own(lambda batch, take=take: (take, TokenBatch(batch.tokens + 1, batch.ends)))
        own.changes_tokens = changes_tokens
        batch = transform(dataset, mark, own).tokens(range(40))
        known.append({"tokens": batch.tokens, "starts": batch.part_starts})
        known[-1] |= {name: array for name, (_, array) in batch._columns().items()}
    rows_equal(*known)
    assert np.array_equal(known[0]["own"] + 1, known[0]["tokens"])
    assert 0 < known[0]["trained"].mean() < 1


def test_a_text_may_not_outgrow_its_sample(two_files: list[str]) -> None:
    def add_a_token(batch: TokenBatch) -> Any:
        tokens = np.insert(batch.tokens, batch.ends, 5)
        take = np.insert(np.arange(len(batch.tokens)), batch.ends, -1)
        return take, TokenBatch(tokens, batch.ends + np.arange(1, len(batch) + 1))

    longer = TransformedDataset(gpt(two_files[0]), [Own(add_a_token, changes_tokens=True)])
    with pytest.raises(DataError, match=r"a, sample 7: .* does not fit"):
        longer.batch([7, 3])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda batch: None, r"Own returned None; \(take, TokenBatch\) is needed"),
        (lambda batch: (None, batch, 3), r"\(take, TokenBatch\) is needed"),
        (lambda batch: (None, batch.tokens), "a TokenBatch is needed"),
        (lambda batch: (None, batch.select([0])), "1 samples; 2 were asked for"),
        (lambda batch: (None, TokenBatch(batch.tokens, [24, 50])), "changes_tokens be True"),
        (lambda batch: (np.arange(9), batch), "take must have 50 entries"),
    ],
)
def test_what_a_transform_returns_is_checked(
    two_files: list[str], result: Callable[[TokenBatch], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformedDataset(gpt(two_files[0]), [Own(result)]).batch([0, 1])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TokenBatch(np.arange(2), np.array([2])), ConfigError, "1 samples; 2 were"),
        (lambda: (np.arange(2), np.arange(2)), ConfigError, "a TokenBatch is needed"),
        (
            lambda: TokenBatch(np.ones(9, np.int64), np.array([5, 9])),
            DataError,
            r"Wrong, samples \[0, 1\]: sample 0 has 5 tokens",
        ),
    ],
)
def test_what_a_source_returns_is_checked(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    class Wrong(Counting):
        options: Any = None

        def batch(self, sample_numbers: Any) -> dict[str, np.ndarray]:
            return {"loss_mask": np.ones((len(sample_numbers), 3), np.float32)}

        def tokens(self, sample_numbers: Any) -> Any:
            one = TokenBatch(np.ones(2, np.int64), np.array([2]))
            return make() if len(sample_numbers) == 2 else one

    guard = RepeatGuard(max_period=1, min_repeats=2)
    with pytest.raises(error, match=message):
        TransformedDataset(Wrong(), [guard]).batch([0, 1])


FILL = FillInMiddle(**FIM, eod_token=0, pad_token=0)  # which may be one token


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda of, _: transform(of, FILL, len), "transform 1 is .*; give an object"),
        (lambda of, _: TransformedDataset(of, FILL), "transforms is .*; give a list"),
        (lambda of, _: TransformedDataset(of, None), "transforms is .*; give a list"),
        (lambda of, _: transform(of, RepeatGuard), "0 is .*RepeatGuard.*; give an object"),
        (lambda of, _: transform(of, FILL).batch([0], "tokens"), "'tokens'; give a BatchForm"),
        (lambda of, other: transform(other, LossRanges(of, [])), "0, LossRanges, was made for"),
        (lambda of, _: transform(of, FILL, LossRanges(of, [])), r"1, LossRanges, .* put it before"),
        (lambda of, _: transform(transform(of, FILL), RepeatGuard()), "all transforms in one list"),
        (lambda of, _: transform([], FILL), "a list has no method `tokens`"),
        (lambda of, _: LossRanges([]), "a list does not say which tokens"),
        (lambda of, _: LossRanges(raw(of)), "a GPTDataset does not say which tokens"),
        (lambda of, other: transform(BlendedDataset([of, other]), FILL), "same for all samples"),
        (lambda of, _: transform(by_documents(of), FillInMiddle(**FIM)), "give it an eod_token"),
    ],
)
def test_wrong_transforms_are_refused(
    two_files: list[str], use: Callable[[Any, Any], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        use(gpt(two_files[0]), gpt(two_files[1], reset_position_ids=True))


def raw(dataset: GPTDataset) -> GPTDataset:
    """The same tokens without an index."""
    tokens = RawTokens(dataset.prefix + ".bin", np.int32)
    return GPTDataset(tokens, sequence_length=24, order=dataset.order)


def by_documents(dataset: GPTDataset) -> GPTDataset:
    return gpt(dataset.prefix, boundaries="documents", eod_token=None)


def transform(dataset: Any, *transforms: Any) -> Any:
    return TransformedDataset(dataset, transforms)


def test_datasets_of_other_options_may_be_masked(two_files: list[str]) -> None:
    datasets = gpt(two_files[0]), gpt(two_files[1], reset_position_ids=True)
    mixed = BlendedDataset(datasets, [1, 1], 40)
    assert transform(mixed, RepeatGuard()).batch([0, 1])["tokens"].shape == (2, 24)
    with pytest.raises(IndexError):
        transform(datasets[0], FILL).batch([len(datasets[0])])


@pytest.mark.parametrize("kind", ["gpt", "blend"])
def test_a_state_notes_the_transforms(two_files: list[str], kind: str) -> None:
    """Fill-in-the-middle is part of the order; what only masks is part of the view."""
    dataset: Any = gpt(two_files[0]) if kind == "gpt" else blend_of(two_files)

    def loader(*transforms: Any) -> Loader:
        return Loader(TransformedDataset(dataset, transforms), micro_batch_size=4)

    fill, guard = FillInMiddle(**FIM), RepeatGuard()
    state = loader(fill, guard).state_dict()
    loader(fill, guard).load_state_dict(state)
    with pytest.warns(ViewChangeWarning, match=r"view\.transforms"):
        loader(fill).load_state_dict(state)
    with pytest.warns(ViewChangeWarning, match=r"view\.transforms"):
        loader(guard, fill).load_state_dict(state)
    with pytest.raises(ResumeError, match="transforms"):
        loader(guard).load_state_dict(state)
    with pytest.raises(ResumeError, match=r"transforms\[0\].rate: saved 0.7, now 0.2"):
        loader(FillInMiddle(**(FIM | {"rate": 0.2})), guard).load_state_dict(state)
    # Without transforms, it is the dataset itself.
    loader().load_state_dict(Loader(dataset, micro_batch_size=4).state_dict())


def test_names_of_the_dataset_are_handed_on(two_files: list[str]) -> None:
    for dataset in (gpt(two_files[0]), blend_of(two_files)):
        transformed = TransformedDataset(dataset, [RepeatGuard()])
        assert (transformed.prefix, transformed.options) == (dataset.prefix, dataset.options)
        for left, right in zip(transformed.spans([3, 1]), dataset.spans([3, 1]), strict=True):
            assert np.array_equal(left, right)
