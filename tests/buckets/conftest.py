"""A SeaweedFS for all tests of a process, and a proxy before it."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.storage.objects import ObjectStorage, by_environment
from tests.buckets.servers import Proxy, environment_for, options_for, seaweedfs, store_of

_numbers = itertools.count()


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Proxy, str]]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as address:
        proxy = Proxy(address)
        with proxy.running() as proxy_address:
            yield address, proxy, proxy_address


@pytest.fixture
def proxy(_server: tuple[str, Proxy, str]) -> Proxy:
    """The proxy, without faults and with no request counted."""
    _server[1].reset()
    return _server[1]


class Bucket:
    """A prefix of its own in a bucket, `s3://train/NUMBER`; it is read by way of the proxy."""

    def __init__(self, address: str, proxy_address: str, folder: Path) -> None:
        self.prefix, self._store = f"s3://train/{next(_numbers)}", store_of(address)
        self.options, self._folder = options_for(proxy_address), str(folder)

    def storage(self, **arguments: Any) -> ObjectStorage:
        defaults: dict[str, Any] = {"folder": self._folder, "time_limit": 20.0}
        return ObjectStorage(self.options, **{**defaults, **arguments})

    def put(self, name: str, data: bytes) -> str:
        path = f"{self.prefix}/{name}"
        self._store.put(path.removeprefix("s3://train/"), data)
        return path

    def delete(self, path: str) -> None:
        self._store.delete(path.removeprefix("s3://train/"))

    def upload(self, folder: Path) -> str:
        """Copies all files of a folder; returns its prefix."""
        for path in filter(Path.is_file, folder.rglob("*")):
            self.put(str(path.relative_to(folder)), path.read_bytes())
        return self.prefix


@pytest.fixture
def bucket(
    proxy: Proxy, _server: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any
) -> Iterator[Bucket]:
    """Also the storage of prefixes that come without one reads by way of the proxy."""
    for name, value in environment_for(_server[2]).items():
        monkeypatch.setenv(name, value)
    folder = tmp_path_factory.mktemp("node")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    by_environment.cache_clear()
    yield Bucket(_server[0], _server[2], folder / "copies")
    by_environment.cache_clear()
