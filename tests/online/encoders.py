"""Encoders, rows and comparisons of the tests of raw rows."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import EncodedRows, TextRows
from millrace.feed import TokenBatch

BYTES = TextRows(Tokenizer("bytes"))
EOD = 256
CASES = [pytest.param(40), pytest.param(1000, marks=pytest.mark.long)]
"""Numbers of random cases of a law: of `make test`, and of `make test-laws`."""

Document = list[tuple[int, bool]]
"""Tokens, each with whether it is trained on."""


class Marked:
    """Texts as bytes, with letters below one trained on; a second document for "again"."""

    dtype, columns = np.dtype(np.uint16), ("text", "again")

    def __init__(self, letter: str = "m") -> None:
        self.letter = letter

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
        repeated = [one for row in rows for one in [row] * (1 + bool(row.get("again")))]
        tokens, ends, _, counts, problems, _ = BYTES.encode(repeated)
        sizes = np.cumsum([0, *(1 + bool(row.get("again")) for row in rows)])
        own = np.add.reduceat(counts, sizes[:-1]) if len(rows) else counts
        places = {int(np.searchsorted(sizes, n, side="right")) - 1: problems[n] for n in problems}
        trained = tokens < ord(self.letter)
        report = {"rows": len(rows), "trained tokens": int(trained.sum())}
        return EncodedRows(tokens, ends, trained, own, places, report)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "marked", "letter": self.letter}


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """Writes rows as lines of JSON; a text is a line as it is."""
    lines = [
        row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)
        for row in rows
    ]
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogatepass"))
    return path


def documents_in(batch: Any) -> list[Document]:
    """The documents of encoded rows, or the samples of a token batch, token by token."""
    trained = [True] * len(batch.tokens) if batch.trained is None else batch.trained.tolist()
    pairs = list(zip(batch.tokens.tolist(), trained, strict=True))
    return [pairs[start:stop] for start, stop in itertools.pairwise([0, *batch.ends.tolist()])]


def assert_same_tokens(one: TokenBatch, other: TokenBatch) -> None:
    """Tokens, targets and documents of two token batches; where each comes from may differ."""
    assert documents_in(one) == documents_in(other)
    for name in ("part_starts", "part_sequence", "part_offset"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
