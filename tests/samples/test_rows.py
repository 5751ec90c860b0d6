"""The fast path of the core equals the one rule: `rows` of the tokens of the same samples."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import BlendedDataset, ConfigError, GPTDataset, IndexedDataset
from millrace.feed import BatchForm, SampleOptions, TokenBatch
from millrace.samples.fields import ALL_FIELDS
from millrace.samples.rows import rows
from millrace.samples.tokens import concatenate
from tests.conftest import write_documents

LENGTHS = ([5, 0, 40, 13, 1, 100, 17, 9], [30, 3, 3, 3, 60])


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(3)
    for name, lengths in zip("ab", LENGTHS, strict=True):
        write_documents(folder / name, [random.integers(0, 12, n) for n in lengths])
    return [str(folder / name) for name in "ab"]


@st.composite
def views(draw: Any) -> SampleOptions:
    eod = draw(st.sampled_from([None, 0, 5, 200]))
    return SampleOptions(
        sequence_length=draw(st.sampled_from([1, 2, 7, 24])),
        add_extra_token=draw(st.booleans()),
        eod_token=eod,
        pad_token=draw(st.sampled_from([None, 0, 3, -1])),
        reset_position_ids=eod is not None and draw(st.booleans()),
        eod_mask_loss=eod is not None and draw(st.booleans()),
    )


@st.composite
def forms(draw: Any) -> BatchForm:
    return BatchForm(
        fields=tuple(draw(st.lists(st.sampled_from(ALL_FIELDS), min_size=1, unique=True))),
        token_dtype=draw(st.sampled_from(["int64", "int32", "file"])),
        share_labels=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([None, 12])),
    )


def dataset_of(prefixes: list[str], kind: str, options: SampleOptions, access: Any) -> Any:
    order: Any = {"seed": 1, "drop_last_partial_sequence": False}
    parts = [
        GPTDataset(IndexedDataset(prefix, access=access), options=options, **order)
        for prefix in prefixes
    ]
    if kind == "file":
        return parts[0]
    blend = BlendedDataset(parts)
    return blend if kind == "blend" else BlendedDataset([blend, parts[1]])


def with_documents(dataset: Any, numbers: Any) -> TokenBatch:
    """The tokens of samples, and the document of each part."""
    batch = dataset.tokens(numbers)
    sources = batch.part_source
    sources = np.zeros(len(batch.part_starts), np.int32) if sources is None else sources
    documents = [
        dataset.stores[source].store.documents_of(np.array([sequence]))[0]
        for source, sequence in zip(sources, batch.part_sequence, strict=True)
    ]
    return batch.with_field("document_numbers", "part", np.array(documents, np.int64))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["file", "blend", "blend of blends"]),
    options=views(),
    form=st.none() | forms(),
    seed=st.integers(0, 1000),
)
def test_the_core_equals_the_rows_of_the_tokens(
    prefixes: list[str], kind: str, options: SampleOptions, form: BatchForm | None, seed: int
) -> None:
    dataset = dataset_of(prefixes, kind, options, "mmap")
    numbers = np.random.default_rng(seed).integers(0, len(dataset), seed % 9)
    actual = dataset.batch(numbers, form)
    expected = rows(with_documents(dataset, numbers), options, form)
    by_file = dataset_of(prefixes, kind, options, "file").batch(numbers, form)
    assert list(actual) == list(expected)
    for name, array in actual.items():
        np.testing.assert_array_equal(array, expected[name], strict=True)
        np.testing.assert_array_equal(by_file[name], array, strict=True)


# ---- bounds of documents ----


def slow_rows(samples: list[list[list[int]]], length: int, has_extra: bool) -> dict[str, Any]:
    """The rows of samples of parts, token by token."""
    out: dict[str, list[Any]] = {name: [] for name in ("tokens", "labels", "loss_mask", "ids")}
    for parts in samples:
        pairs = [(token, place) for place, part in enumerate(parts) for token in part]
        pairs += [(0, -1)] * (length + 1 - len(pairs))
        positions, start = [], 0
        for k in range(length):
            start = k if k > 0 and pairs[k][1] != pairs[k - 1][1] else start
            positions.append(k - start)
        is_label = [
            pairs[k][1] == pairs[k + 1][1] >= 0 and (has_extra or k + 1 < length)
            for k in range(length)
        ]
        out["tokens"].append([token for token, _ in pairs[:length]])
        out["labels"].append([pairs[k + 1][0] if is_label[k] else 0 for k in range(length)])
        out["loss_mask"].append([float(one) for one in is_label])
        out["ids"].append(positions)
    return out


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 5), max_size=3), max_size=4),
    has_extra=st.booleans(),
    share_labels=st.booleans(),
)
def test_documents_are_told_apart_by_the_parts(
    lengths: list[list[int]], has_extra: bool, share_labels: bool
) -> None:
    length = 15 - has_extra
    samples = [[[1 + n % 3] * n for n in sample] for sample in lengths]
    flat = [part for sample in samples for part in sample]
    batch = TokenBatch(
        np.array([token for part in flat for token in part], np.int64),
        np.cumsum([sum(sample) for sample in lengths], dtype=np.int64),
        part_starts=np.cumsum([0, *map(len, flat)])[:-1],
    )
    options = SampleOptions(
        sequence_length=length, add_extra_token=has_extra, eod_token=2, boundaries="documents"
    )
    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "document_ids")
    arrays = rows(batch, options, BatchForm(fields=names, share_labels=share_labels))
    expected = slow_rows(samples, length, has_extra)
    for name in ("tokens", "labels", "loss_mask"):
        assert arrays[name].tolist() == expected[name], name
    assert arrays["position_ids"].tolist() == expected["ids"]
    starts = np.flatnonzero(arrays["position_ids"].reshape(-1) == 0)
    assert arrays["cu_seqlens"].tolist() == [*starts, len(samples) * length]
    ids = np.cumsum(arrays["position_ids"] == 0, axis=1) - 1
    assert np.array_equal(arrays["document_ids"], ids)
    for name, array in rows(batch, options).items():
        assert np.array_equal(array, arrays[name])


def test_boundaries_belong_to_the_view_and_stay_out_of_fingerprints_by_default(
    prefixes: list[str],
) -> None:
    data = IndexedDataset(prefixes[0])
    plain = GPTDataset(data, sequence_length=8, seed=1).fingerprint()
    packed = GPTDataset(data, sequence_length=8, seed=1, boundaries="documents").fingerprint()
    assert "boundaries" not in plain["view"]
    assert packed["view"].pop("boundaries") == "documents"
    assert packed == plain
    for wrong in ({"boundaries": "lines"}, {"eod_token": 0, "eod_mask_loss": True}):
        with pytest.raises(ConfigError, match="boundaries"):
            SampleOptions(sequence_length=8, **({"boundaries": "documents"} | wrong))


# ---- token batches ----


def a_batch() -> TokenBatch:
    """Samples of 3, 0 and 4 tokens, of parts of 2, 1 and 4."""
    return TokenBatch(
        np.arange(10, 17, dtype=np.uint16),
        np.array([3, 3, 7]),
        trained=np.array([1, 0, 1, 1, 0, 1, 1], bool),
        part_starts=np.array([0, 2, 3]),
        part_sequence=np.array([4, 9, 2]),
        fields={
            "weights": ("token", np.arange(7) / 2),
            "sides": ("part", np.array([7, 8, 9])),
            "names": ("sample", np.array(["a", "b", "c"])),
        },
    )


def test_samples_are_selected_and_joined() -> None:
    batch = a_batch()
    one = batch.select(np.array([2, 1, 0, 2]))
    assert one.tokens.tolist() == [13, 14, 15, 16, 10, 11, 12, 13, 14, 15, 16]
    assert one.ends.tolist() == [4, 4, 7, 11]
    assert one.part_starts is not None
    assert one.part_starts.tolist() == [0, 4, 6, 7]
    assert one.fields["sides"][1].tolist() == [9, 7, 8, 9]
    assert one.fields["names"][1].tolist() == ["c", "b", "a", "c"]
    joined = concatenate([batch, replace(one, trained=None, fields={})]).select(np.arange(3))
    for name in ("tokens", "ends", "trained", "part_starts", "part_sequence"):
        assert np.array_equal(getattr(joined, name), getattr(batch, name)), name
    assert joined.fields == {}


def test_all_that_is_known_of_a_token_follows_it() -> None:
    take = np.array([2, -1, 0, 1, 6, 5, -1])
    moved = a_batch().moved(take, TokenBatch(np.arange(7), np.array([4, 4, 7])))
    assert moved.trained is not None
    assert moved.trained.tolist() == [True, True, True, False, True, True, True]
    assert moved.fields["weights"][1].tolist() == [1, 0, 0, 0.5, 3, 2.5, 0]
    assert moved.part_starts is not None
    assert moved.part_starts.tolist() == [0, 1, 4]
    assert moved.part_sequence is not None
    assert moved.part_sequence.tolist() == [9, 4, 2]
    assert moved.fields["sides"][1].tolist() == [8, 7, 9]
    assert moved.fields["names"][1].tolist() == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="between -1 and 6"):
        a_batch().moved(np.full(7, 7), TokenBatch(np.arange(7), np.array([4, 4, 7])))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": np.ones(7)}, "tokens .* float64"),
        ({"ends": np.array([3, 2, 7])}, r"ends are \[3, 2, 7\]"),
        ({"trained": np.ones(6, bool)}, r"trained .* \[7\]"),
        ({"part_starts": np.array([0, 2, 2])}, r"part_starts are \[0, 2, 2\]"),
        ({"part_starts": np.array([0, 2, 4])}, r"start with each sample: at \[0, 3\]"),
        ({"part_sequence": np.arange(4)}, r"part_sequence .* \[3\]"),
        ({"fields": {"weights": ("token", np.arange(6))}}, "'weights' has 6 .* 7"),
        ({"fields": {"weights": ("row", np.arange(7))}}, "'weights' .* not 'row'"),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(a_batch(), **wrong)


@pytest.mark.parametrize("boundaries", ["eod", "documents"])
def test_a_source_of_ones_own_may_lack_parts(boundaries: str) -> None:
    tokens = TokenBatch(np.array([5, 0, 6, 7] * 2), np.array([4, 8]))
    form = BatchForm(fields=("cu_seqlens",))
    options = SampleOptions(sequence_length=4, boundaries=boundaries)
    with pytest.raises(ConfigError, match="parts of the samples are not known"):
        rows(tokens, options, form)
    if boundaries == "eod":
        by_eod = rows(tokens, replace(options, eod_token=0), form)
        assert by_eod["cu_seqlens"].tolist() == [0, 2, 4, 6, 8]
