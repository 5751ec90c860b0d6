"""The one-order law and the resume law on random cases; `tests.feed.laws` runs any number."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.feed import laws

SAMPLERS = ("sequential", "global", "schedule", "ramp-up", "cyclic", "full")
quiet = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=150, **quiet)  # type: ignore[arg-type]
@given(laws.cases())
def test_the_laws_hold(case: laws.Case) -> None:
    laws.check(case)


@settings(max_examples=400, **quiet)  # type: ignore[arg-type]
@given(laws.cases(max_ranks=64, samplers=SAMPLERS), st.integers(1, 200))
def test_samplers_take_the_steps_of_the_slow_model(case: laws.Case, num_samples: int) -> None:
    assume(case.sampler != "cyclic" or case.legs[0].block <= num_samples)
    laws.check_samplers(case, num_samples)
