"""Small folders of shards, as `millrace shuffle` and the common script write them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import IndexedDatasetBuilder
from millrace.files import checksum
from millrace.ragged import even_sizes
from millrace.shards.metadata import DOCUMENTS, ShardsMetadata, shard_prefix, write_metadata


def sizes_of(total: int, num_shards: int) -> list[int]:
    """The sizes of shards: the first ones have one more."""
    return even_sizes(total, num_shards).tolist()


def make_sequences(total: int, seq_len: int, dtype: Any = np.uint32, seed: int = 0) -> NDArray[Any]:
    """Random tokens, [total, seq_len]; token 0 occurs now and then, as EOD."""
    return np.random.default_rng(seed).integers(0, 50, (total, seq_len)).astype(dtype)


def write_sequences(
    folder: Path, sequences: NDArray[Any], num_shards: int = 3, **values: Any
) -> ShardsMetadata:
    """Writes a folder of fixed-length sequences; `values` are of the metadata."""
    total, seq_len = sequences.shape
    stored = np.dtype("int32") if sequences.dtype == np.uint32 else sequences.dtype
    own = {"seq_len": seq_len, "total_sequences": total, "dtype": str(sequences.dtype)}
    own |= {"domain_stats": {"code": total // 3, "web": total - total // 3}, "permutation": "numpy"}
    return _write(
        folder, np.array_split(sequences.view(stored), num_shards), stored, **own | values
    )


def write_documents(
    folder: Path, shards: Sequence[Sequence[Any]], dtype: Any = np.uint16
) -> ShardsMetadata:
    """Writes a folder of documents, which are lists of tokens."""
    total = sum(map(len, shards))
    own = {"shuffle_type": DOCUMENTS, "total_documents": total, "domain_stats": {"web": total}}
    return _write(folder, shards, dtype, **own, permutation="keyed")


def _write(folder: Path, shards: Sequence[Any], stored: Any, **values: Any) -> ShardsMetadata:
    """Writes pairs, and metadata with `values`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, documents in enumerate(shards):
        with IndexedDatasetBuilder(shard_prefix(folder, number), stored) as builder:
            for document in documents:
                builder.add_document(document)
    own = {"num_shards": len(shards), "shard_sizes": [*map(len, shards)], "seed": 7}
    own |= {"dtype": str(np.dtype(stored)), "checksums": checksums_of(folder)}
    metadata = ShardsMetadata(**own | values)
    write_metadata(folder, metadata)
    return metadata


def write_like_the_script(folder: Path, sequences: NDArray[Any], num_shards: int = 3) -> None:
    """Writes a folder as the script does: plain shards, and the metadata of its description."""
    folder.mkdir(parents=True, exist_ok=True)
    total, seq_len = sequences.shape
    for number, part in enumerate(np.array_split(sequences, num_shards)):
        part.tofile(folder / f"shard_{number:04d}.bin")
    metadata = {
        "version": 2,
        "shuffle_type": "global_permutation_fast",
        "seq_len": seq_len,
        "total_sequences": total,
        "num_shards": num_shards,
        "domain_stats": {"domain_A": total // 2, "domain_B": total - total // 2},
        "shard_sizes": sizes_of(total, num_shards),
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2))


def checksums_of(folder: Path) -> dict[str, str]:
    """The checksums of all shards' files."""
    return {
        path.name: checksum([path.read_bytes()])
        for path in sorted(folder.glob("shard_*"))
        if not path.name.endswith(".json")
    }
