"""Masks of chats against twins of their templates, which know what must be trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from millrace.chats import ChatEncoder
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError
from tests.chats.twins import PLAIN, TAGGED, TWINS, expected
from tests.conftest import train_tokenizer

CHAT = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
WITHOUT_PROMPT = (
    "{% if messages[-1].role != 'assistant' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
)
SPECIAL = ("<|end|>", "<s>", "[|user|]", "[|assistant|]")

TEXTS = st.one_of(
    st.sampled_from(
        [
            "user", "assistant", "a", "90001", "90001000001", "<|end|", "[|user|", "</think>",
            "<think>", "<think>no</think>yes", "x</think>", " both ", "\n\nleading", "trailing\n",
            "the mill race", "the mill", "été 水車 🌊", "{{ m }}", '{"a": "b"}', "\\", "<call>",
            "\xa0", "water" * 300,
        ]
    ),
    st.text(min_size=1, max_size=8),
    st.text("<|>[]/ \nendthk9 01", min_size=1, max_size=12),
).filter(lambda text: text.strip() and not any(token in text for token in SPECIAL))  # fmt: skip


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Chats with tools and reasoning, whose contents repeat and contain one another."""
    used: list[str] = []

    def text() -> str:
        again = st.sampled_from([*used, *(f"{one}." for one in used)]) if used else TEXTS
        used.append(draw(st.one_of(TEXTS, again)))
        return used[-1]

    messages = [{"role": "system", "content": text()}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": text()})
        if draw(st.integers(0, 3)) == 0:
            arguments = {"a": text(), "n": 3, "deep": [text()]}
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            content = draw(st.sampled_from(["", text()]))
            messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
            messages.append({"role": "tool", "content": draw(st.sampled_from(["", text()]))})
        messages.append({"role": "assistant", "content": text()})
        if draw(st.booleans()):
            messages[-1]["reasoning_content"] = text()
    return messages


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(train_tokenizer(tmp_path_factory.mktemp("chats") / "t.json", SPECIAL))


@pytest.fixture(scope="module")
def encoders(tokenizer: Tokenizer) -> dict[str, ChatEncoder]:
    return {name: ChatEncoder(tokenizer, twin.template) for name, twin in TWINS.items()}


@pytest.mark.parametrize("name", TWINS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=chats())
def test_trained_are_the_characters_that_the_twin_trains(
    encoders: dict[str, ChatEncoder], name: str, messages: list[dict[str, Any]]
) -> None:
    # What this template leaves out as a whole cannot be trained.
    texts = [one["content"] for one in messages if one["role"] == "assistant" and one["content"]]
    assume(name != "thinking by content" or all(one.split("</think>")[-1].strip() for one in texts))
    # Behind an empty message, that template's two contexts cannot be told from its header.
    assume(
        name != "system last" or all(one["content"] for one in messages if one["role"] == "tool")
    )
    twin, encoder = TWINS[name], encoders[name]
    turns = {number for number, one in enumerate(messages) if one["role"] == "assistant"}
    proven: set[int] = set()
    for document in encoder.explain({"messages": messages}):
        characters = {at for start, end in document["spans"]["trained"] for at in range(start, end)}
        assert set(document["routes"]) == set(twin.routes)
        here = set[int]()
        for turn in turns - proven:
            text, trained = expected(twin, messages[: turn + 1], turn)
            if "next" in name and turn + 1 < len(messages):  # the stop belongs to the next message
                text, trained = expected(twin, messages, turn)
            elif "next" in name:  # without a stop, white space at the end may not be the turn's
                trained -= set(range(len(text.rstrip()), len(text)))
            if document["text"].startswith(text) and trained & characters:
                here.add(turn)
                assert trained <= characters
                characters -= trained
        assert here
        assert not characters, "trained without a turn"
        proven |= here
        check_tokens(encoder.tokenizer, document)
    assert proven == turns, "each turn is trained once"


def check_tokens(tokenizer: Tokenizer, document: dict[str, Any]) -> None:
    """By the offsets of the reference library, which the encoder does not look at."""
    encoded = tokenizer.vocabulary.library.encode(document["text"], add_special_tokens=False)
    assert encoded.ids == document["tokens"]
    characters = {at for start, end in document["spans"]["trained"] for at in range(start, end)}
    whole = [set(range(*offset)) <= characters for offset in encoded.offsets]
    assert whole == document["trained"]


def test_a_rewriting_template_gives_a_document_for_each_context(
    encoders: dict[str, ChatEncoder], tokenizer: Tokenizer
) -> None:
    row = {"messages": CHAT * 3}
    documents = encoders["thinking"].explain(row)
    assert [len(one["text"].split("[|")) for one in documents] == [3, 5, 7]
    encoded, report = encoders["thinking"].encode_with_report([row])
    assert encoded.counts.tolist() == [3]
    assert report.counts["documents of rewritten history"] == 2
    refusing = ChatEncoder(tokenizer, TWINS["thinking"].template, history="refuse")
    assert "message 3: " in refusing.encode([row]).problems[0]
    assert ChatEncoder(tokenizer, PLAIN, history="refuse").encode([row]).problems == {}


def trained_text(encoder: ChatEncoder, messages: list[dict[str, Any]]) -> list[str]:
    return [
        document["text"][start:end]
        for document in encoder.explain({"messages": messages})
        for start, end in document["spans"]["trained"]
    ]


def test_turns_and_kinds_to_train_on(tokenizer: Tokenizer) -> None:
    call = {"function": {"name": "f", "arguments": {"a": "b"}}}
    messages: list[dict[str, Any]] = [
        CHAT[0],
        {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "y", "weight": 1},
    ]
    calls = '\n<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    think, stop = "<think>\nr\n</think>\n\n", "<|im_end|>"
    bytes_ = Tokenizer("bytes")
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, [f"{think}x{calls}{stop}", f"y{stop}"]),
        ({"turns": "last"}, [f"y{stop}"]),
        ({"reasoning": False}, [f"x{calls}{stop}", f"y{stop}"]),
        ({"tool_calls": False}, [f"{think}x", stop, f"y{stop}"]),
        ({"reasoning": False, "tool_calls": False}, ["x", stop, f"y{stop}"]),
    ]
    for options, texts in cases:
        assert trained_text(ChatEncoder(bytes_, **options), messages) == texts, options
    messages[1]["weight"] = 0
    assert trained_text(ChatEncoder(bytes_, turns="weight"), messages) == [f"y{stop}"]
    row = {"messages": messages}
    assert "message 1 has the weight 0" in ChatEncoder(bytes_).encode([row]).problems[0]
    messages[3]["train"] = False
    problem = ChatEncoder(bytes_, turns="weight").encode([row]).problems[0]
    assert problem == "it has no target: all weights are 0"
    embedded = [messages[0], {"role": "assistant", "content": "<think>r</think>z"}]
    template = PLAIN + "{# </think> #}"
    encoder = ChatEncoder(tokenizer, template, reasoning=False)
    assert trained_text(encoder, embedded) == ["z<|end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}.\n{% endfor %}", "a special token"),
        (PLAIN.replace("m.content", "m.content[::-1]"), "leaves out what the assistant says"),
        (PLAIN.replace("m.content }}", "m.content }}{{ m.content | length }}"), "route markers"),
        (TAGGED.replace("{% else %}", "{% else %}{% generation %}").replace(
            "<|end|>{% endif", "{% endgeneration %}<|end|>{% endif"), "route tags.* hold its"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}"), "leaves out"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% for", "not Jinja"),
        (PLAIN + "{{ strftime_now('%d') }}", "reads the clock"),
        (WITHOUT_PROMPT, "mask_routes=1"),
    ],
)  # fmt: skip
def test_templates_that_are_refused(tokenizer: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatEncoder(tokenizer, template)


def test_one_route_is_enough_where_it_is_asked_for(tokenizer: Tokenizer) -> None:
    encoder = ChatEncoder(tokenizer, WITHOUT_PROMPT, mask_routes=1)
    (document,) = encoder.explain({"messages": CHAT})
    assert document["routes"] == ("markers",)
    assert trained_text(encoder, CHAT) == ["a<|end|>"]


def test_the_date_and_the_arguments_decide_the_text(tokenizer: Tokenizer) -> None:
    template = PLAIN + "{{ strftime_now('%d %b') }}{{ mood }}"
    options = {"date": "2025-01-31", "template_arguments": {"mood": "!"}}
    encoder = ChatEncoder(tokenizer, template, **options)
    assert encoder.explain({"messages": CHAT})[0]["text"].endswith("31 Jan!")
    prints = [
        ChatEncoder(tokenizer, template, **{**options, **change}).fingerprint()
        for change in ({}, {"date": "2025-02-01"}, {"template_arguments": {}})
    ]
    assert prints[0] == encoder.fingerprint()
    assert prints[0] != prints[1] != prints[2] != prints[0]


def test_tokens_across_a_border(tmp_path: Path) -> None:
    """Without special tokens, "|>" and what follows can be one token."""
    path = train_tokenizer(tmp_path / "t.json", ("<|endoftext|>", ">\n[", "]a"))
    with pytest.raises(ConfigError, match=r"part of the token '>\\n\['"):
        ChatEncoder(Tokenizer(path), PLAIN)
    path = train_tokenizer(tmp_path / "u.json", ("<|endoftext|>", "]a"))
    encoder = ChatEncoder(Tokenizer(path), PLAIN)
    rows, report = encoder.encode_with_report([{"messages": CHAT}])
    assert rows.problems == {}
    assert report.counts["tokens across a border"] == 1
    assert rows.trained is not None
    assert encoder.tokenizer.decode(rows.tokens[rows.trained]) == "<|end|>"


@pytest.mark.parametrize("kind", ["normalizer", "swallowing"])
def test_tokenizers_whose_tokens_are_not_the_bytes(tmp_path: Path, kind: str) -> None:
    import tokenizers

    model = tokenizers.Tokenizer.from_file(str(train_tokenizer(tmp_path / "t.json", SPECIAL)))
    if kind == "normalizer":
        model.normalizer = tokenizers.normalizers.NFC()
    else:
        model.add_special_tokens([tokenizers.AddedToken("<x>", lstrip=True, rstrip=True)])
    model.save(str(tmp_path / "other.json"))
    encoder = ChatEncoder(Tokenizer(tmp_path / "other.json"), PLAIN, special_text="keep")
    said = "e\u0301 \u6c34\U0001f30a"
    chat = [{"role": "user", "content": said + " <x> "}, {"role": "assistant", "content": said}]
    batch = [{"messages": CHAT}, {"messages": chat}] * 2
    rows = encoder.encode(batch)
    assert rows.trained is not None
    masks = np.split(rows.trained, rows.ends[:-1])
    tokens = np.split(rows.tokens, rows.ends[:-1])
    expected = said.replace("e\u0301", "\xe9") if kind == "normalizer" else said
    assert encoder.tokenizer.decode(tokens[1][masks[1]]) == f"{expected}<|end|>"
    alone = encoder.encode(batch[:1]).trained
    assert all(np.array_equal(masks[number], alone) for number in (0, 2))


def test_long_chats_are_rendered_a_fixed_number_of_times(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = ChatEncoder(tokenizer, PLAIN)
    counts = []
    render = type(encoder.template).render

    def counting(self: Any, messages: Any, *rest: Any) -> Any:
        counts.append(len(messages))
        return render(self, messages, *rest)

    monkeypatch.setattr(type(encoder.template), "render", counting)
    (document,) = encoder.documents({"messages": CHAT * 150})
    assert len(document.turns) == 150
    assert sorted(counts, reverse=True)[:2] == [300, 300]
    assert sum(counts) < 800
