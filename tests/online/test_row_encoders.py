"""Rows into documents: the encoder of plain texts, and what an encoder must return."""

import pickle
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, TextError
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import EncodedRows, RowEncoder, TextRows, encode_rows
from tests.online.encoders import BYTES, EOD, Marked


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no key"),
        ({"text": None}, "JSON null"),
        ({"text": 5}, "JSON number"),
        ({"text": ["a", 5]}, "has a JSON number"),
        ({"text": "\ud800"}, "surrogate"),
        ({"text": {"text": "a"}}, "JSON object"),
        (["a"], "not an object"),
    ],
)
def test_a_bad_row_leaves_the_others_whole(row: Any, reason: str) -> None:
    encoded = BYTES.encode([{"text": "ab"}, row, {"text": ""}, {"text": ["c", "", "d"]}])
    assert encoded.tokens.tolist() == [*b"ab", EOD, *b"cd", EOD]
    assert encoded.ends.tolist() == [3, 3, 6]
    assert encoded.counts.tolist() == [1, 0, 1, 1]
    assert list(encoded.problems) == [1]
    assert reason in encoded.problems[1]
    assert encoded.tokens.dtype == BYTES.dtype


def test_options_of_texts() -> None:
    plain = TextRows(Tokenizer("bytes"), "doc.body", append_eod=False)
    assert isinstance(plain, RowEncoder)
    assert plain.encode([{"doc": {"body": "a"}}]).tokens.tolist() == [ord("a")]
    assert plain.encode([]).counts.tolist() == []
    assert pickle.loads(pickle.dumps(plain)).fingerprint() == plain.fingerprint()
    assert plain.fingerprint() != TextRows(Tokenizer("bytes"), "doc.body").fingerprint()
    for bad in ("bytes", None, Tokenizer):
        with pytest.raises(ConfigError, match="must be a millrace"):
            TextRows(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="key 5 must be"):
        TextRows(Tokenizer("bytes"), 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give bos_token"):
        TextRows(Tokenizer("bytes"), prepend_bos=True)
    function = Tokenizer.from_function(len, vocabulary_size=9)  # type: ignore[arg-type]
    with pytest.raises(TextError, match="has none of"):
        TextRows(function)


@pytest.mark.parametrize(
    "change",
    [
        {"ends": np.array([1, 3])},
        {"counts": np.array([1, 0])},
        {"tokens": np.array([1, 2, 3], np.int64)},
        {"trained": np.ones(3, np.bool_)},
        {"problems": {0: "bad"}},
        {"counts": np.array([2, 0])},
        {"report": {"rows": np.int64(2)}},
        {"report": None},
        {"tokens": [97, 256]},
        {"counts": np.array(2)},
        {"ends": "ab"},
    ],
)
def test_an_encoder_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    class Wrong(Marked):
        def encode(self, rows: Any) -> EncodedRows:
            return super().encode(rows)._replace(**change)

    rows = [{"text": "a"}, {"text": ""}]
    assert encode_rows(Marked(), rows).counts.tolist() == [1, 1]
    with pytest.raises(ConfigError, match=r"Wrong\.encode returned"):
        encode_rows(Wrong(), rows)
