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
    write_loss_ranges,
)
from millrace.cache.loss_files import joined_ranges
from millrace.cli import main
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import EncodedRows
from millrace.jobs import convert, merge, shuffle, split
from millrace.online import open_rows
from millrace.online.cached_rows import tokenized
from millrace.run.arguments import config_from
from millrace.tokenizing import TokenizeResult, tokenize
from tests.jobs.kills import deaths_of, finished_tasks
from tests.online.encoders import Marked, write_rows
from tests.store.test_faults import size_limit

TEXTS = [f"mill race {n}" for n in range(9)]
REPORT = {"rows": 9, "trained tokens": 81}  # of letters below "m"


class Below(Marked):
    """Trains on letters below another one, and counts."""

    def __init__(self, letter: str = "m") -> None:
        self.letter = letter

    def encode(self, rows: Any) -> EncodedRows:
        encoded = super().encode(rows)
        trained = encoded.tokens < ord(self.letter)
        report = {"rows": len(rows), "trained tokens": int(trained.sum())}
        return encoded._replace(trained=trained, report=report)

    def fingerprint(self) -> dict[str, Any]:
        return {"letter": self.letter}


def run_job(path: Path, letter: str = "m", **options: Any) -> TokenizeResult:
    """Tokenizes beside the file of rows, to `out_text_document`."""
    encoder = Below(letter)
    prefix = path.parent / "out"
    return tokenize([path], prefix, Tokenizer("bytes"), row_encoder=encoder, workers=1, **options)


def samples(prefix: Path, loss_ranges: str = "refuse") -> GPTDataset:
    options: Any = {"sequence_length": 6, "seed": 1, "add_extra_token": False}
    return GPTDataset(IndexedDataset(prefix), loss_ranges=loss_ranges, **options)


def assert_refused(prefix: Path | str) -> None:
    with pytest.raises(ConfigError, match="which tokens are not trained on"):
        samples(Path(prefix))


def assert_mask_is_missing(prefix: Path) -> None:
    assert_refused(prefix)
    with pytest.raises(DataError, match=r"loss\.json is missing.*write it again"):
        samples(prefix, "apply")


def assert_mask_is(prefix: Path, letter: str) -> None:
    batch = samples(prefix, "apply").batch(range(5))
    expected = batch["labels"] < ord(letter)
    expected[:, -1] = False  # there is no label
    assert (batch["loss_mask"] == expected).all()


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    return Path(run_job(path).prefixes["text"])


# ---- who trains on such a pair ----


def test_a_pair_with_a_mask_is_refused_until_something_is_said_of_it(pair: Path) -> None:
    with pytest.raises(ConfigError, match=r'info\.json says .* loss_ranges="apply".*"ignore"'):
        samples(pair)
    assert_mask_is(pair, "m")
    ignored = samples(pair, "ignore").batch(range(5))
    assert ignored["loss_mask"][:, :-1].all()
    sidecar = Path(f"{pair}.info.json")
    sidecar.write_text(sidecar.read_text()[:-9])  # what is damaged cannot say that there is none
    assert_refused(pair)


@pytest.mark.parametrize("order", [{}, {"order": "millrace.order:PackPlan"}])
def test_a_run_says_what_becomes_of_masks(tmp_path: Path, order: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    pair = f"{tmp_path}/out_text_document"

    def build(loss_ranges: str) -> Any:
        arguments = {"train_data_path": pair, "seq_length": 32, "num_samples": [4, 0, 0]}
        arguments |= {"data_cache_path": str(tmp_path / "cache"), "loss_ranges": loss_ranges}
        batch = build_datasets(config_from({**arguments, **order})).train.batch(range(4))
        return batch["loss_mask"], (batch["labels"] >= ord("m")) & (batch["loss_mask"] > 0)

    tokenize([path], tmp_path / "out", Tokenizer("bytes"), append_eod=True, workers=1)
    content = Path(pair + ".bin").read_bytes()
    build("refuse")  # there is no mask yet
    run_job(path, restart=True)
    assert Path(pair + ".bin").read_bytes() == content
    # The second time, the plan is found in the cache folder, whatever was said when it was made.
    for _ in range(2):
        with pytest.raises(ConfigError, match="which tokens are not trained on"):
            build("refuse")
        assert build("apply")[0].sum() < build("ignore")[0].sum()
        assert not build("apply")[1].any()
    with pytest.raises(ConfigError, match="loss_ranges must be one of"):
        build("all")


def test_megatrons_dataset_cannot_mask(pair: Path) -> None:
    from millrace import megatron

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


def test_death_at_every_step_leaves_no_pair_without_its_mask(pair: Path) -> None:
    """The new pair has the tokens of the old one, and another mask."""
    path, old = pair.parent / "a.jsonl", pair.with_suffix(".bin").read_bytes()
    for _ in deaths_of(lambda: run_job(path, "f", restart=True), 1):
        data = IndexedDataset(pair)
        info = data.info()
        assert info is not None
        if Path(f"{pair}.loss.json").exists():
            assert_refused(pair)
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


def test_the_report_survives_kills_and_stays_in_a_cache(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    kept = [finished_tasks(tmp_path) for _ in deaths_of(lambda: run_job(path))]
    assert any(kept)
    result = run_job(path)  # it is there already
    info = IndexedDataset(result.prefixes["text"]).info()
    assert info is not None
    assert result.report == info.provenance["report"] == REPORT
    options: Any = {"show_progress": False, "on_error": "stop", "workers": 1}
    for _ in range(2):
        store, report = tokenized(open_rows(path), Below(), str(tmp_path / "cache"), **options)
        assert report == {**REPORT, "tokens": store.num_tokens}


def test_without_checksums_the_sidecar_still_names_the_mask(pair: Path) -> None:
    path = pair.parent / "a.jsonl"
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


def test_what_cannot_keep_a_mask_refuses_it(pair: Path, capsys: Any) -> None:
    to = pair.parent / "to"
    with pytest.raises(ConfigError, match="an array cannot keep it: give --no-loss-ranges"):
        convert(pair, f"{to}.npy")
    with pytest.raises(ConfigError, match=r"append_eod, .* --no-loss-ranges"):
        convert(pair, to, append_eod=256)
    with pytest.raises(ConfigError, match="millrace convert --no-loss-ranges"):
        shuffle(None, input_list=[(1, pair)], output_dir=to, seq_len=4)
    convert(pair, f"{to}.npy", loss_ranges=False)
    assert main(["merge", str(pair), "--output-prefix", str(to), "--no-loss-ranges"]) == 0
    assert ranges_of(to) is None
    assert samples(to).batch([0])["loss_mask"][:, :-1].all()
    # A pair that replaces another takes its mask away.
    convert(to, pair)
    assert ranges_of(pair) is None


def test_verify_and_inspect_know_the_mask(pair: Path, capsys: Any) -> None:
    assert main(["verify", str(pair)]) == 0
    assert "27 ranges of tokens are not trained on" in capsys.readouterr().out
    assert main(["inspect", str(pair), "--json"]) == 0
    provenance = json.loads(capsys.readouterr().out)["provenance"]
    assert provenance["report"]["rows"] == len(TEXTS)
    array = Path(f"{pair}.loss-ranges.npy")
    array.write_bytes(array.read_bytes()[:-1] + b"\1")
    assert main(["verify", str(pair)]) == 1
    assert "loss-ranges.npy" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"loss-ranges\.npy"):
        merge([pair], pair.parent / "all")
