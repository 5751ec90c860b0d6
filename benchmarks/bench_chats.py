"""Chats: tokens per second with proven masks, against Megatron-LM's SFT dataset.

    MEGATRON_LM=CHECKOUT QWEN3_TEMPLATE=FILE .venv/bin/python benchmarks/bench_chats.py

CHECKOUT is Megatron-LM 0.19, of which two files are run on the installed megatron-core, `datasets`
and transformers. FILE is Qwen3's chat template for training, as in the package trl.
"""

import importlib.util
import itertools
import json
import os
import re
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenize_work as work
from common import HIGHER, Report, Row, alternate, finish, number_of_runs, parser, quiet_megatron
from processes import call

from millrace import Loader
from millrace.chats import ChatEncoder
from millrace.encoding import Tokenizer
from millrace.online import StreamDataset, TextDataset, open_rows

TEXT_BYTES, CHARACTERS = 60_000_000, 2600  # of the texts, and of a conversation: about 700 tokens
COUNT, SLOW_COUNT, QUICK_COUNT = 4000, 400, 100  # conversations
LINES, QUICK_LINES = 30, 2  # of theirs, each with about 10 conversations
EPOCHS = 40  # from the cache
CAPACITY = 8192
SPECIAL = [work.EOD, "<unk>", "<pad>", "<|im_start|>", "<|im_end|>"]
SPECIAL += [f"<SPECIAL_{number}>" for number in (10, 11, 12, 233)]
CHATML = (
    "{% for one in messages %}<|im_start|>{{ one['role'] + '\n' + one['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARS = {"ChatML": 10, "Qwen3": 4, "masked": 20, "reference encoder": 1, "cache": 50}
MEGATRON, QWEN3 = os.environ.get("MEGATRON_LM"), os.environ.get("QWEN3_TEMPLATE")
DATASET = "megatron/training/datasets/sft_dataset.py"
TOKENIZER = "megatron/core/tokenizers/text/libraries/sft_tokenizer.py"

NOTES = [
    "Conversations of a system turn and 1 to 3 questions with answers, log-normal, about 700 "
    "tokens on average, of the texts of `bench_tokenize.py` that have no '<'. Padding does not "
    "count. Every run is a fresh process, with one thread that renders and encodes.",
    "Theirs: `SFTDataset` of 0.19 and torch's `default_collate`, a line a batch; a line holds the "
    "conversations that fit into 8,192 tokens, one after the other. It gets the first 30 lines, "
    "we all {count:,} conversations. Both have them in memory. The tokens of the first line were "
    "compared: equal.",
    "Ours: `ChatEncoder`, with two routes or more for each mask, `StreamDataset`, packed to 8,192 "
    "tokens, and `Loader`. Cache: packs of a `TextDataset` whose cache is there. All trained on "
    "the same number of tokens. Both sides have the same template.",
    "Masked: their format nemotron-nano-v2; in the others they train on all tokens. Reference "
    "encoder: the vocabulary with the normaliser NFKC; 400 conversations.",
]


def main() -> None:
    work.add_inputs(arguments := parser(__doc__ or ""))
    options = arguments.parse_args()
    if not MEGATRON or not importlib.util.find_spec("datasets"):
        print("left out: it needs MEGATRON_LM, and the package datasets")
        return  # results of an earlier run stay
    count, lines = (QUICK_COUNT, QUICK_LINES) if options.quick else (COUNT, LINES)
    notes, runs = [note.format(count=count) for note in NOTES], number_of_runs(options)
    report = Report("Chats: tokens per second", notes, runs, peer="Megatron-LM")
    masked = module(TOKENIZER).nemotron_nano_v2_custom_template
    templates = {"ChatML": CHATML, "masked": masked, "reference encoder": CHATML}
    templates |= {"Qwen3": Path(QWEN3).read_text()} if QWEN3 else {}
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        source, tokenizer = work.write_inputs(Path(name), options, TEXT_BYTES)
        rows = conversations(work.documents_of(source, CHARACTERS))[:count]
        for label, template in templates.items():
            print(label, flush=True)
            is_slow = label == "reference encoder"
            model = f"{name}/{label}"
            write_model(model, tokenizer, template, has_normalizer=is_slow)
            some = rows[:SLOW_COUNT] if is_slow else rows
            report.rows += compare(label, model, some, lines, runs)
        finish(report, options)


def module(path: str) -> Any:
    """A module of the checkout of Megatron-LM, which imports the installed megatron-core."""
    spec: Any = importlib.util.spec_from_file_location(Path(path).stem, Path(str(MEGATRON), path))
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


# ---- the inputs ----


def conversations(texts: list[str]) -> list[dict[str, Any]]:
    """A row of each text that templates take for nothing else: questions, and longer answers."""
    limit, special = 3 * CHARACTERS, re.compile("<|/think")
    texts = [one for one in texts if len(one.encode()) <= limit and not special.search(one)]
    rows = []
    for number, text in enumerate(texts):
        thirds = np.linspace(0, len(text), 3 * (number % 3 + 1) + 1).astype(int)
        cuts = itertools.pairwise(np.delete(thirds, slice(2, None, 3)))
        contents = [text[start:stop].strip() or "Yes." for start, stop in cuts]
        turns = [("system", "Answer."), *zip(itertools.cycle(("user", "assistant")), contents)]
        rows.append({"messages": [{"role": role, "content": one} for role, one in turns]})
    return rows


def write_model(folder: str, path: Path, template: str, *, has_normalizer: bool) -> None:
    """Writes a folder of transformers, with the special tokens of all templates."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([tokenizers.AddedToken(one, normalized=False) for one in SPECIAL])
    if has_normalizer:
        tokenizer.normalizer = tokenizers.normalizers.NFKC()
    os.mkdir(folder)
    tokenizer.save(f"{folder}/tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    settings |= {"eos_token": work.EOD, "pad_token": "<pad>"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))


# ---- the comparison ----


def compare(
    label: str, model: str, rows: list[dict[str, Any]], num_lines: int, runs: int
) -> list[Row]:
    encoded = ChatEncoder(Tokenizer(model)).encode(rows)
    if encoded.problems or encoded.trained is None:
        raise RuntimeError(f"conversations that cannot be compared: {encoded.problems}")
    lines: list[list[Any]] = []
    before: list[int] = []  # tokens before each line
    for row, start, end in zip(rows, [0, *encoded.ends[:-1]], encoded.ends, strict=True):
        if not lines or end - before[-1] > CAPACITY:
            lines.append([])
            before.append(int(start))
        lines[-1] += row["messages"]
    Path(model, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    num_trained, num_tokens = int(encoded.trained.sum()), len(encoded.tokens)

    def theirs() -> float:
        form = "nemotron-nano-v2" if label == "masked" else "default"
        first = encoded.tokens[: before[1]]
        seconds = call(megatron_seconds, model, form, lines[: num_lines + 1], first)
        return (before[num_lines + 1] - before[1]) / seconds

    def ours(epochs: int) -> float:
        seconds, trained = call(our_seconds, model, epochs)
        if trained != epochs * num_trained:
            raise RuntimeError(f"{label}: {trained} targets, not {num_trained} x {epochs}")
        return epochs * num_tokens / seconds

    cache = {"cache": partial(ours, EPOCHS)} if label == "ChatML" else {}
    results = alternate(runs, {"theirs": theirs, label: partial(ours, 1), **cache})
    compared = partial(Row.compare, peer=results.pop("theirs"), unit="tokens/s", better=HIGHER)
    return [compared(name, values, bar=BARS[name]) for name, values in results.items()]


def our_seconds(model: str, epochs: int) -> tuple[float, int]:
    """The seconds of samples of all conversations, and how many tokens these train on."""
    rows, encoder = open_rows(f"{model}/rows.jsonl", cache=model), ChatEncoder(Tokenizer(model))
    encoder.encode(rows.rows(range(8)))
    packs: Any = {"sequence_length": CAPACITY, "add_extra_token": False, "boundaries": "documents"}
    if epochs > 1:
        cached = partial(TextDataset, rows, encoder, seed=1, order="packs", cache=model, **packs)
        dataset: Any = cached(num_samples=epochs * len(cached()))
    else:
        stream = rows.rows(range(len(rows)))  # in memory, as theirs are
        dataset = StreamDataset(stream, encoder, packing="packs", **packs)
    loader, start = Loader(dataset, micro_batch_size=1), time.perf_counter()
    trained = sum(int(batch["loss_mask"].sum()) for batch in loader)
    return time.perf_counter() - start, trained


def megatron_seconds(model: str, form: str, lines: list[Any], first: Any) -> float:
    """The seconds of samples of all lines but the first, whose tokens are compared."""
    import torch

    torch.set_num_threads(1)
    with quiet_megatron():
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
        from megatron.core.datasets.utils import Split
    tokenizer = module(TOKENIZER).SFTTokenizer(model, form)
    # The dataset reads `pad`, which this class lacks: a wrapper of Megatron-LM's gives it.
    tokenizer.pad, tokenizer.unique_identifiers = tokenizer.pad_id, {}
    names = ("reset_position_ids", "reset_attention_mask", "create_attention_mask", "eod_mask_loss")
    options: Any = {**dict.fromkeys(names, False), "context_parallel_size": 1, "random_seed": 1}
    config = GPTDatasetConfig(tokenizer=tokenizer, sequence_length=CAPACITY, **options)
    parts = lines, None, np.arange(len(lines)), len(lines), Split.train, config
    dataset = module(DATASET).SFTDataset(*parts)
    if not np.array_equal(dataset[0]["tokens"][: len(first)], first):
        raise RuntimeError("the tokens of the first line differ")
    start = time.perf_counter()
    for number in range(1, len(lines)):
        torch.utils.data.default_collate([dataset[number]])
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
