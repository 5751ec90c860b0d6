"""kill -9 at any moment of a small job on the engine: `python -m tests.jobs.engine_kills`.

`kills` tells what must hold.
"""

from collections import Counter
from pathlib import Path

from tests.jobs.engine_job import expected_output
from tests.jobs.kills import Job, Verb, run_command, run_jobs

CODE = (
    "import json, sys; from tests.jobs.engine_job import run_job; "
    "done, kept = run_job(sys.argv[1], int(sys.argv[2]), workers=2, seconds=0.02); "
    "print(json.dumps({'tasks_done': done, 'tasks_kept': kept}))"
)
VERB = Verb(("-c", CODE), "out", "tasks", "out.[jl]o*")  # the result, and the log


def run(num_kills: int, seed: int, num_tasks: int = 60) -> Counter[str]:
    """Kills jobs of about that many tasks; returns how often what was killed."""
    sizes = [num_tasks - 20, num_tasks, num_tasks + 30]

    def make_jobs(folder: Path) -> list[Job]:
        jobs = [VERB.undisturbed(f"{size} tasks", [str(size)], folder) for size in sizes]
        assert [job.files["out.out"] for job in jobs] == list(map(expected_output, sizes))
        return jobs

    return run_jobs(make_jobs, VERB.run_job, num_kills, seed)


if __name__ == "__main__":
    run_command(__doc__ or "", run, "tasks", 60)
