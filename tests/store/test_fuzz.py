"""Damaged token files: some of the cases that `python -m tests.store.fuzz` runs."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.store import fuzz


def test_damaged_files_are_refused_or_read_as_the_format_says(tmp_path: Path) -> None:
    findings = fuzz.fuzz(1200, 0, tmp_path)
    assert not findings, fuzz.report(findings, seed=0)


def test_every_kind_of_mutation_occurs(tmp_path: Path) -> None:
    """Some cases stay valid, most do not, and all kinds occur."""
    cache: dict[int, object] = {}
    kinds, valid = set(), 0
    for number in range(500):
        _, mutant, mutations, _ = fuzz.case_of(0, number, tmp_path, cache)
        kinds |= {kind.split(":")[0] for kind in mutations}
        valid += fuzz.parse(mutant) is not None
    assert len(kinds) == 15
    assert 50 < valid < 450


def test_a_crash_is_a_finding_with_its_number(tmp_path: Path) -> None:
    """A process that is killed in a case is reported, and the other cases go on."""
    now = tmp_path / "now"
    with ThreadPoolExecutor() as pool:
        findings = pool.submit(fuzz.fuzz, 300, 0, tmp_path)
        number = process = 0
        while number < 5:
            assert not findings.done()
            if now.exists() and len(data := now.read_bytes()) == fuzz.NOW.size:
                number, process = fuzz.NOW.unpack(data)
        os.kill(process, signal.SIGABRT)
        ((number, finding),) = findings.result().items()
    assert "a crash: exit status -6" in finding
    assert 5 <= number < 300
    assert fuzz.NOW.unpack(now.read_bytes())[0] == 299
