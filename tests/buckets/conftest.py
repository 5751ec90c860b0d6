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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as address:
        yield address


@pytest.fixture(scope="session")
def _proxy(server: str) -> Iterator[tuple[Proxy, str]]:
    proxy = Proxy(server)
    with proxy.running() as address:
        yield proxy, address


@pytest.fixture
def proxy(_proxy: tuple[Proxy, str]) -> Proxy:
    """The proxy, without faults and with no request counted."""
    _proxy[0].reset()
    return _proxy[0]


class Bucket:
    """A prefix of its own in a bucket, which is read through the proxy.

    Attributes:
        prefix: `s3://train/NUMBER`.
        options: Options of obstore for the proxy.
    """

    def __init__(self, server: str, address: str, folder: Path) -> None:
        self.prefix, self._store = f"s3://train/{next(_numbers)}", store_of(server)
        self.address, self.options, self._folder = address, options_for(address), str(folder)

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
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(str(path.relative_to(folder)), path.read_bytes())
        return self.prefix


@pytest.fixture
def bucket(
    server: str,
    proxy: Proxy,
    _proxy: tuple[Proxy, str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bucket]:
    """Also the storage of prefixes that come without one reads through the proxy."""
    for name, value in environment_for(_proxy[1]).items():
        monkeypatch.setenv(name, value)
    folder = tmp_path_factory.mktemp("node")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    by_environment.cache_clear()
    yield Bucket(server, _proxy[1], folder / "copies")
    by_environment.cache_clear()
