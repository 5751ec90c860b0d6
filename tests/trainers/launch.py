"""Runs an example in several processes, several times, and imports its libraries only once.

    python launch.py SCRIPT MODULES RUNS

MODULES is a comma-separated list of modules to import before forking, RUNS a JSON list of runs
{"ranks": 2, "arguments": [...], "is_killed": false}, done one after the other.
"""

import faulthandler
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

LIMIT = 90  # seconds for one run


def main() -> None:
    script, modules, runs = sys.argv[1:]
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    sys.path.insert(0, str(Path(script).parent))
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    for run in json.loads(runs):
        run_once(script, run)


def run_once(script: str, run: dict[str, Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = {fork(script, rank, run, port): rank for rank in range(run["ranks"])}
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(child, signal.SIGKILL) for child in children])
    signal.alarm(LIMIT)
    expected = -signal.SIGKILL if run.get("is_killed") else 0
    codes = {}
    for _ in list(children):
        child, status = os.wait()
        codes[children.pop(child)] = code = os.waitstatus_to_exitcode(status)
        if code != expected:  # the others would wait for it
            for other in children:
                os.kill(other, signal.SIGKILL)
    is_late = signal.alarm(0) == 0
    if is_late or set(codes.values()) != {expected}:
        sys.exit(f"{run}: exit codes by rank {codes}" + " after the time limit" * is_late)


def fork(script: str, rank: int, run: dict[str, Any], port: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        size = str(run["ranks"])
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=size,
            LOCAL_WORLD_SIZE=size,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        faulthandler.dump_traceback_later(LIMIT - 10)  # where it hangs, before it is killed
        sys.argv = [script, *run["arguments"]]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else bool(stop.code)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what the libraries do at exit was registered in the parent


if __name__ == "__main__":
    main()
