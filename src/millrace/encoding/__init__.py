"""Token ids from texts, by tokenizers of several libraries. Needs the `tokenizers` extra."""

from millrace.encoding.tokenizer import UNSEEN, Tokenizer, checked_tokenizer, compare_encoders
from millrace.encoding.vocabulary import ENCODERS, EOD_TOKENS

__all__ = ["ENCODERS", "EOD_TOKENS", "UNSEEN", "Tokenizer", "checked_tokenizer", "compare_encoders"]
