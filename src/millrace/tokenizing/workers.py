"""How many worker processes a tokenise job has: cores, memory, and what the input is worth."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.cores import available_cores, available_memory
from millrace.errors import ConfigError
from millrace.text import InputFile
from millrace.tokenizing.tokenize_options import TokenizeOptions

MB = 1_000_000
UNPACKED = 4
"""Bytes of text in a byte of a compressed file, about."""

_WORTH_A_WORKER = 32 * MB  # bytes of text that take as long as the start of a worker

# Private memory in bytes, measured with GPT-2 and a vocabulary of 100 k and rounded up: the job's
# process (NumPy, Arrow, the sidecar's rows), and a worker (two libraries with a tokenizer each, the
# encoder's cache of words, three batches of text and their ids).
_JOB_MEMORY = 120 * MB
_WORKER_MEMORY = 280 * MB
# Copies of a document while it is encoded, in bytes per byte of its line: the line, a str of up to
# 4 bytes a character, its UTF-8, and up to one id of 4 bytes for each byte, in three copies.
_BYTES_PER_BYTE = 20
# Of the reference libraries, which keep more than ids, for the worst texts that were tried: many
# tokens of one byte.
_REFERENCE_BYTES_PER_BYTE = {"tokenizers": 330, "sentencepiece": 75, "tiktoken": 60}


def choose_workers(options: TokenizeOptions, files: Sequence[InputFile]) -> int:
    """Chooses the number of worker processes, so that the job fits into memory.

    Without `options.workers` it is one per core, or fewer if memory is short or the input is small.

    Raises:
        ConfigError: Too little memory.
    """
    most = available_cores()
    if options.memory is None:
        most = max(min(most, (available_memory() - _JOB_MEMORY) // _WORKER_MEMORY), 1)
    else:
        most = min(most, _workers_in(options.memory, options, files))
    if options.workers is None and options.engine == "local":
        most = min(most, _workers_worth(files))
    return options.workers or most


def _workers_in(memory: int, options: TokenizeOptions, files: Sequence[InputFile]) -> int:
    """The number of workers that fit into a number of bytes, with the job's own process."""
    encoder, longest = options.tokenizer.encoder_name, options.longest_document
    per_worker = _WORKER_MEMORY + longest * _REFERENCE_BYTES_PER_BYTE.get(encoder, _BYTES_PER_BYTE)
    unpacking = max((file.format.unpacking_memory for file in files), default=0)
    job_memory = _JOB_MEMORY + longest * unpacking
    most, least = (memory - job_memory) // per_worker, options.workers or 1
    if most < least:
        raise ConfigError(
            f"memory must be at least {(job_memory + least * per_worker) / MB:,.0f} MB for {least} "
            f"worker{'s' * (least > 1)} with {encoder} and documents of up to "
            f"{longest / MB:,.0f} MB, not {memory / MB:,.0f} MB. Give more memory, fewer workers, "
            "or a lower limit of documents: --max-document-size (max_document_size=...)"
        )
    return most


def _workers_worth(files: Sequence[InputFile]) -> int:
    """The number of workers that is worth their start, which takes as long as 32 MB of text."""
    if any(file.size is None for file in files):
        return available_cores()
    size = sum((file.size or 0) * (UNPACKED if file.compression else 1) for file in files)
    return max(size // _WORTH_A_WORKER, 1)
