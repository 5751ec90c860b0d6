"""What the benchmarks of buckets share: token files, and servers of them."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.buckets import servers  # noqa: E402
from tests.shard_folders import write_sequences  # noqa: E402

from millrace import IndexedDatasetBuilder  # noqa: E402

__all__ = ["servers", "serving", "write", "write_sequences"]

SERVER = """
import json, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.buckets.servers import Proxy, RangeServer, serving
kind, place, latency, rate = sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5])

class Link(Proxy):  # all connections share its rate
    lock, free_at = threading.Lock(), 0.0

    def answer(self, to):
        inner, to.wfile = to.wfile, self
        self.files[threading.get_ident()] = inner
        super().answer(to)
        to.wfile = inner

    files = {}

    def write(self, data):
        view, out = memoryview(data), self.files[threading.get_ident()]
        for place in range(0, len(view), 1 << 17):
            piece = view[place : place + (1 << 17)]
            with self.lock:
                self.free_at = max(self.free_at, time.monotonic()) + len(piece) / rate
                wait = self.free_at - time.monotonic()
            time.sleep(max(wait, 0))
            out.write(piece)

    def flush(self):
        self.files[threading.get_ident()].flush()

class Listed(RangeServer):  # also lists its objects, and counts what it is asked for
    counts = {"lists": 0, "indices": 0, "data": 0}

    def do_GET(self):
        if self.path == "/counts":
            return self.answer(200, json.dumps(self.counts).encode())
        is_list = "list-type" in self.path
        kind = "lists" if is_list else "indices" if ".idx" in self.path else "data"
        with lock:
            self.counts[kind] += 1
        if not is_list:
            return super().do_GET()
        time.sleep(self.latency)
        entry = "<Contents><Key>{}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
        entry += "<ETag>&quot;{}&quot;</ETag><Size>{}</Size></Contents>"
        entries = [entry.format(path[7:], hash(body), len(body)) for path, body in objects.items()]
        text = "<ListBucketResult><IsTruncated>false</IsTruncated>{}</ListBucketResult>"
        self.answer(200, text.format("".join(entries)).encode())

    do_HEAD = do_GET

lock = threading.Lock()
if kind == "proxy":
    context = (Link if rate else Proxy)(place, latency).running()
else:
    objects = {f"/train/{path.name}": path.read_bytes() for path in Path(place).glob("d*")}
    context = serving(Listed.of(objects, latency=latency))
with context as address:
    print(address, flush=True)
    sys.stdin.read()
"""


def write(prefix: Path, lengths: list[int], seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(random.integers(0, 50_000, sum(lengths), np.uint16), lengths)


@contextlib.contextmanager
def serving(data: Path, latency: float, *, is_store: bool, rate: float = 0.0) -> Iterator[str]:
    """The address of a server of a folder's files, as the bucket `train`; rate: bytes a second."""
    with contextlib.ExitStack() as stack:
        place = str(data)
        if is_store:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "server").mkdir()
            place = stack.enter_context(servers.seaweedfs(folder / "server"))
            store = servers.store_of(place)
            for path in filter(Path.is_file, data.rglob("*")):
                store.put(str(path.relative_to(data)), path)
        kind = "proxy" if is_store else "ranges"
        command = [sys.executable, "-c", SERVER, str(ROOT), kind, place, str(latency), str(rate)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = stack.enter_context(subprocess.Popen(command, **pipes))
        yield server.stdout.readline().strip()
        server.stdin.close()
