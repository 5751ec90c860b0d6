"""How many worker processes a tokenise job has: cores, memory, and what the input is worth."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.cores import available_cores, available_memory
from millrace.errors import ConfigError
from millrace.text import InputFile

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


def choose_workers(
    workers: int | None,
    memory: int | None,
    max_document_size: int,
    *,
    encoder: str = "",
    files: Sequence[InputFile] = (),
) -> int:
    """Chooses the number of worker processes so that the job fits into memory.

    Args:
        workers: Number of worker processes; None: one per core, or fewer if memory is short.
        memory: Bytes that all processes of the job may use; None: no limit but the machine's.
        max_document_size: Longest line in bytes.
        encoder: Name of the library that encodes.
        files: Input files.

    Raises:
        ConfigError: Too little memory.
    """
    if memory is None:
        most = (available_memory() - _JOB_MEMORY) // _WORKER_MEMORY
        return workers or max(min(available_cores(), most), 1)
    factor = _REFERENCE_BYTES_PER_BYTE.get(encoder, _BYTES_PER_BYTE)
    per_worker = _WORKER_MEMORY + max_document_size * factor
    unpacking = max((file.format.unpacking_memory for file in files), default=0)
    job_memory = _JOB_MEMORY + max_document_size * unpacking
    most = (memory - job_memory) // per_worker
    least = workers or 1
    if most < least:
        raise ConfigError(
            f"memory must be at least {(job_memory + least * per_worker) / MB:,.0f} MB for {least} "
            f"worker{'s' * (least > 1)}{' with ' * bool(encoder)}{encoder} and documents of up to "
            f"{max_document_size / MB:,.0f} MB, not {memory / MB:,.0f} MB. Give more memory, fewer "
            "workers, or a lower limit of documents: --max-document-size (max_document_size=...)"
        )
    return workers or min(available_cores(), most)


def workers_worth(files: Sequence[InputFile]) -> int:
    """The number of workers that is worth their start, which takes as long as 32 MB of text."""
    if any(file.size is None for file in files):
        return available_cores()
    size = sum((file.size or 0) * (UNPACKED if file.compression else 1) for file in files)
    return max(size // _WORTH_A_WORKER, 1)
