"""The job of the global shuffle, on the engine; see `millrace.shuffling`."""

from millrace.jobs.shuffling.shuffle_job import ShuffleResult, shuffle

__all__ = ["ShuffleResult", "shuffle"]
