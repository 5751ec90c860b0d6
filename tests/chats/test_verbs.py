"""Conversations on the command line."""

import json
from pathlib import Path

import pytest

from millrace import GPTDataset, IndexedDataset
from millrace.cli import main

TURNS = [("user", "Hi"), ("assistant", "One\ntwo"), ("user", "And?"), ("assistant", "Bye")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Rows of the first message, which is a bad one, and of all."""
    messages = [{"role": role, "content": text} for role, text in TURNS]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages[:end]}) + "\n" for end in (1, 4)))
    return path


def test_conversations_become_a_pair_with_a_mask(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tokenize", "--input", str(path), "--tokenizer", "bytes"]
    command += ["--output-prefix", str(path.parent / "out")]
    assert main([*command, "--turns", "last"]) == 1
    assert "turns: add --chat" in capsys.readouterr().err
    assert main([*command, "--chat"]) == 1
    assert "chats.jsonl, line 1: none of the 1 messages" in capsys.readouterr().err
    chats = ["--chat", "--turns", "last", "--chat-template", "chatml", "--on-error", "skip"]
    assert main([*command, *chats, "--restart"]) == 0
    data = IndexedDataset(path.parent / "out_chat_document")
    masked = GPTDataset(data, sequence_length=len(data[0]) - 1, seed=1, loss_ranges="apply")[0]
    said = masked["labels"][masked["loss_mask"] == 1]
    assert bytes(said.tolist()).decode() == "Bye<|im_end|>"


def test_a_row_is_shown_with_its_mask(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", str(path), "--tokenizer", "bytes"]
    assert main([*command, "--row", "1"]) == 0
    shown = capsys.readouterr().out
    assert "⟦One\ntwo<|im_end|>⟧" in shown
    assert "⟦Bye<|im_end|>⟧" in shown
    assert shown.count("⟦") == 2
    assert main([*command, "--row", "1", "--turns", "last", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    said = zip(document["texts"], document["trained"], strict=True)
    assert "".join(text for text, is_trained in said if is_trained) == "Bye<|im_end|>"
    assert main([*command, "--row", "0"]) == 1
    assert "none of the 1 messages is an assistant" in capsys.readouterr().err
    assert main([*command, "--row", "2"]) == 1
    assert "[2] are not in 0 to 1" in capsys.readouterr().err
    assert main(command[:2]) == 1
    assert "--tokenizer is missing" in capsys.readouterr().err
