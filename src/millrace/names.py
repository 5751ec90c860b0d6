"""The endings of the files that this library writes; docs/files.md lists the files."""

BIN = ".bin"
IDX = ".idx"
INFO = ".info.json"
ORIGINS = ".origins.parquet"
LOSS = ".loss.json"
LOSS_ARRAY = ".loss-ranges.npy"
DOLMA = ".csv.gz"
QUARANTINE = ".quarantine.jsonl"
JOURNAL = ".journal"
RESULT = ".job.info.json"
SHUFFLE_JOURNAL = f"shuffle{JOURNAL}"
SHUFFLE_RESULT = "shuffle.job.info.json"
SHUFFLE_METADATA = "metadata.json"
LOCK = ".lock"
NEW = ".new"
TEMPORARY = ".tmp"
UNFINISHED = "split.unfinished"
SHARD_NUMBER = r"_(\d{5}|[1-9]\d{5,})"  # pattern, in the prefix of a shard of a split

_BESIDE_DOCUMENTS = (
    INFO,
    ORIGINS,
    LOSS,
    QUARANTINE,
    ".manifest.json",
    *(f"_{level}{end}" for level in ("document", "sentence") for end in (BIN, IDX, DOLMA)),
)


def is_beside_documents(name: str) -> bool:
    """Whether this library writes files of this name, which hold no documents to read."""
    if name.removesuffix(LOCK).endswith((TEMPORARY, JOURNAL)):
        return True
    return name.removesuffix(NEW).endswith(_BESIDE_DOCUMENTS)
