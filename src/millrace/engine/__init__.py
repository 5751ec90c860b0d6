"""Runs the tasks of a long job, on this machine or on many, and keeps what is done across kills.

A job draws its tasks, gives them to `Run.map`, and makes its output of their records and files. The
engine knows nothing else of a job.
"""

from millrace.engine.progress import Progress
from millrace.engine.ray import run_ray
from millrace.engine.run import ALREADY, ENGINES, Done, Run
from millrace.engine.tasks import ENVIRONMENT, Executor, Task, run_local

__all__ = [
    "ALREADY",
    "ENGINES",
    "ENVIRONMENT",
    "Done",
    "Executor",
    "Progress",
    "Run",
    "Task",
    "run_local",
    "run_ray",
]
