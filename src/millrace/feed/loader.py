"""The loader: micro batches of one rank, and one number of state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import ArrayLike

from millrace.errors import ConfigError, ResumeError
from millrace.feed.datasets import Batch
from millrace.feed.samplers import SequentialSampler

STATE_VERSION = 1


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
        self._consumed_samples = 0
        self._seek(consumed_samples)

    @property
    def consumed_samples(self) -> int:
        """How many samples all ranks have been handed so far."""
        return self._consumed_samples

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if not self.sampler.has_step(self._consumed_samples):
            raise StopIteration
        batch = self.dataset.batch(self.sampler.sample_numbers(self._consumed_samples))
        result = batch if self.transform is None else self.transform(batch)
        self._consumed_samples = self.sampler.consumed_after(self._consumed_samples)
        return result

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
        """
        missing = {"version", "consumed_samples", "fingerprint"} - set(state)
        if missing:
            raise ResumeError(f"the state has no {', '.join(sorted(missing))}: it is no Loader's")
        if state["version"] != STATE_VERSION:
            raise ResumeError(
                f"the state has version {state['version']}; this millrace reads {STATE_VERSION}"
            )
        differences = _differences(state["fingerprint"], self.dataset.fingerprint())
        if differences:
            shown = "\n".join(f"  {line}" for line in differences[:20])
            more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
            raise ResumeError(
                f"the state was saved with other data or another order:\n{shown}{more}\n"
                "Restore what differs, or start a new order with consumed_samples=0"
            )
        self._seek(state["consumed_samples"])

    def _seek(self, consumed_samples: int) -> None:
        if not 0 <= consumed_samples <= len(self.dataset):
            raise ConfigError(
                f"consumed_samples is {consumed_samples}; the dataset has {len(self.dataset)} "
                "samples. Build it with a larger num_samples to train on"
            )
        self._consumed_samples = consumed_samples


def _differences(saved: Any, present: Any, place: str = "") -> list[str]:
    """Where two fingerprints differ, a line each."""
    if isinstance(saved, dict) and isinstance(present, dict):
        keys = list(dict.fromkeys([*saved, *present]))
        pairs = [
            (f"{place}.{key}" if place else key, saved.get(key), present.get(key)) for key in keys
        ]
    elif isinstance(saved, list) and isinstance(present, list) and len(saved) == len(present):
        pairs = [
            (f"{place}[{i}]", *pair) for i, pair in enumerate(zip(saved, present, strict=True))
        ]
    else:
        return [] if saved == present else [f"{place}: saved {saved!r}, now {present!r}"]
    return [line for pair in pairs for line in _differences(pair[1], pair[2], pair[0])]
