"""Servers for tests: SeaweedFS, azurite, Ceph's RGW, and a proxy with faults before them."""

import contextlib
import datetime
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
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from millrace.files import file_lock

KEYS = {"access_key_id": "millrace", "secret_access_key": "millrace-secret"}
AZURE = "devstoreaccount1"  # the account that each azurite has, and its key
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
# What this key has signed: containers may be made until 2099.
_AZURE_SIGNATURE = (
    "sv=2021-08-06&ss=b&srt=c&sp=c&se=2099-01-01"
    "&sig=zJMhJi%2FptmuecC%2FNAXMWIQOJDBDqL0LVilz9y07GrKY%3D"
)
_SCRIPTS = Path(sysconfig.get_path("scripts"))
_AZURITE = _SCRIPTS.parent / "azurite/node_modules/azurite/dist/src/blob/main.js"
_ANSWERS = {  # of faults
    "503": (503, b"<Error><Code>SlowDown</Code></Error>"),
    "409": (409, b"<Error><Code>ConditionalRequestConflict</Code></Error>"),
    "expired": (400, b"<Error><Code>ExpiredToken</Code></Error>"),
}


def options_for(address: str) -> dict[str, Any]:
    """Options of obstore for an S3 server."""
    return {"endpoint": address, "region": "us-east-1", **KEYS}


def environment_for(address: str, scheme: str = "s3") -> dict[str, str]:
    """Environment variables by which obstore finds a server."""
    if scheme == "gs":
        names = ("client_email", "private_key", "private_key_id")
        account = {"gcs_base_url": address, "disable_oauth": True, **dict.fromkeys(names, "")}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}
    if scheme == "az":
        own = {"ENDPOINT": f"{address}/{AZURE}", "ACCOUNT_NAME": AZURE, "ACCOUNT_KEY": AZURE_KEY}
        return {f"AZURE_STORAGE_{name}": value for name, value in own.items()}
    return {f"AWS_{name.upper()}": value for name, value in options_for(address).items()}


def store_of(address: str) -> Any:
    """A store of obstore's own."""
    from obstore.store import S3Store

    own: Any = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
    return S3Store("train", **own, **options_for(address))


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
    with open(folder / "log", "ab") as log:
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
    all_of = {"actions": ["Admin", "Read", "Write", "List"]}
    pair = dict(zip(("accessKey", "secretKey"), KEYS.values(), strict=True))
    identities = [{"name": "anonymous", **all_of}, {"name": "m", "credentials": [pair], **all_of}]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    command = f"""{_SCRIPTS}/weed -logdir={folder} server -dir={folder} -ip=127.0.0.1
        -ip.bind=127.0.0.1 -filer -s3 -master.telemetry=false -master.electionTimeout=1s
        -master.volumeSizeLimitMB=256 -volume.max=500 -s3.port.iceberg=0 -s3.port.lance=0
        -s3.iam=false -s3.config={folder}/s3.json -s3.localSocket={folder}/s3.sock
        -filer.localSocket={folder}/filer.sock""".split()
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    names += tuple(f"{name}.grpc" for name in names)
    command += [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    address = f"http://127.0.0.1:{ports[3]}"
    # Its health check answers before a write succeeds.
    with process(command, folder, lambda: store_of(address).put("warm-up", b"x")):
        yield address


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """A server of Azure's blobs, with a container."""
    (port,) = free_ports(1)
    command = [_SCRIPTS / "node", _AZURITE, f"--blobPort={port}", "--blobHost=127.0.0.1"]
    command += "--silent --disableTelemetry --inMemoryPersistence --skipApiVersionCheck".split()
    address = f"http://127.0.0.1:{port}"

    def make_container() -> None:
        url = f"{address}/{AZURE}/train?restype=container&{_AZURE_SIGNATURE}"
        try:
            urlopen(Request(url, method="PUT"), timeout=5).close()
        except HTTPError as error:
            if error.code != 409:  # an earlier request made it, but its answer came too late
                raise

    with process(command, folder, make_container):
        yield address


_CEPH = """
    --fsid={id} --mon-host=[v2:127.0.0.1:{0},v1:127.0.0.1:{1}] --public-network=127.0.0.0/8
    --mon-data={folder}/mon --osd-data={folder}/osd --rgw-data={folder}/rgw --run-dir={folder}
    --keyring={folder}/keyring --log-file={folder}/log --osd-objectstore=memstore
    --mon-allow-pool-size-one=true --osd-pool-default-size=1 --osd-pool-default-pg-num=4
    --osd-pool-default-pg-autoscale-mode=off --osd-crush-chooseleaf-type=0
"""
_CEPH_STEPS = """
monmaptool --create --addv a [v2:127.0.0.1:{0},v1:127.0.0.1:{1}] --fsid {id} {folder}/monmap
ceph-mon --mkfs -i a --monmap {folder}/monmap
ceph-mon -f -i a
ceph-osd -i 0 --mkfs --osd-uuid {id}
ceph osd new {id} 0
ceph osd crush add osd.0 1.0 host=h root=default
ceph-osd -f -i 0
radosgw-admin user create --uid=millrace --display-name=m --access-key={keys[0]} --secret={keys[1]}
radosgw -f -n client.rgw --rgw-frontends={front}
"""


@contextlib.contextmanager
def ceph(folder: Path) -> Iterator[str]:
    """Ceph's RGW with its data in memory, one on a machine, of Debian's packages: a stricter S3
    server, for long tests."""
    if shutil.which("radosgw") is None:
        raise RuntimeError("radosgw is missing: `make test-long` installs it")
    *ports, port = free_ports(3)
    address, front = f"http://127.0.0.1:{port}", f"beast endpoint=127.0.0.1:{port} tcp_nodelay=1"
    own = {"folder": folder, "id": "1" * 8 + "-1111" * 3 + "-" + "1" * 12, "front": front}
    rights = 'key = AQAAAAAAAAAAABAAMDEyMzQ1Njc4OTAxMjM0NQ==\ncaps mon = "allow *"\n'
    names = ("mon.", "osd.0", "client.admin", "client.rgw")
    entries = [f'[{name}]\n{rights}caps osd = "allow *"\n' for name in names]
    (folder / "keyring").write_text("".join(entries))
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    options = " ".join(_CEPH.format(*ports, **own).split())

    def make_bucket() -> None:
        from obstore import sign

        url = sign(store_of(address), "PUT", "", datetime.timedelta(minutes=5))
        urlopen(Request(url, method="PUT"), timeout=5).close()

    with file_lock("/tmp/millrace-ceph.lock"), contextlib.ExitStack() as stack:  # it takes 4 GiB
        for step in _CEPH_STEPS.strip().splitlines():
            words = [word.format(*ports, **own, keys=[*KEYS.values()]) for word in step.split()]
            command = ["env", "CEPH_CONF=/dev/null", f"CEPH_ARGS={options}", *words]
            if "-f" in words:
                is_ready = make_bucket if words[0] == "radosgw" else lambda: None
                stack.enter_context(process(command, folder, is_ready))
            else:
                subprocess.run(command, check=True, timeout=120)
        yield address


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1
    server: "Proxy"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.server.answer(self)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def send(self, status: int, body: bytes, headers: Any) -> None:
        self.send_response(status)
        for pair in headers:
            self.send_header(*pair)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Proxy(ThreadingHTTPServer):
    """A proxy before a server, which counts requests and has faults.

    A fault is a name, a pattern of "METHOD path", a probability, and how often it comes at most:
    "503", "409", "expired" (the answer), "cut" (half a body, and the end), "stall" (half a body,
    and nothing more), "flip" (another byte in the body), or a header that the server lacks.
    """

    daemon_threads, request_queue_size = True, 512

    def __init__(self, address: str, latency: float = 0.0, *, is_google: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = address
        self._is_google = is_google  # requests of the XML API, which become those of S3
        self._random, self._lock = random.Random(1), threading.Lock()
        self.reset()
        self.latency = latency

    def handle_error(self, *_: Any) -> None: ...

    def reset(self) -> None:
        self.requests: list[str] = []  # "METHOD path"
        self.bodies = 0  # bytes of all bodies that were read
        self.faults: list[list[Any]] = []
        self.latency = 0.0

    def add_fault(self, kind: str, pattern: str, share: float = 1.0, times: int = 1 << 30) -> None:
        self.faults.append([kind, pattern, share, times])

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, one)) for one in self.requests)

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
        with self:
            threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
            yield f"http://127.0.0.1:{self.server_port}"
            self.shutdown()

    def answer(self, to: _Handler) -> None:
        sent = to.rfile.read(int(to.headers.get("Content-Length", 0)))
        fault = self.fault_of(f"{to.command} {to.path}")
        time.sleep(self.latency)
        if fault in _ANSWERS:
            status, body = _ANSWERS[fault]
            to.send(status, body, [("Content-Length", str(len(body)))])
            return
        headers = {name.lower(): text for name, text in to.headers.items()}
        headers.pop(fault, None)
        host, path = self.upstream.removeprefix("http://"), to.path
        if self._is_google:
            path = path.replace("%2F", "/")
            headers.pop("authorization", None)
            if headers.pop("x-goog-if-generation-match", None) == "0":
                headers["if-none-match"] = "*"
        try:
            with contextlib.closing(HTTPConnection(host, timeout=60)) as connection:
                connection.request(to.command, path, sent, headers)
                reply = connection.getresponse()
                body = reply.read()
        except (OSError, HTTPException):
            to.close_connection = True
            return
        del reply.headers["Transfer-Encoding"]
        if "Content-Length" not in reply.headers:
            reply.headers["Content-Length"] = str(len(body))
        with self._lock:
            self.bodies += len(body) * (to.command == "GET")
        if fault == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        is_half = fault in ("cut", "stall")
        to.send(reply.status, body[: len(body) // 2] if is_half else body, reply.headers.items())
        if is_half:
            to.wfile.flush()
            time.sleep(30 * (fault == "stall"))
            to.close_connection = True
