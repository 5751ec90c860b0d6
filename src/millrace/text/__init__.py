"""From files to token ids: documents from JSONL, and the tokenizer.

`documents` reads lines in blocks and extracts the texts of the documents, `tokenizer` turns texts
into ids. Needs the `tokenizers` extra.
"""

from millrace.text.documents import LineBlock, document_texts, read_blocks
from millrace.text.tokenizer import EOD_TOKENS, Tokenizer

__all__ = ["EOD_TOKENS", "LineBlock", "Tokenizer", "document_texts", "read_blocks"]
