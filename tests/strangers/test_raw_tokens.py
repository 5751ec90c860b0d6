"""A headerless token file, trained on as it is: windows of the stream, permuted without a table."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, GPTDataset, Loader
from millrace.order import KeyedPermutation, Spans
from millrace.store import RawTokens
from millrace.testing import assert_resumes


@dataclass
class ShuffledWindows:
    """Sample k is a window of the stream, in an order of which there is no index."""

    num_tokens: int
    sequence_length: int
    seed: int

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self.sequence_length

    def spans(self, sample_numbers: np.ndarray) -> Spans:
        windows = KeyedPermutation(len(self), self.seed).sources(sample_numbers)
        counts = np.full(len(windows), self.sequence_length + 1)
        return Spans(None, windows * self.sequence_length, counts, np.arange(len(windows) + 1))

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "shuffled windows", **vars(self)}


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_a_headerless_file_is_trained_on_without_an_index(tmp_path: Path, access: Any) -> None:
    path = tmp_path / "part-00000.npy"  # as OLMo-core names files that have no header
    path.write_bytes(np.arange(1000, dtype=np.uint16).tobytes())
    tokens = RawTokens(path, np.uint16, access=access)
    order = ShuffledWindows(tokens.num_tokens, 16, seed=7)
    dataset = GPTDataset(tokens, sequence_length=16, order=order)
    batch = dataset.batch(np.arange(len(dataset)))
    np.testing.assert_array_equal(np.sort(batch["tokens"].reshape(-1)), np.arange(62 * 16))
    np.testing.assert_array_equal(batch["labels"], batch["tokens"] + 1)
    assert not np.array_equal(batch["tokens"][:, 0], np.sort(batch["tokens"][:, 0]))
    assert assert_resumes(partial(Loader, dataset, micro_batch_size=8), steps_after_resume=2) == 7
    with pytest.raises(ConfigError, match="document_numbers"):
        next(Loader(dataset, micro_batch_size=2, fields=("tokens", "document_numbers")))
