"""A file of tiny conversations, and packs of them for the trainers."""

import argparse
import json
from pathlib import Path

import tiny_data

from millrace.chats import ChatEncoder
from millrace.encoding import Tokenizer
from millrace.online import TextDataset


def make_chats(options: argparse.Namespace) -> Path:
    """A JSONL file of chats; rank 0 writes it, and the others wait."""
    path = options.folder / "chats.jsonl"
    if options.rank == 0 and not path.exists():
        pairs = [(a, b) for a in range(12) for b in range(10)]
        rows = [{"prompt": f"{a} + {b}?", "completion": f"It is {a + b}."} for a, b in pairs]
        path.with_suffix(".new").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path.with_suffix(".new").rename(path)
    tiny_data.wait_for(path)
    return path


def pack_chats(chats: Path, sequence_length: int, num_samples: int = 400) -> TextDataset:
    """Packs of whole chats; one process tokenises them once, and the others wait."""
    return TextDataset(
        chats,
        ChatEncoder(Tokenizer("bytes")),  # or the path of a model's tokenizer
        order="packs",
        seed=3,
        num_samples=num_samples,
        cache=chats.with_name("cache"),
        sequence_length=sequence_length,
        add_extra_token=False,
        boundaries="documents",
    )
