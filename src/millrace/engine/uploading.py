"""Uploads of token files and shards, of which readers in a bucket see all or nothing.

Other files go first; the last ones, without which readers ignore them, appear by a conditional put.
An object beside the target says who is at work, so that two uploads never mix. Each file is a task
of the job that has made it: an upload that was killed goes on with the next file.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.checks import check_path, shown
from millrace.engine.run import Run
from millrace.engine.tasks import Task
from millrace.errors import ConfigError
from millrace.names import BIN, LOSS_ARRAY
from millrace.storage import exists, read_file
from millrace.storage.objects import bucket_of, by_environment
from millrace.store.publish import files_of

CLAIM = ".uploading"
_LEAST_PART, _MOST_PARTS = 5 << 20, 9_000  # a store takes at most 10,000 parts
_CONFLICT = "ConditionalRequestConflict"  # S3's answer beside another request: ask again
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


class Upload:
    """Files on their way to one target, which is kept from all other uploads until they are there.

    Args:
        run: Run of the job that has made the files; its journal keeps what is up.
        target: First part of the paths of the objects.
        last: Names, behind the target, of the objects that go up last: without one, readers ignore
            those that begin with its key.

    Raises:
        ConfigError: The target is there already, or another upload is at work.
    """

    def __init__(self, run: Run, target: str, last: Mapping[str, str]) -> None:
        self._run, self._target, self._last = run, target, last.values()
        self._claim_path = target + CLAIM
        # The journal's lock keeps others with this claim away, also if a job that failed at its
        # start has left no journal.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = [boot, os.uname().nodename, os.path.dirname(run.folder)]
        self._claim = run.once("claim", lambda: {"job": place, "last": last})
        run.once("target is new", self._take_target)
        if not run.stored("is up"):
            self._check_claim()

    def _take_target(self) -> bool:
        """Claims the target, after removing what an upload of the same folder has left there."""
        while not _create(self._claim_path, json.dumps(self._claim).encode()):
            earlier = self._check_claim()
            self._check_target(earlier.values())
            for start in earlier:
                for path in by_environment().list(self._target + start):
                    _delete(path)
            _delete(self._claim_path)
        self._check_target(self._last)
        return True

    def _check_claim(self) -> dict[str, str]:
        """The `last` of the claim; an error if it is another job's, which may be stopped, or gone.

        To take over the claim of a job that still runs would mix its files with ours.
        """
        claim: Any = "nothing"
        with contextlib.suppress(FileNotFoundError, ValueError):
            claim = json.loads(read_file(by_environment(), self._claim_path))
            if isinstance(claim, dict) and claim.get("job") == self._claim["job"]:
                return dict(claim["last"])
        raise ConfigError(
            f"{self._claim_path}: another upload to this target is at work, has died, or has ended "
            f"(the object holds {shown(claim)}). Give another name (and --restart, if this job had "
            "begun to go up); or, if that upload is known to be dead, remove this object by hand"
        )

    def _check_target(self, last: Iterable[str]) -> None:
        for path in [self._target + name for name in last]:
            if exists(by_environment(), path):
                _delete(self._claim_path)
                raise ConfigError(f"{path} is there already: give a new name; readers may use it")

    def send(self, source: str, names: Sequence[str] = ()) -> None:
        """Moves the files that are not up yet, the last ones at the end; frees the target."""
        inputs = self._run.identity
        if self._run.once("inputs of the upload", lambda: inputs) != inputs:
            raise ConfigError(
                f"inputs of the job have changed since its output began to go up to {self._target}"
                ". Give --restart (restart=True), and another target"
            )
        names = [name for name in names if name not in self._last]
        # Three numbers: the tasks of the job itself have one or two.
        tasks = [Task((0, 0, number), name, name) for number, name in enumerate(names)]
        context = source, self._target
        for done in self._run.map(_put_task, tasks, context, phase="upload", workers=1):
            Path(source + done.task.payload).unlink(missing_ok=True)
        if not self._run.stored("is up"):
            self._check_claim()
            for name in self._last:
                _put_last(source + name, self._target + name)
            self._run.store("is up", True)
        _delete(self._claim_path)
        for name in self._last:
            Path(source + name).unlink(missing_ok=True)

    def send_pairs(self, source: str, prefixes: Iterable[str]) -> None:
        """The same for pairs below a path prefix."""
        paths = [path for one in prefixes for path in (*files_of(one), one + LOSS_ARRAY)]
        self.send(source, [path.removeprefix(source) for path in paths])


def _put_task(context: tuple[str, str], task: Task) -> tuple[None, list[str]]:
    source, target = (first + task.payload for first in context)
    if source.endswith(BIN) or os.path.exists(source):
        put_file(source, target)
    else:
        _delete(target)  # a sidecar that an upload which has died may have left
    return None, []


def put_file(source: str, target: str) -> None:
    """Puts a file, in parts if it is large."""
    part = max(_LEAST_PART, -(-os.path.getsize(source) // _MOST_PARTS))

    def put(store: Any, key: str) -> None:
        store.put(key, Path(source), chunk_size=part, max_concurrency=4)

    by_environment().ask(target, put, part_retries=10)


def _put_last(source: str, target: str) -> None:
    if os.path.getsize(source) > _SMALL:
        put_file(source, target)
        return
    data = Path(source).read_bytes()
    # It may be there: the reply to an earlier request was lost, or this process was killed.
    if not _create(target, data) and read_file(by_environment(), target) != data:
        raise ConfigError(f"{target} was written by another upload meanwhile: give a new name")


def _create(path: str, data: bytes) -> bool:
    """Puts an object; False if it is there."""

    def request(store: Any, key: str) -> bool:
        try:
            store.put(key, data, mode="create")
            return True
        except Exception as error:  # its class is of an optional package
            if type(error).__name__ != "AlreadyExistsError" or _CONFLICT in str(error):
                raise
            return False

    return by_environment().ask(path, request)


def _delete(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        by_environment().ask(path, lambda store, key: store.delete(key))
