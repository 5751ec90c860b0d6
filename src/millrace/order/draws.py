"""The order of a blend: from which dataset each sample is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.deferred import Deferred
from millrace.errors import ConfigError
from millrace.order.blends import blend, blend_exhaustively, count_draws
from millrace.order.spans import RULES_VERSION


class BlendIndices(NamedTuple):
    """The indices of a blend.

    Attributes:
        dataset_index: Number of the dataset that each sample comes from: int16 [size].
        dataset_sample_index: Number of the sample in that dataset: int64 [size].
    """

    dataset_index: NDArray[np.int16]
    dataset_sample_index: NDArray[np.int64]


class BlendOrder:
    """From which dataset a blend draws each sample.

    Args:
        weights: Normalised weights.
        size: Number of samples.
        indices: The two indices, loaded at the first sample.
    """

    def __init__(
        self,
        weights: Sequence[float],
        size: int,
        indices: Deferred[BlendIndices],
    ) -> None:
        self.weights = list(weights)
        self._size = size
        self._indices = indices

    def __len__(self) -> int:
        return self._size

    @property
    def indices(self) -> BlendIndices:
        return self._indices.value

    def draws(self, sample_numbers: NDArray[np.int64]) -> BlendIndices:
        """The datasets of some samples, and the samples' numbers there.

        Args:
            sample_numbers: int64 [batch], each in [0, len).
        """
        return BlendIndices(*_native.look_up_draws(*self.indices, sample_numbers))

    def fingerprint(self) -> dict[str, Any]:
        """What decides the draws, as plain values."""
        return {
            "kind": "blend",
            "rules": RULES_VERSION,
            "size": len(self),
            "weights": self.weights,
        }


def build_blend_indices(
    names: Sequence[str], lengths: Sequence[int], weights: Sequence[float] | None, size: int | None
) -> BlendIndices:
    """The indices of a blend.

    Args:
        names: What to call each dataset in a message.
        lengths: Number of samples of each dataset.
        weights: Weight of each dataset; None: its length.
        size: Number of samples; None: all samples of all datasets.

    Raises:
        ConfigError: The blend draws more samples of a dataset than it has.
    """
    if size is None:
        indices = BlendIndices(*blend_exhaustively(lengths))
    else:
        indices = BlendIndices(*blend(lengths if weights is None else weights, size))
    counts = count_draws(indices.dataset_index, len(lengths)).tolist()
    short = [
        f"  dataset {number} ({name}): has {length}, {count} are drawn, {count - length} short"
        for number, (name, length, count) in enumerate(zip(names, lengths, counts, strict=True))
        if count > length
    ]
    if short:
        table = "\n".join(short)
        raise ConfigError(
            f"the blend draws more samples than {len(short)} of its datasets have:\n{table}\n"
            "Build these with a larger num_samples or surplus (see samples_per_dataset)"
        )
    return indices
