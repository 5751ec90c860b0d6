"""The arrays of a batch: only those that are asked for, in the dtype that is asked for."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace import (
    BlendedDataset,
    ConfigError,
    DataError,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
)
from millrace.feed import BatchForm
from millrace.order import Spans
from millrace.samples.fields import ALL_FIELDS, FIELDS
from tests.conftest import write_documents

Make = Callable[..., IndexedDataset]


@dataclass(frozen=True)
class Runs:
    """An order in Python: sample k has `count` tokens of sequence k and of k + 1."""

    num_sequences: int
    count: int

    def __len__(self) -> int:
        return self.num_sequences - 1

    def spans(self, sample_numbers: NDArray[np.int64]) -> Spans:
        sequences = np.stack([sample_numbers, sample_numbers + 1], axis=1).reshape(-1)
        bounds = 2 * np.arange(len(sample_numbers) + 1)
        return Spans(
            sequences, np.zeros_like(sequences), np.full_like(sequences, self.count), bounds
        )

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "runs"}


def make_datasets(make_dataset: Make, **options: Any) -> dict[str, GPTDataset | BlendedDataset]:
    """One dataset of each kind: mapped, read by file, an order in Python, blends of these."""
    data = make_dataset([5, 0, 40, 13, 1, 100, 17, 9])
    files = IndexedDataset(data.prefix, access="file")
    options = {"sequence_length": 8, **options}
    mapped = GPTDataset(data, seed=1, num_samples=60, **options)
    partial = GPTDataset(data, seed=1, drop_last_partial_sequence=False, **options)
    by_file = GPTDataset(files, seed=2, drop_last_partial_sequence=False, **options)
    long = make_dataset([9] * 20, name="long")
    in_python = GPTDataset(long, order=Runs(20, max(options["sequence_length"] // 2, 1)), **options)
    core_blend = BlendedDataset([mapped, partial])
    return {
        "mapped": mapped,
        "partial": partial,
        "file": by_file,
        "order in Python": in_python,
        "blend of the core": core_blend,
        "blend": BlendedDataset([mapped, by_file, in_python, core_blend]),
    }


KINDS = ("mapped", "partial", "file", "order in Python", "blend of the core", "blend")


def assert_rows(dataset: Any, numbers: NDArray[np.int64], form: BatchForm) -> dict[str, Any]:
    """Compares FIELDS of a batch with those of a batch without a form."""
    expected = dataset.batch(numbers)
    batch: dict[str, Any] = dataset.batch(numbers, form)
    assert tuple(batch) == form.fields
    for name, array in batch.items():
        if name in FIELDS:
            dtype = form.token_dtype if name in ("tokens", "labels") else array.dtype
            np.testing.assert_array_equal(array, expected[name].astype(dtype), strict=True)
    return batch


# ---- rows ----


@pytest.mark.parametrize("share_labels", [False, True])
def test_labels_are_views_where_the_caller_allows_it(
    make_dataset: Make, share_labels: bool
) -> None:
    dataset = make_datasets(make_dataset)["mapped"]
    form = BatchForm(fields=("tokens", "labels"), share_labels=share_labels)
    batch = dataset.batch([0, 1, 2], form)
    assert np.shares_memory(batch["tokens"], batch["labels"]) == share_labels
    batch["tokens"][0, 5] = 12345
    assert (batch["labels"][0, 4] == 12345) == share_labels


# ---- where the tokens come from ----


def parts_of(dataset: Any, number: int) -> list[tuple[int, int]]:
    """The (length, document) of each part of a sample, counted token by token."""
    if isinstance(dataset, BlendedDataset):
        inner = dataset.datasets[dataset.dataset_index[number]]
        return parts_of(inner, int(dataset.dataset_sample_index[number]))
    spans, options = dataset.spans([number]), dataset.options
    data = dataset.dataset
    documents = np.repeat(np.arange(data.num_documents), np.diff(data.document_indices))
    tokens = [
        (place, int(documents[sequence]))
        for place, (sequence, count) in enumerate(zip(spans.sequences, spans.counts, strict=True))
        for _ in range(count)
    ]
    if options.add_extra_token and len(tokens) > 1:
        tokens = tokens[:-1]
    tokens = tokens or [(0, -1)]
    tokens += [tokens[-1]] * (options.sequence_length - len(tokens))
    tokens = tokens[: options.sequence_length]
    return [
        (sum(one == part for one, _ in tokens), document) for part, document in sorted(set(tokens))
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("view", [{}, {"add_extra_token": False}, {"sequence_length": 1}])
def test_documents_are_the_parts_of_samples(
    make_dataset: Make, kind: str, view: dict[str, Any]
) -> None:
    dataset = make_datasets(make_dataset, **view)[kind]
    length = view.get("sequence_length", 8)
    form = BatchForm(fields=ALL_FIELDS)
    for numbers in (np.arange(len(dataset)), np.arange(len(dataset))[::-3], np.arange(0)):
        batch = assert_rows(dataset, numbers, form)
        assert {name: array.dtype for name, array in batch.items() if name not in FIELDS} == {
            "sample_numbers": np.int64,
            "dataset_numbers": np.int64,
            "document_ids": np.int32,
            "cu_seqlens": np.int32,
            "max_seqlen": np.int32,
            "attention_mask": np.bool_,
            "document_numbers": np.int64,
            "document_bounds": np.int64,
        }
        assert np.array_equal(batch["sample_numbers"], numbers)
        is_blend = isinstance(dataset, BlendedDataset)
        datasets = dataset.dataset_index[numbers] if is_blend else 0 * numbers
        assert np.array_equal(batch["dataset_numbers"], datasets)
        parts = [parts_of(dataset, number) for number in numbers.tolist()]
        lengths = [length for sample in parts for length, _ in sample]
        assert batch["cu_seqlens"].tolist() == np.cumsum([0, *lengths]).tolist()
        assert batch["max_seqlen"].shape == ()
        assert batch["max_seqlen"] == max(lengths, default=0)
        assert batch["document_numbers"].tolist() == [d for sample in parts for _, d in sample]
        assert batch["document_bounds"].tolist() == np.cumsum([0, *map(len, parts)]).tolist()
        assert batch["document_ids"].shape == (len(numbers), length)
        assert batch["attention_mask"].shape == (len(numbers), 1, length, length)
        for row, sample in enumerate(parts):
            ids = [part for part, (count, _) in enumerate(sample) for _ in range(count)]
            assert batch["document_ids"][row].tolist() == ids
            for i in range(length):
                for j in range(length):
                    is_masked = j > i or ids[i] != ids[j]
                    assert batch["attention_mask"][row, 0, i, j] == is_masked
        for name in form.fields:  # each alone
            alone = dataset.batch(numbers, BatchForm(fields=(name,)))
            np.testing.assert_array_equal(alone[name], batch[name], strict=True)


def test_samples_of_an_order_may_have_empty_spans(make_dataset: Make) -> None:
    @dataclass(frozen=True)
    class Gaps(Runs):
        def spans(self, sample_numbers: NDArray[np.int64]) -> Spans:
            """0, 3, 0 and 2 tokens; nothing; 0 tokens."""
            spans = Spans(
                np.array([4, 1, 2, 3, 5]),
                np.zeros(5, np.int64),
                np.array([0, 3, 0, 2, 0]),
                np.array([0, 4, 4, 5]),
            )
            assert sample_numbers.tolist() == [0, 1, 2]
            return spans

    class Flat(Runs):
        def spans(self, sample_numbers: NDArray[np.int64]) -> Spans:
            return super().spans(sample_numbers)._replace(sequences=None)

    options: dict[str, Any] = {"sequence_length": 8, "boundaries": "documents"}
    with pytest.raises(ConfigError, match=r"documents are not known: .* return spans of sequences"):
        GPTDataset(make_dataset([9] * 20), order=Flat(20, 4), **options).batch([0])
    dataset = GPTDataset(make_dataset([9] * 20), sequence_length=8, order=Gaps(20, 4))
    batch = dataset.batch([0, 1, 2], BatchForm(fields=("document_ids", "document_numbers")))
    assert batch["document_ids"].tolist() == [[0] * 3 + [1] * 5, [0] * 8, [0] * 8]
    assert batch["document_numbers"].tolist() == [1, 3, -1, -1]


def test_a_sequence_belongs_to_its_document(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_document(np.arange(6), lengths=[2, 0, 4])
        builder.add_document([])
        builder.add_document(np.arange(8), lengths=[5, 3])
    data = IndexedDataset(tmp_path / "data")
    dataset = GPTDataset(data, sequence_length=13, seed=1)
    batch = dataset.batch([0], BatchForm(fields=("document_numbers",)))
    assert sorted(batch["document_numbers"].tolist()) in ([0, 0, 2, 2], [0, 2, 2], [0, 0, 2])
    spans = dataset.spans([0])
    ends = data.document_indices[1:]
    documents = [int(np.argmax(ends > sequence)) for sequence in spans.sequences]
    assert batch["document_numbers"].tolist() == documents[: len(batch["document_numbers"])]


# ---- datasets that know no forms ----


@dataclass(frozen=True)
class Squares:
    """A dataset without a token file, whose samples have the token number * number."""

    dtype: Any = np.int64
    extra: tuple[str, ...] = ()

    def __len__(self) -> int:
        return 50

    def batch(self, sample_numbers: Any) -> dict[str, NDArray[Any]]:
        numbers = np.asarray(sample_numbers, np.int64)[:, None]
        tokens = np.repeat(numbers * numbers, 8, axis=1)
        mask = np.ones(tokens.shape, np.float32)
        batch = {"tokens": tokens, "labels": tokens, "loss_mask": mask, "position_ids": tokens}
        return batch | dict.fromkeys(self.extra, tokens)

    def fingerprint(self) -> dict[str, Any]:
        return {}


def test_a_blend_picks_the_fields_of_other_datasets(make_dataset: Make) -> None:
    gpt = make_datasets(make_dataset)["mapped"]
    blend = BlendedDataset([gpt, Squares()])
    numbers = np.arange(len(blend))
    for token_dtype in ("int64", "int32"):
        fields = ("labels", "tokens", "loss_mask", "dataset_numbers", "sample_numbers")
        form = BatchForm(fields=fields, token_dtype=token_dtype, vocab_size=2500)
        batch = assert_rows(blend, numbers, form)
        assert np.array_equal(batch["dataset_numbers"], blend.dataset_index)
    with pytest.raises(ConfigError, match=r"Squares returns tokens, .*it has no document_ids"):
        blend.batch(numbers, BatchForm(fields=("tokens", "document_ids")))
    with pytest.raises(ConfigError, match=r"Squares returns finished rows, .* cu_seqlens"):
        blend.batch(numbers, BatchForm(fields=("tokens", "cu_seqlens")))
    with pytest.raises(DataError, match=r"BlendedDataset, sample \d+: Squares .* 2401,.*2401\)"):
        blend.batch(numbers, BatchForm(vocab_size=2401))


def test_tokens_of_other_datasets_are_checked() -> None:
    @dataclass(frozen=True)
    class Shifted(Squares):
        def batch(self, sample_numbers: Any) -> dict[str, NDArray[Any]]:
            batch = super().batch(sample_numbers)
            return batch | {"tokens": (batch["tokens"] + 2**31).astype(self.dtype)}

    form = BatchForm(token_dtype="int32", vocab_size=2**40)
    with pytest.raises(DataError, match=r"token id 2147483648, .* outside \[0, 2147483648\)"):
        BlendedDataset([Shifted()]).batch([0], form)
    with pytest.raises(DataError, match="Shifted returned tokens as float64; integers are needed"):
        BlendedDataset([Shifted(np.float64)]).batch([0], BatchForm())


# ---- errors ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": ("tokens", 3)}, "fields is .* give different names"),
        ({"fields": ("tokens", "labels", "tokens")}, "fields is .* give different names"),
        ({"fields": ()}, r"fields is \(\); give different names"),
        ({"fields": "tokens"}, "give different names"),
        ({"token_dtype": "uint16"}, "must be one of int64, int32, file"),
        ({"share_labels": 1}, "share_labels must be True or False, not 1"),
        ({"vocab_size": 0}, "vocab_size must be between 1 and .* not 0"),
        ({"vocab_size": 2**63}, "vocab_size must be between 1 and .* not 9223372036854775808"),
    ],
)
def test_a_form_outside_its_limits_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchForm(**options)


@pytest.mark.parametrize("kind", ["mapped", "file", "blend"])
def test_what_is_not_a_form_or_a_field_is_refused(make_dataset: Make, kind: str) -> None:
    dataset = make_datasets(make_dataset)[kind]
    for form in (FIELDS, "tokens", {"fields": FIELDS}, 5):
        with pytest.raises(ConfigError, match="give a BatchForm"):
            dataset.batch([0], form)  # type: ignore[arg-type]
    message = "no field 'token'; there are tokens, labels, .*document"
    with pytest.raises(ConfigError, match=message):
        dataset.batch([0, 1], BatchForm(fields=("tokens", "token")))


def test_a_form_is_a_plain_value() -> None:
    form = BatchForm(fields=["tokens", "document_numbers"], vocab_size=np.int32(5))  # type: ignore[arg-type]
    assert form.fields == ("tokens", "document_numbers", "document_bounds")
    assert form == pickle.loads(pickle.dumps(form))
    assert hash(form) == hash(pickle.loads(pickle.dumps(form)))


def test_file_dtypes_that_differ_are_refused(make_dataset: Make) -> None:
    narrow = GPTDataset(make_dataset([90], name="narrow"), sequence_length=8, seed=1)
    wide = GPTDataset(make_dataset([90], name="wide", dtype=np.int32), sequence_length=8, seed=1)
    inner = BlendedDataset([wide, wide])
    for datasets in ([narrow, wide], [narrow, inner]):
        blend = BlendedDataset(datasets)
        form = BatchForm(token_dtype="file")
        for numbers in ([], [0], [0, 1, 2, 3]):
            with pytest.raises(ConfigError, match=r"several dtypes .*narrow uint16, .* int32"):
                blend.batch(numbers, form)
        assert blend.batch([0, 1], BatchForm(token_dtype="int32"))["tokens"].dtype == np.int32
    assert inner.batch([0], BatchForm(token_dtype="file"))["tokens"].dtype == np.int32


@pytest.mark.parametrize("has_other_boundaries", [False, True])
def test_a_blend_of_several_options_makes_the_rows_of_each(
    make_dataset: Make, has_other_boundaries: bool
) -> None:
    data = make_dataset([90])
    views: list[dict[str, Any]] = [{}, {"eod_token": 3, "eod_mask_loss": True}, {"pad_token": 5}]
    views += [{"boundaries": "documents"}] * has_other_boundaries
    parts = [GPTDataset(data, sequence_length=8, seed=1, **view) for view in views]
    blend = BlendedDataset(parts)
    numbers = np.random.default_rng(0).permutation(len(blend))
    sources, in_source = blend.dataset_index[numbers], blend.dataset_sample_index[numbers]
    fields = (*FIELDS, "sample_numbers", "dataset_numbers")
    batch = blend.batch(numbers, BatchForm(fields=fields))
    np.testing.assert_array_equal(batch["sample_numbers"], numbers)
    np.testing.assert_array_equal(batch["dataset_numbers"], sources)
    for number, part in enumerate(parts):
        for name, array in part.batch(in_source[sources == number]).items():
            np.testing.assert_array_equal(batch[name][sources == number], array)
    with pytest.raises(ConfigError, match=r"options differ, .* cannot make cu_seqlens"):
        blend.batch(numbers[:1], BatchForm(fields=("tokens", "cu_seqlens")))


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_a_token_id_that_does_not_fit_is_named(tmp_path: Path, access: Any) -> None:
    documents = [np.arange(9) for _ in range(10)]
    documents[7][3] = 2**31
    write_documents(tmp_path / "data", documents, np.int64)
    data = IndexedDataset(tmp_path / "data", access=access)
    dataset = GPTDataset(data, sequence_length=8, seed=1)
    spans = dataset.spans(np.arange(len(dataset)))
    bad = [
        number
        for number in range(len(dataset))
        for row in range(*spans.bounds[number : number + 2].tolist())
        if spans.sequences[row] == 7 and 0 <= 3 - spans.offsets[row] < spans.counts[row]
    ]
    first, stop = spans.bounds[bad[0] : bad[0] + 2]
    row = first + int(np.argmax(spans.sequences[first:stop] == 7))
    at = spans.counts[first:row].sum() + 3 - spans.offsets[row]
    blend = BlendedDataset([dataset])
    for form in (
        BatchForm(token_dtype="int32", fields=("labels",)),
        BatchForm(token_dtype="int64", fields=("tokens",), vocab_size=2**31),
    ):
        place = rf"data, sample {bad[0]}: token id {2**31} is outside \[.*, {2**31}\): it is token"
        with pytest.raises(DataError, match=place) as caught:
            dataset.batch(np.arange(len(dataset)), form)
        where = f"token 3 of sequence 7 and token {at} of"
        assert (where in str(caught.value)) == (access == "mmap")
        order = np.random.default_rng(0).permutation(len(blend))
        first = next(n for n in order if blend.dataset_sample_index[n] in bad)
        inner = blend.dataset_sample_index[first]
        place = rf"BlendedDataset, sample {first}: .*, sample {inner}: tok"
        with pytest.raises(DataError, match=place):
            blend.batch(order, form)
    big = BatchForm(vocab_size=2**31 + 1)
    assert dataset.batch(bad, big)["tokens"].max() == 2**31


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_a_damaged_index_is_named_by_file_and_sample(make_dataset: Make, access: Any) -> None:
    prefix = make_dataset([50, 60, 70]).prefix
    with open(f"{prefix}.idx", "r+b") as file:  # the pointer of sequence 1
        file.seek(34 + 3 * 4 + 8)
        file.write(b"\xff\xff\xff\x00")
    dataset = GPTDataset(IndexedDataset(prefix, access=access), sequence_length=8, seed=0)
    spans = dataset.spans(np.arange(len(dataset)))
    bad = np.flatnonzero(
        [1 in spans.sequences[slice(*spans.bounds[n : n + 2])] for n in range(len(dataset))]
    )
    good = np.setdiff1d(np.arange(len(dataset)), bad)
    place = rf"data, sample {bad[2]}: an index points outside its data: sequence 1 starts"
    numbers = [*good[:3], bad[2], *bad]
    for read in (dataset.batch, dataset.tokens):
        with pytest.raises(DataError, match=place):
            read(numbers)
    blend = BlendedDataset([dataset, dataset], [1, 1], len(dataset))
    for read in (blend.batch, blend.tokens):
        with pytest.raises(DataError, match=r"BlendedDataset, sample \d+: .*data, sample \d+: an"):
            read(np.arange(len(blend)))


def test_a_reader_that_fails_is_named_by_file_and_sample(make_dataset: Make) -> None:
    class Failing:
        def __init__(self, reader: Any) -> None:
            self.reader, self.size, self.is_broken = reader, reader.size, False

        def read(self, byte_offset: int, num_bytes: int) -> NDArray[np.uint8]:
            return self.gather(np.array([byte_offset]), np.array([num_bytes]))

        def gather(self, offsets: NDArray[np.int64], counts: NDArray[np.int64]) -> Any:
            if self.is_broken and np.any(offsets + counts > 120):
                raise OSError(5, "Input/output error")
            return self.reader.gather(offsets, counts)

    reader = Failing(make_dataset([100]).reader)
    data = IndexedDataset(make_dataset([100]).prefix, bin_reader=reader)
    dataset = GPTDataset(data, sequence_length=8, seed=1)
    starts = dataset.spans(np.arange(len(dataset))).offsets
    reader.is_broken = True
    ok, bad = np.flatnonzero(starts + 9 <= 60), np.flatnonzero(starts + 9 > 60)
    assert len(dataset.batch(ok)["tokens"]) == len(ok)
    with pytest.raises(OSError, match=f"data, sample {bad[0]}: Input/output error") as caught:
        dataset.batch([*ok, *bad])
    assert caught.value.errno == 5


# ---- tokens ----


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_without_padding(make_dataset: Make, kind: str) -> None:
    dataset = make_datasets(make_dataset)[kind]
    numbers = np.random.default_rng(0).integers(0, len(dataset), 30)
    batch = dataset.batch(numbers)
    tokens = dataset.tokens(numbers)
    assert (tokens.tokens.dtype, tokens.ends.dtype) == (np.uint16, np.int64)
    assert len(tokens) == 30
    for row, sample in enumerate(np.split(tokens.tokens, tokens.ends[:-1])):
        assert len(sample) == 1 + batch["loss_mask"][row].sum()
        assert np.array_equal(sample[:8], batch["tokens"][row])
        assert np.array_equal(sample[1:], batch["labels"][row][: len(sample) - 1])
    assert len(dataset.tokens([])) == len(dataset.tokens([]).tokens) == 0
    with pytest.raises(IndexError):
        dataset.tokens([len(dataset)])


def test_a_dataset_without_tokens_is_named(make_dataset: Make) -> None:
    gpt = GPTDataset(make_dataset([300]), sequence_length=8, seed=1)
    with pytest.raises(ConfigError, match="Squares has no method `tokens`"):
        BlendedDataset([gpt, Squares()]).tokens(np.arange(20))
