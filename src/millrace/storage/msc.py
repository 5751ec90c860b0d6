"""Objects of a profile of NVIDIA's multi-storage-client, `msc://PROFILE/PATH`, as a store."""

from types import SimpleNamespace
from typing import Any


class ProfileStore:
    """What `ObjectStorage` asks of a store of obstore, by the client of a profile."""

    def __init__(self, profile: str) -> None:
        from multistorageclient import shortcuts, types

        self._client, _ = shortcuts.resolve_storage_client(f"msc://{profile}/")
        self._range: Any = types.Range

    def head(self, key: str) -> dict[str, Any]:
        return _meta(self._client.info(key))

    def get(self, key: str, options: Any) -> Any:
        """A range. The client knows no conditions: the identity after it shows that the bytes are
        those of the object that had this identity before."""
        start, stop = options["range"]
        body = self._client.read(key, byte_range=self._range(offset=start, size=stop - start))
        return SimpleNamespace(meta=self.head(key), range=(start, stop), bytes=lambda: body)

    def list_with_delimiter(self, folder: str | None) -> dict[str, Any]:
        entries = self._client.list(path=folder or "", include_directories=True)
        return {"objects": [_meta(entry) for entry in entries if entry.type == "file"]}


def _meta(entry: Any) -> dict[str, Any]:
    time = entry.last_modified
    version = entry.etag or time.isoformat()
    return {
        "path": entry.key,
        "size": entry.content_length,
        "last_modified": time,
        "e_tag": version,
    }
