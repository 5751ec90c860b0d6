"""The command line: processes, exit codes, no tracebacks."""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from millrace import IndexedDataset, cli, demo, jobs
from millrace.jobs import indexing
from millrace.verbs.runs import DemoOptions
from tests import conftest
from tests.conftest import make_texts, write_jsonl
from tests.shard_folders import make_sequences, write_sequences
from tests.test_inspect_shards import SEQUENCES, write_shards


def millrace(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process."""
    words, output, errors = [*map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = cli.main(words)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(words, status, output.getvalue(), errors.getvalue())


def millrace_process(
    *arguments: object, shell: str = "{}", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Runs a command in a process of its own, by a line of bash with the command in place of {}."""
    command = shlex.join([sys.executable, "-m", "millrace", *map(str, arguments)])
    return subprocess.run(
        ["bash", "-c", shell.format(command)],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture
def tokenized(tmp_path: Path, tokenizer_file: Path) -> Path:
    source = write_jsonl(tmp_path / "a.jsonl.gz", make_texts(50))
    result = millrace(
        "tokenize", "--input", source, "--output_prefix", tmp_path / "out",
        "--tokenizer", tokenizer_file, "--append_eod", "--workers=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "50 documents" in result.stdout
    assert "MB/s" in result.stdout
    return tmp_path / "out_text_document"


def test_inspect_prints_text_or_json(tokenized: Path, tokenizer_file: Path) -> None:
    command = "inspect", tokenized, "--tokenizer", tokenizer_file
    dataset, result = IndexedDataset(tokenized), millrace(*command, "--document", "3")
    assert result.returncode == 0
    size = f"tokens     {dataset.num_tokens:,} (uint16)"
    for text in ("documents  50", size, "###", "document 3,", "<|endoftext|>"):
        assert text in result.stdout
    report = json.loads(millrace(*command, "--json").stdout)
    counts = {"num_documents": 50, "num_sequences": len(dataset), "num_tokens": dataset.num_tokens}
    assert (counts | {"dtype": "uint16", "has_checksums": True}).items() <= report.items()
    assert report["special_tokens"] == {"<|endoftext|>": len(dataset)}
    assert sum(count for _, _, count in report["histogram"]) == len(dataset)
    for low, high, count in report["histogram"]:
        lengths = dataset.sequence_lengths
        assert ((lengths >= low) & (lengths <= high)).sum() == count
    assert report["document"]["head"]["tokens"] == dataset[0].tolist()[:256]
    assert isinstance(report["document"]["head"]["text"], str)
    assert report["provenance"]["append_eod"] is True


def test_inspect_of_an_empty_dataset(tmp_path: Path) -> None:
    conftest.write_documents(tmp_path / "data", [])
    result = millrace("inspect", tmp_path / "data")
    assert result.returncode == 0
    assert "documents  0" in result.stdout


@pytest.mark.parametrize("verb", ["", *(verb.name for verb in cli.VERBS)])
def test_help(verb: str) -> None:
    result = millrace(*verb.split(), "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: millrace {verb}".rstrip())


def test_help_without_docstrings() -> None:
    """Under `python -OO`, which removes docstrings, verbs keep their help."""
    command = [sys.executable, "-OO", "-m", "millrace", "cache", "prune", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert "Removes what no run can use" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["tokenize"],
        ["inspect", "a", "--nonsense"],
        ["split", "a", "--output-prefix", "b"],
        ["split", "a", "--output-prefix", "b", "--documents", "1", "--size", "2"],
        ["split", "a", "--output-prefix", "b", "--size", "2Q"],
        ["convert", "a", "b", "--dtype", "token"],
        ["convert", "a.bin", "b", "--source-dtype", "S"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = millrace(*arguments)
    assert result.returncode == 2
    assert f"usage: millrace {arguments[0] if arguments[1:] else ''}" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_option_names_a_file_that_cannot_be_read() -> None:
    result = millrace("shuffle", "--input-list", "none", "--output-dir", "out")
    assert result.returncode == 2
    assert "--input-list: none cannot be read: No such file" in result.stderr


IDLE = [
    (["--eod-token", "<|endoftext|>"], "eod_token: add --append-eod or --chat"),
    (["--bos-token", "<|endoftext|>"], "bos_token: add --prepend-bos or --chat"),
    (["--lang", "german", "--keep-newlines"], "lang, keep_newlines: add --split-sentences"),
    (["--keep-sequential-samples"], "keep_sequential_samples: add --partitions"),
    (["--separator", "x"], "good.jsonl is read as jsonl: leave it out"),
]


def test_a_job_that_fails_exits_with_1_and_one_message(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ["a"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"text"\n')
    array = tmp_path / "array.jsonl"
    array.write_text('[\n{"text": "a"},\n{"text": "b"}\n]\n')
    two_ends = conftest.train_tokenizer(tmp_path / "two.json", ["<eos>", "</s>"])
    cut = tmp_path / "c_u"
    conftest.write_documents(cut, [[1], [2]])
    os.truncate(f"{cut}.idx", os.path.getsize(f"{cut}.idx") - 3)
    out = tmp_path / "out"
    out.mkdir()
    for arguments, message in [
        (["inspect", tmp_path / "none"], "none.bin and"),
        (["verify", tmp_path / "none"], "none.bin and"),
        (["inspect", tmp_path / "c"], f"not found. There is {tmp_path}/c_u"),
        (["inspect", good], "--tokenizer is missing"),
        (["inspect", f"{good}.no"], "not found"),
        (["inspect", "0.5"], "Is it a weight?"),
        (["inspect", cut], "truncated"),
        (["tokenize", "--input", bad, "--tokenizer", tokenizer_file], "bad.jsonl, line 2"),
        (["tokenize", "--input", tmp_path / "no", "--tokenizer", tokenizer_file], "cannot be read"),
        (["tokenize", "--input", good, "--tokenizer", good], "is not a tokenizer file"),
        (["tokenize", "--input", good, "--tokenizer", two_ends, "--append-eod"], "--eod-token"),
        (
            ["tokenize", "--input", good, "--tokenizer", tokenizer_file, "--json-keys", "body"],
            'no key "body"',
        ),
        *(
            (["tokenize", "--input", good, "--tokenizer", "bytes", *own], text)
            for own, text in IDLE
        ),
        (
            ["tokenize", "--input", array, "--tokenizer", "bytes", "--on-error", "skip"],
            "array.jsonl is a JSON array; `jq -c '.[]'` makes",
        ),
    ]:
        extra = ["--output-prefix", out / "data"] if arguments[0] == "tokenize" else []
        result = millrace(*arguments, *extra)
        assert result.returncode == 1, arguments
        assert result.stderr.startswith("millrace: error: ")
        assert message in result.stderr
        assert "Traceback" not in result.stderr
        assert list(out.iterdir()) == []


def test_the_error_of_a_full_disk_names_the_file_and_the_remedy(
    disk: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(20_000))
    command = ["tokenize", "--input", source, "--tokenizer", tokenizer_file, "--workers", 2]
    result = millrace(*command, "--output-prefix", tmp_path / "whole")
    assert result.returncode == 0, result.stderr
    for failing in (
        [*command, "--output-prefix", disk / "out"],
        ["merge", tmp_path / "whole_text_document", "--output-prefix", disk / "out"],
        ["convert", tmp_path / "whole_text_document", disk / "out.npy"],
    ):
        result = millrace(*failing)
        assert result.returncode == 1
        assert result.stderr.startswith(f"millrace: error: {disk}/out"), result.stderr
        assert "No space left on device. Make room on that disk, or write elsewhere" in (
            result.stderr
        )
        if (disk / "out.journal").exists():  # the chunks that were done are kept
            assert f"what is done, in {disk}/out.journal." in result.stderr
        else:
            assert "nothing half-written was left behind" in result.stderr
        assert result.stderr.count("\n") == 1
        shutil.rmtree(disk / "out.journal", ignore_errors=True)
        assert list(disk.iterdir()) == []
    splitting = ["split", tmp_path / "whole_text_document", "--documents", 5000]
    result = millrace(*splitting, "--output-prefix", disk / "out")
    assert "and run the same split again" in result.stderr


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii"])
def test_a_report_shows_names_that_the_terminal_cannot(
    tmp_path: Path, tokenizer_file: Path, encoding: str
) -> None:
    source = os.fsdecode(os.fsencode(tmp_path) + b"/\xc3\xa9\xff.jsonl")
    Path(source).write_text("bad")
    words = ["tokenize", "--tokenizer", tokenizer_file, "--output-prefix", tmp_path / "é"]
    words += ["--input", source, "--on-error", "skip", "--workers", "1"]
    result = millrace_process(*words, PYTHONIOENCODING=encoding)
    assert result.returncode == 0, result.stderr
    assert b"\\udcff.jsonl:1: " in result.stdout


def test_the_error_of_a_file_size_limit_names_the_limit(tokenized: Path, tmp_path: Path) -> None:
    arguments = "merge", tokenized, "--output-prefix", tmp_path / "new"
    result = millrace_process(*arguments, shell="ulimit -f 1; {}")
    assert result.returncode == 1
    assert result.stderr.startswith(f"millrace: error: {tmp_path}/new".encode()), result.stderr
    assert b"File too large. Raise the limit on file sizes (`ulimit -f`)" in result.stderr
    assert list(tmp_path.glob("new*")) == []


@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [
        (">&-", 0, ""),
        ("> /dev/full", 1, "the job is done, but its report cannot be written: No space left"),
        ("--json > /dev/full", 1, "the job is done, but its report cannot be written: No space"),
        ("2> /dev/full", 0, ""),
        ("2>&-", 0, ""),
    ],
)
def test_a_job_completes_when_its_report_cannot_be_written(
    tmp_path: Path, tokenizer_file: Path, redirection: str, status: int, message: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    words = ["tokenize", "--input", source, "--tokenizer", tokenizer_file, "--workers", "1"]
    result = millrace_process(
        *words,
        "--output-prefix",
        tmp_path / "out",
        shell=f"{{}} {redirection}",
        PYTHONUNBUFFERED="",
    )
    assert result.returncode == status
    assert message.encode() in result.stderr
    assert result.stderr.count(b"\n") == (1 if message else 0)
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 50


def test_a_closed_stdout_causes_no_traceback(tokenized: Path) -> None:
    result = millrace_process("inspect", tokenized, "--json", shell="set -o pipefail; {} | :")
    assert (result.returncode, result.stderr) == (0, b"")


def test_the_demo_runs_and_proves_its_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TRAINING_BYTES", 300_000)
    monkeypatch.setattr(demo, "NUM_SAMPLES", 512)
    result = millrace("demo", "--folder", tmp_path / "demo")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("token for token") == 2
    assert "What to type next" in result.stdout
    script = Path(__file__).parent.parent / "examples" / "fine_tune_chats.py"
    output = subprocess.check_output([sys.executable, script, tmp_path / "demo"], text=True)
    answers = ("Only on what I say myself, and on the token with which I stop.", "No.")
    answers += ("It says which tokens of a chat a model learns to write.",)
    # Which one it has learned by heart depends on Python's modules, which it read before.
    assert any(f"      {answer}<|im_end|>\n" in output for answer in answers)


def test_verify_merge_split_and_convert(tokenized: Path, tmp_path: Path) -> None:
    result = millrace("verify", tokenized)
    assert (result.returncode, result.stderr) == (0, "")
    assert "ok, structure and checksums" in result.stdout
    shards = millrace("split", tokenized, "--output-prefix", tmp_path / "s", "--documents", "20")
    assert shards.returncode == 0
    names = [str(tmp_path / f"s_{i:05}") for i in range(3)]
    assert all(name in shards.stdout for name in names)
    merged = millrace("merge", *names, "--output-prefix", tmp_path / "merged")
    assert merged.returncode == 0
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path}/merged{suffix}").read_bytes() == (
            Path(f"{tokenized}{suffix}").read_bytes()
        )
    sized = millrace("split", tokenized, "--output_prefix", tmp_path / "z", "--size", "1K")
    assert sized.returncode == 0
    array = tmp_path / "tokens.npy"
    assert millrace("convert", tokenized, array, "--dtype", "int32").returncode == 0
    assert millrace("convert", array, tmp_path / "stream", "--no-checksums").returncode == 0
    assert not (tmp_path / "stream.info.json").exists()
    assert (IndexedDataset(tmp_path / "stream").tokens == IndexedDataset(tokenized).tokens).all()


def test_verify_names_the_damage_and_exits_with_1(tokenized: Path) -> None:
    path = Path(f"{tokenized}.bin")
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    result = millrace("verify", tokenized)
    assert result.returncode == 1
    assert "DAMAGED" in result.stdout
    assert "block 0" in result.stdout
    assert "1 of 1 datasets are damaged" in result.stderr
    report = json.loads(millrace("verify", "no", tokenized, "--json").stdout)
    assert report.pop(0)["problems"][0].startswith("no.bin and no.idx not found")
    assert len(report[0]["problems"]) == 1
    path.unlink()
    path.mkdir()  # which root cannot read either
    result = millrace("verify", tokenized, "no")
    assert "1 of 2 datasets are unreadable, 1 of 2 datasets are missing" in result.stderr


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:surrogateescape"])
def test_json_is_json_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    domains = {"é😀": 4, "\udcff": 6}
    write_sequences(tmp_path / "out", make_sequences(10, 8), domain_stats=domains)
    result = millrace_process("inspect", tmp_path / "out", "--json", PYTHONIOENCODING=encoding)
    assert result.returncode == 0, result.stderr
    assert [*json.loads(result.stdout)["metadata"]["domain_stats"]] == [*domains]


def test_names_with_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    for name in ("\x1b[31mempty", "web\x1b[2J"):
        (tmp_path / "in" / name).mkdir(parents=True)
    path = tmp_path / "in" / "web\x1b[2J" / "a.bin"
    path.write_bytes(bytes(256))
    command = "shuffle", "--input-dir", tmp_path / "in", "--seq-len", 8, "--num-shards", 2
    result = millrace(*command, "--output-dir", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert r"\x1b[31mempty" in result.stderr
    errors = [result.stderr]
    path.write_bytes(bytes(7))
    errors.append(millrace(*command, "--output-dir", tmp_path / "other").stderr)
    assert r"error: " in errors[1]
    assert r"web\x1b[2J/a.bin" in errors[1]
    (tmp_path / "out" / "\x1b[31mred").touch()
    errors.append(millrace("verify", tmp_path / "out").stdout)
    assert r"\x1b[31mred does not belong" in errors[2]
    errors.append(millrace("inspect", tmp_path / "out").stdout)
    assert r"  \x1b[31mempty  " in errors[3]
    assert not any("\x1b" in text for text in errors)


def test_inspect_and_verify_of_a_folder_of_shards(tokenized: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_shards(folder, {"code": 300, "web": 700})
    picture = tmp_path / "shares.svg"
    result = millrace("inspect", folder, "--document", "7", "--svg", picture)
    assert result.returncode == 0, result.stderr
    assert "3 of 333 to 334 sequences" in result.stdout
    assert f"{SEQUENCES[7].tolist()}" in result.stdout
    assert picture.read_text().startswith("<svg ")
    assert json.loads(millrace("inspect", folder, "--json").stdout)["num_tokens"] == 4000
    result = millrace("verify", folder, tokenized)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count(": ok, ") == 2
    (folder / "notes.txt").write_text("mine")
    (folder / "shard_0001.bin").write_bytes(bytes(333 * 16))
    result = millrace("verify", folder, tokenized, "--threads", "2")
    assert result.returncode == 1
    assert "shard_0001.bin is damaged" in result.stdout
    assert "notes.txt does not belong to the shuffle" in result.stdout
    assert "1 of 2 datasets are damaged" in result.stderr
    for arguments, message in (
        (["inspect", tmp_path], "is not the output folder of a shuffle"),
        (["inspect", folder, "--svg", tmp_path / "none/a.svg"], "No such file or directory"),
        (["inspect", folder, "--dtype", "uint16"], ": leave the argument out"),
        (["inspect", tokenized, "--svg", picture], "are for the output folder of a shuffle"),
        (["verify", tmp_path], "1 of 1 datasets are damaged"),
    ):
        result = millrace(*arguments)
        assert result.returncode == 1
        assert message in result.stderr


@pytest.mark.parametrize(
    ("function", "options"), [(jobs.index, indexing.IndexOptions), (demo.run_demo, DemoOptions)]
)
def test_a_verb_and_its_function_have_the_same_defaults(
    function: Callable[..., Any], options: type
) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    parameters = inspect.signature(function).parameters
    shared = parameters.keys() & defaults.keys()
    assert len(shared) >= min(3, len(defaults))
    for name in shared:
        default = parameters[name].default
        if default is inspect.Parameter.empty:
            assert name in ("config", "folder") or defaults[name] is dataclasses.MISSING
        else:
            assert default == defaults[name], name


OUTPUTS_IN_BUCKETS = (
    "merge a a --output-prefix s3://t/c",
    "split a --documents 1 --output-prefix s3://t/c",
    "convert a s3://t/c --dtype int32",
    "convert a s3://t/c.npy",
    "train-tokenizer --input in.jsonl --vocab-size 260 --output s3://t/c.json",
    "plan run.toml --picture s3://t/c.svg",
    "index run.toml --cache s3://t/c",
    "index run.toml --megatron-cache s3://t/c --tokenizer-identifiers {}",
    "cache list s3://t",
)


@pytest.mark.parametrize("words", OUTPUTS_IN_BUCKETS)
def test_outputs_in_buckets(tmp_path: Path, monkeypatch: Any, words: str) -> None:
    """Before anything is made, also where a local folder has the name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:/t").mkdir(parents=True)
    write_jsonl(tmp_path / "in.jsonl", make_texts(5))
    conftest.write_documents(tmp_path / "a", [[1, 2, 3]] * 9)
    (tmp_path / "run.toml").write_text(
        "data_path='a'\nseq_length=4\nnum_samples=[9,0,0]\nsplit='1'"
    )
    before = sorted(tmp_path.rglob("*"))
    ended = millrace(*words.split())
    assert "is in a bucket, and files are written in a file system" in ended.stderr
    assert (ended.returncode, sorted(tmp_path.rglob("*"))) == (1, before)
