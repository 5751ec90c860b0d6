"""Kills of jobs: a process tree, what a journal holds, and a process that dies at a certain call.

`run_jobs` kills commands at random moments, as often as it is told; `tokenize_kills` and
`shuffle_kills` say which commands. The command of a `Verb` is killed, or one of its workers, and it
runs again until the job is done. A job that loses one worker must go on by itself. At the end

- the files equal those of an undisturbed run, byte for byte, and nothing else is left;
- no task ran twice, except those in flight: the journal keeps what is done as it is, and the last
  run reports every task that it found as kept;
- no worker has outlived its parent.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DEADLINE = 120.0  # seconds that a run, or the end of an orphan, may take
MOST_WORKER_KILLS = 2  # in one run; a task whose worker dies three times is an error
KILLED = 9  # status of a process that `run_and_die` has ended


class KillError(AssertionError):
    """Something was lost, done twice, or left behind."""


def finished_tasks(folder: Path) -> dict[str, str]:
    """The folder of the files of each task in the journals of a folder, by the task's id."""
    attempts: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):  # the job ends, and removes its journal
        for path in folder.glob("*.journal/*/done.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a torn line
                    entry = json.loads(line)["entry"]
                    if "task" in entry:
                        attempts[entry["task"]] = entry["attempt"]
    return attempts


def descendants(pid: int) -> list[int]:
    """The living processes that a process has started, and theirs."""
    processes = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                processes += [child, *descendants(child)]
    return [pid for pid in processes if not is_ended(pid)]


def workers_of(pid: int) -> list[int]:
    """The worker processes of a process."""
    workers = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if b"engine.tasks" in Path(f"/proc/{child}/cmdline").read_bytes():
                workers.append(child)
    return workers


def members_of(session: int) -> list[int]:
    """The living processes of a session."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                members.append(int(path.parent.name))
    return members


def is_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def wait_for_end(pids: Sequence[int]) -> None:
    """Waits for processes whose parent was killed; KillError if they stay."""
    end = time.monotonic() + DEADLINE
    while left := [pid for pid in pids if not is_ended(pid)]:
        if time.monotonic() > end:
            for pid in left:
                kill(pid)
            raise KillError(f"{len(left)} workers live {DEADLINE:.0f} s after their parent's death")
        time.sleep(0.005)


def kill(pid: int) -> bool:
    """Kills a process; returns whether there was one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def run_and_die(job: Callable[[], object], num_calls: int) -> None:
    """Runs a job in a forked child, but ends the process after a number of calls of the kernel."""

    def limited(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls -= 1
            if num_calls < 0:
                os._exit(KILLED)
            return function(*arguments, **options)

        return call

    for name in ("rename", "unlink", "mkdir", "rmdir", "fsync"):
        setattr(os, name, limited(getattr(os, name)))
    try:
        job()
    finally:
        os._exit(0 if num_calls >= 0 and sys.exc_info()[0] is None else 1)


def deaths_of(job: Callable[[], object], step: int = 1) -> Iterator[None]:
    """Runs a job in children that die before each of its calls of the kernel, and after all."""
    num_calls, status = random.randrange(step), KILLED
    while status == KILLED:
        if (child := os.fork()) == 0:
            run_and_die(job, num_calls)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        num_calls += step
        yield
    assert status == 0


class Job(NamedTuple):
    """A command without its output, and what an undisturbed run writes, in how many seconds."""

    name: str
    options: Sequence[str]
    files: dict[str, bytes]
    num_tasks: int
    seconds: float

    def check(self, files: dict[str, bytes]) -> None:
        """Raises a KillError if the files are not those of an undisturbed run."""
        names = {name for name in {*files, *self.files} if files.get(name) != self.files.get(name)}
        if names:
            raise KillError(f"not as in an undisturbed run: {sorted(names)}")


class Verb(NamedTuple):
    """A command that is killed.

    Attributes:
        words: The command after `python`, up to the path of its output, which the options follow.
        output: The name of that path in the folder of the output, or empty.
        unit: What its summary counts, as "done" and "kept".
        reports: Pattern of files that tell of the run, not of the data.
    """

    words: Sequence[str]
    output: str
    unit: str
    reports: str

    def launch(
        self, options: Sequence[str], output: Path, wrapper: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Starts the command; `wrapper` is a command that runs it."""
        if self.output:
            output.mkdir(exist_ok=True)
        command = [*wrapper, sys.executable, *self.words, str(output / self.output), *options]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, **pipes)

    def counts_of(self, summary: dict[str, Any]) -> tuple[int, int]:
        """Numbers of tasks that the run did and that it kept."""
        return summary[f"{self.unit}_done"], summary[f"{self.unit}_kept"]

    def read_files(self, output: Path) -> dict[str, bytes]:
        """The files of an output; empty what tells of the run."""
        return {
            path.name: b"" if path.is_dir() or path.match(self.reports) else path.read_bytes()
            for path in output.glob("*")
        }

    def undisturbed(self, name: str, options: Sequence[str], folder: Path) -> Job:
        """The job of a command, which runs once."""
        output, start = folder / "undisturbed", time.monotonic()
        done, kept = self.counts_of(finish(self.launch(options, output)))
        seconds, files = time.monotonic() - start, self.read_files(output)
        shutil.rmtree(output)
        if kept != 0:
            raise KillError(f"{name}: the first run kept {kept} tasks")
        return Job(name, options, files, done, seconds)

    def run_job(self, job: Job, output: Path, choices: random.Random, counts: Counter[str]) -> None:
        """Runs a job until it is done, with kills; KillError if a law is broken."""
        tasks: dict[str, str] = {}
        is_whole = False
        while True:
            process = self.launch(job.options, output)
            _disturb(process, job, output, len(tasks), choices, counts)
            if process.wait(DEADLINE) != -signal.SIGKILL:
                num_kept = job.num_tasks if is_whole else len(tasks)
                found = self.counts_of(finish(process))
                if found != (job.num_tasks - num_kept, num_kept):
                    raise KillError(f"{found} done and kept, the journal had {num_kept}: {job[3:]}")
                break
            process.communicate()
            later, files = finished_tasks(output), self.read_files(output)
            if is_whole := files.keys() >= job.files.keys():
                job.check({name: files[name] for name in job.files})
                counts["after the publication"] += 1
            elif changed := [task for task in tasks if later.get(task) != tasks[task]]:
                raise KillError(f"tasks that ran again: {sorted(changed)[:5]}")
            tasks = later
            counts["runs"] += 1
        job.check(self.read_files(output))


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The summary of a run that was not killed."""
    output, errors = process.communicate(timeout=DEADLINE)
    if process.returncode != 0:
        raise KillError(f"the job failed with status {process.returncode}: {errors[-2000:]}")
    summary: dict[str, Any] = json.loads(output)
    return summary


def _disturb(
    process: subprocess.Popen[str],
    job: Job,
    output: Path,
    num_kept: int,
    choices: random.Random,
    counts: Counter[str],
) -> None:
    """Kills the process, or workers, at random moments, unless it ends before."""
    for _ in range(MOST_WORKER_KILLS):
        if _wait_for_moment(process, job, output, num_kept, choices):
            return
        family = descendants(process.pid)
        if not family or choices.random() < 0.4:
            counts["parent"] += kill(process.pid)
            process.wait(DEADLINE)
            wait_for_end(family)
            return
        counts["worker"] += kill(choices.choice(family))


def _wait_for_moment(
    process: subprocess.Popen[str], job: Job, output: Path, num_kept: int, choices: random.Random
) -> bool:
    """Waits for a random moment; returns whether the process has ended before.

    A fifth of the moments is at any time, and may be later than the end: the job must be able to
    end. A fifth is while the output is published, and the others while tasks run.
    """
    seconds = choices.uniform(0, 1.2 * job.seconds)
    kind = choices.random()
    if kind < 0.6:
        while process.poll() is None and len(finished_tasks(output)) <= num_kept:
            time.sleep(0.002)
        seconds *= choices.random() * (1 - num_kept / job.num_tasks) / 3
    elif kind < 0.8:
        paths = [output / name for name in job.files]
        while process.poll() is None and not any(path.exists() for path in paths):
            time.sleep(0.0005)
        seconds = choices.uniform(0, 0.03)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    return False


def run_jobs(
    make_jobs: Callable[[Path, int, Sequence[str]], Sequence[Any]],
    run_job: Callable[[Any, Path, random.Random, Counter[str]], None],
    num_kills: int,
    seed: int,
    size: int,
    names: Sequence[str] = (),
) -> Counter[str]:
    """Runs jobs in random order, until there were that many kills; returns what was counted.

    `make_jobs` writes inputs of a size into a folder and returns the jobs, of these names or all.
    `run_job` runs a job with kills, which it counts as "parent" and "worker".
    """
    choices = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = make_jobs(folder, size, names)
        order: list[Any] = []
        while counts["parent"] + counts["worker"] < num_kills:
            order = order or choices.sample(jobs, len(jobs))
            job: Any = order.pop()
            output = folder / "output"
            try:
                run_job(job, output, choices, counts)
            except KillError as error:
                raise KillError(f"seed {seed}, job {job.name!r}: {error}") from None
            counts["jobs"] += 1
            shutil.rmtree(output)
    return counts


def run_command(
    description: str, run: Callable[[int, int, int], Counter[str]], unit: str, default: int
) -> None:
    """The command line of a script that kills jobs; `run` gets kills, seed and size of the input.

    `unit` is what the size counts, `default` the usual one.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(f"--{unit}", dest="size", type=int, default=default, help="in an input")
    options = parser.parse_args()
    start = time.monotonic()
    counts = run(options.kills, options.seed, options.size)
    seconds = time.monotonic() - start
    print(f"seed {options.seed}: {dict(counts)}, {seconds:.0f} s; nothing was lost or done twice")
