"""Rows into documents: the encoder of plain texts, and what an encoder must return."""

import pickle
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, TextError
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import EncodedRows, RowEncoder, TextRows, encode_rows
from tests.online.encoders import BYTES, EOD, Marked


def test_a_bad_row_leaves_the_others_whole() -> None:
    for row, reason in (
        ({}, "no key"),
        ({"text": None}, "JSON null"),
        ({"text": 5}, "JSON number"),
        ({"text": ["a", 5]}, "has a JSON number"),
        ({"text": "\ud800"}, "surrogate"),
        ({"text": {"text": "a"}}, "JSON object"),
        (["a"], "not an object"),
    ):
        texts: list[Any] = [{"text": "ab"}, row, {"text": ""}, {"text": ["c", "", "d"]}]
        encoded = BYTES.encode(texts)
        assert encoded.tokens.tolist() == [*b"ab", EOD, *b"cd", EOD]
        assert (encoded.ends.tolist(), encoded.counts.tolist()) == ([3, 3, 6], [1, 0, 1, 1])
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
    function = Tokenizer.from_function(len, vocabulary_size=9)  # type: ignore[arg-type]
    for arguments, problem in (
        (["bytes"], "must be a millrace"),
        ([Tokenizer], "must be a millrace"),
        ([Tokenizer("bytes"), 5], "key 5 must be"),
        ([Tokenizer("bytes"), "text", True, True], "give bos_token"),
        ([function], "has none of"),
    ):
        with pytest.raises((ConfigError, TextError), match=problem):
            TextRows(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ends", np.array([1, 3])),
        ("ends", "ab"),
        ("counts", np.array([1, 0])),
        ("counts", np.array([2, 0])),
        ("counts", np.array(2)),
        ("tokens", np.array([1, 2, 3], np.int64)),
        ("tokens", [97, 256]),
        ("trained", np.ones(3, np.bool_)),
        ("problems", {0: "bad"}),
        ("report", {"rows": np.int64(2)}),
        ("report", None),
    ],
)
def test_an_encoder_that_contradicts_itself_is_refused(name: str, value: Any) -> None:
    class Wrong(Marked):
        def encode(self, rows: Any) -> EncodedRows:
            return super().encode(rows)._replace(**{name: value})

    rows = [{"text": "a"}, {"text": ""}]
    assert encode_rows(Marked(), rows).counts.tolist() == [1, 1]
    with pytest.raises(ConfigError, match=r"Wrong\.encode returned"):
        encode_rows(Wrong(), rows)
