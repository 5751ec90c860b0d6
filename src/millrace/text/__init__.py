"""From files to token ids: documents from files of many formats, and the tokenizer.

`inputs` says which files a job reads, `parts` cuts them for tasks, `documents` reads the texts of a
part in batches; `sentences` splits texts; `tokenizer` turns texts into ids by one of the libraries
in `encoders`, which `encoder_check` compares with the one that the vocabulary was made for. Needs
the `tokenizers` extra.
"""

from millrace.text.documents import Documents, Reject, check_keys, read_documents
from millrace.text.encoder_check import Difference, checked_tokenizer, compare_encoders
from millrace.text.inputs import InputFile, find_inputs, read_input_list
from millrace.text.parts import Part, Piece, parts_of, pieces_of
from millrace.text.sentences import SentenceSplitter
from millrace.text.tables import num_rows_before
from millrace.text.tokenizer import EOD_TOKENS, Tokenizer

__all__ = [
    "EOD_TOKENS",
    "Difference",
    "Documents",
    "InputFile",
    "Part",
    "Piece",
    "Reject",
    "SentenceSplitter",
    "Tokenizer",
    "check_keys",
    "checked_tokenizer",
    "compare_encoders",
    "find_inputs",
    "num_rows_before",
    "parts_of",
    "pieces_of",
    "read_documents",
    "read_input_list",
]
