"""Damaged token files: some of the cases that `python -m tests.store.fuzz` runs."""

import os
import signal
from pathlib import Path

import pytest

from tests.store import fuzz


def test_damaged_files_are_refused_or_read_as_the_format_says() -> None:
    findings = fuzz.fuzz(cases=1200, seed=0)
    assert not findings, fuzz.report(findings, seed=0)


def test_every_kind_of_mutation_occurs(tmp_path: Path) -> None:
    """Some cases stay valid, most do not, and all kinds occur."""
    cache: dict[int, object] = {}
    kinds, valid = set(), 0
    for number in range(500):
        _, mutator = fuzz.case_of(0, number, tmp_path, cache)
        kinds |= {kind.split(":")[0] for kind in mutator.names}
        valid += fuzz.parse(mutator.pair) is not None
    assert len(kinds) == 17
    assert 50 < valid < 450


def test_a_crash_is_a_finding_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in a case is reported, and the other cases go on."""
    child = fuzz.Child(seed=0, start=0, stop=300)
    try:
        child.poll()
        assert child._process is not None
        while child.now() < 5:
            assert not child.poll()
        os.kill(child._process.pid, signal.SIGABRT)
        while not child.poll():
            pass
        assert ["a crash: exit status -6" in finding.what for finding in child.findings] == [True]
        assert 5 <= child.findings[0].number < 300
        assert child.now() == 299
    finally:
        child.close()
