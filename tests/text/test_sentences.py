"""Splitting texts into sentences: Punkt as NLTK and Megatron-LM's script use it, and sentencex."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from millrace.errors import ConfigError, TextError
from millrace.text import sentences
from millrace.text.sentences import SentenceSplitter

TRAINING = (
    "Dr. Smith met Mr. Jones at 5 p.m. on Monday. They talked (at length) about the weather. "
    'The U.S. is large! Is it? "Yes," said Mr. Jones. Prof. Brown et al. disagree.\n\n'
) * 40

PIECES = [" ", "\n", "  ", "\t", ".", "?", "!", "...", ")", "(", '"', "\u2019", ",", "-", "--"]
WORDS = ["a", "B", "Dr", "Mr", "Smith", "met", "5", "é", "U.S", "et al", "。", "ß", "x" * 40]
texts = st.lists(st.sampled_from(PIECES + WORDS), max_size=30).map("".join)


@pytest.fixture
def punkt_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small model, as the data of English."""
    import nltk.data
    from nltk.tokenize import punkt

    parameters = punkt.PunktTrainer(TRAINING).get_params()
    assert parameters.abbrev_types
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(0o700, parents=True)
    punkt.save_punkt_params(parameters, dir=str(folder))
    return parameters


def megatron_splitter(parameters: Any) -> Any:
    """NLTK's splitter with the pattern of Megatron-LM's `--keep-newlines`, made of NLTK's own: a
    candidate takes the characters before its end mark and the whitespace behind it."""
    from nltk.tokenize import punkt

    class Variables(punkt.PunktLanguageVars):  # type: ignore[misc]
        _period_context_fmt = punkt.PunktLanguageVars._period_context_fmt.replace(
            "%(SentEndChars)s", r"\S*%(SentEndChars)s\s*"
        ).replace(r"\s+(?P<next_tok>", "(?P<next_tok>")

    assert Variables._period_context_fmt.count(r"\s") == 1
    return punkt.PunktSentenceTokenizer(train_text=parameters, lang_vars=Variables())


# ---- Punkt ----


def test_punkt_gives_the_sentences_of_nltk(punkt_data: Any) -> None:
    from nltk.tokenize import punkt

    splitter = SentenceSplitter()
    assert splitter.name.split()[2:] == ["punkt_tab", "english"]
    reference = punkt.PunktTokenizer("english")
    kept = SentenceSplitter(keep_newlines=True)
    kept_reference = megatron_splitter(punkt_data)
    assert len(kept.split(TRAINING)) > 100
    assert "".join(kept.split(TRAINING)) == TRAINING.rstrip()

    @settings(max_examples=60, deadline=None)
    @example(TRAINING)
    @example("One.\n\nTwo.  Three.\n")
    @example("\nDr. Smith met him.\n\nThey talked. \n Is it?\n")
    @example("")
    @example("\n \n")
    @given(texts)
    def check(text: str) -> None:
        assert splitter.split(text) == reference.tokenize(text)
        assert kept.split(text) == kept_reference.tokenize(text)

    check()


def test_a_splitter_works_without_the_data_once_it_is_pickled(
    punkt_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk.data

    for keep_newlines in (False, True):
        splitter = SentenceSplitter("english", keep_newlines=keep_newlines)
        data = pickle.dumps(splitter)
        with monkeypatch.context() as patch:
            patch.setattr(nltk.data, "path", [])
            copy = pickle.loads(data)
            assert copy.split(TRAINING) == splitter.split(TRAINING)
            assert copy.name == splitter.name


def test_a_long_run_of_characters_takes_no_quadratic_time(punkt_data: Any) -> None:
    """NLTK stops a search after some seconds: Megatron-LM's pattern fails on this text."""
    text = "x" * 300_000 + ". Next one."
    splitter = SentenceSplitter("english", keep_newlines=True)
    assert len(splitter.split(text)) == 2


# ---- sentencex ----

SAMPLES = {
    "en": "Dr. Smith is here. Is he?  Yes!\n\nA new paragraph (e.g. this one). End",
    "de": "Das ist z.B. gut. Wirklich?\n„Ja.“ Am 3. Mai.",
    "ja": "こんにちは。元気ですか？\nはい！",
    "zh": "你好。今天天气很好！我们走吧？",
    "hi": "यह एक वाक्य है। यह दूसरा है।",
    "ar": "مرحبا. كيف حالك؟ بخير!",
    "ru": "Это т.е. пример. Второе предложение!",
    "am": "ሰላም። እንዴት ነህ።",
    "xx": "One. Two.",
}


@settings(max_examples=300, deadline=None)
@example("en", "See U.S\xa0. A \u3000. \n\u2028. B\x85.C")  # sentencex 1.0 panics at this text
@given(
    lang=st.sampled_from([*SAMPLES, "fr", "el", "th", "my", "tr", "ko", "he", "pt"]),
    text=texts
    | st.text(max_size=40)
    | st.text([*"".join(SAMPLES.values()), *"\r\x85SE\xa0\u3000."]),
)
def test_sentencex_loses_nothing(lang: str, text: str) -> None:
    kept = SentenceSplitter(lang, keep_newlines=True, library="sentencex").split(text)
    assert "".join(kept) == text
    if text and not text.isspace():
        assert not any(sentence.isspace() for sentence in kept)
    stripped = SentenceSplitter(lang, library="sentencex").split(text)
    assert stripped == [sentence.strip() for sentence in kept if sentence.strip()]


def test_sentencex_splits_many_languages() -> None:
    for lang, text in SAMPLES.items():
        splitter = SentenceSplitter(lang, library="sentencex")
        assert (splitter.name.split()[0], splitter.name.split()[-1]) == ("sentencex", lang)
        assert len(pickle.loads(pickle.dumps(splitter)).split(text)) > 1, lang
    english = SentenceSplitter("English", library="sentencex").split(SAMPLES["en"])
    expected = "Dr. Smith is here.|Is he?|Yes!|A new paragraph (e.g. this one).|End"
    assert english == expected.split("|")


# ---- both ----


@pytest.mark.parametrize("library", ["punkt", "sentencex"])
@pytest.mark.parametrize("keep_newlines", [False, True])
def test_long_texts_are_cut_first(
    punkt_data: Any, library: str, keep_newlines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    splitter = SentenceSplitter("english", keep_newlines=keep_newlines, library=library)
    text = TRAINING[:3000]
    monkeypatch.setattr(sentences, "MAX_CHARACTERS", 1000)
    expected = [
        sentence for start in (0, 1000, 2000) for sentence in splitter.split(text[start:][:1000])
    ]
    assert splitter.split(text) == expected


def test_bad_arguments_are_refused() -> None:
    options: Any
    german = {"lang": "german", "library": "sentencex"}
    for options, message in [
        *(({"lang": lang}, "lang is .*NLTK's name") for lang in ("", "é", "../en", None, 3, "en")),
        (german, "lang is 'german'; .* an ISO code, such as 'de'"),
        ({"library": "spacy"}, "library must be .*punkt.*sentencex.*spacy"),
        ({"keep_newlines": "yes"}, r"keep_newlines must be .* not 'yes'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            SentenceSplitter(**options)


def test_missing_packages_and_data_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk.data

    monkeypatch.setattr(nltk.data, "path", [])
    for _ in range(2):  # what is installed does not decide the library
        with pytest.raises(TextError, match=r"Punkt data for german.*pip install nltk.*sentencex"):
            SentenceSplitter("german")
        for name in ("nltk", "sentencex"):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TextError, match="needs the sentencex package: pip install"):
        SentenceSplitter("english", library="sentencex")


def test_a_panic_of_sentencex_is_an_error_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As Rust's panics arrive in Python."""

    def segment(code: str, text: str) -> list[str]:
        raise PanicException("out of bounds")

    splitter = SentenceSplitter("english", library="sentencex")
    monkeypatch.setattr("sentencex.segment", segment)
    with pytest.raises(TextError, match=r"cannot split a text of 3 characters \(out of bounds\)"):
        splitter.split("Hi.")
    monkeypatch.undo()
    message = r"4 characters \(.*'\\ud800' in position 3.* split with punkt"
    with pytest.raises(TextError, match=message):
        splitter.split("Hi.\ud800")
