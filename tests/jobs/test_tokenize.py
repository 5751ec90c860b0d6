"""Text to token files: real files of every kind, and every refusal."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, IndexedDataset, MillraceError, TextError
from millrace.jobs import executor, tokenize
from millrace.text import Tokenizer, documents, read_blocks
from tests.conftest import make_texts, train_tokenizer, write_jsonl


@pytest.fixture
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(tokenizer_file)


def run(folder: Path, inputs: list[Path], tokenizer: Tokenizer, **options: Any) -> IndexedDataset:
    options = {"workers": 1, **options}
    tokenize([str(path) for path in inputs], str(folder / "out"), tokenizer, **options)
    return IndexedDataset(folder / "out_text_document")


def test_the_ids_are_the_tokenizers_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """As preprocess_data.py: one sequence a document; EOD only where there is a token."""
    import tokenizers

    texts = ["the water", "", "turns\nthe mill <|endoftext|> again", " ", "水車 🌊"]
    data = run(tmp_path, [write_jsonl(tmp_path / "a.jsonl", texts)], tokenizer, append_eod=True)
    plain = tokenizers.Tokenizer.from_file(tokenizer.path)
    expected = [[*plain.encode(text).ids, tokenizer.eod] for text in texts if text]
    assert [sequence.tolist() for sequence in data] == expected
    assert data.num_documents == len(texts)
    assert data.document_indices.tolist() == [0, 1, 1, 2, 3, 4]
    assert data.dtype == np.uint16


def test_plain_gzip_and_zstd_in_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_texts(90)
    names = ["c.jsonl", "b.jsonl.gz", "a.jsonl.zst"]
    inputs = [
        write_jsonl(tmp_path / name, texts[30 * i : 30 * i + 30]) for i, name in enumerate(names)
    ]
    data = run(tmp_path, inputs, tokenizer)
    expected = run(tmp_path, [write_jsonl(tmp_path / "all.jsonl", texts)], tokenizer)
    assert np.array_equal(data.tokens, expected.tokens)
    assert np.array_equal(data.sequence_lengths, expected.sequence_lengths)


def test_the_output_does_not_depend_on_workers_or_blocks(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(400))
    outputs = []
    for workers, block_size in [(1, 1 << 20), (1, 7), (1, 1000), (2, 500), (3, 2000)]:
        monkeypatch.setattr(documents.read_blocks, "__defaults__", (block_size,))
        run(tmp_path, [source], tokenizer, workers=workers, append_eod=True)
        outputs.append(
            [(tmp_path / f"out_text_document{s}").read_bytes() for s in (".bin", ".idx")]
        )
    assert all(output == outputs[0] for output in outputs)


def test_each_key_becomes_a_pair(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "the mill", "body": "water"}\n{"title": "", "body": "wheel"}\n')
    result = tokenize([str(path)], str(tmp_path / "out"), tokenizer, json_keys=["title", "body"])
    title, body = (IndexedDataset(result.prefixes[key]) for key in ("title", "body"))
    assert (title.num_documents, len(title)) == (2, 1)
    assert (body.num_documents, len(body)) == (2, 2)
    assert [tokenizer.decode(sequence) for sequence in body] == ["water", "wheel"]


def test_blank_lines_and_a_byte_order_mark_are_no_text(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    data = run(tmp_path, [path], tokenizer)
    assert [tokenizer.decode(sequence) for sequence in data] == ["a", "b"]


def test_a_file_with_truncation_and_padding_settings_still_gives_whole_documents(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    settings = json.loads(tokenizer_file.read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    settings["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings))
    texts = ["the water that turns", "a"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    data = run(tmp_path, [source], Tokenizer(path))
    expected = run(tmp_path, [source], Tokenizer(tokenizer_file))
    assert np.array_equal(data.tokens, expected.tokens)


def test_ids_beyond_the_vocabularys_size_widen_the_dtype(tmp_path: Path) -> None:
    """A vocabulary with a gap: 300 tokens, one of them with the id 70,000."""
    settings = json.loads(train_tokenizer(tmp_path / "tokenizer.json").read_text())
    settings["model"]["vocab"]["水"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path / "tokenizer.json").dtype == np.int32


# ---- end-of-document tokens ----


@pytest.mark.parametrize(
    ("special", "named", "expected"),
    [
        (["<eos>"], None, "<eos>"),
        (["</s>", "<pad>"], None, "</s>"),
        (["<eos>", "</s>"], "</s>", "</s>"),
        (["<pad>"], "<pad>", "<pad>"),
        (["<pad>"], None, "has none of the usual"),
        (["<eos>", "</s>"], None, r"has several \(</s>, <eos>\)"),
        (["<eos>"], "<end>", "no token '<end>'"),
    ],
)
def test_the_end_of_document_token(
    tmp_path: Path, special: list[str], named: str | None, expected: str
) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", special)
    if expected in special:
        tokenizer = Tokenizer(path, named)
        assert tokenizer.decode([tokenizer.eod]) == expected
    else:
        with pytest.raises(TextError, match=rf"{expected}.*--eod-token|--eod-token.*{expected}"):
            _ = Tokenizer(path, named).eod


# ---- refusals: the file, the line, the value, the remedy; nothing left behind ----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a.jsonl, line 2, column \d+: no valid JSON"),
        (b'\n\n{"text": "a"', "line 3, column"),
        (b'{"text": "a"}\n[1]\n', "line 2: a JSON list, not an object"),
        (b'{"text": "a"}\n{"body": "b", "id": 1}', 'line 2: there is no key "text".*: body, id'),
        (b'{"text": null}', 'line 1: the value of "text" is a JSON NoneType'),
        (b'{"text": "\xff"}', "line 1: byte 11 is no UTF-8"),
        (b'{"text": "a\\ud800"}', r"line 1: character 2 is the lone surrogate U\+D800"),
        (b"[" * 200_000, "line 1: the JSON cannot be read"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named(
    tmp_path: Path, tokenizer: Tokenizer, content: bytes, message: str, workers: int
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(TextError, match=message):
        run(folder, [path], tokenizer, workers=workers)
    assert list(folder.iterdir()) == []


def test_damaged_compressed_files_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        whole = write_jsonl(tmp_path / name, make_texts(50)).read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
        for data in (whole[:-5], whole[:middle], flipped):
            (tmp_path / name).write_bytes(data)
            # A flipped bit may also show as bad JSON, where the format has no checksum before it.
            with pytest.raises(TextError, match=name):
                run(tmp_path, [tmp_path / name], tokenizer)
        assert not (tmp_path / "out_text_document.idx").exists()


def test_several_compressed_members_are_one_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_texts(20)
    expected = run(tmp_path, [write_jsonl(tmp_path / "a.jsonl", texts)], tokenizer).tokens.copy()
    for name in ("b.jsonl.gz", "b.jsonl.zst"):
        parts = [write_jsonl(tmp_path / name, half).read_bytes() for half in (texts[:9], texts[9:])]
        (tmp_path / name).write_bytes(b"".join(parts))
        assert np.array_equal(run(tmp_path, [tmp_path / name], tokenizer).tokens, expected)


def test_an_empty_file_has_no_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert run(tmp_path, [write_jsonl(tmp_path / name, [])], tokenizer).num_documents == 0


def test_missing_inputs_and_options_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match=r"none.jsonl cannot be read: No such file"):
        run(tmp_path, [tmp_path / "none.jsonl"], tokenizer)
    with pytest.raises(TextError, match="is a folder"):
        run(tmp_path, [tmp_path], tokenizer)
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(ConfigError, match="workers is 0"):
        run(tmp_path, [source], tokenizer, workers=0)
    with pytest.raises(ConfigError, match="at least one, each once"):
        run(tmp_path, [source], tokenizer, json_keys=["text", "text"])
    with pytest.raises(ConfigError, match="is no folder"):
        run(tmp_path / "none", [source], tokenizer)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe\x00"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TextError, match=r"tokenizer.json is no tokenizer file"):
        Tokenizer(path)
    with pytest.raises(TextError, match="cannot be read"):
        Tokenizer(tmp_path / "none.json")


# ---- memory and deaths ----


def test_reading_is_bounded_by_the_block_size(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.zst", make_texts(3000))
    blocks = list(read_blocks(str(path), 4096))
    assert max(len(block.data) for block in blocks) < 3 * 4096
    assert b"".join(block.data for block in blocks).count(b"\n") == 3000
    line = 1
    for block in blocks:
        assert block.first_line == line
        line += block.data.count(b"\n")


def test_items_are_taken_only_as_fast_as_results_are_used() -> None:
    taken = []

    def items() -> Any:
        for number in range(1000):
            taken.append(number)
            yield number

    results = executor.ordered_map(_double, items(), context=2, workers=2)
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    assert len(taken) <= 3 + 3 * 2
    results.close()


def _double(factor: int, item: int) -> int:
    return factor * item


def test_a_worker_that_dies_is_an_error() -> None:
    with pytest.raises(MillraceError, match="a worker process died"):
        list(executor.ordered_map(_die, range(10), context=None, workers=2))


def _die(_: None, item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_job_leaves_no_pair_no_worker_and_the_next_run_succeeds(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(100_000))
    command = [
        sys.executable, "-m", "millrace", "tokenize", "--input", str(source), "--output-prefix",
        str(tmp_path / "out"), "--tokenizer", tokenizer.path, "--workers", "2",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (
        list(tmp_path.glob("out_text_document.bin.*.tmp")) and len(children(process.pid)) >= 2
    ):
        assert process.poll() is None
        time.sleep(0.01)
    workers = children(process.pid)
    process.kill()
    process.wait()
    assert not (tmp_path / "out_text_document.idx").exists()
    deadline = time.monotonic() + 30
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    source.write_bytes(source.read_bytes()[:0])
    run(tmp_path, [write_jsonl(tmp_path / "b.jsonl", ["a"])], tokenizer)
    assert sorted(path.name for path in tmp_path.glob("out*")) == [
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def children(pid: int) -> list[int]:
    """The worker processes of a process (the resource tracker is none)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and b"spawn_main" in command:
            found.append(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_gzip_is_known_by_its_bytes_not_its_name(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b'{"text": "mill"}\n'))
    assert tokenizer.decode(run(tmp_path, [path], tokenizer)[0]) == "mill"
