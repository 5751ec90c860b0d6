"""Cases for `SFTDataset`, and what two releases of Megatron-LM and their tokenizers make of them.

    python tests/oracle/record_sft.py /path/of/a/Megatron-LM/clone

records the samples. It needs `datasets`, transformers 4 (0.16.1 cannot use 5) and megatron-core,
whose base classes serve both releases. Of the clone it runs only the files below, as they are, from
`git show`. The record is of datasets 5.0.1 (4 and older give absent keys as None) and transformers
4.57.
"""

import gzip
import json
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).with_name("golden_sft.json.gz")
RELEASES = {"0.16": "core_v0.16.1", "0.19": "core_v0.19.0"}
NAMES = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen")
MASKED = ("nemotron-nano-v2", "nemotron-h-aligned")  # the formats of 0.16.1
FORMATS = (*MASKED, "identity", "default")
LENGTHS = ((8, 1), (16, 1), (16, 2), (17, 1), (33, 4), (64, 1), (64, 2), (200, 1))
"""Sequence lengths and context-parallel sizes."""

OPTIONS: dict[str, Any] = {"random_seed": 1, "path_to_cache": None, "eod_mask_loss": False}
OPTIONS |= dict.fromkeys(("reset_position_ids", "reset_attention_mask"), False)
OPTIONS |= {"create_attention_mask": False}

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name is defined %} [{{ m.name }}]"
    "{% endif %}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]
WORDS = ("System", "User", "Assistant", "Ċ" * 2, "Ġthe", "Ġwheel", "Ġturns", "water", "!!")


def write_tokenizer(folder: Path) -> str:
    """A byte-level BPE whose only merges make WORDS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = dict.fromkeys((word[:end], word[end]) for word in WORDS for end in range(1, len(word)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    settings |= {"eos_token": "<|endoftext|>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def chat(*turns: str, **more: Any) -> list[dict[str, Any]]:
    """Messages of turns such as "user: hello"."""
    pairs = [turn.partition(": ") for turn in turns]
    return [{"role": role, "content": content, **more} for role, _, content in pairs]


def of_lengths(*lengths: int) -> list[dict[str, Any]]:
    """Conversations that have so many tokens each in the format "identity"."""
    return [message for length in lengths for message in chat(f"system: {'x' * length}")]


RANDOM = np.random.RandomState(1)
# Not here: a content of null, which transformers 4 renders as "None", and 5 as nothing.
LINES: list[list[dict[str, Any]]] = [
    chat("system: be kind", "user: hello", "assistant: good day"),
    chat("system: a", "user: b", "assistant: c", "system: d", "user: e", "assistant: f") * 2,
    chat("user: no system", "assistant: none", "system: ", "user: here", "assistant: yes"),
    chat("user: only a question"),
    chat("system: s", *["user: the wheel turns", "assistant: the water, too!!"] * 6),
    chat("user: <|endoftext|>", "assistant: ends <|endoftext|>"),
    chat("user: white", "assistant:    "),
    chat("user: empty", "assistant: "),
    chat("assistant: first", "user: last"),
    chat("assistant: first", "system: none asked"),
    chat("user: a", "assistant: b", "assistant: c"),
    [],
    chat("system: named", "user: who", "assistant: Ann", name="Ann"),
    chat("user: q", "assistant: a") + chat("system: s", "user: q", "assistant: ") * 2,
    chat(*["system: s", "user: " + "wheel " * 9, "assistant: " + "!" * 31] * 9),
    chat("user: " + "the water " * 90, "assistant: late"),
    *map(of_lengths, (0, 7, 8, 9, 15, 16, 17, 18, 64)),
    of_lengths(*[0, 1] * 15),
    of_lengths(5, 6, 7, 300, 5),
    *(of_lengths(*RANDOM.choice([0, 1, 3, 7, 8, 17], count)) for count in range(2, 20)),
]


def write_lines(folder: Path) -> str:
    """A file of LINES."""
    path, texts = folder / "lines.jsonl", [json.dumps({"messages": line}) for line in LINES]
    path.write_text("\n".join(texts))
    return str(path)


def samples_of(dataset: Any) -> list[Any]:
    """The arrays of each sample as lists, or the name of its error."""
    samples: list[Any] = []
    for number in range(len(dataset)):
        try:
            arrays = [np.asarray(dataset[number][name]) for name in NAMES]
            samples.append([array.astype(np.int64).tolist() for array in arrays])
        except Exception as error:
            samples.append(type(error).__name__)
    return samples


def tokenized(tokenizer: Any, conversation: Any) -> Any:
    """The tokens and the targets of a conversation as lists, or the name of an error."""
    try:
        pair = tokenizer.tokenize_conversation(conversation, True, False)
        return [array.tolist() for array in pair]
    except Exception as error:
        return type(error).__name__


def main(clone: str) -> None:
    warnings.simplefilter("ignore")
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    def run(tag: str, name: str) -> Any:
        """A module of the clone."""
        path = f"megatron/{name.replace('.', '/')}.py"
        show = ["git", "-C", clone, "show", f"{tag}:{path}"]
        module = sys.modules[f"megatron.{name}"] = types.ModuleType(name)
        source = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        exec(compile(source, path, "exec"), vars(module))
        return module

    for package in ("", ".datasets", ".tokenizer"):
        sys.modules[f"megatron.training{package}"] = types.ModuleType("package")
    golden: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        path, folder = write_lines(Path(name)), write_tokenizer(Path(name))
        for release, tag in RELEASES.items():
            data = run(tag, "training.datasets.sft_dataset")
            new = run(RELEASES["0.19"], "core.tokenizers.text.libraries.sft_tokenizer").SFTTokenizer
            kinds = dict.fromkeys(FORMATS, new)
            if release == "0.16":
                run(tag, "training.tokenizer.multimodal_tokenizer")
                old = run(tag, "training.tokenizer.sft_tokenizer").SFTTokenizer
                kinds |= dict.fromkeys(MASKED, old)
            lines, split = data.SFTLowLevelDataset(path), data.SFTDataset._split_conversations
            parts = [one for line in LINES for one in split(None, line)]
            for prompt, kind in kinds.items():
                tokenizer = kind(folder, prompt)
                if kind is new:  # as megatron.core's wrapper gives it
                    tokenizer.pad, tokenizer.unique_identifiers = tokenizer.pad_id, {}
                pairs = {
                    json.dumps(one, sort_keys=True): tokenized(tokenizer, one) for one in parts
                }
                golden[f"{release} {prompt}"] = tokenizer.pad, tokenizer.eod, pairs
                options, rows = {**OPTIONS, "tokenizer": tokenizer}, np.arange(len(lines))
                for length, size in LENGTHS:
                    sizes = {"sequence_length": length, "context_parallel_size": size}
                    config = GPTDatasetConfig(**options, **sizes)
                    dataset = data.SFTDataset(lines, path, rows, len(rows), Split.train, config)
                    golden[f"{release} {prompt} {length} {size}"] = samples_of(dataset)
    GOLDEN.write_bytes(gzip.compress(json.dumps(golden).encode(), mtime=0))
    print(GOLDEN, GOLDEN.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1])
