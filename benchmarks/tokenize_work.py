"""The work of `bench_tokenize.py`: the input, and the commands of both sides.

    python tokenize_work.py encode TOKENIZER FILE START STOP
    python tokenize_work.py datatrove FOLDER OUTPUT TOKENIZER WORKERS

The first loads the lines [START, STOP) of a JSONL file, prints a line, waits for a line on stdin,
encodes the texts, and prints the seconds. The second runs datatrove's tokenising stage, in the
environment of datatrove: this module imports millrace where it needs it.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

BATCH_BYTES = 1 << 20  # of text in a call of `encode_batch`, as in the job
ONE_THREAD = {
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "FASTOKENS_BPE_THREADS": "1",
}
EOD = "<|endoftext|>"
ROOT = Path(__file__).resolve().parent.parent


# ---- the input ----


def add_inputs(arguments: argparse.ArgumentParser) -> None:
    shared = ROOT.parent / "shared"
    corpus, tokenizer = shared / "corpus", shared / "vocab" / "gpt2_tokenizer.json"
    arguments.add_argument("--corpus", type=Path, default=corpus, metavar="DIR", help="JSONL files")
    help_ = "a tokenizer.json"
    arguments.add_argument("--tokenizer", type=Path, default=tokenizer, metavar="FILE", help=help_)


def write_inputs(folder: Path, options: argparse.Namespace, num_bytes: int) -> tuple[Path, Path]:
    """JSONL of texts, each once, and a tokenizer.json, which is trained if there is none."""
    source, tokenizer = folder / "input.jsonl", options.tokenizer
    write_input(source, options.corpus if options.corpus.is_dir() else None, num_bytes)
    if not tokenizer.exists():
        tokenizer = folder / "tokenizer.json"
        train_tokenizer(source, tokenizer)
    return source, tokenizer


def write_input(path: Path, corpus: Path | None, num_bytes: int) -> None:
    """Writes JSONL of about this size: every text once, in random order.

    Args:
        path: The file.
        corpus: Folder of JSONL files with the key `text`; None: none.
        num_bytes: Size. If the corpus is smaller, sources of the standard library and of installed
            packages are added.
    """
    texts = corpus_texts(corpus) if corpus else iter(())
    seen: set[bytes] = set()
    lines, size = [], 0
    for text in itertools.chain(texts, source_texts()):
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        if digest in seen:
            continue
        seen.add(digest)
        lines.append(json.dumps({"id": len(lines), "text": text}, ensure_ascii=False) + "\n")
        size += len(lines[-1].encode())
        if size >= num_bytes:
            break
    random.Random(1).shuffle(lines)
    path.write_text("".join(lines), encoding="utf-8", newline="")


def texts_of(path: str | Path) -> list[str]:
    with open(path, "rb") as lines:
        return [json.loads(line)["text"] for line in lines]


def documents_of(path: Path, mean: float) -> list[str]:
    """The texts of a file, cut into documents of this many characters on average, log-normal."""
    draw, sigma, documents = random.Random(1), 0.8, []
    for text in texts_of(path):
        while text:
            size = max(int(draw.lognormvariate(-(sigma**2) / 2, sigma) * mean), 20)
            documents.append(text[:size])
            text = text[size:]
    draw.shuffle(documents)
    return documents


def corpus_texts(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl*")):
        for line in decompressed(path).splitlines():
            yield json.loads(line)["text"]


def decompressed(path: Path) -> bytes:
    if path.suffix != ".zst":
        return path.read_bytes()
    return zstd().decompress(path.read_bytes())  # type: ignore[no-any-return]


def zstd():  # type: ignore[no-untyped-def]
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def source_texts() -> Iterator[str]:
    """Python sources of the standard library, then of the packages of this environment."""
    for name in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(name)).rglob("*.py")):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text = path.read_text(encoding="utf-8")
                if len(text) > 200:
                    yield text


def write_part(source: Path, path: Path, num_bytes: int) -> None:
    """Writes the first lines of a file, about this size."""
    with open(source, "rb") as lines, open(path, "wb") as part:
        while part.tell() < num_bytes and (line := lines.readline()):
            part.write(line)


def write_parts(source: Path, folder: Path, count: int) -> None:
    """Cuts a JSONL file into files of equally many lines; datatrove cuts no files."""
    folder.mkdir()
    lines = source.read_bytes().splitlines(keepends=True)
    for number in range(count):
        (folder / f"{number}.jsonl").write_bytes(b"".join(lines[number::count]))


def write_parquet(source: Path, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(source, "rb") as lines:
        documents = [json.loads(line) for line in lines]
    columns = {name: [document[name] for document in documents] for name in ("id", "text")}
    pq.write_table(pa.table(columns), path, row_group_size=1000)


def repeat_input(source: Path, path: Path, times: int) -> None:
    """Writes a file several times over."""
    with open(path, "wb") as target:
        for _ in range(times):
            with open(source, "rb") as file:
                shutil.copyfileobj(file, target)


def write_transformers_folder(tokenizer: Path, folder: Path) -> None:
    """A folder from which Megatron-LM's script loads a tokenizer.json without a network."""
    folder.mkdir()
    shutil.copy(tokenizer, folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def train_tokenizer(source: Path, path: Path) -> None:
    """A byte-level BPE of 32,000 tokens, where there is no GPT-2 vocabulary."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False
    )
    with open(source, encoding="utf-8") as lines:
        texts = (json.loads(line)["text"] for line in itertools.islice(lines, 2000))
        tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


# ---- the sides ----


def millrace_command(
    inputs: Sequence[Path], prefix: Path, tokenizer: Path, workers: int
) -> list[str]:
    command = [sys.executable, "-m", "millrace", "tokenize", "--input", *map(str, inputs)]
    command += ["--output-prefix", str(prefix), "--tokenizer", str(tokenizer)]
    return [*command, "--append-eod", "--restart", "--workers", str(workers)]


def megatron_command(
    script: Path, python: str, source: Path, prefix: Path, model: Path, *options: str
) -> list[str]:
    command = [python, "-W", "ignore", str(script), "--input", str(source)]
    command += ["--output-prefix", str(prefix), "--append-eod"]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
    return [*command, *options]


def datatrove_command(
    python: str, folder: Path, output: Path, tokenizer: Path, workers: int
) -> list[str]:
    arguments = [str(folder), str(output), str(tokenizer), str(workers)]
    return [python, str(Path(__file__).resolve()), "datatrove", *arguments]


def encode_seconds(tokenizer: Path, source: Path, processes: int) -> float:
    """Seconds in which that many processes, each with an equal part of the texts, encode them."""
    with open(source, "rb") as file:
        num_lines = sum(1 for _ in file)
    bounds = [num_lines * i // processes for i in range(processes + 1)]
    command = [sys.executable, str(Path(__file__).resolve()), "encode", str(tokenizer), str(source)]
    workers = [
        subprocess.Popen(
            [*command, str(start), str(stop)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ONE_THREAD},
        )
        for start, stop in itertools.pairwise(bounds)
    ]
    for worker in workers:
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            raise RuntimeError("a process that encodes has failed")
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    return max(float(worker.communicate()[0]) for worker in workers)


def encode(tokenizer_path: str, source: str, start: int, stop: int) -> None:
    from millrace.encoding import Tokenizer

    tokenizer = Tokenizer(tokenizer_path)
    batches: list[list[str]] = []
    size = BATCH_BYTES
    with open(source, "rb") as lines:
        for line in itertools.islice(lines, start, stop):
            if size >= BATCH_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(json.loads(line)["text"])
            size += len(line)
    tokenizer.encode_batch(["ready"])
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    for batch in batches:
        tokenizer.encode_batch(batch)
    print(time.perf_counter() - begin)


def run_datatrove(folder: str, output: str, tokenizer: str, workers: str) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    stage = DocumentTokenizer(output, tokenizer, eos_token=EOD, shuffle_documents=False)
    count = int(workers)
    LocalPipelineExecutor(
        [JsonlReader(folder), stage], tasks=count, workers=count, logging_dir=f"{output}/logs"
    ).run()


if __name__ == "__main__":
    if sys.argv[1] == "encode":
        encode(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        run_datatrove(*sys.argv[2:])
