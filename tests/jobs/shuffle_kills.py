"""kill -9 at any moment of `millrace shuffle`: `python -m tests.jobs.shuffle_kills --kills 100`.

`kills` tells what must hold.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from millrace import IndexedDatasetBuilder
from millrace.names import SHUFFLE_RESULT
from tests.jobs.kills import Job, Verb, run_command, run_jobs

VERB = Verb(("-m", "millrace", "shuffle", "--output-dir"), "", "num_tasks", SHUFFLE_RESULT)

# Of 4 tokens each, a sequence takes less memory than its overhead: the data need several runs.
COMMANDS: dict[str, str] = {
    "one bucket": "--plan gather --memory 300M --num-workers 2",
    "gather": "--plan gather --memory 130M --num-workers 2",
    "gather alone": "--plan gather --memory 10M --num-workers 1",
    "scatter": "--plan scatter --memory 130M --num-workers 2",
    "scatter alone": "--plan scatter --memory 16M --num-workers 1",
    "keyed": "--plan scatter --memory 130M --num-workers 2 --permutation keyed --carry",
    "documents": "--plan scatter --memory 130M --num-workers 2 --documents",
}


def make_jobs(folder: Path, num_sequences: int, names: Sequence[str] = ()) -> list[Job]:
    """Writes the input, and runs the jobs of these names, or all, undisturbed."""
    random_tokens = np.random.default_rng(0)
    for domain in "abc":
        (folder / "input" / domain).mkdir(parents=True)
        for number in range(3):
            tokens = random_tokens.integers(0, 2**16, 4 * num_sequences // 9 + 3, np.uint16)
            tokens.tofile(folder / "input" / domain / f"{number}.bin")
    (folder / "documents" / "a").mkdir(parents=True)
    for number in range(2):
        with IndexedDatasetBuilder(folder / "documents" / "a" / str(number)) as builder:
            lengths = random_tokens.integers(0, 9, num_sequences // 2)
            builder.add_documents(np.zeros(lengths.sum(), np.int32) + number, lengths)
    jobs = []
    for name, command in COMMANDS.items():
        if names and name not in names:
            continue
        source = "documents" if "--documents" in command else "input"
        options = ["--input-dir", str(folder / source), "--seq-len", "4", "--dtype", "uint16"]
        options += ["--num-shards", "40", "--json", *command.split()]
        jobs.append(VERB.undisturbed(name, options, folder))
    return jobs


run = partial(run_jobs, make_jobs, VERB.run_job)

if __name__ == "__main__":
    run_command(__doc__ or "", run, "sequences", 1_200_000)
