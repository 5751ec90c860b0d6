"""Random cases of `millrace tokenize` against a plain restatement of Megatron-LM's script.

    python -m tests.jobs.preprocess_cases --cases 500 --seed 1
    python -m tests.jobs.preprocess_cases --seed 1 --case 217      # one case again

A case is a pure function of seed and number: documents, a tokenizer, the options that decide the
output, and those that must not matter (file format, compression, number of files, workers, chunk
size). `preprocess` says in a page what Megatron-LM's `tools/preprocess_data.py` writes, with
megatron-core's own builder and the reference tokenizing library. Every `.bin` and `.idx` must be
equal, byte for byte.
"""

import argparse
import contextlib
import csv
import functools
import io
import itertools
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

# torch and megatron-core warn of their own deprecations, and of optional packages, on import.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from millrace.cli import main as millrace
from millrace.names import RESULT
from millrace.text import SentenceSplitter
from tests.conftest import WORDS
from tests.text.reading import COMPRESS

PIECE_LENGTH = 1_000_000  # characters that the script passes to its sentence splitter at once
SWITCHES = ("append_eod", "add_special_tokens", "keep_newlines", "keep_sequential_samples")
EOD = "<|endoftext|>"

Tokenize = Callable[[str], list[int]]
Split = Callable[[str], list[str]]
Value = Any  # of a key: a string, or a list of strings
Documents = Sequence[dict[str, Value]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Documents and options; those after `keep_sequential_samples` must not change the output."""

    documents: list[dict[str, Value]] = field(repr=False)
    keys: tuple[str, ...] = ("text",)
    tokenizer: str = "byte-level BPE"
    append_eod: bool = False
    add_special_tokens: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False
    partitions: int = 1
    keep_sequential_samples: bool = False
    file_format: str = "jsonl"
    compression: str = ""
    num_files: int = 1
    workers: int = 1
    chunk_size: int = 1000
    spelling_seed: int = 0


# ---- what Megatron-LM's script writes ----


def preprocess(case: Case, reference: "Reference", prefix: Path) -> None:
    """Writes one pair per key, in the order of the script."""
    tokenize, size = reference.tokenize, reference.vocabulary_size
    if case.add_special_tokens:
        tokenize = reference.tokenize_with_special_tokens
    eod = reference.eod if case.append_eod else None
    split = None
    if case.split_sentences:
        keep = case.keep_newlines
        split = SentenceSplitter("english", keep_newlines=keep, library="sentencex").split
    documents = partitioned(case.documents, case.partitions, case.keep_sequential_samples)
    for key in case.keys:
        name = f"{prefix}_{key}_{'sentence' if split else 'document'}"
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=DType.optimal_dtype(size))
        for document in documents:
            add_document(builder, sentences_of(document[key], split), tokenize, eod)
        builder.finalize(f"{name}.idx")


def partitioned(documents: Sequence[Any], count: int, is_sequential: bool) -> list[Any]:
    """The documents in the order in which the script merges the pairs of its partitions."""
    if is_sequential:
        return [*documents]
    return [document for number in range(count) for document in documents[number::count]]


def sentences_of(value: Value, split: Split | None) -> list[str]:
    if split is not None:
        pieces = [value[i : i + PIECE_LENGTH] for i in range(0, len(value), PIECE_LENGTH)]
        return [sentence for piece in pieces for sentence in split(piece)]
    return value if isinstance(value, list) else [value]


def add_document(
    builder: IndexedDatasetBuilder, sentences: Sequence[str], tokenize: Tokenize, eod: int | None
) -> None:
    """Adds a document: empty sentences are left out, and a document without tokens gets no EOD."""
    sequences = [ids for ids in map(tokenize, sentences) if len(ids) > 0]
    if sequences and eod is not None:
        sequences[-1] = [*sequences[-1], eod]
    builder.add_document([i for ids in sequences for i in ids], [len(ids) for ids in sequences])


# ---- tokenizers ----


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A tokenizer file (argument of `--tokenizer`), and what its reference library says, without
    and with special tokens that are added to each text."""

    path: Path
    tokenize: Tokenize
    tokenize_with_special_tokens: Tokenize
    vocabulary_size: int
    eod: int


def hugging_face(
    folder: Path, *, is_folder: bool = False, bos: str | None = None, num_tokens: int = 0
) -> Reference:
    """A byte-level BPE tokenizer in a `transformers` folder, or as the tokenizer.json in it: with a
    template that puts `bos` before each text, and filled up with tokens that no text has."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[EOD, *([bos] if bos else [])],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    if num_tokens:
        settings = json.loads(tokenizer.to_str())
        vocabulary = settings["model"]["vocab"]
        for number in range(len(vocabulary), num_tokens):
            vocabulary[f"\u0100unused {number}"] = number
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings))
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Reference(
        path=folder if is_folder else folder / "tokenizer.json",
        tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        tokenize_with_special_tokens=lambda text: tokenizer.encode(text).ids,
        vocabulary_size=tokenizer.get_vocab_size(),
        eod=tokenizer.token_to_id(EOD),
    )


def sentencepiece_model(folder: Path) -> Reference:
    import sentencepiece

    folder.mkdir(parents=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training_texts()),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        minloglevel=2,
    )
    path = folder / "tokenizer.model"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    both = {"add_bos": True, "add_eos": True}
    return Reference(
        path=path,
        tokenize=processor.encode,
        tokenize_with_special_tokens=functools.partial(processor.encode, **both),
        vocabulary_size=processor.get_piece_size(),
        eod=processor.eos_id(),
    )


KINDS: dict[str, Callable[[Path], Reference]] = {  # small tokenizers of each kind
    "byte-level BPE": hugging_face,
    "transformers folder": functools.partial(hugging_face, is_folder=True),
    "BOS template": functools.partial(hugging_face, bos="<|bos|>"),
    "70,000 tokens": functools.partial(hugging_face, num_tokens=70_000),
    "SentencePiece": sentencepiece_model,
}


def make_references(folder: Path) -> dict[str, Reference]:
    return {name: train(folder / name) for name, train in KINDS.items()}


def training_texts() -> list[str]:
    texts = random.Random(0)
    return [" ".join(texts.choices([*WORDS, *FRAGMENTS[:20]], k=30)) for _ in range(200)]


# ---- random cases ----

FRAGMENTS = [
    *"The mill. Water turns it! Does Dr. Miller know? He does. wheel's don't 3.14".split(),
    *[" ", "\n", "\n\n", "\t", "\r\n", "\u2028", "\u0085", "\u00a0", "\u200b", "\ufeff"],
    *"naïve café ποταμός 水車 水車が回る。 مرحبا שלום हिन्दी 한국어 🌊 👩\u200d👩\u200d👧 ½".split(),
    *["\x00", "\x1f", "\x7f", "e\u0301", "\ufffd", "\U0010ffff", "\\", "\\u0041", "{}", "[", '"'],
    *["'", ",", EOD, "<|bos|>", "</s>", "<s>", "▁"],
]
KEYS = ("text", "title", "doc.text", "source", "名前")
FORMATS = ("jsonl", "jsonl", "jsonl", "parquet", "arrow", "csv", "tsv")
MOST_CHUNKS = 40  # of a case, about: each takes some milliseconds
COMPRESSIONS = ("", "", *COMPRESS)


def random_case(seed: int, number: int) -> Case:
    choices = random.Random(f"{seed} {number}")
    is_split = choices.random() < 0.25
    has_lists = not is_split and choices.random() < 0.4
    keys = tuple(choices.sample(KEYS, choices.choice([1, 1, 2, 3])))
    partitions = choices.choice([1, 1, 1, 2, 3])
    count = choices.choice([1, 2, 5, 20, 60, 150])

    def random_value() -> Value:
        if has_lists and choices.random() < 0.6:
            return [random_text(choices) for _ in range(choices.choice([0, 1, 2, 5]))]
        return random_text(choices)

    documents = [{key: random_value() for key in keys} for _ in range(count)]
    formats = [*FORMATS]
    if has_lists and choices.random() >= 0.3:
        formats = ["jsonl"]
    elif has_lists:  # a column has one type
        formats = ["parquet", "arrow"]
        documents = [
            {key: value if isinstance(value, list) else [value] for key, value in d.items()}
            for d in documents
        ]
    file_format = choices.choice(formats)
    size = sum(len(str(value)) for document in documents for value in document.values())
    is_sequential = partitions > 1 and choices.random() < 0.5
    return Case(
        documents=documents,
        keys=keys,
        tokenizer=choices.choice(["byte-level BPE", *KINDS]),
        append_eod=choices.random() < 0.6,
        add_special_tokens=choices.random() < 0.3,
        split_sentences=is_split,
        keep_newlines=is_split and choices.random() < 0.5,
        partitions=partitions,
        keep_sequential_samples=is_sequential,
        file_format=file_format,
        compression="" if file_format in ("parquet", "arrow") else choices.choice(COMPRESSIONS),
        num_files=choices.choice([1, 1, 2, 3]),
        workers=choices.choice([1, 1, 2]),
        chunk_size=max(choices.choice([100, 1000, 10_000, 1_000_000]), size // MOST_CHUNKS),
        spelling_seed=choices.getrandbits(32),
    )


def random_text(choices: random.Random) -> str:
    kind = choices.random()
    if kind < 0.1:
        return ""
    if kind < 0.2:
        return "".join(choices.choices(" \n\t\r\u00a0\u3000", k=choices.randrange(1, 9)))
    if kind < 0.3:
        points = [choices.randrange(0x11_0000 - 0x800) for _ in range(choices.randrange(1, 40))]
        return "".join(chr(point if point < 0xD800 else point + 0x800) for point in points)
    if kind < 0.35:
        return choices.choice(FRAGMENTS) * choices.randrange(1, 800)
    words = choices.choices([*WORDS, *FRAGMENTS], k=choices.choice([1, 3, 10, 40, 400]))
    return choices.choice(["", " ", " "]).join(words)


# ---- the input files ----


def write_inputs(case: Case, folder: Path) -> list[Path]:
    """Writes the documents to the files of the case, in order; returns their paths."""
    bounds = [len(case.documents) * i // case.num_files for i in range(case.num_files + 1)]
    spelling = random.Random(case.spelling_seed)
    paths = []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        data = WRITERS[case.file_format](case.documents[start:stop], case.keys, spelling)
        suffix = {"": "", "gzip": ".gz", "zstd": ".zst"}.get(
            case.compression, f".{case.compression}"
        )
        paths.append(folder / f"input{number}.{case.file_format}{suffix}")
        paths[-1].write_bytes(COMPRESS.get(case.compression, bytes)(data))
    return paths


def jsonl(documents: Documents, keys: Sequence[str], spelling: random.Random) -> bytes:
    """JSON Lines in all the spellings that Python's `json` reads."""
    end = spelling.choice(["\n", "\n", "\r\n"])
    lines = [spell(document, spelling) + end for document in documents]
    if lines and spelling.random() < 0.3:
        lines[-1] = lines[-1].removesuffix(end)
    return "".join(lines).encode()


EXTRA_VALUES = ["null", "NaN", "-Infinity", "1e400", "1" + "0" * 30, '"\\ud83d"', '{"text": ["x"]}']


def spell(document: dict[str, Value], spelling: random.Random) -> str:
    members = [(key, json_of(value, spelling)) for key, value in document.items()]
    for number in range(spelling.choice([0, 0, 1, 3])):
        members.append((f"extra{number}", spelling.choice(EXTRA_VALUES)))
    spelling.shuffle(members)
    if spelling.random() < 0.1:  # of two equal keys, the last one counts
        members.insert(0, (spelling.choice(list(document)), spelling.choice(['"first"', "5"])))
    space = spelling.choice(["", " ", "\t", "  "])
    between = [f"{json_of(key, spelling)}{space}:{space}{value}" for key, value in members]
    return f"{space}{{{space}{f'{space},{space}'.join(between)}{space}}}{space}"


def json_of(value: Value, spelling: random.Random) -> str:
    return json.dumps(value, ensure_ascii=spelling.random() < 0.5)


def parquet(documents: Documents, keys: Sequence[str], spelling: random.Random) -> bytes:
    file = io.BytesIO()
    size = spelling.choice([1, 7, 1000])
    pa.parquet.write_table(table_of(documents, keys, spelling), file, row_group_size=size)
    return file.getvalue()


def arrow(documents: Documents, keys: Sequence[str], spelling: random.Random) -> bytes:
    file = io.BytesIO()
    table = table_of(documents, keys, spelling)
    writer = spelling.choice([pa.ipc.new_file, pa.ipc.new_stream])(file, table.schema)
    writer.write_table(table, max_chunksize=spelling.choice([1, 7, 1000]))
    writer.close()
    return file.getvalue()


def table_of(documents: Documents, keys: Sequence[str], spelling: random.Random) -> pa.Table:
    string = spelling.choice([pa.string(), pa.large_string()])
    is_list = bool(documents) and isinstance(documents[0][keys[0]], list)
    column_type = pa.list_(string) if is_list else string
    columns = {key: pa.array([d[key] for d in documents], column_type) for key in keys}
    return pa.table({"number": pa.array(range(len(documents)), pa.int64()), **columns})


def separated(
    documents: Documents, keys: Sequence[str], spelling: random.Random, delimiter: str = ","
) -> bytes:
    file = io.StringIO(newline="")
    end = spelling.choice(["\n", "\r\n"])
    writer = csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator=end)
    writer.writerow(["number", *keys])
    for number, document in enumerate(documents):
        writer.writerow([number, *(document[key] for key in keys)])
    return file.getvalue().encode()


WRITERS: dict[str, Callable[..., bytes]] = {"jsonl": jsonl, "parquet": parquet, "arrow": arrow}
WRITERS |= {"csv": separated, "tsv": functools.partial(separated, delimiter="\t")}


# ---- the comparison ----


def run_case(case: Case, references: dict[str, Reference], folder: Path) -> None:
    """Runs `millrace tokenize` on the case; AssertionError if a byte differs."""
    reference = references[case.tokenizer]
    inputs = write_inputs(case, folder)
    (folder / "theirs").mkdir()
    (folder / "ours").mkdir()
    preprocess(case, reference, folder / "theirs" / "out")
    options = ["--json-keys", *case.keys, "--chunk-size", str(case.chunk_size), "--json"]
    for name in SWITCHES:
        options += [f"--{name.replace('_', '-')}"] if getattr(case, name) else []
    options += ["--partitions", str(case.partitions)] if case.partitions > 1 else []
    options += ["--split-sentences", "sentencex"] if case.split_sentences else []
    options += ["--tokenizer", str(reference.path), "--workers", str(case.workers)]
    prefix = str(folder / "ours" / "out")
    inputs_option = ["--input", *map(str, inputs)]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = millrace(["tokenize", *inputs_option, "--output-prefix", prefix, *options])
    assert status == 0, "millrace failed"
    assert json.loads(output.getvalue())["documents"] == len(case.documents)
    theirs, ours = ({p.name: p for p in (folder / n).iterdir()} for n in ("theirs", "ours"))
    sidecars = {Path(n).stem + s for n in theirs for s in (".info.json", ".origins.parquet")}
    left_over = {*ours} - {*theirs} - sidecars - {f"out{RESULT}"}
    assert not left_over, f"beside the pairs lie {sorted(left_over)}"
    for name, path in theirs.items():
        assert ours[name].read_bytes() == path.read_bytes(), f"{name} differs"


# ---- any number of cases ----


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case alone")
    options = parser.parse_args(arguments)
    numbers = range(options.cases) if options.case is None else [options.case]
    failures = 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        references = make_references(Path(folder))
        for number in numbers:
            case = random_case(options.seed, number)
            with tempfile.TemporaryDirectory(dir=folder) as case_folder:
                try:
                    run_case(case, references, Path(case_folder))
                except Exception:
                    failures += 1
                    print(f"--seed {options.seed} --case {number}: {case}")
                    traceback.print_exc(limit=-2, file=sys.stdout)
    seconds = time.monotonic() - start
    print(f"seed {options.seed}: {len(numbers)} cases, {failures} failed, {seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
