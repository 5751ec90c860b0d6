"""The check of encoders: edge cases, differences, refusals."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from millrace.encoding import Tokenizer, edge_cases as edge_cases_module
from millrace.encoding.edge_cases import _around_tokens, edge_cases
from millrace.encoding.tokenizer import checked_tokenizer, compare_encoders
from tests.encoding import encoder_variants as variants
from tests.encoding.encoder_variants import byte_level, models, sequence, split
from tests.encoding.test_tokenizer import train_sentencepiece, write_tiktoken


def write_variant(folder: Path, name: str = "byte_level", **changes: Any) -> Path:
    path = folder / "t.json"
    path.write_text(json.dumps({**models()[name], **changes}))
    return path


def letters(text: str) -> list[int]:
    return [ord(character) for character in text]


def wrong_letters(text: str) -> list[int]:
    return [ord(character) + (character == "é") for character in text]


def two_letters(text: str) -> list[int]:
    return letters(text[:2])


def with_water(text: str) -> list[int]:
    return letters(text + "水")


# ---- the comparison ----


@pytest.mark.parametrize(
    ("other", "reference", "texts", "difference"),
    [
        (wrong_letters, letters, ["a", "", "the café", "é"],
         "from token 7 the ids are [99, 97, 102, 234] instead of [99, 97, 102, 233], for the text "
         "'the café'"),
        (wrong_letters, letters, ["a", ""], None),
        (wrong_letters, letters, [], None),
        (two_letters, letters, ["ab", "abc"],
         "from token 2 the ids are [97, 98] instead of [97, 98, 99], for the text 'abc'"),
        # What the reference cannot encode is left out.
        (with_water, letters, ["水", "a"],
         "it cannot encode the text 'a' (with_water (vocabulary_size 300) on the text 'a': an id "
         "must be between 0 and 299, not 27700)"),
        (letters, with_water, ["水", "a"], None),
    ],
)  # fmt: skip
def test_the_first_text_that_differs_is_found(
    other: Any, reference: Any, texts: list[str], difference: str | None
) -> None:
    both = [Tokenizer.from_function(one, vocabulary_size=300) for one in (other, reference)]
    assert compare_encoders(*both, texts) == difference


# ---- cases on which a fast encoder is, or was, silently wrong ----

WRONG = {
    "unicode spaces": split({"Regex": r"[^\s\p{L}]+|\s+(?!\S)|\s+"}),
    "circled letters": split({"Regex": r"\w"}),
    "word boundary": split({"Regex": r"\d{1,3}(?=(?:\d{3})*\b)"}),
    "end of line": split({"Regex": r"\s+$"}),
    "scripts": split({"Regex": r"\p{Hiragana}+|\p{Katakana}+|\p{Latin}+"}),
    "merged": split({"Regex": r"\W+"}, "MergedWithPrevious"),
}


UNUSUAL_TEXTS = ["x\u180e  \n\n \u180ey ⓐ\u202fb 1ि 1️⃣ 👩\u200d👧 ", "a \u202f b", "   \n\n  x\t"]


def assert_equal_to_reference(path: Path, texts: list[str]) -> None:
    tokenizer = Tokenizer(path)
    chosen, message = checked_tokenizer(tokenizer)
    reference = tokenizer.with_encoder("tokenizers")
    assert compare_encoders(chosen, reference, texts) is None
    if compare_encoders(tokenizer.with_encoder("fastokens"), reference, texts) is not None:
        assert chosen.encoder_name != "fastokens"
    if chosen.encoder_name == "tokenizers":
        assert "fastokens differs from tokenizers: from token" in message
        assert message.endswith("; tokenizers is used instead")


@pytest.mark.parametrize("name", WRONG)
def test_unusual_patterns_are_encoded_as_the_reference_does(tmp_path: Path, name: str) -> None:
    splitter = sequence(WRONG[name], byte_level())
    assert_equal_to_reference(write_variant(tmp_path, pre_tokenizer=splitter), UNUSUAL_TEXTS)


TOKENS: list[dict[str, dict[str, bool]]] = [
    {"\n": {"lstrip": True}, "  ": {}},
    {"'s": {"single_word": True}, "<t": {}, "<tok>": {}},
    {"é": {"single_word": True, "normalized": True, "special": True}},
]


@pytest.mark.parametrize("tokens", TOKENS, ids=list)
def test_added_tokens_are_encoded_as_the_reference_does(
    tmp_path: Path, tokens: dict[str, dict[str, bool]]
) -> None:
    config = copy.deepcopy(models()["byte_level"])
    flags = [{**dict.fromkeys(variants.FLAGS, False), **values} for values in tokens.values()]
    variants.add_tokens(config, list(tokens), flags)
    path = write_variant(tmp_path, added_tokens=config["added_tokens"])
    assert_equal_to_reference(path, list(_around_tokens(list(tokens))))


@pytest.mark.parametrize("name", ["unigram", "wordpiece", "fallback"])
def test_models_of_every_kind(tmp_path: Path, name: str) -> None:
    chosen, message = checked_tokenizer(Tokenizer(write_variant(tmp_path, name)))
    assert (message == "") == (chosen.encoder_name != "tokenizers")
    reference = chosen.with_encoder("tokenizers")
    assert compare_encoders(chosen, reference, UNUSUAL_TEXTS) is None


@pytest.mark.parametrize(
    ("merge", "text"), [(b"  ", "a  \u180eb"), (b"  ", "  \u180eb"), (b"'s", "a\u180e's b")]
)
def test_what_counts_as_white_space_beside_spaces_and_apostrophes(
    tmp_path: Path, merge: bytes, text: str
) -> None:
    """fastokens takes U+180E for white space, and only these merges show it."""
    path = write_tiktoken(tmp_path / "t.tiktoken", (merge,))
    tokenizer, _ = checked_tokenizer(Tokenizer(path, tiktoken_pattern="gpt2"))
    assert tokenizer.encode([text]) == tokenizer.with_encoder("tiktoken").encode([text])


# ---- what the check says ----


def test_an_encoder_that_agrees_is_used_without_a_message(tokenizer_file: Path) -> None:
    for name, expected in (("auto", "fastokens"), ("tokenizers", "tokenizers")):
        tokenizer, message = checked_tokenizer(Tokenizer(tokenizer_file, encoder=name), ["a"])
        assert (tokenizer.encoder_name, message, tokenizer._encoder) == (expected, "", expected)
    assert checked_tokenizer(Tokenizer("bytes"))[1] == ""


def test_an_encoder_that_refuses_the_vocabulary_is_not_used(tmp_path: Path) -> None:
    path = write_variant(tmp_path, pre_tokenizer={"type": "UnicodeScripts"})
    chosen, message = checked_tokenizer(Tokenizer(path, encoder="fastokens"))
    assert chosen.encoder_name == "tokenizers"
    assert message.startswith("fastokens is not used: fastokens cannot read this vocabulary: ")
    assert "UnicodeScripts" in message


def test_texts_of_the_data_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.encoding.encoder_check.edge_cases", lambda tokens: ["a"])
    monkeypatch.setattr("millrace.encoding.encoder_check._VERDICTS", {})
    splitter = sequence(split({"Regex": r"[^\s\p{L}]+|\s+(?!\S)|\s+"}), byte_level())
    tokenizer = Tokenizer(write_variant(tmp_path, pre_tokenizer=splitter), encoder="fastokens")
    assert checked_tokenizer(tokenizer)[1] == ""
    text = "x\u180e  \n\n \u180ex"
    if tokenizer.encode([text]) != tokenizer.with_encoder("tokenizers").encode([text]):
        chosen, message = checked_tokenizer(tokenizer, ["a", text])
        assert chosen.encoder_name == "tokenizers"
        assert repr(text) in message


# ---- the edge cases themselves ----


def test_the_edge_cases_are_valid_and_the_same_each_time() -> None:
    tokens = ["<|endoftext|>", "  "]
    texts = edge_cases(tokens)
    assert texts == edge_cases(tokens)
    assert "" in texts
    assert sum(len(text.encode()) for text in texts) < 2_000_000
    for character in "\t\n\r\x00\xa0\u180e\u200b\u2028\u3000\ufeff\ufffd\u0301ſⓐ漢각😀ا\U0010ffff":
        assert any(character in text for text in texts), repr(character)
    for token in tokens:
        assert {token, f"a{token}b", token * 2, f"<{token}>"} <= set(texts)


def test_many_added_tokens_make_few_texts() -> None:
    tokens = [f"<extra_{number}>" for number in range(1000)]
    texts = edge_cases(tokens)
    assert len(texts) <= len(edge_cases()) + 35 * edge_cases_module._MOST_TOKENS
    assert all(any(token in text for text in texts) for token in tokens)


def test_no_variant_agrees_on_the_edge_cases_and_differs_elsewhere() -> None:
    """A small run of `python -m tests.encoding.encoder_variants`."""
    counts = variants.run(cases=6, seed=3, texts=300)
    assert counts["missed"] == 0
    assert counts["equal"] > 0


@pytest.mark.parametrize("digits", ["", " 0 1 2 3 4 5 6 7 8 9"])
def test_the_names_of_byte_tokens_in_a_text_are_plain_text(tmp_path: Path, digits: str) -> None:
    """fastokens takes "<0x0A>" for the byte, if no merges form its characters."""
    path = train_sentencepiece(
        tmp_path / "t.model",
        byte_fallback=True,
        vocab_size=300,
        hard_vocab_limit=False,
        texts=["><" * 20 + " <x A> <xA> the mill and the water" + digits] * 20,
    )
    tokenizer, message = checked_tokenizer(Tokenizer(path, encoder="fastokens"))
    assert (tokenizer.encoder_name, message) == ("fastokens", "")
    texts = ["<0x0A>", "a<0x0A>", "é<0x00>"]
    assert tokenizer.encode(texts) == tokenizer.with_encoder("sentencepiece").encode(texts)
