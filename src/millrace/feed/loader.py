"""The loader: micro batches of one rank, and one number of state."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from millrace.checks import shown, whole
from millrace.errors import ConfigError, ResumeError, ViewChangeWarning
from millrace.feed.datasets import Dataset
from millrace.feed.samplers import Sampler, SequentialSampler
from millrace.feed.samples import Batch

STATE_VERSION = 3
"""It rises when states of earlier versions cannot be compared with fingerprints of today."""

_LEAVES = (str, int, float, np.generic, type(None))  # of a fingerprint
_MOST_LINES = 10  # differences in a message
_MOST_SHOWN = 80  # characters of a value in a message
_VIEW_OPTIONS = ("eod_token", "pad_token", "reset_position_ids", "eod_mask_loss")  # of version 2


class Loader:
    """Iterates over the micro batches of one data-parallel rank.

    All ranks together see the samples in one global order, whatever their number, their micro
    batch and the places where they stopped: a state that was saved by one rank of a run resumes
    every rank of another run at the very next sample.

    Several threads may draw from one loader: each step is handed out once, in any order among them,
    and one at a time. After an error in a step, which `transform` may raise too, the position is
    where it was before: the next call tries the same step again. If `transform` asks the loader for
    a batch, it gets that of the next step.

    Args:
        dataset: Dataset to draw from: `GPTDataset`, `BlendedDataset` or another one with the
            methods of `millrace.feed.Dataset`.
        sampler: Which samples this rank takes at each step. None: a `SequentialSampler` of the
            next arguments, which belong to it.
        micro_batch_size: Number of samples in a batch.
        data_parallel_rank: Number of this rank, 0 to data_parallel_size - 1.
        data_parallel_size: Number of ranks.
        drop_last: Whether to leave out a last block that does not fill every rank's micro batch;
            else ranks may get shorter batches, and none, at the last step.
        consumed_samples: Number of samples that all ranks have consumed before the first batch.
        transform: Function that is called with each batch, a dict of arrays [micro_batch_size,
            sequence_length]; `millrace.torch.to_tensors` makes torch tensors of them.

    Raises:
        ConfigError: A number outside its limits.

    Example:
        >>> class Numbers:
        ...     def __len__(self):
        ...         return 6
        ...     def batch(self, sample_numbers):
        ...         return {"tokens": np.asarray(sample_numbers) * 10}
        ...     def fingerprint(self):
        ...         return {"kind": "numbers"}
        >>> loader = Loader(Numbers(), micro_batch_size=3)
        >>> next(loader)["tokens"], loader.consumed_samples
        (array([ 0, 10, 20]), 3)
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        sampler: Sampler | None = None,
        micro_batch_size: int | None = None,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        consumed_samples: int = 0,
        drop_last: bool = True,
        transform: Callable[[Batch], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        if sampler is None:
            sampler = _sequential_sampler(
                len(dataset), micro_batch_size, data_parallel_rank, data_parallel_size, drop_last
            )
        elif (micro_batch_size, data_parallel_rank, data_parallel_size, drop_last) != (
            None,
            0,
            1,
            True,
        ):
            raise ConfigError(
                "micro_batch_size, data_parallel_rank, data_parallel_size and drop_last are the "
                "sampler's: leave them out where a sampler is given"
            )
        self.sampler = sampler
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
            self._next = whole("consumed_after", self.sampler.consumed_after(start), start)
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

        A state with another view (masks, padding) is accepted with a ViewChangeWarning.

        Raises:
            ResumeError: A state of other data, another order or another version; the message says
                what differs.
            ConfigError: A consumed_samples that is not a whole number, or more than the dataset
                has.
        """
        if not isinstance(state, Mapping):
            raise ResumeError(f"the state is {shown(state)}: it is not a Loader's")
        missing = {"version", "consumed_samples", "fingerprint"} - set(state)
        if missing:
            raise ResumeError(
                f"the state has no {', '.join(sorted(missing))}: it is not a Loader's"
            )
        version, consumed_samples = state["version"], state["consumed_samples"]
        saved = state["fingerprint"]
        is_number = isinstance(version, (int, np.integer))
        if is_number and version == 1:
            raise ResumeError(
                "the state has version 1, of an earlier millrace, which noted less of the data: it "
                "cannot be compared. The order has stayed the same: if data and options have too, "
                f"go on with Loader(..., consumed_samples={shown(consumed_samples)})"
            )
        if is_number and version == 2:
            saved = _from_version_2(saved)
        elif not is_number or version != STATE_VERSION:
            raise ResumeError(
                f"the state has version {shown(version)}; this millrace reads {STATE_VERSION}"
            )
        differences = list(_differences(saved, self.dataset.fingerprint()))
        order = [line for line, is_view in differences if not is_view]
        if order:
            raise ResumeError(
                f"the state was saved with other data or another order:\n{_listed(order)}\n"
                "Restore what differs, or start a new order with consumed_samples=0"
            )
        self._seek(consumed_samples)
        if differences:
            warnings.warn(
                "the same tokens follow, but their masks or padding differ from those of the saved "
                f"state:\n{_listed([line for line, _ in differences])}",
                ViewChangeWarning,
                stacklevel=2,
            )

    def _seek(self, consumed_samples: int) -> None:
        consumed_samples = whole("consumed_samples", consumed_samples, 0)
        is_sequential = isinstance(self.sampler, SequentialSampler)
        if is_sequential and consumed_samples > len(self.dataset):  # others may go round
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


def _sequential_sampler(
    num_samples: int, micro_batch_size: Any, rank: int, size: int, drop_last: bool
) -> SequentialSampler:
    sampler = SequentialSampler(
        num_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=size,
        drop_last=drop_last,
    )
    if drop_last and sampler.block_size > num_samples:
        raise ConfigError(
            f"micro_batch_size * data_parallel_size is {sampler.block_size}; the dataset "
            f"has {num_samples} samples, so that no step is complete. Lower one of them, or "
            "pass drop_last=False"
        )
    return sampler


def _from_version_2(fingerprint: Any) -> Any:
    """A fingerprint of version 2, which had no view, and no version of the rules: it was 1."""
    kind = fingerprint.get("kind") if isinstance(fingerprint, Mapping) else None
    if not (isinstance(kind, str) and kind in ("gpt", "blend")):
        return fingerprint  # another dataset's
    moved = {"rules": 1, **fingerprint}
    if kind == "gpt":
        moved["view"] = {name: moved.pop(name, None) for name in _VIEW_OPTIONS}
    elif isinstance(moved.get("datasets"), (list, tuple)):
        moved["datasets"] = [_from_version_2(dataset) for dataset in moved["datasets"]]
    return moved


def _listed(lines: list[str]) -> str:
    more = [f"  and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "\n".join([f"  {line}" for line in lines[:_MOST_LINES]] + more)


def _differences(
    saved: Any, present: Any, place: str = "", is_view: bool = False
) -> Iterator[tuple[str, bool]]:
    """Where two fingerprints differ: a short line each, and whether that is in a view."""
    if isinstance(saved, Mapping) and isinstance(present, Mapping):
        for key in dict.fromkeys([*saved, *present]):
            at = f"{place}.{key}" if place else str(key)
            yield from _differences(saved.get(key), present.get(key), at, is_view or key == "view")
    elif isinstance(saved, (list, tuple)) and isinstance(present, (list, tuple)):
        entries = (
            difference
            for number, pair in enumerate(zip(saved, present, strict=False))
            for difference in _differences(*pair, f"{place}[{number}]", is_view)
        )
        if len(saved) == len(present):
            yield from entries
        else:
            line = f"{place}: saved {len(saved)} entries, now {len(present)}"
            first = next(entries, None)
            yield line if first is None else f"{line}; first difference at {first[0]}", is_view
    elif not (isinstance(saved, _LEAVES) and isinstance(present, _LEAVES)) or saved != present:
        line = f"{place}: saved {shown(saved, _MOST_SHOWN)}, now {shown(present, _MOST_SHOWN)}"
        yield line, is_view
