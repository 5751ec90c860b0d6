"""One `millrace plan` in a fresh process.

    python plan_work.py SMALL_RUN RUN

prints a JSON object: the milliseconds of the verb, and the megabytes that the process grows by.
A plan of the small run comes first, for the imports. Needs Linux.
"""

import contextlib
import io
import json
import sys
import time
from pathlib import Path

from common import memory_kib

from millrace.cli import main


def measure(small: str, run: str) -> dict[str, float]:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["plan", small]) == 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, start = memory_kib("VmRSS"), time.perf_counter()
        assert main(["plan", run]) == 0
        seconds = time.perf_counter() - start
    return {"ms": seconds * 1e3, "MB": (memory_kib("VmHWM") - before) * 1024 / 1e6}


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
