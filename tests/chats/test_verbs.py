"""Conversations on the command line."""

import json
from pathlib import Path

import pytest

from millrace.cli import main


def test_a_row_is_shown_with_its_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [("user", "Hi"), ("assistant", "One\ntwo"), ("user", "And?"), ("assistant", "Bye")]
    messages = [{"role": role, "content": text} for role, text in turns]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages[:end]}) + "\n" for end in (1, 4)))
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
    for row, message in (("0", "none of the 1 messages is an assistant"), ("2", "has 2, counted")):
        assert main([*command, "--row", row]) == 1
        assert message in capsys.readouterr().err
    assert main(command[:2]) == 1
    assert "--tokenizer is missing" in capsys.readouterr().err
