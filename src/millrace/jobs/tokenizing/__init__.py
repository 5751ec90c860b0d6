"""Tokenising: text files become indexed datasets, by tasks that are kept in a journal.

`plan` divides the input into tasks, `task` is what a worker does with one, `columns` holds token
ids in flat arrays, `output` appends finished tasks to the final files, `job` is the whole.
"""

from millrace.jobs.tokenizing.job import CHECK_RATE, TokenizeResult, tokenize

__all__ = ["CHECK_RATE", "TokenizeResult", "tokenize"]
