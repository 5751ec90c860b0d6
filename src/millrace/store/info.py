"""The sidecar `PREFIX.info.json`: checksums of the files, and where they came from.

It is optional. Checksums are XXH3-64 of each block of 4 MiB, in hex; the provenance is what the
writer knows (tool, tokenizer, options).
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from millrace.errors import DataError
from millrace.files import atomic_file, xxh3
from millrace.names import INFO, LOSS
from millrace.records import Count, record_from
from millrace.storage import LOCAL, Storage, exists, read_file, storage_of
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
class _Document:
    """A sidecar as it is stored; `checksums` also says how they were made."""

    version: int
    provenance: dict[str, Any]
    checksums: dict[str, Any] | None = None


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


def read_info(prefix: str, storage: Storage = LOCAL) -> Info | None:
    """The sidecar of a pair, or None; a DataError if it is damaged or of a later version."""
    path = paths_to_read(prefix, storage).info
    try:
        content = json.loads(read_file(storage, path))
        if isinstance(content, dict) and content.get("version", VERSION) != VERSION:
            raise DataError(f"{path} has version {content['version']}; {VERSION} can be read")
        document = record_from(_Document, content, "the sidecar")
        sums = document.checksums
        if sums is None:
            return Info(provenance=document.provenance)
        kind = sums.get("algorithm"), sums.get("block_size")
        if kind != (ALGORITHM, BLOCK_SIZE):
            raise DataError(
                f"{path} has checksums of {kind[0]} in blocks of {kind[1]}; {ALGORITHM} in blocks "
                f"of {BLOCK_SIZE} can be verified"
            )
        info = record_from(Info, {**sums, "provenance": document.provenance}, "the checksums")
        if info.bin is None or info.idx is None:
            raise ValueError("the checksums are those of one file")
        for one in filter(None, (info.bin, info.idx, info.origins)):
            if len(one.blocks) != -(-one.size // BLOCK_SIZE):
                raise ValueError(f"{len(one.blocks)} blocks for {one.size} bytes")
        return info
    except FileNotFoundError:
        return None
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({error}). The token files may be intact: remove it, or write the "
            "pair again"
        ) from None


def has_mask(prefix: str, storage: Storage | None = None) -> bool:
    """Whether the sidecar of a pair names ranges of tokens that are not trained on."""
    storage = storage_of(prefix) if storage is None else storage
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
