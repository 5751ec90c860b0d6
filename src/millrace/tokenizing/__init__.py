"""Tokenising: text files become indexed datasets, by tasks that are kept in a journal.

tokenize_options.py  the options, each described once
text_job.py          the whole: checks, runs the tasks, publishes
workers.py           how many worker processes fit into memory
cuts.py              which task reads which part of the input
input_tasks.py       the tasks, in order; pieces of files that cannot be cut
chunk.py             what a worker does with a task: reads, encodes, rejects, compares, writes
columns.py           token ids of many documents in flat arrays
output.py            tasks become the final files
"""

from millrace.tokenizing.text_job import TokenizeResult, tokenize
from millrace.tokenizing.tokenize_options import CHECK_RATE, TokenizeKeywords, TokenizeOptions

__all__ = ["CHECK_RATE", "TokenizeKeywords", "TokenizeOptions", "TokenizeResult", "tokenize"]
