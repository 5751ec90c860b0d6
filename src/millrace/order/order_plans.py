"""How an order is made: from inputs a plan, from the plan arrays, from both the order.

A run plans each dataset once and keeps the plan in its manifest, and the arrays in its cache
folder. Later starts load both and read no sequence length before the first sample.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.checks import MAX_INT32, MAX_INT64, check_int, check_list, shown
from millrace.deferred import Deferred
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.order.spans import Order

Arrays = Mapping[str, NDArray[Any]]
Layout = Mapping[str, tuple[Any, tuple[int, ...]]]  # each array's dtype and shape

NOT_IN_KEY = {"in_key": False}
"""Metadata of a plan's field that follows from the rest: names of cached arrays leave it out."""

_MAX_BYTES = 1 << 46  # 64 TiB; a process can address 128


@dataclass(frozen=True, kw_only=True)
class OrderInputs:
    """What decides the order of one dataset.

    Attributes:
        num_sequences, num_tokens: Numbers of what the token file holds.
        sequences: (start, stop), the range of sequences to draw from.
        num_samples: Least number of samples; None: one epoch.
        sequence_length: Tokens to train on in a sample.
        add_extra_token: Whether a sample has one more token, for the last label.
        drop_last_partial_sequence: Whether to leave out a last sample that the tokens do not fill.
        seed: Seed of the order.
        load_lengths: Function that returns `lengths`.
    """

    num_sequences: int
    num_tokens: int
    sequences: tuple[int, int]
    num_samples: int | None
    sequence_length: int
    add_extra_token: bool
    drop_last_partial_sequence: bool
    seed: int
    load_lengths: Callable[[], NDArray[np.int32]] = dataclasses.field(repr=False, compare=False)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Lengths of all sequences, in tokens: int32 [num_sequences]. This opens the token file."""
        return self.load_lengths()

    def count_tokens(self) -> int:
        """Number of tokens in the range; DataError for more than the token file holds."""
        start, stop = self.sequences
        num_tokens = int(self.lengths[start:stop].sum(dtype=np.int64))
        if num_tokens > self.num_tokens:
            raise DataError(
                f"the index says {num_tokens} tokens, and the .bin holds {self.num_tokens}: the "
                "index is damaged; write the pair again"
            )
        return num_tokens


class OrderPlan(Protocol):
    """The plan of one dataset's order: a frozen dataclass whose fields are plain JSON values.

    `DatasetConfig(order=...)` takes the class.
    """

    @property
    def num_samples(self) -> int:
        """Number of samples, at least what the inputs ask for."""

    @classmethod
    def of(cls, inputs: OrderInputs) -> "OrderPlan":
        """The plan of inputs.

        Raises:
            ConfigError: Data that cannot give what the inputs ask for.
        """

    def arrays(self, inputs: OrderInputs) -> Layout:
        """Dtypes and shapes of the arrays that the order needs; empty if it needs none.

        Names consist of lower-case letters and _, end with `_index`, and do not start with
        `dataset_`, as those of a blend's arrays do.
        """

    def build(self, inputs: OrderInputs) -> Arrays:
        """The arrays, a pure function of the inputs and the plan."""

    def load(self, inputs: OrderInputs, arrays: Deferred[Arrays]) -> Order:
        """The order, by its arrays.

        Each start calls this: `arrays.value` and `inputs.lengths` are for the first sample.
        """


PlanOf = type[OrderPlan]
"""A class with the methods of `OrderPlan`."""


def check_range(sequences: tuple[int, int], num_sequences: int) -> tuple[int, int]:
    """A range of sequences as ints; ConfigError for one outside the file."""
    ends = check_list("the range of sequences", sequences, "two numbers", check_int)
    limit = min(num_sequences, MAX_INT32 + 1)
    if len(ends) != 2 or not 0 <= ends[0] <= ends[1] <= limit:
        raise ConfigError(
            f"the range of sequences is {shown(sequences)}; give (start, stop) up to {limit}: the "
            f"file has {num_sequences}, and at most {MAX_INT32 + 1} can be numbered (int32)"
        )
    return ends[0], ends[1]


def check_token_dtype(dtype: np.dtype[Any], name: str) -> None:
    """Raises DataError for a dtype that token ids cannot have."""
    if dtype.kind not in "iu":
        raise DataError(f"{name} holds {dtype}; token ids are integers")


def plan_order(
    order: PlanOf, inputs: OrderInputs, name: str, options: Mapping[str, Any] | None = None
) -> OrderPlan:
    """The plan of a dataset of that name, which must keep to `OrderPlan`."""
    start, stop = check_range(inputs.sequences, inputs.num_sequences)
    if inputs.num_samples is not None:
        check_int("num_samples", inputs.num_samples, 0, MAX_INT64)
    try:
        plan: OrderPlan = order.of(inputs, **(options or {}))
        _check_plan(plan, inputs)
    except TypeError as error:
        if not options:
            raise
        raise ConfigError(f"{name}: order_options are {shown(options)}: {error}") from None
    except MillraceError as error:
        raise type(error)(f"{name}, sequences {start} to {stop}: {error}") from None
    return plan


def entries_of(plan: Any) -> dict[str, Any]:
    """The fields of a plan: plain JSON values."""
    return {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}


def key_of(plan: Any) -> list[Any]:
    """What decides a plan's arrays, together with the inputs."""
    fields = dataclasses.fields(plan)
    return [getattr(plan, one.name) for one in fields if one.metadata.get("in_key", True)]


def build_arrays(plan: OrderPlan, inputs: OrderInputs, name: str) -> Arrays:
    """The arrays of a dataset of that name; DataError if its index is damaged."""
    layout = plan.arrays(inputs)
    try:
        arrays = plan.build(inputs)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    except MemoryError:
        raise MemoryError(
            f"{name}: the indices of {plan.num_samples:,} samples take {_num_bytes(layout):,} "
            "bytes, and there is no memory. Ask for fewer samples, or build with fewer threads"
        ) from None
    forms = {key: (np.dtype(dtype), shape) for key, (dtype, shape) in layout.items()}
    built = {key: (array.dtype, array.shape) for key, array in arrays.items()}
    if built != forms:
        kind = type(plan).__name__
        raise ConfigError(f"{name}: {kind} has built the arrays {built}; its plan says {forms}")
    return arrays


def build_order(
    order: PlanOf, inputs: OrderInputs, name: str, options: Mapping[str, Any] | None = None
) -> Order:
    """The order of a dataset of that name, with its arrays in memory."""
    plan = plan_order(order, inputs, name, options)
    return plan.load(inputs, Deferred.of(build_arrays(plan, inputs, name)))


def _check_plan(plan: OrderPlan, inputs: OrderInputs) -> None:
    kind = type(plan).__name__
    if not dataclasses.is_dataclass(plan):
        raise ConfigError(f"the plan of the order must be a dataclass, not a {kind}")
    entries = entries_of(plan)
    try:
        is_plain = json.loads(json.dumps(entries)) == entries
    except (TypeError, ValueError):
        is_plain = False
    if not is_plain:
        raise ConfigError(f"the fields of {kind} must be plain JSON values, not {shown(entries)}")
    check_int(f"num_samples of {kind}", plan.num_samples, inputs.num_samples or 0, MAX_INT64)
    layout = plan.arrays(inputs)
    for array in layout:
        if not re.fullmatch("(?!dataset_)[a-z_]*_index", array):
            raise ConfigError(
                f"an array of {kind} is named {shown(array)}: its name must be lower-case letters "
                "and _, end with _index and not start with dataset_"
            )
    if _num_bytes(layout) > _MAX_BYTES:
        raise ConfigError(
            f"{plan.num_samples:,} samples take {_num_bytes(layout):,} bytes of indices; "
            f"{_MAX_BYTES:,} is the limit. Ask for fewer samples"
        )


def _num_bytes(layout: Layout) -> int:
    return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in layout.values())
