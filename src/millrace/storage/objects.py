"""Objects in buckets as files of a storage: `s3://`, `gs://`, `az://` and `file://`, by obstore.

Each object is pinned when it is opened: every request names its ETag, and the size, ETag and range
of each reply are compared. So all bytes that are read are those of one object, or an error.
"""

import contextlib
import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from millrace.checks import check_float, check_folder, check_int
from millrace.errors import ConfigError, StorageError
from millrace.files import blake2b
from millrace.forks import Renewed, closing
from millrace.names import IDX
from millrace.storage import BUCKET_SCHEMES, Access, Identity, StoredFile
from millrace.storage.copies import copied_file, fetch, fetch_index, own_folder, shared_value
from millrace.storage.mirror import Mirror
from millrace.storage.msc import ProfileStore
from millrace.storage.transfers import ObjectFile, RequestPool, changed, identity_of, note_use

T = TypeVar("T")

STORES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore", "file": "LocalStore"}
_TIMEOUT = 60.0  # seconds of a request, which brings at most 8 MiB
_MOST_SECONDS = 1e6  # of a limit
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds before a request is tried again
_FRESH = 15.0  # seconds in which processes that start together share a listing
_STATUS = re.compile(r"status code: (\d+)")
_UNFIT = re.compile(r"^/|//|(^|/)\.\.?(/|$)")  # keys that obstore refuses, or changes silently
_EXPIRED = re.compile(r"<Code>\w*(Expired|TooSkewed)\w*</Code>")
_ENDPOINT = "its endpoint must begin with http:// or https:// (options, or the environment)"


class ObjectStorage(Renewed):
    """Objects in buckets, as `SCHEME://BUCKET/KEY`; see docs/buckets.md.

    Args:
        options: Options of obstore's store of the scheme, such as `endpoint`, `region` or
            `credential_provider`; what is left out comes from the environment.
        client_options: Options of its HTTP client, such as `proxy_url`.
        requests: Most requests in flight in this process.
        time_limit: Seconds after which a request that is tried again and again is an error.
        stall_limit: Seconds without a byte after which a request is abandoned and tried again.
        folder: Folder of this node for copies of indices; None: `millrace-UID` where temporary
            files are.
        mirror: Folder of this node, on a local disk, for copies of the blocks that are read; None:
            all is read from afar.
        limit: Most bytes of the mirror.

    Raises:
        ConfigError: Numbers outside their limits; in all methods, a path of another scheme, or
            obstore is not installed.
        StorageError: In all methods, a request that fails.
    """

    has_renames = False
    _renewed = ("pool", "_stores")

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        client_options: Mapping[str, Any] | None = None,
        requests: int = 64,
        time_limit: float = 300.0,
        stall_limit: float = 10.0,
        folder: str | os.PathLike[str] | None = None,
        mirror: str | os.PathLike[str] | None = None,
        limit: int | None = None,
    ) -> None:
        self._options, self._client_options = dict(options or {}), dict(client_options or {})
        self.time_limit = check_float("time_limit", time_limit, 0.001, _MOST_SECONDS)
        self._stall_limit = check_float("stall_limit", stall_limit, 0.001, _MOST_SECONDS)
        self._folder = None if folder is None else check_folder("folder", folder)
        if (mirror is None) != (limit is None):
            raise ConfigError("give mirror and limit, the folder and its size, or none of the two")
        self.mirror: Mirror | None = None
        if mirror is not None:
            place = check_folder("mirror", mirror), check_int("limit", limit, 0)
            self.mirror = Mirror(*place, self.time_limit)
        self.requests, self._last_success = check_int("requests", requests, 1), 0.0
        self.renew()

    def after_fork(self) -> None:
        self.pool = RequestPool(self.requests)
        # A fork keeps clients: their end would wait for threads that the child lacks.
        self._stores: dict[tuple[str, int], Any] = vars(self).get("_stores", {})

    def stat(self, path: str, begin: float | None = None) -> Identity:
        return identity_of(self.ask(path, lambda store, key: store.head(key), begin=begin))

    def open(
        self, path: str, access: Access, identity: Identity | None = None, is_mirrored: bool = True
    ) -> StoredFile:
        """Opens an object, without a request if its identity is known: reading shows a change.

        An index is mapped from a copy where a map is asked for.
        """
        identity = identity or self.stat(path)
        if access == "mmap" and path.endswith(IDX):
            return copied_file(self._folder, path, self._from_now(path, identity))
        return ObjectFile(self, path, identity, self.mirror if is_mirrored else None)

    def fetch_index(self, path: str, identity: Identity) -> None:
        """Brings an index to this node, if there is room and no other process does so."""
        if closing.is_set():
            return  # the end of Python would wait for it
        with contextlib.suppress(OSError, StorageError):  # who opens it is told
            fetch_index(self._folder, path, self._from_now(path, identity), waits=False)

    def copied(self, paths: Sequence[str]) -> str:
        """A folder of the node with copies of objects, which keep their names."""
        identities = [self.stat(path) for path in paths]
        name = blake2b(repr((paths, identities)).encode()).hexdigest()
        folder = own_folder(os.path.join(own_folder(self._folder), name))
        for path, identity in zip(paths, identities, strict=True):
            fetch(os.path.join(folder, os.path.basename(path)), self._from_now(path, identity))
        return folder

    def _from_now(self, path: str, identity: Identity) -> ObjectFile:
        """An object to copy: the time limit also counts while other processes try to do so."""
        file = ObjectFile(self, path, identity)
        file.begin = time.monotonic()
        return file

    def pinned(self, identities: Mapping[str, Identity]) -> "PinnedObjects":
        return PinnedObjects(self, identities)

    def listed(self, paths: Iterable[str]) -> "PinnedObjects":
        """The storage with all identities in the folders of some objects, by a listing of each."""
        folders = {path.rpartition("/")[0] + "/" for path in paths}
        listings = map(self._listing, sorted(folders))
        identities = {path: Identity(*one) for objects in listings for path, one in objects.items()}
        return PinnedObjects(self, identities, frozenset(folders))

    def _listing(self, folder: str) -> dict[str, Any]:
        """The objects of a folder; processes of a node that start together share a listing."""
        access = self.ask(folder, lambda store, _: repr(getattr(store, "config", "")))
        name = "list-" + blake2b(repr((folder, access)).encode()).hexdigest()
        begin = time.monotonic()
        return dict(
            shared_value(self._folder, name, _FRESH, lambda: dict(self.objects(folder, begin)))
        )

    def list(self, prefix: str) -> Iterator[str]:
        return (path for path, _ in self.objects(prefix))

    def objects(self, prefix: str, begin: float | None = None) -> Iterator[tuple[str, Identity]]:
        """The paths that begin with a prefix, without a slash after it, and their identities."""
        folder, slash, _ = prefix.rpartition("/")
        listing = self.ask(
            folder + slash, lambda store, key: store.list_with_delimiter(key or None), begin=begin
        )
        start = bucket_of(prefix)[0] + "/"
        for entry in listing["objects"]:
            if start.startswith("az:"):  # Azure lists ETags without the quotes of its other replies
                entry = {**entry, "e_tag": '"{}"'.format(entry["e_tag"].strip('"'))}
            if (path := start + entry["path"]).startswith(prefix):
                yield path, identity_of(entry)

    def ask(
        self,
        path: str,
        request: Callable[[Any, str], T],
        part_retries: int = 0,
        begin: float | None = None,
    ) -> T:
        """What a request of a store and a key gives, tried again until the limit.

        Each of the requests that obstore makes of one is tried again `part_retries` times by it;
        then the limit counts from the first failure. While no request succeeds, the limit counts
        from `begin`, when it was asked for: those of requests that wait would add up. One that has
        waited till the end of Python is not made.

        Raises:
            FileNotFoundError: There is no such object.
            StorageError: It was denied, or failed until the limit.
        """
        note_use()
        if begin is not None and closing.is_set():
            raise StorageError(f"{path} is not asked for any more, because Python ends")
        bucket, key = bucket_of(path)
        if (store := self._stores.get((bucket, part_retries))) is None:
            store = self._stores[bucket, part_retries] = self._store(bucket, part_retries)
        start, pause, count = time.monotonic(), _FIRST_PAUSE, 1
        while True:
            try:
                result = request(store, key)
                self._last_success = time.monotonic()
                return result
            except BaseException as error:  # a panic of obstore is no Exception
                problem = _problem_of(path, error)
                if part_retries and count == 1:
                    start = time.monotonic()  # parts may have gone up for hours
                passed = time.monotonic() - min(start, max(begin or start, self._last_success))
                if passed + pause > self.time_limit or closing.is_set():
                    raise StorageError(
                        f"{problem} (the last of {count} requests in {passed:.1f} s; time_limit is "
                        f"{self.time_limit:g} s)"
                    ) from None
            closing.wait(pause * random.uniform(0.5, 1))  # not all processes at one time
            pause, count = min(2 * pause, _LONGEST_PAUSE), count + 1

    def _store(self, bucket: str, retries: int) -> Any:
        scheme, _, name = bucket.partition("://")
        timeouts = {
            "timeout": f"{min(_TIMEOUT, self.time_limit)}s",
            "read_timeout": f"{min(self._stall_limit, self.time_limit)}s",
            "pool_max_idle_per_host": "1024",
        }
        try:
            if scheme == "msc":
                return ProfileStore(name)
            from obstore import store

            if scheme == "file":
                return store.LocalStore()
            return getattr(store, STORES[scheme])(
                name,
                **self._options,
                # An endpoint of the user may be http://; the stores' own are https://.
                client_options={"allow_http": True, **timeouts, **self._client_options},
                retry_config={"max_retries": retries},
            )
        except ImportError:
            package = "multi-storage-client" if scheme == "msc" else "'millrace[buckets]'"
            raise ConfigError(f"{bucket} needs a package: pip install {package}") from None
        except Exception as error:
            problem = f"cannot be opened with its options: {_text_of(error)}"
            raise ConfigError(f"{bucket} {problem}") from None


@functools.cache
def by_environment() -> ObjectStorage:
    """The storage of all prefixes that come without one."""
    return ObjectStorage()


def bucket_of(path: str) -> tuple[str, str]:
    """A path's bucket, with its scheme, and key.

    >>> bucket_of("s3://bucket/folder/name")
    ('s3://bucket', 'folder/name')
    """
    scheme, mark, rest = path.partition("://")
    name, _, key = rest.partition("/")
    if scheme not in BUCKET_SCHEMES or not mark or bool(name) == (scheme == "file"):
        raise ConfigError(
            f"{path!r} is not the path of an object, which is s3://BUCKET/KEY, gs://BUCKET/KEY, "
            "az://CONTAINER/KEY, msc://PROFILE/KEY or file:///PATH"
        )
    if _UNFIT.search(key):
        raise ConfigError(
            f"{path!r} has a double slash, or a part '.' or '..', which keys here must not have"
        )
    return f"{scheme}://{name}", key


def _text_of(error: BaseException) -> str:
    return str(error).partition("Debug source")[0].strip()  # its structs in Rust are not for users


def _problem_of(path: str, error: BaseException) -> str:
    """What went wrong, if another request may succeed; else it raises what to tell the caller."""
    text = _text_of(error)
    if "169.254.169.254" in text:
        text = f"no credentials were found, and the machine's role gave none: {text}"
    found = _STATUS.search(text)
    status, kind = int(found[1]) if found else 0, type(error).__name__
    if isinstance(error, FileNotFoundError):
        raise FileNotFoundError(2, "there is no such object or bucket", path) from None
    if kind == "PanicException":
        raise ConfigError(f"{path}: {_ENDPOINT}") from None
    if "redirect without LOCATION" in text:
        raise ConfigError(f"{path}: give the region of the bucket (options, AWS_REGION)") from None
    if isinstance(error, StorageError) or not isinstance(error, Exception):
        raise error
    if isinstance(error, ValueError):  # of obstore, before a request
        raise ConfigError(f"{path} cannot be the path of an object: {error}") from None
    is_local = path.startswith("file:")  # whose errors stay
    if not is_local and ("Timeout" in str(error) or "timed out" in str(error)):
        return f"{path} is too slow: {text}"
    if _EXPIRED.search(text):
        return f"{path} was refused, because the credentials or the signature expired: {text}"
    if kind == "PreconditionError":
        raise changed(path, "another object")
    if status in (401, 403) or kind == "PermissionDeniedError":
        remedy = "Check the credentials, and what they may read"
        raise StorageError(f"{path} was denied: {text}. {remedy}") from None
    # S3 answers 400 if credentials expired, and to a HEAD it does so without a code.
    may_expire = status == 400 and "<Code>" not in text
    is_final = 400 <= status < 500 and status not in (408, 409, 429) and not may_expire
    if is_final or is_local:
        raise StorageError(f"{path} cannot be read: {text}") from None
    return f"{path} cannot be read: {text}"


@dataclass(frozen=True)
class PinnedObjects:
    """A storage with objects whose identities are known: to open them takes no request, nor to see
    that a listed folder lacks one."""

    base: ObjectStorage
    identities: Mapping[str, Identity]
    folders: frozenset[str] = frozenset()
    has_renames: ClassVar[bool] = False

    def stat(self, path: str) -> Identity:
        identity = self.identities.get(path)
        if identity is None and path.rpartition("/")[0] + "/" in self.folders:
            raise FileNotFoundError(2, "there was no such object when its folder was listed", path)
        return identity or self.base.stat(path)

    def open(self, path: str, access: Access) -> StoredFile:
        # Samples of all listed files are read for a plan: they are no start of a mirror.
        return self.base.open(path, access, self.stat(path), is_mirrored=not self.folders)

    def list(self, prefix: str) -> Iterator[str]:
        return self.base.list(prefix)
