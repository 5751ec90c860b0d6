"""Programs that end with live millrace objects end quietly."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import write_documents

OPEN = """
import sys
import millrace

dataset = millrace.IndexedDataset(sys.argv[1])
samples = millrace.GPTDataset(dataset, sequence_length=4, seed=1)
builder = millrace.IndexedDatasetBuilder(sys.argv[1] + "_new")
dataset[0], dataset[0:2], samples[0]
"""
# The frame of a daemon thread outlives Python, and what it holds.
THREAD = """
import threading

started = threading.Event()
def hold(*objects):
    started.set()
    threading.Event().wait()
threading.Thread(target=hold, args=(dataset, samples, builder), daemon=True).start()
started.wait()
"""
# A spawned worker has such a thread, and torch's module a reference to the dataset.
WORKERS = """
if __name__ == "__main__":
    from torch.utils.data import DataLoader
    loader = DataLoader(samples, num_workers=1, multiprocessing_context="spawn")
    assert sum(1 for _ in loader) == len(samples)
"""

# On a busy machine, multiprocessing may end before it tells its tracker that a semaphore is gone.
IGNORED = "ignore:resource_tracker:UserWarning"


@pytest.mark.parametrize(
    "program",
    [OPEN, OPEN + THREAD, OPEN.replace("builder =", "0 #") + WORKERS],
    ids=["globals", "thread", "workers"],
)
def test_live_objects_at_exit_are_not_a_leak(tmp_path: Path, program: str) -> None:
    write_documents(tmp_path / "data", [np.arange(5)] * 9)
    (tmp_path / "program.py").write_text(program)
    result = subprocess.run(
        [sys.executable, tmp_path / "program.py", tmp_path / "data"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONWARNINGS": IGNORED},
    )
    assert (result.returncode, result.stderr) == (0, "")
