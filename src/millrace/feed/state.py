"""The state of a loader: how a saved one is compared with the data and order of today."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from millrace.checks import NOTHING, check_int, differences, place_of, plain_json, shown
from millrace.errors import ResumeError, ViewChangeWarning
from millrace.samples.tokens import fingerprint_of

STATE_VERSION = 3
"""It rises when earlier states cannot be compared with fingerprints of today."""

SAMPLER_REMEDY = "The order may depend on a sampler's micro batch, ranks and data_sharding"

_LEAVES = (str, int, float, np.generic, type(None))  # of a fingerprint
_BY_NAME = {"phases", "sources"}  # entries of a fingerprint with the names of sources below them
_MOST_LINES = 10  # differences in a message
_MOST_SHOWN = 80  # characters of a value in a message


class Position(NamedTuple):
    """A place between two steps."""

    consumed_samples: int  # by all ranks
    stream: Any = None  # its state there; None: no stream, or it is read from its start


class Fingerprint(NamedTuple):
    """What decides the samples that a loader hands out, as plain values."""

    dataset: Any
    sampler: Any

    def at(self, consumed_samples: int) -> dict[str, Any]:
        """The fingerprint of the first `consumed_samples` samples."""
        fingerprint = fingerprint_of(self.dataset, consumed_samples)
        if getattr(self.sampler, "fingerprint", None):
            sampler = fingerprint_of(self.sampler, consumed_samples)
            fingerprint |= {"sampler": sampler} if sampler else {}
        plain: dict[str, Any] = plain_json(fingerprint, "fingerprint")
        return plain

    def read_state(self, state: Any, end: int | None = None) -> Position:
        """The position of a saved state; for the errors, see `Loader.load_state_dict`.

        `end`: number of samples whose fingerprint was saved; None: its consumed_samples.
        """
        saved = _saved_fingerprint(state)
        consumed_samples = check_int("consumed_samples", state["consumed_samples"], 0)
        today = self.at(consumed_samples if end is None else end)
        changes = [
            change
            for change in differences(saved, today, _is_equal)
            # Earlier states have the size of a blend by weight, which only says where it ends.
            if change[0][-1:] != ("size",) or change[2] is not NOTHING
        ]
        others = [one for one in changes if "view" not in one[0] or _BY_NAME & {*one[0]}]
        if others:
            remedy = "Restore what differs, or start a new order with consumed_samples=0"
            if any(path[:1] == ("sampler",) for path, _, _ in others):
                remedy = f"{SAMPLER_REMEDY}. {remedy}"
            if all(path[:1] == ("sources",) and path[-1] == "content" for path, _, _ in others):
                remedy = f"If a .info.json was left behind, or is new, put back what was. {remedy}"
            if all(path[:1] == ("skips",) for path, _, _ in others):
                remedy = f"A new skip may start at {consumed_samples}, or later. {remedy}"
            problem = "the state was saved with other data or another order"
            raise ResumeError(f"{problem}:\n{_listed(others)}\n{remedy}")
        if changes:
            warnings.warn(
                "the same tokens follow, but their masks or padding differ from those of the saved "
                f"state:\n{_listed(changes)}",
                ViewChangeWarning,
                stacklevel=3,
            )
        if state.get("plan", plan := getattr(self.dataset, "plan_checksum", None)) != plan:
            told = "behind position %d the run has changed since the state: see `plan --diff`"
            logging.getLogger("millrace").warning(told, consumed_samples)
        stream = state.get("stream")
        if isinstance(stream, Mapping) and stream.get("consumed_samples") == consumed_samples:
            return Position(consumed_samples, stream.get("state"))
        return Position(consumed_samples)


def _saved_fingerprint(state: Any) -> Any:
    """The fingerprint of a saved state of this version."""
    if not isinstance(state, Mapping):
        raise ResumeError(f"the state is {shown(state)}: it is not a Loader's")
    if missing := {"version", "consumed_samples", "fingerprint"} - set(state):
        raise ResumeError(f"the state has no {', '.join(sorted(missing))}: it is not a Loader's")
    version = state["version"]
    if not isinstance(version, (int, np.integer)) or version != STATE_VERSION:
        raise ResumeError(
            f"the state has version {shown(version)}; millrace reads {STATE_VERSION}, and compares "
            "no other. If data, options and their order have stayed the same, go on with "
            f"Loader(..., consumed_samples={shown(state['consumed_samples'])})"
        )
    return state["fingerprint"]


def _is_equal(saved: Any, present: Any) -> bool:
    """Whether two leaves are equal; a missing entry counts as None."""
    pair = [None if value is NOTHING else value for value in (saved, present)]
    return all(isinstance(value, _LEAVES) for value in pair) and bool(pair[0] == pair[1])


def _listed(changes: list[Any]) -> str:
    lines = []
    for path, *pair in changes[:_MOST_LINES]:
        saved, today = (shown(value, _MOST_SHOWN) for value in pair)
        are_lists = all(isinstance(value, (list, tuple)) for value in pair)
        if are_lists and max(map(len, pair)) > _MOST_LINES:
            saved, today = f"{len(pair[0])} entries", str(len(pair[1]))
        lines.append(f"  {place_of(path)}: saved {saved}, now {today}")
    if len(changes) > _MOST_LINES:
        lines.append(f"  and {len(changes) - _MOST_LINES} more")
    return "\n".join(lines)
