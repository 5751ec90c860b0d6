"""Token ids from texts: tokenizers by several libraries, their kinds of files, training.

Needs the `tokenizers` extra.
"""

from millrace.encoding.tokenizer import (
    EOD_TOKENS,
    UNSEEN,
    Tokenizer,
    checked_tokenizer,
    compare_encoders,
)
from millrace.encoding.vocabulary import ENCODERS

__all__ = ["ENCODERS", "EOD_TOKENS", "UNSEEN", "Tokenizer", "checked_tokenizer", "compare_encoders"]
