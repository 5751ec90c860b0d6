"""Servers for tests: SeaweedFS, azurite, Ceph's RGW, and a proxy with faults before them."""

import contextlib
import datetime
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from obstore import sign
from obstore.store import S3Store

from millrace.files import file_lock

KEYS = {"access_key_id": "millrace", "secret_access_key": "millrace-secret"}
AZURE = "devstoreaccount1"  # the account that each azurite has, and its key
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
# A container, with what this key has signed: it may be made until 2099.
_AZURE_CONTAINER = (
    f"{AZURE}/train?restype=container&sv=2021-08-06&ss=b&srt=c&sp=c&se=2099-01-01"
    "&sig=zJMhJi%2FptmuecC%2FNAXMWIQOJDBDqL0LVilz9y07GrKY%3D"
)
# Scripts of bash that start servers in an empty folder, at ports $1, $2, ...
_SEAWEEDFS = """
actions='"actions": ["Admin", "Read", "Write", "List"]'
cat >s3.json <<END
{"identities": [{"name": "anonymous", $actions}, {"name": "m", $actions, "credentials":
  [{"accessKey": "$access_key_id", "secretKey": "$secret_access_key"}]}]}
END
export WEED_MASTER_VOLUME_GROWTH_COPY_1=1  # volume for a bucket: the default takes seven
exec $VENV/bin/weed -logdir=. server -dir=. -ip=127.0.0.1 -ip.bind=127.0.0.1 -filer -s3 \\
  -s3.port=$1 -s3.port.grpc=$2 -master.port=$3 -master.port.grpc=$4 -volume.port=$5 \\
  -volume.port.grpc=$6 -filer.port=$7 -filer.port.grpc=$8 -s3.port.iceberg=0 -s3.port.lance=0 \\
  -s3.iam=false -s3.config=s3.json -s3.localSocket=s3.sock -filer.localSocket=filer.sock \\
  -master.telemetry=false -master.electionTimeout=1s -master.volumeSizeLimitMB=256 -volume.max=500
"""
_AZURITE = """
exec $VENV/bin/node $VENV/azurite/node_modules/azurite/dist/src/blob/main.js --blobPort=$1 \\
  --blobHost=127.0.0.1 --silent --disableTelemetry --inMemoryPersistence --skipApiVersionCheck
"""
_CEPH = r"""
type radosgw || { echo 'make test-long installs it'; exit 1; }
mkdir mon osd rgw
for name in mon. osd.0 client.admin client.rgw; do
  printf '[%s]\nkey = AQAAAAAAAAAAABAAMDEyMzQ1Njc4OTAxMjM0NQ==\n' $name >>keyring
  printf 'caps %s = "allow *"\n' mon osd >>keyring
done
id=11111111-1111-1111-1111-111111111111
address=[v2:127.0.0.1:$2,v1:127.0.0.1:$3]
export CEPH_CONF=/dev/null CEPH_ARGS="--fsid=$id --mon-host=$address --keyring=$PWD/keyring \
  --public-network=127.0.0.0/8 --mon-data=$PWD/mon --osd-data=$PWD/osd --rgw-data=$PWD/rgw \
  --run-dir=$PWD --log-file=$PWD/log --osd-objectstore=memstore --osd-crush-chooseleaf-type=0 \
  --mon-data-avail-crit=0 --mon-allow-pool-size-one=true --osd-pool-default-size=1 \
  --osd-pool-default-pg-num=4 --osd-pool-default-pg-autoscale-mode=off"
monmaptool --create --addv a $address --fsid $id monmap
ceph-mon --mkfs -i a --monmap monmap
ceph-mon -f -i a &
ceph-osd -i 0 --mkfs --osd-uuid $id
ceph osd new $id 0
ceph osd crush add osd.0 1.0 host=h root=default
ceph-osd -f -i 0 &
radosgw-admin user create --uid=millrace --display-name=m \
  --access-key=$access_key_id --secret=$secret_access_key
exec radosgw -f -n client.rgw --rgw-frontends="beast endpoint=127.0.0.1:$1 tcp_nodelay=1"
"""
_ANSWERS = {  # of faults
    "301": (301, {}, b""),
    "503": (503, {}, b"<Error><Code>SlowDown</Code></Error>"),
    "409": (409, {}, b"<Error><Code>ConditionalRequestConflict</Code></Error>"),
    "expired": (400, {}, b"<Error><Code>ExpiredToken</Code></Error>"),
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
    own: Any = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
    return S3Store("train", **own, **options_for(address))


@contextlib.contextmanager
def _running(script: str, folder: Path, make_bucket: Callable[[str], Any]) -> Iterator[str]:
    """The address of a server, with its data in a folder, once it has a bucket."""
    ports: set[int] = set()
    while len(ports) < 8:  # below those of outgoing connections, which could take them first
        place = "127.0.0.1", random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(place):
            ports.add(place[1])
    address = f"http://127.0.0.1:{min(ports)}"
    # All that the script starts is killed when this process ends, however it does.
    script = "exec 3<&0; { cat <&3; kill -9 0; } &" + script
    command = ["bash", "-ec", script, "server", *map(str, sorted(ports))]
    environment = {**os.environ, **KEYS, "VENV": sys.prefix, "TMPDIR": str(folder)}
    own: Any = {"cwd": folder, "env": environment, "start_new_session": True}
    with open(folder / "log", "ab") as log:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, **own)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                make_bucket(address)
                break
            except Exception:
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError((folder / "log").read_text()[-2000:]) from None
                time.sleep(0.1)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def _put(url: str) -> None:
    urlopen(Request(url, method="PUT"), timeout=100).close()


def seaweedfs(folder: Path) -> Any:
    """A SeaweedFS; gives the address of its S3 interface. Without a signature all is allowed."""
    # Its health check answers before a write, which makes the bucket, succeeds.
    return _running(_SEAWEEDFS, folder, lambda address: store_of(address).put("warm-up", b"x"))


def azurite(folder: Path) -> Any:
    """A server of Azure's blobs, with a container."""
    return _running(_AZURITE, folder, lambda address: _put(f"{address}/{_AZURE_CONTAINER}"))


@contextlib.contextmanager
def ceph(folder: Path) -> Iterator[str]:
    """Ceph's RGW with its data in memory, one on a machine, of Debian's packages: a stricter S3
    server, for long tests."""
    day = datetime.timedelta(1)
    server = _running(_CEPH, folder, lambda address: _put(sign(store_of(address), "PUT", "", day)))
    with file_lock("/tmp/millrace-ceph.lock"), server as address:  # it takes 4 GiB
        yield address


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1
    server: "Proxy"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.server.answer(self)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815


class Proxy(ThreadingHTTPServer):
    """A proxy before a server, which counts requests and has faults.

    A fault is a name, a pattern of "METHOD path", a probability, and how often it comes at most:
    "301", "503", "409", "expired" (the answer), "cut" (half a body, and the end), "stall" (half a
    body, and nothing more), "flip" (another byte in the body), or a header that the server lacks.
    """

    daemon_threads, request_queue_size = True, 512
    is_google = False  # requests of the XML API, which become those of S3

    def __init__(self, address: str, latency: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.address = address, f"http://127.0.0.1:{self.server_port}"
        self._random, self._lock = random.Random(1), threading.Lock()
        self.reset(latency)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()

    def handle_error(self, *_: Any) -> None: ...  # its connection ends

    def reset(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.requests: list[str] = []  # "METHOD path"
        self.bodies = 0  # bytes of all bodies that were read
        self.faults: list[list[Any]] = []

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

    def answer(self, to: _Handler) -> None:
        sent = to.rfile.read(int(to.headers.get("Content-Length", 0)))
        fault = self.fault_of(f"{to.command} {to.path}")
        time.sleep(self.latency)
        status, headers, body = _ANSWERS.get(fault) or self.reply(to, sent, fault)
        if fault == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        size = len(body) // 2 if fault in ("cut", "stall") else len(body)
        to.send_response(status)
        for pair in {"content-length": str(len(body)), **headers}.items():
            to.send_header(*pair)
        to.end_headers()
        if to.command != "HEAD":
            to.wfile.write(body[:size])
        if size < len(body):
            to.wfile.flush()
            time.sleep(30 * (fault == "stall"))
            to.close_connection = True

    def reply(self, to: _Handler, sent: bytes, fault: str) -> tuple[int, dict[str, str], bytes]:
        """The server's own answer."""
        path, headers = to.path, {name.lower(): text for name, text in to.headers.items()}
        headers.pop(fault, None)
        if self.is_google:
            path = path.replace("%2F", "/")
            headers.pop("authorization", None)
            if headers.pop("x-goog-if-generation-match", None) == "0":
                headers["if-none-match"] = "*"
        host = self.upstream.removeprefix("http://")
        with contextlib.closing(HTTPConnection(host, timeout=60)) as connection:
            connection.request(to.command, path, sent, headers)
            reply = connection.getresponse()
            body = reply.read()
        with self._lock:
            self.bodies += len(body) * (to.command == "GET")
        del reply.headers["Transfer-Encoding"]
        return reply.status, {name.lower(): text for name, text in reply.headers.items()}, body
