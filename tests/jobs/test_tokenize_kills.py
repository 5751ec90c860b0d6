"""Tokenising survives kills, full disks and read-only folders."""

import json
import subprocess
from pathlib import Path

import pytest

from millrace.cli import main
from tests.jobs import tokenize_kills
from tests.jobs.kills import Job
from tests.jobs.tokenize_kills import VERB

NUM_DOCUMENTS = 500
PAGE = 4096  # bytes; a tmpfs gives out pages


def test_kills_at_random_moments() -> None:
    """`python -m tests.jobs.tokenize_kills` does more of them, to more kinds of jobs."""
    counts = tokenize_kills.run(3, 0, NUM_DOCUMENTS, ["keys"])
    assert counts["parent"] + counts["worker"] >= 3


class Runner:
    """Runs a job in this process, on a small disk."""

    def __init__(self, job: Job, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.job, self.disk, self.capsys = job, disk, capsys

    def run(self) -> str:
        """Returns the one error, which leaves no file of the output; empty if there is none."""
        self.capsys.readouterr()
        command = ["tokenize", *self.job.options, "--output-prefix", str(self.disk / "out")]
        status, output = main(command), self.capsys.readouterr()
        if status == 0:
            assert sum(VERB.counts_of(json.loads(output.out))) == self.job.num_tasks
            return ""
        assert output.err.count("error: ") == 1
        assert not [name for name in self.job.files if (self.disk / name).exists()]
        return output.err


@pytest.fixture
def runner(tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]) -> Runner:
    (job,) = tokenize_kills.make_jobs(tmp_path, NUM_DOCUMENTS, ["plain"])
    return Runner(job, disk, capsys)


def test_a_full_disk(runner: Runner) -> None:
    ballast, num_failures = runner.disk / "ballast", 0
    for left in (0, 3, 20, 60, 100):
        with open(ballast, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(PAGE))
            except OSError:
                file.truncate(max(0, file.tell() - left * PAGE))
        error = runner.run()
        ballast.unlink()
        if not error:
            break
        num_failures += 1
        assert "No space left on device" in error
    assert num_failures >= 2
    assert runner.run() == ""
    runner.job.check(VERB.read_files(runner.disk))


def test_a_read_only_folder(runner: Runner) -> None:
    for option in ("ro", "rw"):
        subprocess.run(["mount", "-o", f"remount,{option}", str(runner.disk)], check=True)
        assert ("Read-only file system" in runner.run()) == (option == "ro")
