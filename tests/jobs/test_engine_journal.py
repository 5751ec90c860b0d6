"""The journal: what counts as done, who may open it, and what a kill or another job leaves."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ConfigError, DataError, MillraceError
from millrace.files import checksum
from millrace.jobs.engine import Journal, commit, task_folder
from tests.jobs.engine_job import command, content_of, expected_output, run_job
from tests.jobs.engine_kills import KILLED, run_and_die
from tests.no_flock import no_flock

HANG = 60.0  # seconds
JOB = {"inputs": [{"path": "a.jsonl", "size": 3}], "append_eod": False, "keys": ("text",)}


def write_task(journal: Journal, number: int) -> str:
    path = os.path.join(journal.new_folder_of(number), "data")
    Path(path).write_bytes(content_of(number))
    commit(journal.folder, number, {"number": number}, [path])
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_journal_continues_its_job(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    with Journal(path, JOB) as journal:
        assert journal.plan is None
        journal.set_plan({"tasks": (1, 2)})
        assert journal.record(1) is None
        write_task(journal, 1)
        assert names_in(tmp_path) == ["out.journal", "out.journal.lock"]
    assert names_in(tmp_path) == ["out.journal"]
    with Journal(path, JOB) as journal:
        assert journal.plan == {"tasks": [1, 2]}
        assert journal.record(1) == {"number": 1}
        assert journal.record(0) is None
        journal.remove()
    assert names_in(tmp_path) == []


def test_a_journal_without_a_record_is_removed_when_it_is_closed(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.journal", JOB) as journal:
        journal.set_plan([])
        journal.new_folder_of(0)
    assert names_in(tmp_path) == []


def test_a_task_that_hashed_its_files_passes_their_sums(tmp_path: Path) -> None:
    """The sums are those that a reading finds; another size is refused."""
    with Journal(tmp_path / "out.journal", JOB) as journal:
        for number, data in enumerate([b"", b"abc"]):
            path = os.path.join(journal.new_folder_of(number), "data")
            Path(path).write_bytes(data)
            sums = {path: (len(data), checksum([data]))}
            with pytest.raises(MillraceError, match=f"has {len(data)} bytes, and 7 were written"):
                commit(journal.folder, number, {}, [path], {path: (7, checksum([data]))})
            assert journal.record(number) is None
            commit(journal.folder, number, {"number": number}, [path], sums)
            assert journal.record(number) == {"number": number}
        Path(path).write_bytes(b"abd")
        assert journal.record(1) is None


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_task_is_flushed_before_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    flush, flushed = os.fsync, []

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), bool(journal.numbers())))

    with Journal(tmp_path / "out.journal", JOB) as journal:
        path = os.path.join(journal.new_folder_of(0), "data")
        Path(path).write_bytes(b"abc")
        monkeypatch.setattr(os, "fsync", fsync)
        commit(journal.folder, 0, {}, [path], durable=durable)
    if durable:
        assert flushed[0] == (os.path.realpath(path), False)
        assert "/records/000000.json." in flushed[1][0]
    assert len(flushed) == 2 * durable


def test_a_kill_while_the_journal_is_removed_loses_no_result(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        shutil.rmtree = lambda path: os._exit(KILLED)  # type: ignore[assignment]
        with Journal(tmp_path / "j", JOB) as journal:
            write_task(journal, 0)
            journal.finish({"num_tokens": 7})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    with Journal(tmp_path / "j", JOB) as journal:
        assert journal.result == {"num_tokens": 7}
    with Journal(tmp_path / "j", {"another": "job"}) as journal:
        assert journal.result is None
    assert names_in(tmp_path) == []


def test_another_job_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    with Journal(path, JOB) as journal:
        write_task(journal, 0)
    other = {
        "inputs": [{"path": "b.jsonl", "size": 3}],
        "append_eod": True,
        "keys": ["text", "title"],
        "dtype": "int32",
    }
    message = (
        f"{path} is the journal of an unfinished job, and this job differs from it: "
        "inputs[0].path was 'a.jsonl', and is 'b.jsonl' now; append_eod was False, and is True "
        "now; keys had 1 entries, and has 2 now; dtype is 'int32' now, and was not there. Run the "
        "same command again to continue that job, give --restart (restart=True) to discard it, or "
        "give another output"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        Journal(path, other)
    many = {**JOB, **{str(number): "x" * 1000 for number in range(100)}}
    with pytest.raises(ConfigError, match=r"; 95 more\. Run") as caught:
        Journal(path, many)
    assert len(str(caught.value)) < 1500
    with Journal(path, other, restart=True) as journal:
        assert journal.record(0) is None
        assert journal.plan is None
        write_task(journal, 0)
        assert len(names_in(path)) == 2  # job.json and the new run
    with pytest.raises(ConfigError, match=re.escape("keys had 2 entries, and has 1 now")):
        Journal(path, JOB)


@pytest.mark.parametrize("value", [1.0, True, None, "1", [1], {"a": 1}])
def test_equal_numbers_of_other_types_differ(tmp_path: Path, value: Any) -> None:
    with Journal(tmp_path / "j", {"seed": 1}) as journal:
        write_task(journal, 0)
    with pytest.raises(ConfigError, match="seed was 1, and is"):
        Journal(tmp_path / "j", {"seed": value})


def test_jobs_and_records_are_plain_json(tmp_path: Path) -> None:
    for value in (object(), float("nan"), b"x"):
        with pytest.raises(ConfigError, match="cannot be stored as JSON"):
            Journal(tmp_path / "j", {"value": value})
        with Journal(tmp_path / "j", {}) as journal:
            journal.new_folder_of(0)
            with pytest.raises(ConfigError, match="cannot be stored as JSON"):
                commit(journal.folder, 0, {"value": value}, [])
            with pytest.raises(ConfigError, match="cannot be stored as JSON"):
                journal.set_plan(value)


# ---- damage ----


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _change(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_cut, _change, _zero, os.unlink, _make_folder])
@pytest.mark.parametrize("is_of_record", [False, True])
def test_a_damaged_task_is_not_done(
    tmp_path: Path, damage: Callable[[Path], None], is_of_record: bool
) -> None:
    """Whatever a power cut does to a file of a task, or to its record."""
    with Journal(tmp_path / "j", JOB) as journal:
        write_task(journal, 0)
        path = Path(write_task(journal, 1))
        record = Path(journal.folder, "records", "000001.json")
    damage(record if is_of_record else path)
    with Journal(tmp_path / "j", JOB) as journal:
        assert journal.record(1) is None
        if not (is_of_record and damage is os.unlink):  # new_folder_of empties the folder then
            assert not record.exists()
            assert not path.exists()
        assert journal.record(0) == {"number": 0}
        write_task(journal, 1)
        assert journal.record(1) == {"number": 1}


def test_a_record_with_another_number_is_not_done(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", JOB) as journal:
        write_task(journal, 1)
        path = Path(journal.folder, "records", "000001.json")
        path.write_text(
            path.read_text().replace('"record": {"number": 1', '"record": {"number": 3')
        )
        assert journal.numbers() == {1}
        assert journal.record(1) is None
        assert journal.numbers() == set()


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"record": 3, "files": []}', "\0"])
def test_a_record_of_another_form_is_not_done(tmp_path: Path, content: str) -> None:
    with Journal(tmp_path / "j", JOB) as journal:
        write_task(journal, 1)
        Path(journal.folder, "records", "000001.json").write_text(content)
        assert journal.record(1) is None


def test_what_dead_attempts_leave_is_removed(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.journal", JOB) as journal:
        folder = Path(write_task(journal, 0)).parent
        records = Path(journal.folder, "records")
        run = Path(journal.folder)
        (records / "000001.json.0123456789ab.tmp").touch()
        (run / "plan.json.0123456789ab.tmp").touch()
        (folder / "data.0123456789ab.tmp").touch()
        Path(journal.new_folder_of(1), "data").touch()
        (tmp_path / "out.journal" / "0123456789ab" / "records").mkdir(parents=True)
        (tmp_path / "out.journal" / "job.json.0123456789ab.tmp").touch()
        (tmp_path / "out.journal.0123456789ab.tmp" / "files").mkdir(parents=True)
    with Journal(tmp_path / "out.journal", JOB) as journal:
        assert names_in(tmp_path) == ["out.journal", "out.journal.lock"]
        assert names_in(tmp_path / "out.journal") == sorted([run.name, "job.json"])
        assert names_in(run) == ["files", "records"]
        assert names_in(records) == ["000000.json"]
        assert journal.record(0) == {"number": 0}
        assert names_in(folder) == ["data"]
        assert os.listdir(journal.new_folder_of(1)) == []


def test_a_late_attempt_does_no_harm(tmp_path: Path) -> None:
    """Its machine was lost, another attempt has committed, and it goes on."""
    with Journal(tmp_path / "j", JOB) as journal:
        path = write_task(journal, 0)
        with open(path, "rb") as appended:  # the job may be reading the file
            Path(path + ".tmp").write_bytes(content_of(0))
            os.rename(path + ".tmp", path)
            commit(journal.folder, 0, {"number": 0}, [path])
            assert appended.read() == content_of(0)
        assert journal.record(0) == {"number": 0}
        journal.remove()
        for files in ([path], []):
            with pytest.raises(MillraceError, match="does not exist on"):
                commit(journal.folder, 0, {"number": 0}, files)
        with pytest.raises(FileNotFoundError):
            Path(path).write_bytes(b"late")
    assert names_in(tmp_path) == []
    # A job that starts anew has other folders, so that no late attempt commits into it.
    with Journal(tmp_path / "j", JOB) as other:
        assert other.folder != journal.folder
        with pytest.raises(MillraceError, match="does not exist on"):
            commit(journal.folder, 0, {"number": 0}, [])
        assert other.record(0) is None


def test_files_of_another_folder_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", JOB) as journal:
        journal.new_folder_of(0)
        for path in (tmp_path / "x", Path(journal.new_folder_of(1), "x")):
            path.touch()
            with pytest.raises(ConfigError, match="the folder of task 0"):
                commit(journal.folder, 0, {}, [str(path)])


def test_a_task_on_a_machine_without_the_folder_is_an_error(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", JOB) as journal:
        with pytest.raises(MillraceError, match="does not share the file system of the output"):
            task_folder(journal.folder, 3)
        folder = journal.new_folder_of(3)
        assert task_folder(journal.folder, 3) == journal.folder_of(3) == folder


def test_a_forked_child_leaves_the_journal_alone(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", JOB) as journal:
        if (child := os.fork()) == 0:
            journal.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert names_in(tmp_path) == ["j", "j.lock"]
        with pytest.raises(MillraceError, match="another process is at work"):
            Journal(tmp_path / "j", JOB)


# ---- two processes, and no locks ----


def test_a_second_process_is_refused_at_once(tmp_path: Path) -> None:
    first = subprocess.Popen(
        command(tmp_path / "out", "--workers", 1, "--seconds", 1, "--tasks", 100)
    )
    while not (tmp_path / "out.log").exists():
        assert first.poll() is None
        time.sleep(0.01)
    for restart in ([], ["--restart"]):
        second = subprocess.run(
            command(tmp_path / "out", "--tasks", 100, *restart), capture_output=True, text=True
        )
        last = second.stderr.splitlines()[-1]
        assert last.startswith(
            "millrace.errors.MillraceError: another process is at work on this job: "
            f"{tmp_path}/out.journal is held by process {first.pid} on "
        )
    first.kill()
    first.wait()
    assert sum(run_job(str(tmp_path / "out"), 100, workers=1)) == 100
    assert (tmp_path / "out.out").read_bytes() == expected_output(100)
    assert names_in(tmp_path) == ["out.log", "out.out"]


def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path / "out", "--workers", 1, "--seconds", 0.02), stdout=subprocess.DEVNULL
    )
    log = tmp_path / "out.log"
    while not log.exists() or log.read_bytes().count(b"\n") < 3:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert (tmp_path / "out.journal").exists()
    num_now, num_before = run_job(str(tmp_path / "out"), 40, workers=1)
    assert num_before > 0
    assert num_now + num_before == 40
    assert (tmp_path / "out.out").read_bytes() == expected_output(40)


def test_a_file_system_without_locks(tmp_path: Path) -> None:
    """A killed job continues; two jobs at once end with the right output, or an error."""
    environment = no_flock(tmp_path)
    folder = tmp_path / "files"
    folder.mkdir()
    log, output = folder / "out.log", folder / "out.out"
    arguments = command(folder / "out", "--workers", 1, "--seconds", 0.01)
    first = subprocess.Popen(arguments, env=environment)
    while not log.exists() or log.read_bytes().count(b"\n") < 3:
        assert first.poll() is None
        time.sleep(0.001)
    first.kill()
    first.wait()
    processes = [
        subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=HANG)
        assert process.returncode == 0 or "Error" in stderr
    last = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert output.read_bytes() == expected_output(40)
    run_job(str(folder / "out"), 40, workers=1)  # with locks: this one can tell what is left over
    assert names_in(folder) == ["out.log", "out.out"]


# ---- folders that cannot be used ----


def test_a_file_or_a_foreign_folder_at_the_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"out.journal is a file"):
        Journal(path, JOB, restart=True)
    assert path.read_text() == "mine"
    path.unlink()
    path.mkdir()
    (path / "diary.txt").touch()
    with pytest.raises(ConfigError, match=r"holds 'diary.txt', which is not part of a journal"):
        Journal(path, JOB, restart=True)
    assert names_in(path) == ["diary.txt"]
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        Journal(tmp_path / "nowhere" / "out.journal", JOB)


@pytest.mark.parametrize("content", ["", "{}", "3", '{"format": 3, "run": "0", "job": {}}', None])
def test_a_damaged_journal_is_refused_until_restart(tmp_path: Path, content: str | None) -> None:
    def damage(path: Path) -> None:
        if content is None:
            path.unlink(missing_ok=True)
            path.mkdir()
        else:
            path.write_text(content)

    with Journal(tmp_path / "j", JOB) as journal:
        write_task(journal, 0)
    damage(tmp_path / "j" / "job.json")
    with pytest.raises(ConfigError, match="is damaged, or was written by another version"):
        Journal(tmp_path / "j", JOB)
    with Journal(tmp_path / "j", JOB, restart=True) as journal:
        assert journal.record(0) is None
        write_task(journal, 0)
        plan = Path(journal.folder, "plan.json")
        damage(plan)
    with pytest.raises(DataError, match=rf"{plan} is damaged. Give --restart"):
        Journal(tmp_path / "j", JOB)


def test_a_journal_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Files cannot be renamed from another file system, and a link's target is not removed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/out.journal is a link"):
        Journal(tmp_path / "out.journal", JOB)
    with pytest.raises(ConfigError, match="/proc is a link or a mounted file system"):
        Journal("/proc", JOB)
    assert names_in(tmp_path / "elsewhere") == []


def test_a_folder_that_cannot_be_written() -> None:
    """Root may write to every folder of a disk, so this is one of the kernel."""
    with pytest.raises(MillraceError, match=r"the journal /proc/sys/out.journal cannot be written"):
        Journal("/proc/sys/out.journal", JOB)


def test_a_full_disk_is_one_error_and_the_next_run_continues(tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (70, 70))

    prefix = tmp_path / "out"
    for _ in range(2):
        run = subprocess.run(
            command(prefix, "--workers", 1), capture_output=True, text=True, preexec_fn=limit
        )
        assert run.returncode == 1
        assert os.strerror(errno.EFBIG) in run.stderr.splitlines()[-1]
    assert run_job(str(prefix), 40, workers=1) == (40, 0)
    assert prefix.with_name("out.out").read_bytes() == expected_output(40)
    assert names_in(tmp_path) == ["out.log", "out.out"]


def test_a_kill_while_the_journal_is_created_restarted_or_removed(tmp_path: Path) -> None:
    """A process dies before each of its renames, unlinks, flushes and new or removed folders."""
    prefix, num_calls, status = tmp_path / "out", random.randrange(3), KILLED
    while status == KILLED:
        if (child := os.fork()) == 0:
            run_and_die(lambda: run_twice(str(prefix)), num_calls)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        num_calls += 3
        run_job(str(prefix), 2, workers=1)
        assert prefix.with_name("out.out").read_bytes() == expected_output(2)
        assert names_in(tmp_path) == ["out.log", "out.out"]
    assert status == 0
    assert num_calls > 20


def run_twice(prefix: str) -> None:
    run_job(prefix, 2, workers=1)
    run_job(prefix, 2, workers=1, restart=True)


def test_the_folder_is_as_documented(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.journal", JOB) as journal:
        journal.set_plan([1])
        write_task(journal, 7)
        run = Path(journal.folder)
        files = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()]
        assert sorted(files) == sorted(
            f"out.journal{name}"
            for name in (
                ".lock",
                "/job.json",
                f"/{run.name}/plan.json",
                f"/{run.name}/records/000007.json",
                f"/{run.name}/files/000007/data",
            )
        )
        record = json.loads((run / "records" / "000007.json").read_text())
        assert record["record"] == {"number": 7}
        assert record["files"][0]["size"] == len(content_of(7))
