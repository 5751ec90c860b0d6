"""Rows into documents of tokens: the seam between data by rows and whatever encodes them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class EncodedRows(NamedTuple):
    """Documents made of rows: token ids, and which of them are trained on.

    Attributes:
        tokens: [n] Token ids of all documents, in the tokenizer's dtype.
        ends: [documents] int64, where each document ends among the tokens.
        trained: [n] bool, whether a token is a target; None: all are.
        counts: [rows] int64, number of documents of each row; 0 for a bad row.
        problems: Reason of each bad row, by its place among the rows.
    """

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    trained: NDArray[np.bool_] | None
    counts: NDArray[np.int64]
    problems: dict[int, str]


class RowEncoder(Protocol):
    """Rows (dictionaries) into documents of tokens. Picklable: it goes to worker processes.

    Attributes:
        dtype: Dtype of the tokens.
    """

    dtype: np.dtype[Any]

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
        """The documents of some rows; bad rows are problems, and the rest is whole."""

    def fingerprint(self) -> dict[str, Any]:
        """Plain values: all that decides the tokens."""
