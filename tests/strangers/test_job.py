"""A job of one's own over `millrace.engine.Run`: documents that came before are dropped.

Each task hashes the lines of one file; the job keeps the first line of each hash. It can be killed
at any instant, on both engines.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.engine import Done, Run, Task
from millrace.files import atomic_file

WAIT = 60.0  # seconds until something hangs


def hash_lines(seconds: float, task: Task) -> tuple[dict[str, Any], list[str]]:
    """The function of a task: writes the hash of each line of a file."""
    path = os.path.join(task.folder, "hashes")
    with open(task.payload, "rb") as source, open(path, "wb") as target:
        num_lines = 0
        for line in source:
            target.write(hashlib.blake2b(line, digest_size=16).digest())
            num_lines += 1
    time.sleep(seconds)
    with open(f"{task.payload}.log", "a") as log:
        log.write("x")
    return {"lines": num_lines}, [path]


def deduplicate(
    inputs: Sequence[str],
    output: str,
    *,
    engine: str = "local",
    workers: int | None = None,
    restart: bool = False,
    seconds: float = 0.0,
) -> dict[str, int]:
    """Writes each line that no file before has, and no line before it in its file."""
    job = {"job": "deduplicate 1", "inputs": inputs}
    sizes = {"sizes": [os.path.getsize(path) for path in inputs]}
    with Run(output, job, inputs=sizes, outputs=[output], engine=engine, restart=restart) as run:
        if run.result is not None:
            result: dict[str, int] = run.result
            return result
        tasks = [Task(number, path, path) for number, path in enumerate(inputs)]
        results = run.map(hash_lines, tasks, seconds, phase="hash", workers=workers)
        done = list(results)
        counts = {"lines": sum(one.record["lines"] for one in done), "kept": 0}

        def write() -> None:
            with atomic_file(output) as file:
                for line in _new_lines(done):
                    file.write(line)

        with run.phase("compare"):
            counts["kept"] = sum(1 for _ in _new_lines(done))
        run.publish(write, counts)
    return {**counts, "tasks": run.num_done}


def _new_lines(done: Sequence[Done]) -> Any:
    seen = set()
    for one in done:
        hashes = Path(one.folder, "hashes").read_bytes()
        with open(one.task.payload, "rb") as source:
            for place, line in enumerate(source):
                name = hashes[16 * place : 16 * place + 16]
                if name not in seen:
                    seen.add(name)
                    yield line


def make_inputs(folder: Path, count: int) -> list[str]:
    choices = random.Random(0)
    paths = [folder / f"{number:02}.jsonl" for number in range(count)]
    for path in paths:
        lines = [json.dumps({"text": f"the mill {choices.randrange(300)}"}) for _ in range(100)]
        path.write_text("".join(line + "\n" for line in lines))
    return list(map(str, paths))


def expected(inputs: Sequence[str]) -> bytes:
    return b"".join(
        dict.fromkeys(line for path in inputs for line in Path(path).read_bytes().splitlines(True))
    )


def test_duplicates_are_dropped_and_a_repeated_command_returns_its_result(tmp_path: Path) -> None:
    inputs, output = make_inputs(tmp_path, 5), tmp_path / "out"
    counts = deduplicate(inputs, str(output), workers=2)
    assert output.read_bytes() == expected(inputs)
    assert counts["tasks"] == 5
    assert deduplicate(inputs, str(output)) == {"lines": 500, "kept": counts["kept"]}
    assert deduplicate(inputs, str(output), restart=True, workers=1) == counts


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.long)])
def test_a_job_of_ones_own_survives_kills(tmp_path: Path, engine: str) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    inputs, output = make_inputs(tmp_path, 12), tmp_path / "out"
    code = (
        "import sys; from tests.strangers.test_job import deduplicate; "
        f"deduplicate(sys.argv[2:], sys.argv[1], engine={engine!r}, workers=2, seconds=0.1)"
    )
    num_kills = 0
    while True:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(output), *inputs], start_new_session=True
        )
        finished = _num_attempts(inputs)
        while process.poll() is None and num_kills < 2 and _num_attempts(inputs) < finished + 2:
            time.sleep(0.005)
        if num_kills == 2:
            assert process.wait(WAIT) == 0
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT)
        num_kills += 1
    assert output.read_bytes() == expected(inputs)
    assert _num_attempts(inputs) <= len(inputs) + 4 * num_kills  # those in flight ran twice
    assert not (tmp_path / "out.journal").exists()


def _num_attempts(inputs: Sequence[str]) -> int:
    return sum(os.path.getsize(f"{p}.log") for p in inputs if os.path.exists(f"{p}.log"))
