"""The path of a token, from text to batches, on a text that every Python has: its standard library.

Each step is a few lines over the API and prints what it does. The last step proves that a run which
stops halfway and resumes on twice as many ranks sees the same samples as an uninterrupted run.
"""

import ast
import contextlib
import functools
import itertools
import json
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.encoding import Tokenizer
from millrace.encoding.training import train_tokenizer
from millrace.errors import MillraceError
from millrace.feed import Loader
from millrace.jobs import index, tokenize
from millrace.jobs.indexing import format_result
from millrace.run import DatasetConfig, build_datasets

SEQUENCE_LENGTH = 1024
MICRO_BATCH = 4
NUM_SAMPLES = 8192
SEED = 1234
WEIGHTS = {"source": 0.7, "docstrings": 0.3}
EOD = "<|endoftext|>"
VOCABULARY_SIZE = 8192
TRAINING_BYTES = 8_000_000  # text that the tokenizer is trained on


def run_demo(folder: str) -> None:
    """Runs the demo and prints each step; files of an earlier demo in the folder are replaced."""
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)

    prefixes, tokenizer = _make_token_files(home)

    _say(f"4. the order of a training run: {NUM_SAMPLES:,} samples of {SEQUENCE_LENGTH} tokens")
    config = DatasetConfig(
        sequence_length=SEQUENCE_LENGTH,
        seed=SEED,
        num_samples=(NUM_SAMPLES, None, None),
        blend_per_split=[(list(prefixes.values()), list(WEIGHTS.values())), None, None],
        eod_token=tokenizer.eod,
        cache=home / "indices",
    )
    print(textwrap.indent(format_result(index(config)), "   "))

    _say("5. batches for 2 data-parallel ranks, from the first to the last step")
    start = time.perf_counter()
    uninterrupted = _draw_steps(_loaders(config, 2))
    seconds = time.perf_counter() - start
    num_samples = sum(len(step) for step in uninterrupted)
    print(
        f"   {num_samples:,} samples in {seconds:.2f} s: {num_samples / seconds:,.0f} samples/s, "
        f"{num_samples * SEQUENCE_LENGTH / seconds / 1e6:,.0f} M tokens/s on one core"
    )
    _print_document_end(np.concatenate(uninterrupted), tokenizer)

    _say("6. stop halfway, save the state, resume on 4 ranks")
    loaders = _loaders(config, 2)
    first_half = _draw_steps(loaders, num_steps=len(uninterrupted) // 2)
    state_path = home / "state.json"
    state_path.write_text(json.dumps(loaders[0].state_dict(), indent=2))
    loaders = _loaders(config, 4)
    for loader in loaders:
        loader.load_state_dict(json.loads(state_path.read_text()))
    print(f"   stopped and resumed at consumed_samples = {loaders[0].consumed_samples:,}")
    second_half = _draw_steps(loaders)
    if not np.array_equal(np.concatenate(uninterrupted), np.concatenate(first_half + second_half)):
        raise MillraceError("the resumed run differs from the uninterrupted run")
    print(
        f"   {len(first_half)} steps on 2 ranks and {len(second_half)} steps on 4 gave the "
        f"{num_samples:,} samples of the uninterrupted run, token for token"
    )

    _say("What to type next (the command is .venv/bin/millrace if you ran `make demo`)")
    print(f"   millrace inspect {prefixes['docstrings']} --tokenizer {tokenizer.path}")
    command = f"millrace tokenize --input YOUR.jsonl --output-prefix {home}/yours --append-eod"
    print(f"   {command} --tokenizer {tokenizer.path}")
    print(f"   The files are in {home.resolve()}; the code is in {__file__}")


def _make_token_files(home: Path) -> tuple[dict[str, str], Tokenizer]:
    """Steps 1 to 3: the path prefix of each domain's token file, and their tokenizer."""
    _say("1. text: Python's standard library, as two domains")
    texts = _write_corpus(home)

    _say("2. a byte-level BPE tokenizer, trained on it")
    training = train_tokenizer(
        list(texts.values()),
        home / "tokenizer.json",
        vocabulary_size=VOCABULARY_SIZE,
        special_tokens=[EOD],
        max_bytes=TRAINING_BYTES,
    )
    tokenizer = training.tokenizer
    print(
        f"   {tokenizer.vocabulary_size:,} tokens from {training.num_bytes / 1e6:.1f} MB of text "
        f"in {training.seconds:.1f} s   {tokenizer.path}"
    )

    _say(f"3. tokens by {tokenizer.encoder_name}: each domain as a Megatron-LM token file")
    prefixes = {}
    for name, path in texts.items():
        result = tokenize([str(path)], str(home / name), tokenizer, append_eod=True, restart=True)
        prefixes[name] = result.prefixes["text"]
        rate = result.num_bytes / 1e6 / result.seconds
        print(
            f"   {name:<11}{result.num_documents:>8,} documents {result.num_tokens['text']:>12,} "
            f"tokens {rate:>8.1f} MB/s   {prefixes[name]}.bin/.idx"
        )
    return prefixes, tokenizer


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _write_corpus(home: Path) -> dict[str, Path]:
    """Writes a JSONL file of source files, and one of their docstrings."""
    sources = list(_standard_library())
    docstrings = [text for source in sources for text in _docstrings(source)]
    paths = {}
    for name, texts in (("source", sources), ("docstrings", docstrings)):
        paths[name] = path = home / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        size = path.stat().st_size / 1e6
        print(f"   {name:<11}{len(texts):>8,} documents {size:>10.1f} MB   {path}")
    return paths


def _standard_library() -> Iterator[str]:
    """The source files of the standard library, sorted by path, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    for path in sorted(root.rglob("*.py")):
        if others.isdisjoint(path.relative_to(root).parts):
            # A few files have other encodings; the demo can do without them.
            with contextlib.suppress(UnicodeDecodeError, OSError):
                yield path.read_text(encoding="utf-8")


def _docstrings(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old files
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # some files are templates or deliberately broken
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text.encode(errors="replace").decode()  # escapes can give lone surrogates


def _loaders(config: DatasetConfig, num_ranks: int) -> list[Loader]:
    dataset = build_datasets(config).train
    assert dataset is not None
    make = functools.partial(Loader, dataset, micro_batch_size=MICRO_BATCH)
    ranks = range(num_ranks)
    return [make(data_parallel_rank=rank, data_parallel_size=num_ranks) for rank in ranks]


def _draw_steps(loaders: list[Loader], num_steps: int | None = None) -> list[NDArray[Any]]:
    """The samples of all ranks at each step, in order: a row has its tokens and its last label."""
    steps = []
    for batches in itertools.islice(zip(*loaders, strict=True), num_steps):
        rows = [np.hstack([batch["tokens"], batch["labels"][:, -1:]]) for batch in batches]
        steps.append(np.concatenate(rows).astype(np.uint16))
    return steps


def _print_document_end(samples: NDArray[Any], tokenizer: Tokenizer) -> None:
    """Decodes the text around the first end of a document in the first sample that has one."""
    number = int(np.argmax((samples == tokenizer.eod).any(axis=1)))
    end = int(np.argmax(samples[number] == tokenizer.eod))
    print(f"   the end of a document in sample {number}:")
    text = tokenizer.decode(samples[number, max(end - 40, 0) : end + 40])
    text = text.replace(EOD, f"\n==== {EOD} ====\n")
    print(textwrap.indent(text, "   | ", lambda line: True))
