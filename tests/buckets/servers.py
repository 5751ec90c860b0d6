"""Servers for tests: SeaweedFS, a proxy with faults before it, and a server of byte ranges."""

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEYS = {"access_key_id": "millrace", "secret_access_key": "millrace-secret"}
READER_KEYS = {"access_key_id": "reader", "secret_access_key": "reader-secret"}  # reads nothing
_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>of the proxy</Message></Error>"


def options_for(address: str, **options: Any) -> dict[str, Any]:
    """Options of obstore for a server."""
    return {"endpoint": address, "region": "us-east-1", **KEYS, **options}


def environment_for(address: str) -> dict[str, str]:
    """The same as environment variables."""
    return {f"AWS_{name.upper()}": value for name, value in options_for(address).items()}


def store_of(address: str, bucket: str = "train", **options: Any) -> Any:
    """A store of obstore's own, to write what is read."""
    from obstore.store import S3Store

    client: Any = {"allow_http": True}
    return S3Store(bucket, client_options=client, **options_for(address, **options))


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """A SeaweedFS with its data in a folder; gives the address of its S3 interface."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(8)]
        ports = [one.getsockname()[1] for one in sockets]
    config = []
    for keys, actions in ((KEYS, ["Admin", "Read", "Write", "List"]), (READER_KEYS, [])):
        pair = dict(zip(("accessKey", "secretKey"), keys.values(), strict=True))
        config += [{"name": pair["accessKey"], "credentials": [pair], "actions": actions}]
    (folder / "s3.json").write_text(json.dumps({"identities": config}))
    names = ("master", "volume", "filer", "s3")
    command = [f"{sysconfig.get_path('scripts')}/weed", f"-logdir={folder}", "server"]
    command += f"-dir={folder} -ip=127.0.0.1 -ip.bind=127.0.0.1 -filer -s3".split()
    command += "-master.telemetry=false -master.electionTimeout=1s".split()
    command += "-master.volumeSizeLimitMB=256 -volume.max=500".split()
    command += "-s3.port.iceberg=0 -s3.port.lance=0 -s3.iam=false".split()
    command += [f"-s3.config={folder}/s3.json"]
    command += [f"-{name}.localSocket={folder}/{name}.sock" for name in ("filer", "s3")]
    for name, port, grpc_port in zip(names, ports[:4], ports[4:], strict=True):
        command += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc_port}"]
    # One volume a bucket: the default takes seven.
    environment = {**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1", "TMPDIR": str(folder)}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{ports[3]}"
        _wait_until_it_writes(address, process, folder)
        yield address
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_it_writes(address: str, process: Any, folder: Path) -> None:
    """Its health check answers before a write succeeds."""
    from obstore.exceptions import BaseError

    store = store_of(address, retry_config={"max_retries": 0})
    end = time.monotonic() + 60
    while True:
        try:
            store.put("warm-up", b"x")
            return
        except BaseError:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((folder / "log").read_text()[-2000:]) from None
            time.sleep(0.1)


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 512

    def handle_error(self, *_: Any) -> None: ...


@contextlib.contextmanager
def serving(handler: Callable[..., Any]) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, headers: Any = ()) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Proxy:
    """A proxy before a server, which counts requests and has faults.

    A fault is a name, a pattern of "METHOD path", a probability, and how often it comes at most:
    "503", "expired" (the answer), "cut" (half a body, and the end), "stall" (half a body, and
    nothing more), "flip" (another byte in the body).
    """

    def __init__(self, address: str, latency: float = 0.0) -> None:
        self._host, self.latency = address.removeprefix("http://"), latency
        self.requests: list[str] = []  # "METHOD path"
        self.bodies = 0  # bytes of all bodies that were read
        self.faults: list[list[Any]] = []
        self._random, self._lock = random.Random(1), threading.Lock()

    def add_fault(self, kind: str, pattern: str, share: float = 1.0, times: int = 1 << 30) -> None:
        self.faults.append([kind, pattern, share, times])

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, one)) for one in self.requests)

    def reset(self) -> None:
        self.requests, self.faults, self.bodies, self.latency = [], [], 0, 0.0

    def fault_of(self, name: str) -> str:
        with self._lock:
            self.requests.append(name)
            for fault in self.faults:
                kind, pattern, share, times = fault
                if times > 0 and re.search(pattern, name) and self._random.random() < share:
                    fault[3] -= 1
                    return str(kind)
        return ""

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        proxy = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                proxy.answer(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

        with serving(Handler) as address:
            yield address

    def answer(self, to: _Handler) -> None:
        sent = to.rfile.read(int(to.headers.get("Content-Length", 0)))
        fault = self.fault_of(f"{to.command} {to.path}")
        time.sleep(self.latency)
        if fault in ("503", "expired"):
            code = {"503": "SlowDown", "expired": "ExpiredToken"}[fault]
            to.answer(503 if fault == "503" else 400, _ERROR.format(code).encode())
            return
        connection = HTTPConnection(self._host, timeout=60)
        try:
            connection.request(to.command, to.path, sent, dict(to.headers.items()))
            reply = connection.getresponse()
            body = reply.read()
        except (OSError, HTTPException):
            to.close_connection = True
            return
        finally:
            connection.close()
        pairs = [pair for pair in reply.getheaders() if pair[0] != "Transfer-Encoding"]
        with self._lock:
            self.bodies += len(body) * (to.command == "GET")
        if fault == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        half = fault in ("cut", "stall")
        to.answer(reply.status, body[: len(body) // 2] if half else body, pairs)
        if half:
            to.wfile.flush()
            time.sleep(30 * (fault == "stall"))
            to.close_connection = True


class RangeServer(_Handler):
    """Objects in memory, where a store itself would be the limit; it knows no conditions."""

    objects: dict[str, bytes]
    latency, has_ranges = 0.0, True

    @classmethod
    def of(cls, objects: dict[str, bytes], **attributes: Any) -> type["RangeServer"]:
        return type("Ranges", (cls,), {"objects": objects, **attributes})

    def do_GET(self) -> None:
        time.sleep(self.latency)
        body = self.objects.get(self.path)
        if body is None:
            self.answer(404, b"")
            return
        headers = [("ETag", f'"{hash(body)}"'), ("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found and self.has_ranges:
            start, end = map(int, found.groups())
            headers += [("Content-Range", f"bytes {start}-{end}/{len(body)}")]
            self.answer(206, memoryview(body)[start : end + 1], headers)  # type: ignore[arg-type]
        else:
            self.answer(200, body, [*headers, ("Content-Length", str(len(body)))])

    do_HEAD = do_GET  # noqa: N815
