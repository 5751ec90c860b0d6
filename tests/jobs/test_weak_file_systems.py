"""Every job on a file system without locks, flushes of folders, copies in the kernel and hints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.no_flock import no_flock

COMMANDS = (
    "tokenize --input IN --output-prefix OUT/a --tokenizer bytes --append-eod",
    "merge OUT/a_text_document OUT/a_text_document --output-prefix OUT/merged",
    "split OUT/merged --documents 150 --output-prefix OUT/part",
    "convert OUT/merged OUT/merged.npy",
    "shuffle --input-list LIST --output-dir OUT/shuffled --seq-len 16 --num-shards 3",
    "shuffle --input-list LIST --output-dir OUT/shuffled --seq-len 16 --num-shards 3",  # again
    "verify OUT/merged OUT/shuffled",
)


def _run(folder: Path, environment: dict[str, str] | None) -> dict[str, bytes]:
    """The files that all verbs leave."""
    output = folder / "out"
    output.mkdir(parents=True)
    text = folder / "a.jsonl"
    text.write_text("".join(json.dumps({"text": f"{n} " * 20}) + "\n" for n in range(200)))
    (folder / "list").write_text("1 out/merged\n")
    for command in COMMANDS:
        words = command.replace("OUT", "out").replace("IN", "a.jsonl").replace("LIST", "list")
        arguments = [sys.executable, "-m", "millrace", *words.split()]
        options: Any = {"capture_output": True, "text": True, "timeout": 300}
        result = subprocess.run(arguments, cwd=folder, env=environment, **options)
        assert result.returncode == 0, command + result.stderr
    paths = [path for path in output.rglob("*") if path.is_file()]
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}


def test_all_verbs_leave_the_same_files(tmp_path: Path) -> None:
    usual = _run(tmp_path / "usual", None)
    weak = _run(tmp_path / "weak", no_flock(tmp_path, more=True))
    assert weak.keys() == usual.keys()  # no journal is left
    same = [name for name in usual if name.endswith((".bin", ".idx", ".npy"))]
    assert len(same) >= 12
    assert {name: weak[name] for name in same} == {name: usual[name] for name in same}


def test_a_job_that_fails_at_its_start_leaves_no_journal(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    command = "tokenize --json-keys nothing --input a.jsonl --output-prefix new --tokenizer bytes"
    arguments, environment = (
        [sys.executable, "-m", "millrace", *command.split()],
        no_flock(tmp_path),
    )
    assert subprocess.run(arguments, cwd=tmp_path, env=environment, timeout=300).returncode == 1
    assert not list(tmp_path.glob("new*"))
