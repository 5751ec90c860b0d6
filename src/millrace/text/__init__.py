"""From files to token ids: documents from files of many formats, and the tokenizer.

`inputs` says which files a job reads, `parts` cuts them for tasks, `documents` reads the texts of a
part in batches; `tokenizer` turns texts into ids. Needs the `tokenizers` extra.
"""

from millrace.text.documents import (
    Documents,
    LineBlock,
    Reject,
    document_texts,
    read_blocks,
    read_documents,
)
from millrace.text.inputs import InputFile, find_inputs, read_input_list
from millrace.text.parts import Part, Piece, parts_of, pieces_of
from millrace.text.tokenizer import EOD_TOKENS, Tokenizer

__all__ = [
    "EOD_TOKENS",
    "Documents",
    "InputFile",
    "LineBlock",
    "Part",
    "Piece",
    "Reject",
    "Tokenizer",
    "document_texts",
    "find_inputs",
    "parts_of",
    "pieces_of",
    "read_blocks",
    "read_documents",
    "read_input_list",
]
