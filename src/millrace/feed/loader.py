"""The loader: micro batches of one rank, and one number of state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from millrace.checks import check_float, check_int, plain_json, shown
from millrace.errors import ConfigError
from millrace.feed.state import STATE_VERSION, Fingerprint, Position
from millrace.feed.steps import (
    Step,
    StepMaker,
    StepQueue,
    WaitStats,
    stacks_printed_after,
    step_metrics,
)
from millrace.feed.stream_data import IN_TURN, StreamDataset, check_dataset, sampler_of
from millrace.forks import Renewed
from millrace.samples.dataset import Dataset
from millrace.samples.fields import Batch, form_of
from millrace.sampling.samplers import Sampler, checked_position, num_steps, steps_on

_MAX_PREFETCH = 1 << 20
_MAX_THREADS = 1024
# A forked child keeps the batches that were ready: to free a tensor on a GPU there would end it.
_queues_of_parent: list[StepQueue | None] = []


class Loader(Renewed):
    """Iterates over the micro batches of one data-parallel rank.

    All ranks together see the samples in one global order, whatever their number, micro batch and
    interruptions: the state of one rank resumes every rank of another run at the very next sample.

    Threads make the next batches while the trainer works; the state does not depend on them. They
    start with the first batch or `start`, and end with `close`, with the `with` block, or when the
    loader is no longer used.

    Several threads may draw from one loader: each step is handed out once, in any order among them,
    and one at a time. After an error in a step, or in `transform`, the next call tries the same
    step again. If `transform` asks the loader for a batch, it gets that of the next step.

    Args:
        dataset: `GPTDataset`, `BlendedDataset`, `StreamDataset`, `ExternalBatches` or another one
            with the methods of `millrace.feed.Dataset`.
        sampler: Which samples this rank takes at each step. None: the dataset's own (see
            `ExternalBatches`), or a `SequentialSampler` of the next four arguments.
        micro_batch_size: Number of samples in a batch.
        data_parallel_rank: Number of this rank, 0 to data_parallel_size - 1.
        data_parallel_size: Number of ranks.
        drop_last: Whether to leave out a last block that does not fill every rank's micro batch;
            else ranks may get shorter batches, and none, at the last step.
        consumed_samples: Number of samples that all ranks have consumed before the first batch.
        transform: Function of each batch, a dict of arrays [micro_batch_size, sequence_length],
            called when it is asked for, such as `millrace.torch.to_tensors`.
        prepare: Function of each batch, called ahead of its use in the loader's threads: for work
            that takes time, such as pinning memory or copying to a device.
        fields: Names of a batch's arrays (see `millrace.feed.BatchForm`). None: tokens, labels,
            loss_mask and position_ids.
        token_dtype: Dtype of tokens and labels: "int64", "int32", or "file" for the file's own.
        share_labels: Whether labels may be a view of the tokens' memory, one token further on.
        vocab_size: Size of the vocabulary: a token id outside it is an error. None: not checked.
        prefetch: Largest number of batches that are ready or in work ahead of the trainer. None: 2,
            or up to 32 if they are small (8 MiB in all). 0: none are ahead.
        threads: Number of threads that make batches; the result does not depend on it. Storage
            with a long latency needs several, and as large a `prefetch`. With 1, one thread at a
            time is in the dataset and in `prepare`, also after `load_state_dict` and in `batch`.
        watchdog: Seconds of waiting for a batch after which stderr shows what all threads do. None:
            never.

    Attributes:
        dataset, sampler: What the loader draws from, and what says which samples the rank takes.

    Raises:
        ConfigError: A number outside its limits, what is not a dataset or sampler, or a fingerprint
            that a saved state cannot hold.

    Example:
        >>> class Numbers:
        ...     def __len__(self):
        ...         return 6
        ...     def batch(self, sample_numbers):
        ...         return {"tokens": np.asarray(sample_numbers) * 10}
        ...     def fingerprint(self):
        ...         return {"kind": "numbers"}
        >>> import numpy as np
        >>> loader = Loader(Numbers(), micro_batch_size=3)
        >>> next(loader)["tokens"], loader.consumed_samples, len(loader)
        (array([ 0, 10, 20]), 3, 2)
    """

    _queue: StepQueue | None
    _last: tuple[Position, float, Any] | None  # of the last step: start, wait; metrics of a stream
    _renewed = ("_lock", "_queue", "_stats")

    def __init__(
        self,
        dataset: Dataset | StreamDataset,
        *,
        sampler: Sampler | None = None,
        micro_batch_size: int | None = None,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        consumed_samples: int = 0,
        drop_last: bool = True,
        transform: Callable[[Batch], Any] | None = None,
        prepare: Callable[[Batch], Any] | None = None,
        fields: tuple[str, ...] | None = None,
        token_dtype: str = "int64",
        share_labels: bool = False,
        vocab_size: int | None = None,
        prefetch: int | None = None,
        threads: int = 1,
        watchdog: float | None = None,
    ) -> None:
        check_dataset(dataset)
        share = (micro_batch_size, data_parallel_rank, data_parallel_size, drop_last)
        sampler = sampler_of(dataset, sampler, share)
        form = form_of(
            fields, token_dtype=token_dtype, share_labels=share_labels, vocab_size=vocab_size
        )
        self.dataset, self.sampler, self.transform = dataset, sampler, transform
        limit = None if prefetch is None else check_int("prefetch", prefetch, 0, _MAX_PREFETCH)
        self._prefetch = limit
        threads = check_int("threads", threads, 1, _MAX_THREADS)
        threads = 1 if isinstance(dataset, IN_TURN) else threads
        self._maker = StepMaker(dataset, sampler, form, prepare, threads)
        self._watchdog = None if watchdog is None else check_float("watchdog", watchdog, 0)
        self._is_closed = False
        self._fingerprint = Fingerprint(dataset, sampler)
        self._fingerprint.at(0)  # an error now, not when a state is saved or a run resumed
        # `_next`: where the next step starts, ahead of what was handed out while one is made.
        self._next = self._position = Position(0)
        self.renew()
        self._problem: ConfigError | None = None  # of the first step, unless a state is loaded
        try:
            self._seek(Position(consumed_samples))
        except ConfigError as error:
            if consumed_samples != 0:
                raise
            self._problem = error

    @property
    def consumed_samples(self) -> int:
        """Number of samples that all ranks have been handed."""
        return self._position.consumed_samples

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        self._maker.check_thread()
        taken: list[Position] = []  # start and end of the step, once `_draw` has moved past it
        try:
            with self._lock:
                batch = self._draw(taken)
        except BaseException:
            if taken:  # Ctrl-C, perhaps at the release of the lock
                with self._lock:
                    if self._next is taken[1]:  # no other thread has moved the loader since
                        self._move(taken[0])
            raise
        return batch  # without a call after the `try`: Ctrl-C comes at calls

    def _draw(self, taken: list[Position]) -> Any:
        """The next batch, and into `taken` its bounds: no result would survive each Ctrl-C."""
        self._check_handler()
        start, waited = self._next, self._stats.seconds
        try:
            self._is_taking = True
            step = self._step(start)
            if step.error is not None:
                self._drop_queue()  # the next call tries the same step again
                raise step.error
            if step.after is None:
                raise StopIteration
            taken += [start, step.after]
            self._next = step.after
        finally:
            self._is_taking = False
        batch = step.batch
        if self.transform is not None:
            try:
                batch = self.transform(batch)
            except BaseException as error:
                self._move(start)  # the step comes again
                if isinstance(error, StopIteration):  # it would end the trainer's loop
                    raise RuntimeError("`transform` raised StopIteration") from error
                raise
        taken[1] = self._next  # of a later step, if `transform` has asked for one
        self._stats.steps += 1
        self._position = self._next
        self._last = start, self._stats.seconds - waited, step.metrics
        return batch

    def __len__(self) -> int:
        """The number of steps from sample 0 on; TypeError for a sampler without end."""
        return num_steps(self.sampler)

    def __bool__(self) -> bool:
        return True  # also without a number of steps

    def batch(self, step: int) -> Any:
        """The batch of a step, counted from sample 0; the position stays.

        Raises:
            IndexError: No such step.
        """
        step = check_int("step", step, 0)
        if consumed_at := getattr(self.sampler, "consumed_at", None):
            return self.batch_at(consumed_at(step))
        return self.batch_at(steps_on(self.sampler, 0, step)[0])

    def batch_at(self, consumed_samples: int) -> Any:
        """The batch of the step that starts after so many samples; the position stays.

        Raises:
            IndexError: No such step.
        """
        start = Position(check_int("consumed_samples", consumed_samples, 0))
        step = self._maker.step(start)
        if step.is_end:
            raise IndexError(f"there is no step after {shown(consumed_samples)} samples")
        if step.error is not None:
            raise step.error
        return step.batch if self.transform is None else self.transform(step.batch)

    def wait_stats(self) -> WaitStats:
        """How long the trainer has waited since the loader was made, copied or forked."""
        return replace(self._stats, by_cause=dict(self._stats.by_cause))

    def metrics(self) -> dict[str, float]:
        """Counters of the last step of this rank, as plain numbers; empty before the first one.

        They are "consumed_samples", "wait_seconds" (how long the trainer has waited for the step),
        "tokens", "trained_share" (of the tokens), "checksum" (53 bits of the XXH3-64 of its tokens,
        labels, loss mask and position ids), and for each source that it draws from "tokens/NAME"
        and "epoch/NAME", the epochs of the source up to the step's last sample of it. The samples
        are read again for it, or counted as a stream makes them, before `prepare` and `transform`.
        """
        self._maker.check_thread()
        with self._lock:
            if self._last is None:
                return {}
            start, waited, metrics = self._last
            values = {"consumed_samples": self.consumed_samples, "wait_seconds": waited}
        if metrics is not None:
            return {**values, **metrics}
        with self._maker.lock:
            numbers = self.sampler.sample_numbers(start.consumed_samples)
            return values | step_metrics(self.dataset, numbers)

    def state_dict(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """The state to save with a checkpoint: plain numbers, strings, lists and dicts.

        Args:
            consumed_samples: Position of the state; None: where the loader stands.
        """
        now = self._position
        place = now.consumed_samples if consumed_samples is None else consumed_samples
        place = check_int("consumed_samples", place, 0)
        return self._state_at(now if place == now.consumed_samples else Position(place))

    def _state_at(self, position: Position) -> dict[str, Any]:
        place, stream = position
        fingerprint = self._fingerprint.at(place)
        state = {"version": STATE_VERSION, "consumed_samples": place, "fingerprint": fingerprint}
        if plan := getattr(self.dataset, "plan_checksum", None):
            state["plan"] = plan
        if stream is not None:
            state["stream"] = {"consumed_samples": place, "state": plain_json(stream)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state, also one of another rank, micro batch or number of ranks.

        A state with another view (masks, padding) is accepted with a ViewChangeWarning.

        Raises:
            ResumeError: A state of other data, order or version, with what differs.
            ConfigError: A consumed_samples that is not a whole number, or where no step can start.
        """
        self._seek(self._fingerprint.read_state(state))

    def _seek(self, position: Position) -> None:
        start = checked_position(self.sampler, position.consumed_samples)
        if (check_steps := getattr(self.dataset, "check_steps", None)) is not None:
            check_steps(self.sampler, start)
        self._maker.check_thread()
        with self._lock:
            self._check_handler()
            self._problem = None
            self._move(Position(start, position.stream))

    def _move(self, position: Position) -> None:
        self._next = self._position = position
        self._last = None
        self._drop_queue()

    def _check_handler(self) -> None:
        """Refuses a call by a signal handler that has interrupted `next` in this thread."""
        if self._is_taking:
            raise ConfigError(
                "a signal handler uses a loader whose `next` it has interrupted: set a flag there"
            )

    def start(self) -> None:
        """Starts to make batches now, for example before the model is loaded."""
        self._maker.check_thread()
        with self._lock:
            if self._prefetch != 0 and not self._is_closed:
                self._open_queue(self._next)

    def close(self) -> None:
        """Ends the threads and drops the batches that are ready. `state_dict` still works."""
        self._is_closed = True
        queue = self._queue  # without the lock, which a thread that waits for a batch holds
        if queue is not None:
            queue.close(wait=None)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _step(self, start: Position) -> Step:
        if self._is_closed:
            raise ConfigError("the loader is closed; make a new one, and load its state_dict")
        if self._problem is not None:
            raise self._problem
        queue = None if self._prefetch == 0 else self._open_queue(start)
        if queue is not None and queue.is_answered():
            return queue.take()
        begin = time.perf_counter()
        with stacks_printed_after(self._watchdog):
            step = self._maker.step(start) if queue is None else queue.take()
        if not step.is_end:
            self._stats.add_wait(time.perf_counter() - begin, step.cause)
        return step

    def _open_queue(self, start: Position) -> StepQueue:
        if self._queue is None or self._queue.position != start.consumed_samples:
            self._drop_queue()
            self._queue = StepQueue(self._maker, start, self._prefetch)
        self._queue.start()
        if self._is_closed:  # by another thread, which may not have seen the queue
            self._queue.close()
        return self._queue

    def _drop_queue(self) -> None:
        if self._queue is not None:  # kept: `close` waits for its threads
            self._queue.close()

    def after_fork(self) -> None:
        """Forgets the threads and waits of another process, and the step under way there."""
        self._lock = threading.RLock()
        if getattr(self, "_queue", None) is not None:
            _queues_of_parent.append(self._queue)
        self._queue = None
        self._stats = WaitStats()
        self._next = self._position
        self._is_taking = False  # a step, in this thread
