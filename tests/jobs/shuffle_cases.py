"""Random shuffles, compared with NumPy: `python -m tests.jobs.shuffle_cases --cases 300 --seed 1`.

Each case has random domains and files: empty ones, one sequence, domains without any, and totals
around powers of two. The expected output is computed here, from the arrays that the input was
written from: every sequence once, at the place that the permutation names. All plans must
write the same bytes, with small buffers, and so must some runs with 2 and 7 workers.
"""

import argparse
import contextlib
import itertools
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from millrace import IndexedDatasetBuilder
from millrace.errors import ConfigError, MillraceError
from millrace.files import checksum
from millrace.names import SHUFFLE_RESULT
from millrace.order import KeyedPermutation
from millrace.provenance import OriginsWriter
from millrace.shuffling import shuffle
from millrace.shuffling.domains import Inputs, find_domains
from millrace.shuffling.plans import ITEM_OVERHEAD, PLANS, Budget, ItemSizes, ShufflePlan
from millrace.shuffling.shuffle_items import SequenceItems
from millrace.shuffling.whole_documents import DocumentItems

MEMORY = 1_000_000_000


class Document(NamedTuple):
    """What a shuffle moves; if the job cuts the input, a document of one sequence."""

    sequences: list[NDArray[Any]]
    modes: list[int] | None = None  # of each sequence
    origin: tuple[Any, ...] = ("a.jsonl", 1, -1, None)  # source, line, byte offset and id


@dataclass(frozen=True)
class Case:
    """A shuffle, and what it must write."""

    options: dict[str, Any]  # of `shuffle`, without the output folder and the plan
    items: list[Document]  # in the order of the input
    domain_stats: dict[str, int]
    dtype: np.dtype[Any]
    is_refused: bool  # as it has no whole sequence, or no tokens
    has_modes: bool = False
    has_origins: bool = False


# ---- the input ----


def sequence_items(
    inputs: Inputs | Path, seq_len: int, dtype: str = "uint32", carry: bool = False
) -> SequenceItems:
    """The sequences of an input."""
    inputs = str(inputs) if isinstance(inputs, Path) else inputs
    return SequenceItems(find_domains(inputs, dtype=dtype), seq_len=seq_len, carry=carry)


def document_items(inputs: Inputs | Path, folder: Path) -> DocumentItems:
    """The documents of an input, with tables in a folder."""
    inputs = str(inputs) if isinstance(inputs, Path) else inputs
    return DocumentItems(find_domains(inputs, dtype="int32", has_documents=True), str(folder))


def make_case(folder: Path, choices: random.Random) -> Case:
    """Writes a random input into an empty folder; it may have no whole sequence."""
    dtype = np.dtype(choices.choice(["uint16", "uint32", "int32"]))
    seq_len = choices.choice([1, 1, 2, 3, 7, 16, 100])
    carry = choices.random() < 0.4
    kinds = ["raw", "npy", "matrix", *([] if dtype == np.uint32 else ["indexed"])]
    target = 1 << choices.randrange(10)  # items, about
    is_list = choices.random() < 0.3
    inputs, items, domain_stats = [], [], {}
    names = choices.sample(["Zoo", "a", "b", "code", "web", "web-2"], choices.randint(1, 4))
    for name in sorted(names):
        (folder / name).mkdir(parents=True)
        num_files = choices.choice([0, 1, 1, 1, 2, 5])
        weight = choices.choice([Fraction(1), Fraction("2.5"), Fraction("0.3")])
        weight = weight if is_list else Fraction(1)
        streams = []
        for path in sorted(folder / name / f"{number}" for number in range(num_files)):
            usual = max(target * seq_len // num_files + choices.randint(-2, 2), 0)
            size, kind = choices.choice([0, 1, *[usual] * 4]), choices.choice(kinds)
            streams.append(write_file(path, size, kind, dtype, choices))
        if carry and streams:
            streams = [np.concatenate(streams)]
        units = [
            stream[start : start + seq_len]
            for stream in streams
            for start in range(0, len(stream) - seq_len + 1, seq_len)
        ]
        chosen = [Document([units[number]]) for number in weighted(len(units), weight)]
        items += chosen
        domain_stats[name] = len(chosen)
        inputs.append((float(weight), str(folder / name)))
    options = {
        "input_dir": None if is_list else str(folder),
        "input_list": choices.sample(inputs, len(inputs)) if is_list else None,
        "seq_len": seq_len,
        "dtype": dtype.name,
        "carry": carry,
        **common_options(max(len(items), 1), choices),
    }
    return Case(options, items, domain_stats, dtype, is_refused=not items)


def make_document_case(folder: Path, choices: random.Random) -> Case:
    """Writes a random input of documents, which may have none."""
    dtype = np.dtype(choices.choice(["uint16", "int32"]))
    kinds = {"has_modes": choices.random() < 0.3, "has_origins": choices.random() < 0.5}
    longest = choices.choice([1, 20, 1000])
    inputs, items, domain_stats, num_tokens = [], [], {}, 0
    for name in sorted(choices.sample(["a", "b", "code", "web"], choices.randint(1, 3))):
        (folder / name).mkdir()
        weight = choices.choice([Fraction(1), Fraction(1), Fraction("1.5"), Fraction("0.4")])
        units = []
        for number in range(choices.choice([0, 1, 2])):
            count = choices.choice([0, 1, 100])
            documents = [random_document(longest, dtype, choices) for _ in range(count)]
            build(folder / name / str(number), documents, dtype, **kinds)
            units += documents
        num_tokens += sum(len(sequence) for one in units for sequence in one.sequences)
        chosen = [units[number] for number in weighted(len(units), weight)]
        items += chosen
        domain_stats[name] = len(chosen)
        inputs.append((float(weight), str(folder / name)))
    options = {"input_dir": None, "input_list": inputs, "documents": True}
    options |= common_options(max(len(items), 1), choices)
    return Case(options, items, domain_stats, dtype, not items or num_tokens == 0, **kinds)


def random_document(longest: int, dtype: np.dtype[Any], choices: random.Random) -> Document:
    """Some documents have no sequences, or none with tokens."""
    lengths = [choices.randint(0, longest) for _ in range(choices.choice([0, 1, 1, 1, 3]))]
    source = np.random.default_rng(choices.getrandbits(60))
    sequences = [source.integers(0, 1000, length).astype(dtype) for length in lengths]
    places = choices.choice(["a.jsonl", "b/\u00e4.jsonl"]), choices.randrange(2**40)
    origin = *places, choices.randint(-1, 2**40), choices.choice([None, "", "d1", '\u00fc"\n'])
    return Document(sequences, [choices.randint(-128, 127) for _ in lengths], origin)


def build(
    prefix: Path,
    documents: Sequence[Document],
    dtype: Any = "int32",
    *,
    has_modes: bool = False,
    has_origins: bool = False,
    **options: Any,
) -> None:
    """Writes documents as the library's builder does."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    options = {"multimodal": has_modes, "durable": False, **options}
    with IndexedDatasetBuilder(prefix, dtype, **options) as builder:
        for one in documents:
            tokens = np.concatenate([np.empty(0, dtype), *one.sequences])
            lengths = [len(sequence) for sequence in one.sequences]
            builder.add_document(tokens, lengths, one.modes if has_modes else None)
    if has_origins:
        with OriginsWriter(prefix, durable=False) as origins:
            for source, line, byte_offset, name in (one.origin for one in documents):
                origins.add([source], [0], [line], [byte_offset], [name])


def common_options(num_items: int, choices: random.Random) -> dict[str, Any]:
    return {
        "num_shards": choices.choice([1, min(num_items, 3), choices.randint(1, num_items)]),
        "seed": choices.choice([0, 42, 2**63 - 1, choices.randrange(2**63)]),
        "permutation": choices.choice(["auto", "numpy", "keyed"]),
        "memory": MEMORY,
    }


def write_file(
    path: Path, size: int, kind: str, dtype: np.dtype[Any], choices: random.Random
) -> NDArray[Any]:
    """Writes a file with `size` tokens; the stream that it stands for."""
    tokens = np.random.default_rng(choices.getrandbits(60)).integers(0, 1000, size).astype(dtype)
    if kind == "raw":
        tokens.tofile(path.with_suffix(".bin"))
        return tokens
    if kind in ("npy", "matrix"):
        width = choices.choice([1, 3]) if kind == "matrix" else 0
        tokens = tokens[: size // width * width].reshape(-1, width) if width else tokens
        np.save(path.with_suffix(".npy"), tokens)
        return tokens.reshape(-1)
    with IndexedDatasetBuilder(path, dtype) as builder:
        for document in random_cuts(tokens, choices):
            builder.add_document(document)
    return tokens


def random_cuts(tokens: NDArray[Any], choices: random.Random) -> list[NDArray[Any]]:
    count = choices.choice([0, 1, 5, len(tokens) // 10])
    cuts = sorted(choices.randint(0, len(tokens)) for _ in range(count))
    return [tokens[a:b] for a, b in itertools.pairwise([0, *cuts, len(tokens)])]


def weighted(count: int, weight: Fraction) -> list[int]:
    """The numbers of a domain's units, as often as the weight says."""
    total = int(count * weight)
    if count == 0:
        return []
    whole, rest = divmod(total, count)
    return list(range(count)) * whole + [place * count // rest for place in range(rest)]


# ---- the output ----


def check_output(case: Case, files: dict[str, bytes]) -> None:
    """Compares the files of an output with what the builder makes of the items."""
    metadata = json.loads(files["metadata.json"])
    count, num_shards, seed = len(case.items), case.options["num_shards"], case.options["seed"]
    places = KeyedPermutation(count, seed).places(np.arange(count))
    if metadata["permutation"] == "numpy":
        places = np.random.default_rng(seed).permutation(count)
    assert sorted(places.tolist()) == list(range(count))
    items = iter([case.items[number] for number in np.argsort(places).tolist()])
    sizes = [count // num_shards + (shard < count % num_shards) for shard in range(num_shards)]
    assert metadata["shard_sizes"] == sizes
    dtype = np.int32 if case.dtype == np.uint32 else case.dtype
    kinds: Any = {"has_modes": case.has_modes, "has_origins": case.has_origins}
    with tempfile.TemporaryDirectory() as name:
        for shard, size in enumerate(sizes):
            documents = list(itertools.islice(items, size))
            build(Path(name) / f"shard_{shard:04}", documents, dtype, checksums=True, **kinds)
        expected = {path.name: path.read_bytes() for path in Path(name).iterdir()}
    assert files == expected | {"metadata.json": files["metadata.json"]}
    assert metadata["domain_stats"] == case.domain_stats
    assert metadata["checksums"] == {name: checksum([data]) for name, data in expected.items()}


@contextlib.contextmanager
def small_buffers(choices: random.Random) -> Iterator[None]:
    """Plans have the number of workers that is asked for, and buffers of a few items."""
    share = choices.choice([0.01, 0.1, 0.5, 1.0])

    def fit(name: str, sizes: ItemSizes, budget: Budget, workers: int) -> ShufflePlan:
        size = int(share * sizes.num_bytes * (1 + ITEM_OVERHEAD))
        size = max(size, sizes.largest + ITEM_OVERHEAD)
        return ShufflePlan(name=name, sizes=sizes, workers=workers, buffer_size=size)

    blocks = dict.fromkeys(("_BLOCK", "_ENTRIES", "_MOST_SEQUENCES"), choices.choice([1, 3, 1000]))
    with (
        mock.patch("millrace.shuffling.plans.fit_plan", fit),
        mock.patch.multiple("millrace.shuffling.whole_documents", **blocks),
        mock.patch("millrace.shuffling.shuffle_items._BLOCK", blocks["_BLOCK"]),
    ):
        yield


def run_case(case: Case, folder: Path, choices: random.Random, workers: Sequence[int]) -> None:
    """Shuffles with each plan, and one of them with each number of workers."""
    if case.is_refused:  # without leaving anything
        with contextlib.suppress(ConfigError):
            shuffle(output_dir=folder / "output", **case.options)
            raise AssertionError("no error")
        assert not (folder / "output").exists()
        return
    runs = [(plan, 1) for plan in PLANS]
    runs += [(choices.choice(PLANS), count) for count in workers]
    outputs = []
    for number, (plan, count) in enumerate(runs):
        output = folder / f"output-{number}"
        with small_buffers(choices):
            result = shuffle(output_dir=output, plan=plan, workers=count, **case.options)
        assert result.plan == plan
        assert result.num_items == len(case.items)
        files = {path.name: path.read_bytes() for path in output.iterdir()}
        outputs.append({name: files[name] for name in files.keys() - {SHUFFLE_RESULT}})
    check_output(case, outputs[0])
    assert all(output == outputs[0] for output in outputs)


def run(
    num_cases: int, seed: int, *, worker_share: float = 0.1, document_share: float = 0.25
) -> Counter[str]:
    """Runs cases; returns how many of what kind there were.

    Of them, `worker_share` also run with 2 or 7 worker processes, and `document_share` shuffle
    whole documents.
    """
    counts: Counter[str] = Counter()
    for number in range(num_cases):
        choices = random.Random(f"{seed}, {number}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "input").mkdir()
            make = make_document_case if choices.random() < document_share else make_case
            case = make(folder / "input", choices)
            workers = [choices.choice([2, 7])] if choices.random() < worker_share else []
            try:
                run_case(case, folder, choices, workers)
            except (AssertionError, MillraceError) as error:
                raise AssertionError(f"seed {seed}, case {number}: {case.options}") from error
            counts["refused" if case.is_refused else "cases"] += 1
            counts["items"] += len(case.items)
            counts["of documents"] += "documents" in case.options
            counts["with several workers"] += len(workers)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    counts = run(options.cases, options.seed)
    print(f"seed {options.seed}: {dict(counts)}, {time.monotonic() - start:.0f} s; all equal")


if __name__ == "__main__":
    main()
