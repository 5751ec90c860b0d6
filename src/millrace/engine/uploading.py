"""Uploads of token files and folders of shards, which appear in a bucket whole or not at all.

Other files go first; the last ones, without which readers ignore them, appear by a conditional put.
An object beside the target says who is at work, so that two uploads never mix. Each file is a task
of the job that has made it: an upload that was killed goes on with the next file.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millrace.checks import check_path, plain_json, shown
from millrace.engine.run import Run
from millrace.engine.tasks import Task
from millrace.errors import ConfigError, DataError
from millrace.names import BIN, IDX, LOSS_ARRAY, RESULT, SHUFFLE_METADATA
from millrace.option_class import StrPath, check_options, option
from millrace.shards.metadata import bin_paths, is_shards_folder, parse_metadata
from millrace.storage import LOCAL, exists, local_path, read_file
from millrace.storage.objects import ObjectStorage, bucket_of, by_environment
from millrace.store.publish import files_of

CLAIM = ".uploading"
_STEP = 1 << 19  # number of an upload's tasks, beside those of its job
_LEAST_PART, _MOST_PARTS = 5 << 20, 9_000  # a store takes at most 10,000 parts
_SMALL = 64 << 20  # bytes that are put by one request, on a condition


def check_target(name: str, value: Any) -> str:
    """The path prefix, or the folder, of an option: a path in a bucket."""
    target = check_path(name, value).rstrip("/")
    bucket, key = bucket_of(target)
    if not key or bucket.startswith("msc:"):
        raise ConfigError(
            f"{name} is {target}; write s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY or "
            "file:///PATH. Profiles of msc:// are only read"
        )
    return target


def _check_storage(name: str, value: Any) -> ObjectStorage:
    if not isinstance(value, ObjectStorage):
        raise ConfigError(f"{name} must be an ObjectStorage, not {shown(value)}")
    return value


@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    source: StrPath = option(
        "path prefix of a token file, or output folder of a shuffle",
        flags="source",
        metavar="SOURCE",
    )
    target: str = option(
        "path prefix or folder in a bucket: s3://BUCKET/KEY",
        flags="target",
        metavar="TARGET",
        check=check_target,
    )
    move: bool = option("remove each local file once it is in the bucket", False)
    restart: bool = option("take over from an upload that died on another machine", False)
    storage: ObjectStorage | None = option(
        "storage of the target", None, flags=None, check=_check_storage
    )

    def __post_init__(self) -> None:
        check_options(self)


def upload(source: StrPath, target: str, **options: Any) -> list[str]:
    """Copies a token file, or the output folder of a shuffle, into a bucket.

    The target must be new. Readers see nothing of it before all of it is there. A call that fails
    or is killed is repeated: it begins the file anew at which it stopped.

    Args:
        source: Path prefix of the token file, or the folder.
        target: Path prefix, or folder, in a bucket.
        options: The fields of `UploadOptions`.

    Returns:
        The paths of the objects.

    Raises:
        ConfigError: A target that is there already, or at which another upload is at work.
        DataError: A source that is not whole, or has changed since a part of it went up.
        StorageError: A request that fails.
    """
    checked = UploadOptions(source=source, target=target, **options)
    start, target = local_path(os.fspath(checked.source)).rstrip("/"), checked.target
    prefix = start + ".upload"
    with Run(prefix, {"job": "upload 1", "target": target}, restart=checked.restart) as run:
        files = run.once("files", partial(_identities, start))
        up = Upload(run, target, [*files][-1:], checked.restart, checked.storage)
        check = partial(_check_unchanged, start, files)
        check()
        run.publish(partial(up.send, start, files, move=checked.move, check=check), None)
    os.unlink(prefix + RESULT)  # of no use: the target must be new
    return [target + name for name in files]


def _identities(start: str) -> dict[str, Any]:
    """What follows a path in those of its files, the last one last, and the identity of each."""
    files = {}
    for name in _names(start):
        try:
            files[name] = LOCAL.stat(start + name)
        except FileNotFoundError:
            raise DataError(
                f"{start + name} is not there: give a whole token file or folder of shards"
            ) from None
    return files


def _check_unchanged(start: str, files: Mapping[str, Any]) -> None:
    """Without this, the files of two sources would be one object."""
    for name, identity in files.items():
        with contextlib.suppress(FileNotFoundError):  # it has moved
            if plain_json(LOCAL.stat(start + name)) != identity:
                raise DataError(
                    f"{start + name} has changed since its upload began. Give --restart "
                    "(restart=True) to begin anew"
                )


class Upload:
    """Files on their way to one target, which is kept from all other uploads until they are there.

    Args:
        run: Run of the job that has made the files; its journal keeps what is up.
        target: First part of the paths of the objects.
        last: What follows it in the paths of those without which readers ignore all others.
        restart: Whether to take the target from an upload that has died.
        storage: Storage of the target; None: buckets as the environment says.

    Raises:
        ConfigError: The target is there already, or another upload is at work.
    """

    def __init__(
        self,
        run: Run,
        target: str,
        last: Sequence[str],
        restart: bool,
        storage: ObjectStorage | None = None,
    ) -> None:
        self._run, self._target, self._last = run, target, last
        self._storage, self._claim_path = storage or by_environment(), target + CLAIM
        # The journal's lock keeps others with this claim away, also if an upload that failed at its
        # start has left no journal.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = f"{boot} {os.uname().nodename} {os.path.dirname(run.folder)}"
        claim = self._claim = os.fsencode(run.once("claim", lambda: place))
        if restart or not run.stored("target is new"):
            _put(self._storage, self._claim_path, claim, "overwrite" if restart else "create")
        self._check_claim()
        run.once("target is new", self._check_target)

    def _check_claim(self) -> None:
        """Another upload may have taken the target over, and may have ended."""
        is_ours = bool(self._run.stored("is up"))
        with contextlib.suppress(FileNotFoundError):
            is_ours = is_ours or read_file(self._storage, self._claim_path) == self._claim
        if not is_ours:
            raise ConfigError(
                f"{self._claim_path}: another upload to this target is at work, has died, or has "
                "ended. If it has died, give restart=True (--restart)"
            )

    def _check_target(self) -> bool:
        for path in [self._target + name for name in self._last]:
            if exists(self._storage, path):
                self._delete(self._claim_path)
                raise ConfigError(f"{path} is there already: give a new name; readers may use it")
        return True

    def send(
        self,
        source: str,
        names: Iterable[str],
        *,
        move: bool,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Puts the files that are not up yet, the last ones after a check; frees the target."""
        inputs = self._run.identity
        if self._run.once("inputs of the upload", lambda: inputs) != inputs:
            raise ConfigError(
                f"inputs of the job have changed since its output began to go up to {self._target}"
                ". Give --restart (restart=True), and another target"
            )
        names = [name for name in names if name not in self._last]
        tasks = [Task((_STEP, number), name, name) for number, name in enumerate(names)]
        context = self._storage, source, self._target
        for done in self._run.map(_put_task, tasks, context, phase="upload", workers=1):
            if move:
                Path(source + done.task.payload).unlink(missing_ok=True)
        if not self._run.stored("is up"):
            check()
            self._check_claim()
            for name in self._last:
                self._remove_leftovers(name, names)
                self._put_last(source + name, self._target + name)
            self._run.store("is up", True)
        self._delete(self._claim_path)
        if move:
            for name in self._last:
                Path(source + name).unlink(missing_ok=True)

    def _remove_leftovers(self, last: str, names: Sequence[str]) -> None:
        """Removes sidecars of an upload that has died, or of a pair that was removed."""
        prefix = last.removesuffix(IDX)
        if prefix != last:
            for name in {*files_of(prefix), prefix + LOSS_ARRAY} - {*names, last}:
                self._delete(self._target + name)

    def send_pairs(self, source: str, prefixes: Iterable[str]) -> None:
        """The same for pairs below a path prefix, which leave the disk."""
        start = len(source)
        names = [prefix[start:] + name for prefix in prefixes for name in pair_names(prefix)]
        self.send(source, names, move=True)

    def _put_last(self, source: str, target: str) -> None:
        if os.path.getsize(source) > _SMALL:
            put_file(source, target, self._storage)
            return
        data = Path(source).read_bytes()
        is_new = _put(self._storage, target, data, "create")
        # It may be there: the reply to an earlier request was lost, or this process was killed.
        if not is_new and read_file(self._storage, target) != data:
            raise ConfigError(f"{target} was written by another upload meanwhile: give a new name")

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._storage.ask(path, lambda store, key: store.delete(key))


def _put_task(context: tuple[ObjectStorage, str, str], task: Task) -> tuple[None, list[str]]:
    storage, source, target = context
    put_file(source + task.payload, target + task.payload, storage)
    return None, []


def put_file(source: str, target: str, storage: ObjectStorage | None = None) -> None:
    """Puts a file, in parts if it is large."""
    part = max(_LEAST_PART, -(-os.path.getsize(source) // _MOST_PARTS))

    def put(store: Any, key: str) -> None:
        store.put(key, Path(source), chunk_size=part, max_concurrency=4)

    (storage or by_environment()).ask(target, put, part_retries=10)


def pair_names(prefix: str) -> list[str]:
    """What follows a path prefix in the paths of the files of a pair, the index last."""
    paths = [path for path in (*files_of(prefix), prefix + LOSS_ARRAY) if os.path.exists(path)]
    names = [path.removeprefix(prefix) for path in paths if not path.endswith((BIN, IDX))]
    return [*names, BIN, IDX]


def _names(start: str) -> list[str]:
    """The same of a pair, or of a folder of shards, its metadata last."""
    if not is_shards_folder(start):
        return pair_names(start)
    metadata = parse_metadata(start)
    files = {f"/{name}" for name in metadata.checksums}
    files |= {path.removeprefix(start) for path in bin_paths(start, metadata)}
    return [*sorted(files), f"/{SHUFFLE_METADATA}"]


def _put(storage: ObjectStorage, path: str, data: bytes, mode: str) -> bool:
    """Puts an object; False if it is there although the mode is "create"."""

    def request(store: Any, key: str) -> bool:
        try:
            store.put(key, data, mode=mode)
        except Exception as error:
            if type(error).__name__ == "AlreadyExistsError":  # of an optional package
                return False
            raise
        return True

    return storage.ask(path, request)
