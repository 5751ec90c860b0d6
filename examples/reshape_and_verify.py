"""`millrace verify`, `merge`, `split` and `convert` by the API."""

import tempfile

import numpy as np

from millrace import IndexedDataset, IndexedDatasetBuilder
from millrace.jobs import convert, merge, split
from millrace.store import verify


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = f"{folder}/mill"
        with IndexedDatasetBuilder(
            source, np.uint16, checksums=True, provenance={"source": "an example"}
        ) as builder:
            builder.add_document([1, 2, 3, 4], lengths=[3, 1])
            builder.add_documents(np.arange(10), [4, 0, 6])
        print(verify([source])[0])

        shards = split(source, f"{folder}/shard", documents=2)
        merged = merge(shards, f"{folder}/merged")
        print(merged, [document.tolist() for document in merged[:]])
        flat, offsets = merged.read([2, 0, -1])
        print("three sequences at once:", flat.tolist(), offsets.tolist())

        convert(source, f"{folder}/tokens.npy", dtype=np.int32)
        convert(f"{folder}/tokens.npy", f"{folder}/again", document_end=4)
        print(IndexedDataset(f"{folder}/again"))


if __name__ == "__main__":
    main()
