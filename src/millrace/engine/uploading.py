"""Uploads of token files and folders of shards, which appear in a bucket whole or not at all.

Other files go first; the last ones, without which readers ignore them, appear by a conditional put.
An object beside the target says who is at work, so that two uploads never mix. Each file is a task
of the job that has made it: an upload that was killed goes on with the next file.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millrace.checks import check_path
from millrace.engine.run import Run
from millrace.engine.tasks import Task
from millrace.errors import ConfigError
from millrace.names import IDX, LOSS_ARRAY, RESULT, SHUFFLE_METADATA
from millrace.option_class import StrPath, check_options, option
from millrace.shards.metadata import bin_paths, is_shards_folder, parse_metadata
from millrace.storage import exists, local_path, read_file
from millrace.storage.objects import ObjectStorage, bucket_of, by_environment
from millrace.store.publish import files_of

CLAIM = ".uploading"
_STEP = 1 << 19  # number of an upload's tasks, beside those of its job
_LEAST_PART, _MOST_PARTS = 5 << 20, 9_000  # a store takes at most 10,000 parts
_SMALL = 64 << 20  # bytes that are put by one request, on a condition


def check_target(name: str, value: Any) -> str:
    """The path prefix, or the folder, of an option: a path in a bucket."""
    target = check_path(name, value).rstrip("/")
    bucket_of(target)
    return target


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
    storage: ObjectStorage | None = option("storage of the target", None, flags=None)

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
        DataError: A source that is not whole.
        StorageError: A request that fails.
    """
    checked = UploadOptions(source=source, target=target, **options)
    start, target = local_path(os.fspath(source)), checked.target
    prefix = start.rstrip("/") + ".upload"
    with Run(prefix, {"job": "upload 1", "target": target}, restart=checked.restart) as run:
        names = run.once("names", partial(_names, start))
        up = Upload(run, target, names[-1:], checked.restart, checked.storage)
        run.publish(partial(up.send, start, names, move=checked.move), None)
    os.unlink(prefix + RESULT)  # of no use: the target must be new
    return [target + name for name in names]


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
        self._storage, path = storage or by_environment(), target + CLAIM
        claim = run.once("claim", lambda: os.urandom(8).hex()).encode()
        if restart:
            self._storage.ask(path, lambda store, key: store.put(key, claim))
        elif not _create(self._storage, path, claim) and read_file(self._storage, path) != claim:
            raise ConfigError(
                f"{path}: another upload to this target is at work, or has died. If it has died, "
                "give restart=True (--restart)"
            )
        run.once("target is new", self._check_target)

    def _check_target(self) -> bool:
        for name in self._last:
            if exists(self._storage, self._target + name):
                self._release()
                raise ConfigError(
                    f"{self._target + name} is there already: give a new name, as readers may use "
                    "it"
                )
        return True

    def send(self, source: str, names: Iterable[str], *, move: bool) -> None:
        """Puts the files that are not up yet, the last ones last, and frees the target."""
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
        for name in self._last:
            self._put_last(source + name, self._target + name)
            if move:
                Path(source + name).unlink(missing_ok=True)
        self._release()

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
        # It may be there: the reply to an earlier request was lost, or this process was killed.
        if not _create(self._storage, target, data) and read_file(self._storage, target) != data:
            raise ConfigError(f"{target} was written by another upload meanwhile: give a new name")

    def _release(self) -> None:
        self._storage.ask(self._target + CLAIM, lambda store, key: store.delete(key))


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
    names = [path.removeprefix(prefix) for path in paths if not path.endswith(IDX)]
    return [*names, IDX]


def _names(start: str) -> list[str]:
    """The same of a pair, or of a folder of shards, its metadata last."""
    if not is_shards_folder(start):
        return pair_names(start)
    metadata = parse_metadata(start)
    files = {f"/{name}" for name in metadata.checksums}
    files |= {path.removeprefix(start) for path in bin_paths(start, metadata)}
    return [*sorted(files), f"/{SHUFFLE_METADATA}"]


def _create(storage: ObjectStorage, path: str, data: bytes) -> bool:
    """Puts an object that must be new; False if it is there."""

    def request(store: Any, key: str) -> bool:
        try:
            store.put(key, data, mode="create")
        except Exception as error:
            if type(error).__name__ == "AlreadyExistsError":  # of an optional package
                return False
            raise
        return True

    return storage.ask(path, request)
