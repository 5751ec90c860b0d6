"""A proof, for the tests of your own data, that a run can stop and resume at any step."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import check_int, differences, place_of, shown
from millrace.errors import ConfigError


def assert_resumes(
    make_loader: Callable[[], Any],
    *,
    max_steps: int | None = None,
    steps_after_resume: int | None = None,
    through_json: bool = True,
) -> int:
    """Checks that a loader resumes exactly, from every step.

    A loader is any iterable of batches with `state_dict()` and `load_state_dict(state)`, such as a
    `millrace.Loader` over your own dataset, or torchdata's `StatefulDataLoader`. It runs once, and
    its state is taken after each step. Then, for every number of steps k, from 0 to all of them:

    - a new loader that loads the state after k steps returns the batches that follow, bit for bit:
      the same names, dtypes, shapes and values, and the same end;
    - copies of the state by JSON, pickle and `copy.deepcopy` work as well as the state itself;
    - the state does not change while its loader goes on, and taking it changes no batch;
    - no returned batch changes, as one in a buffer that is used again would;
    - a run that stops after every step, so that each state comes from a resumed loader, returns
      the same batches.

    Memory holds two copies of the run's batches, and the time is quadratic in the number of steps:
    pass a short loader, or limits. Batches may be arrays, tensors, numbers, strings, and lists,
    tuples and dicts of these.

    Args:
        make_loader: Function that returns a new loader, which starts at its beginning.
        max_steps: Number of steps to check; None: all. Needed for a loader without an end.
        steps_after_resume: Number of steps of each resumed loader; None: to the end.
        through_json: Whether a state must survive JSON. Pass False for states with tensors, which
            are then copied by pickle.

    Returns:
        The number of steps of the run.

    Raises:
        AssertionError: The loader does not resume exactly; the message gives the step, from 0, and
            the first difference.
        ConfigError: `make_loader` does not return a new loader each time, or it has no batch.

    Example:
        >>> import numpy as np
        >>> from millrace import Loader
        >>> class Squares:
        ...     def __len__(self):
        ...         return 12
        ...     def batch(self, sample_numbers):
        ...         return {"squares": np.asarray(sample_numbers) ** 2}
        ...     def fingerprint(self):
        ...         return {"kind": "squares"}
        >>> assert_resumes(lambda: Loader(Squares(), micro_batch_size=3))
        4
    """
    max_steps = None if max_steps is None else check_int("max_steps", max_steps, 1)
    if steps_after_resume is not None:
        steps_after_resume = check_int("steps_after_resume", steps_after_resume, 1)
    runs = _Runs(make_loader, through_json)
    batches, states = runs.first(max_steps)
    is_whole = max_steps is None or len(batches) < max_steps

    runs.check(None, batches, is_whole, "a second loader of make_loader()")
    for step, state in enumerate(states):
        rest = batches[step:][:steps_after_resume]
        reaches_end = is_whole and step + len(rest) == len(batches)
        name = f"a loader that resumes after {step} steps"
        runs.check(state, rest, reaches_end, name, first_step=step)
    state, name = states[0], "a run that stops and resumes after every step"
    for step, batch in enumerate(batches):
        state = runs.check(state, [batch], False, name, first_step=step)
    return len(batches)


class _Runs:
    """Runs of new loaders, each compared with the first one."""

    def __init__(self, make_loader: Callable[[], Any], through_json: bool) -> None:
        self._make_loader, self._through_json = make_loader, through_json
        self._last: Any = None

    def first(self, max_steps: int | None) -> tuple[list[Any], list[Any]]:
        """The batches of a run, and the states before each of them and at the end."""
        batches: list[Any] = []  # each with a copy of it
        with self._new() as loader:
            state = loader.state_dict()
            states = [(state, copy.deepcopy(state))]
            for batch in itertools.islice(loader, max_steps):
                batches.append((batch, _frozen(batch)))
                state = loader.state_dict()
                states.append((state, copy.deepcopy(state)))
        if not batches:
            raise ConfigError("the loader returns no batch: nothing can be checked")
        for step, (batch, snapshot) in enumerate(batches):
            what = f"the batch of step {step} has changed while its loader went on"
            remedy = "A dataset must return new arrays each time, and leave them as they are"
            _assert_equal(snapshot, batch, "batch", what, f". {remedy}")
        for step, (state, snapshot) in enumerate(states):
            what = f"the state after {step} steps"
            _assert_equal(snapshot, state, "state", f"{what} has changed while its loader went on")
            pickled = pickle.loads(pickle.dumps(state))
            _assert_equal(state, pickled, "state", f"{what} is changed by pickle")
        as_saved = [self._copy(state, step) for step, (state, _) in enumerate(states)]
        return [snapshot for _, snapshot in batches], as_saved

    def check(
        self, state: Any, batches: list[Any], reaches_end: bool, name: str, first_step: int = 0
    ) -> Any:
        """Checks that a new loader, with a state or without, returns these batches; its state."""
        with self._new(state, name) as loader:
            iterator, end = iter(loader), first_step + len(batches)
            for step, expected in enumerate(batches, first_step):
                try:
                    batch = next(iterator)
                except StopIteration:
                    problem = f"{name} has no step {step}; without a stop it has one"
                    raise AssertionError(problem) from None
                except Exception as error:
                    raise AssertionError(f"{name} fails in step {step}: {error}") from error
                _assert_equal(expected, batch, "batch", f"{name} differs in step {step}")
            state = self._copy(loader.state_dict(), end)
            if reaches_end and next(iterator, _END) is not _END:
                raise AssertionError(f"{name} goes on after step {end - 1}, the last of the run")
        return state

    @contextlib.contextmanager
    def _new(self, state: Any = None, name: str = "") -> Iterator[Any]:
        """A new loader, with a state or without, which is closed if it can be."""
        loader = self._make_loader()
        methods = ("__iter__", "state_dict", "load_state_dict")
        if missing := [one for one in methods if not callable(getattr(loader, one, None))]:
            kind = type(loader).__name__
            raise ConfigError(f"make_loader returned a {kind}, which has no {', '.join(missing)}")
        if loader is self._last:
            raise ConfigError("make_loader returned the same loader twice; it must make new ones")
        self._last = loader
        with contextlib.ExitStack() as stack:
            if callable(close := getattr(loader, "close", None)):
                stack.callback(close)
            if state is not None:
                try:
                    loader.load_state_dict(copy.deepcopy(state))  # it may keep and change it
                except Exception as error:
                    text = f"{name} refuses its state {shown(state)}: {error}"
                    raise AssertionError(text) from error
            yield loader

    def _copy(self, state: Any, step: int) -> Any:
        """The state as a checkpoint would return it."""
        if not self._through_json:
            return pickle.loads(pickle.dumps(state))
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise AssertionError(
                f"JSON cannot hold the state after {step} steps ({error}): use plain numbers, "
                "strings, lists and dicts, or pass through_json=False"
            ) from error


_END = object()


# ---- batches and states as plain values ----


class _Array:
    """A copy of an array or a tensor, with the name of its dtype."""

    def __init__(self, value: Any) -> None:
        self.dtype = str(value.dtype) if hasattr(value, "dtype") else type(value).__name__
        if hasattr(value, "detach"):  # a tensor of torch, perhaps on a device
            value = value.detach().cpu()
            if "bfloat16" in self.dtype or "float8" in self.dtype:
                value = value.float()  # NumPy lacks the dtype; every value is a float32
        self.values: NDArray[Any] = np.asarray(value).copy()

    def __repr__(self) -> str:
        return f"an array {self.dtype} {list(self.values.shape)}"

    def __eq__(self, other: object) -> bool:
        """Whether dtype, shape and all bytes are equal: NaN equals NaN, and 0.0 is not -0.0."""
        return repr(self) == repr(other) and not self.unlike(other).any()

    def unlike(self, other: Any) -> NDArray[np.bool_]:
        """Where two arrays of one dtype and shape differ."""
        kind = f"V{self.values.itemsize}"
        return self.values.view(kind) != other.values.view(kind)  # type: ignore[no-any-return]


def _frozen(value: Any) -> Any:
    """A deep copy, which the loader cannot change."""
    if isinstance(value, _Array):
        return value
    if isinstance(value, Mapping):
        return {key: _frozen(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_frozen(part) for part in value]
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        array = _Array(value)
        return _frozen(array.values.tolist()) if array.values.dtype.hasobject else array
    return copy.deepcopy(value)


def _assert_equal(expected: Any, actual: Any, place: str, what: str, remedy: str = "") -> None:
    frozen = _frozen(expected), _frozen(actual)
    for path, one, other in differences(*frozen, _is_equal, (place,)):
        where = place_of(path)
        if isinstance(one, _Array) and repr(one) == repr(other):
            at = tuple(np.argwhere(one.unlike(other))[0].tolist())
            where += str([*at]) if at else ""
            one, other = one.values[at].tolist(), other.values[at].tolist()
        first, now = (shown(value, 80) for value in (one, other))
        raise AssertionError(f"{what}: {where} is {first} in the first run, {now} now{remedy}")


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two leaves are equal, also in type; NaN equals NaN."""
    is_nan = one != one and other != other
    return type(one) is type(other) and bool(is_nan or one == other)
