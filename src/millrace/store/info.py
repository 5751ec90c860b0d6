"""The sidecar `PREFIX.info.json`: checksums of the files, and where they came from.

It is optional. Checksums are XXH3-64 of each block of 4 MiB, in hex; the provenance is what the
writer knows (tool, tokenizer, options).
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from millrace.errors import DataError
from millrace.files import atomic_file, xxh3
from millrace.names import INFO, LOSS
from millrace.records import Count, record_from
from millrace.storage import Storage, exists, read_file, storage_of
from millrace.store.publish import paths_to_read

BLOCK_SIZE = 4 << 20
ALGORITHM = "xxh3_64"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """The checksums of one file.

    Attributes:
        size: Size of the file in bytes.
        blocks: Checksum of each block of BLOCK_SIZE bytes, 16 hex digits.
    """

    size: Count
    blocks: list[str]


@dataclass(frozen=True, kw_only=True)
class _StoredChecksums:
    algorithm: Literal["xxh3_64"]
    block_size: int
    bin: Checksums
    idx: Checksums
    origins: Checksums | None = None


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A sidecar as it is stored."""

    version: Literal[1]
    provenance: dict[str, Any]
    checksums: _StoredChecksums | None = None


@dataclass(frozen=True, kw_only=True)
class Info:
    """The content of a sidecar.

    Attributes:
        provenance: Where the files came from.
        bin, idx: Checksums of the file of that suffix; both or None.
        origins: Checksums of the sidecar of origins, if any.
    """

    provenance: dict[str, Any] = field(default_factory=dict)
    bin: Checksums | None = None
    idx: Checksums | None = None
    origins: Checksums | None = None

    def to_json(self) -> str:
        document: dict[str, Any] = {"version": VERSION, "provenance": self.provenance}
        if self.bin is not None and self.idx is not None:
            sums = {"bin": self.bin, "idx": self.idx, "origins": self.origins}
            stored = {name: asdict(one) for name, one in sums.items() if one is not None}
            document["checksums"] = {"algorithm": ALGORITHM, "block_size": BLOCK_SIZE} | stored
        return json.dumps(document, indent=1) + "\n"


def read_info(prefix: str, storage: Storage | None = None) -> Info | None:
    """The sidecar of a pair, or None; a DataError if it is damaged or of a later version."""
    storage = storage_of(prefix, storage)
    path = paths_to_read(prefix, storage).info
    try:
        stored = record_from(_Stored, json.loads(read_file(storage, path)), "the sidecar")
        if (sums := stored.checksums) is None:
            return Info(provenance=stored.provenance)
        for one in filter(None, (sums.bin, sums.idx, sums.origins)):
            if sums.block_size != BLOCK_SIZE or len(one.blocks) != -(-one.size // BLOCK_SIZE):
                blocks = f"{len(one.blocks)} blocks of {sums.block_size} bytes"
                raise ValueError(f"{blocks} for {one.size} bytes; each must have {BLOCK_SIZE}")
        return Info(provenance=stored.provenance, bin=sums.bin, idx=sums.idx, origins=sums.origins)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged, or a later version's ({error}). The token files may be intact: "
            "remove it, or write the pair again"
        ) from None


def has_mask(prefix: str, storage: Storage | None = None) -> bool:
    """Whether the sidecar of a pair names ranges of tokens that are not trained on."""
    storage = storage_of(prefix, storage)
    try:
        return "loss_ranges" in (read_info(prefix, storage) or Info()).provenance
    except (OSError, DataError):
        return exists(storage, prefix + LOSS)  # better than to train on all tokens


def write_info(prefix: str, info: Info, *, durable: bool = True) -> None:
    with atomic_file(prefix + INFO, durable=durable) as file:
        file.write(info.to_json().encode())


class BlockHasher:
    """Makes the checksums of a file from its pieces."""

    def __init__(self) -> None:
        self._state = xxh3()
        self._size = 0
        self._blocks: list[str] = []

    def update(self, data: Any) -> None:
        """Adds the next bytes, any contiguous buffer."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(view) > 0:
            part = view[: BLOCK_SIZE - self._size % BLOCK_SIZE]
            self._state.update(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size % BLOCK_SIZE == 0:
                self._end_block()

    def finish(self) -> Checksums:
        if self._size % BLOCK_SIZE > 0:
            self._end_block()
        return Checksums(size=self._size, blocks=self._blocks)

    def _end_block(self) -> None:
        self._blocks.append(self._state.hexdigest())
        self._state.reset()
