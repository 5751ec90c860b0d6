"""What a loader draws from: a dataset, a sampler, and what is read in turn, without numbers."""

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from millrace.checks import MAX_INT64, check_int, plain_json, shown
from millrace.errors import ConfigError, ResumeError
from millrace.feed.state import Position
from millrace.forks import Renewed
from millrace.samples.fields import Batch, BatchForm, SampleOptions
from millrace.samples.rows import rows
from millrace.samples.tokens import TokenBatch, TokenStream, fingerprint_of
from millrace.sampling.samplers import RankSampler, SequentialSampler, num_steps


class EndOfBatches(Exception):  # noqa: N818 - not an error
    """Raised by a dataset that learns by reading that no step is left."""


class StreamDataset:
    """Rows of the tokens of a `TokenStream`, as a dataset of a `Loader`.

    A stream has no sample numbers: it is read in turn, in one thread. The loader keeps the stream's
    state beside each batch that it makes ahead, and saves that of the last one handed out. Each
    rank reads the samples of all ranks and keeps a slice of each step: all ranks together hold the
    same global batch, and the state of each resumes any number of them.

    A state of another place than the loader's (`loader.state_dict(consumed_samples)`) has none of
    the stream, which is then read from its beginning up to there.

    Args:
        stream: The stream.
        options: What a sample looks like.

    Raises:
        ConfigError: What is not a stream, or not options.
    """

    def __init__(self, stream: TokenStream, options: SampleOptions) -> None:
        if not isinstance(stream, TokenStream) or not isinstance(options, SampleOptions):
            raise ConfigError(
                f"stream is a {type(stream).__name__}, options are a {type(options).__name__}: "
                "give a TokenStream (read, fingerprint) and SampleOptions"
            )
        self.stream, self.options = stream, options

    def read(
        self, before: Position, sampler: Any, form: BatchForm | None
    ) -> tuple[Batch, Position]:
        """The rank's rows of a step, and the position behind it.

        Raises:
            EndOfBatches: The stream has ended.
            ConfigError: It has ended before the first step.
        """
        start, state = before
        if state is None:
            state = self._state_at(start, sampler.block_size)
        numbers = sampler.sample_numbers(start)
        tokens, state = self._read(state, sampler.block_size, numbers - start)
        size = len(tokens)
        if size == 0 or (sampler.drop_last and size < sampler.block_size):
            if start == 0:
                sampler.check_block(", pass drop_last=False, or give more samples", size)
            raise EndOfBatches
        numbers = numbers[numbers < start + size]
        own = tokens.select(numbers - start).with_field("sample_numbers", "sample", numbers)
        after = Position(start + size, plain_json(state, "the state of the stream"))
        return rows(own, self.options, form), after

    def _read(self, state: Any, count: int, own: Any) -> tuple[TokenBatch, Any]:
        """The next samples; `own` are the places of those that this rank needs, integers [n]."""
        tokens, state = self.stream.read(plain_json(state), count)  # which may change it in place
        if not isinstance(tokens, TokenBatch) or len(tokens) > count:
            raise ConfigError(
                f"{type(self.stream).__name__}.read returned {shown(tokens)}; a TokenBatch of at "
                f"most {count} samples is needed"
            )
        return tokens, state

    def _state_at(self, start: int, block_size: int) -> Any:
        """The state behind so many samples from the beginning."""
        state, consumed = None, 0
        while consumed < start:
            tokens, state = self._read(state, min(block_size, start - consumed), ())
            consumed += len(tokens)
            if len(tokens) == 0:
                raise ConfigError(
                    f"consumed_samples is {start}; the stream ends after {consumed} samples: give "
                    "the stream of the saved run"
                )
        return state

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """The stream's; the options belong to the view."""
        return {**fingerprint_of(self.stream, consumed_samples), "view": self.options.identity()}


class ExternalBatches(Renewed, SequentialSampler):
    """Any iterable of one rank's batches as a dataset of a `Loader` (Megatron-LM's `external`).

    It is its own sampler: `Loader(ExternalBatches(batches, samples_per_step=32))`. The loader reads
    it ahead, in one thread; its state is the number of samples. Each batch is a step, whatever
    samples it holds.

    To resume, a function gets the number of consumed samples and returns the batches from there.
    Any other iterable is read from its beginning and its first batches are thrown away, which takes
    as long as reading them. An iterator cannot begin again: it resumes only if it is unread.

    Args:
        batches: Iterable of batches from the first step on, or function of consumed_samples that
            returns those from there on.
        samples_per_step: Number of samples that all ranks together take at a step.
        fingerprint: Plain values that tell these batches from others, for the loader's state.
        num_steps: Number of steps, if it is known; with fewer batches the end is an error.

    Raises:
        ConfigError: A number outside its limits, or batches that cannot be iterated.

    Example:
        >>> from millrace import Loader
        >>> batches = ExternalBatches(lambda consumed: range(consumed, 12, 4), samples_per_step=4)
        >>> loader = Loader(batches, consumed_samples=4)
        >>> list(loader), loader.consumed_samples
        ([4, 8], 12)
    """

    num_steps: Any  # None: not known, as `Sampler` has it
    _iterator: Iterator[Any]
    _position: int  # of the iterator, or -1
    _renewed = ("_lock", "_iterator", "_position")

    def __init__(
        self,
        batches: Iterable[Any] | Callable[[int], Iterable[Any]],
        *,
        samples_per_step: int,
        fingerprint: dict[str, Any] | None = None,
        num_steps: int | None = None,
    ) -> None:
        if not (callable(batches) or isinstance(batches, Iterable)):
            raise ConfigError(
                f"batches is a {type(batches).__name__}; give an iterable, or a function of one"
            )
        self._batches = batches
        self._fingerprint = dict(fingerprint or {})
        size = check_int("samples_per_step", samples_per_step, 1, MAX_INT64)
        super().__init__(MAX_INT64, micro_batch_size=size)
        if num_steps is None:
            self.num_steps = None
        else:
            self.num_samples = check_int("num_steps", num_steps, 0, MAX_INT64 // size) * size
        self._has_begun = False  # also in copies, which share the place of an iterator
        self.renew()

    def __len__(self) -> int:
        return num_steps(self) * self.block_size

    def batch(self, sample_numbers: ArrayLike) -> Any:
        """The batch of the step that starts at the first number.

        Raises:
            EndOfBatches: The batches have ended before.
            ResumeError: An iterator that has been read cannot begin again.
            ConfigError: The batches end before the first number.
        """
        start = int(np.asarray(sample_numbers)[0])
        with self._lock:
            iterator = self._iterator if start == self._position else self._open(start)
            self._position = -1  # unknown, if `next` fails
            self._iterator = iterator
            batch = next(iterator, self)
            if batch is self:
                self._position = start  # the end stays the end
                if self.num_steps is not None:
                    raise ConfigError(
                        f"the batches end at or before consumed_samples={start}; "
                        f"num_steps={self.num_steps()} promises {len(self)} samples"
                    )
                raise EndOfBatches
            self._position = start + self.block_size
            return batch

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "external", **self._fingerprint}

    def check_position(self, consumed_samples: int) -> None:
        super().check_position(consumed_samples)
        self.schedule.step_at(consumed_samples)

    def _open(self, start: int) -> Iterator[Any]:
        if callable(self._batches):
            return iter(self._batches(start))
        iterator = iter(self._batches)
        if iterator is self._batches and self._has_begun:
            raise ResumeError(
                f"an iterator cannot go back to consumed_samples={start}: give an iterable that "
                "can begin again, or a function of consumed_samples"
            )
        self._has_begun = True
        end = sum(self.block_size for _ in islice(iterator, start // self.block_size))
        if end < start:
            raise ConfigError(
                f"consumed_samples is {start}; the batches end after {end} samples: give the "
                "batches of the saved run"
            )
        return iterator

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._iterator, self._position = iter(()), -1


IN_TURN = (ExternalBatches, StreamDataset)  # without sample numbers: one thread reads them


def check_dataset(dataset: Any) -> None:
    """Raises ConfigError for what is not a dataset, with the remedy."""
    missing = _missing(dataset, "__len__", "batch", "fingerprint")
    if missing and not isinstance(dataset, StreamDataset):
        raise ConfigError(
            f"dataset is a {type(dataset).__name__}, which has no {missing}: give a dataset, such "
            "as the `dataset` that an adapter was made of, or GPTDataset(indexed_dataset, ...), "
            "StreamDataset(stream, options), ExternalBatches(batches, samples_per_step=...)"
        )


def sampler_of(dataset: Any, sampler: Any, share: tuple[Any, ...]) -> Any:
    """The sampler of a loader: the argument, the dataset's own, or a sequential one."""
    names = ("micro_batch_size", "data_parallel_rank", "data_parallel_size", "drop_last")
    options = dict(zip(names, share, strict=True))
    if isinstance(dataset, StreamDataset):
        if sampler is None:
            sampler = SequentialSampler(MAX_INT64, **options)
            sampler.num_steps = None  # not known, as `Sampler` has it
            return sampler
        raise ConfigError("a stream has no sample numbers: give micro_batch_size, and no sampler")
    if sampler is None and not isinstance(dataset, ExternalBatches):
        sampler = SequentialSampler(len(dataset), **options)
        if sampler.drop_last:
            sampler.check_block(", or pass drop_last=False")
        return sampler
    if share != (None, 0, 1, True):
        raise ConfigError(f"{', '.join(names)} are the sampler's: leave them out beside a sampler")
    if sampler is None:
        return dataset
    if missing := _missing(sampler, "has_step", "sample_numbers", "consumed_after"):
        raise ConfigError(
            f"sampler is {shown(sampler)}, which has no {missing}; give a SequentialSampler"
        )
    if isinstance(sampler, RankSampler) and sampler.num_samples > len(dataset):
        raise ConfigError(
            f"the sampler draws from {sampler.num_samples} samples; the dataset has "
            f"{len(dataset)}. Make it with num_samples=len(dataset)"
        )
    return sampler


def _missing(value: Any, *names: str) -> str:
    return ", ".join(name for name in names if not callable(getattr(value, name, None)))
