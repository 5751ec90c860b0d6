"""Chat templates that people use: rows that are labelled by hand, and a sample of hostile ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.chats import ChatEncoder, Document
from millrace.encoding import Tokenizer
from tests.chats.check_templates import OPTIONS, check_template, template

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="trl needs Python 3.11")

# The places of what must be trained on, in brackets, by reading the templates.
LABELLED = json.loads((Path(__file__).parent / "labelled.json").read_text())
SAMPLE = [row["template"] for row in LABELLED[:30:3]]
SAMPLE += ["trl/qwen3_training", "axolotl/command_a", "trl/idefics3", "trl/nemotron_3_nano"]


def bracketed(document: Document) -> str:
    text = document.text
    for start, end in reversed(document.spans):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text


@pytest.mark.parametrize("row", LABELLED, ids=lambda row: row["template"])
def test_labels_by_hand(row: dict[str, Any]) -> None:
    options = OPTIONS | row.get("options", {})
    encoder = ChatEncoder(Tokenizer("bytes"), template(row["template"]), **options)
    documents = [bracketed(one) for one in encoder.documents({"messages": row["messages"]})]
    assert len(documents) == len(row["documents"])
    for text, labels in zip(documents, row["documents"], strict=True):
        places = [text.find(label) for label in labels]
        assert min(places) >= 0, text
        assert places == sorted(places)
        assert text.count("⟦") == "".join(labels).count("⟦")


@pytest.mark.parametrize("name", SAMPLE)
def test_hostile_chats(name: str) -> None:
    result = check_template(name, 5, seed=36)
    assert result.wrong == []
    assert result.counts["decided"] > 0
