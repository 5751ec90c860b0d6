"""Runs the tasks of a long job, on this machine or on many, and keeps what is done across kills.

    tasks.py    what a task is, and what an executor does
    local.py    an executor of worker processes on this machine
    ray.py      an executor on a Ray cluster
    journal.py  the record of what is done, in a folder beside the output

The engine knows nothing of what a job is about. A job draws its tasks, gives them to an executor,
and collects the results. Each task writes files into the journal's folder and commits them; the
next run of the same job skips what is committed.
"""

from millrace.jobs.engine.journal import Journal, commit, task_folder
from millrace.jobs.engine.local import run_local
from millrace.jobs.engine.ray import run_ray
from millrace.jobs.engine.tasks import ENVIRONMENT, Executor, Task

__all__ = [
    "ENVIRONMENT",
    "Executor",
    "Journal",
    "Task",
    "commit",
    "run_local",
    "run_ray",
    "task_folder",
]
