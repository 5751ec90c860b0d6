"""Global batch sizes that change with the number of consumed samples."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from millrace.checks import MAX_INT64, check_int, shown
from millrace.errors import ConfigError

_MAX_RAMP_SAMPLES = 2**53  # larger counts are not exact in float64, in which Megatron-LM divides
_MAX_INCREMENTS = 1_000_000


class BatchSizeSchedule:
    """Global batch sizes, each from a number of consumed samples on.

    A step has the size that is valid at its start, also if it ends after a change.

    Args:
        changes: Pairs (consumed_samples, global_batch_size): the size of the steps that start there
            or later, up to the next pair. The first pair is for 0 samples. An attribute, too.

    Raises:
        ConfigError: Pairs that are not in order, or a number outside its limits.

    Example:
        >>> schedule = BatchSizeSchedule([(0, 4), (10, 8)])
        >>> [schedule.consumed_at(step) for step in range(5)]
        [0, 4, 8, 12, 20]
        >>> schedule.batch_size(12), schedule.step_at(12)
        (8, 3)
        >>> schedule.num_micro_batches(12, micro_batch_size=2, data_parallel_size=2)
        2
    """

    def __init__(self, changes: Sequence[tuple[int, int]]) -> None:
        self.changes = _checked_changes(changes)
        # Runs of steps of one size, counted from sample 0: first step, first sample and size.
        self._runs = [(0, 0, self.changes[0][1])]
        for change, size in self.changes[1:]:
            step, start, last_size = self._runs[-1]
            # Steps of the run before the change; 0 if the first one begins after it.
            steps = max(0, -(-(change - start) // last_size))
            if steps == 0 or size == last_size:
                self._runs[-1] = step, start, size
            else:
                self._runs.append((step + steps, start + steps * last_size, size))

    def batch_size(self, consumed_samples: int) -> int:
        """Number of all ranks' samples in the step that starts after that many samples."""
        consumed_samples = check_int("consumed_samples", consumed_samples, 0)
        return self.changes[bisect_right(self.changes, consumed_samples, key=_first) - 1][1]

    def num_micro_batches(
        self, consumed_samples: int, micro_batch_size: int, data_parallel_size: int
    ) -> int:
        """Number of a rank's micro batches in the step that starts after that many samples.

        Raises:
            ConfigError: A batch that the ranks cannot share out in whole micro batches.
        """
        micro = check_int("micro_batch_size", micro_batch_size, 1, MAX_INT64)
        ranks = check_int("data_parallel_size", data_parallel_size, 1, MAX_INT64)
        size = self.batch_size(consumed_samples)
        if size % (micro * ranks):
            raise ConfigError(
                f"the global batch size is {size} after {consumed_samples} samples; it must be a "
                f"multiple of micro batch * ranks = {micro} * {ranks} = {micro * ranks}"
            )
        return size // (micro * ranks)

    def check_micro_batches(
        self, num_samples: int, micro_batch_size: int, data_parallel_size: int
    ) -> None:
        """Raises ConfigError if a step up to `num_samples` cannot be shared out evenly."""
        for start in (run[1] for run in self._runs if run[1] < num_samples):
            self.num_micro_batches(start, micro_batch_size, data_parallel_size)

    def step_at(self, consumed_samples: int) -> int:
        """Number of the step that starts after that many samples; step 0 starts at sample 0.

        Raises:
            ConfigError: A number of samples inside a step, with the step's ends.
        """
        consumed_samples = check_int("consumed_samples", consumed_samples, 0, MAX_INT64)
        run = bisect_right(self._runs, consumed_samples, key=itemgetter(1)) - 1
        first, start, size = self._runs[run]
        step = first + (consumed_samples - start) // size
        if (start := self.consumed_at(step)) != consumed_samples:
            raise ConfigError(
                f"consumed_samples is {consumed_samples}, inside step {step}; a step starts at "
                f"{start} and at {self.consumed_at(step + 1)}"
            )
        return step

    def consumed_at(self, step: int) -> int:
        """Number of samples consumed before a step; step 0 starts at sample 0."""
        step = check_int("step", step, 0, MAX_INT64)
        first, start, size = self._runs[bisect_right(self._runs, step, key=_first) - 1]
        return start + (step - first) * size

    def num_steps(
        self, num_samples: int, consumed_samples: int = 0, *, drop_last: bool = True
    ) -> int:
        """Number of steps up to the end of the samples.

        Args:
            num_samples: Number of samples in the dataset.
            consumed_samples: Number of samples consumed before the first step; any number.
            drop_last: Whether a last step with too few samples does not count.
        """
        num_samples, steps = check_int("num_samples", num_samples, 0), 0
        consumed = check_int("consumed_samples", consumed_samples, 0)
        while consumed < num_samples:
            place = bisect_right(self.changes, consumed, key=_first)
            end = min([num_samples, *map(_first, self.changes[place : place + 1])])
            size = self.changes[place - 1][1]
            count = -(-(end - consumed) // size)
            steps, consumed = steps + count, consumed + count * size
        return steps - 1 if drop_last and steps and consumed > num_samples else steps


class RampUp(BatchSizeSchedule):
    """A global batch size that grows in equal increments, as by `--rampup-batch-size`.

    All sizes are those of Megatron-LM's calculator, which shares samples out in 64-bit floats: a
    change can come one sample later than the exact quotient.

    Args:
        start: Global batch size of the first step.
        increment: Difference between a size and the next.
        samples: Number of samples over which the size grows.
        global_batch_size: Global batch size afterwards: `start` plus a multiple of `increment`.

    Raises:
        ConfigError: A number outside its limits, or a growth that is not a multiple of `increment`.
    """

    def __init__(self, start: int, increment: int, samples: int, global_batch_size: int) -> None:
        self.start = check_int("start", start, 1, MAX_INT64)
        self.increment = check_int("increment", increment, 1, MAX_INT64)
        self.samples = check_int("samples", samples, 1, _MAX_RAMP_SAMPLES)
        self.global_batch_size = check_int("global_batch_size", global_batch_size, 1, MAX_INT64)
        num_increments, rest = divmod(self.global_batch_size - self.start, self.increment)
        if num_increments < 0 or rest:
            raise ConfigError(
                f"global_batch_size is {self.global_batch_size}; from start = {self.start} on, "
                f"increments of {self.increment} do not reach it: add a multiple of them"
            )
        if num_increments > _MAX_INCREMENTS:
            raise ConfigError(
                f"with increments of {self.increment}, the batch size would grow {num_increments} "
                f"times; at most {_MAX_INCREMENTS} is possible"
            )
        # Up to `samples`, Megatron-LM's size is start + int(consumed / (samples / increments)) *
        # increment, in float64; after that, the final size. Sizes of no number of samples fall out.
        changes, ramp = {0: self.start}, range(self.samples + 1)
        per_increment = self.samples / max(num_increments, 1)
        for number in range(1, num_increments + 1):
            first = bisect_left(ramp, number, key=lambda consumed: int(consumed / per_increment))
            changes[first] = self.start + number * self.increment
        super().__init__([*changes.items()])


_first = itemgetter(0)


def _checked_changes(changes: Any) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [(start, size) for start, size in changes]
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        raise ConfigError(
            f"changes are {shown(changes)}; give pairs (consumed_samples, global_batch_size)"
        )
    checked: list[tuple[int, int]] = []
    least, most = 0, 0  # the first change is at 0, the others ascend
    for place, (start, size) in enumerate(pairs):
        start = check_int(f"consumed_samples of change {place}", start, least, most)
        size = check_int(f"global_batch_size of change {place}", size, 1, MAX_INT64)
        checked.append((start, size))
        least, most = start + 1, MAX_INT64
    return tuple(checked)
