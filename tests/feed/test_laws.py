"""The one-order law and the resume law on random cases; `tests.feed.laws` runs any number."""

from __future__ import annotations

import hypothesis

from tests.feed import laws


@hypothesis.settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(laws.cases())
def test_the_laws_hold(case: laws.Case) -> None:
    laws.check(case)
