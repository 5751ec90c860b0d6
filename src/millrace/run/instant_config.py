"""What a run in the instant order asks of its data (`docs/instant_order.md`)."""

import copy
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from millrace.checks import MAX_INT32, MAX_INT64, check_float, check_int, check_list, shown
from millrace.errors import ConfigError
from millrace.option_class import Options, StrPath, option
from millrace.order.phases import MAX_WEIGHT, Phase
from millrace.order.splits import Bookends, check_part
from millrace.run.config import DatasetConfig, RunConfig, dict_of
from millrace.run.skips import Skips
from millrace.store.opened import token_dtype

T = TypeVar("T")

_WHOLE = (0.0, 1.0)


def _part(_: str, value: Any) -> Bookends:
    # Thousands of sources share the default.
    return value if value is _WHOLE else check_part(value)


@dataclass(frozen=True, kw_only=True)
class InstantSource(Options):
    """A source of a run in the instant order."""

    prefix: StrPath = option("path prefix of its token file, without `.bin`")
    weight: float | None = option(
        "weight in the first phase; without it, a source has that of `alpha`, or takes no part "
        "before a phase names it",
        None,
        least=0,
        most=MAX_WEIGHT,
    )
    dtype: Any | None = option(
        "dtype of its tokens, if not the configuration's", None, check=lambda _, v: token_dtype(v)
    )
    part: Bookends = option(
        "start and end of the share of its tokens to draw from, 0 to 1", _WHOLE, check=_part
    )
    max_epochs: int | None = option(
        "number of epochs after which it takes no part", None, least=1, most=MAX_INT64
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight == 0:
            raise ConfigError("the weight is 0: leave it out, to draw nothing until a phase does")


@dataclass(frozen=True, kw_only=True)
class InstantConfig(RunConfig):
    """What to draw samples from in the instant order, and how they look.

    Args:
        sources: The sources by their names: an `InstantSource`, a dict of its options, or a path
            prefix. The name decides the order, with the seed.
        alpha: Exponent of the sources' sizes, 0 to 10: each has the weight tokens ** alpha, in
            which all weights add up to 1. None: sources say their weights.
        phases: Phases, each a `Phase` or a dict of its options. They change training alone:
            validation and test keep the weights and the length of the first phase.
        skips: Ranges of sample numbers, (start, stop), that training leaves out.
        dtype: Dtype of the tokens of all sources that say none. None: the indices are read for it.
        mix_window: Number of samples in a window of training, in which documents are permuted.

    The other arguments are those of `RunConfig`; the sequence length is that of the first phase.
    The ends of a split are moved to the next document, and without one all is for training. What is
    wrong with the content of a file is seen when it is first drawn.

    Raises:
        ConfigError: Options outside their limits, with the phase or source that has them.
    """

    sources: Mapping[str, Any]
    num_samples: Sequence[int | None] = (None, None, None)
    alpha: float | None = None
    phases: Sequence[Any] = ()
    skips: Sequence[tuple[int, int]] = ()
    dtype: Any = None
    mix_window: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update(
            seed=check_int("seed", self.seed, 0),
            sources=_checked_sources(self.sources),
            alpha=None if self.alpha is None else check_float("alpha", self.alpha, 0, 10),
            skips=Skips(self.skips).ranges,
            dtype=None if self.dtype is None else token_dtype(self.dtype),
            mix_window=check_int("mix_window", self.mix_window, 1, MAX_INT32),
        )
        vars(self)["phases"] = self._checked_phases()
        given = [name for name, one in self.sources.items() if one.weight is not None]
        if given and self.alpha is not None:
            raise ConfigError(f"source {given[0]} has a weight, and there is alpha: leave one out")

    def _checked_phases(self) -> list[Phase]:
        """The phases, at least one."""
        start, phases = 0, []
        entries = check_list("phases", self.phases, "phases", lambda _, one: one) or [Phase()]
        for number, entry in enumerate(entries):
            phase = _checked(Phase, f"phase {number}", entry)
            phases.append(phase)
            for name in (phase.weights or {}).keys() - self.sources.keys():
                raise ConfigError(f"phase {number}: there is no source {name}: add it to sources")
            if (phase.until is None) != (number == len(entries) - 1):
                raise ConfigError(
                    f"phase {number} of {len(entries)} has `until` {phase.until}: all but the last "
                    "one need it, and num_samples, or train_samples, says where that ends"
                )
            if phase.until is not None and phase.until <= start:
                raise ConfigError(
                    f"phase {number} starts at sample {start}, and ends before {phase.until}: "
                    "`until` must grow from phase to phase"
                )
            start = phase.until or start
        return phases

    @functools.cached_property
    def whole_phases(self) -> list[Any]:
        """The phases, each with its sequence length."""
        length, phases = self.sequence_length, [*map(copy.copy, self.phases)]
        for phase in phases:
            vars(phase)["sequence_length"] = length = phase.sequence_length or length
        return phases

    def weights(self, num_tokens: Mapping[str, int]) -> dict[str, float]:
        """The weights of all sources in the first phase, for their sizes."""
        changes = self.phases[0].weights or {}
        if self.alpha is None:
            return {name: one.weight or 0.0 for name, one in self.sources.items()} | {**changes}
        # An empty source has a weight, too: its size is an error where it is drawn from.
        powers = {name: max(num_tokens[name], 1) ** self.alpha for name in self.sources}
        total = math.fsum(powers.values())
        return {name: power / total for name, power in powers.items()} | {**changes}

    def length_changes(self) -> dict[int, int]:
        """The positions at which another sequence length starts, by the numbers of the phases."""
        skips, pairs = Skips(self.skips), itertools.pairwise(self.whole_phases)
        return {
            number: skips.position(before.until)
            for number, (before, phase) in enumerate(pairs, 1)
            if phase.sequence_length != before.sequence_length
        }

    def check_starts(self, step_at: Callable[[int], Any]) -> None:
        """Raises ConfigError where another sequence length starts in the middle of a step, for
        which `step_at` raises one."""
        for number, position in self.length_changes().items():
            try:
                step_at(position)
            except ConfigError as error:
                until = self.phases[number - 1].until
                skipped = until - position
                rule = f" (a position plus the {skipped} samples skipped before)" if skipped else ""
                raise ConfigError(
                    f"phase {number}, from sample {until}, has another sequence length, and must "
                    f"start with a step: {error}. Give another `until`{rule}, skip or batch size"
                ) from None


AnyConfig = DatasetConfig | InstantConfig
"""A run in Megatron-LM's order, or an order of the user's, or in the instant order."""


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
    spelled = [str(key).replace("-", "_") for key in value]
    fields = ["sequence_length" if name == "seq_length" else name for name in spelled]
    try:
        return kind(**dict_of([*zip(fields, value.values(), strict=True)]))
    except TypeError as error:
        problem = str(error).rpartition("() ")[2]
        raise ConfigError(f"{what}: {problem}; there are {names}") from None
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
