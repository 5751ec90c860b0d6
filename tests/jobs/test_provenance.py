"""Origins and tokenizers through merge, split, convert, inspect and blends."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import (
    ConfigError,
    DataError,
    DatasetConfig,
    IndexedDataset,
    IndexedDatasetBuilder,
    build_datasets,
)
from millrace.encoding import Tokenizer
from millrace.inspect import describe, format_description
from millrace.jobs import convert, merge, split, tokenize
from millrace.provenance import OriginsWriter
from millrace.provenance.tokenizers import common_tokenizer, read_tokenizer, tokenizer_conflict
from millrace.run.arguments import config_from
from millrace.store import verify
from tests.conftest import train_tokenizer
from tests.encoding.test_tokenizer import write_tiktoken

GPT2 = {"path": "gpt2.json", "sha256": "ab" * 32}
LLAMA = {"path": "llama.json", "sha256": "cd" * 32}


def write(
    prefix: Path,
    tokenizer: dict[str, Any] | None = None,
    *,
    count: int = 10,
    origins: bool = True,
    **others: Any,
) -> str:
    """A pair of `count` documents of 20 tokens."""
    provenance = {"tool": "a test", **others, **({"tokenizer": tokenizer} if tokenizer else {})}
    with IndexedDatasetBuilder(
        prefix, np.uint16, checksums=True, provenance=provenance, durable=False
    ) as builder:
        for number in range(count):
            builder.add_document(np.full(20, 100 * ord(prefix.name[0]) + number))
    if origins:
        numbers = np.arange(count)
        ids = [f"{prefix.name}-{number}" for number in range(count)]
        with OriginsWriter(prefix, durable=False) as writer:
            writer.add([f"{prefix.name}.jsonl"], 0 * numbers, 1 + numbers, numbers, ids)
    return str(prefix)


def ids_of(prefix: str | Path) -> list[str | None] | None:
    origins = IndexedDataset(prefix).origins()
    return None if origins is None else origins.ids


def tokenizer_of(prefix: str | Path) -> Any:
    info = IndexedDataset(prefix).info()
    assert info is not None
    return info.provenance.get("tokenizer")


def run(*arguments: object, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millrace", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert result.returncode == status, result.stderr
    return result


# ---- reshaping ----


@pytest.mark.parametrize("checksums", [False, True])
def test_reshaping_carries_origins_and_the_tokenizer(tmp_path: Path, checksums: bool) -> None:
    prefixes = [write(tmp_path / name, GPT2) for name in "abc"]
    expected = [f"{name}-{number}" for name in "abc" for number in range(10)]
    merge(prefixes, tmp_path / "all", checksums=checksums)
    assert ids_of(tmp_path / "all") == expected
    origin = IndexedDataset(tmp_path / "all").origin(13)
    assert origin == ("b.jsonl", 4, 3, "b-3")
    shards = split(tmp_path / "all", tmp_path / "shard", documents=7, checksums=checksums)
    assert [ids_of(shard) for shard in shards] == [expected[at : at + 7] for at in range(0, 30, 7)]
    convert(tmp_path / "all", tmp_path / "wide", dtype=np.int32, checksums=checksums)
    assert ids_of(tmp_path / "wide") == expected
    outputs = [tmp_path / "all", tmp_path / "wide", *map(Path, shards)]
    assert [report.problems for report in verify(outputs)] == [[]] * len(outputs)
    for output in outputs:
        if checksums:
            assert tokenizer_of(output) == GPT2
        else:
            assert IndexedDataset(output).info() is None
    merge(shards, tmp_path / "again", checksums=True)
    contents = [(tmp_path / f"{n}.origins.parquet").read_bytes() for n in ("all", "again")]
    assert contents[0] == contents[1]


def test_origins_can_be_left_out(tmp_path: Path) -> None:
    """A second split removes the sidecars of the first."""
    source = write(tmp_path / "a")
    merge([source, write(tmp_path / "b")], tmp_path / "all", origins=False)
    split(source, tmp_path / "shard", documents=1, checksums=True)
    assert len(list(tmp_path.glob("shard*"))) == 40
    shards = split(source, tmp_path / "shard", documents=5, origins=False, checksums=False)
    assert len(list(tmp_path.glob("shard*"))) == 4
    convert(source, tmp_path / "wide", dtype=np.int32, origins=False)
    assert {ids_of(output) for output in [tmp_path / "all", tmp_path / "wide", *shards]} == {None}
    merge([source, write(tmp_path / "c", origins=False)], tmp_path / "all")
    assert ids_of(tmp_path / "all") is None
    merge([source], tmp_path / "all")
    assert ids_of(tmp_path / "all") == ids_of(source)


def test_damaged_origins_stop_a_merge(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / "a"), write(tmp_path / "b")]
    path = tmp_path / "b.origins.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"b\.origins\.parquet is damaged"):
        merge(prefixes, tmp_path / "all")
    assert not list(tmp_path.glob("all*"))
    merge(prefixes, tmp_path / "all", origins=False)
    problems = verify([prefixes[1]])[0].problems
    assert "its checksums are of a file of" in problems[0]


# ---- tokenizers ----


def test_data_of_different_tokenizers_are_not_merged(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / "a", GPT2), write(tmp_path / "b"), write(tmp_path / "c", LLAMA)]
    with pytest.raises(ConfigError) as error:
        merge(prefixes, tmp_path / "all", checksums=True)
    parts = "gpt2.json (abababababab)", "ids mean different texts", "--any-tokenizer"
    for part in (prefixes[0], prefixes[2], *parts):
        assert part in str(error.value)
    assert not list(tmp_path.glob("all*"))
    merge(prefixes, tmp_path / "all", checksums=True, any_tokenizer=True)
    assert tokenizer_of(tmp_path / "all") is None
    merge(prefixes[:2], tmp_path / "all", checksums=True)  # of one it is not known
    assert tokenizer_of(tmp_path / "all") is None


def test_one_hash_in_common_is_the_same_tokenizer(tmp_path: Path) -> None:
    old = write(tmp_path / "old", {"sha256": "file"})
    new = write(tmp_path / "new", {"sha256": "canonical", "fingerprints": ["canonical", "file"]})
    other = write(tmp_path / "other", {"sha256": "other"})
    records = [read_tokenizer(prefix) for prefix in (old, new, other)]
    assert tokenizer_conflict(records[:2]) is None
    assert f"and {other} with a tokenizer (other)" in tokenizer_conflict(records)
    assert common_tokenizer(records[:2]) == {"sha256": "file"}
    assert common_tokenizer(records) is None
    assert common_tokenizer([]) is None


def test_sentences_of_different_splitters_are_not_mixed(tmp_path: Path) -> None:
    punkt, sentencex = "nltk 3.9.1 punkt_tab english", "sentencex 1.0.32 en"
    prefixes = [
        write(tmp_path / "a", GPT2, sentences=punkt, keep_newlines=False),
        write(tmp_path / "b", GPT2),  # of one it is not known
        write(tmp_path / "c", GPT2, sentences=sentencex, keep_newlines=False),
        write(tmp_path / "d", GPT2, sentences=punkt, keep_newlines=True),
    ]
    merged = tmp_path / "all"
    for other, name in (("c", sentencex), ("d", punkt + " with newlines")):
        with pytest.raises(ConfigError) as error:
            merge([*prefixes[:2], tmp_path / other], merged, checksums=True)
        for part in (str(prefixes[0]), punkt, str(tmp_path / other), name, "any_tokenizer"):
            assert part in str(error.value)
        with pytest.raises(ConfigError, match=name):
            build_datasets(config([prefixes[0], str(tmp_path / other)]))
    # What is made of others is compared, too.
    merge([prefixes[0]] * 2, merged, checksums=True)
    with pytest.raises(ConfigError, match=sentencex):
        merge([merged, prefixes[2]], tmp_path / "more", checksums=True)
    merge([merged, prefixes[1]], tmp_path / "more", checksums=True)
    assert tokenizer_of(tmp_path / "more") == GPT2
    merge([merged, prefixes[2]], tmp_path / "more", checksums=True, any_tokenizer=True)
    assert tokenizer_of(tmp_path / "more") == GPT2  # the tokenizer is compared further on


def test_sentences_of_several_languages_come_together(tmp_path: Path) -> None:
    prefixes = [
        write(tmp_path / name, GPT2, sentences=f"sentencex {name}") for name in ("1.0 en", "1.1 de")
    ]
    merge(prefixes, tmp_path / "all", checksums=True)
    assert tokenizer_of(tmp_path / "all") == {**GPT2, "sentences": "sentencex"}
    merge([tmp_path / "all", prefixes[0]], tmp_path / "more", checksums=True)
    punkt = write(tmp_path / "punkt", GPT2, sentences="nltk 3.9.1 punkt_tab english")
    with pytest.raises(ConfigError, match=r"sentencex.*nltk"):
        merge([tmp_path / "all", punkt], tmp_path / "none")


def test_the_library_of_sentences_is_named_and_recorded(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "It rains. Does it?"}')
    command = ["tokenize", "--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "out"]
    command += ["--tokenizer", "bytes", "--split-sentences"]
    environment = {"NLTK_DATA": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin"}
    error = run(*command, env=environment, status=1).stderr  # not whichever is installed
    assert "punkt_tab" in error
    assert "--split-sentences sentencex" in error
    run(*command, "sentencex", env=environment)
    record = read_tokenizer(str(tmp_path / "out_text_sentence"))
    assert re.fullmatch(r"sentencex 1\..* en", record.sentences if record else "")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"[]",
        b'{"version": 1, "provenance": []}',
        b'{"version": 1, "provenance": {"tokenizer": 3}}',
        b'{"version": 1, "provenance": {"tokenizer": {"path": "a"}}}',
        b'{"version": 1, "provenance": {"tokenizer": {"sha256": 3, "fingerprints": 4}}}',
        b'{"version": 9, "provenance": {"tokenizer": {"sha256": "a"}}}',
        b'{"version": 1, "provenance": {"tokenizer": {"sha256": "a"}',
        b"[" * 100_000,
    ],
)
def test_a_sidecar_that_does_not_name_a_tokenizer_is_not_compared(
    tmp_path: Path, content: bytes
) -> None:
    prefix = write(tmp_path / "a")
    (tmp_path / "a.info.json").write_bytes(content)
    assert read_tokenizer(prefix) is None
    (tmp_path / "a.info.json").unlink()
    assert read_tokenizer(prefix) is None
    assert read_tokenizer(str(tmp_path / "none")) is None


# ---- blends ----


def config(prefixes: list[str], **options: Any) -> DatasetConfig:
    blend = {"blend": (prefixes, [1.0] * len(prefixes)), "split": "1,0,0"}
    return DatasetConfig(
        **{"sequence_length": 8, "seed": 1, "num_samples": (10, 0, 0), **blend, **options}
    )


def test_a_blend_of_different_tokenizers_is_refused(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / "a", GPT2), write(tmp_path / "b"), write(tmp_path / "c", LLAMA)]
    with pytest.raises(ConfigError, match=r"gpt2\.json .* llama\.json .* any_tokenizer"):
        build_datasets(config(prefixes))
    per_split = [([prefixes[0]], None), ([prefixes[2]], None), None]
    apart = {"blend": None, "split": None, "blend_per_split": per_split, "num_samples": (10, 5, 0)}
    for options in ({"cache": tmp_path / "cache"}, apart):
        with pytest.raises(ConfigError, match="different texts"):
            build_datasets(config(prefixes, **options))
    datasets = build_datasets(config(prefixes, any_tokenizer=True, cache=tmp_path / "cache"))
    assert datasets.train is not None
    assert len(datasets.train) == 12
    assert build_datasets(config(prefixes[:2])).train is not None


def test_the_escape_is_an_argument_of_a_run(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / "a", GPT2), write(tmp_path / "b", LLAMA)]
    arguments = {"data_path": prefixes, "seq_length": 8, "num_samples": [10, 0, 0]}
    assert not config_from(arguments).any_tokenizer
    assert config_from({**arguments, "any_tokenizer": True}).any_tokenizer
    command = ["index", "--data-path", *prefixes, "--seq-length", 8, "--num-samples", 10, 0, 0]
    command += ["--split", "1,0,0", "--cache", tmp_path / "cache"]
    assert "the same ids mean different texts" in run(*command, status=1).stderr
    run(*command, "--any-tokenizer")


def test_under_megatrons_names_a_blend_of_different_tokenizers_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from types import SimpleNamespace

    from millrace import megatron

    prefixes = [write(tmp_path / "a", GPT2), write(tmp_path / "b", LLAMA)]
    tokenizer = SimpleNamespace(eod=0, pad=1, vocab_size=999, unique_identifiers={})
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    options: Any = {"random_seed": 1, "sequence_length": 8, "split": "1,0,0"}
    options |= {"tokenizer": tokenizer, **dict.fromkeys(names, False)}

    def build(prefixes: list[str]) -> str:
        config = megatron.GPTDatasetConfig(blend=(prefixes, [1.0] * len(prefixes)), **options)
        arguments = megatron.GPTDataset, [10, 0, 0], lambda: True, config
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(megatron.BlendedMegatronDatasetBuilder(*arguments).build()[0]) >= 10
        return caplog.text

    assert "the same ids mean different texts" in build(prefixes)
    assert "different texts" not in build(prefixes[:1] * 2)


# ---- inspect ----


def test_inspect_decodes_with_tiktoken_ranks(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path / "ranks")
    (tmp_path / "a.jsonl").write_text('{"text": "the mill race"}\n')
    tokenizer = Tokenizer(path, tiktoken_pattern=r"\w+|\W+")
    tokenize([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer, checksums=True, workers=1)
    command = ["inspect", tmp_path / "out_text_document", "--tokenizer", path, "--json"]
    report = json.loads(run(*command, "--tiktoken-pattern", r"\w+|\W+").stdout)
    assert report["document"]["head"]["text"] == "the mill race"
    assert report["is_same_tokenizer"]


def test_inspect_shows_where_a_document_came_from(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a")
    description = describe(IndexedDataset(prefix), document=3)
    assert "  from a.jsonl line 4, id a-3\n" in format_description(description)
    with OriginsWriter(write(tmp_path / "b", count=1)) as writer:
        writer.add(["b.parquet"], [0], [7], [-1])
    description = describe(IndexedDataset(tmp_path / "b"))
    assert "  from b.parquet row 7\n" in format_description(description)
    report = json.loads(run("inspect", prefix, "--document", 9, "--json").stdout)
    origin = {"source": "a.jsonl", "line": 10, "byte_offset": 9, "id": "a-9"}
    assert report["document"]["origin"] == origin
    assert report["has_origins"] is True
    description = describe(IndexedDataset(write(tmp_path / "c", origins=False)))
    assert "origins    none" in format_description(description)  # it goes on without them
    Path(f"{prefix}.origins.parquet").write_bytes(b"garbage")
    text = format_description(describe(IndexedDataset(prefix)))
    assert "its origin cannot be read" in text
    assert "a.origins.parquet is damaged" in text


def test_inspect_says_that_another_tokenizer_wrote_the_tokens(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    tokenizer = Tokenizer(tokenizer_file)
    own = {"path": str(tokenizer_file), "sha256": tokenizer.fingerprint}
    other = train_tokenizer(tmp_path / "other.json", ["<eos>"])
    prefix = write(tmp_path / "a", own)
    description = describe(IndexedDataset(prefix), tokenizer=tokenizer)
    assert description.is_same_tokenizer is True
    assert description.tokenizer_warning is None
    by_file = IndexedDataset(prefix, access="file")  # as it is in a bucket: not mapped
    assert describe(by_file, tokenizer=tokenizer) == description
    assert describe(IndexedDataset(prefix)).is_same_tokenizer is None
    assert "WARNING" not in format_description(description)
    warning = f"another tokenizer wrote these tokens: {tokenizer_file} ({own['sha256'][:12]}), not"
    command = ["inspect", prefix, "--tokenizer", other]
    assert f"  WARNING    {warning} {other} (" in run(*command).stdout
    assert json.loads(run(*command, "--json").stdout)["is_same_tokenizer"] is False
    unknown = describe(IndexedDataset(write(tmp_path / "b")), tokenizer=tokenizer)
    assert unknown.is_same_tokenizer is unknown.tokenizer_warning is None
