"""Documents from files of many formats.

`inputs` says which files a job reads, `parts` cuts them for tasks, `documents` reads a part's texts
in batches, `sentences` splits texts, and `millrace.encoding` encodes them. Needs the `tokenizers`
extra.
"""

from millrace.text.documents import Batch, Documents, Query, Reject, check_keys
from millrace.text.inputs import find_inputs, read_input_list
from millrace.text.json_values import BadDocumentError
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
