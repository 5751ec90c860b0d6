"""Texts on which tokenizers tend to differ: built in, and the same at each call."""

import itertools
import random
import unicodedata
from collections.abc import Iterator, Sequence

_MOST_TOKENS = 200  # more of them are put into a few texts


def edge_cases(added_tokens: Sequence[str] = ()) -> list[str]:
    """The texts; tokens that are matched as a whole are put into several surroundings."""
    groups = _whitespace(), _contractions(), _numbers(), _phrases(), _characters(), _long_runs()
    of_tokens = _around_tokens(added_tokens), _random_texts(added_tokens)
    return list(itertools.chain(*groups, *of_tokens))


_SPACES = " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
_SPACES += "\u2028\u2029\u202f\u205f\u3000"
# Characters that look like white space, or stand for it in vocabularies.
_NOT_SPACES = "\u180e\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad\u2581\u0120\u010a\u2800\u3164"
_LETTERS = (
    "aZsſtK\u212aßẞİıσςΣǅǆæŒéñöü" "жЯїґђ" "αΩάϊ" "אבגש" "عربيةلا" "हिन्दीक्ष" "தமிழ்" "ไทยกำ\u0e33"
    "ກຂ\u0eb3" "ཀམ" "မြန်" "ქარԱբ" "አማ" "ᏣᎳꭰ" "漢字中文日本語のカタカナｶﾀ々〆ヶ" "한국어한ㅎ"
    "𠀀𪚥𐐀𐑖𝐀𝔸𞤀𞤢" "ªºʰⁿₐⅠⅷⓐⓏ\u16ee"
)  # fmt: skip
_NUMBERS = "0123456789٠١٢३४५６²³¹¼½¾⅓①⑩一二三四〇𝟘𝟡൧᭑Ⅳↀ㉈"
_MARKS = (
    "\u0301\u0300\u0308\u0327\u0323\u0345\u094d\u093f\u064b\u05b0\u0e31\u20dd\u3099\ufe0f\ufe0e𝅥"
)
_SYMBOLS = (
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡¿«»§¶·•…—–―‐‑‘’“”„‹›′″‰€£¥₿¢©®™°±×÷√∞≈≠≤≥∑∏∫∂∅∈∀∃←→↑↓⇒⇔"
    "■□▲●★☆♠♥♦♣♪✓✗─│┌┐█░、。，！？「」『』（）【】《》・〜～￥"
)
_EMOJI = (
    "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 🇯🇵🇺🇸 1️⃣ ❤️ ❤ 🧑🏿‍🚀 🫠 ☺︎ \U0001f3f4\U000e0067\U000e0062\U000e007f"
).split(" ")
_CONTROLS = "".join(chr(number) for number in (*range(32), *range(127, 160)))
_RARE = (
    *"\ufffd\ufffe\uffff\ufdd0\ue000\uf8ff\U000f0000\U0010fffd\U0010ffff\U0001ffff\u0378\ud7ff",
    *"\u202e\u2066\u2069\u061c\U000e0041\u034f\ufff9\ufffc\u0344\u0340\u2126\u212a\u212b\u0958",
    *"ﬁﬃ㎏㍿ﷺﷻﹺ℡ĳŉǰΐⅧᄀ\ufb1d\U0001d15e",
    *"ｆｕｌｌ 가 \u1100\u1161 각 \u1100\u1161\u11a8 q\u0307\u0323 q\u0323\u0307".split(),
)
# Characters of every block: libraries know different versions of Unicode.
_RANGES = (
    range(0x80, 0x3400, 7), range(0x3400, 0xA000, 997), range(0xA000, 0xAC00, 13),
    range(0xAC00, 0xD800, 997), range(0xE000, 0xF900, 997), range(0xF900, 0x10000, 11),
    range(0x10000, 0x14700, 23), range(0x14700, 0x1B000, 61), range(0x1B000, 0x1FC00, 17),
    range(0x1FC00, 0x32400, 1997), range(0x32400, 0x110000, 50021),
)  # fmt: skip


def _whitespace() -> Iterator[str]:
    """Runs of white space, which patterns end before the last one, and what counts as white."""
    yield ""
    templates = (
        "{0}", "{0}{0}", "a{0}", "{0}a", "a{0}b", "a{0}{0}b", "a{0}{0}{0}b",
        "a {0} b", "{0}\n", "\n{0}", "a {0}", "{0} a", "a\n{0}b", "1{0}{0}2",
        ".{0}{0}.", "{0}  \n\n {0}x", "a  {0}b", "  {0}b", "a{0}'s b", "a '{0}s",
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
    """Apostrophes of every kind before endings, of which some patterns ignore the case."""
    endings = "s t re ve m ll d S T RE VE M LL D Ll rE ſ LLs dd st ve1 K \u212a x".split(" ")
    templates = "it{0}{1}|IT{0}{1} is|it {0}{1}|{0}{1}x| {0}{1}|é{0}{1}|1{0}{1}!|_{0}{1}".split("|")
    for mark, ending in itertools.product("'\u2019\u2018\u02bc\uff07`\u00b4", ["", *endings]):
        yield from (template.format(mark, ending) for template in templates)
    yield from ("don''t", "'''quote'''", "rock'n'roll", "o'clock", "y'all'd've", "'tis 'twas")
    yield "Ö'REILLY'S"


def _numbers() -> Iterator[str]:
    """Runs of digits, which patterns cut at one or three, and digits of other scripts."""
    for count in range(1, 25):
        digits = ("1234567890" * 3)[:count]
        yield from (digits, f"a{digits}b", f" {digits}.{digits}", f"-{digits},", f"x {digits}\n")
        yield from ("٣" * count, "一" * count, "½" * count, "０" * count)
    yield from "1,234,567.89 3.14e-10 0xDEADBEEF 1_000_000 v2.0.1-rc.3 192.168.0.1".split()
    yield from ("12:34:56", "2024-02-29T23:59:60Z", "$1,000", "50%", "1st 2nd 3rd", "x²+y³=z¹")
    yield from ("H₂O", "Ⅻ XII")


_PHRASES = r"""
camelCaseAndPascalCase snake_case_name SCREAMING_CASE kebab-case XMLHttpRequest iPhone15ProMax
mixedUPPERlower123Numbers ÀÉÎÕÜàéîõü ǅungla ǅ ŒUVRE œuvre STRASSE straße STRAẞE İstanbul ıssız
ΣΊΣΥΦΟΣ σίσυφος Ἀθῆναι naïve café NAÏVE nai\u0308ve cafe\u0301 e\u0301\u0301\u0301 \u0301a 1\u0301
a\u0301 b\u0308 Vie\u0323\u0302t ñandú Việt Nam¦Привет, мир! ПРИВЕТ¦שלום עולם שָׁלוֹם
مرحبا بالعالم مَرْحَبًا لا إله نمی‌خواهم ٣٫١٤
हिन्दी में क्ष क्‍ष १२३ தமிழ் மொழி ภาษาไทยไม่มีวรรค ສະບາຍດີ བོད་སྐད་ မြန်မာဘာသာ ខ្មែរ አማርኛ፡ ქართული
Հայերեն ᏣᎳᎩ¦中文没有空格，标点符号。¦日本語のテキスト「カギ」ﾊﾝｶｸｶﾅ 日本 語
한국어 띄어쓰기 \u1112\u1161\u11ab\u1100\u116e\u11a8
中a文1字! a中 中 文 ａｂｃ１２３！ ﬁnance oﬃce №5 ℃ Å ½ cup ⅷ 𠮷野家 𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 𐐀𐐨 𞤀𞤢
http://example.com/a/b?c=d&e=f#g https://user:pw@host:8080/~x/%20y mailto:a.b+c@d-e.co.uk
C:\\Users\\name\\file.txt /usr/local/bin/../lib #hashtag @user s3://bucket/key a@b ...
def f(x: int) -> str:\n    return f"{x!r}"\n\n\n¦if (a&&b||!c) { x++; y--; z<<=2; } a->b::c<d>>e
\tfor i in range(10):\n\t\tprint(i)\n\t\t\n
#include <stdio.h>\r\nint main(void)\r\n{\r\n\treturn 0;\r\n}\r\n
<div class="a">\n  <p>&nbsp;x</p>\n</div>¦SELECT * FROM t WHERE a='b' -- c
\\begin{align} x^2 &= y_1 \\\\\\\\¦{"a": [1, 2.5, null, true], "b": {"c": "\\u00e9\\n"}}
| a | b |\n|---|:-:|\n¦- [x] *a* **b** _c_ `d`
====== ------ ///// !!!??? ....,,,, a/b/c (a) [a] {a} --flag=value¦ (¦) ¦// comment\n//¦a/\n/b
x/\r\n¦!\n\n¦! \n !¦a\n\n\nb¦a \n \n b¦?\r\n\r\n?¦中\n文¦\n\u0301¦ \u0301a
"""


def _phrases() -> Iterator[str]:
    """Each phrase, and its words; phrases end with a line or ¦, and backslashes are escapes."""
    for line in _PHRASES.replace("¦", "\n").splitlines():
        text = line.encode("latin-1", "backslashreplace").decode("unicode_escape")
        yield text
        yield from text.split(" ")
        yield f" {text} "


def _characters() -> Iterator[str]:
    """Characters of every class and block: classes such as letters differ by version of Unicode."""
    characters = [*_LETTERS, *_NUMBERS, *_MARKS, *_SYMBOLS, *_EMOJI, *_CONTROLS, *_RARE]
    for character in characters:
        yield from (character, f" {character}", f"a{character}b")
        yield f"{character * 2} 1{character} a  {character}b{character}'s '{character}s"
    yield from ("".join(characters), " ".join(characters))
    yield from ("\ufeffa", "a\ufeffb", "\ufeff", "a\x00b", "\x00", "\x00\x00 \x00")
    for character in map(chr, itertools.chain.from_iterable(_RANGES)):
        text = f"{character} a{character} {character}1\n{character}!{character}\n\n"
        # Libraries differ on which characters are white space: U+180E was, in older versions.
        yield f"{text}a  {character}b{character}'s '{character}s"
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        yield unicodedata.normalize(form, "Ǻ é ﬁ Å ṩ 각 ½ ² ｶﾞ ΐ q̣̇ ≠ が क़ שּׁ ﷺ Ⅳ")


def _long_runs() -> Iterator[str]:
    """Long words and runs, at which caches of words and limits of regular expressions end."""
    for unit in (*"aA1!é中😀\u0301\xa0=_\x00", "ab", "a1", "a!", "ab ", "ha", "中文"):
        yield from (unit * 97, unit * 1021, f" {unit * 300} {unit * 300}\n")
    for unit in (" ", "\n", "\t", " \n", "\r\n"):
        yield from (unit * 1500, f"a{unit * 1500}a")
    yield "x" * 5000
    yield "the mill race turns the wheel again " * 150


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
    names = "endoftext im_start im_end endofprompt fim_prefix ENDOFTEXT".split()
    yield from (f"a<|{name}|> b<|{name}<|{name}|>{name}|>" for name in names)
    yield from "<s>a</s> <unk> <pad> [CLS]a[SEP] [UNK] [MASK] <mask> <0x0A> <0xFF> [INST]".split()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    yield from (*byte_tokens, *(f"a {token}{token}b{token}é{token}" for token in byte_tokens))
    yield from ("".join(byte_tokens), " ".join(byte_tokens), "<0x0a> <0x0A <0x0A><0x0")
    yield from "<extra_id_0> ▁ ▁▁a a▁b Ġa Ċ ##ing a##b </w> @@a <| |> <s <s> s>".split()


def _random_texts(tokens: Sequence[str]) -> Iterator[str]:
    """Neighbours that the other groups do not name."""
    draw = random.Random(13)
    words = "the The mill 's 'LL don't été 中文 한국 123 12345 x=1; :// …".split()
    alphabets: list[Sequence[str]] = [
        " \n\ta1.", " \t\n\r\xa0\u2003\u3000\x0b\x85a", "aAéſ'’sStTlLvVeE 1", "aA1!/\n \r",
        _LETTERS + "   ", _SYMBOLS + "aA1  \n", _MARKS + "aeé1 \n中", _NUMBERS + "aA .,",
        [*_EMOJI, " ", "a", "\u200d", "\ufe0f"], [*_CONTROLS, *_RARE, " ", "a"],
        _SPACES + _NOT_SPACES + "aA1!é中", _LETTERS + _NUMBERS + _SYMBOLS + _SPACES + _MARKS,
        [*words, "  ", "\r\n", " ", *tokens],
    ]  # fmt: skip
    for number in range(1500):
        alphabet = alphabets[number % len(alphabets)]
        yield "".join(draw.choice(alphabet) for _ in range(draw.randint(1, 30)))
