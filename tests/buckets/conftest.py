"""A bucket on any of the servers, which start once for all tests of a process."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.storage.objects import ObjectStorage, by_environment
from tests.buckets import servers
from tests.buckets.servers import Proxy

_numbers = itertools.count()
_SERVERS: dict[str, Callable[[Path], Any]] = {
    "s3": servers.seaweedfs,
    "az": servers.azurite,
    "ceph": servers.ceph,
    "file": lambda folder: contextlib.nullcontext(""),
}

on_each_server = pytest.mark.parametrize(
    "bucket",
    ["s3", "gs", "az", "file", pytest.param("ceph", marks=pytest.mark.long)],
    indirect=True,
)
"""A test in a bucket of each server, and in a folder as if it were one."""


@pytest.fixture(scope="session")
def _start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Proxy]]:
    """A proxy before a server of a kind."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(kind: str) -> Proxy:
            server = _SERVERS[kind](tmp_path_factory.mktemp(kind))
            return stack.enter_context(Proxy(stack.enter_context(server)))

        yield start


class Bucket:
    """A prefix of its own in a bucket, `s3://train/NUMBER`, that is read by way of a proxy."""

    def __init__(self, root: str, proxy: Proxy) -> None:
        self.prefix, self.proxy = f"{root}/{next(_numbers)}", proxy

    def storage(self, options: Any = None, **arguments: Any) -> ObjectStorage:
        return ObjectStorage(options, **{"time_limit": 20.0, **arguments})

    def put(self, name: str, data: bytes) -> str:
        path = f"{self.prefix}/{name}"
        self.storage().ask(path, lambda store, key: store.put(key, data))
        return path

    def upload(self, folder: Path) -> str:
        """Copies all files of a folder; returns its prefix."""
        for path in filter(Path.is_file, folder.rglob("*")):
            self.put(str(path.relative_to(folder)), path.read_bytes())
        return self.prefix


@pytest.fixture
def bucket(request: Any, _start: Any, tmp_path_factory: Any) -> Iterator[Bucket]:
    """The environment names its server, and a folder for copies that is new."""
    kind, folder = getattr(request, "param", "s3"), tmp_path_factory.mktemp("node")
    scheme = "s3" if kind == "ceph" else kind
    proxy = _start("s3" if kind == "gs" else kind)
    proxy.is_google = kind == "gs"
    proxy.reset()
    with pytest.MonkeyPatch.context() as patch:
        variables = servers.environment_for(proxy.address, scheme)
        for name, value in [*variables.items(), ("TMPDIR", str(folder))]:
            patch.setenv(name, value)
        patch.setattr("tempfile.tempdir", str(folder))
        by_environment.cache_clear()
        yield Bucket(f"file://{folder}/objects" if kind == "file" else f"{scheme}://train", proxy)
        by_environment.cache_clear()


@pytest.fixture
def proxy(bucket: Bucket) -> Proxy:
    """The proxy before the bucket, without faults and with no request counted."""
    return bucket.proxy
