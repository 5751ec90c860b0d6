"""Where documents come from, and which tokenizer made their tokens.

A pair does not know of this room. `origins` writes and reads the sidecar `PREFIX.origins.parquet`;
`tokenizers` compares what the sidecars `PREFIX.info.json` say of tokenizers.
"""

from millrace.provenance.origins import (
    Origin,
    Origins,
    OriginsFile,
    OriginsWriter,
    copied_origins,
    has_origins,
    origins_file,
)
from millrace.provenance.tokenizers import (
    TokenizerRecord,
    common_tokenizer,
    read_tokenizer,
    tokenizer_conflict,
)

__all__ = [
    "Origin",
    "Origins",
    "OriginsFile",
    "OriginsWriter",
    "TokenizerRecord",
    "common_tokenizer",
    "copied_origins",
    "has_origins",
    "origins_file",
    "read_tokenizer",
    "tokenizer_conflict",
]
