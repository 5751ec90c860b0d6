"""A stranger's packer: whole documents side by side, with the masks of each document alone."""

from pathlib import Path
from typing import Any

import numpy as np

from millrace import GPTDataset, IndexedDataset, IndexedDatasetBuilder, Loader
from millrace.order import Spans

DOCUMENTS = [[5, 6, 7], [8, 0, 9, 4], [1, 2], [3, 3, 3, 3, 3], [2]]  # 0 is EOD, by chance in one


class WholeDocuments:
    """Fills each sample with whole documents, in their order, as long as they fit."""

    def __init__(self, lengths: Any, capacity: int) -> None:
        self.capacity, self.lengths = capacity, np.asarray(lengths, np.int64)
        self.starts, room = [0], capacity
        for document, length in enumerate(self.lengths.tolist()):
            if length > room:
                self.starts.append(document)
                room = capacity
            room -= length
        self.starts.append(len(self.lengths))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def spans(self, sample_numbers: Any) -> Spans:
        ranges = [range(self.starts[n], self.starts[n + 1]) for n in sample_numbers.tolist()]
        documents = np.array([document for one in ranges for document in one], np.int64)
        bounds = np.cumsum([0, *map(len, ranges)])
        return Spans(documents, np.zeros_like(documents), self.lengths[documents], bounds)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "whole documents", "capacity": self.capacity}


def test_packed_documents_do_not_see_each_other(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        for document in DOCUMENTS:
            builder.add_document(document)
    data = IndexedDataset(tmp_path / "text")
    packer = WholeDocuments(data.sequence_lengths, 8)
    dataset = GPTDataset(
        data, sequence_length=8, add_extra_token=False, order=packer, boundaries="documents"
    )
    fields = ("tokens", "labels", "loss_mask", "position_ids", "document_ids", "cu_seqlens")
    loader = Loader(dataset, micro_batch_size=2, fields=(*fields, "document_numbers"))
    batch = next(loader)
    assert batch["tokens"].tolist() == [[5, 6, 7, 8, 0, 9, 4, 0], [1, 2, 3, 3, 3, 3, 3, 2]]
    assert batch["labels"].tolist() == [[6, 7, 0, 0, 9, 4, 0, 0], [2, 0, 3, 3, 3, 3, 0, 0]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 4, 0]]
    assert batch["document_ids"].tolist() == [[0] * 3 + [1] * 4 + [2], [0] * 2 + [1] * 5 + [2]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 7, 8, 10, 15, 16]
    assert batch["document_numbers"].tolist() == [0, 1, -1, 2, 3, 4]
