"""torch at the edge: the only module that imports it."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def to_tensors(batch: dict[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    """A batch's arrays as torch tensors that share their memory. Pass it as a loader's `transform`.

    Args:
        batch: arrays of any shape, int64 or float32.

    Returns:
        CPU tensors of the same shapes and dtypes.
    """
    return {name: torch.from_numpy(array) for name, array in batch.items()}
