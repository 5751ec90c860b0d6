"""Megatron-LM's own preprocess_data.py and `millrace tokenize` on a whole corpus: equal bytes.

    python -m tests.jobs.preprocess_corpus --megatron CHECKOUT --python PYTHON \\
        --corpus ../shared/corpus --vocab ../shared/vocab [--limit-mb 5] [--only gpt2]

CHECKOUT is a checkout of Megatron-LM, and PYTHON the interpreter of an environment in which its
`tools/preprocess_data.py` runs: it needs torch, transformers, nltk, sentencepiece and triton.
CORPUS is a folder of JSONL files with the keys `text` and `source`; VOCAB holds
gpt2_tokenizer.json, dolma2_tokenizer.json and mistral_v3.model. Each vocabulary runs with and
without EOD, with several keys, in partitions of both kinds, and with sentences. Both sides find the
same Punkt model, which is trained on the corpus, in the home folder that they are given.

The script takes a minute and more for a case of the whole corpus. --cache keeps what it wrote, for
the next comparison; --script-only fills the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.jobs.preprocess_cases import SUFFIXES, Case, Reference, difference, shared_options

WORKERS = 2
TIMEOUT = 3600  # seconds; when a worker of the script fails, the script waits for ever
PUNKT_CHARACTERS = 3_000_000
PUNKT_FILES = ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab")


# ---- Megatron-LM's script ----


def run_script(
    megatron: Path,
    python: str,
    *,
    source: Path,
    prefix: Path,
    tokenizer: Sequence[str],
    options: Sequence[str],
    workers: int = WORKERS,
    home: Path | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Runs tools/preprocess_data.py.

    Args:
        megatron: The checkout.
        python: Interpreter of the script's environment.
        source: A JSONL file. The script writes its partitions and sentences beside it.
        prefix: Path prefix of the output.
        tokenizer: Values of `--tokenizer-type` and `--tokenizer-model`.
        options: Further options.
        workers: Value of `--workers`, a multiple of the number of partitions.
        home: Home folder, in whose `nltk_data` NLTK finds its models.
        timeout: Seconds after which the script counts as failed.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {"HOME": str(home)} if home else {}
    environment.pop("NLTK_DATA", None)  # with it, the script asks for pickles, which NLTK refuses
    command = [python, str(megatron / "tools" / "preprocess_data.py")]
    command += ["--input", str(source), "--output-prefix", str(prefix)]
    command += ["--tokenizer-type", tokenizer[0], "--tokenizer-model", tokenizer[1]]
    command += ["--workers", str(workers), "--log-interval", "1000000", *options]
    # In one partition, the first run with sentences only splits, and the second one encodes.
    is_split = "--split-sentences" in options
    for _ in range(2 if is_split and "--partitions" not in options else 1):
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout
        )
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}:\n{result.stderr[-2000:]}")


def case_runner(megatron: Path, python: str) -> Callable[[Path, Path, Reference, Case], None]:
    """Runs the script on a random case of `preprocess_cases`."""

    def run(source: Path, prefix: Path, reference: Reference, case: Case) -> None:
        options = shared_options(case)
        if not case.add_special_tokens and reference.megatron_type == "HuggingFaceTokenizer":
            options.append("--tokenizer-hf-no-include-special-tokens")
        run_script(
            megatron,
            python,
            source=source,
            prefix=prefix,
            tokenizer=(reference.megatron_type, str(reference.megatron_model)),
            options=options,
            workers=case.partitions,
            timeout=120,
        )

    return run


# ---- the cases ----


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary under both names.

    Attributes:
        path: Argument of `millrace tokenize --tokenizer`.
        megatron_type: Argument of the script's `--tokenizer-type`.
        megatron_model: Argument of the script's `--tokenizer-model`.
    """

    path: Path
    megatron_type: str
    megatron_model: Path


CASES: dict[str, list[str]] = {
    "plain": [],
    "EOD": ["--append-eod"],
    "two keys": ["--append-eod", "--json-keys", "text", "source"],
    "2 partitions": ["--append-eod", "--partitions", "2"],
    "3 partitions": ["--partitions", "3"],
    "2 sequential partitions": ["--partitions", "2", "--keep-sequential-samples"],
    "3 sequential partitions": [
        *("--append-eod", "--json-keys", "source", "text"),
        *("--partitions", "3", "--keep-sequential-samples"),
    ],
    "sentences": ["--append-eod", "--split-sentences"],
    "sentences with newlines": ["--split-sentences", "--keep-newlines"],
    "sentences in partitions": ["--append-eod", "--split-sentences", "--partitions", "2"],
}


def vocabularies(folder: Path, home: Path) -> dict[str, Vocabulary]:
    """The vocabularies; the Hugging Face ones in `transformers` folders under `home`."""
    found = {}
    for name in ("gpt2", "dolma2"):
        model = home / name
        model.mkdir()
        shutil.copy(folder / f"{name}_tokenizer.json", model / "tokenizer.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        found[name] = Vocabulary(model, "HuggingFaceTokenizer", model)
    model = folder / "mistral_v3.model"
    found["mistral"] = Vocabulary(model, "SentencePieceTokenizer", model)
    found["mistral as Llama 2"] = Vocabulary(model, "Llama2Tokenizer", model)
    return found


def write_corpus(folder: Path, path: Path, limit: int | None) -> None:
    """Writes the lines of all JSONL files of a folder to one file, the same share of each."""
    files = sorted(p for p in folder.iterdir() if ".jsonl" in p.name)
    with open(path, "wb") as output:
        for file in files:
            lines = read_lines(file)
            total = sum(map(len, lines))
            share = total if limit is None else limit // len(files)
            written = 0
            for line in lines:
                if written and written + len(line) > share:
                    break
                output.write(line if line.endswith(b"\n") else line + b"\n")
                written += len(line)


def read_lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    if path.suffix == ".zst":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        data = zstd.decompress(data)
    return data.splitlines(keepends=True)  # JSON has no other line ends outside of its strings


def install_punkt(corpus: Path, home: Path) -> None:
    """Trains Punkt on texts of the corpus, and puts it where NLTK looks: under the home folder."""
    from nltk.tabdata import TabEncoder
    from nltk.tokenize.punkt import PunktTrainer

    lines = corpus.read_bytes().split(b"\n")[:-1]
    random.Random(1).shuffle(lines)
    texts, size = [], 0
    for line in lines:
        document = json.loads(line)
        if document.get("lang", "en") in ("en", "mul"):
            texts.append(document["text"][:50_000])
            size += len(texts[-1])
        if size > PUNKT_CHARACTERS:
            break
    trainer = PunktTrainer()
    trainer.train("\n\n".join(texts), verbose=False, finalize=True)
    parameters = trainer.get_params()
    folder = home / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    encoder = TabEncoder()
    contents = [
        encoder.tups2tab(parameters.collocations),
        encoder.set2txt(parameters.sent_starters),
        encoder.set2txt(parameters.abbrev_types),
        encoder.ivdict2tab(parameters.ortho_context),
    ]
    for name, content in zip(PUNKT_FILES, contents, strict=True):
        (folder / name).write_text(content, encoding="utf-8", newline="")


def run_millrace(
    vocabulary: Vocabulary, options: Sequence[str], source: Path, home: Path, prefix: Path
) -> None:
    command = [sys.executable, "-m", "millrace", "tokenize", "--input", str(source)]
    command += ["--output-prefix", str(prefix), "--tokenizer", str(vocabulary.path), *options]
    command += ["--workers", str(WORKERS)]
    environment = {**os.environ, "HOME": str(home)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{result.stderr[-2000:]}")


def script_output(
    vocabulary: Vocabulary,
    options: Sequence[str],
    corpus: Path,
    home: Path,
    folder: Path,
    megatron: Path,
    python: str,
) -> None:
    """Fills a folder with the output of the script, unless an earlier run has done so."""
    if folder.exists():
        return
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    source = part / "corpus.jsonl"  # the script writes its intermediate files beside it
    os.link(corpus, source)
    run_script(
        megatron,
        python,
        source=source,
        prefix=part / "out",
        tokenizer=(vocabulary.megatron_type, str(vocabulary.megatron_model)),
        options=options,
        workers=3 if "3" in options else WORKERS,
        home=home,
    )
    for path in part.glob("corpus*.jsonl"):
        path.unlink()
    part.rename(folder)


def compare(ours: Path, theirs: Path, options: Sequence[str]) -> int:
    """Number of bytes of the pairs in two folders; AssertionError if they differ."""
    level = "sentence" if "--split-sentences" in options else "document"
    keys = [key for key in ("text", "source") if key in options] or ["text"]
    num_bytes = 0
    for name in (f"out_{key}_{level}" for key in keys):
        for suffix in SUFFIXES:
            data = (ours / f"{name}{suffix}").read_bytes()
            if data != (theirs / f"{name}{suffix}").read_bytes():
                raise AssertionError(difference(ours / name, theirs / name)[:1000])
            num_bytes += len(data)
    return num_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--megatron", type=Path, required=True, help="checkout of Megatron-LM")
    add("--python", default=sys.executable, help="interpreter of the script's environment")
    add("--corpus", type=Path, required=True, help="folder of JSONL files")
    add("--vocab", type=Path, required=True, help="folder of the vocabularies")
    add("--limit-mb", type=float, help="size of the part of the corpus (default: all)")
    add("--vocabularies", nargs="+", default=[], help="some of them (default: all)")
    add("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="default: all")
    add("--cache", type=Path, help="folder of the script's output, for the next comparison")
    add("--script-only", action="store_true", help="fill the cache, and compare nothing")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(dir=options.cache) as name:
        folder = Path(name)
        home = folder / "home"
        home.mkdir()
        corpus = folder / "corpus.jsonl"
        write_corpus(options.corpus, corpus, options.limit_mb and int(options.limit_mb * 1e6))
        install_punkt(corpus, home)
        cache = options.cache or folder / "theirs"
        chosen = vocabularies(options.vocab, home)
        for label in options.vocabularies or chosen:
            for case in options.cases:
                place = f"{corpus.stat().st_size} {label} {case}"
                ours, theirs = folder / "ours", cache / place.replace(" ", "-")
                arguments = chosen[label], CASES[case], corpus, home
                start = time.monotonic()
                script_output(*arguments, theirs, options.megatron, options.python)
                seconds = time.monotonic() - start
                if options.script_only:
                    print(f"{place}: {seconds:.0f} s", flush=True)
                    continue
                shutil.rmtree(ours, ignore_errors=True)
                ours.mkdir()
                try:
                    run_millrace(*arguments, ours / "out")
                    num_bytes = compare(ours, theirs, CASES[case])
                    print(f"{place}: equal, {num_bytes:,} bytes", flush=True)
                except (AssertionError, RuntimeError) as error:
                    failures += 1
                    print(f"{place}: NOT EQUAL: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
