"""Processes to whom flock answers ENOSYS, as on Lustre without `-o flock`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_SOURCE = "#include <errno.h>\nint flock(int f, int o) { errno = ENOSYS; return -1; }\n"


def no_flock(folder: Path) -> dict[str, str]:
    """An environment for such processes, made in a folder."""
    source, library = folder / "no_flock.c", folder / "no_flock.so"
    source.write_text(_SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    before = os.environ.get("LD_PRELOAD", "")  # sanitizers, which must come first
    return {**os.environ, "LD_PRELOAD": f"{before} {library}".strip()}
