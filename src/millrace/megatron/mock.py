"""GPT datasets of made-up tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.megatron.config import GPTDatasetConfig
from millrace.megatron.errors import require
from millrace.megatron.gpt import GPTDataset
from millrace.megatron.utils import Split


class MockGPTLowLevelDataset:
    """Sequences of random lengths: the tokens 1, 2, 3, ... and an EOD token at the end.

    Args:
        tokenizer: Tokenizer, for the size of the vocabulary and the EOD token.
    """

    seed: int = 0
    size: int = 100000
    max_sequence_length: int = 4096

    def __init__(self, tokenizer: Any) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eod_token = tokenizer.eod
        random = np.random.default_rng(seed=self.seed)
        self.sequence_lengths = random.integers(
            low=1, high=self.max_sequence_length, size=self.size, dtype=np.int32
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: Any) -> NDArray[np.int64]:
        """A sequence's tokens, int64 [length]."""
        tokens: NDArray[np.int64] = np.arange(1, self.sequence_lengths[idx] + 1, dtype=np.int64)
        tokens %= self.vocab_size
        tokens[-1] = self.eod_token
        return tokens

    def get(self, idx: Any, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Tokens [offset, offset + length) of a sequence; without a length, all from `offset`."""
        return self[idx][offset : None if length is None else offset + length]


class MockGPTDataset(GPTDataset):
    """A GPT dataset of made-up tokens, for a configuration without a blend."""

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        require(config.mock, "MockGPTDataset needs a configuration without a blend (mock is False)")
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(  # type: ignore[override]
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> MockGPTLowLevelDataset:
        """The made-up sequences; the path is not used."""
        return MockGPTLowLevelDataset(config.tokenizer)
