"""Servers for tests: SeaweedFS, azurite, a proxy with faults before them, a server of ranges."""

import base64
import contextlib
import hmac
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
from email.utils import formatdate
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

KEYS = {"access_key_id": "millrace", "secret_access_key": "millrace-secret"}
READER_KEYS = {"access_key_id": "reader", "secret_access_key": "reader-secret"}  # reads nothing
AZURE = "devstoreaccount1"  # the account that each azurite has, and its key
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_NODE = Path(sysconfig.get_path("scripts"), "node")
_AZURITE = _NODE.parents[1] / "azurite/node_modules/azurite/dist/src/blob/main.js"
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_STORAGE_"}
_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>of the proxy</Message></Error>"


def options_for(address: str, scheme: str = "s3") -> dict[str, Any]:
    """Options of obstore for a server."""
    if scheme == "gs":
        names = ("client_email", "private_key", "private_key_id")
        account = {"gcs_base_url": address, "disable_oauth": True, **dict.fromkeys(names, "")}
        return {"service_account_key": json.dumps(account)}
    if scheme == "az":
        key = {"account_name": AZURE, "account_key": AZURE_KEY}
        return {"endpoint": f"{address}/{AZURE}", **key}
    return {"endpoint": address, "region": "us-east-1", **KEYS}


def environment_for(address: str, scheme: str = "s3") -> dict[str, str]:
    """The same as environment variables."""
    options = options_for(address, scheme) if scheme in _VARIABLES else {}
    return {f"{_VARIABLES[scheme]}{name.upper()}": value for name, value in options.items()}


def store_of(address: str) -> Any:
    """A store of obstore's own."""
    from obstore.store import S3Store

    client: Any = {"allow_http": True}
    retries: Any = {"max_retries": 0}
    options = options_for(address)
    return S3Store("train", client_options=client, retry_config=retries, **options)


def free_ports(number: int) -> list[int]:
    """Ports below those of outgoing connections, which could take them before the server does."""
    ports: set[int] = set()
    while len(ports) < number:
        place = "127.0.0.1", random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(place):
            ports.add(place[1])
    return [*ports]


@contextlib.contextmanager
def process(command: list[Any], folder: Path, is_ready: Callable[[], Any]) -> Iterator[None]:
    """A server, with its data in a folder, once it is ready."""
    # One volume a bucket of SeaweedFS: the default takes seven.
    environment = {**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1", "TMPDIR": str(folder)}
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                is_ready()
                break
            except Exception:
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError((folder / "log").read_text()[-2000:]) from None
                time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """A SeaweedFS; gives the address of its S3 interface. Without a signature all is allowed."""
    ports = free_ports(8)
    everything = ["Admin", "Read", "Write", "List"]
    config: list[Any] = [{"name": "anonymous", "actions": everything}]
    for keys, actions in ((KEYS, everything), (READER_KEYS, [])):
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
    address = f"http://127.0.0.1:{ports[3]}"
    # Its health check answers before a write succeeds.
    with process(command, folder, lambda: store_of(address).put("warm-up", b"x")):
        yield address


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """A server of Azure's blobs, with a container."""
    (port,) = free_ports(1)
    command = [_NODE, _AZURITE, f"--blobPort={port}", "--blobHost=127.0.0.1", "--silent"]
    command += ["--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck"]

    def make_container() -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = ["PUT", *[""] * 11, *map(":".join, headers.items())]
        text = "\n".join([*lines, f"/{AZURE}/{AZURE}/train", "restype:container"])
        sign = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), "sha256"))
        headers["Authorization"] = f"SharedKey {AZURE}:{sign.decode()}"
        url = f"http://127.0.0.1:{port}/{AZURE}/train?restype=container"
        try:
            urlopen(Request(url, headers=headers, method="PUT"), timeout=5).close()
        except HTTPError as error:
            if error.code != 409:  # an earlier request made it, but its answer came too late
                raise

    with process(command, folder, make_container):
        yield f"http://127.0.0.1:{port}"


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

    def __init__(self, address: str, latency: float = 0.0, *, is_google: bool = False) -> None:
        self._host, self.latency = address.removeprefix("http://"), latency
        self._is_google = is_google  # requests of the XML API, which become those of S3
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
            path, headers = to.path, {name.lower(): text for name, text in to.headers.items()}
            if self._is_google:
                path = path.replace("%2F", "/")
                headers.pop("authorization", None)
                if headers.pop("x-goog-if-generation-match", None) == "0":
                    headers["if-none-match"] = "*"
            connection.request(to.command, path, sent, headers)
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
