"""Torch tensors of numpy batches, on the CPU or on a device."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from millrace.checks import check_bool
from millrace.errors import ConfigError


def to_tensors(batch: Mapping[str, NDArray[Any]], *, pin: bool = False) -> dict[str, torch.Tensor]:
    """A batch as torch tensors that share its memory: a `transform` or `prepare` of a loader.

    Of a list of batches, such as the `micro_batches` of a `FinishedDataset`, each is converted.
    A read-only array is copied: torch has no read-only tensors. So the tensors may be changed in
    place; only labels that are a view of the tokens (`share_labels`) change with them.

    Args:
        batch: Arrays of any shape, of integers, booleans or floats.
        pin: Whether to copy the tensors to pinned memory, from which copies to a GPU run beside the
            computation. No effect without CUDA.

    Returns:
        CPU tensors of the same shapes and dtypes (`uint16` needs torch 2.3 or newer). An array that
        torch cannot map (big-endian, or with a negative stride) is copied, too; a tensor stays, and
        so does a Python number.

    Raises:
        ConfigError: A dtype that torch does not have, such as strings or objects.
    """
    tensors = _each(batch, _tensor)
    if check_bool("pin", pin) and torch.cuda.is_available():
        return _each(tensors, lambda _, tensor: tensor.pin_memory())
    return tensors


def to_device(
    device: torch.device | str | int, *, stream: Any = None
) -> Callable[[Mapping[str, NDArray[Any]]], dict[str, torch.Tensor]]:
    """A `prepare` function for a loader that copies each batch to a device ahead of its use.

    The loader's threads call it, so a batch is there when the trainer asks for it. On a CUDA device
    the copy runs on a separate stream, beside the computation. These threads call CUDA at any time,
    so capture a CUDA graph with `capture_error_mode="thread_local"` while they run.

    Args:
        device: The device, for example "cuda:0"; "cpu" is the same as `to_tensors`.
        stream: The CUDA stream that the trainer computes on. None: the device's default stream.

    Returns:
        Function from a batch of arrays to tensors on the device.

    Raises:
        ConfigError: A device that torch does not know or that is not available. The function raises
            it in a worker process of a DataLoader, whose tensors on a GPU would outlive it.
    """
    try:
        target = torch.device(device)
        if target.type != "cuda":
            torch.empty(0, device=target)  # "mps" is known, but not always there
            return partial(_copy, device=target)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {device!r}: {error}") from None
    count = torch.cuda.device_count()
    if (target.index or 0) >= count:
        problem = f"device is {device!r}; this process sees {count} CUDA devices"
        raise ConfigError(f"{problem}: give one of them, or 'cpu'")
    index = torch.cuda.current_device() if target.index is None else target.index
    return partial(_copy_to_cuda, device=torch.device("cuda", index), stream=stream)


def _each(batch: Mapping[str, Any], function: Callable[[str, Any], Any]) -> dict[str, Any]:
    """What a function of name and value makes of each array, also in lists of batches; numbers
    stay."""

    def of(name: str, value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return [_each(one, function) for one in value]
        return value if type(value) in (int, float) else function(name, value)

    return {name: of(name, value) for name, value in batch.items()}


def _tensor(name: str, array: Any) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    array = np.asarray(array)
    is_backwards = min(array.strides, default=0) < 0
    if is_backwards or not (array.dtype.isnative and array.flags.writeable):
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array)
    except TypeError:
        what = f"{name!r} is an array of {array.dtype}, which torch does not have"
        raise ConfigError(f"{what}: leave it out, or convert it") from None


def _copy(batch: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    return _each(to_tensors(batch), lambda _, tensor: tensor.to(device))


def _copy_to_cuda(
    batch: Mapping[str, NDArray[Any]], device: torch.device, stream: Any
) -> dict[str, torch.Tensor]:
    if get_worker_info() is not None:
        raise ConfigError(
            "to_device would copy to a GPU in a worker process of a DataLoader: leave it out of "
            "the loader, give the DataLoader pin_memory=True, and copy in the trainer"
        )
    user = torch.cuda.default_stream(device) if stream is None else stream
    side = _copy_stream(device)
    pinned = to_tensors(batch, pin=True)
    with torch.cuda.stream(side):
        copies = _each(pinned, lambda _, tensor: tensor.to(device, non_blocking=True))
    # Else their memory could be reused while the trainer still reads.
    _each(copies, lambda _, copy: copy.record_stream(user))
    side.synchronize()  # only the loader's thread waits
    return copies


@lru_cache
def _copy_stream(device: torch.device) -> Any:
    """One stream per device: torch's allocator keeps free memory by stream."""
    return torch.cuda.Stream(device)
