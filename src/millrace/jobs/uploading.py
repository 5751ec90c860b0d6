"""Uploads of token files and folders of shards, which appear in a bucket whole or not at all.

Other files go first; the last one, without which readers ignore them, appears by a conditional put.
An object beside the target says who is at work, so that two uploads never mix. A journal beside the
source names the objects that are whole: an upload that was killed goes on with the next file.
"""

import contextlib
import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.files import atomic_file, file_lock
from millrace.names import IDX, LOSS_ARRAY, SHUFFLE_METADATA
from millrace.option_class import StrPath, check_options, option
from millrace.shards.metadata import bin_paths, is_shards_folder, parse_metadata
from millrace.storage import exists, local_path, read_file
from millrace.storage.objects import ObjectStorage, by_environment
from millrace.store.publish import files_of

CLAIM = ".uploading"
JOURNAL = ".upload.json"
_LEAST_PART, _MOST_PARTS = 8 << 20, 9_000  # a store takes at most 10,000 parts
_SMALL = 64 << 20  # bytes that are put by one request, on a condition


@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    source: StrPath = option(
        "path prefix of a token file, or output folder of a shuffle",
        flags="source",
        metavar="SOURCE",
    )
    target: str = option(
        "path prefix or folder in a bucket: s3://BUCKET/KEY", flags="target", metavar="TARGET"
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
    start, storage = local_path(os.fspath(source)), checked.storage or by_environment()
    journal = start.rstrip("/") + JOURNAL
    with file_lock(f"{journal}.lock", limit=0):
        state: dict[str, Any] = {"claim": os.urandom(8).hex(), "target": target, "done": {}}
        with contextlib.suppress(FileNotFoundError), open(journal, "rb") as file:
            state = json.load(file)
        if state["target"] != target:
            raise ConfigError(f"{journal}: an upload to {state['target']} has not ended; repeat it")
        if "names" not in state:
            state["names"] = _names(start)
        names = state["names"]
        last = target + names[-1]
        if not state["done"] and exists(storage, last):
            raise ConfigError(f"{last} is there already: give a new name, as readers may use it")
        _write(journal, state)
        _claim(storage, target + CLAIM, state["claim"], checked.restart)
        for name in names:
            if name not in state["done"]:
                _put(storage, start + name, target + name, is_last=name == names[-1])
                state["done"][name] = os.path.getsize(start + name)
                _write(journal, state)
            if checked.move:
                Path(start + name).unlink(missing_ok=True)
        storage.ask(target + CLAIM, lambda store, key: store.delete(key))
        os.unlink(journal)
    return [target + name for name in names]


def _names(start: str) -> list[str]:
    """What follows the source in the paths of its files, the last one last."""
    if is_shards_folder(start):
        metadata = parse_metadata(start)
        files = {f"/{name}" for name in metadata.checksums}
        files |= {path.removeprefix(start) for path in bin_paths(start, metadata)}
        return [*sorted(files), f"/{SHUFFLE_METADATA}"]
    paths = [path for path in (*files_of(start), start + LOSS_ARRAY) if os.path.exists(path)]
    names = [path.removeprefix(start) for path in paths if not path.endswith(IDX)]
    return [*names, IDX]


def _write(journal: str, state: dict[str, Any]) -> None:
    with atomic_file(journal) as file:
        file.write(json.dumps(state).encode())


def _claim(storage: ObjectStorage, path: str, claim: str, restart: bool) -> None:
    """Puts the claim of this upload, unless another one's is there."""
    if restart:
        storage.ask(path, lambda store, key: store.put(key, claim.encode()))
    elif not _create(storage, path, claim.encode()) and read_file(storage, path) != claim.encode():
        raise ConfigError(
            f"{path}: another upload to this target is at work, or died on another machine. If it "
            "died, give restart=True (--restart)"
        )


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


def _put(storage: ObjectStorage, source: str, target: str, *, is_last: bool) -> None:
    size = os.path.getsize(source)
    if is_last and size <= _SMALL:
        # It is ours if it is there: the reply to an earlier request may have been lost.
        _create(storage, target, Path(source).read_bytes())
        return
    part = max(_LEAST_PART, -(-size // _MOST_PARTS))
    put = partial(_multipart, source=Path(source), size=part)
    storage.ask(target, put, part_retries=10)


def _multipart(store: Any, key: str, source: Path, size: int) -> None:
    store.put(key, source, chunk_size=size, max_concurrency=4)
