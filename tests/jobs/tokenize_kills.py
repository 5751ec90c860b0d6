"""kill -9 at any moment of `millrace tokenize`: `python -m tests.jobs.tokenize_kills --kills 100`.

Each job has a few hundred chunks; `kills` tells what must hold.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.conftest import make_texts, train_tokenizer, write_jsonl
from tests.jobs.kills import Job, Verb, run_command, run_jobs
from tests.text.reading import COMPRESS

CHUNK_SIZE = 4000  # bytes
VERB = Verb(("-m", "millrace", "tokenize", "--output-prefix"), "out", "chunks", "*.json")


def make_jobs(folder: Path, num_documents: int, names: Sequence[str] = ()) -> list[Job]:
    """Writes inputs of that many documents, and runs each job (of these names) undisturbed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokenizer = train_tokenizer(folder / "tokenizer.json")
    texts, titles = make_texts(num_documents, 1), make_texts(num_documents, 2)
    lines = [
        json.dumps({"id": f"document {i}", "text": text, "title": title[:40]}).encode() + b"\n"
        for i, (text, title) in enumerate(zip(texts, titles, strict=True))
    ]
    plain = b"".join(lines)
    (folder / "plain.jsonl").write_bytes(plain)
    for name, compression in (("gz", "gzip"), ("zst", "zstd")):
        (folder / f"compressed.jsonl.{name}").write_bytes(COMPRESS[compression](plain))
    table = pa.table({"text": texts, "title": titles})
    pq.write_table(table, folder / "table.parquet", row_group_size=num_documents // 40)
    poison = [b"{}\n", b"not JSON\n", b'{"text": "\xff"}\n', b'{"text": 5}\n', b'{"text": "\n']
    for place in range(0, len(lines), 37):
        lines.insert(place, poison[place % len(poison)])
    (folder / "poisoned.jsonl").write_bytes(b"".join(lines))
    (folder / "small").mkdir()
    for number in range(30):
        write_jsonl(folder / "small" / f"{number:02}.jsonl.gz", texts[number : number + 9])
    commands = {
        "plain": "plain.jsonl --append-eod",
        "keys": "plain.jsonl --json-keys text title",
        "gzip": "compressed.jsonl.gz --append-eod",
        "Parquet": "table.parquet --json-keys title text",
        "mixed": "compressed.jsonl.zst table.parquet plain.jsonl small",
        "poisoned": "poisoned.jsonl --on-error quarantine",
        "partitions": "plain.jsonl --partitions 3 --append-eod",
        "sentences": "plain.jsonl --split-sentences sentencex --append-eod",
    }
    jobs = []
    for number, (name, command) in enumerate(commands.items()):
        if names and name not in names:
            continue
        words = [str(folder / w) if "." in w or w == "small" else w for w in command.split()]
        options = ["--input", *words, "--tokenizer", str(tokenizer), "--json"]
        options += ["--chunk-size", str(CHUNK_SIZE), "--workers", str(1 if number % 4 == 0 else 2)]
        jobs.append(VERB.undisturbed(name, options, folder))
    return jobs


run = partial(run_jobs, make_jobs, VERB.run_job)

if __name__ == "__main__":
    run_command(__doc__ or "", run, "documents", 6000)
