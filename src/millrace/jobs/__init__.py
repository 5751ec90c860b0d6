"""Long work over many files: bounded memory, every core, the same output for any number of them."""

from millrace.jobs.reshape import convert, merge, split
from millrace.jobs.tokenize import TokenizeResult, tokenize

__all__ = ["TokenizeResult", "convert", "merge", "split", "tokenize"]
