"""Token ids from texts: the tokenizers, and the libraries that encode for them.

A `Tokenizer` turns texts into ids by one of the libraries in `encoders`, which `encoder_check`
compares with the one that the vocabulary was made for. `training` makes a new one. Needs the
`tokenizers` extra.
"""

from millrace.encoding.encoder_check import Difference
from millrace.encoding.tokenizer import (
    EOD_TOKENS,
    UNSEEN,
    Tokenizer,
    checked_tokenizer,
    compare_encoders,
)

__all__ = [
    "EOD_TOKENS",
    "UNSEEN",
    "Difference",
    "Tokenizer",
    "checked_tokenizer",
    "compare_encoders",
]
