"""Masks of chats: what is trained on, and what is refused. For templates, see test_templates."""

import itertools
import re
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace.chats import ChatEncoder, JinjaTemplate
from millrace.chats.conversations import conversation_of
from millrace.chats.proof import prove, prove_chat
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError, TextError
from tests.conftest import train_tokenizer

CHAT = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
PROMPT = "{% if add_generation_prompt %}[|assistant|]{% endif %}"
PLAIN = (
    "{% for m in messages %}[|{{ m.role }}|]{{ m.content }}<|end|>\n{% endfor %}" + PROMPT
)  # fmt: skip
TAGGED = (
    "{% for m in messages %}[|{{ m.role }}|]{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
    "{{ '\\n' }}{% endfor %}" + PROMPT
)
THINKING = (  # the reasoning of all but the last turn is left out
    "{% for m in messages %}[|{{ m.role }}|]{% if m.role == 'assistant' and loop.last %}<think>"
    "{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
) + PROMPT
WITHOUT_PROMPT = (
    "{% if messages[-1].role != 'assistant' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
)
SPECIAL = ("<|end|>", "[|user|]", "[|assistant|]")
TEXTS = st.one_of(
    st.sampled_from(["assistant", "90001000001", "<|end|", "</think>", " both ", "été 水車 🌊"]),
    st.text(min_size=1, max_size=8),
    st.text("<|>[]/ \nendthk9 01", min_size=1, max_size=12),
).filter(lambda text: text.strip() and not any(token in text for token in SPECIAL))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(train_tokenizer(tmp_path_factory.mktemp("chats") / "t.json", SPECIAL))


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4),
    template=st.sampled_from([PLAIN, TAGGED]),
)
def test_tokens_within_what_the_assistant_says(
    tokenizer: Tokenizer, texts: list[tuple[str, str]], template: str
) -> None:
    encoder, turns = ChatEncoder(tokenizer, template), [text for pair in texts for text in pair]
    messages = [{**CHAT[at % 2], "content": text} for at, text in enumerate(turns)]
    (document,) = encoder.documents({"messages": messages})
    whole, characters = "", set[int]()
    for message in messages:
        start = len(whole) + len(f"[|{message['role']}|]")
        whole += f"[|{message['role']}|]{message['content']}<|end|>\n"
        if message["role"] == "assistant":
            characters |= set(range(start, len(whole) - 1))
    assert document.text == whole
    assert {at for start, end in document.spans for at in range(start, end)} == characters
    # The offsets of the reference library, which the encoder does not look at.
    encoded = encoder.tokenizer.vocabulary.library.encode(whole, add_special_tokens=False)
    (explained,) = encoder.explain({"messages": messages})
    assert encoded.ids == explained["tokens"]
    assert "".join(explained["texts"]) == whole
    assert [set(range(*one)) <= characters for one in encoded.offsets] == explained["trained"]


def trained_text(encoder: ChatEncoder, messages: list[dict[str, Any]]) -> list[str]:
    return [
        document.text[start:end]
        for document in encoder.documents({"messages": messages})
        for start, end in document.spans
    ]


def test_a_rewriting_template_gives_a_document_for_each_context(tokenizer: Tokenizer) -> None:
    row = {"messages": CHAT * 3}
    encoded = ChatEncoder(tokenizer, THINKING).encode([row])
    assert encoded.counts.tolist() == [3]
    assert encoded.report["documents of rewritten history"] == 2
    refusing = ChatEncoder(tokenizer, THINKING, history="refuse")
    assert "message 3: " in refusing.encode([row]).problems[0]
    assert ChatEncoder(tokenizer, PLAIN, history="refuse").encode([row]).problems == {}


def test_turns_that_only_look_like_others(tokenizer: Tokenizer) -> None:
    """Turns between the same texts are proven once for all, if nothing else differs."""
    user = CHAT[0]
    hiding = (  # shows in the last turn alone that there was a tag
        "{% for m in messages %}[|{{ m.role }}|]{% if loop.last and m.content[:8] == '</think>' %}"
        "<think></think>{% endif %}{{ m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}"
    )
    said = ["y", "</think>x", "z"]
    messages = [one for text in said for one in (user, {**CHAT[1], "content": text})]
    texts = ["<think></think>x<|end|>", "y<|end|>", "z<|end|>"]
    assert trained_text(ChatEncoder(tokenizer, hiding + PROMPT), messages) == texts
    moving = (  # writes what is said beside a call behind the answer of the tool
        "{% for m in messages %}[|{{ m.role }}|]{% if m.tool_calls %}<call>"
        "{{ m.tool_calls[0].function.arguments.a }}</call>{{ m.content if loop.last }}{% else %}"
        "{{ m.content }}{% endif %}<|end|>\n{% if m.role == 'tool' %}"
        "{{ messages[loop.index0 - 1].content }}{% endif %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": {"a": "b"}}}]
    call, answer = {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "t"}
    messages = [user, {**call, "content": ""}, answer, CHAT[1], user, {**call, "content": "s"}]
    texts = ["<call>b</call>s<|end|>", "<call>b</call><|end|>", "a<|end|>", "a<|end|>"]
    messages += [answer, CHAT[1]]
    assert trained_text(ChatEncoder(tokenizer, moving + PROMPT), messages) == texts


def test_turns_and_kinds_to_train_on(tokenizer: Tokenizer) -> None:
    call: dict[str, Any] = {"function": {"name": "f", "arguments": {"a": "b"}}}
    messages: list[dict[str, Any]] = [
        CHAT[0],
        {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "y", "weight": 1},
    ]
    calls = '\n<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    think, stop = "<think>\nr\n</think>\n\n", "<|im_end|>"
    bytes_ = Tokenizer("bytes")
    for options, texts in (
        ({}, [f"{think}x{calls}{stop}", f"y{stop}"]),
        ({"turns": "last"}, [f"y{stop}"]),
        ({"reasoning": False}, [f"x{calls}{stop}", f"y{stop}"]),
        ({"tool_calls": False}, [f"{think}x", stop, f"y{stop}"]),
        ({"reasoning": False, "tool_calls": False}, ["x", stop, f"y{stop}"]),
    ):
        assert trained_text(ChatEncoder(bytes_, **options), messages) == texts, options
    row = [messages[0], {**messages[1], "content": ""}]
    assert trained_text(ChatEncoder(bytes_, reasoning=False), row) == [f"{calls[1:]}{stop}"]
    call["function"]["arguments"] = '{"a": "b"}'
    assert trained_text(ChatEncoder(bytes_), messages) == [f"{think}x{calls}{stop}", f"y{stop}"]
    call["function"]["arguments"] = ""
    assert f"{{}}}}\n</tool_call>{stop}" in trained_text(ChatEncoder(bytes_), messages)[0]
    messages[1]["weight"] = 0
    assert trained_text(ChatEncoder(bytes_, turns="weight"), messages) == [f"y{stop}"]
    for turns, length in (("all", 4), ("last", 2)):
        row = {"messages": messages[:length]}
        with pytest.raises(TextError, match='message 1 has the weight 0: give turns="weight"'):
            ChatEncoder(bytes_, turns=turns).documents(row)
    embedded = [messages[0], {"role": "assistant", "content": "<think>r</think>z"}]
    encoder = ChatEncoder(tokenizer, PLAIN + "{{ '</think>' in '' }}", reasoning=False)
    assert trained_text(encoder, embedded) == ["z<|end|>"]


def test_reasoning_that_the_template_leaves_out(tokenizer: Tokenizer) -> None:
    """It is counted where the turn's own document lacks it, not where others follow."""
    chat = [CHAT[0], {**CHAT[1], "reasoning": "r"}]
    for template, num_bare in ((PLAIN, 1), (TAGGED, 1), (THINKING, 0)):
        for messages in (chat, chat + CHAT):
            report = ChatEncoder(tokenizer, template).encode([{"messages": messages}]).report
            assert (report["bad rows"], report["turns without their reasoning"]) == (0, num_bare)
    texts = ["<think>r</think>a<|end|>", "<think></think>a<|end|>"]
    assert trained_text(ChatEncoder(tokenizer, THINKING), chat + CHAT) == texts


@pytest.mark.parametrize("turns", ["all", "last", "weight"])
@pytest.mark.parametrize("template", [PLAIN, TAGGED, THINKING])
def test_a_prompt_is_not_trained_on(tokenizer: Tokenizer, template: str, turns: str) -> None:
    encoder = ChatEncoder(tokenizer, template, turns=turns)
    row = {"prompt": [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[0]], "completion": CHAT[1:]}
    (document,) = encoder.documents(row)
    (whole,) = encoder.documents({"messages": CHAT * 2})[-1:]
    assert document.turns == whole.turns[-1:]
    with pytest.raises(TextError, match="have the weight 0, or are the prompt's"):
        encoder.documents({**row, "completion": CHAT[:1]})


def test_encoders_that_cannot_be_made(tokenizer: Tokenizer) -> None:
    path = tokenizer.path
    added = Tokenizer(path, add_special_tokens=True)
    plain = Tokenizer(path, special_tokens_in_text=False)
    function = Tokenizer.from_function(len, vocabulary_size=9, version="1")
    for wrong in (function, added, plain, "gpt2"):
        with pytest.raises(ConfigError, match=r"tokenizer is|tokens end|special_tokens_in_text"):
            ChatEncoder(wrong)  # type: ignore[arg-type]
    for options, message in (
        ({"date": "today"}, "give a day"),
        ({"template_arguments": [1]}, "give a dictionary"),
        ({"template_arguments": {"a": object()}}, "template_arguments.a is <obj"),
        ({"stop": "never"}, "cannot be proven.* no stop token"),
    ):
        with pytest.raises(ConfigError, match=message):
            ChatEncoder(tokenizer, PLAIN, **options)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # without a stop token, the model would never learn to stop
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}.\n{% endfor %}", "a special token"),
        (PLAIN.replace("m.content", "m.content[::-1]"), "leaves out what the assistant says"),
        (PLAIN.replace("m.content }}", "m.content }}{{ m.content | length }}"), "route markers"),
        (TAGGED.replace("{% else %}", "{% else %}{% generation %}").replace(
            "<|end|>{% endif", "{% endgeneration %}<|end|>{% endif"), "route tags.* hold its"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}"), "leaves out"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% for", "the template refuses the chat"),
        (PLAIN + "{{ strftime_now('%d') }}", "reads the clock"),
        (WITHOUT_PROMPT, "mask_routes=1"),
    ],
)  # fmt: skip
def test_templates_that_are_refused(tokenizer: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatEncoder(tokenizer, template)


def test_never_all_and_never_nothing(tokenizer: Tokenizer) -> None:
    """Rows that would train on no token are bad, and one route alone must be asked for."""
    encoder = ChatEncoder(tokenizer, WITHOUT_PROMPT, mask_routes=1)
    assert encoder.documents({"messages": CHAT})[0].routes == ("markers",)
    assert trained_text(encoder, CHAT) == ["a<|end|>"]
    thought = {"messages": [CHAT[0], {**CHAT[1], "content": "", "reasoning_content": "r"}]}
    rows = ChatEncoder(tokenizer, THINKING, reasoning=False).encode([thought, {"messages": CHAT}])
    assert rows.counts.tolist() == [0, 1]
    assert "it has no target" in rows.problems[0]
    assert rows.trained is not None
    assert 0 < rows.trained.sum() < len(rows.trained)


def test_tokens_across_a_border(tmp_path: Path) -> None:
    """Without special tokens, "|>" and what follows can be one token."""
    path = train_tokenizer(tmp_path / "t.json", ("<|endoftext|>", ">\n[", "]a"))
    with pytest.raises(ConfigError, match=r"part of the token '>\\n\['"):  # a stop never trained
        ChatEncoder(Tokenizer(path), PLAIN)
    path = train_tokenizer(tmp_path / "u.json", ("<|endoftext|>", "]a", ">\nx"))
    encoder = ChatEncoder(Tokenizer(path), PLAIN.replace("<|end|>\n", "<|end|>\n{{ m.end }}"))
    rows = encoder.encode([{"messages": CHAT}, {"messages": [CHAT[0], {**CHAT[1], "end": "x"}]}])
    assert "the stop token '<|end|>' is part of the token '>\\nx'" in rows.problems[1]
    assert rows.report["tokens across a border"] == 1
    assert rows.trained is not None
    assert encoder.tokenizer.decode(rows.tokens[rows.trained]) == "<|end|>"


@pytest.mark.parametrize("kind", ["NFC", "NFKC", "swallowing", "prefix", "stop"])
def test_tokenizers_whose_tokens_are_not_the_bytes(tmp_path: Path, kind: str) -> None:
    import tokenizers

    model = tokenizers.Tokenizer.from_file(str(train_tokenizer(tmp_path / "t.json", SPECIAL)))
    if kind.startswith("NF"):
        model.normalizer = getattr(tokenizers.normalizers, kind)()
    else:
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(kind == "prefix")
        names = ["<x>", "<|end|>"][: 1 + (kind == "stop")]  # Phi-3's stop token does so, too
        added = [tokenizers.AddedToken(one, lstrip=True, rstrip=True) for one in names]
        model.add_special_tokens(added)
    model.save(str(tmp_path / "other.json"))
    encoder = ChatEncoder(Tokenizer(tmp_path / "other.json"), PLAIN, special_text="keep")
    # Normalized, three bytes move from the question to the answer. <x> swallows as many spaces as
    # "prefix" adds.
    asked, said = "e\u0301" * 3 + " \u6c34  <x>  ", "\U0001f30a \u0958"
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    batch = [{"messages": CHAT}, {"messages": chat}] * 2
    rows = encoder.encode(batch)
    assert rows.trained is not None
    masks = np.split(rows.trained, rows.ends[:-1])
    tokens = np.split(rows.tokens, rows.ends[:-1])
    expected = unicodedata.normalize(kind, said) if kind.startswith("NF") else said  # type: ignore
    expected = " " * (kind == "prefix") + expected
    assert encoder.tokenizer.decode(tokens[1][masks[1]]) == f"{expected}<|end|>"
    alone = encoder.encode(batch[:1]).trained
    assert all(np.array_equal(masks[number], alone) for number in (0, 2))
    assert [*encoder.encode([{}]).problems] == [0]  # a batch without a document


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_long_chats_are_rendered_a_fixed_number_of_times(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, opening: str
) -> None:
    encoder, counts = ChatEncoder(tokenizer, PLAIN), list[int]()
    render = type(encoder.rules.template).render

    def counting(self: Any, messages: Any, *rest: Any, **options: Any) -> Any:
        counts.append(len(messages))
        return render(self, messages, *rest, **options)

    monkeypatch.setattr(type(encoder.rules.template), "render", counting)
    turn = {**CHAT[1], "content": opening + CHAT[1]["content"]}
    (document,) = encoder.documents({"messages": [CHAT[0], turn] * 150})
    assert len(document.turns) == 150
    assert sum(counts) < 605  # with markers and without, and the first turn
    for word in ("first", "second"):  # of one shape, which is proven once
        counts.clear()
        encoder.documents({"messages": [*CHAT, CHAT[0], {**CHAT[1], "content": word}]})
    assert counts == []


# What a template may do with a text, and what it can only do with one that it reads.
READING = """m.content; m.content | trim; 'x' + m.content.strip(); m.content | tojson; m.content * 2
m.content | upper if m.content | length < 2 else m.content
m.content + (m.content in 'abc') | string; m.content if m.content else 'none'
m.content + (m.content ~ '' == 'a') | string; m.content + ('%s' % (m.content,) == 'a') | string
m.content + (messages[m.content] is defined) | string; ', '.join([m.content]) | length | string
m.content + ('abc'.find(m.content)) | string; m.content + (m | string) | length | string
m.content + {'a': 'y'}[m.content] | default('n'); 'y' if m.content is in 'abc' else m.content
m.content + said(m.content); m.content + ('<b' in m.content) | string; '{}'.format(m.content)
m.content | escape; m.content[:1] + m.content[1:]; m.content + (m.content == 'a') | string
m.content + (m.content.strip('a') == '') | string
m.content + ([m.content] | string == '[\\'a\\']') | string
m.content + (m.content.split('/') | length) | string; m.content + ('a' | trim(m.content))
m.content + ('a' | replace('a', m.content) | length) | string; m.content[m.content]
m.content + (m.content is lower) | string; m.content + (m.content | int) | string
m.content + m.content.count('a') | string
m.content + (m.content is sequence and m.content is iterable and m.content is string) | string
m.content + (m.content is mapping or m.content is number or m.content is callable) | string
m.content + (m.content.count is defined or m.content.x is defined) | string"""
SETUP = "{% macro said(x) %}{% set y %}{{ x }}{% endset %}{{ y == 'a' }}{% endmacro %}"
ODD_WORDS = ["a", " a", "b\n", "904170001", "<think>x", "[|user|]", "count", "a/<b", "long " * 9]


@pytest.mark.parametrize("said", re.split(";\\s|\n", READING))
def test_chats_are_proven_as_their_stand_ins(said: str) -> None:
    rules = ChatEncoder(Tokenizer("bytes"), PLAIN).rules
    for prompt in ("", "<think>", "{{ '<t>' if messages[-1].content | length > 5 }}"):
        source = PLAIN.replace("m.content", said).replace("[|assistant|]", "[|assistant|]" + prompt)
        rules = replace(rules, template=JinjaTemplate(SETUP + source))
        for word, other in itertools.product(ODD_WORDS, ("a", "b")):
            messages = [{**CHAT[0], "content": other}, {**CHAT[1], "content": word}]
            blank = {"role": "system", "content": " \n" if other == "b" else ""}
            chat = conversation_of({"messages": [blank, *messages]})
            outcomes = []
            for proving in (prove_chat, prove):
                try:
                    outcomes.append(proving(chat, rules))
                except TextError as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]
