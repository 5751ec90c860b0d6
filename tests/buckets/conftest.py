"""A bucket on any of the servers, which start once for all tests of a process."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.storage.objects import ObjectStorage, by_environment
from tests.buckets import servers
from tests.buckets.servers import Proxy

_SERVERS: dict[str, Callable[[Path], Any]] = {
    "s3": servers.seaweedfs,
    "az": servers.azurite,
    "ceph": servers.ceph,
    "file": lambda folder: contextlib.nullcontext(""),
}

# A test in a bucket of each server, and in a folder as if it were one.
_ALL = ["s3", "gs", "az", "file", pytest.param("ceph", marks=pytest.mark.long)]
on_each_server = pytest.mark.parametrize("bucket", _ALL, indirect=True)


class Bucket(Proxy):
    """A prefix of its own in a bucket, `s3://train/NAME`, that is read by way of a proxy."""

    prefix: str

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


@pytest.fixture(scope="session")
def _start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Bucket]]:
    """A bucket on a server of a kind."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(kind: str) -> Bucket:
            server = _SERVERS[kind](tmp_path_factory.mktemp(kind))
            return stack.enter_context(Bucket(stack.enter_context(server)))

        yield start


@pytest.fixture
def bucket(request: Any, _start: Any, tmp_path_factory: Any, monkeypatch: Any) -> Bucket:
    """The environment names its server, and a folder for copies that is new."""
    kind, folder = getattr(request, "param", "s3"), tmp_path_factory.mktemp("node")
    bucket, scheme = _start("s3" if kind == "gs" else kind), "s3" if kind == "ceph" else kind
    bucket.reset()
    bucket.is_google = kind == "gs"
    bucket.prefix = f"{folder.as_uri() if kind == 'file' else f'{scheme}://train'}/{folder.name}"
    for pair in servers.environment_for(bucket.address, scheme).items():
        monkeypatch.setenv(*pair)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    by_environment.cache_clear()
    return bucket
