"""A run: what counts as done, who may run, what a kill or another job leaves, and its result."""

import errno
import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.engine import Done, Run, Task, progress, run_local
from millrace.engine.tasks import run_attempt
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.files import checksum
from tests.jobs.engine_job import command, content_of, expected_output, run_job
from tests.jobs.kills import KILLED, deaths_of, finished_tasks
from tests.no_flock import no_flock

HANG = 60.0  # seconds
LEFT = ["out.job.info.json", "out.log", "out.out"]
JOB = {"inputs": [{"path": "a.jsonl", "size": 3}], "append_eod": False, "keys": ("text",)}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_data(context: Any, task: Task) -> tuple[dict[str, Any], Any]:
    """Writes a file; fails at the payload "fail", and damages what it says at others."""
    path = os.path.join(task.folder, "data")
    assert isinstance(task.number, int)
    content = content_of(task.number)
    Path(path).write_bytes(content)
    if task.payload == "fail":
        raise DataError(f"task {task.number} fails")
    if task.payload == "hashed":
        return {"number": task.number}, {path: (len(content), checksum([content]))}
    return {"number": task.payload or task.number}, [path]


def do_tasks(run: Run, *numbers: int, payload: Any = None) -> list[Done]:
    tasks = [Task(number, payload) for number in numbers]
    return list(run.map(write_data, tasks, phase="test", workers=1))


def start(folder: Path, job: Any = JOB, **options: Any) -> Run:
    return Run(folder / "out", job, **options)


def refuse(message: str, folder: Path, job: Any = JOB, error: Any = ConfigError, **o: Any) -> str:
    """Checks that a job is refused with a message, which is returned as a whole."""
    with pytest.raises(error, match=message) as caught:
        start(folder, job, **o).__enter__()
    return str(caught.value)


def kept(folder: Path, *numbers: int, **options: Any) -> list[bool]:
    """Runs tasks; returns whether each was done already."""
    with start(folder, **options) as run:
        return [one.is_kept for one in do_tasks(run, *numbers)]


def interrupted(folder: Path, *numbers: int) -> list[Path]:
    """The files of the tasks of a job that does not finish."""
    with start(folder) as run:
        done = do_tasks(run, *numbers)
    return [Path(one.folder, "data") for one in done]


def test_a_run_continues_its_job(tmp_path: Path) -> None:
    with start(tmp_path) as run:  # without a finished task, it leaves nothing
        run.store("plan", [])
        with pytest.raises(DataError, match="task 0 fails"):
            do_tasks(run, 0, payload="fail")
    assert names_in(tmp_path) == []
    with start(tmp_path) as run:
        assert run.once("plan", lambda: {"tasks": (1, 2)}) == {"tasks": [1, 2]}
        assert [one.record for one in do_tasks(run, 1)] == [{"number": 1}]
        assert names_in(tmp_path) == ["out.journal", "out.journal.lock"]
        assert (run.num_done, run.num_kept) == (1, 0)
    assert names_in(tmp_path) == ["out.journal"]
    with start(tmp_path) as run:
        assert run.once("plan", lambda: 1 / 0) == {"tasks": [1, 2]}
        run.store("plan", 3)
        assert (run.stored("plan"), run.stored("other")) == (3, None)
        done = do_tasks(run, 0, 1)
        assert [one.record["number"] for one in done] == [0, 1]
        assert [one.is_kept for one in done] == [False, True]
        assert (run.num_done, run.num_kept) == (1, 1)


def test_a_task_says_which_files_it_wrote(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        (done,) = do_tasks(run, 0, payload="hashed")
    Path(done.folder, "data").write_bytes(b"x")
    assert kept(tmp_path, 0) == [False]


def test_errors_are_raised_in_the_order_of_tasks(tmp_path: Path) -> None:
    """What was done before them is kept, and was yielded."""

    def tasks() -> Iterator[Task]:
        yield Task(0, 1)
        yield Task(1, 1)
        raise DataError("the input is damaged")

    for _ in range(2):
        with start(tmp_path) as run:
            results = run.map(write_data, tasks(), phase="test", workers=2)
            assert [next(results).task.number, next(results).task.number] == [0, 1]
            with pytest.raises(DataError, match="the input is damaged"):
                next(results)
    assert set(finished_tasks(tmp_path)) == {"000000", "000001"}


def test_a_task_that_is_not_kept_runs_again(tmp_path: Path) -> None:
    interrupted(tmp_path, 0, 1)
    with start(tmp_path) as run:
        tasks = [Task(0, 5), Task(1, 5)]
        keep = run.map(write_data, tasks, phase="", workers=1, keep=lambda task, _: task.number > 0)
        assert [one.record["number"] for one in keep] == [5, 1]
    with start(tmp_path) as run:
        assert [one.record["number"] for one in do_tasks(run, 0, 1)] == [5, 1]


@pytest.mark.parametrize("engine", ["local", "other"])
def test_tasks_of_other_machines_are_flushed_before_they_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    flush, flushed = os.fsync, []

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), finished_tasks(tmp_path)))

    executor: Any = "local" if engine == "local" else functools.partial(run_local)
    with start(tmp_path, engine=executor) as run:
        monkeypatch.setattr(os, "fsync", fsync)
        (done,) = do_tasks(run, 0)
        path = os.path.join(done.folder, "data")
        assert [tasks for name, tasks in flushed if name == path] == [{}] * (engine != "local")


# ---- other jobs, and results ----


def test_another_job_is_refused_by_what_differs(tmp_path: Path) -> None:
    interrupted(tmp_path, 0)
    other = {
        "inputs": [{"path": "b.jsonl", "size": 3}],
        "append_eod": True,
        "keys": ["text", "title"],
        "dtype": "int32",
    }
    message = (
        "inputs[0].path was 'a.jsonl', and is 'b.jsonl' now; append_eod was False, and is True "
        "now; keys was ['text'], and is ['text', 'title'] now; dtype was nothing, and is 'int32' "
        "now"
    )
    refuse(re.escape(message), tmp_path, other)
    many = {**JOB, **{str(number): "x" * 1000 for number in range(100)}}
    assert len(refuse(r"; 95 more\. Run", tmp_path, many)) < 1500
    calls: list[int] = []
    with start(tmp_path, other, restart=True, on_restart=lambda: calls.append(1)) as run:
        assert calls == [1]
        assert run.stored("plan") is None
        assert not do_tasks(run, 0)[0].is_kept
        assert len(names_in(tmp_path / "out.journal")) == 2  # job.json and the new run
    refuse("keys was .*title", tmp_path)


@pytest.mark.parametrize("value", [1.0, True, None, "1", [1], {"a": 1}])
def test_equal_numbers_of_other_types_differ(tmp_path: Path, value: Any) -> None:
    with start(tmp_path, {"seed": 1}) as run:
        do_tasks(run, 0)
    refuse("seed", tmp_path, {"seed": value})


def test_jobs_and_records_are_plain_json(tmp_path: Path) -> None:
    for value in (object(), float("nan"), b"x"):
        with pytest.raises(ConfigError, match="cannot be stored as JSON"):
            start(tmp_path, {"value": value})
        with start(tmp_path) as run:
            for call in (
                lambda value=value: run.store("x", value),
                lambda value=value: do_tasks(run, 0, payload=value),
            ):
                with pytest.raises(ConfigError, match="cannot be stored as JSON"):
                    call()


def publish(folder: Path, content: str, **options: Any) -> Any:
    """A job that writes a file; its result."""
    path = folder / "out.txt"
    with start(folder, outputs=[str(path)], **options) as run:
        if run.result is not None:
            return run.result, True
        do_tasks(run, 0)
        return run.publish(lambda: path.write_text(content), {"is": content}), False


def test_a_finished_job_returns_its_result(tmp_path: Path) -> None:
    inputs = {"size": 3}
    assert publish(tmp_path, "a", inputs=inputs) == ({"is": "a"}, False)
    assert names_in(tmp_path) == ["out.job.info.json", "out.txt"]
    assert publish(tmp_path, "b", inputs=inputs) == ({"is": "a"}, True)
    for options, message in (
        ({"inputs": {"size": 4}}, "size was 3, and is 4 now"),
        ({"inputs": inputs, "job": {}}, "append_eod was False, and is nothing now"),
    ):
        with pytest.raises(ConfigError, match=f"out.txt is there already.*{message}.*--restart"):
            publish(tmp_path, "b", **options)
        assert names_in(tmp_path) == ["out.job.info.json", "out.txt"]
    assert publish(tmp_path, "b", inputs=inputs, restart=True) == ({"is": "b"}, False)
    (tmp_path / "out.txt").write_text("of another program")
    with pytest.raises(ConfigError, match=r"out.txt is there already\. Give --restart"):
        publish(tmp_path, "c", inputs=inputs)
    (tmp_path / "out.txt").unlink()
    assert publish(tmp_path, "c", inputs=inputs) == ({"is": "c"}, False)
    (tmp_path / "out.job.info.json").write_text("{")
    with pytest.raises(ConfigError, match=r"out.txt is there already"):
        publish(tmp_path, "d", inputs=inputs)


def test_a_finished_job_leaves_the_journal_of_another_one(tmp_path: Path) -> None:
    publish(tmp_path, "a")
    other = {"append_eod": True}
    with start(tmp_path, other, restart=True) as run:
        do_tasks(run, 0)
    assert publish(tmp_path, "b") == ({"is": "a"}, True)
    with start(tmp_path, other) as run:
        assert do_tasks(run, 0)[0].is_kept


def test_a_job_that_was_killed_while_it_removed_its_journal_is_done(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        shutil.rmtree = lambda path: os._exit(KILLED)  # type: ignore[assignment]
        publish(tmp_path, "a")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    assert publish(tmp_path, "b") == ({"is": "a"}, True)
    assert names_in(tmp_path) == ["out.job.info.json", "out.txt"]


# ---- damage ----


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[Callable[[Path], Any]] = [
    lambda path: os.truncate(path, path.stat().st_size - 1),
    lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    lambda path: path.write_bytes(bytes(path.stat().st_size)),
    os.unlink,
    _make_folder,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_task_is_not_done(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Whatever a power cut does to a file of a task."""
    _, path = interrupted(tmp_path, 0, 1)
    damage(path)
    assert kept(tmp_path, 0, 1) == [True, False]
    assert kept(tmp_path, 0, 1) == [True, True]


@pytest.mark.parametrize("line", [b"", b"{}\n", b"[]\n", b"null\n", b'{"entry": 3}\n', b"\0\n"])
def test_a_damaged_line_does_not_count(tmp_path: Path, line: bytes) -> None:
    """In the middle, or torn at the end."""
    interrupted(tmp_path, 0, 1, 2)
    (path,) = tmp_path.glob("out.journal/*/done.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + line + lines[1].replace(b'"number": 1', b'"number": 3') + lines[2])
    assert kept(tmp_path, 0, 1, 2) == [True, False, True]
    with start(tmp_path) as run:
        assert [one.record["number"] for one in do_tasks(run, 0, 1, 2)] == [0, 1, 2]
    path.write_bytes(path.read_bytes()[:-1])
    assert kept(tmp_path, 0, 1, 2, 3) == [True, False, True, False]
    assert kept(tmp_path, 0, 1, 2, 3) == [True] * 4  # what follows the torn line counts


def test_a_journal_that_cannot_be_read_stays(tmp_path: Path) -> None:
    interrupted(tmp_path, 0)
    (path,) = tmp_path.glob("out.journal/*/done.jsonl")
    path.rename(tmp_path / "lines")
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        start(tmp_path).__enter__()
    path.rmdir()
    (tmp_path / "lines").rename(path)
    assert kept(tmp_path, 0) == [True]


def test_stored_values_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    with start(tmp_path) as run:
        monkeypatch.setattr(os, "fsync", flushed.append)
        run.store("plan", 1)
        paths = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in flushed]
        assert [os.path.basename(path) for path in paths] == ["done.jsonl"]


def test_what_dead_attempts_leave_is_removed(tmp_path: Path) -> None:
    (path,) = interrupted(tmp_path, 0)
    journal, files, folder = tmp_path / "out.journal", path.parent.parent, path.parents[2]
    (files / "000001.0123456789ab").mkdir()
    (folder / "scratch" / "x").touch()
    (journal / "0123456789ab" / "files").mkdir(parents=True)
    (journal / "job.json.0123456789ab.tmp").touch()
    (tmp_path / "out.journal.0123456789ab.tmp" / "files").mkdir(parents=True)
    with start(tmp_path) as run:
        assert names_in(tmp_path) == ["out.journal", "out.journal.lock"]
        assert names_in(journal) == sorted([folder.name, "job.json"])
        assert names_in(folder) == ["done.jsonl", "files", "scratch"]
        assert names_in(files) == [path.parent.name]
        assert os.listdir(run.scratch) == []
        assert do_tasks(run, 0)[0].is_kept


def test_a_late_attempt_does_no_harm(tmp_path: Path) -> None:
    """Its machine was lost, another attempt has finished, and it goes on: it reaches no folder."""
    (path,) = interrupted(tmp_path, 0)
    files = str(path.parent.parent)
    run_attempt((write_data, None, files, False), Task(0, 4))
    with start(tmp_path) as run:
        (done,) = do_tasks(run, 0)
        assert done.record == {"number": 0}
    with start(tmp_path, restart=True) as run:
        answer = run_attempt((write_data, None, files, False), Task(0, 4))
        assert isinstance(answer, MillraceError)
        assert "does not share the file system of the output" in str(answer)
        assert not do_tasks(run, 0)[0].is_kept


def test_a_forked_child_leaves_the_run_alone(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        if (child := os.fork()) == 0:
            run.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(child, 0)
        assert names_in(tmp_path) == ["out.journal", "out.journal.lock"]
        refuse("another process is at work", tmp_path, error=MillraceError)
        do_tasks(run, 0)


def test_without_locks_the_owner_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left at the end, also of a job that is refused; a dead process of this host is not."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    owner, host = tmp_path / "out.journal" / "owner", os.uname().nodename
    interrupted(tmp_path, 0)
    assert not owner.exists()
    refuse("append_eod", tmp_path, {})
    assert not owner.exists()
    for text, process in ((f"{host} 1", 1), ("elsewhere 77", 77)):
        owner.write_text(text)
        refuse(f"process {process}.*remove {owner}", tmp_path, error=MillraceError)
    owner.write_text(f"{host} 4194999")
    with start(tmp_path) as run:
        assert owner.read_text() == f"{host} {os.getpid()}"
        assert do_tasks(run, 0)[0].is_kept


# ---- folders that cannot be used ----


def test_a_journal_may_go_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finishes the job: this one is refused by its lock or result, or begins."""
    (tmp_path / "out.journal").mkdir()
    listdir = os.listdir

    def removed(path: str) -> list[str]:
        monkeypatch.undo()
        os.rmdir(path)
        return listdir(path)

    monkeypatch.setattr("os.listdir", removed)
    with start(tmp_path) as run:
        assert not do_tasks(run, 0)[0].is_kept


def test_a_file_or_a_foreign_folder_at_the_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    path.write_text("mine")
    refuse("out.journal is a file", tmp_path, restart=True)
    assert path.read_text() == "mine"
    path.unlink()
    path.mkdir()
    (path / "diary.txt").touch()
    refuse("'diary.txt'", tmp_path, restart=True)
    assert names_in(path) == ["diary.txt"]
    refuse("nowhere is not a folder", tmp_path / "nowhere")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "out.journal").symlink_to(tmp_path)
    refuse("out.journal is a file, a link", tmp_path / "linked")
    # Root may write to every folder of a disk, so this is one of the kernel.
    refuse(r"'/proc/sys/out\.journal", Path("/proc/sys"), error=OSError)


@pytest.mark.parametrize("content", ["", "{}", "3", '{"format": 2, "run": "0", "job": {}}', None])
def test_a_journal_of_another_version_is_refused_until_restart(
    tmp_path: Path, content: str | None
) -> None:
    interrupted(tmp_path, 0)
    path = tmp_path / "out.journal" / "job.json"
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_text(content)
    refuse(r"another version of millrace.*--restart", tmp_path)
    assert kept(tmp_path, 0, restart=True) == [False]


# ---- two processes, and no locks ----


def started(prefix: Path, environment: Any = None, **options: Any) -> subprocess.Popen[bytes]:
    """A job that has finished two tasks."""
    process = subprocess.Popen(command(prefix, workers=1, **options), env=environment)
    log = prefix.with_name("out.log")
    while not log.exists() or log.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.001)
    return process


def test_a_second_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    prefix = tmp_path / "out"
    first = started(prefix, seconds=0.3, num_tasks=100)
    for restart in (False, True):
        arguments = command(prefix, num_tasks=100, restart=restart)
        second = subprocess.run(arguments, capture_output=True, text=True)
        last = second.stderr.splitlines()[-1]
        assert last.startswith(
            "millrace.errors.MillraceError: another process is at work on this job: "
            f"{prefix}.journal is held by process {first.pid} on "
        )
    first.kill()
    first.wait()
    num_now, num_before = run_job(str(prefix), 100, workers=1)
    assert num_before > 0
    assert num_now + num_before == 100
    assert (tmp_path / "out.out").read_bytes() == expected_output(100)
    assert names_in(tmp_path) == LEFT


def test_a_file_system_without_locks(tmp_path: Path) -> None:
    """A killed job continues; two jobs at once end with the right output, or an error."""
    environment, folder = no_flock(tmp_path), tmp_path / "files"
    folder.mkdir()
    first = started(folder / "out", environment)
    first.kill()
    first.wait()
    options: Any = {"env": environment, "stderr": subprocess.PIPE, "text": True}
    arguments = command(folder / "out", workers=1)
    for process in [subprocess.Popen(arguments, **options) for _ in range(2)]:
        _, stderr = process.communicate(timeout=HANG)
        assert process.returncode == 0 or "Error" in stderr
    last = subprocess.run(arguments, **options)
    assert last.returncode == 0, last.stderr
    assert (folder / "out.out").read_bytes() == expected_output(40)
    run_job(str(folder / "out"), 40, workers=1)  # with locks: this one can tell what is left over
    assert names_in(folder) == LEFT


def test_a_full_disk_is_one_error_and_the_next_run_continues(tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (70, 70))

    prefix = tmp_path / "out"
    for _ in range(2):
        run = subprocess.run(
            command(prefix, workers=1), capture_output=True, text=True, preexec_fn=limit
        )
        assert run.returncode == 1
        assert os.strerror(errno.EFBIG) in run.stderr.splitlines()[-1]
    assert run_job(str(prefix), 40, workers=1) == (40, 0)
    assert prefix.with_name("out.out").read_bytes() == expected_output(40)
    assert names_in(tmp_path) == LEFT


def test_a_kill_while_the_journal_is_created_restarted_or_removed(tmp_path: Path) -> None:
    """A process dies before each of its renames, unlinks, flushes and new or removed folders."""

    def run_twice() -> None:
        for restart in (False, True):
            run_job(str(tmp_path / "out"), 2, workers=1, restart=restart)

    num_deaths = 0
    for _ in deaths_of(run_twice, step=3):
        num_deaths += 1
        run_job(str(tmp_path / "out"), 2, workers=1)
        assert (tmp_path / "out.out").read_bytes() == expected_output(2)
        assert names_in(tmp_path) == LEFT
    assert num_deaths > 7


# ---- progress ----


def test_progress_shows_a_share_and_counts_and_can_be_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LOG_INTERVAL", 0.0)
    for total in (100, None):
        progress.Progress("job", total).count(4000, 4000)
    progress.Progress("job", 100, enabled=False).count(4000, 4000)
    bar = progress.Progress("job", 100)
    bar.skip(60)  # what an earlier run has done
    bar.update(20, "5 documents")
    progress.Progress("job").update(10, "of a pipe")
    first, second, third, fourth = capsys.readouterr().err.splitlines()
    assert first == second == "job 100%  4,000 of 4,000  0:00:00 left"
    assert third.startswith("job  50%  5 documents")
    assert fourth == "job of a pipe  0:00:00"
