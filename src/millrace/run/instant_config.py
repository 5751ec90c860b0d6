"""What a run in the instant order asks of its data (`docs/instant_order.md`)."""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, get_args

from millrace.checks import (
    MAX_INT32,
    MAX_INT64,
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_path,
    shown,
)
from millrace.errors import ConfigError
from millrace.order import part_range, split_ranges
from millrace.order.phases import MAX_WEIGHT, Phase
from millrace.order.splits import Bookends
from millrace.run.config import DatasetConfig, RunConfig, checked_counts
from millrace.run.skips import Skips
from millrace.samples.loss_ranges import LOSS_CHOICES
from millrace.sampling import BatchSizeSchedule
from millrace.storage import Access, Storage
from millrace.store.opened import token_dtype

T = TypeVar("T")

_weight = partial(check_float, least=0, most=MAX_WEIGHT)
_count = partial(check_int, least=1, most=MAX_INT64)


def _dtype(_: str, value: Any) -> Any:
    return token_dtype(value)


@dataclass(frozen=True, kw_only=True)
class InstantSource:
    """A source of a run in the instant order.

    Args:
        prefix: Path prefix of its token file, without `.bin`.
        weight: Weight in the first phase. None: it takes no part before a phase names it, or it has
            the weight that `alpha` gives.
        dtype: Dtype of its tokens; None: that of the configuration.
        part: Start and end of the share of its tokens to draw from, 0 to 1.
        max_epochs: Number of epochs after which it takes no part; None: no limit.

    Raises:
        ConfigError: An option outside its limits.
    """

    prefix: str | os.PathLike[str]
    weight: float | None = None
    dtype: Any = None
    part: Bookends = (0.0, 1.0)
    max_epochs: int | None = None

    def __post_init__(self) -> None:
        part_range(0, self.part)
        object.__setattr__(self, "prefix", check_path("prefix", self.prefix))
        if self.part is not InstantSource.part:  # thousands share the tuple
            object.__setattr__(self, "part", tuple(map(float, self.part)))
        _check_given(self, weight=_weight, dtype=_dtype, max_epochs=_count)
        if self.weight == 0:
            raise ConfigError("the weight is 0: leave it out, to draw nothing until a phase does")


@dataclass(frozen=True, kw_only=True)
class InstantPhase:
    """What is new in a phase of a run in the instant order.

    Args:
        until: First sample number behind the phase; None: the last phase, which has no end.
        weights: New weights by the names of sources. A weight of 0 takes a source out; sources that
            it does not name keep theirs.
        sequence_length: Tokens to train on in a sample; None: as in the phase before.

    Raises:
        ConfigError: An option outside its limits.
    """

    until: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            raise ConfigError(f"weights must be numbers by name, not {shown(self.weights)}")
        weights = self.weights.items()
        vars(self)["weights"] = {one: _weight(f"the weight of {one}", w) for one, w in weights}
        _check_given(self, until=_count, sequence_length=partial(_count, most=MAX_INT32))


@dataclass(frozen=True, kw_only=True)
class InstantConfig(RunConfig):
    """What to draw samples from in the instant order, and how they look.

    Args:
        sequence_length: Tokens to train on in a sample of the first phase.
        seed: Seed of the order, at least 0.
        sources: The sources by their names: an `InstantSource`, a dict of its arguments, or a path
            prefix. The name decides the order, with the seed.
        alpha: Exponent of the sources' sizes, 0 to 10: each has the weight tokens ** alpha, in
            which all weights add up to 1. None: sources say their weights.
        phases: Phases, each an `InstantPhase` or a dict of its arguments. They change training
            alone: validation and test keep the weights and the length of the first phase.
        skips: Ranges of sample numbers, (start, stop), that training leaves out.
        split: Shares of train, valid and test, as in `DatasetConfig`; ends are moved to the next
            document. None: all is for training.
        num_samples: Number of samples of train, valid and test; None: without end.
        global_batch_size: Number of samples of a step, or a `BatchSizeSchedule`: a phase with
            another sequence length must start with a step. None: not known; a loader checks its
            own steps.
        dtype: Dtype of the tokens of all sources that say none. None: the indices are read for it.
        mix_window: Number of samples in a window of training, in which documents are permuted.

    The other arguments are those of `DatasetConfig`. What is wrong with the content of a file is
    seen when it is first drawn.

    Raises:
        ConfigError: Options outside their limits, with the phase or source that has them.
    """

    sequence_length: int
    seed: int
    sources: Mapping[str, Any]
    alpha: float | None = None
    phases: Sequence[Any] = ()
    skips: Sequence[tuple[int, int]] = ()
    split: str | Sequence[Bookends | None] | None = None
    num_samples: Sequence[int | None] = (None, None, None)
    global_batch_size: int | BatchSizeSchedule | None = None
    dtype: Any = None
    mix_window: int = 1
    add_extra_token: bool = True
    eod_token: int | None = None
    pad_token: int | None = None
    reset_position_ids: bool = False
    eod_mask_loss: bool = False
    boundaries: str = "eod"
    access: Access = "mmap"
    storage: Storage | None = None
    any_tokenizer: bool = False
    loss_ranges: str = "refuse"
    sampler: Any = None
    sampler_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.phases, str | Mapping):
            raise ConfigError(f"phases must be a list, not {shown(self.phases)}")
        vars(self).update(
            vars(self.sample_options),
            seed=check_int("seed", self.seed, 0),
            sources=_checked_sources(self.sources),
            phases=[
                _checked(InstantPhase, f"phase {number}", phase)
                for number, phase in enumerate(self.phases)
            ],
            num_samples=checked_counts(self.num_samples),
            access=check_choice("access", self.access, get_args(Access)),
            any_tokenizer=check_bool("any_tokenizer", self.any_tokenizer),
            loss_ranges=check_choice("loss_ranges", self.loss_ranges, LOSS_CHOICES),
            mix_window=check_int("mix_window", self.mix_window, 1, MAX_INT32),
        )
        _check_given(self, dtype=_dtype, alpha=partial(check_float, least=0, most=10))
        self._check_sampler()
        if self.split is not None:
            split_ranges(0, self.split)
        given = [name for name, one in self.sources.items() if one.weight is not None]
        if given and self.alpha is not None:
            raise ConfigError(f"source {given[0]} has a weight, and there is alpha: leave one out")
        skips = Skips(self.skips)
        vars(self)["skips"] = skips.ranges
        phases = self.run_phases(dict.fromkeys(self.sources, 1))
        if (size := self.global_batch_size) is not None:
            if not isinstance(size, BatchSizeSchedule):
                size = BatchSizeSchedule([(0, check_int("global_batch_size", size, 1, MAX_INT64))])
            check_starts(phases, skips, size.step_at)

    def run_phases(self, num_tokens: Mapping[str, int]) -> list[Phase]:
        """The phases with all that they keep of those before, for the sizes of the sources."""
        weights = {name: one.weight for name, one in self.sources.items() if one.weight is not None}
        if self.alpha is not None:
            # An empty source has a weight, too: its size is an error where it is drawn from.
            weights = {name: max(num_tokens[name], 1) ** self.alpha for name in self.sources}
            total = math.fsum(weights.values())
            weights = {name: weight / total for name, weight in weights.items()}
        start: int | None = 0
        length, phases = self.sequence_length, []
        for number, change in enumerate(self.phases or [InstantPhase()]):
            if start is None:
                raise ConfigError(f"phase {number - 1} has no `until`, and is not the last one")
            for name in change.weights.keys() - self.sources.keys():
                raise ConfigError(f"phase {number}: there is no source {name}: add it to sources")
            weights = {**weights, **change.weights} if number == 0 else change.weights
            length = change.sequence_length or length
            phases.append(Phase(start, length, weights))
            if change.until is not None and change.until <= start:
                raise ConfigError(
                    f"phase {number} starts at sample {start}, and ends before {change.until}: "
                    "`until` must grow from phase to phase"
                )
            start = change.until
        if start is not None:
            raise ConfigError(
                f"the last phase has `until` {start}, but no end: leave it out. num_samples, or "
                "train_samples, says where the run ends"
            )
        return phases


AnyConfig = DatasetConfig | InstantConfig
"""A run in Megatron-LM's order, or an order of the user's, or in the instant order."""


def check_starts(phases: Sequence[Phase], skips: Skips, step_at: Callable[[int], Any]) -> None:
    """Raises ConfigError where another sequence length starts in the middle of a step.

    `step_at` raises ConfigError for a number of consumed samples inside a step.
    """
    for number, (before, phase) in enumerate(itertools.pairwise(phases), 1):
        try:
            if phase.sequence_length != before.sequence_length:
                step_at(skips.position(phase.start))
        except ConfigError as error:
            raise ConfigError(
                f"phase {number}, from sample {phase.start}, has another sequence length, and must "
                f"start with a step: {error}"
            ) from None


def _check_given(one: Any, **checks: Callable[[str, Any], Any]) -> None:
    """Checks the arguments of these names that are not None."""
    for name, check in checks.items():
        if (value := getattr(one, name)) is not None:
            object.__setattr__(one, name, check(name, value))


def _checked_sources(sources: Any) -> dict[str, InstantSource]:
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError(f"sources must be one or more, by their names, not {shown(sources)}")
    checked = {}
    for name, source in sources.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of a source must be a text, not {shown(name)}")
        is_path = isinstance(source, str | os.PathLike)
        entry = {"prefix": source} if is_path else source
        checked[name] = _checked(InstantSource, f"source {name}", entry)
    return checked


def _checked(kind: type[T], what: str, value: Any) -> T:
    """An object, or one of its arguments by name, with - or _."""
    if isinstance(value, kind):
        return value
    names = ", ".join(one.name for one in dataclasses.fields(kind))  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {shown(value)}; give some of {names}")
    spellings: dict[str, Any] = {}
    for key in value:
        name = str(key).replace("-", "_").replace("seq_length", "sequence_length")
        if name in spellings:
            raise ConfigError(f"{what} has {spellings[name]} and {key}: leave one out")
        spellings[name] = key
    try:
        return kind(**{name: value[key] for name, key in spellings.items()})
    except TypeError as error:
        raise ConfigError(f"{what}: {error}; there are {names}") from None
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
