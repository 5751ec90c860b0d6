"""Random cases of the laws, and a small soak; `tests.feed.laws` and `soak` run any number."""

from pathlib import Path

from hypothesis import HealthCheck, assume, given, settings, strategies as st

from tests.feed import laws
from tests.feed.soak import FlakyReader, Soak

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


def test_every_sample_comes_exactly_once(tmp_path: Path) -> None:
    soak = Soak(40_000, 5, tmp_path, num_sessions=15)
    soak.run()
    assert soak.counts["sessions"] > 5
    assert soak.counts["checked"] > 0
    assert FlakyReader.num_failures > 0
    assert soak.descriptors < 200
