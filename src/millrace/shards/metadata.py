"""The metadata of a folder of shards, `metadata.json`: what a global shuffle has written.

A folder has the shards `shard_0000.bin`, `shard_0001.bin`, ... A shard of fixed-length sequences
holds their tokens, one sequence after the other, without an index. A shard of whole documents is an
indexed dataset. The metadata are written last: a folder without them is not whole.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, Literal

import numpy as np

from millrace import names
from millrace.checks import MAX_INT32, MAX_INT64, check_choice, check_path, shown
from millrace.errors import ConfigError, DataError
from millrace.files import checksum, write_file
from millrace.records import Count, record_from
from millrace.storage import LOCAL, Storage, exists, read_file, storage_of
from millrace.store.layout import DTYPES
from millrace.store.opened import TOKEN_DTYPES

METADATA = names.SHUFFLE_METADATA
JOURNAL = names.SHUFFLE_JOURNAL  # beside the shards until the shuffle has ended
VERSION = 2
SEQUENCES: Final = "global_permutation_fast"  # the shuffle type of sequences of one length
DOCUMENTS: Final = "global_permutation_documents"  # the shuffle type of whole documents

_DTYPE = "uint32"  # of metadata without a dtype, which other tools write
_RESTORE = "restore it, or shuffle again"
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True, kw_only=True)
class ShardsMetadata:
    """The content of `metadata.json`.

    An *item* is a sequence, or a document. Other tools write only the fields up to `shard_sizes`.

    Attributes:
        version: Version of the format, 2.
        shuffle_type: SEQUENCES or DOCUMENTS.
        seq_len: Number of tokens in a sequence; None for documents.
        total_sequences: Number of sequences; None for documents.
        total_documents: Number of documents; None for sequences.
        num_shards: Number of shards.
        domain_stats: Number of items of each domain.
        shard_sizes: Number of items of each shard.
        dtype: Dtype of the tokens.
        seed: Seed of the shuffle; None: unknown.
        permutation: Kind of the permutation, "numpy" or "keyed"; None: unknown.
        carry: Whether the rest of a file is continued in the next file of its domain.
        inputs: The input files: domain, path, size, mtime_ns and num_tokens of each.
        checksums: XXH3-64 of each file, by its name; empty: unknown.
        distribution: The figures of the distribution check; empty: none was made.
    """

    version: int = VERSION
    shuffle_type: Literal["global_permutation_fast", "global_permutation_documents"] = SEQUENCES
    seq_len: Annotated[int, 1, MAX_INT32] | None = None
    total_sequences: Count | None = None
    total_documents: Count | None = None
    num_shards: Annotated[int, 1, MAX_INT64]
    domain_stats: dict[str, Count]
    shard_sizes: list[Count]
    dtype: str = _DTYPE
    seed: int | None = None
    permutation: str | None = None
    carry: bool = False
    inputs: list[dict[str, Any]] = field(default_factory=list)
    checksums: dict[str, str] = field(default_factory=dict)
    distribution: dict[str, Any] = field(default_factory=dict)

    @property
    def has_documents(self) -> bool:
        return self.shuffle_type == DOCUMENTS

    @property
    def is_of_another_tool(self) -> bool:
        """Whether the metadata have the fields up to `shard_sizes` only."""
        return self.permutation is None and not self.checksums

    @property
    def num_items(self) -> int:
        return sum(self.shard_sizes)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """The dtype of the tokens as read: int32 for uint32, which token files do not know."""
        return np.dtype("int32" if self.dtype == "uint32" else self.dtype)

    @property
    def sequence_bytes(self) -> int:
        """The size of a sequence in bytes; 0 for documents."""
        return (self.seq_len or 0) * self.token_dtype.itemsize


def shard_prefix(folder: str | os.PathLike[str], number: int) -> str:
    """The path prefix `FOLDER/shard_0000`."""
    return os.path.join(check_path("folder", folder), f"shard_{number:04}")


def output_files(folder: str, num_shards: int) -> list[str]:
    """The files without which an output is not whole."""
    prefixes = [shard_prefix(folder, shard) for shard in range(num_shards)]
    return [metadata_path(folder), *(f"{p}{end}" for p in prefixes for end in (".bin", ".idx"))]


def metadata_path(folder: str | os.PathLike[str]) -> str:
    return os.path.join(check_path("folder", folder), METADATA)


def is_shards_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder, not the path prefix of an indexed dataset."""
    name = check_path("path", path)
    storage = storage_of(name)
    is_local = storage is LOCAL
    is_folder = os.path.isdir(name) if is_local else exists(storage, metadata_path(name))
    return is_folder and not any(exists(storage, name + suffix) for suffix in (".idx", ".idx.new"))


def read_metadata(
    folder: str | os.PathLike[str], *, dtype: str | None = None, storage: Storage | None = None
) -> ShardsMetadata:
    """The metadata of a folder, compared with the sizes of its shards.

    Args:
        folder: Folder of the shards.
        dtype: Dtype of the tokens, for metadata that do not say it; None: uint32. Metadata that do
            must agree with it.
        storage: Where the folder is; None: in the file system.

    Raises:
        DataError: Metadata that are missing, damaged or of another version, counts that do not
            agree, or a shard that is missing or has another size.
        ConfigError: A dtype that token files cannot have, or another one than the metadata's.
    """
    folder = check_path("folder", folder)
    storage = storage_of(folder, storage)
    metadata = parse_metadata(folder, dtype, storage)
    for number in range(metadata.num_shards):
        check_shard(folder, metadata, number, lambda path: storage.stat(path).size)
    return metadata


def parse_metadata(
    folder: str, dtype: str | None = None, storage: Storage | None = None
) -> ShardsMetadata:
    """The metadata of a folder, not compared with its shards; see `read_metadata`."""
    storage = storage_of(folder, storage)
    if dtype is not None:
        check_choice("dtype", str(dtype), TOKEN_DTYPES)
    path = metadata_path(folder)
    try:
        document = json.loads(read_file(storage, path))
    except _MISSING:
        raise DataError(
            f"{path} is missing: {folder} is not the output folder of a shuffle, or its shuffle "
            "has not ended. Give such a folder, or run its command again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _damage(path, f"it is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise _damage(path, f"it holds {shown(document, 80)}; an object is needed")
    if (version := document.get("version")) != VERSION:
        raise DataError(f"{path} has version {shown(version, 80)}; version {VERSION} can be read")
    entries = {name: value for name, value in document.items() if value is not None}
    if dtype is not None and dtype != (other := entries.setdefault("dtype", dtype)):
        says = f"{path} says {shown(other, 80)}"
        raise ConfigError(f"dtype is {dtype}, but {says}: leave the argument out")
    try:
        metadata = record_from(ShardsMetadata, entries, "metadata")
    except ValueError as error:
        raise _damage(path, str(error)) from None
    for problem in _disagreements(metadata):
        raise _damage(path, problem)
    return metadata


def write_metadata(folder: str | os.PathLike[str], metadata: ShardsMetadata) -> None:
    """Writes the metadata, whole or not at all, with a checksum of themselves."""
    unused = "total_sequences" if metadata.has_documents else "total_documents"
    lines = [
        f'  "{one.name}": {json.dumps(getattr(metadata, one.name))}'
        for one in fields(metadata)
        if one.name != unused
    ]
    text = ("{\n" + ",\n".join(lines) + ",\n").encode()
    write_file(metadata_path(folder), text + _last_lines(text))


def metadata_problem(folder: str, metadata: ShardsMetadata) -> str | None:
    """A sentence if the checksum of `metadata.json` shows a change."""
    if metadata.is_of_another_tool:
        return None
    path = metadata_path(folder)
    content = read_file(storage_of(path), path)
    text = content[: -len(_last_lines(b""))]
    if content == text + _last_lines(text):
        return None
    return f"{path} was changed since it was written: {_RESTORE}"


def _last_lines(text: bytes) -> bytes:
    """The end of the metadata whose other bytes are `text`."""
    return f'  "metadata_checksum": "{checksum([text])}"\n}}\n'.encode()


def check_shard(
    folder: str, metadata: ShardsMetadata, number: int, size_of: Callable[[str], int]
) -> None:
    """Raises DataError if a shard's `.bin` is missing, or has another size by `size_of`."""
    path = f"{shard_prefix(folder, number)}.bin"
    try:
        size = size_of(path)
    except _MISSING:
        raise DataError(f"{path} is missing: {_RESTORE}") from None
    expected = metadata.shard_sizes[number] * metadata.sequence_bytes
    if not metadata.has_documents and size != expected:
        raise DataError(
            f"{path} has {size} bytes; {metadata.shard_sizes[number]} sequences of "
            f"{metadata.seq_len} tokens ({metadata.dtype}) take {expected}. It is "
            f"{'truncated' if size < expected else 'too long'}, or of another dtype, or belongs "
            f"to another shuffle: {_RESTORE}"
        )


def _damage(path: str, problem: str) -> DataError:
    return DataError(f"{path}: {problem}. It is damaged or of another program: {_RESTORE}")


def _disagreements(metadata: ShardsMetadata) -> Iterator[str]:
    """What is wrong among fields that are right one by one."""
    has_documents = metadata.has_documents
    if metadata.seq_len is None and not has_documents:
        yield "seq_len must be the number of tokens in a sequence, not left out"
    name = "total_documents" if has_documents else "total_sequences"
    total, sizes = getattr(metadata, name), metadata.shard_sizes
    for what, count, of, expected in (
        ("entries of shard_sizes", len(sizes), "num_shards", metadata.num_shards),
        ("the sum of shard_sizes", sum(sizes), name, total),
        ("the sum of domain_stats", sum(metadata.domain_stats.values()), name, total),
    ):
        if count != expected:
            yield f"{what}: {count}; {of} is {expected}"
    dtypes = [*map(str, DTYPES.values())] if has_documents else TOKEN_DTYPES
    if metadata.dtype not in dtypes:
        yield f"dtype must be one of {', '.join(dtypes)}, not {shown(metadata.dtype, 80)}"
