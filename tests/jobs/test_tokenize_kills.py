"""Tokenising survives kills, full disks, read-only folders, and inputs that vanish or change."""

import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from millrace.cli import main
from tests.jobs import tokenize_kills
from tests.jobs.kills import DEADLINE, Job, finished_tasks
from tests.jobs.tokenize_kills import VERB

NUM_DOCUMENTS = 500
PAGE = 4096  # bytes; a tmpfs gives out pages


def test_kills_at_random_moments() -> None:
    """`python -m tests.jobs.tokenize_kills` does more of them, to more kinds of jobs."""
    counts = tokenize_kills.run(3, 0, NUM_DOCUMENTS, ["keys"])
    assert counts["parent"] + counts["worker"] >= 3


# ---- one error, and the next run continues ----


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return tokenize_kills.make_jobs(tmp_path_factory.mktemp("job"), NUM_DOCUMENTS, ["plain"])[0]


class Runner:
    """Runs the job in this process."""

    def __init__(self, job: Job, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.job, self.output, self.capsys = job, output, capsys

    def run(self, *options: str) -> tuple[int, str, str]:
        """Exit status, stdout and the error messages on stderr."""
        self.capsys.readouterr()
        prefix = str(self.output / "out")
        status = main(["tokenize", *self.job.options, "--output-prefix", prefix, *options])
        output = self.capsys.readouterr()
        errors = [line for line in output.err.splitlines() if "error: " in line]
        return status, output.out, "\n".join(errors)

    def assert_fails(self, *texts: str) -> None:
        """One error, and no file of the output."""
        status, _, error = self.run()
        assert status == 1
        assert error.count("error: ") == 1
        for text in texts:
            assert text in error
        assert not [name for name in self.job.files if (self.output / name).exists()]

    def assert_succeeds(self, *options: str, least_kept: int = 0) -> None:
        status, output, error = self.run(*options)
        assert status == 0, error
        done, kept = VERB.counts_of(json.loads(output))
        assert done + kept == self.job.num_tasks
        assert kept >= least_kept
        self.job.check(VERB.read_files(self.output))


@pytest.fixture
def runner(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runner:
    (tmp_path / "output").mkdir()
    return Runner(job, tmp_path / "output", capsys)


def test_a_full_disk(job: Job, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = Runner(job, disk, capsys)
    num_failures = 0
    for left in (0, 3, 20, 60, 100):
        ballast = disk / "ballast"
        with open(ballast, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(PAGE))
            except OSError:
                file.truncate(max(0, file.tell() - left * PAGE))
        status, _, error = runner.run()
        ballast.unlink()
        if status == 0:
            break
        num_failures += 1
        assert error.count("error: ") == 1
        assert "No space left on device" in error
        assert not [name for name in job.files if (disk / name).exists()]
    assert num_failures >= 2
    runner.assert_succeeds()


def test_a_read_only_folder(job: Job, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = Runner(job, disk, capsys)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    runner.assert_fails("Read-only file system")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    runner.assert_succeeds()


def test_a_limit_on_file_sizes(runner: Runner) -> None:
    """A chunk fits, the whole file does not: the next run keeps all chunks."""
    size = max(len(data) for data in runner.job.files.values())
    command = ["sh", "-c", f'ulimit -f {size // 2 // 512}; exec "$@"', "sh"]
    process = VERB.launch([*runner.job.options, "--workers", "2"], runner.output, command)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert errors.count("error: ") == 1
    assert "ulimit -f" in errors
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    runner.assert_succeeds(least_kept=1)


@pytest.fixture
def interrupted(runner: Runner) -> Runner:
    """A job that was killed when some chunks were done."""
    process = VERB.launch(runner.job.options, runner.output)
    while len(finished_tasks(runner.output)) < 3:
        assert process.poll() is None, "the job has ended"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return runner


def test_an_input_that_vanishes(interrupted: Runner) -> None:
    source = Path(interrupted.job.options[1])
    hidden = source.with_suffix(".hidden")
    source.rename(hidden)
    try:
        interrupted.assert_fails(str(source))
    finally:
        hidden.rename(source)
    interrupted.assert_succeeds(least_kept=3)


def test_an_input_that_changes(interrupted: Runner) -> None:
    source = Path(interrupted.job.options[1])
    data, status = source.read_bytes(), source.stat()
    source.write_bytes(data + b'{"text": "more"}\n')
    try:
        status_of_job, output, error = interrupted.run()
    finally:
        source.write_bytes(data)
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert status_of_job == 0, error
    assert VERB.counts_of(json.loads(output))[1] >= 2  # all but the last, if it was done
    files = VERB.read_files(interrupted.output)
    name = next(name for name in interrupted.job.files if name.endswith(".bin"))
    assert files[name].startswith(interrupted.job.files[name])
    assert len(files[name]) > len(interrupted.job.files[name])


def test_a_restart_keeps_nothing(interrupted: Runner) -> None:
    status, output, _ = interrupted.run("--restart")
    assert status == 0
    assert VERB.counts_of(json.loads(output)) == (interrupted.job.num_tasks, 0)
    interrupted.job.check(VERB.read_files(interrupted.output))
