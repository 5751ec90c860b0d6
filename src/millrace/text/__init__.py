"""Documents from files of many formats.

`inputs` says which files a job reads, `parts` cuts them for tasks, `documents` reads the texts of a
part in batches; `sentences` splits texts. `millrace.encoding` turns texts into ids. Needs the
`tokenizers` extra.
"""

import importlib
import warnings
from typing import Any

from millrace.text.documents import Documents, Reject, check_keys, read_documents
from millrace.text.inputs import InputFile, find_inputs, read_input_list
from millrace.text.parts import Part, Piece, parts_of, pieces_of
from millrace.text.sentences import SentenceSplitter
from millrace.text.tables import num_rows_before

__all__ = [
    "Documents",
    "InputFile",
    "Part",
    "Piece",
    "Reject",
    "SentenceSplitter",
    "check_keys",
    "find_inputs",
    "num_rows_before",
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
