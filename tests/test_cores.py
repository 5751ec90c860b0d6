"""Cores: affinity, and the quotas of control groups."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.cores import available_cores, quota_of_cgroups

V1, V2 = "4:cpu,cpuacct:", "0::"


def write_groups(folder: Path, quotas: dict[str, str]) -> None:
    """Control groups by their paths, with "QUOTA PERIOD" each; those of version 1 lie in cpu/."""
    for path, text in quotas.items():
        (folder / path).mkdir(parents=True, exist_ok=True)
        names, texts = ["cpu.max"], [text]
        if path.startswith("cpu"):
            names, texts = ["cpu.cfs_quota_us", "cpu.cfs_period_us"], text.split()
        for name, number in zip(names, texts, strict=True):
            (folder / path / name).write_text(number + "\n")


@pytest.mark.parametrize(
    ("own", "quotas", "expected"),
    [
        (V2 + "/", {"": "max 100000"}, None),
        (V2 + "/", {"": "200000 100000"}, 2),
        (V2 + "/", {"": "150000 100000"}, 2),
        (V2 + "/", {"": "1000 100000"}, 1),
        (V2 + "/a/b", {"": "max 100000", "a": "300000 100000", "a/b": "max 100000"}, 3),
        (V2 + "/a/b", {"a": "300000 100000", "a/b": "50000 25000", "a/b/c": "1 1"}, 2),
        (V2 + "/a", {"unified/a": "400000 100000"}, 4),
        (V2 + "/docker/0123", {"": "200000 100000"}, 2),
        (V2 + "/../a", {"": "200000 100000"}, 2),
        (V1 + "/", {"cpu": "-1 100000"}, None),
        (V1 + "/", {"cpu": "250000 100000"}, 3),
        (V1 + "/a/b", {"cpu": "-1 100000", "cpu/a": "200000 100000", "cpu/a/b": "-1 100000"}, 2),
        (V1 + "/a", {"cpu,cpuacct/a": "500000 100000"}, 5),
        (V1 + "/a\n" + V2 + "/b", {"cpu/a": "500000 100000", "unified/b": "300000 100000"}, 3),
        ("3:cpuset:/a", {"cpu/a": "500000 100000"}, None),
        ("nonsense", {"": "200000 100000"}, None),
        (V2 + "/", {"": "nonsense"}, None),
    ],
)
def test_the_lowest_quota_of_a_group_and_its_parents_counts(
    own: str, quotas: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    write_groups(tmp_path / "cgroup", quotas)
    (tmp_path / "own").write_text(own + "\n")
    assert quota_of_cgroups(str(tmp_path / "cgroup"), str(tmp_path / "own")) == expected


def test_without_control_groups(tmp_path: Path) -> None:
    assert quota_of_cgroups(str(tmp_path), str(tmp_path / "nowhere")) is None
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.fixture
def group_of_half_a_core() -> Iterator[Path]:
    """A real control group, if this user may make one."""
    root = Path("/sys/fs/cgroup")
    is_first = (root / "cpu").is_dir()
    group = root / ("cpu" if is_first else "") / f"millrace-test-{os.getpid()}"
    try:
        group.mkdir()
        quota = "cpu.cfs_quota_us" if is_first else "cpu.max"
        (group / quota).write_text("50000" if is_first else "50000 100000")
        yield group
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def test_a_process_in_a_real_group(group_of_half_a_core: Path) -> None:
    code = (
        "import sys; from millrace.cores import available_cores\n"
        "open(sys.argv[1] + '/cgroup.procs', 'w').write('0')\n"
        "print(available_cores())"
    )
    command = [sys.executable, "-c", code, str(group_of_half_a_core)]
    assert subprocess.check_output(command, text=True) == "1\n"
