"""One `millrace plan` in a fresh process.

    python plan_work.py SMALL_RUN RUN

prints a JSON object: the milliseconds of the verb, and the megabytes that the process grows by.
A plan of the small run comes first, for the imports. Needs Linux.
"""

import contextlib
import io
import json
import re
import sys
import time
from pathlib import Path

from millrace.cli import main


def megabytes(entry: str) -> float:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"{entry}:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024


def measure(small: str, run: str) -> dict[str, float]:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["plan", small]) == 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, start = megabytes("VmRSS"), time.perf_counter()
        assert main(["plan", run]) == 0
        return {"ms": (time.perf_counter() - start) * 1e3, "MB": megabytes("VmHWM") - before}


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
