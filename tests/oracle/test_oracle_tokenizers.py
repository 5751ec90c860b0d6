"""Tokenizers against Megatron-LM's and transformers' own."""

import base64
import json
import pickle
import warnings
from pathlib import Path

import pytest
from tests.conftest import make_texts
from tests.encoding.test_tokenizer import TEXT, make_folder

from millrace import ConfigError, TextError
from millrace.encoding import Tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer


def test_megatrons_tiktoken_file(tmp_path: Path) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the", b"er"]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for i, token in enumerate(tokens)
    ]
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(entries))
    for pattern in ("v1", "v2"):
        library = TikTokenTokenizer(str(path), pattern=pattern, vocab_size=1000 + len(tokens))
        tokenizer = Tokenizer(path, tiktoken_pattern=pattern)
        texts = [TEXT, "a</s>b <SPECIAL_7>", *make_texts(20)]
        assert tokenizer.encode(texts) == [library.text_to_ids(text) for text in texts]
        assert (tokenizer.eod, tokenizer.bos) == (library.eos_id, library.bos_id)
        assert tokenizer.vocabulary_size == library.vocab_size
    with pytest.raises(ConfigError, match=r"tiktoken_pattern .* v1, v2, not 'v3'"):
        Tokenizer(path, tiktoken_pattern="v3")
    path.write_text(json.dumps([*entries, {"rank": 5}]))
    with pytest.raises(TextError, match="is not a tokenizer file"):
        Tokenizer(path)


def test_tokens_that_only_the_folder_has_are_added_as_transformers_does(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    decoder = {str(Tokenizer(tokenizer_file).vocabulary_size): {"content": "<more>"}}
    folder = make_folder(
        tmp_path / "f",
        tokenizer_file,
        tokenizer_class="PreTrainedTokenizerFast",
        added_tokens_decoder=decoder,
        pad_token="<pad>",
        eos_token="<|endoftext|>",
    )
    tokenizer = Tokenizer(folder)
    library = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [TEXT, "a<more>b<pad> <|endoftext|>"]
    expected = [library.convert_tokens_to_ids(library.tokenize(text)) for text in texts]
    assert tokenizer.encode(texts) == expected
    assert tokenizer.with_encoder("tokenizers").encode(texts) == expected
    assert tokenizer.vocabulary_size == len(library)
    assert pickle.loads(pickle.dumps(tokenizer)).encode(texts) == expected
