"""From files to token ids: documents from JSONL, and the tokenizer.

`documents` reads lines in blocks and takes each document's texts from them, `tokenizer` turns
texts into ids. Needs the `tokenizers` extra.
"""

from millrace.text.documents import LineBlock, document_texts, read_blocks
from millrace.text.tokenizer import EOD_TOKENS, Tokenizer

__all__ = ["EOD_TOKENS", "LineBlock", "Tokenizer", "document_texts", "read_blocks"]
