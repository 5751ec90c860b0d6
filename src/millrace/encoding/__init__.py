"""Token ids from texts: the tokenizers, and the libraries that encode for them.

A `Tokenizer` turns texts into ids by one of the libraries in `ENCODERS`, which `encoder_check`
compares with the one that the file was made for. `tokenizer_files` has a class for each kind of
file; `training` makes a new tokenizer. Needs the `tokenizers` extra.
"""

from millrace.encoding.tokenizer import (
    EOD_TOKENS,
    UNSEEN,
    Tokenizer,
    checked_tokenizer,
    compare_encoders,
)
from millrace.encoding.vocabulary import ENCODERS

__all__ = [
    "ENCODERS",
    "EOD_TOKENS",
    "UNSEEN",
    "Tokenizer",
    "checked_tokenizer",
    "compare_encoders",
]
