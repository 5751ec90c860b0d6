"""Sentences of a text: by NLTK's Punkt, or by `sentencex`.

Megatron-LM's script splits with Punkt, whose data must be installed; nothing is downloaded here.
`sentencex` needs no data, knows more languages, and is many times faster.
"""

import functools
import itertools
import re
from importlib.metadata import version
from typing import Any

from millrace.checks import check_bool, check_choice, package, shown
from millrace.errors import ConfigError, TextError

MAX_CHARACTERS = 1_000_000
"""Longer texts are cut before they are split, as in Megatron-LM's script."""

LIBRARIES = {"punkt": "NLTK's name, such as 'german'", "sentencex": "an ISO code, such as 'de'"}
"""The libraries, and what a language is to each."""

# Later versions of NLTK stop long searches; the others are of sentencex.
_FAILURES = ("TimeoutError", "PanicException", "UnicodeEncodeError")
_UNSAFE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]\\.")


class SentenceSplitter:
    """Splits texts into sentences.

    Punkt gives the sentences of Megatron-LM's script for the same data: without the whitespace
    between them, or for `keep_newlines` with the whitespace after each, except at the end of the
    text. `sentencex` gives sentences without surrounding whitespace, or for `keep_newlines` the
    whole text.

    A splitter is pickled with Punkt's data: other processes and machines need none.

    Args:
        lang: Language: for Punkt NLTK's name ("german"), for `sentencex` an ISO code of two or
            three letters ("de").
        keep_newlines: Whether sentences keep the whitespace that follows them.
        library: The library that splits, "punkt" or "sentencex".

    Attributes:
        name: Library, version and language, for the provenance of token files.

    Raises:
        ConfigError: An unknown language or library.
        TextError: The library or its data is not installed; in `split`, a text at which it fails.
    """

    def __init__(
        self, lang: str = "english", *, keep_newlines: bool = False, library: str = "punkt"
    ) -> None:
        self.keep_newlines = check_bool("keep_newlines", keep_newlines)
        self.library = check_choice("library", library, tuple(LIBRARIES))
        language = lang.lower() if isinstance(lang, str) else ""
        if library == "sentencex" and language == "english":  # the default
            language = "en"
        is_code = len(language) in (2, 3)
        if not (language.isascii() and language.isalpha()) or is_code != (library == "sentencex"):
            raise ConfigError(f"lang is {shown(lang)}; {library} needs {LIBRARIES[library]}")
        self._language = language
        if library == "punkt":
            self._punkt = _load_punkt(language)
            self.name = f"nltk {version('nltk')} punkt_tab {language}"
        else:
            package("sentencex")
            self.name = f"sentencex {version('sentencex')} {language}"

    def split(self, text: str) -> list[str]:
        """The sentences of a text."""
        starts = range(0, max(len(text), 1), MAX_CHARACTERS)
        pieces = (text[start : start + MAX_CHARACTERS] for start in starts)
        return [sentence for piece in pieces for sentence in self._split(piece)]

    def _split(self, text: str) -> list[str]:
        try:
            if self.library == "punkt":
                return list(_punkt_tokenizer(self._punkt, self.keep_newlines).tokenize(text))
            # sentencex 1.0 panics at a wide space before a period, but not at a plain space.
            safe = text if text.isascii() else _UNSAFE.sub(" .", text)
            pieces = package("sentencex").segment(self._language, safe)
        except BaseException as error:  # a panic in Rust is not an Exception
            if type(error).__name__ not in _FAILURES:
                raise
            [other] = LIBRARIES.keys() - {self.library}
            raise TextError(
                f"{self.library} cannot split a text of {len(text)} characters ({error}). Remove "
                f"the text, or split with {other}"
            ) from None
        ends = itertools.accumulate(map(len, pieces), initial=0)
        pieces = [text[start:stop] for start, stop in itertools.pairwise(ends)]
        if self.keep_newlines:
            return _with_whitespace(pieces)
        return [*filter(None, map(str.strip, pieces))]


def _with_whitespace(pieces: list[str]) -> list[str]:
    """The pieces; those of whitespace are added to the one before, or at the start to the next."""
    sentences: list[str] = []
    for piece in pieces:
        if sentences and (piece.isspace() or sentences[-1].isspace()):
            sentences[-1] += piece
        else:
            sentences.append(piece)
    return sentences


def _load_punkt(language: str) -> Any:
    """Punkt's parameters for a language, from NLTK's folders or those of NLTK_DATA."""
    try:
        from nltk import data
        from nltk.tokenize import punkt

        return punkt.load_punkt_params(data.find(f"tokenizers/punkt_tab/{language}/"))
    except (ImportError, LookupError):
        raise TextError(
            f"NLTK's Punkt data for {language} is not installed. Install it (`pip install nltk`, "
            "`python -m nltk.downloader punkt_tab`, or a copy of its folder and NLTK_DATA), or "
            "name the other library: --split-sentences sentencex (library='sentencex')"
        ) from None


@functools.lru_cache(4)
def _punkt_tokenizer(parameters: Any, keep_newlines: bool) -> Any:
    from nltk.tokenize.punkt import PunktLanguageVars, PunktSentenceTokenizer

    class WhitespaceBefore(PunktLanguageVars):  # type: ignore[misc]
        """Counts whitespace after a sentence to the sentence.

        A candidate for a sentence's end is a run of characters without whitespace up to its last
        end mark, and the whitespace behind it. It begins where such a run begins: saying so changes
        no match, and spares a search from each character of a long run.
        """

        _period_context_fmt = (
            r"(?<!\S)\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"
        )

    variables = WhitespaceBefore() if keep_newlines else PunktLanguageVars()
    return PunktSentenceTokenizer(parameters, lang_vars=variables)
