"""The state of a loader: how a saved one is compared with the data and the order of today."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from millrace.checks import NOTHING, differences, place_of, shown, whole
from millrace.errors import ConfigError, ResumeError, ViewChangeWarning
from millrace.samples.tokens import fingerprint_of
from millrace.sampling.protocols import OrderedSampler, explanation

STATE_VERSION = 3
"""It rises when states of earlier versions cannot be compared with fingerprints of today."""

_LEAVES = (str, int, float, np.generic, type(None))  # of a fingerprint
_MOST_LINES = 10  # differences in a message
_MOST_SHOWN = 80  # characters of a value in a message
_VIEW_OPTIONS = ("eod_token", "pad_token", "reset_position_ids", "eod_mask_loss")  # of version 2


class Position(NamedTuple):
    """A place between two steps.

    Attributes:
        consumed_samples: Number of samples that all ranks have consumed before it.
        stream: State of a stream there; None: the dataset has sample numbers, or the stream is read
            from its beginning to get there.
    """

    consumed_samples: int
    stream: Any = None


class Fingerprint:
    """What decides the samples that a loader hands out, as plain values.

    Args:
        dataset: The dataset, with a method `fingerprint`.
        sampler: The sampler, with such a method or without.
    """

    def __init__(self, dataset: Any, sampler: Any) -> None:
        self._dataset = dataset
        self._sampler = sampler if isinstance(sampler, OrderedSampler) else None
        self._explanation = explanation(sampler)

    def at(self, consumed_samples: int) -> dict[str, Any]:
        """The fingerprint of the samples up to a number of consumed samples.

        Raises:
            ConfigError: A fingerprint that is not a dict, or holds what a state cannot hold.
        """
        fingerprint: dict[str, Any] = plain(fingerprint_of(self._dataset, consumed_samples))
        if self._sampler is None:
            return fingerprint
        sampler = plain(fingerprint_of(self._sampler, consumed_samples), "fingerprint.sampler")
        return {**fingerprint, "sampler": sampler} if sampler else fingerprint

    def read_state(self, state: Any, end: int | None = None) -> Position:
        """Compares a saved state with the data and the order of today, and returns its position.

        A state with another view (masks, padding) is accepted with a ViewChangeWarning.

        Args:
            state: The saved state.
            end: Number of samples whose fingerprint was saved; None: its consumed_samples.

        Raises:
            ResumeError: A state of other data, another order or another version.
            ConfigError: A consumed_samples that is not a whole number of 0 or more.
        """
        saved = _saved_fingerprint(state)
        consumed_samples = whole("consumed_samples", state["consumed_samples"], 0)
        lines: dict[bool, list[str]] = {False: [], True: []}  # in the order, and in a view
        for path, old, new in differences(
            saved, self.at(consumed_samples if end is None else end), _is_equal
        ):
            lines["view" in path].append(_line(place_of(path), old, new))
        if lines[False]:
            is_sampler = any(line.startswith("sampler") for line in lines[False])
            remark = f"{self._explanation}\n" if self._explanation and is_sampler else ""
            raise ResumeError(
                f"the state was saved with other data or another order:\n{_listed(lines[False])}\n"
                f"{remark}Restore what differs, or start a new order with consumed_samples=0"
            )
        if lines[True]:
            warnings.warn(
                "the same tokens follow, but their masks or padding differ from those of the saved "
                f"state:\n{_listed(lines[True])}",
                ViewChangeWarning,
                stacklevel=3,
            )
        stream = state.get("stream")
        is_there = (
            isinstance(stream, Mapping) and stream.get("consumed_samples") == consumed_samples
        )
        return Position(consumed_samples, stream.get("state") if is_there else None)


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


def _saved_fingerprint(state: Any) -> Any:
    """The fingerprint of a saved state, as this version would save it."""
    if not isinstance(state, Mapping):
        raise ResumeError(f"the state is {shown(state)}: it is not a Loader's")
    missing = {"version", "consumed_samples", "fingerprint"} - set(state)
    if missing:
        raise ResumeError(f"the state has no {', '.join(sorted(missing))}: it is not a Loader's")
    version = state["version"]
    is_number = isinstance(version, (int, np.integer))
    if is_number and version == 1:
        raise ResumeError(
            "the state has version 1, of an earlier millrace, which noted less of the data: it "
            "cannot be compared. The order has stayed the same: if data and options have too, "
            f"go on with Loader(..., consumed_samples={shown(state['consumed_samples'])})"
        )
    if is_number and version == 2:
        return _from_version_2(state["fingerprint"])
    if not is_number or version != STATE_VERSION:
        raise ResumeError(
            f"the state has version {shown(version)}; this millrace reads {STATE_VERSION}"
        )
    return state["fingerprint"]


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


def _is_equal(saved: Any, present: Any) -> bool:
    """Whether two leaves of fingerprints are equal; an entry that is missing counts as None."""
    pair = [None if value is NOTHING else value for value in (saved, present)]
    return all(isinstance(value, _LEAVES) for value in pair) and bool(pair[0] == pair[1])


def _line(place: str, saved: Any, present: Any) -> str:
    if isinstance(saved, (list, tuple)) and isinstance(present, (list, tuple)):
        return f"{place}: saved {len(saved)} entries, now {len(present)}"
    return f"{place}: saved {shown(saved, _MOST_SHOWN)}, now {shown(present, _MOST_SHOWN)}"


def _listed(lines: list[str]) -> str:
    more = [f"  and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "\n".join([f"  {line}" for line in lines[:_MOST_LINES]] + more)
