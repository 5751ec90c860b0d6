"""Uploads of token files and folders of shards, which appear in a bucket whole or not at all.

Other files go first; the last ones, without which readers ignore them, appear by a conditional put.
An object beside the target says who is at work, so that two uploads never mix. A journal names the
objects that are whole: an upload that was killed goes on with the next file.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millrace.checks import check_path
from millrace.errors import ConfigError
from millrace.files import atomic_file, file_lock
from millrace.names import IDX, LOSS_ARRAY, SHUFFLE_METADATA
from millrace.option_class import StrPath, check_options, option
from millrace.shards.metadata import bin_paths, is_shards_folder, parse_metadata
from millrace.storage import exists, local_path, read_file
from millrace.storage.objects import ObjectStorage, bucket_of, by_environment
from millrace.store.publish import files_of

CLAIM = ".uploading"
JOURNAL = ".upload.json"
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
    journal = start.rstrip("/") + JOURNAL
    with file_lock(f"{journal}.lock", limit=0):
        state: dict[str, Any] = {"target": target}
        with contextlib.suppress(FileNotFoundError), open(journal, "rb") as file:
            state = json.load(file)
        if state["target"] != target:
            raise ConfigError(f"{journal}: an upload to {state['target']} has not ended; repeat it")
        if "names" not in state:
            state["names"] = _shard_names(start) if is_shards_folder(start) else pair_names(start)
        names = state["names"]
        up = Upload(target, [names[-1]], state, partial(_write, journal), checked.storage)
        try:
            up.claim(checked.restart)
        except ConfigError:
            os.unlink(journal)  # it would keep this source from another target
            raise
        up.send(start, names, move=checked.move)
        os.unlink(journal)
    return [target + name for name in names]


class Upload:
    """Files on their way to one target, of which no other upload may write any.

    Args:
        target: First part of the paths of the objects.
        last: What follows it in the paths of those without which readers ignore all others.
        state: What is done, plain JSON; empty at first.
        save: Function that keeps the state across kills.
        storage: Storage of the target; None: buckets as the environment says.
        inputs: What the content of the files follows from.
    """

    def __init__(
        self,
        target: str,
        last: Sequence[str],
        state: dict[str, Any],
        save: Callable[[dict[str, Any]], Any],
        storage: ObjectStorage | None = None,
        inputs: str = "",
    ) -> None:
        self._target, self._last, self._storage = target, last, storage or by_environment()
        self._state, self._save, self._inputs = state, save, inputs

    def claim(self, restart: bool = False) -> None:
        """Keeps other uploads away, also after a kill.

        Raises:
            ConfigError: The target is there already, or another upload is at work.
        """
        state, path = self._state, self._target + CLAIM
        if "claim" not in state:
            state.update(claim=os.urandom(8).hex(), is_claimed=False, done=[])
            self._save(state)
        claim = state["claim"].encode()
        if restart:
            self._storage.ask(path, lambda store, key: store.put(key, claim))
        elif not _create(self._storage, path, claim) and read_file(self._storage, path) != claim:
            raise ConfigError(
                f"{path}: another upload to this target is at work, or has died. If it has died, "
                "give restart=True (--restart)"
            )
        for name in [] if state["is_claimed"] else self._last:
            if exists(self._storage, self._target + name):
                self._release()
                raise ConfigError(
                    f"{self._target + name} is there already: give a new name, as readers may use "
                    "it"
                )
        state["is_claimed"] = True
        self._save(state)

    def send(self, source: str, names: Sequence[str], *, move: bool) -> None:
        """Puts files that are not up yet, the last ones last, and ends the claim."""
        state = self._state
        if state.setdefault("inputs", self._inputs) != self._inputs:
            raise ConfigError(
                f"inputs of the job have changed since its output began to go up to {self._target}"
                ". Give --restart (restart=True), and another target"
            )
        for name in names:
            if name not in state["done"]:
                self._put(source + name, self._target + name, is_last=name in self._last)
                state["done"].append(name)
                self._save(state)
            if move:
                Path(source + name).unlink(missing_ok=True)
        self._release()

    def send_pairs(self, source: str, prefixes: Iterable[str]) -> None:
        """The same for pairs below a path prefix, which leave the disk."""
        start = len(source)
        names = [prefix[start:] + name for prefix in prefixes for name in pair_names(prefix)]
        self.send(source, sorted(names, key=lambda name: name in self._last), move=True)

    def _put(self, source: str, target: str, *, is_last: bool) -> None:
        if not is_last or os.path.getsize(source) > _SMALL:
            put_file(source, target, self._storage)
            return
        data = Path(source).read_bytes()
        # It may be there: the reply to an earlier request was lost, or this process was killed.
        if not _create(self._storage, target, data) and read_file(self._storage, target) != data:
            raise ConfigError(f"{target} was written by another upload meanwhile: give a new name")

    def _release(self) -> None:
        self._storage.ask(self._target + CLAIM, lambda store, key: store.delete(key))


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


def _shard_names(folder: str) -> list[str]:
    """The same of a folder of shards, its metadata last."""
    metadata = parse_metadata(folder)
    files = {f"/{name}" for name in metadata.checksums}
    files |= {path.removeprefix(folder) for path in bin_paths(folder, metadata)}
    return [*sorted(files), f"/{SHUFFLE_METADATA}"]


def _write(journal: str, state: dict[str, Any]) -> None:
    with atomic_file(journal) as file:
        file.write(json.dumps(state).encode())


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
