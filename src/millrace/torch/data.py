"""What a torch DataLoader takes: a map-style dataset, a batch sampler, an iterable dataset.

    DataLoader(MapDataset(dataset), batch_sampler=BatchSampler(sampler), collate_fn=collate)
    DataLoader(IterableDataset(loader), batch_size=None)

Both work with any number of workers and any start method, also in torchdata's StatefulDataLoader,
whose state resumes at the batch after the last one that the trainer got.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import data

from millrace.checks import check_int, shown
from millrace.deferred import cached_property
from millrace.errors import ConfigError, ResumeError
from millrace.feed import Dataset, Loader, Sampler
from millrace.feed.state import SAMPLER_REMEDY, STATE_VERSION, Fingerprint, Position
from millrace.feed.stream_data import IN_TURN
from millrace.samples.dataset import batch_of_form
from millrace.samples.fields import form_of
from millrace.samples.tokens import fingerprint_of
from millrace.sampling.samplers import checked_position, num_steps, steps_on
from millrace.torch.tensors import to_tensors

Tensors = dict[str, torch.Tensor]


class MapDataset(data.Dataset):  # type: ignore[misc]
    """A dataset by sample number, for `DataLoader(dataset, batch_sampler=...)`.

    A DataLoader reads each batch by one call of the core, and hands it over as it is with
    `collate_fn=collate`; any other collate function gets a list of samples.

    The state is the fingerprint of the data and their order. torchdata's StatefulDataLoader saves
    and compares it; with torch's DataLoader, save it beside the position of `BatchSampler`.

    Args:
        dataset: `GPTDataset`, `BlendedDataset` or another `millrace.feed.Dataset`.
        fields: Names of a batch's arrays, as in `millrace.Loader`.
        token_dtype: Dtype of tokens and labels: "int64", "int32", or "file" for the file's own.

    Raises:
        ConfigError: A dtype that does not exist.
    """

    def __init__(
        self, dataset: Dataset, *, fields: tuple[str, ...] | None = None, token_dtype: str = "int64"
    ) -> None:
        _check_kind("dataset", dataset, "batch", "a dataset, for example a millrace.GPTDataset")
        self.dataset = dataset
        self._fingerprint = Fingerprint(dataset, None)
        self._state: dict[str, str] | None = None
        self._form = form_of(fields, token_dtype=token_dtype)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample_number: int) -> Tensors:
        """One sample: tensors without a batch dimension."""
        return self.__getitems__([sample_number])[0]

    def __getitems__(self, sample_numbers: Sequence[int]) -> Sequence[Tensors]:
        """The samples of a batch, of which `collate` takes the whole."""
        numbers = np.asarray(sample_numbers, None if len(sample_numbers) else np.int64)
        batch = to_tensors(batch_of_form(self.dataset, numbers, self._form))
        return _Rows(batch, len(sample_numbers))

    def state_dict(self) -> dict[str, str]:
        """The fingerprint of the data and their order."""
        if self._state is None:  # a StatefulDataLoader asks at each batch
            state = {"version": STATE_VERSION, "consumed_samples": 0}
            self._state = _as_text(state | {"fingerprint": self._fingerprint.at(len(self))})
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compares a saved fingerprint, as `Loader.load_state_dict` does.

        Raises:
            ResumeError: A state of other data or another order, or not a `MapDataset`'s.
        """
        self._fingerprint.read_state(_of_text(state, "MapDataset"), len(self))


class _Rows(Sequence[Tensors]):
    """The samples of one batch, in one tensor per name."""

    def __init__(self, batch: Tensors, length: int) -> None:
        self.batch = batch
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: Any) -> Any:
        return self._samples[row]

    @cached_property
    def _samples(self) -> list[Tensors]:
        """For another function than `collate`: views of the batch."""
        remedy = "pass collate_fn=millrace.torch.collate to the DataLoader"
        if not self._length:
            raise IndexError(f"the batch has no samples: if batches may be empty, {remedy}")
        for name, tensor in self.batch.items():
            if getattr(tensor, "ndim", 0) == 0 or len(tensor) != self._length:
                raise ConfigError(f"{name} belongs to a whole batch, not to its samples: {remedy}")
        rows = zip(*self.batch.values(), strict=True)
        return [dict(zip(self.batch, row, strict=True)) for row in rows]


def collate(samples: Sequence[Tensors]) -> Tensors:
    """The batch of samples of a `MapDataset`, without a copy if they were read as a batch."""
    if isinstance(samples, _Rows):
        return samples.batch
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


class BatchSampler(data.Sampler):  # type: ignore[misc]
    """The steps of a sampler, for `DataLoader(MapDataset(dataset), batch_sampler=...)`.

    An iteration, also `next(iter(data_loader))`, starts at `consumed_samples`, the first after
    `load_state_dict` at the saved position. A DataLoader with workers asks for batches ahead of the
    trainer, so `state_dict()` is ahead as well: torchdata's StatefulDataLoader takes this into
    account. With torch's DataLoader, save `state_after(num_batches)`.

    Args:
        sampler: The sampler of this rank.
        consumed_samples: Number of samples that all ranks have consumed before an iteration.

    Raises:
        ConfigError: A consumed_samples where no step can start.
    """

    def __init__(self, sampler: Sampler, consumed_samples: int = 0) -> None:
        _check_kind("sampler", sampler, "has_step", "a sampler, as millrace.SequentialSampler,")
        self.sampler = sampler
        self.consumed_samples = checked_position(self.sampler, consumed_samples)
        self._start = self._next_start = self._position = self.consumed_samples

    def __iter__(self) -> Iterator[list[int]]:
        self._start = self._position = self._next_start
        return self._steps()

    def _steps(self) -> Iterator[list[int]]:
        # Not in __iter__: torch makes two iterators if it has workers, and draws from the second.
        position, self._next_start = self._next_start, self.consumed_samples
        while self.sampler.has_step(position):
            numbers = self.sampler.sample_numbers(position).tolist()
            self._position = position = self.sampler.consumed_after(position)
            yield numbers
        self._position = self._next_start  # of the next epoch, where a StatefulDataLoader resumes

    def __len__(self) -> int:
        """Number of steps from `consumed_samples`, also after a resume; TypeError if not known."""
        return num_steps(self.sampler, self.consumed_samples)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step handed out, and the sampler's fingerprint."""
        return self._state(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Starts the next iteration at a saved position.

        Raises:
            ResumeError: A state without `consumed_samples`, or of a sampler with another order.
            ConfigError: A position where no step can start.
        """
        if not isinstance(state, Mapping) or "consumed_samples" not in state:
            raise ResumeError(f"the state is {shown(state)}; it has no consumed_samples")
        position = check_int("consumed_samples", state["consumed_samples"], 0)
        saved, now = (one.get("sampler", {}) for one in (state, self._state(position)))
        if saved != now:
            raise ResumeError(
                f"the state was saved by a sampler with another order: {shown(saved)}, now "
                f"{shown(now)}. {SAMPLER_REMEDY}: restore them"
            )
        self._start = self._next_start = self._position = checked_position(self.sampler, position)

    def state_after(self, num_batches: int) -> dict[str, Any]:
        """The state after so many batches of this iteration, or of the next after a resume."""
        return self._state(_position_after(self.sampler, self._start, num_batches))

    def _state(self, consumed_samples: int) -> dict[str, Any]:
        state: dict[str, Any] = {"consumed_samples": consumed_samples}
        if getattr(self.sampler, "fingerprint", None):
            fingerprint = fingerprint_of(self.sampler, consumed_samples)
            state |= {"sampler": fingerprint} if fingerprint else {}
        return state


class IterableDataset(data.IterableDataset):  # type: ignore[misc]
    """The batches of a loader, for `DataLoader(dataset, batch_size=None)`.

    Each of n workers makes every n-th batch, in a copy of the loader, which itself stays where it
    is. So save the state of torchdata's StatefulDataLoader, or with torch's DataLoader
    `state_after(num_batches)`. Without workers the loader itself advances: save its `state_dict()`.
    An iteration after the end starts where the loader stood before the first one; after a resume
    that is the saved position: move the loader to consumed_samples=0 before the next epoch, as a
    StatefulDataLoader does. After a move, make a new DataLoader if its workers are persistent.

    Args:
        loader: The loader of this rank. With `fields`, it needs `transform=to_tensors`: torch's own
            conversion warns about arrays that batches share.

    Raises:
        ConfigError: Anything but a `millrace.Loader`, such as its dataset, or an iteration without
            batches, because the loader was moved to its end.
    """

    def __init__(self, loader: Loader) -> None:
        _check_kind("loader", loader, "batch_at", "a millrace.Loader")
        self.loader = loader
        # Of the iterations in this process: where they started, stand, and came to the end.
        self._start, self._position, self._end = Position(-1), -1, -1

    def __len__(self) -> int:
        """The number of steps from sample 0: `len(loader)`."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        worker = data.get_worker_info()
        if worker is None:
            self._rewind()
        elif isinstance(self.loader.dataset, IN_TURN):
            raise ConfigError("what is read in turn cannot be shared by workers: use num_workers=0")
        start = self.loader.consumed_samples
        if start > 0 and not self.loader.sampler.has_step(start):
            raise ConfigError(
                f"the loader stands at its end, consumed_samples={start}: for another epoch, "
                "loader.load_state_dict(loader.state_dict(0))"
            )
        if worker is None:
            return _Steps(self)
        return _WorkerSteps(self.loader, worker.id, worker.num_workers)

    def _rewind(self) -> None:
        """Moves the loader from its end back to where iterations started."""
        loader, position = self.loader, self.loader.consumed_samples
        if position != self._position:  # the first iteration, or the caller has moved the loader
            self._start = loader._position
        elif position == self._end or not loader.sampler.has_step(position):
            loader._seek(self._start)

    def state_after(self, num_batches: int) -> dict[str, Any]:
        """The loader's state after so many batches of a DataLoader with workers.

        It resumes with any number of workers and ranks: `loader.load_state_dict(state)`, then a new
        DataLoader.

        Raises:
            ConfigError: The loader was iterated in this process and has advanced, or fewer batches
                are left.
        """
        if self._start.consumed_samples >= 0:
            raise ConfigError(
                "the loader was iterated in this process, so its position counts: save "
                "loader.state_dict()"
            )
        start = self.loader.consumed_samples
        return self.loader.state_dict(_position_after(self.loader.sampler, start, num_batches))


class _Steps(Iterator[Any]):
    """The loader as an iterator whose state a StatefulDataLoader saves."""

    def __init__(self, dataset: IterableDataset) -> None:
        self._dataset, self._loader = dataset, dataset.loader

    def __next__(self) -> Any:
        try:
            return next(self._loader)
        except StopIteration:
            self._dataset._end = self._loader.consumed_samples
            raise
        finally:
            self._dataset._position = self._loader.consumed_samples

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._dataset._position = self._loader.consumed_samples


class _WorkerSteps(Iterator[Any]):
    """Every n-th step of a loader, in a worker process; its state is at its next step."""

    def __init__(self, loader: Loader, worker: int, num_workers: int) -> None:
        self._loader = copy.copy(loader)  # persistent workers start again from the original
        self._num_workers = num_workers
        self._position = steps_on(loader.sampler, loader.consumed_samples, worker)[0]

    def __next__(self) -> Any:
        if not self._loader.sampler.has_step(self._position):
            raise StopIteration
        batch = self._loader.batch_at(self._position)
        self._position = steps_on(self._loader.sampler, self._position, self._num_workers)[0]
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._position = self._loader.consumed_samples


class CheckpointState:
    """A loader's state as one entry of a `torch.distributed.checkpoint`.

    torch.distributed.checkpoint loads only the values that the present state has: a blend that has
    lost a dataset would load without an error. Here one text holds all, to be compared.

    Args:
        loader: The loader, or another object with `state_dict` and `load_state_dict` whose state
            JSON can hold.

    Raises:
        ConfigError: An object without these methods, such as a dataset.
    """

    def __init__(self, loader: Any) -> None:
        for method in ("state_dict", "load_state_dict"):
            _check_kind("loader", loader, method, "a millrace.Loader, or a StatefulDataLoader,")
        self._loader = loader

    def state_dict(self) -> dict[str, str]:
        """The state as JSON."""
        return _as_text(self._loader.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state.

        Raises:
            ResumeError: A state of other data or another order, or not a `CheckpointState`.
        """
        self._loader.load_state_dict(_of_text(state, "CheckpointState"))


def _as_text(state: Any) -> dict[str, str]:
    return {"json": json.dumps(state)}


def _of_text(state: Any, saver: str) -> Any:
    text = state.get("json") if isinstance(state, Mapping) else None
    if not isinstance(text, str):
        raise ResumeError(f"the state is {shown(state)}; it was not saved by {saver}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ResumeError(f"the state is not JSON ({error}): it is damaged") from None


def _check_kind(name: str, value: Any, method: str, kind: str) -> None:
    if not callable(getattr(value, method, None)):
        raise ConfigError(f"{name} is a {type(value).__name__}; {kind} is needed")


def _position_after(sampler: Sampler, position: int, num_batches: int) -> int:
    count = check_int("num_batches", num_batches, 0)
    position, left = steps_on(sampler, position, count)
    if left < count:
        raise ConfigError(f"num_batches is {count}; only {left} batches are left")
    return position
