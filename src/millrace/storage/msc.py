"""Objects of a profile of NVIDIA's multi-storage-client, `msc://PROFILE/PATH`, as a store."""

from dataclasses import dataclass
from typing import Any

from millrace.errors import ConfigError


@dataclass(frozen=True)
class Reply:
    meta: dict[str, Any]
    range: tuple[int, int]
    body: bytes

    def bytes(self) -> bytes:
        return self.body


class ProfileStore:
    """What `ObjectStorage` asks of a store of obstore, by the client of a profile."""

    def __init__(self, profile: str) -> None:
        try:
            from multistorageclient import shortcuts, types
        except ImportError:
            raise ConfigError(
                f"msc://{profile} needs the package multi-storage-client: pip install it"
            ) from None
        try:
            self._client, _ = shortcuts.resolve_storage_client(f"msc://{profile}/")
        except ValueError as error:
            raise ConfigError(f"msc://{profile} cannot be read: {error}") from None
        self._types = types

    def head(self, key: str) -> dict[str, Any]:
        return _meta(self._client.info(key))

    def get(self, key: str, options: Any) -> Reply:
        """A range. The client knows no conditions: the identity after it shows that the bytes are
        those of the object that had this identity before."""
        start, stop = options["range"]
        body = self._client.read(key, byte_range=self._types.Range(offset=start, size=stop - start))
        return Reply(self.head(key), (start, stop), body)

    def list_with_delimiter(self, folder: str | None) -> dict[str, Any]:
        entries = self._client.list(path=folder or "", include_directories=True)
        return {"objects": [_meta(entry) for entry in entries if entry.type == "file"]}


def _meta(entry: Any) -> dict[str, Any]:
    return {
        "path": entry.key,
        "size": entry.content_length,
        "last_modified": entry.last_modified,
        "e_tag": entry.etag or entry.last_modified.isoformat(),
    }
