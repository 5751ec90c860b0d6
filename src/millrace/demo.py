"""From text to batches, on a text that every Python has: its standard library.

Each step is a few lines over the API and prints what it does. The last two prove that a run which
stops halfway and resumes on twice as many ranks draws the samples of an uninterrupted run, and that
a run which changes its plan halfway keeps its past.
"""

import itertools
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.encoding.training import train_tokenizer
from millrace.errors import MillraceError
from millrace.feed import Loader
from millrace.jobs import index, tokenize
from millrace.jobs.indexing import format_result
from millrace.run import DatasetConfig, InstantConfig, build_datasets

SEQUENCE_LENGTH = 1024
NUM_SAMPLES = 8192
TRAINING_BYTES = 8_000_000  # text that the tokenizer is trained on
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # of documents, and of chats


def run_demo(folder: str) -> None:
    """Runs the demo and prints each step; replaces the files of an earlier one in the folder."""
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)

    _say("1. text: Python's standard library, as two domains")
    texts = _write_corpus(home)

    _say("2. a byte-level BPE tokenizer, trained on it")
    tokenizer = train_tokenizer(
        list(texts.values()),
        home / "tokenizer.json",
        vocabulary_size=8192,
        special_tokens=SPECIAL_TOKENS,
        max_bytes=TRAINING_BYTES,
        replace=True,
    ).tokenizer
    print(f"   {tokenizer.vocabulary_size:,} tokens   {tokenizer.path}")

    _say(f"3. tokens by {tokenizer.encoder_name}: each domain as a Megatron-LM token file")
    prefixes = []
    for name, path in texts.items():
        result = tokenize([path], home / name, tokenizer, append_eod=True, restart=True)
        prefixes.append(result.prefixes["text"])
        rate = result.num_bytes / 1e6 / result.seconds
        print(
            f"   {name:<11}{result.num_documents:>8,} documents {result.num_tokens['text']:>12,} "
            f"tokens {rate:>8.1f} MB/s   {prefixes[-1]}.bin/.idx"
        )

    _say(f"4. the order of a training run: {NUM_SAMPLES:,} samples of {SEQUENCE_LENGTH} tokens")
    config = DatasetConfig(
        sequence_length=SEQUENCE_LENGTH,
        seed=1234,
        num_samples=(NUM_SAMPLES, None, None),
        blend_per_split=[(prefixes, [0.3, 0.7]), None, None],
        eod_token=tokenizer.eod,
        cache=home / "indices",
    )
    print(format_result(index(config)))

    _draw_batches(config, home / "state.json")
    _change_plan(dict(zip(texts, prefixes, strict=True)))

    _say("What to type next (the command is .venv/bin/millrace if you ran `make demo`)")
    print(f"   millrace inspect {prefixes[0]} --tokenizer {tokenizer.path}")
    print(f"   The files are in {home.resolve()}; the code is in {__file__}")


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _write_corpus(home: Path) -> dict[str, Path]:
    """Writes a JSONL file of the library's modules, and one of those in its packages."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = {}
    for name, pattern in (("modules", "*.py"), ("packages", "*/**/*.py")):
        sources = [
            source.read_text(encoding="utf-8", errors="ignore")
            for source in sorted(root.glob(pattern))
            if others.isdisjoint(source.relative_to(root).parts) and source.is_file()
        ]
        paths[name] = path = home / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sources))
        size = path.stat().st_size / 1e6
        print(f"   {name:<11}{len(sources):>8,} documents {size:>10.1f} MB   {path}")
    return paths


def _draw_batches(config: DatasetConfig, state: Path) -> None:
    _say("5. batches for 2 data-parallel ranks, from the first to the last step")
    start = time.perf_counter()
    uninterrupted = _draw_steps(_loaders(config, 2))
    seconds = time.perf_counter() - start
    num_samples = sum(len(step) for step in uninterrupted)
    print(
        f"   {num_samples:,} samples in {seconds:.2f} s: {num_samples / seconds:,.0f} samples/s, "
        f"{num_samples * SEQUENCE_LENGTH / seconds / 1e6:,.0f} M tokens/s on one core"
    )

    _say("6. stop halfway, save the state, resume on 4 ranks")
    loaders = _loaders(config, 2)
    first_half = _draw_steps(loaders, num_steps=len(uninterrupted) // 2)
    state.write_text(json.dumps(loaders[0].state_dict(), indent=2))
    loaders = _loaders(config, 4, json.loads(state.read_text()))
    print(f"   stopped and resumed at consumed_samples = {loaders[0].consumed_samples:,}")
    second_half = _draw_steps(loaders)
    if not np.array_equal(np.concatenate(uninterrupted), np.concatenate(first_half + second_half)):
        raise MillraceError("the resumed run differs from the uninterrupted run")
    print(
        f"   {len(first_half)} steps on 2 ranks and {len(second_half)} steps on 4 gave the "
        f"{num_samples:,} samples of the uninterrupted run, token for token"
    )


def _change_plan(prefixes: dict[str, str]) -> None:
    _say("7. in the instant order: extend the run, re-weight it halfway, skip a stretch")
    half, skip = NUM_SAMPLES // 2, (NUM_SAMPLES * 5 // 8, NUM_SAMPLES * 5 // 8 + 64)
    pairs = zip(prefixes.items(), (0.3, 0.7), strict=True)
    sources = {name: {"prefix": prefix, "weight": one} for (name, prefix), one in pairs}
    run: Any = {"sequence_length": SEQUENCE_LENGTH, "seed": 1234, "sources": sources}
    phases = [{"until": half}, {"weights": dict.fromkeys(prefixes, 0.5)}]
    old = InstantConfig(**run, num_samples=(half, 0, 0))
    new = InstantConfig(**run, num_samples=(NUM_SAMPLES, 0, 0), phases=phases, skips=[skip])
    loaders = _loaders(old, 2)
    past = _draw_steps(loaders)
    if not np.array_equal(past, _draw_steps(_loaders(new, 2), len(past))):
        raise MillraceError("the new plan has another past than the old one")
    num_others = sum(map(len, _draw_steps(_loaders(new, 2, loaders[0].state_dict()))))
    print(
        f"   {half:,} samples of the old plan: the new one has the same, token for token.\n"
        f"   It resumes from their state with {num_others:,} others, half of each domain, without "
        f"samples\n   {skip[0]:,} to {skip[1] - 1:,}"
    )


def _loaders(
    config: DatasetConfig | InstantConfig, num_ranks: int, state: Any = None
) -> list[Loader]:
    """The loaders of all ranks, at their start or at a saved state."""
    dataset: Any = build_datasets(config).train
    loaders = [
        Loader(dataset, micro_batch_size=4, data_parallel_rank=rank, data_parallel_size=num_ranks)
        for rank in range(num_ranks)
    ]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    return loaders


def _draw_steps(loaders: list[Loader], num_steps: int | None = None) -> list[NDArray[Any]]:
    """The samples of all ranks at each step, in order: a row has its tokens and its last label."""
    steps = []
    for batches in itertools.islice(zip(*loaders, strict=True), num_steps):
        rows = [np.hstack([batch["tokens"], batch["labels"][:, -1:]]) for batch in batches]
        steps.append(np.concatenate(rows).astype(np.uint16))
    return steps
