"""Texts on which tokenizers tend to differ: built in, and the same at each call."""

import itertools
import random
import unicodedata
from collections.abc import Iterator, Sequence

_MOST_TOKENS = 150  # more of them are put into a few texts

# White space, what looks like it, and what stands for it in vocabularies.
_SPACES = " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x2010)))
_SPACES += "\u2028\u2029\u202f\u205f\u3000\u180e\u2060\ufeff\u00ad\u2581\u0120\u010a\u2800\u3164"
# Apostrophes of every kind before endings, whose case some patterns ignore.
_ENDINGS = " s t re ve m ll d S T RE VE LL Ll rE ſ LLs st ve1 \u212a".split(" ")
UNITS = [*_SPACES, *map("".join, itertools.product("'\u2019\uff07`", _ENDINGS))]
"""White space and contractions, for texts and for vocabularies of the tests."""

_SURROUNDINGS = (
    "{0}", "a{0}", "{0}x", "a{0}b", "IT{0} is", " {0} ", "  {0}b", "a  {0}b", "\n{0}\n", "a\n{0}b",
    "a {0}", "{0} a", "{0}{0}", "a{0}{0}b", "{0}{0}{0}", "1{0}{0}2", ".{0}_{0}!", "é{0}é",
    "{0}  \n\n {0}x", "a{0}'s b", "a '{0}s", "<{0}>",
)  # fmt: skip
# Characters of unusual case, form or class, and sequences that are one character.
_SPECIAL = [
    *"ſK\u212aßẞİıςΣσǅǆŉΐﬁﷺⓐⅷªʰ\u16eeàéЯاקिक्ष각\u1100\u1161漢中ｶﾞ々𐐀𝐀𝟘²½①〇٣\u0345\u0301\u0323\u0344\u3099\u0e33",
    *"\u20dd\ufe0f\u200d…—’“«。、！「￥€\u2126\u0958\ufffd\uffff\ufdd0\ue000\u0378\u202e\ufff9\U0010ffff",
    *"😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵🇺🇸 1️⃣ ❤️ 🧑🏿‍🚀 🫠 \U0001f3f4\U000e0067\U000e007f q\u0307\u0323".split(),
]
# Characters of every block: libraries know different versions of Unicode.
_RANGES = (
    range(0x80), range(0x80, 0x3400, 7), range(0xA000, 0xAC00, 13), range(0xF900, 0x10000, 11),
    range(0x10000, 0x1FC00, 23), range(0x3400, 0xD800, 997), range(0xE000, 0x110000, 9973),
)  # fmt: skip
_CHARACTERS = [*_SPECIAL, *map(chr, itertools.chain.from_iterable(_RANGES))]
_WORDS = (
    "the The mill 's 'LL don't été 中文 한국 123 12345 x=1; :// … café cafe\u0301 ｱｲ 日本語 हिन्दी "
    "ไทย שָׁלוֹם مَرْحَبًا Привет ΣΊΣΥ ǅungla ÀÉÎ camelCase XMLHttp iPhone15Pro STRASSE İstanbul "
    "1,234.5 3.14e-10 0xFF 1_000 $1,000 50% a@b.c #tag C:\\x /usr/ a->b::c<d>>e x++; {x!r} **b** "
    "!!!??? ....,, (a) --flag=v a\n/b x/\r\n \n\n \t\t"
).split(" ")


def edge_cases(added_tokens: Sequence[str] = ()) -> list[str]:
    """About 16,000 texts, of 0.7 MB in all.

    They vary what patterns and models of tokenizers look at: white space, contractions, digits,
    characters of every block of Unicode, runs of any length, and the names of special tokens.

    Args:
        added_tokens: Tokens that the vocabulary matches as a whole. The texts have each of the
            first 150 in many surroundings, and the others in a row.
    """
    return [
        "",
        *in_surroundings(UNITS),
        *combinations(),
        *_runs(),
        *_characters(),
        *_around_tokens(added_tokens),
        *_random_texts(added_tokens),
    ]


def in_surroundings(units: Sequence[str]) -> Iterator[str]:
    """Each unit alone, repeated, and between texts and spaces."""
    for template, unit in itertools.product(_SURROUNDINGS, units):
        yield template.format(unit)


def combinations() -> Iterator[str]:
    """All pairs of words, and all triples of white space, letters, digits and marks."""
    for first, second in itertools.product(_WORDS, _WORDS):
        yield f"{first}{second} {first}"
    units = ["", " ", "  ", "\t", "\n", "\r", "\xa0", "a", "1", "!", "'s"]
    yield from ("x" + "".join(triple) for triple in itertools.product(units, repeat=3))


def _runs() -> Iterator[str]:
    """Runs of a unit: patterns cut digits at one or three, and white space before the last one.

    Long ones are beyond the caches of words and the limits of regular expressions.
    """
    counts = *range(1, 18), 24, 31, 32, 33, 63, 64, 65, 80, 127, 128, 129
    units = *" \t\n\r\xa0\u3000aA1٣一½!é😀\u0301=_\x00", "\r\n", " \n", "ab", "a1", "a!", "ab "
    for unit in units:
        for run in (unit * count for count in counts):
            yield from (f"a{run}", f"{run}a{run}1\n{run}.")
        yield from (unit * 600, f"a{unit * 1500}a {unit * 300}\n")
    yield "x" * 5000


def _characters() -> Iterator[str]:
    """Characters of every class and block, which differ by version of Unicode."""
    for character in _CHARACTERS:
        text = f"{character} a{character}b{character * 2} {character}1\n{character}!{character}\n\n"
        # Libraries differ on what is white space: U+180E was, in older versions.
        yield f"{text}a  {character}b{character}'s '{character}s"
    text = " ".join(_SPECIAL)
    yield from (text, text.replace(" ", ""))
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        yield unicodedata.normalize(form, f"{text} Ǻ ṩ q̣̇ ≠ が क़ שּׁ Ⅳ")


def _around_tokens(tokens: Sequence[str]) -> Iterator[str]:
    """Each token whole, in parts and in other case, between texts, spaces and other tokens."""
    yield from in_surroundings(tokens[:_MOST_TOKENS])
    for token, other in itertools.pairwise(tokens[:_MOST_TOKENS]):
        yield from (token + other, f"{token} {other}", f"{other}\n{token}.a{other}{token}{other}b")
    for token in tokens[:_MOST_TOKENS]:
        yield from (token[:-1], token[1:], token[:-1] + token, token + token[1:])
        yield from (token.upper(), token.lower(), token.title(), " ".join(token))
    yield from (separator.join(tokens[_MOST_TOKENS:]) for separator in ("", " ", "x", "\n"))
    # Names that vocabularies give to special tokens, bytes and spaces.
    names = "<|endoftext|> <|ENDOFTEXT|> <s> </s> <unk> <pad> [CLS] [UNK] <mask> [INST] ##ing </w> "
    names += "▁ ▁▁a Ġa Ċ @@a <| |> <s s> <0x0a> <0x0A <0x0A><0x0"
    names += "".join(f" <0x{byte:02X}>" for byte in range(256))
    yield from (f"a {name}{name}b{name}é{name}" for name in names.split())
    yield from (names, names.replace(" ", ""))


def _random_texts(tokens: Sequence[str]) -> Iterator[str]:
    """Neighbours that the other groups do not name, of texts from several alphabets."""
    draw = random.Random(13)
    alphabets: list[Sequence[str]] = [
        " \n\ta1.", " \t\n\r\xa0\u2003\u3000\x0b\x85a", "aAéſ'’sStTlLvVeE 1", "aA1!/\n \r",
        _SPACES + "aA1!é中", _CHARACTERS, [*_WORDS[:14], "  ", "\r\n", " ", *tokens],
        [*_SPECIAL, *"aA1 \n" * 9],
    ]  # fmt: skip
    for kind in "LMNPSZC":  # letters, marks, numbers, punctuation, symbols, separators, others
        for members in (_CHARACTERS, _SPECIAL):
            of_kind = [one for one in members if unicodedata.category(one[0])[0] == kind]
            alphabets.append([*of_kind, *"aA1' \n" * (len(of_kind) // 9 + 1)])
    for number in range(2000):
        alphabet = alphabets[number % len(alphabets)]
        yield "".join(draw.choice(alphabet) for _ in range(draw.randint(1, 30)))
