"""From which source each sample is drawn: what a mixture is, and Megatron-LM's blend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import whole, whole_numbers
from millrace.deferred import Deferred
from millrace.errors import ConfigError
from millrace.order.blends import blend, blend_exhaustively, count_draws
from millrace.order.spans import RULES_VERSION

_CHUNK_SIZE = 1 << 22  # draws to search at a time


class Mixture(Protocol):
    """From which source each sample is drawn: a pure function of the sample number.

    `BlendedDataset(datasets, order=...)` takes any mixture. A source is the number of a dataset;
    each source gives its samples in order, so that the n-th draw from it is its sample n.
    """

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def draws(self, sample_numbers: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The sources of some samples, and the samples' numbers in them.

        Args:
            sample_numbers: int64 [batch], each in [0, len).

        Returns:
            The sources, integers [batch], and the numbers, int64 [batch].
        """
        ...

    def find(self, source: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The reverse of `draws`: the sample numbers of some samples of a source.

        Returns:
            int64 [numbers]; -1 for a sample that the mixture never draws.
        """
        ...

    def counts(self, sample_number: int) -> NDArray[np.int64]:
        """How many samples of each source are drawn before a sample number: int64 [sources]."""
        ...

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the draws, as plain values, for comparison with a saved state.

        Args:
            consumed_samples: Number of samples that were drawn; what decides only later draws may
                be left out. None: all draws.
        """
        ...


class BlendIndices(NamedTuple):
    """The indices of a blend.

    Attributes:
        dataset_index: Number of the dataset that each sample comes from: int16 [size].
        dataset_sample_index: Number of the sample in that dataset: int64 [size].
    """

    dataset_index: NDArray[np.int16]
    dataset_sample_index: NDArray[np.int64]


class BlendOrder:
    """Megatron-LM's mixture: from which dataset a blend draws each sample.

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

    def draws(
        self, sample_numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """See `Mixture.draws`."""
        return _native.look_up_draws(*self.indices, sample_numbers)

    def find(self, source: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Mixture.find`; reads the index up to the last of the draws."""
        whole("the source", source, 0, len(self.weights) - 1)
        numbers = whole_numbers("numbers", numbers)
        found = np.full(len(numbers), -1, np.int64)
        index, num_passed = self.indices.dataset_index, 0
        for start in range(0, len(index), _CHUNK_SIZE):
            places = np.flatnonzero(index[start : start + _CHUNK_SIZE] == source)
            is_here = (num_passed <= numbers) & (numbers < num_passed + len(places))
            found[is_here] = start + places[numbers[is_here] - num_passed]
            num_passed += len(places)
            if np.all(numbers < num_passed):
                break
        return found

    def counts(self, sample_number: int) -> NDArray[np.int64]:
        """See `Mixture.counts`."""
        sample_number = whole("sample_number", sample_number, 0, len(self))
        return count_draws(self.indices.dataset_index[:sample_number], len(self.weights))

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the draws, as plain values: all of them, since weights decide them all."""
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
