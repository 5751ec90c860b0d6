"""Ctrl-C, once or several times, at any instant.

Each round runs `millrace tokenize` in a new session; all its processes get the signal, as from a
terminal.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from millrace.interrupts import interruptible, interrupts_held
from tests.conftest import make_texts, write_jsonl
from tests.jobs.kills import members_of

MESSAGE = "millrace: error: interrupted; run "  # what remains
OLD = {f"out_text_document{suffix}": b"old" for suffix in (".bin", ".idx")}


def interrupt_tokenize(folder: Path, command: Sequence[object], pauses: Sequence[float]) -> None:
    """Sends Ctrl-C after each pause (in seconds), counted from the first output file on.

    Nothing of the output changes, and no process of the session is left.
    """
    folder.mkdir()
    for name, content in OLD.items():
        (folder / name).write_bytes(content)
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace", "tokenize", "--restart", "--input",
         *map(str, command), "--output-prefix", folder / "out"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        while len(list(folder.iterdir())) <= len(OLD):
            assert process.poll() is None
            time.sleep(0.001)
        for pause in pauses:
            time.sleep(pause)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        left = members_of(process.pid)
        assert left == [], f"{pauses}: processes are left: {left}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (process.returncode, stderr.count("\n")) == (130, 1), (stderr, pauses)
    assert stderr.startswith(MESSAGE)
    # The journal is what the next run continues with.
    paths = [path for path in folder.iterdir() if path.name != "out.journal"]
    assert {path.name: path.read_bytes() for path in paths} == OLD


@pytest.mark.parametrize("rounds", [3, pytest.param(12, marks=pytest.mark.long)])
def test_ctrl_c_at_random_instants(rounds: int, tmp_path: Path, tokenizer_file: Path) -> None:
    """While workers start, import and work, and again while the job cleans up."""
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(20_000))
    # A minute of work, or more.
    command = [*[source] * 100, "--tokenizer", tokenizer_file, "--workers", 2]
    for number in range(rounds):
        pauses = [random.uniform(0, 1)]
        pauses += [random.choice([0, random.uniform(0, 0.02)]) for _ in range(random.randrange(4))]
        interrupt_tokenize(tmp_path / str(number), command, pauses)


def test_ctrl_c_while_it_waits_for_a_pipe(tmp_path: Path, tokenizer_file: Path) -> None:
    """An input without a writer, with one worker and with two."""
    os.mkfifo(tmp_path / "pipe")
    for workers in (1, 2):
        command = [tmp_path / "pipe", "--tokenizer", tokenizer_file, "--workers", workers]
        interrupt_tokenize(tmp_path / str(workers), command, [0.2])


def test_a_held_interrupt_is_raised_once_at_the_next_interruptible_block() -> None:
    order = []

    def job() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            order.append("held")
            try:
                with interruptible():
                    order.append("never")
            finally:
                signal.raise_signal(signal.SIGINT)
                order.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        job()
    assert order == ["held", "cleaned up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_after_the_last_interruptible_block_is_raised_at_the_end() -> None:
    order = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():  # noqa: PT012
        with interruptible():
            order.append("open")
        signal.raise_signal(signal.SIGINT)
        order.append("done")
    assert order == ["open", "done"]


def test_a_job_in_another_thread_leaves_ctrl_c_to_the_main_thread() -> None:
    seen = []

    def job() -> None:
        with interrupts_held(), interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


_FINALIZER = """
import signal, sys
from millrace import cli

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # Python drops the KeyboardInterrupt

def run(arguments):
    Finalized()
    print("dropped")
    signal.raise_signal(signal.SIGINT)

cli._run = run
sys.exit(cli.main())
"""


def test_ctrl_c_counts_again_after_python_has_dropped_one() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _FINALIZER], capture_output=True, text=True, timeout=60
    )
    expected = 130, "dropped\n", "millrace: error: interrupted\n"
    assert (result.returncode, result.stdout, result.stderr) == expected
