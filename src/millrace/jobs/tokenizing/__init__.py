"""Tokenising: text files become indexed datasets, by tasks that are kept in a journal.

`arguments` checks what the caller asks for, `plan` divides the input into tasks, `task` is what a
worker does with one, `columns` holds token ids in flat arrays, `run` gives tasks to workers or
keeps what an earlier run has done, `output` appends them to the final files, and `job` is the
whole.
"""

from millrace.jobs.tokenizing.job import CHECK_RATE, TokenizeResult, tokenize

__all__ = ["CHECK_RATE", "TokenizeResult", "tokenize"]
