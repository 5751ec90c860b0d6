"""Runs the tasks of a long job, on this machine or on many, and keeps what is done across kills.

The engine knows nothing of what a job is about. A job draws its tasks, gives them to `Run.map`, and
makes its output of their records and files.
"""

from millrace.engine.local import run_local as run_local
from millrace.engine.progress import Progress as Progress
from millrace.engine.ray import run_ray as run_ray
from millrace.engine.run import ALREADY as ALREADY
from millrace.engine.run import ENGINES as ENGINES
from millrace.engine.run import Done as Done
from millrace.engine.run import Run as Run
from millrace.engine.tasks import ENVIRONMENT as ENVIRONMENT
from millrace.engine.tasks import Executor as Executor
from millrace.engine.tasks import Task as Task
