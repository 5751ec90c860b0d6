"""The loader: micro batches of one rank, and one number of state."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from millrace.checks import shown, whole
from millrace.errors import ConfigError, ResumeError
from millrace.feed.datasets import Batch
from millrace.feed.samplers import SequentialSampler

STATE_VERSION = 2
"""Rises when states of earlier versions cannot be compared with fingerprints of today."""

_PLAIN = (str, int, float, np.generic, type(None))  # the leaves of a fingerprint
_MOST_LINES = 10  # of what differs, in a message
_MOST_SHOWN = 80  # characters of a value in such a line


class Dataset(Protocol):
    """What the loader needs of a dataset."""

    def __len__(self) -> int: ...

    def batch(self, sample_numbers: ArrayLike) -> Batch: ...

    def fingerprint(self) -> dict[str, Any]: ...


class Loader:
    """Iterates over the micro batches of one data-parallel rank.

    All ranks together see the samples in one global order, whatever their number, their micro
    batch and the places where they stopped: a state that was saved by one rank of a run resumes
    every rank of another one at the very next sample.

    Several threads may draw from one loader: each step is handed out once, in any order among them,
    and one at a time. After an error in a step, which `transform` may raise too, the position is
    where it was before: the next call tries the same step again. `transform` may use the loader:
    a batch that it asks for is that of the next step.

    Args:
        dataset: `GPTDataset` or `BlendedDataset`.
        micro_batch_size: samples in a batch.
        data_parallel_rank: this rank, 0 to data_parallel_size - 1.
        data_parallel_size: number of ranks.
        consumed_samples: by all ranks, before the first batch.
        drop_last: leave out a last block that does not fill every rank's micro batch; else ranks
            may get shorter batches, and none, at the last step.
        transform: called with each batch, which is a dict of arrays [micro_batch_size,
            sequence_length]; `millrace.torch.to_tensors` makes torch tensors of them.

    Raises:
        ConfigError: a number outside its limits.

    Example:
        >>> loader = Loader(dataset, micro_batch_size=4)      # doctest: +SKIP
        >>> for batch in loader:                              # doctest: +SKIP
        ...     step(batch["tokens"], batch["labels"])
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        consumed_samples: int = 0,
        drop_last: bool = True,
        transform: Callable[[Batch], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = SequentialSampler(
            len(dataset),
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            drop_last=drop_last,
        )
        if drop_last and self.sampler.block_size > len(dataset):
            raise ConfigError(
                f"micro_batch_size * data_parallel_size is {self.sampler.block_size}; the dataset "
                f"has {len(dataset)} samples, so that no step is complete. Lower one of them, or "
                "pass drop_last=False"
            )
        self.transform = transform
        self._lock = threading.RLock()
        _loaders.add(self)
        # `_next` is where the next step starts: ahead of what was handed out, while one is made.
        self._next = self._consumed_samples = 0
        self._seek(consumed_samples)

    @property
    def consumed_samples(self) -> int:
        """How many samples all ranks have been handed so far."""
        return self._consumed_samples

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        with self._lock:
            start = self._next
            if not self.sampler.has_step(start):
                raise StopIteration
            self._next = self.sampler.consumed_after(start)
            try:
                batch = self.dataset.batch(self.sampler.sample_numbers(start))
                result = batch if self.transform is None else self.transform(batch)
            except BaseException:
                self._next = self._consumed_samples = start
                raise
            self._consumed_samples = self._next
            return result

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._renew()
        _loaders.add(self)

    def _renew(self) -> None:
        """In another process there is no step under way."""
        self._lock = threading.RLock()
        self._next = self._consumed_samples

    def state_dict(self) -> dict[str, Any]:
        """The state to save with a checkpoint: plain numbers, strings, lists and dicts."""
        return {
            "version": STATE_VERSION,
            "consumed_samples": self._consumed_samples,
            "fingerprint": self.dataset.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state, also one of another rank, micro batch or number of ranks.

        Raises:
            ResumeError: the state is of other data, another order or another version; the message
                says what differs.
            ConfigError: its consumed_samples is no whole number, or more than the dataset has.
        """
        if not isinstance(state, Mapping):
            raise ResumeError(f"the state is {shown(state)}: it is no Loader's")
        missing = {"version", "consumed_samples", "fingerprint"} - set(state)
        if missing:
            raise ResumeError(f"the state has no {', '.join(sorted(missing))}: it is no Loader's")
        version, consumed_samples = state["version"], state["consumed_samples"]
        is_number = isinstance(version, (int, np.integer))
        if is_number and version == 1:
            raise ResumeError(
                "the state has version 1, of an earlier millrace, which noted less of the data: it "
                "cannot be compared. The order has stayed the same: if data and options have too, "
                f"go on with Loader(..., consumed_samples={shown(consumed_samples)})"
            )
        if not is_number or version != STATE_VERSION:
            raise ResumeError(
                f"the state has version {shown(version)}; this millrace reads {STATE_VERSION}"
            )
        lines = list(_differences(state["fingerprint"], self.dataset.fingerprint()))
        if lines:
            listed = "\n".join(f"  {line}" for line in lines[:_MOST_LINES])
            more = f"\n  and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
            raise ResumeError(
                f"the state was saved with other data or another order:\n{listed}{more}\n"
                "Restore what differs, or start a new order with consumed_samples=0"
            )
        self._seek(consumed_samples)

    def _seek(self, consumed_samples: int) -> None:
        consumed_samples = whole("consumed_samples", consumed_samples, 0)
        if consumed_samples > len(self.dataset):
            raise ConfigError(
                f"consumed_samples is {shown(consumed_samples)}; the dataset has "
                f"{len(self.dataset)} samples. Build it with a larger num_samples to train on"
            )
        with self._lock:
            self._next = self._consumed_samples = consumed_samples


_loaders: weakref.WeakSet[Loader] = weakref.WeakSet()


def _renew_all() -> None:
    for loader in _loaders:
        loader._renew()


os.register_at_fork(after_in_child=_renew_all)  # the thread that held a lock is not there any more


def _differences(saved: Any, present: Any, place: str = "") -> Iterator[str]:
    """Where two fingerprints differ, a short line each."""
    if isinstance(saved, Mapping) and isinstance(present, Mapping):
        for key in dict.fromkeys([*saved, *present]):
            at = f"{place}.{key}" if place else str(key)
            yield from _differences(saved.get(key), present.get(key), at)
    elif isinstance(saved, (list, tuple)) and isinstance(present, (list, tuple)):
        inside = (
            line
            for number, pair in enumerate(zip(saved, present, strict=False))
            for line in _differences(*pair, f"{place}[{number}]")
        )
        if len(saved) == len(present):
            yield from inside
        else:
            counts = f"{place}: saved {len(saved)} entries, now {len(present)}"
            first = next(inside, None)
            yield counts if first is None else f"{counts}; first difference at {first}"
    elif not (isinstance(saved, _PLAIN) and isinstance(present, _PLAIN)) or saved != present:
        yield f"{place}: saved {shown(saved, _MOST_SHOWN)}, now {shown(present, _MOST_SHOWN)}"
