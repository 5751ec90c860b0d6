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

SERVER = r"""
import asyncio, json, re, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.buckets.servers import Proxy
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

class Ranges(asyncio.Protocol):  # a range server that also lists, and counts what it is asked for
    counts = {"lists": 0, "indices": 0, "data": 0}

    def connection_made(self, transport):
        self.transport, self.buffer = transport, b""

    def data_received(self, data):
        self.buffer += data
        while b"\r\n\r\n" in self.buffer:
            head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
            reply = self.reply(head.decode())
            asyncio.get_running_loop().call_later(latency, self.transport.write, reply)

    def reply(self, head):
        path = head.split(" ", 2)[1]
        if path == "/counts":
            return self.answer(json.dumps(self.counts).encode())
        is_list = "list-type" in path
        self.counts["lists" if is_list else "indices" if ".idx" in path else "data"] += 1
        if is_list:
            entry = "<Contents><Key>{}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
            entry += "<ETag>&quot;{}&quot;</ETag><Size>{}</Size></Contents>"
            entries = [entry.format(name[7:], tags[name], len(objects[name])) for name in objects]
            text = "<ListBucketResult><IsTruncated>false</IsTruncated>{}</ListBucketResult>"
            return self.answer(text.format("".join(entries)).encode())
        if path not in objects:
            return self.answer(b"", status="404 Not Found")
        body = objects[path]
        more = f'ETag: "{tags[path]}"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n'
        span = re.search(r"(?i)range: bytes=(\d+)-(\d+)", head)
        if span is None:
            is_head = head.startswith("HEAD")
            return self.answer(b"" if is_head else body, more, length=len(body))
        start, end = map(int, span.groups())
        more += f"Content-Range: bytes {start}-{end}/{len(body)}\r\n"
        return self.answer(memoryview(body)[start : end + 1], more, "206 Partial Content")

    def answer(self, body, more="", status="200 OK", length=None):
        length = len(body) if length is None else length
        return f"HTTP/1.1 {status}\r\n{more}Content-Length: {length}\r\n\r\n".encode() + body

async def serve():
    server = await asyncio.get_running_loop().create_server(Ranges, "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

if kind == "proxy":
    with (Link if rate else Proxy)(place, latency) as proxy:
        print(proxy.address, flush=True)
        sys.stdin.read()
else:
    objects = {f"/train/{path.name}": path.read_bytes() for path in Path(place).glob("d*")}
    tags = {name: hash(body) for name, body in objects.items()}
    asyncio.run(serve())
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
