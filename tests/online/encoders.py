"""Encoders, rows and comparisons of the tests of raw rows."""

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


class Marked:
    """Texts as bytes, of which letters below "m" are trained on; a second document for "again"."""

    dtype = np.dtype(np.uint16)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
        repeated = [one for row in rows for one in [row] * (1 + bool(row.get("again")))]
        tokens, ends, _, counts, problems, _ = BYTES.encode(repeated)
        sizes = np.cumsum([0, *(1 + bool(row.get("again")) for row in rows)])
        own = np.add.reduceat(counts, sizes[:-1]) if len(rows) else counts
        places = {int(np.searchsorted(sizes, n, side="right")) - 1: problems[n] for n in problems}
        return EncodedRows(tokens, ends, tokens < ord("m"), own, places)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "marked"}


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_same_tokens(one: TokenBatch, other: TokenBatch) -> None:
    """Tokens, targets and documents of two token batches; where each comes from may differ."""
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.ends.tolist() == other.ends.tolist()
    masks = [
        np.ones(len(batch.tokens), np.bool_) if batch.trained is None else batch.trained
        for batch in (one, other)
    ]
    assert masks[0].tolist() == masks[1].tolist()
    for name in ("part_starts", "part_sequence", "part_offset"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
