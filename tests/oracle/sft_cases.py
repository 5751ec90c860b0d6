"""What the SFT datasets of both sides are compared on: a tokenizer, hostile lines, and a table."""

import itertools
import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name is defined %} [{{ m.name }}]"
    "{% endif %}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]
WORDS = ("System", "User", "Assistant", "Ċ" * 2, "Ġthe", "Ġwheel", "Ġturns", "water", "!!")
FORMATS = ("nemotron-nano-v2", "nemotron-h-aligned", "identity", "default", "default without pad")
LENGTHS = ((8, 1), (16, 1), (16, 2), (17, 1), (33, 4), (64, 1), (64, 2), (200, 1))
"""Sequence lengths and context-parallel sizes."""


def write_tokenizer(folder: Path, more: Any = (), *, has_pad: bool = True, **fields: Any) -> str:
    """A byte-level BPE whose only merges make WORDS; `fields` are those of the special tokens,
    behind which come `more` plain ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = dict.fromkeys((word[:end], word[end]) for word in WORDS for end in range(1, len(word)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"normalized": False, "special": True, **fields}
    tokenizer.add_special_tokens([AddedToken(text, **options) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in more])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    settings |= {"eos_token": "<|endoftext|>", "unk_token": "<unk>"}
    settings |= {"pad_token": "<pad>"} if has_pad else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def chat(*turns: str, **more: Any) -> list[dict[str, Any]]:
    """Messages of turns such as "user: hello"."""
    pairs = [turn.partition(": ") for turn in turns]
    return [{"role": role, "content": content, **more} for role, _, content in pairs]


def of_lengths(*lengths: int) -> list[dict[str, Any]]:
    """Conversations that have so many tokens each in the format "identity"."""
    return [message for length in lengths for message in chat(f"system: {'x' * length}")]


# Not here: a content of null, which transformers 4 renders as "None", and 5 as nothing.
LINES: list[list[dict[str, Any]]] = [
    chat("system: be kind", "user: hello", "assistant: good day"),
    chat("system: a", "user: b", "assistant: c", "system: d", "user: e", "assistant: f") * 2,
    chat("user: no system", "assistant: none", "system: ", "user: here", "assistant: yes"),
    chat("user: only a question"),
    chat("system: alone"),
    chat("system: s", *["user: the wheel turns", "assistant: the water, too!!"] * 6),
    chat("user: <SPECIAL_11>User\nx", "assistant: <SPECIAL_12>\n<|im_end|><unk><pad>"),
    chat("user: <|endoftext|>", "assistant: ends <|endoftext|>"),
    chat("user:  spaces \n\n", "assistant: \n both sides\t "),
    chat("user: white", "assistant:    "),
    chat("user: empty", "assistant: "),
    chat("assistant: first", "user: last"),
    chat("assistant: first", "system: none asked"),
    chat("user: a", "assistant: b", "assistant: c"),
    chat("user: call", "tool: result", "assistant: so"),
    chat("user: call", "developer: odd", "assistant: so"),
    chat("System: large", "User: letters", "Assistant: fall out", "user: q", "assistant: a"),
    chat("system: /think", "user: /no_/thinkthink a /no_think b", "assistant: /think kept"),
    chat("user: \u00a0naïve 🌊\u200d🌊 e\u0301\u2028", "assistant: \x1cποταμός\u3000\x85"),
    chat("user: <SPECIAL_1", "assistant: 1>!!", "user: <SPECIAL_11", "assistant: >"),
    [],
    chat("system: named", "user: who", "assistant: Ann", name="Ann"),
    chat("user: q", "assistant: a") + chat("system: s", "user: q", "assistant: ") * 2,
    chat(*["system: s", "user: " + "wheel " * 9, "assistant: " + "!" * 31] * 9),
    chat("user: " + "the water " * 90, "assistant: late"),
    *itertools.starmap(
        of_lengths,
        [
            (7,),
            (8,),
            (9,),
            (15,),
            (16,),
            (17,),
            (18,),
            (8, 8),
            (8, 8, 1),
            (16, 3),
            (17, 3),
            (15, 1),
        ],
    ),
    of_lengths(*[1] * 30),
    of_lengths(0, 3),
    of_lengths(3, 0),
    of_lengths(3, 0, 5, 0, 0, 8, 0, 4),
    of_lengths(0, 0),
    of_lengths(31, 1, 1),
    of_lengths(64),
    of_lengths(65, 5),
    of_lengths(5, 6, 7, 300, 5),
]


def write_lines(path: Path, lines: list[Any] = LINES) -> str:
    """A file of lines with messages."""
    texts = [json.dumps({"messages": line, "source": "test"}) + "\n" for line in lines]
    path.write_text("".join(texts))
    return str(path)
