"""Conversations on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace import GPTDataset, IndexedDataset
from tests.online.encoders import write_rows

TURNS = [("user", "Hi"), ("assistant", "One\ntwo"), ("user", "And?"), ("assistant", "Bye")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Rows of the first message, which is a bad one, and of all."""
    messages = [{"role": role, "content": text} for role, text in TURNS]
    return write_rows(tmp_path / "chats.jsonl", [{"messages": messages[:end]} for end in (1, 4)])


def test_conversations_become_a_pair_with_a_mask(path: Path, verb: Any) -> None:
    command = ["tokenize", "--input", path, "--tokenizer", "bytes"]
    command += ["--output-prefix", path.parent / "out"]
    assert "turns: add --chat" in verb(*command, "--turns", "last", status=1)
    assert "leave out json_keys" in verb(*command, "--chat", "--json-keys", "messages", status=1)
    assert "leave out append_eod" in verb(*command, "--chat", "--append-eod", status=1)
    problem = "chats.jsonl, line 1: none of the 1 messages"
    assert problem in verb(*command, "--chat", status=1)
    chats = ["--chat", "--turns", "last", "--chat-template", "chatml", "--on-error", "skip"]
    verb(*command, *chats, "--restart")
    data = IndexedDataset(path.parent / "out_chat_document")
    masked = GPTDataset(data, sequence_length=len(data[0]) - 1, seed=1, loss_ranges="apply")[0]
    said = masked["labels"][masked["loss_mask"] == 1]
    assert bytes(said.tolist()).decode() == "Bye<|im_end|>"


def test_a_row_is_shown_with_its_mask(path: Path, verb: Any) -> None:
    command = ["inspect", path, "--tokenizer", "bytes"]
    shown = verb(*command, "--row", 1)
    assert shown.count("⟦") == 2
    assert "⟦One\ntwo<|im_end|>⟧" in shown
    assert "⟦Bye<|im_end|>⟧" in shown
    (document,) = json.loads(verb(*command, "--row", 1, "--turns", "last", "--json"))
    said = zip(document["texts"], document["trained"], strict=True)
    assert "".join(text for text, is_trained in said if is_trained) == "Bye<|im_end|>"
    problem = "chats.jsonl, line 1: none of the 1 messages is an assistant"
    assert problem in verb(*command, "--row", 0, status=1)
    assert "row numbers from 2 to 2 were asked for; there are 2, from 0 on" in verb(
        *command, "--row", 2, status=1
    )
    (empty := path.with_name("e.jsonl")).touch()
    assert "there are 0, from 0 on" in verb("inspect", empty, "--tokenizer", "bytes", status=1)
    assert "--tokenizer is missing" in verb("inspect", path, status=1)
    (table := path.with_name("a.tsv")).write_text("prompt\tcompletion\nHi\tBye\n")
    assert "⟦Bye<|im_end|>⟧" in verb("inspect", table, "--tokenizer", "bytes")
