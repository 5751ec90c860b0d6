"""Tokenizers from every kind of file, their options and their errors."""

import base64
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from millrace import ConfigError, TextError
from millrace.encoding import Tokenizer
from millrace.encoding.tiktoken_file import TIKTOKEN_PATTERNS
from tests.conftest import WORDS, make_texts, train_tokenizer

TEXT = "the water, don't 123  été\n"

Edit = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(tokenizer_file)


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("spm") / "small.model", byte_fallback=True)


def train_sentencepiece(path: Path, texts: list[str] | None = None, **options: Any) -> Path:
    import sentencepiece

    model = io.BytesIO()
    settings = {
        "vocab_size": 400, "model_type": "bpe", "character_coverage": 1.0, "minloglevel": 2,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            texts or [" ".join(WORDS)] * 3 + make_texts(50) + ["a\tb 1234567890"]
        ),
        model_writer=model,
        **{**settings, **options},
    )
    path.write_bytes(model.getvalue())
    return path


def write_tiktoken(path: Path, extra: tuple[bytes, ...] = (b"th", b"the", b" the", b"er")) -> Path:
    tokens = [*(bytes([byte]) for byte in range(256)), *extra]
    lines = (f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    path.write_text("".join(lines))
    return path


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode([text])[0]


@pytest.fixture
def edited(tmp_path: Path, tokenizer_file: Path) -> Edit:
    """A function that writes the tokenizer.json with other settings."""

    def edit(**changes: Any) -> Path:
        path = tmp_path / "t.json"
        path.write_text(json.dumps({**json.loads(tokenizer_file.read_text()), **changes}))
        return path

    return edit


# ---- ids and options of a tokenizer.json ----


def test_the_ids_are_flat_arrays(tokenizer: Tokenizer) -> None:
    import tokenizers

    texts = ["", *make_texts(50), ""]
    ids, lengths = tokenizer.encode_batch(texts)
    assert (ids.dtype, lengths.dtype) == (np.uint32, np.int64)
    library = tokenizers.Tokenizer.from_file(tokenizer.path)
    expected = [library.encode(text).ids for text in texts]
    assert ids.tolist() == [number for numbers in expected for number in numbers]
    assert lengths.tolist() == [len(numbers) for numbers in expected]
    assert tokenizer.encode(texts) == expected
    assert tokenizer.encode_batch([])[0].tolist() == tokenizer.encode([]) == []


@settings(deadline=None)  # the first call loads the encoders
@example(texts=[TEXT, "", "a<|endoftext|>b", *make_texts(20)])
@given(texts=st.lists(st.text()))
def test_encoders_agree_on_any_text(tokenizer: Tokenizer, texts: list[str]) -> None:
    ids, lengths = tokenizer.with_encoder("fastokens").encode_batch(texts)
    expected_ids, expected_lengths = tokenizer.with_encoder("tokenizers").encode_batch(texts)
    assert np.array_equal(ids, expected_ids)
    assert np.array_equal(lengths, expected_lengths)


def with_post_processor(path: Path, token: int = 0) -> Path:
    """The tokenizer.json with a post-processor that puts a token before each text."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", token)]
    )
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("encoder", ["fastokens", "tokenizers"])
def test_special_tokens_around_and_in_a_text(edited: Edit, encoder: str) -> None:
    path, text = with_post_processor(edited()), "a<|endoftext|>b"
    tokenizer = Tokenizer(path, encoder=encoder)
    added = Tokenizer(path, encoder=encoder, add_special_tokens=True)
    assert ids_of(added, TEXT) == [0, *ids_of(tokenizer, TEXT)]
    plain = Tokenizer(path, encoder=encoder, special_tokens_in_text=False)
    assert tokenizer.eod in ids_of(tokenizer, text)
    assert plain.eod not in ids_of(plain, text)
    assert plain.decode(ids_of(plain, text)) == text
    for each in (tokenizer, added, plain):  # a pickle keeps the options
        copy = pickle.loads(pickle.dumps(each))
        assert (copy.encoder_name, copy.fingerprint) == (each.encoder_name, each.fingerprint)
        assert copy.encode([TEXT, text]) == each.encode([TEXT, text])


def test_truncation_and_padding_settings_are_ignored(edited: Edit, tokenizer: Tokenizer) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    other = Tokenizer(edited(truncation=truncation, padding=padding))
    for encoder in ("fastokens", "tokenizers"):
        assert ids_of(other.with_encoder(encoder), TEXT) == ids_of(tokenizer, TEXT)
    assert other.fingerprint == tokenizer.fingerprint


def test_a_model_that_cannot_be_used_is_refused(edited: Edit, tokenizer_file: Path) -> None:
    model = json.loads(tokenizer_file.read_text())["model"]
    with pytest.raises(TextError, match=r'dropout of 0\.1: set "dropout" to null'):
        Tokenizer(edited(model={**model, "dropout": 0.1}))
    with pytest.raises(TextError, match=r"t\.json is not a tokenizer file"):  # the library panics
        Tokenizer(edited(model={**model, "continuing_subword_prefix": "##"}))


def test_the_fingerprint_is_of_what_decides_the_ids(edited: Edit, tokenizer_file: Path) -> None:
    tokenizer, path = Tokenizer(tokenizer_file), edited()
    content = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(content.items())), indent=7))
    assert Tokenizer(path).fingerprint == tokenizer.fingerprint
    assert Tokenizer(edited(normalizer={"type": "NFC"})).fingerprint != tokenizer.fingerprint


def test_the_dtype_holds_the_tokens_of_the_post_processor(edited: Edit) -> None:
    path = with_post_processor(edited(), 70_000)
    assert Tokenizer(path).dtype == np.uint16
    tokenizer = Tokenizer(path, add_special_tokens=True)
    assert tokenizer.dtype == np.int32
    assert ids_of(tokenizer, "the")[0] == 70_000


def test_a_pickled_tokenizer_needs_no_file(edited: Edit) -> None:
    path = edited()
    tokenizer = Tokenizer(path)
    data = pickle.dumps(tokenizer)
    path.unlink()
    code = (
        "import pickle, sys\n"
        "tokenizer = pickle.loads(sys.stdin.buffer.read())\n"
        "print(tokenizer.encode(['the water'])[0], tokenizer.eod, tokenizer.encoder_name)\n"
        "print(tokenizer.dtype, 'tokenizers' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True)
    expected = f"{ids_of(tokenizer, 'the water')} {tokenizer.eod} fastokens\nuint16 False\n"
    assert (result.stdout.decode(), result.stderr) == (expected, b"")


# ---- transformers folders ----


def make_folder(folder: Path, tokenizer_file: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_names_its_tokens(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "t.json", ["<pad>", "<bos>", "<end>"])
    folder = make_folder(tmp_path / "f", path, bos_token="<bos>", eos_token={"content": "<end>"})
    tokenizer = Tokenizer(folder)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.eod_token) == (1, 2, "<end>")
    other = Tokenizer(folder, "<pad>", bos_token="<end>")
    assert (other.eod, other.bos) == (0, 2)
    assert tokenizer.fingerprint == Tokenizer(path).fingerprint
    assert Tokenizer(path).bos is None


@pytest.mark.parametrize(
    "config",
    [
        {"additional_special_tokens": ["<x>", {"content": "<y>"}]},
        {"extra_special_tokens": {"image_token": "<x>"}},
        {"pad_token": {"content": "<x>"}, "bos_token": None},
        {"added_tokens_decoder": {"300": {"content": "<x>"}}},
    ],
)
def test_a_folder_with_more_tokens_than_its_file_needs_transformers(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    """The oracle's tests compare the ids."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder = make_folder(tmp_path / "f", tokenizer_file, **config)
    with pytest.raises(TextError, match=r"'<x>'.* pip install 'millrace\[chats\]'"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    assert Tokenizer(folder).fingerprint == Tokenizer(tokenizer_file).fingerprint


def test_older_files_of_a_folder_count_as_in_transformers(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "t.json", ["<|endoftext|>", "<end>"])
    folder = make_folder(tmp_path / "f", path, eos_token="<|endoftext|>")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<end>"}')
    assert Tokenizer(folder).eod_token == "<end>"
    config = {"eos_token": "<|endoftext|>", "added_tokens_decoder": {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(folder).eod_token == "<|endoftext|>"


@pytest.mark.parametrize("content", ["[", "[1]"])
def test_a_damaged_list_of_tokens_is_an_error(edited: Edit, content: str) -> None:
    folder = make_folder(edited().parent / "f", edited())
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(TextError, match=r"is no JSON object .*Save the tokenizer again"):
        Tokenizer(folder)


def test_a_folder_may_hold_a_sentencepiece_model(tmp_path: Path, sentencepiece_file: Path) -> None:
    with pytest.raises(TextError, match=r"lacks tokenizer\.json.*save_pretrained"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    assert Tokenizer(tmp_path).encode([TEXT]) == Tokenizer(sentencepiece_file).encode([TEXT])


# ---- sentencepiece ----


@pytest.mark.parametrize("encoder", ["fastokens", "sentencepiece"])
@pytest.mark.parametrize("adds", [False, True])
def test_sentencepiece_ids(sentencepiece_file: Path, encoder: str, adds: bool) -> None:
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    tokenizer = Tokenizer(sentencepiece_file, encoder=encoder, add_special_tokens=adds)
    texts = ["", TEXT, "  a  b ", "</s> is text", *make_texts(30)]
    assert tokenizer.encode(texts) == library.encode(texts, add_bos=adds, add_eos=adds)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.vocabulary_size) == (1, 2, 400)
    decoded = tokenizer.decode(ids_of(tokenizer.with_encoder("sentencepiece"), "a b"))
    assert decoded == ("<s>a b</s>" if adds else "a b")


@pytest.mark.parametrize(
    "options",
    [
        {"user_defined_symbols": ["<sep>", "<cls>"]},
        {"user_defined_symbols": ["[A]", "(B)"], "add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"byte_fallback": False, "vocab_size": 160},
        {"split_digits": True, "allow_whitespace_only_pieces": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"model_type": "unigram", "vocab_size": 310},
        {"model_type": "char", "vocab_size": 310},
        {"treat_whitespace_as_suffix": True},
    ],
)
def test_any_sentencepiece_model_is_encoded_as_by_its_library(tmp_path: Path, options: Any) -> None:
    path = train_sentencepiece(tmp_path / "t.model", **{"byte_fallback": True, **options})
    tokenizer = Tokenizer(path)
    texts = [*make_texts(40, seed=5), "a<sep>b <cls>", "[A](B) c", "\uff08B) ﬁ", " \t "]
    assert tokenizer.encode(texts) == tokenizer.with_encoder("sentencepiece").encode(texts)


# ---- tiktoken ----


@pytest.mark.parametrize("encoder", ["fastokens", "tiktoken"])
@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
@pytest.mark.parametrize("in_text", [True, False])
def test_tiktoken_ids(tmp_path: Path, encoder: str, name: str, in_text: bool) -> None:
    path = write_tiktoken(tmp_path / f"{name}.tiktoken")
    tokenizer = Tokenizer(path, encoder=encoder, special_tokens_in_text=in_text)
    texts = [TEXT, "", "a<|endoftext|>b", *make_texts(20)]
    assert tokenizer.encode(texts) == tokenizer.with_encoder("tiktoken").encode(texts)
    assert tokenizer.eod == TIKTOKEN_PATTERNS[name][1]["<|endoftext|>"]
    assert (tokenizer.eod in ids_of(tokenizer, texts[2])) == in_text
    assert tokenizer.decode(ids_of(tokenizer, texts[2])) == texts[2]
    assert tokenizer.dtype == (np.int32 if name != "r50k_base" else np.uint16)


def test_the_named_patterns_equal_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiktoken_ext import openai_public

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    for name in ("r50k_base", "p50k_base", "cl100k_base", "o200k_base"):
        published = getattr(openai_public, name)()
        assert TIKTOKEN_PATTERNS[name] == (published["pat_str"], published["special_tokens"])
    assert TIKTOKEN_PATTERNS["gpt2"] == TIKTOKEN_PATTERNS["r50k_base"]


def test_a_tiktoken_file_needs_a_pattern(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path / "mine.tiktoken")
    with pytest.raises(ConfigError, match=r"holds ranks only: .*--tiktoken-pattern.*cl100k_base"):
        Tokenizer(path)
    tokenizer = Tokenizer(path, tiktoken_pattern=r"\w+|\W+")
    assert tokenizer.decode(ids_of(tokenizer, TEXT)) == TEXT
    assert ids_of(tokenizer, "the the") == [257, 32, 257]
    with pytest.raises(TextError, match="give --eod-token one"):
        _ = tokenizer.eod
    with pytest.raises(ConfigError, match="pattern '\\(' cannot be used"):
        Tokenizer(path, tiktoken_pattern="(")
    named = Tokenizer(path, tiktoken_pattern="cl100k_base")
    assert ids_of(named, " the<|endoftext|>") == [258, 100257]
    assert named.fingerprint != tokenizer.fingerprint


def test_ranks_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path / "t.tiktoken")
    ranks = [*path.read_text().splitlines(), "AAAAAAAAAAAA 50256"]
    path.write_text("\n".join(ranks))
    with pytest.raises(ConfigError, match=r"rank 50256, which gpt2 uses for '<\|endoftext\|>'"):
        Tokenizer(path, tiktoken_pattern="gpt2")
    path.write_text("\n".join(ranks[5:]))
    with pytest.raises(TextError, match=r"lacks 5 of the 256 bytes"):
        Tokenizer(path, tiktoken_pattern="cl100k_base")


def test_a_tiktoken_text_that_the_library_refuses_is_one_error(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path / "t.tiktoken")
    tokenizer = Tokenizer(path, tiktoken_pattern=r"(?:a|aa)*(?!a)c|.", encoder="tiktoken")
    with pytest.raises(TextError, match="tiktoken cannot encode the text"):
        tokenizer.encode_batch(["a" * 2000])


# ---- bytes and functions ----


def test_bytes() -> None:
    tokenizer = Tokenizer("bytes")
    assert ids_of(tokenizer, "aé") == [97, 195, 169]
    assert (tokenizer.vocabulary_size, tokenizer.eod, tokenizer.dtype) == (257, 256, np.uint16)
    assert tokenizer.decode([97, 195, 169, 256]) == "aé<|endoftext|>"
    assert tokenizer.encoder_name == tokenizer.reference_name == "bytes"
    assert pickle.loads(pickle.dumps(tokenizer)).encode(["a"]) == [[97]]


def code_points(text: str) -> list[int]:
    return [ord(character) % 500 for character in text]


def test_any_function(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_function(code_points, vocabulary_size=501, eod=500)
    assert tokenizer.encode(["ab", ""]) == [[97, 98], []]
    assert (tokenizer.eod, tokenizer.vocabulary_size, tokenizer.path) == (500, 501, "code_points")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.encode(["ab"]), copy.fingerprint) == ([[97, 98]], tokenizer.fingerprint)
    with pytest.raises(ConfigError, match="cannot decode ids"):
        tokenizer.decode([1])
    with pytest.raises(TextError, match=r"--eod-token"):
        _ = Tokenizer.from_function(code_points, vocabulary_size=501).eod


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([500], "an id must be between 0 and 499, not 500"),
        ([-1], "an id must be .* not -1"),
        ([1.5], r"ids\[0\] must be a whole number, not 1.5"),
        ([[1]], r"ids must be .* not int64 of shape \[1, 1\]"),
        (None, "ids must be integers"),
    ],
)
def test_wrong_results_of_a_function_are_refused(result: Any, message: str) -> None:
    tokenizer = Tokenizer.from_function(lambda text: result, vocabulary_size=500, name="mine")
    with pytest.raises(TextError, match=f"mine .*500. on the text 'a': {message}"):
        tokenizer.encode_batch(["a"])


# ---- errors ----


def test_what_no_library_encodes_or_decodes_is_refused(
    tmp_path: Path, tokenizer_file: Path, sentencepiece_file: Path
) -> None:
    tiktoken = write_tiktoken(tmp_path / "cl100k_base.tiktoken")
    for path in (tokenizer_file, sentencepiece_file, tiktoken, "bytes"):
        for name in Tokenizer(path).vocabulary.encoder_names:
            tokenizer = Tokenizer(path, encoder=name)
            for texts in ("water", ["water", 3], [b"water"], None, 3):
                with pytest.raises(ConfigError, match=r"texts are .*; give a list of texts"):
                    tokenizer.encode_batch(texts)  # type: ignore[arg-type]
            with pytest.raises(TextError, match=r"character 2 is the lone surrogate U\+DFFF"):
                tokenizer.encode_batch(["fine", "a\udfff"])
        if path != tokenizer_file:
            with pytest.raises(ConfigError, match=r"ids are \[999999\], which .* cannot decode"):
                Tokenizer(path).decode([999_999])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eod_token": 0}, "eod_token .*, not 0"),
        ({"bos_token": b"a"}, "bos_token .*, not b'a'"),
        ({"tiktoken_pattern": 1}, "tiktoken_pattern .*, not 1"),
        ({"tiktoken_pattern": "gpt2"}, "gpt2', which .* does not take: leave it out"),
        ({"add_special_tokens": 1}, "add_special_tokens must be True or False, not 1"),
        ({"special_tokens_in_text": "no"}, "special_tokens_in_text must be .* not 'no'"),
        ({"encoder": "fast"}, "encoder .* auto, fastokens, tokenizers, not 'fast'"),
        ({"encoder": "tiktoken"}, "encoder .* auto, fastokens, tokenizers, not 'tiktoken'"),
        ({"encoder": None}, "encoder .*, not None"),
    ],
)
def test_wrong_options_are_refused(tokenizer_file: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tokenizer(tokenizer_file, **options)
    for name in ("eod", "bos"):
        with pytest.raises(TextError, match=f"has no token '<x>'; give --{name}-token"):
            Tokenizer(tokenizer_file, **{f"{name}_token": "<x>"})
    with pytest.raises(ConfigError, match="add_special_tokens is True, which bytes does not"):
        Tokenizer("bytes", add_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("t.json", content) for content in (b"", b"{}", b"not json", b"\xff\xfe\x00", b"[")),
        ("t.json", b'{"model": {"type": "BPE"}}'),
        ("t.json", b'{"model": []}'),
        ("t.model", b"not a model"),
        ("t.model", b"\n\x05hello"),
        ("t.tiktoken", b"hello"),
        ("t.bin", b"\x00\x01"),
    ],
)
def test_files_without_tokenizers_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=r"is not a (tokenizer|tiktoken) file"):
        Tokenizer(tmp_path / name, tiktoken_pattern="gpt2" if "tiktoken" in name else None)


def test_a_missing_package_is_an_error_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tokenizer_file: Path, sentencepiece_file: Path
) -> None:
    for name in ("sentencepiece", "fastokens"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TextError, match=r"pip install 'millrace\[encoders\]'"):
        Tokenizer(sentencepiece_file)
    with pytest.raises(TextError, match=r"fastokens package: .*millrace\[tokenizers\]"):
        Tokenizer(tokenizer_file, encoder="fastokens").encode_batch(["a"])
    assert Tokenizer(tokenizer_file).encoder_name == "tokenizers"
