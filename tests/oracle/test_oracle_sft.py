"""`SFTDataset` against what `record_sft.py` has recorded of Megatron-LM."""

import gzip
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import record_sft as cases

import millrace.megatron as ours
from millrace.errors import ConfigError, TextError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The pad token id in the tokenizer collides"),
    pytest.mark.filterwarnings("ignore:.*summary:UserWarning"),
]
GOLDEN = json.loads(gzip.decompress(cases.GOLDEN.read_bytes()))
OPTIONS = {**cases.OPTIONS, "sft_release": "0.19"}
REPAIRED = {("0.16", "TypeError"), ("0.16", "IndexError"), ("0.19", "RuntimeError")}
"""Errors of Megatron-LM in whose place there may be a sample (`docs/differences.md`)."""


def dataset_of(lines: Any, tokenizer: Any, num_samples: int | None = None, **options: Any) -> Any:
    rows = np.arange(len(lines), dtype=np.int32)
    config = ours.GPTDatasetConfig(tokenizer=tokenizer, **{**OPTIONS, **options})
    return ours.SFTDataset(lines, "path", rows, num_samples, ours.Split.train, config)


class Recorded:
    """A tokenizer that answers what Megatron-LM's did."""

    vocab_size, unique_identifiers = 999, {"class": "Recorded"}

    def __init__(self, name: str) -> None:
        self.pad, self.eod, self._pairs = GOLDEN[name]

    def tokenize_conversation(self, conversation: Any, **options: Any) -> list[Any]:
        assert options == {"return_target": True, "add_generation_prompt": False}
        pair = self._pairs[json.dumps(conversation, sort_keys=True)]
        assert not isinstance(pair, str), pair
        return [np.array(one, np.int64) for one in pair]


class Bytes:
    """The bytes of the contents; no cook may speak."""

    pad, eod, vocab_size, unique_identifiers = 1, ord("$"), 999, {"class": "Bytes"}

    def tokenize_conversation(self, conversation: Any, *_: Any, **__: Any) -> list[Any]:
        if any(one["role"] == "cook" for one in conversation):
            raise AssertionError
        return [np.array([*"".join(one["content"] for one in conversation).encode()], np.int64)] * 2


@pytest.fixture
def lines(tmp_path: Path) -> ours.SFTLowLevelDataset:
    return ours.SFTLowLevelDataset(cases.write_lines(tmp_path))


@pytest.mark.parametrize("prompt", cases.FORMATS)
@pytest.mark.parametrize("release", cases.RELEASES)
def test_samples_are_megatrons(release: str, prompt: str, lines: Any) -> None:
    for length, size in cases.LENGTHS:
        options = {"sequence_length": length, "context_parallel_size": size}
        tokenizer = Recorded(f"{release} {prompt}")
        dataset = dataset_of(lines, tokenizer, sft_release=release, **options)
        expected = GOLDEN[f"{release} {prompt} {length} {size}"]
        for sample, theirs in zip(cases.samples_of(dataset), expected, strict=True):
            if isinstance(theirs, list):
                assert sample == theirs
            elif (release, theirs) not in REPAIRED:
                assert sample == "ConversationError"
    dtypes = [str(tensor.dtype)[6:] for tensor in dataset[0].values()]
    assert dtypes == ["int64", "int64", "float32", "int64", "int32", "int32"]


def test_the_builder_splits_the_lines(tmp_path: Path) -> None:
    blend = {"blend": ([cases.write_lines(tmp_path)], None), "split": "50,50,0"}
    options = {**OPTIONS, "sequence_length": 64, "path_to_cache": str(tmp_path), **blend}
    config = ours.GPTDatasetConfig(tokenizer=Recorded("0.19 identity"), **options)
    build = ours.BlendedMegatronDatasetBuilder
    train, valid, test = build(ours.SFTDataset, [60, None, None], lambda: True, config).build()
    samples = GOLDEN["0.19 identity 64 1"]
    half = round(len(samples) / 2)
    expected = [*(samples[:half] * 9)[:60], *samples[half:]]
    mine = cases.samples_of(train) + cases.samples_of(valid)
    for sample, theirs in zip(mine, expected, strict=True):
        assert sample == theirs or isinstance(theirs, str)
    assert test is None


def test_releases_differ_in_what_they_say() -> None:
    """0.16 appends EOD, and 0.19 fills up the bounds, also where Megatron-LM's fail."""
    lines, end = cases.LINES[-29:], "$"
    ended = [[{**one, "content": one["content"] + end} for one in line] for line in lines]
    for length, size in cases.LENGTHS:
        options = {"sequence_length": length, "context_parallel_size": size}
        runs = ((lines, "0.16"), (ended, "0.17"), (lines, "0.18"), (lines, "0.19"))
        oldest, old, last, new = (
            cases.samples_of(dataset_of(rows, Bytes(), sft_release=name, **options))
            for rows, name in runs
        )
        assert oldest == old
        for sample in (one for one in last if isinstance(one, list)):
            bounds = sample[4] if len(sample[4]) <= length + 1 else sorted({*sample[4]})
            sample[4] = bounds + [length] * (length + 1 - len(bounds))
        assert last == new


@pytest.mark.parametrize("version", ["0.16.1", "0.18.0rc1", "0.19.0", "1.19"])
def test_the_imported_release_decides(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__version__=version))
    dataset = dataset_of([], Bytes(), 0, sft_release=None, sequence_length=8)
    assert dataset.config.sft_release == version.replace("1.19", "0.19")[:4]


GOOD = json.dumps({"messages": cases.LINES[0]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "line 3: .*not valid JSON"),
        ('["messages"]', "line 3: .*object"),
        ('{"messages": {"role": "user"}}', 'line 3 has no list "messages"'),
        ('{"messages": [{"content": "a"}]}', 'line 3 has no list "messages"'),
        ('{"messages": []}', "line 3 has no tokens"),
        ([*cases.LINES[0], {"role": "system", "content": 5}], "line 3, conversation 2: .*int"),
        ([*cases.LINES[0], {"role": "system"}], "line 3, conversation 2: 'content'"),
        (cases.chat("user: a", "cook: b"), "line 3, conversation 1: AssertionError"),
        (cases.chat("user: a\ud800"), "line 3, conversation 1: .*surrogate"),
    ],
)
def test_errors_name_file_and_line(line: Any, message: str, tmp_path: Path) -> None:
    text = line if isinstance(line, str) else json.dumps({"messages": line})
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n \r\n{text}\n\n{GOOD}".encode())
    lines = ours.SFTLowLevelDataset(str(path))
    dataset = dataset_of(lines, Bytes(), sequence_length=99)
    assert len(dataset) == 3
    assert lines[0] == lines[np.int8(-1)] == cases.LINES[0]
    with pytest.raises(TextError, match=rf"x\.jsonl, .*{message}"):
        dataset[1]
    os.utime(path, (1, 1))
    with pytest.raises(TextError, match="written to"):
        dataset[0]


def test_what_is_lost_is_reported() -> None:
    rows = [cases.of_lengths(5, 5), cases.of_lengths(8, 3, 4, 1), cases.chat("system: \x01")]
    dataset = dataset_of(rows, Bytes(), num_samples=4, sequence_length=10)
    with pytest.warns(UserWarning, match=r"path: lines are cut.* summary\(\)") as warned:
        _ = dataset[0], dataset[1]
    assert len(warned) == 1
    assert [*dataset.summary().values()] == [21, 1, 18, 2, 1]
    ends = SimpleNamespace(pad=1, eod=1, vocab_size=9, unique_identifiers={})
    with pytest.warns(UserWarning, match="is masked wherever it occurs"):
        dataset_of(rows, ends, sequence_length=60)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    one, fixed = [cases.LINES[0]], {"tokenizer": Bytes(), "sequence_length": 8}
    problems = {"reset_position_ids": True, "reset_attention_mask": True, "fast_cache_load": True}
    problems |= {"create_attention_mask": True, "sft_release": "0.20", "sequence_length": 0}
    for name, value in {**problems, "context_parallel_size": -1}.items():
        with pytest.raises(ConfigError, match=name):
            dataset_of(one, **{**fixed, name: value})
    with pytest.raises(ConfigError, match="has no lines"):
        dataset_of([], **fixed)
    with pytest.raises(IndexError):
        dataset_of(one, **fixed)[1]
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(TextError, match="decompress"):
        ours.SFTLowLevelDataset(str(tmp_path / "x.jsonl.gz"))
