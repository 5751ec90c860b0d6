"""Pairs with a mask: who writes them, and that nobody loses the mask silently."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import (
    ConfigError,
    DataError,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    build_datasets,
    megatron,
    write_loss_ranges,
)
from millrace.cache.loss_files import joined_ranges
from millrace.jobs import convert, merge, shuffle, split
from millrace.run.arguments import config_from
from millrace.tokenizing import TokenizeResult, tokenize
from tests.jobs.kills import deaths_of, finished_tasks
from tests.online.encoders import BYTES, Marked, write_rows
from tests.store.test_faults import size_limit


def run_job(path: Path, letter: str = "m", **options: Any) -> TokenizeResult:
    """Tokenizes beside the file of rows, to `out_text_document`."""
    own: Any = {"row_encoder": Marked(letter), "workers": 1, **options}
    return tokenize([path], path.parent / "out", BYTES.tokenizer, **own)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "a.jsonl", [{"text": f"mill race {n}"} for n in range(9)])


@pytest.fixture
def pair(path: Path) -> Path:
    return Path(run_job(path).prefixes["text"])


def samples(prefix: Path, loss_ranges: str = "refuse") -> GPTDataset:
    options: Any = {"sequence_length": 6, "seed": 1, "add_extra_token": False}
    return GPTDataset(IndexedDataset(prefix), loss_ranges=loss_ranges, **options)


def assert_refused(prefix: Path) -> None:
    with pytest.raises(ConfigError, match=r'info\.json says .* loss_ranges="apply".*"ignore"'):
        samples(prefix)


def assert_mask_is_missing(prefix: Path) -> None:
    assert_refused(prefix)
    with pytest.raises(DataError, match=r"loss\.json is missing.*write it again"):
        samples(prefix, "apply")


def assert_mask_is(prefix: Path, letter: str) -> None:
    assert_refused(prefix)
    batch = samples(prefix, "apply").batch(range(5))
    expected = batch["labels"] < ord(letter)
    expected[:, -1] = False  # there is no label
    assert (batch["loss_mask"] == expected).all()
    assert samples(prefix, "ignore").batch(range(5))["loss_mask"][:, :-1].all()


# ---- who trains on such a pair ----


@pytest.mark.parametrize("order", [{}, {"order": "millrace.order:PackPlan"}])
def test_a_run_says_what_becomes_of_masks(order: Any, pair: Path) -> None:
    def build(loss_ranges: str) -> Any:
        arguments = {"train_data_path": str(pair), "seq_length": 32, "num_samples": [4, 0, 0]}
        arguments |= {"data_cache_path": f"{pair}.cache", "loss_ranges": loss_ranges}
        return build_datasets(config_from({**arguments, **order})).train.batch(range(4))

    # From the second on, the plan is found in the cache folder, whatever was said when it was made.
    whole = build("ignore")["loss_mask"]
    with pytest.raises(ConfigError, match="which tokens are not trained on"):
        build("refuse")
    batch = build("apply")
    assert 0 < batch["loss_mask"].sum() < whole.sum()
    assert not (batch["loss_mask"] > 0)[batch["labels"] >= ord("m")].any()
    with pytest.raises(ConfigError, match="loss_ranges must be one of"):
        build("all")
    sidecar = Path(f"{pair}.info.json")
    sidecar.write_text(sidecar.read_text()[:-9])  # what is damaged cannot say that there is none
    assert_refused(pair)


def test_megatrons_dataset_cannot_mask(pair: Path) -> None:
    tokenizer = SimpleNamespace(eod=256, pad=1, vocab_size=999, unique_identifiers={})
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    options: Any = {"split": "1,0,0", "random_seed": 1, "sequence_length": 8}
    options |= {"blend": ([str(pair)], None), "tokenizer": tokenizer, **dict.fromkeys(names, False)}

    def build(loss_ranges: str) -> Any:
        config = megatron.GPTDatasetConfig(loss_ranges=loss_ranges, **options)
        arguments = megatron.GPTDataset, [4, 0, 0], lambda: True, config
        return megatron.BlendedMegatronDatasetBuilder(*arguments).build()[0]

    for wrong, message in (("refuse", "use .*GPTDataset"), ("apply", "is .apply.; give")):
        with pytest.raises(AssertionError, match=message):
            build(wrong)
    assert build("ignore")[0]["loss_mask"].all()


# ---- the job ----


def test_death_at_every_step_leaves_no_pair_without_its_mask(path: Path, pair: Path) -> None:
    """The new pair has the tokens of the old one, and another mask."""
    old = pair.with_suffix(".bin").read_bytes()
    for _ in deaths_of(lambda: run_job(path, "f", restart=True), 1):
        info = IndexedDataset(pair).info()
        assert info is not None
        if Path(f"{pair}.loss.json").exists():
            assert_mask_is(pair, info.provenance["row_encoder"]["letter"])
        else:
            assert_mask_is_missing(pair)
    assert pair.with_suffix(".bin").read_bytes() == old
    assert_mask_is(pair, "f")


def test_a_full_disk_that_has_room_for_all_but_the_mask(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "az" * 400}] * 3)
    pair = Path(run_job(path).prefixes["text"])
    size = Path(f"{pair}.loss-ranges.npy").stat().st_size
    with size_limit(size - 64), pytest.raises(OSError, match="loss"):
        run_job(path, restart=True)
    assert_mask_is_missing(pair)
    assert run_job(path).num_chunks_kept == 1
    assert_mask_is(pair, "m")


def test_the_report_survives_kills(path: Path) -> None:
    kept = [finished_tasks(path.parent) for _ in deaths_of(lambda: run_job(path))]
    assert any(kept)
    result = run_job(path)  # it is there already
    info = IndexedDataset(result.prefixes["text"]).info()
    assert info is not None
    assert result.report == info.provenance["report"] == {"rows": 9, "trained tokens": 81}


def test_without_checksums_the_sidecar_still_names_the_mask(path: Path, pair: Path) -> None:
    run_job(path, checksums=False, restart=True)
    assert_mask_is(pair, "m")
    Path(f"{pair}.loss.json").unlink()  # the job is not whole any more
    assert_mask_is_missing(pair)
    with pytest.raises(ConfigError, match="--restart"):
        run_job(path, checksums=False)


# ---- other jobs ----


def ranges_of(*prefixes: Path | str) -> list[list[int]] | None:
    ranges = joined_ranges((IndexedDataset(prefix), None) for prefix in prefixes)
    return None if ranges is None else ranges.tolist()


DOCUMENTS = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(
    inputs=st.lists(st.tuples(DOCUMENTS, st.booleans()), min_size=1, max_size=3),
    size=st.integers(1, 4),
)
def test_merge_split_and_convert_carry_the_mask(
    inputs: Any, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("case")
    prefixes, expected, before = list[Path](), [], 0
    for number, (documents, has_mask) in enumerate(inputs):
        prefixes.append(folder / f"{number}")
        with IndexedDatasetBuilder(prefixes[-1], np.uint16, checksums=True) as builder:
            for lengths in documents:
                builder.add_document(np.arange(sum(lengths)), lengths)
        count = sum(map(len, documents))
        if has_mask:  # the first token of every other sequence is not trained on
            write_loss_ranges(prefixes[-1], [(n, 0, 1) for n in range(0, count, 2)])
            expected += [[before + n, 0, 1] for n in range(0, count, 2)]
        before += count
    merge(prefixes, folder / "all")
    shards = split(folder / "all", folder / "part", documents=size)
    convert(folder / "all", folder / "wide", dtype=np.int32, checksums=False)
    merge(shards, folder / "part_00000")  # over one of its inputs
    for result in ("all", "wide", "part_00000"):
        has_mask = any(one[1] for one in inputs)
        assert ranges_of(folder / result) == (expected if has_mask else None), result
        info = IndexedDataset(folder / result).info()
        assert ("loss_ranges" in getattr(info, "provenance", {})) == has_mask


def test_what_cannot_keep_a_mask_refuses_it(pair: Path, verb: Any) -> None:
    to = pair.parent / "to"
    with pytest.raises(ConfigError, match="an array cannot keep it: give --no-loss-ranges"):
        convert(pair, f"{to}.npy")
    with pytest.raises(ConfigError, match=r"append_eod, .* --no-loss-ranges"):
        convert(pair, to, append_eod=256)
    info = Path(f"{pair}.info.json").read_bytes()
    for _ in range(2):  # with the sidecar, and with nothing but the mask beside the pair
        with pytest.raises(ConfigError, match="millrace convert --no-loss-ranges"):
            shuffle(None, input_list=[(1, pair)], output_dir=to, seq_len=4)
        Path(f"{pair}.info.json").unlink(missing_ok=True)
    Path(f"{pair}.info.json").write_bytes(info)
    convert(pair, f"{to}.npy", loss_ranges=False)
    verb("merge", pair, "--output-prefix", to, "--no-loss-ranges")
    assert ranges_of(to) is None
    assert samples(to).batch([0])["loss_mask"][:, :-1].all()
    convert(to, pair)  # a pair that replaces another takes its mask away
    assert ranges_of(pair) is None


def test_verify_and_inspect_know_the_mask(pair: Path, verb: Any) -> None:
    assert "27 ranges of tokens are not trained on" in verb("verify", pair)
    assert json.loads(verb("inspect", pair, "--json"))["provenance"]["report"]["rows"] == 9
    array = Path(f"{pair}.loss-ranges.npy")
    array.write_bytes(array.read_bytes()[:-1] + b"\1")
    assert "loss-ranges.npy" in verb("verify", pair, status=1)
    with pytest.raises(DataError, match=r"loss-ranges\.npy"):
        merge([pair], pair.parent / "all")
