"""What a sampler is: three methods, and those that it may have beside them."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.checks import check_int


class Sampler(Protocol):
    """The steps of one rank, each a pure function of the number of samples consumed before it.

    A `Loader` uses more methods, if they are there and not None:

    - `num_steps(consumed_samples=0)`: number of steps from there to the end;
    - `consumed_at(step)`: number of samples consumed before a step; step 0 starts at sample 0, the
      one after the last at the end; IndexError for a later one;
    - `step_at(consumed_samples)`: number of the step that starts there; ConfigError inside a step
      or past the end;
    - `check_position(consumed_samples)`: raises ConfigError where no step can start;
    - `fingerprint()`: what decides the global order of the samples, for a loader's state;
    - `explain_difference()`: a sentence on how the order can differ, for the error of a resume.
    """

    def has_step(self, consumed_samples: int) -> bool:
        """Whether a step is left after that many samples."""

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        """The rank's sample numbers at the step that starts there: int64 [batch]."""

    def consumed_after(self, consumed_samples: int) -> int:
        """The number of consumed samples after the step that starts there."""


def num_steps(sampler: Any, consumed_samples: int = 0) -> int:
    """The number of steps from a position on; TypeError without an end."""
    if not getattr(sampler, "num_steps", None):
        raise TypeError(f"a {type(sampler).__name__} has no number of steps")
    return check_int("num_steps", sampler.num_steps(consumed_samples), 0)


def checked_position(sampler: Any, consumed_samples: Any) -> int:
    """A position as a whole number; ConfigError where no step can start."""
    position = check_int("consumed_samples", consumed_samples, 0)
    if getattr(sampler, "check_position", None):
        sampler.check_position(position)
    return position


def explanation(sampler: Any) -> str:
    """The sampler's `explain_difference`, or an empty text."""
    return str((getattr(sampler, "explain_difference", None) or str)())
