"""Tokenising: text files become indexed datasets, by tasks that are kept in a journal.

`text_job` is the whole, `input_tasks` plans what each task reads, `chunk` is what a worker does
with it, and `output` makes the final files.
"""

from millrace.tokenizing.text_job import TokenizeResult, tokenize
from millrace.tokenizing.tokenize_options import CHECK_RATE, TokenizeOptions

__all__ = ["CHECK_RATE", "TokenizeOptions", "TokenizeResult", "tokenize"]
