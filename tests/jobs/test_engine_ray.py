"""Tasks on a real Ray cluster of three nodes, one of which is lost."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.encoding import Tokenizer
from millrace.engine import Task, run_local, run_ray
from millrace.errors import ConfigError, MillraceError, TextError
from millrace.jobs import shuffle, tokenize
from millrace.names import SHUFFLE_RESULT
from tests.jobs import engine_functions as functions
from tests.jobs.engine_functions import HANG, PRELUDE, tasks_of
from tests.jobs.engine_job import expected_output, run_job
from tests.jobs.shuffle_cases import small_buffers


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    # A short path: the names of Unix sockets in it have at most 107 bytes.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    with pytest.MonkeyPatch.context() as context:
        # Ray's files, and the file that tells other processes of the user of this cluster. Cluster
        # writes it, but does not create its folder.
        context.setenv("RAY_TMPDIR", folder)
        context.delenv("RAY_ADDRESS", raising=False)
        os.mkdir(f"{folder}/ray")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def runtime(cluster: Any) -> Iterator[None]:
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_no_cluster_and_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # a port without a listener
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=f"nothing answers at .*:{port}: .*refused. Start one"):
        list(run_ray(functions.multiply, 2, []))
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(ConfigError, match=r"no connection to a Ray cluster: .*nonsense"):
        list(run_ray(functions.multiply, 2, []))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray cannot be loaded.*pip install 'millrace\[ray\]'"):
        list(run_ray(functions.multiply, 2, []))


def test_a_job_connects_by_the_environment_and_disconnects(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    handler = signal.getsignal(signal.SIGTERM)
    tasks = tasks_of(*range(30))
    results = run_ray(functions.multiply, 3, iter(tasks))
    assert dict(results) == {task: 3 * task.payload for task in tasks}
    ((_, threads),) = run_ray(functions.environment, "RAYON_NUM_THREADS", tasks_of(0))
    assert threads == "1"
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_job_joins_a_cluster_only_if_it_is_told_to(cluster: Any, address: str | None) -> None:
    """One runs here, and its address is where Ray looks for it."""
    assert Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster").read_text()
    code = PRELUDE + (
        "import ray\n"
        "for task, result in run_ray(multiply, 3, [Task(0, 7)], note=print):\n"
        "    print(result, ray.get_runtime_context().gcs_address)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **({} if address is None else {"RAY_ADDRESS": address})},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stderr
    notice, answer = result.stdout.splitlines()
    number, joined = answer.split()
    assert number == "21"
    text = f"RAY_ADDRESS, {cluster.address}" if address else "a Ray cluster of this job"
    assert text in notice
    assert (joined == cluster.address) == (address == "auto")


def test_ctrl_c_ends_a_job_on_ray(cluster: Any) -> None:
    functions.assert_interruptible(
        "from millrace.interrupts import interrupts_held\n"
        "tasks = [Task(0, 0), Task(1, 1000), Task(2, 1000)]\n"
        "with interrupts_held():\n"
        "    for _ in run_ray(sleep, None, tasks): print('runs', flush=True)\n",
        RAY_ADDRESS=cluster.address,
    )


def test_tasks_are_drawn_only_as_they_finish(runtime: None) -> None:
    functions.assert_drawn_as_they_finish(run_ray, 3, 4)


@pytest.mark.parametrize(("payload", "kind", "message"), functions.FAILURES)
def test_an_error_of_the_function_is_raised(
    runtime: None, payload: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        list(run_ray(functions.fail, None, tasks_of("wait", payload)))
    if not isinstance(caught.value, (TextError, ConfigError)):
        assert "in fail" in str(caught.value.__cause__)  # the worker's traceback


def test_a_task_that_always_crashes_is_an_error(runtime: None) -> None:
    with pytest.raises(MillraceError, match=r"task 0 \(part 0\) cannot be run .* WorkerCrashed"):
        list(run_ray(functions.die, "abort", tasks_of(0)))


def test_close_ends_what_runs(runtime: None, tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    results = run_ray(functions.beat, str(beats), tasks_of(1, 1000, 1000))
    next(results)
    results.close()
    deadline = time.monotonic() + HANG
    size = -1
    while size != (size := beats.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.5)


def shuffle_on(folder: Path, engine: str, workers: int, num_shards: int = 12) -> dict[str, bytes]:
    """The files of a shuffle in two passes, but for its result, which says how long it took."""
    if not (folder / "input").exists():
        (folder / "input").mkdir()
        tokens = np.random.default_rng(0).integers(0, 1000, 40_000, np.uint32)
        tokens.tofile(folder / "input" / "a.bin")
    options: Any = {"engine": engine, "workers": workers, "num_shards": num_shards}
    output = folder / engine
    with small_buffers(random.Random(2)):
        result = shuffle(folder / "input", output, seq_len=4, plan="scatter", **options)
    assert result.num_tasks_done > num_shards
    return {p.name: p.read_bytes() for p in output.iterdir() if p.name != SHUFFLE_RESULT}


def test_a_shuffle_loses_a_node(
    cluster: Any, runtime: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes run on the cluster; a node dies in the first; the output is the local one's."""
    node = cluster.add_node(num_cpus=1)
    lost = []

    def lossy(*arguments: Any, **options: Any) -> Generator[tuple[Task, Any], None, None]:
        for task, result in run_ray(*arguments, **options):
            yield task, result
            if not lost:
                cluster.remove_node(node, allow_graceful=False)
                lost.append(task)

    monkeypatch.setattr("millrace.engine.ray.run_ray", lossy)
    assert shuffle_on(tmp_path, "ray", 6) == shuffle_on(tmp_path, "local", 1)
    assert len(lost) == 1


@pytest.mark.parametrize("job", ["shuffle", "tokenize"])
def test_a_task_names_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """What it does not name is not on the disk when its machine is lost."""
    num_files = 0

    def noting(*arguments: Any, note: Any, workers: Any) -> Iterator[tuple[Task, Any]]:
        nonlocal num_files
        for task, (attempt, record, sums) in run_local(*arguments, workers=1):
            (folder,) = tmp_path.glob(f"**/{attempt}")
            assert {path.name for path in folder.iterdir()} == sums.keys()
            num_files += len(sums)
            yield task, (attempt, record, sums)

    monkeypatch.setattr("millrace.engine.ray.run_ray", noting)
    if job == "shuffle":
        shuffle_on(tmp_path, "ray", 2, num_shards=3)
    else:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "a b"}\n{}\n' * 10)
        options: Any = {"engine": "ray", "on_error": "quarantine"}
        tokenize([path], tmp_path / "data", Tokenizer("bytes"), **options)
    assert num_files > 3


def test_a_node_is_lost(cluster: Any, runtime: None, tmp_path: Path) -> None:
    """Its task runs again, and the output is what one process writes."""
    num_tasks = 30
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    _wait_for_workers_of(raylets)
    lost = []

    def lossy(*arguments: Any, **options: Any) -> Generator[tuple[Task, Any], None, None]:
        finished = set()
        for task, result in run_ray(*arguments, **options):
            yield task, result
            finished.add(task.number)
            for number, worker, raylet in attempts_in(log):
                if number not in finished and raylet in raylets and not lost:
                    os.kill(worker, signal.SIGSTOP)  # it must not finish meanwhile
                    files = tmp_path.glob(f"ray.journal/**/{number:06}*/data")
                    if any(path.stat().st_size > 10 for path in files):
                        os.kill(worker, signal.SIGCONT)  # it has: its answer may be under way
                        continue
                    cluster.remove_node(raylets[raylet], allow_graceful=False)
                    os.kill(worker, signal.SIGKILL)
                    lost.append(number)

    log = tmp_path / "ray.log"
    counts = run_job(str(tmp_path / "ray"), num_tasks, workers=None, engine=lossy, seconds=0.3)
    assert counts == (num_tasks, 0)
    assert (tmp_path / "ray.out").read_bytes() == expected_output(num_tasks)
    numbers = [number for number, _, _ in attempts_in(log)]
    assert len(lost) == 1
    assert numbers.count(lost[0]) > 1
    assert sorted(set(numbers)) == list(range(num_tasks))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ray.job.info.json", "ray.log", "ray.out"]


def _wait_for_workers_of(raylets: Iterable[int]) -> None:
    """A busy machine starts them so late that the head could run all tasks alone."""
    import ray

    @ray.remote(num_cpus=1)
    def raylet() -> int:
        time.sleep(0.2)
        return os.getppid()

    deadline = time.monotonic() + HANG
    while not set(raylets) <= set(ray.get([raylet.remote() for _ in range(6)])):
        assert time.monotonic() < deadline


def attempts_in(log: Path) -> list[tuple[int, int, int]]:
    """The attempts that began: the task, the worker, and the process that started the worker."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(number), int(worker), int(parent)) for number, worker, parent in lines]
