"""A stranger's dataset that tokenises on the fly: a source of tokens in 20 lines."""

import json
from typing import Any

import numpy as np

from millrace import Loader
from millrace.feed import SampleOptions, TokenBatch, TokenDataset

TEXTS = ["the mill", "water turns the wheel", "grain", "stone on stone", "flour", "bread"]


class Bytes:
    """Sample k is the k-th text, cut to a sample; its tokens are its bytes."""

    def __init__(self, texts: list[str], length: int) -> None:
        self.texts, self.length = texts, length

    def __len__(self) -> int:
        return len(self.texts)

    def tokens(self, sample_numbers: Any) -> TokenBatch:
        rows = [self.texts[number].encode()[: self.length + 1] for number in sample_numbers]
        lengths = np.array([len(row) for row in rows], np.int64)
        return TokenBatch(
            tokens=np.frombuffer(b"".join(rows), np.uint8),
            ends=np.cumsum(lengths),
            part_starts=np.cumsum(lengths) - lengths,
            fields={"text_lengths": ("sample", lengths)},
        )

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        return {"kind": "bytes", "texts": self.texts[:consumed_samples]}


def loader_of(texts: list[str]) -> Loader:
    options = SampleOptions(sequence_length=12, boundaries="documents")
    fields = ("tokens", "loss_mask", "cu_seqlens", "text_lengths", "sample_numbers")
    dataset = TokenDataset(Bytes(texts, 12), options)
    return Loader(dataset, micro_batch_size=2, fields=fields, token_dtype="int32", threads=2)


def test_texts_are_tokenised_when_they_are_asked_for() -> None:
    loader = loader_of(TEXTS)
    batch = next(loader)
    assert bytes(batch["tokens"][0].astype(np.uint8)) == b"the mill\0\0\0\0"
    assert batch["tokens"].dtype == np.int32
    assert batch["loss_mask"].sum(axis=1).tolist() == [7, 12]
    assert batch["cu_seqlens"].tolist() == [0, 8, 12, 24]
    assert batch["text_lengths"].tolist() == [8, 13]
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = loader_of([*TEXTS, "more", "texts"])  # what is drawn later may change
    resumed.load_state_dict(state)
    assert next(resumed)["sample_numbers"].tolist() == [2, 3]
