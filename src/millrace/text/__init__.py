"""Documents from files of many formats.

`inputs` says which files a job reads, `parts` cuts them for tasks, `documents` reads the texts of a
part in batches; `sentences` splits texts. `millrace.encoding` turns texts into ids. Needs the
`tokenizers` extra.
"""

import importlib
import warnings
from typing import Any

from millrace.text.documents import Batch, Documents, Query, Reject, check_keys
from millrace.text.inputs import find_inputs, read_input_list
from millrace.text.parts import (
    Format,
    InputFile,
    Part,
    Piece,
    first_line_of,
    open_part,
    parts_of,
    pieces_of,
    read_documents,
)
from millrace.text.records import BadDocumentError
from millrace.text.sentences import SentenceSplitter

__all__ = [
    "BadDocumentError",
    "Batch",
    "Documents",
    "Format",
    "InputFile",
    "Part",
    "Piece",
    "Query",
    "Reject",
    "SentenceSplitter",
    "check_keys",
    "find_inputs",
    "first_line_of",
    "open_part",
    "parts_of",
    "pieces_of",
    "read_documents",
    "read_input_list",
]


def __getattr__(name: str) -> Any:
    """`Tokenizer`, which has moved to `millrace.encoding`."""
    if name != "Tokenizer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "millrace.text.Tokenizer has moved: import it from millrace.encoding",
        DeprecationWarning,
        stacklevel=2,
    )
    return importlib.import_module("millrace.encoding").Tokenizer
