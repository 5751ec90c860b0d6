"""The shuffle job: its output, its arguments and errors, and how it continues."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import IndexedDataset, IndexedDatasetBuilder, ShardedDataset
from millrace.cli import main
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.jobs import shuffle
from millrace.provenance import OriginsWriter
from millrace.shards import verify_shards
from millrace.shards.metadata import read_metadata
from millrace.shuffling.permutations import Permutation
from tests.jobs import shuffle_cases as cases, shuffle_kills
from tests.jobs.kills import DEADLINE, KILLED, finish, finished_tasks, run_and_die
from tests.jobs.shuffle_kills import VERB

SEQ_LEN = 8


TOKENS = np.random.default_rng(0).integers(0, 2**31, (300, SEQ_LEN), np.uint32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the input: two domains, whose sequences are TOKENS in their order."""
    for name, part in (("a/x", TOKENS[:90]), ("a/y", TOKENS[90:100]), ("b/x", TOKENS[100:])):
        path = tmp_path / "input" / f"{name}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        part.tofile(path)
    return tmp_path


def run(folder: Path, **options: Any) -> Any:
    defaults = {"output_dir": folder / "output", "seq_len": SEQ_LEN, "num_shards": 7, "workers": 1}
    return shuffle(folder / "input", **{**defaults, **options})


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- the output ----


def test_random_cases() -> None:
    """`python -m tests.jobs.shuffle_cases` runs more of them."""
    counts = cases.run(30, 1, worker_share=0.05, document_share=0.4)
    assert counts["cases"] >= 15


def test_every_sequence_is_where_numpy_puts_it(folder: Path) -> None:
    result = run(folder)
    expected = np.empty_like(TOKENS)
    expected[np.random.default_rng(42).permutation(300)] = TOKENS
    dataset = ShardedDataset(folder / "output")
    assert np.array_equal(dataset.batch(range(300))["tokens"], expected)
    metadata = read_metadata(folder / "output")
    assert metadata.shard_sizes == result.shard_sizes == [43] * 6 + [42]
    assert metadata.domain_stats == result.domain_stats == {"a": 100, "b": 200}
    assert (metadata.seed, metadata.permutation, metadata.dtype) == (42, "numpy", "uint32")
    shard = IndexedDataset(folder / "output" / "shard_0006")
    assert (shard.dtype, shard.num_documents) == (np.int32, 42)
    assert (result.num_items, result.num_tokens, result.num_bytes) == (300, 2400, 9600)
    assert (result.num_tasks_done, result.num_tasks_kept) == (7, 0)


def test_an_output_that_is_not_shuffled_evenly_is_not_published(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        np.zeros(200_000, np.uint32).tofile(folder / "input" / name / "z.bin")
    monkeypatch.setattr(Permutation, "sources", lambda self, start, stop: np.arange(start, stop))
    with pytest.raises(MillraceError, match=r"is not shuffled evenly: .* nothing has been publ"):
        run(folder)
    assert names_in(folder) == ["input"]


def test_all_plans_workers_and_memories_write_the_same(folder: Path) -> None:
    """Worker processes, real buffers: a sequence takes 16 times its size in a buffer."""
    tokens = np.random.default_rng(1).integers(0, 100, 4_000_000, np.uint16)
    tokens.tofile(folder / "input" / "a" / "z.bin")
    outputs = []
    for plan, workers, memory in [
        ("gather", 2, 130),
        ("gather", 1, 300),
        ("scatter", 2, 130),
        ("scatter", 1, 20),
    ]:
        options = {"seq_len": 4, "dtype": "uint16", "memory": memory * 10**6, "plan": plan}
        result = run(folder, workers=workers, permutation="numpy", **options)
        assert (result.plan, result.workers) == (plan, workers)
        output = folder / "output"
        outputs.append(VERB.read_files(output))
        shutil.rmtree(output)
    assert all(output == outputs[0] for output in outputs)


# ---- the command ----


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Underscores and dashes; the phases on stderr; one JSON object on stdout."""
    folders = ["--input_dir", str(folder / "input"), "--output-dir", str(folder / "output")]
    command = ["shuffle", *folders, "--seq_len", "8", "--num-shards", "7", "--num_workers", "2"]
    assert main([*command, "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["num_items"] == 300
    for text in (
        "phase 1: 3 files",
        "phase 2: permutation numpy of 300 sequences, seed 42",
        "plan: gather, because the data fit one buffer",
        "reads 9.6 kB, writes 9.6 kB",
    ):
        assert text in output.err
    assert main(command) == 0
    assert "the output is there already" in capsys.readouterr().out
    assert main([*command, "--seed", "1"]) == 1
    assert "written by a command that differs: seed was 42" in capsys.readouterr().err
    assert main([*command, "--seed", "1", "--restart"]) == 0
    assert "300 sequences of 2 domains in 7 shards" in capsys.readouterr().out
    (folder / "list").write_text(f"# weights\n2.5 {folder}/input/a\n0.1 {folder}/input/b/x.bin\n")
    folders = ["--input-list", str(folder / "list"), "--output-dir", str(folder / "weighted")]
    assert main(["shuffle", *folders, "--seq-len", "8", "--num-shards", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["domain_stats"] == {"a": 250, "x.bin": 20}


@pytest.mark.parametrize("plan", ["gather", "scatter"])
def test_jobs_in_threads_of_a_process(tmp_path: Path, plan: str) -> None:
    """With one worker each, so that all of them work in this process."""
    (tmp_path / "input").mkdir()
    np.arange(500_000, dtype=np.uint32).tofile(tmp_path / "input" / "x.bin")
    options: dict[str, Any] = {"memory": 10_000_000, "permutation": "numpy", "plan": plan}

    def output_of(number: int) -> dict[str, bytes]:
        output = tmp_path / str(number)
        run(tmp_path, output_dir=output, seq_len=10, seed=number % 4, **options)
        return VERB.read_files(output)

    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(output_of, range(8)))
    assert outputs == [output_of(number) for number in range(8, 12)] * 2


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, r"seq_len must .* 2\*\*31 - 1, not 0"),
        ({"seed": 2**63}, r"seed must .* 2\*\*63 - 1, not 9223372036854775808"),
        ({"num_shards": 301}, "num_shards must be at most 300"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"seq_len": 2**31}, r"seq_len must .* 2\*\*31 - 1, not 2147483648"),
        ({"carry": 1}, "carry must be True or False"),
        ({"dtype": "int8"}, "dtype must be uint16, uint32 or int32, not 'int8'"),
        ({"dtype": ">i4"}, "dtype must be"),
        ({"dtype": "nothing"}, "dtype must be"),
        ({"plan": "memory"}, "plan must be one of auto, gather, scatter, not 'memory'"),
        ({"permutation": 1}, "permutation must be"),
        ({"engine": np.array(["ray"])}, "engine must be"),
        ({"seq_len": 10**6}, "gives no sequence of 1,000,000 tokens"),
        ({"memory": 1000}, "memory must be at least 8000000 bytes .8.0 MB., not 1.0 kB"),
        ({"documents": True, "carry": True}, "carry cannot be combined with documents=True"),
        ({"documents": True}, "x.bin has no .idx, so millrace cannot tell where its documents"),
        ({"output_dir": ""}, "the output folder  cannot be made: No such file"),
        ({"input_list": []}, "either input_dir or input_list; both of them"),
    ],
)
def test_arguments_that_cannot_work(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(folder, **options)
    assert names_in(folder) == ["input"]


@pytest.mark.parametrize("weight", [1e10, 1e16])
def test_weights_that_no_disk_has_room_for(folder: Path, weight: float) -> None:
    """Before the permutation of so many items is measured, which takes years."""
    inputs = [(weight, folder / "input")]
    with pytest.raises(MillraceError, match=r"No space left for the output: it has .* TB"):
        shuffle(None, folder / "output", input_list=inputs, seq_len=10)
    assert not (folder / "output").exists()


def test_output_folders_that_cannot_be(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "nowhere")
    for output, message in (
        (folder / "link", "link cannot be made: File exists"),
        ("/proc/x", "/proc/x cannot be made: No such file"),
        (folder / "input", "input lies in the input"),
        (folder / "input" / "a" / "out", "out lies in the input"),
        (folder, "or holds it; give another output folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(folder, output_dir=output)


def test_an_output_folder_that_is_not_empty(folder: Path) -> None:
    output = folder / "output"
    output.mkdir()
    for name in ("notes.txt", "shard_0000.bin"):
        (output / name).write_text("a")
        with pytest.raises(ConfigError, match=f"output is not empty: it holds {name}"):
            run(folder)
        with pytest.raises(ConfigError, match="is not empty"):
            run(folder, restart=True)
        assert names_in(output) == [name]
        (output / name).unlink()
    output.rmdir()
    output.write_text("a")
    for path in (output, output / "shuffled", f"{output}/"):
        with pytest.raises(ConfigError, match=f"{path} cannot be made: (File exists|Not a dir)"):
            run(folder, output_dir=path)


# ---- memory ----


def test_ten_times_the_memory(tmp_path: Path) -> None:
    """The largest resident set of the process stays below the budget plus 100 MB."""
    budget = 12 * 10**6
    (tmp_path / "input").mkdir()
    with open(tmp_path / "input" / "x.bin", "wb") as file:
        file.truncate(10 * budget)
    code = (
        "import re, sys\n"
        "from millrace.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    for plan in ("gather", "scatter"):
        folders = f"--input-dir {tmp_path}/input --output-dir {tmp_path}/{plan}"
        command = f"shuffle {folders} --memory {budget} --plan {plan} --json".split()
        output = subprocess.check_output(
            [sys.executable, "-c", code, *command], stderr=subprocess.DEVNULL
        )
        assert 1024 * int(output.splitlines()[1]) < budget + 100 * 10**6


# ---- kills, full disks, and other jobs ----


def test_kills_at_random_moments() -> None:
    """`python -m tests.jobs.shuffle_kills` does more of them, to more kinds of jobs."""
    counts = shuffle_kills.run(3, 0, 100_000, ["gather"])
    assert counts["parent"] + counts["worker"] >= 3


class KilledError(Exception):
    """Stands for a kill."""


def interrupt(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, **options: Any) -> None:
    """Runs a job that is killed before it renames file `count` into the output folder."""
    rename, num_calls = os.rename, 0

    def fail(source: str, target: str) -> None:
        nonlocal num_calls
        parent, name = os.path.split(target)
        num_calls += parent == str(folder / "output") and name.startswith(("shard_", "metadata"))
        if num_calls == count:
            raise KilledError
        rename(source, target)

    with monkeypatch.context() as context:
        context.setattr(os, "rename", fail)
        with pytest.raises(KilledError):
            run(folder, **options)


def interrupt_flush(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Runs a job that is killed when all shards are written, and none is published."""
    with monkeypatch.context() as context:
        context.setattr("millrace.shuffling.shard_publication.flush_folders", None)
        with pytest.raises(TypeError):
            run(folder, **options)


@pytest.mark.parametrize("count", [1, 2, 9, 14, 15])
def test_an_interrupted_publication_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Without the input, which is not needed any more, but must be there unchanged."""
    interrupt(folder, monkeypatch, count)
    output = folder / "output"
    names = names_in(output)
    assert len(names) == count  # renamed files, and the journal
    assert "metadata.json" not in names
    with pytest.raises(ConfigError, match="differs from it: seed was 42, and is 1 now"):
        run(folder, seed=1)
    (output / "metadata.json.0123456789ab.tmp").write_text("{")
    result = run(folder)
    assert (result.num_tasks_done, result.num_tasks_kept) == (0, 7)
    assert not verify_shards(output).problems
    shuffle(folder / "input", folder / "other", seq_len=SEQ_LEN, num_shards=7)
    assert VERB.read_files(output) == VERB.read_files(folder / "other")


def test_a_publication_goes_on_with_the_same_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the right size may be damaged, in the output folder or still in the journal."""
    interrupt(folder, monkeypatch, 9)
    output = folder / "output"
    attempt = finished_tasks(output)["000001-000006"]
    in_journal = next(output.glob(f"shuffle.journal/*/files/{attempt}/shard_0006.idx"))
    for path in (output / "shard_0001.bin", in_journal):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        name = "shard_0001.bin" if path != in_journal else "shard_0006.idx"
        with pytest.raises(DataError, match=rf"output/{name} .* its {len(data)} bytes .*--restart"):
            run(folder)
        assert not (output / "metadata.json").exists()
        (output / name).write_bytes(data)
    assert run(folder).num_tasks_kept == 7
    assert not verify_shards(output).problems


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_restart_may_be_killed_at_any_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """Before each rename, unlink, flush and new or removed folder, until the old shards are gone.

    Then every command works, with and without --restart: it continues the old job or the new one,
    or says that --restart is needed.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # 5 ms each
    output = folder / "output"
    jobs: list[dict[str, Any]] = [{"num_shards": 2}, {"num_shards": 1, "seed": 1}]
    expected = []
    for job in jobs:
        run(folder, **job)
        expected.append(VERB.read_files(output))
        shutil.rmtree(output)
    if is_whole:
        with monkeypatch.context() as context:
            context.setattr("millrace.engine.journal.Journal.remove", lambda *_: None)
            run(folder, **jobs[0])
    else:
        interrupt(folder, monkeypatch, 4, **jobs[0])
    output.rename(folder / "before")
    num_steps = 0
    while num_steps == 0 or [*output.glob("shard_*"), *output.glob("metadata.json")]:
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(folder / "before", output)
        if (child := os.fork()) == 0:
            run_and_die(lambda: run(folder, **jobs[1], restart=True), num_steps)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
        shutil.copytree(output, folder / "killed")
        number, restart = divmod(num_steps % 4, 2)
        problem = ""
        try:
            run(folder, **jobs[number], restart=bool(restart))
        except MillraceError as error:
            problem = str(error)
        if problem:
            assert "--restart" in problem, num_steps
            run(folder, **jobs[number], restart=True)
        assert VERB.read_files(output) == expected[number], num_steps
        shutil.rmtree(output)
        (folder / "killed").rename(output)
        num_steps += 1
    assert num_steps >= 4  # the files that are there


def test_an_interrupted_job_keeps_its_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other workers, memory and plan are given, which change nothing in the output."""
    interrupt_flush(folder, monkeypatch, plan="scatter")
    assert len(finished_tasks(folder / "output")) == 8
    with pytest.raises(ConfigError, match="seq_len was 8, and is 4 now"):
        run(folder, seq_len=4)
    result = run(folder, workers=2, plan="gather", memory=10**9)
    assert result.plan == "scatter"
    assert (result.num_tasks_done, result.num_tasks_kept) == (0, 8)


@pytest.mark.parametrize(
    ("ending", "name", "is_removed"),
    [
        ("bin", "modified_ns", False),
        ("info.json", "info", False),
        ("info.json", "info", True),
        ("origins.parquet", "origins", False),
        ("origins.parquet", "origins", True),
    ],
)
def test_sidecars_that_changed_since_the_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, name: str, is_removed: bool
) -> None:
    """Else some shards would have the sidecar, and others would not, or another one."""
    prefix = tmp_path / "input" / "a" / "x"
    prefix.parent.mkdir(parents=True)
    with IndexedDatasetBuilder(prefix, checksums=True) as builder:
        builder.add_documents(np.arange(300), np.full(30, 10))
    with OriginsWriter(prefix) as origins:
        origins.add(["web.jsonl"], [0] * 30, range(1, 31), [-1] * 30)
    interrupt_flush(tmp_path, monkeypatch, documents=True)
    assert finished_tasks(tmp_path / "output")
    path = Path(f"{prefix}.{ending}")
    if is_removed:
        path.unlink()
    else:
        os.utime(path, ns=(0, 0))
    with pytest.raises(ConfigError, match=rf"input 1, {prefix}.bin.{name}.* was .*--restart"):
        run(tmp_path, documents=True)
    result = run(tmp_path, documents=True, restart=True)
    assert result.num_tasks_kept == 0
    assert not verify_shards(tmp_path / "output").problems


@pytest.mark.parametrize("name", ["shard_0001.bin", "shard_0001.idx", "metadata.json"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_damaged_output_is_not_the_output(folder: Path, name: str, is_cut: bool) -> None:
    run(folder)
    path = folder / "output" / name
    if is_cut:
        os.truncate(path, 40)
    else:
        path.unlink()
    with pytest.raises(ConfigError, match=r"output.* is (there already|not empty)"):
        run(folder)


def test_the_error_of_a_full_disk_names_the_journal_that_remains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "full", "shard.bin")

    monkeypatch.setattr("millrace.shuffling.shard_publication.flush_folders", fail)
    folders = ["--input-dir", str(folder / "input"), "--output-dir", str(folder / "output")]
    assert main(["shuffle", *folders, "--seq-len", "8", "--num-shards", "3"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "shard.bin: full. Make room on that disk" in message
    assert f"what is done, in {folder}/output/shuffle.journal." in message


def test_shards_are_flushed_before_they_are_published(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, published, rename = set(), [], os.rename

    def publish(source: str, target: str) -> None:
        parent, name = os.path.split(target)
        if parent == str(folder / "output") and name.startswith("shard_"):
            assert source in flushed
            published.append(target)
        rename(source, target)

    def fsync(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", publish)
    run(folder)
    assert len(published) == 21


def test_a_full_disk(disk: Path, folder: Path) -> None:
    """One error each time; with room the job continues."""
    np.zeros(60_000, np.uint32).tofile(folder / "input" / "b" / "y.bin")  # 240 kB
    output, ballast = disk / "output", disk / "ballast"
    options = {"seq_len": SEQ_LEN, "num_shards": 7, "workers": 1, "plan": "scatter"}
    errors = []
    for left in (100, 450, 620, 740, 780, 800, 820, 900):  # kB
        with open(ballast, "wb", buffering=0) as file:
            status = os.statvfs(disk)
            file.write(bytes(max(status.f_bavail * status.f_frsize - left * 1000, 0)))
        try:
            shuffle(folder / "input", output, **options)
        except (OSError, MillraceError) as error:
            errors.append(str(error))
        else:
            break
        assert not (output / "metadata.json").exists()
        ballast.unlink()
    ballast.unlink(missing_ok=True)
    assert len(errors) >= 3
    assert all("No space left" in error for error in errors)
    assert any("No space left on device" in error for error in errors)
    shuffle(folder / "input", output, **options)
    shuffle(folder / "input", folder / "other", **options)
    assert VERB.read_files(output) == VERB.read_files(folder / "other")


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    with open(tmp_path / "input" / "x.bin", "wb") as file:
        file.truncate(200 * 10**6)
    options = ["--input-dir", str(tmp_path / "input"), "--memory", "10M", "--plan", "scatter"]
    output = tmp_path / "output"
    process = VERB.launch([*options, "--num-workers", "1", "--json"], output)
    while len(finished_tasks(output)) < 2:
        assert process.poll() is None, "the job has ended"
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("millrace: error: interrupted")
    assert names_in(output) == ["shuffle.journal"]
    summary = finish(VERB.launch([*options, "--num-workers", "2", "--json"], output))
    assert summary["num_tasks_kept"] >= 2
