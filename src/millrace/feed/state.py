"""The state of a loader: how a saved one is compared with the data and the order of today."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from millrace.checks import shown
from millrace.errors import ConfigError, ResumeError

STATE_VERSION = 3
"""It rises when states of earlier versions cannot be compared with fingerprints of today."""

_LEAVES = (str, int, float, np.generic, type(None))  # of a fingerprint
_MOST_LINES = 10  # differences in a message
_MOST_SHOWN = 80  # characters of a value in a message
_VIEW_OPTIONS = ("eod_token", "pad_token", "reset_position_ids", "eod_mask_loss")  # of version 2


def plain(value: Any, place: str = "fingerprint") -> Any:
    """A fingerprint that JSON and pickle return as it is; NumPy's numbers become Python's.

    Raises:
        ConfigError: A value that a saved state could not be compared with; the message says where.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{place} has the key {shown(key)}: keys must be strings")
        return {str.__str__(key): plain(part, f"{place}.{key}") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part, f"{place}[{number}]") for number, part in enumerate(value)]
    number = value.item() if isinstance(value, np.generic) else value
    if number is None or isinstance(number, bool):
        return number
    # Members of an enum and other derived classes: torch.load with weights_only refuses them.
    converters: dict[type, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}
    for kind, convert in converters.items():
        if isinstance(number, kind) and number == number:
            return convert(number)
    raise ConfigError(
        f"{place} is {shown(value, _MOST_SHOWN)}, which a saved state cannot hold or compare: "
        "use plain numbers, strings, lists and dicts (of bytes or arrays, a hash as a string)"
    )


def read_state(state: Any, fingerprint: dict[str, Any], remark: str = "") -> tuple[Any, str]:
    """Compares a saved state with a fingerprint of today.

    Args:
        state: The saved state.
        fingerprint: Fingerprint of the data and the order now.
        remark: Sentence about the sampler, for the error if its order differs.

    Returns:
        Its consumed_samples, unchecked, and the differences in masks and padding: empty if there
        are none.

    Raises:
        ResumeError: A state of other data, another order or another version.
    """
    if not isinstance(state, Mapping):
        raise ResumeError(f"the state is {shown(state)}: it is not a Loader's")
    missing = {"version", "consumed_samples", "fingerprint"} - set(state)
    if missing:
        raise ResumeError(f"the state has no {', '.join(sorted(missing))}: it is not a Loader's")
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
    differences = list(_differences(saved, fingerprint))
    order = [line for line, is_view in differences if not is_view]
    if order:
        is_sampler = any(line.startswith("sampler") for line in order)
        raise ResumeError(
            f"the state was saved with other data or another order:\n{_listed(order)}\n"
            + (f"{remark}\n" if remark and is_sampler else "")
            + "Restore what differs, or start a new order with consumed_samples=0"
        )
    return consumed_samples, _listed([line for line, _ in differences])


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
