"""The sidecar `PREFIX.info.json`: checksums of the files, and where they came from.

It is optional. Checksums are XXH3-64 of each block of 4 MiB, in hex; the provenance is what the
writer knows (tool, tokenizer, options).
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from millrace.errors import ConfigError, DataError
from millrace.files import write_file, xxh3
from millrace.names import INFO, LOSS
from millrace.records import Count, record_from
from millrace.storage import Storage, exists, read_file, storage_of
from millrace.store.publish import paths_to_read

BLOCK_SIZE = 4 << 20


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
class PairChecksums:
    """The checksums of a pair, and of its sidecar of origins, if any."""

    algorithm: Literal["xxh3_64"] = "xxh3_64"
    block_size: int = field(default_factory=lambda: BLOCK_SIZE)
    bin: Checksums
    idx: Checksums
    origins: Checksums | None = None


@dataclass(frozen=True, kw_only=True)
class Info:
    """The content of a sidecar.

    Attributes:
        version: Version of the format, 1.
        provenance: Where the files came from.
        checksums: Checksums of the files, if any.
    """

    version: Literal[1] = 1
    provenance: dict[str, Any]
    checksums: PairChecksums | None = None

    def to_json(self) -> str:
        fields = asdict(self, dict_factory=lambda pairs: dict(p for p in pairs if p[1] is not None))
        return json.dumps(fields, indent=1) + "\n"


def read_info(prefix: str, storage: Storage | None = None) -> Info | None:
    """The sidecar of a pair, or None; a DataError if it is damaged or of a later version."""
    storage = storage_of(prefix, storage)
    path = paths_to_read(prefix, storage).info
    try:
        info = record_from(Info, json.loads(read_file(storage, path)), "the sidecar")
        if (sums := info.checksums) is not None:
            for one in filter(None, (sums.bin, sums.idx, sums.origins)):
                if sums.block_size != BLOCK_SIZE or len(one.blocks) != -(-one.size // BLOCK_SIZE):
                    blocks = f"{len(one.blocks)} blocks of {sums.block_size} bytes"
                    raise ValueError(f"{blocks} for {one.size} bytes; each must have {BLOCK_SIZE}")
        return info
    except FileNotFoundError:
        return None
    except ConfigError:  # of a storage that cannot be reached
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged, or of a later version ({error}). The token files may be intact: "
            "remove it, or write the pair again"
        ) from None


def has_mask(prefix: str, storage: Storage | None = None) -> bool:
    """Whether the sidecar of a pair names ranges of tokens that are not trained on."""
    try:
        info = read_info(prefix, storage)
        return info is not None and "loss_ranges" in info.provenance
    except (OSError, DataError):
        # Better than to train on all tokens.
        return exists(storage_of(prefix, storage), prefix + LOSS)


def write_info(prefix: str, info: Info, *, durable: bool = True) -> None:
    write_file(prefix + INFO, info.to_json().encode(), durable=durable)


class BlockHasher:
    """Makes the checksums of a file from its pieces."""

    def __init__(self) -> None:
        self._state, self._size, self._blocks = xxh3(), 0, list[str]()

    def update(self, data: Any) -> None:
        """Adds the next bytes, any contiguous buffer."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(view) > 0:
            block, place = divmod(self._size, BLOCK_SIZE)
            if place == 0:
                self._state.reset()
            part = view[: BLOCK_SIZE - place]
            self._state.update(part)
            self._blocks[block:] = [self._state.hexdigest()]
            self._size += len(part)
            view = view[len(part) :]

    def finish(self) -> Checksums:
        return Checksums(size=self._size, blocks=self._blocks)
