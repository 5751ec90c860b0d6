"""Sentences of a text: by NLTK's Punkt, or by `sentencex`.

Megatron-LM's script splits with Punkt, whose data must be installed; nothing is downloaded here.
`sentencex` needs no data, knows more languages, and is many times faster.
"""

import functools
import itertools
import re
from importlib.metadata import version
from typing import Any

from millrace.checks import check_bool, check_choice, shown
from millrace.errors import ConfigError, TextError

MAX_CHARACTERS = 1_000_000
"""Longer texts are cut before they are split, as Megatron-LM's script cuts them."""

LIBRARIES = ("punkt", "sentencex")

_UNSAFE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]\\.")

_LANGUAGES = """
albanian sq, arabic ar, armenian hy, basque eu, bengali bn, bulgarian bg, catalan ca,
chinese zh, croatian hr, czech cs, danish da, dutch nl, english en, estonian et, finnish fi,
french fr, german de, greek el, gujarati gu, hebrew he, hindi hi, hungarian hu, icelandic is,
indonesian id, italian it, japanese ja, kannada kn, korean ko, latvian lv, lithuanian lt,
malayalam ml, marathi mr, norwegian no, persian fa, polish pl, portuguese pt, punjabi pa,
romanian ro, russian ru, serbian sr, slovak sk, slovene sl, spanish es, swahili sw, swedish sv,
tamil ta, telugu te, thai th, turkish tr, ukrainian uk, urdu ur, vietnamese vi
"""
LANGUAGES = dict(pair.split() for pair in _LANGUAGES.split(","))
"""The ISO 639-1 code of each language, by NLTK's name."""


class SentenceSplitter:
    """Splits texts into sentences.

    Punkt gives the sentences of Megatron-LM's script for the same data: the whitespace between
    sentences is left out, or with `keep_newlines` it stays at the end of the sentence before it,
    except at the end of the text. `sentencex` gives sentences without surrounding whitespace; with
    `keep_newlines` they are the whole text, one after the other.

    A splitter can be pickled, with Punkt's data: other processes and machines need none.

    Args:
        lang: Language, by NLTK's name ("english") or ISO code ("en").
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
        language, code = _language(lang)
        self.keep_newlines = check_bool("keep_newlines", keep_newlines)
        self.library, self._code = check_choice("library", library, LIBRARIES), code
        if library == "punkt":
            self._punkt = _load_punkt(language)
            self.name = f"nltk {version('nltk')} punkt_tab {language}"
        else:
            _import_sentencex()
            self.name = f"sentencex {version('sentencex')} {code}"

    def split(self, text: str) -> list[str]:
        """The sentences of a text."""
        starts = range(0, max(len(text), 1), MAX_CHARACTERS)
        pieces = (text[start : start + MAX_CHARACTERS] for start in starts)
        return [sentence for piece in pieces for sentence in self._split(piece)]

    def _split(self, text: str) -> list[str]:
        if self.library == "punkt":
            try:
                return list(_punkt_tokenizer(self._punkt, self.keep_newlines).tokenize(text))
            except TimeoutError as error:  # later versions of NLTK stop a search that takes long
                raise _failure("Punkt", text, error, "sentencex") from None
        # sentencex 1.0 panics at a wide space before a period: it is split as a plain space there.
        safe = text if text.isascii() else _UNSAFE.sub(" .", text)
        try:
            pieces = _import_sentencex().segment(self._code, safe)
        except UnicodeEncodeError as error:
            raise TextError(
                f"character {error.start + 1} of a text is the lone surrogate "
                f"U+{ord(text[error.start]):04X}, which is not valid Unicode. Repair the text"
            ) from None
        except BaseException as error:  # a panic in Rust is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise _failure("sentencex", text, error, "Punkt") from None
        ends = itertools.accumulate(map(len, pieces), initial=0)
        pieces = [text[start:stop] for start, stop in itertools.pairwise(ends)]
        if self.keep_newlines:
            return _with_whitespace(pieces)
        return [*filter(None, map(str.strip, pieces))]


def _failure(library: str, text: str, error: BaseException, other: str) -> TextError:
    return TextError(
        f"{library} cannot split a text of {len(text)} characters ({error}). Remove the text, or "
        f"split with {other}"
    )


def _language(lang: Any) -> tuple[str, str]:
    """NLTK's name and the ISO code of a language; a code that NLTK has no name for stands alone."""
    if isinstance(lang, str):
        code = LANGUAGES.get(lang.lower(), lang.lower())
        if code.isascii() and code.isalpha() and len(code) in (2, 3):
            return next((name for name in LANGUAGES if LANGUAGES[name] == code), code), code
    raise ConfigError(
        f"the language is {shown(lang)}; give an ISO code of two or three letters, or one of "
        f"{', '.join(LANGUAGES)}"
    )


def _with_whitespace(pieces: list[str]) -> list[str]:
    """The pieces; those of whitespace alone are added to the piece before, or at the start to the
    piece after."""
    sentences: list[str] = []
    for piece in pieces:
        if sentences and (piece.isspace() or sentences[-1].isspace()):
            sentences[-1] += piece
        else:
            sentences.append(piece)
    return sentences


def _import_sentencex() -> Any:
    try:
        import sentencex
    except ImportError:
        raise TextError(
            "the package sentencex is not installed: pip install 'millrace[tokenizers]'"
        ) from None
    return sentencex


def _load_punkt(language: str) -> Any:
    """Punkt's parameters for a language, which NLTK finds in its folders or those of NLTK_DATA."""
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
        """Counts whitespace after a sentence to the sentence, not to the gap to the next.

        A candidate for a sentence's end is a run of characters without whitespace up to its last
        end mark, and the whitespace behind it. It can only begin where such a run begins: saying so
        changes no match, and spares a search from each character of long runs.
        """

        _period_context_fmt = (
            r"(?<!\S)\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"
        )

    variables = WhitespaceBefore() if keep_newlines else PunktLanguageVars()
    return PunktSentenceTokenizer(parameters, lang_vars=variables)
