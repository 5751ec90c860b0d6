"""What is given to a builder, as arrays that the core takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import MAX_INT32, shown, whole_numbers
from millrace.errors import ConfigError


def plain_json(provenance: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if provenance is not None and not isinstance(provenance, Mapping):
        raise ConfigError(f"provenance is {shown(provenance)}; a dict is needed")
    try:
        plain: dict[str, Any] | None = json.loads(json.dumps(provenance))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the provenance cannot be written as JSON ({error}); give texts, numbers, lists and "
            "dicts"
        ) from None
    return plain


def as_tokens(tokens: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Tokens as an array that the core takes: contiguous, in native byte order."""
    try:
        values = np.asarray(tokens)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tokens are not numbers in one dimension: {error}") from None
    is_float = dtype.kind == "f"
    if values.ndim == 1 and (values.dtype == object or values.size == 0) and not is_float:
        return whole_numbers("tokens", values.tolist())
    if values.ndim != 1 or values.dtype.kind not in ("iuf" if is_float else "iu"):
        raise ConfigError(
            f"tokens have shape {values.shape} and dtype {values.dtype}; "
            f"{'numbers' if is_float else 'integers'} are needed, in one dimension"
        )
    target = dtype if is_float else values.dtype
    return np.require(values, target.newbyteorder("="), ["C", "A"])


def as_lengths(lengths: ArrayLike, num_tokens: int) -> NDArray[np.int64]:
    """The lengths of sequences, int64 [sequences], whose sum is the number of tokens."""
    counts = whole_numbers("lengths", lengths)
    least, most = int(counts.min(initial=0)), int(counts.max(initial=0))
    if least < 0 or most > MAX_INT32:
        raise ConfigError(
            f"the lengths go from {least} to {most}; 0 to {MAX_INT32} is possible. Cut longer "
            "sequences into several"
        )
    if counts.sum() != num_tokens:
        raise ConfigError(
            f"the lengths {shown(counts.tolist())} sum to {counts.sum()}; there are {num_tokens} "
            "tokens"
        )
    return counts


def as_modes(modes: ArrayLike, count: int) -> NDArray[np.int8]:
    values = whole_numbers("modes", modes)
    if values.shape != (count,) or np.any(values != values.astype(np.int8)):
        raise ConfigError(f"modes are {shown(modes)}; give {count} numbers from -128 to 127")
    return values.astype(np.int8)
