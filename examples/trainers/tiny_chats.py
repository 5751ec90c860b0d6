"""A file of tiny conversations, and packs of them for the trainers."""

import argparse
import json
from pathlib import Path

import tiny_data

from millrace.chats import ChatEncoder
from millrace.encoding import Tokenizer
from millrace.encoding.training import train_tokenizer
from millrace.online import TextDataset

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the last two are ChatML's


def make_chats(options: argparse.Namespace) -> tuple[Path, Path]:
    """A JSONL file of chats, and a tokenizer; rank 0 writes them, and the others wait."""
    chats, tokenizer = options.folder / "chats.jsonl", options.folder / "tokenizer.json"
    if options.rank == 0 and not tokenizer.exists():
        with open(chats, "w") as file:
            for first in range(1, 13):
                for last in range(first + 1, first + 11):
                    numbers = ", ".join(map(str, range(first, last + 1)))
                    row = {"prompt": f"Count from {first} to {last}.", "completion": f"{numbers}."}
                    file.write(json.dumps(row) + "\n")
        train_tokenizer(
            [chats],
            tokenizer,
            vocabulary_size=tiny_data.VOCABULARY,
            json_keys=("prompt", "completion"),
            special_tokens=SPECIAL,
        )
    tiny_data.wait_for(tokenizer)
    return chats, tokenizer


def pack_chats(chats: Path, tokenizer: Path, sequence_length: int) -> TextDataset:
    """Packs of whole chats; one process tokenises them once, and the others wait."""
    return TextDataset(
        chats,
        ChatEncoder(Tokenizer(tokenizer)),
        order="packs",
        seed=3,
        num_samples=400,
        cache=chats.with_name("cache"),
        sequence_length=sequence_length,
        add_extra_token=False,
        boundaries="documents",
    )
