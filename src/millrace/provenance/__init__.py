"""Where documents come from, and which tokenizer made their tokens.

A pair does not know of this room: it reads and writes the sidecar `PREFIX.origins.parquet`, and
compares what the sidecars `PREFIX.info.json` say of tokenizers.
"""

from millrace.provenance.origins import (
    Origin,
    Origins,
    OriginsWriter,
    copied_origins,
    has_origins,
    origins_file,
)
from millrace.provenance.tokenizers import check_tokenizers, common_tokenizer, read_tokenizer

__all__ = [
    "Origin",
    "Origins",
    "OriginsWriter",
    "check_tokenizers",
    "common_tokenizer",
    "copied_origins",
    "has_origins",
    "origins_file",
    "read_tokenizer",
]
