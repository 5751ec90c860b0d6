"""Texts on which tokenizers tend to differ: built in, and the same at each call."""

import itertools
import random
import unicodedata
from collections.abc import Iterator, Sequence

_MOST_TOKENS = 200  # more of them are put into a few texts


def edge_cases(added_tokens: Sequence[str] = ()) -> list[str]:
    """The texts; tokens that are matched as a whole are put into several surroundings."""
    groups = _whitespace(), _contractions(), _words(), _characters(), _long_runs()
    return [*itertools.chain(*groups), *_around_tokens(added_tokens), *_random_texts(added_tokens)]


_SPACES = " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
_SPACES += "\u2028\u2029\u202f\u205f\u3000"
# Characters that look like white space, or stand for it in vocabularies.
_NOT_SPACES = "\u180e\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad\u2581\u0120\u010a\u2800\u3164"
# Characters of unusual case, form or class, and sequences that are one character.
_SPECIAL = [
    *"ſK\u212aßẞİıςΣσǅǆŉΐﬁﷺⓐⅷªʰ\u16eeàéЯاקिक्ष각\u1100\u1161漢中ｶﾞ々𐐀𝐀𝟘²½①〇٣\u0345\u0301\u0323\u0344\u3099\u0e33",
    *"\u20dd\ufe0f\u200d…—’“«。、！「￥€\u2126\u0958\ufffd\uffff\ufdd0\ue000\u0378\u202e\ufff9\U0010ffff",
    *"😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵🇺🇸 1️⃣ ❤️ 🧑🏿‍🚀 🫠 \U0001f3f4\U000e0067\U000e007f q\u0307\u0323".split(),
]
# Characters of every block: libraries know different versions of Unicode.
_RANGES = (
    range(0x80), range(0x80, 0x3400, 7), range(0x3400, 0xA000, 997), range(0xA000, 0xAC00, 13),
    range(0xAC00, 0xD800, 997), range(0xE000, 0xF900, 997), range(0xF900, 0x10000, 11),
    range(0x10000, 0x14700, 23), range(0x14700, 0x1B000, 61), range(0x1B000, 0x1FC00, 17),
    range(0x1FC00, 0x32400, 1997), range(0x32400, 0x110000, 50021),
)  # fmt: skip
_CHARACTERS = [*_SPECIAL, *map(chr, itertools.chain.from_iterable(_RANGES))]
_WORDS = (
    "the The mill 's 'LL don't été 中文 한국 123 12345 x=1; :// … café cafe\u0301 ｱｲ 日本語 हिन्दी "
    "ไทย שָׁלוֹם مَرْحَبًا Привет ΣΊΣΥ ǅungla ÀÉÎ camelCase XMLHttp iPhone15Pro STRASSE İstanbul "
    "1,234.5 3.14e-10 0xFF 1_000 $1,000 50% a@b.c #tag C:\\x /usr/ a->b::c<d>>e x++; {x!r} **b** "
    "!!!??? ....,, (a) --flag=v a\n/b x/\r\n \n\n \t\t"
).split(" ")


def _whitespace() -> Iterator[str]:
    """Runs of white space, which patterns end before the last one, and what counts as such."""
    yield ""
    templates = (
        "{0}", "a{0}", "{0}a", "a{0}{0}b", "a{0}{0}{0}b", "a {0} b", "{0}\n", "\n{0}", "a {0}",
        "{0} a", "a\n{0}b", "1{0}{0}2", ".{0}{0}.", "{0}  \n\n {0}x", "a  {0}b", "  {0}b",
        "a{0}'s b", "a '{0}s",
    )  # fmt: skip
    for space in _SPACES + _NOT_SPACES:
        yield from (template.format(space) for template in templates)
    for count in (*range(1, 20), 31, 32, 33, 63, 64, 65, 80, 81, 127, 128, 129, 130, 257, 600):
        for space in (" ", "\t", "\n", "\r\n", "\r", "\xa0", "\u3000"):
            run = space * count
            yield from (run, f"a{run}", f"{run}a", f"a{run}b", f"a.{run}1", f"{{{run}}}\n{run}x")
    spaces, ends = " \t\n\r\xa0", ("", " ", "\n", "a", "1", "!", "'s")
    for first, second, end in itertools.product(spaces, spaces, ends):
        yield from (f"x{first}{second}{end}", f"{first * 2}{second * 2}{end}y")


def _contractions() -> Iterator[str]:
    """Apostrophes of every kind before endings, whose case some patterns ignore."""
    endings = "s t re ve m ll d S T RE VE M LL D Ll rE ſ LLs dd st ve1 K \u212a x".split(" ")
    templates = "it{0}{1}|IT{0}{1} is|it {0}{1}|{0}{1}x| {0}{1}|é{0}{1}|1{0}{1}!|_{0}{1}".split("|")
    for mark, ending in itertools.product("'\u2019\u2018\u02bc\uff07`\u00b4", ["", *endings]):
        yield from (template.format(mark, ending) for template in templates)


def _words() -> Iterator[str]:
    """Runs of digits, which patterns cut at one or three, and all pairs of words."""
    for count in range(1, 25):
        digits = ("1234567890" * 3)[:count]
        yield from (digits, f"a{digits}b", f" {digits}.{digits}", f"-{digits},", f"x {digits}\n")
        yield from ("٣" * count, "一" * count, "½" * count)
    for first, second in itertools.product(_WORDS, _WORDS):
        yield f"{first}{second} {first}"


def _characters() -> Iterator[str]:
    """Characters of every class and block, which differ by version of Unicode."""
    for character in _CHARACTERS:
        text = f"{character} a{character}b{character * 2} {character}1\n{character}!{character}\n\n"
        # Libraries differ on what is white space: U+180E was, in older versions.
        yield f"{text}a  {character}b{character}'s '{character}s"
    yield from ("".join(_SPECIAL), " ".join(_SPECIAL), "\ufeffa", "a\ufeffb", "a\x00b", "\x00")
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        yield unicodedata.normalize(form, "Ǻ é ﬁ Å ṩ 각 ½ ² ｶﾞ ΐ q̣̇ ≠ が क़ שּׁ ﷺ Ⅳ")


def _long_runs() -> Iterator[str]:
    """Words and runs beyond the caches of words and the limits of regular expressions."""
    for unit in (*"aA1!é中😀\u0301\xa0=_\x00", "ab", "a1", "a!", "ab ", " \n", "\r\n"):
        yield from (unit * 97, unit * 1021, f"a{unit * 1500}a {unit * 300}\n")
    yield "x" * 5000


def _around_tokens(tokens: Sequence[str]) -> Iterator[str]:
    """Each token whole, in parts and in other case, between texts, spaces and other tokens."""
    templates = (
        "{0}", "a{0}b", " {0} ", "  {0}  ", "\n{0}\n", "a {0}", "{0} a", "é{0}é", "1{0}1", "'{0}'s",
        "{0}{0}", "{0}{1}", "{0} {1}", "{1}\n{0}.", "a{0}{1}{0}b", "{0}\t\t{1}",
    )  # fmt: skip
    for number, token in enumerate(tokens[:_MOST_TOKENS]):
        yield from (template.format(token, tokens[number - 1]) for template in templates)
        yield from (token[:-1], token[1:], token[:-1] + token, token + token[1:], f"<{token}>")
        yield from (token.upper(), token.lower(), token.title(), " ".join(token))
    rest = tokens[_MOST_TOKENS:]
    yield from ("".join(rest), " ".join(rest), "x".join(rest), "\n".join(rest))
    # Names that vocabularies give to special tokens, bytes and spaces.
    names = "<|endoftext|> <|ENDOFTEXT|> <s> </s> <unk> <pad> [CLS] [UNK] <mask> [INST] ##ing </w> "
    names += "▁ ▁▁a Ġa Ċ @@a <| |> <s s> <0x0a> <0x0A <0x0A><0x0"
    names += "".join(f" <0x{byte:02X}>" for byte in range(256))
    yield from (f"a {name}{name}b{name}é{name}" for name in names.split())
    yield from (names, names.replace(" ", ""))


def _random_texts(tokens: Sequence[str]) -> Iterator[str]:
    """Neighbours that the other groups do not name."""
    draw = random.Random(13)
    alphabets: list[Sequence[str]] = [
        " \n\ta1.", " \t\n\r\xa0\u2003\u3000\x0b\x85a", "aAéſ'’sStTlLvVeE 1", "aA1!/\n \r",
        _SPACES + _NOT_SPACES + "aA1!é中", [*_SPECIAL, *"aA1 \n" * 9], _CHARACTERS,
        [*_WORDS[:14], "  ", "\r\n", " ", *tokens],
        "\u0301\u0300\u0308\u0327\u0323\u0345\u094d\u093f\u064b\u05b0\u20dd\u3099\ufe0faeé1 \n中",
        "0123456789٠١२३²³½⅓①⑩一二〇𝟘Ⅳ aA.,",
    ]  # fmt: skip
    for kind in "LMNPSZC":  # letters, marks, numbers, punctuation, symbols, separators, others
        members = [one for one in _CHARACTERS if unicodedata.category(one[0])[0] == kind]
        alphabets.append([*members, *"aA1' \n" * (len(members) // 9)])
    for number in range(2000):
        alphabet = alphabets[number % len(alphabets)]
        yield "".join(draw.choice(alphabet) for _ in range(draw.randint(1, 30)))
