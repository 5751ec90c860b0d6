"""An input format of one's own, in 40 lines and by public names alone."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.encoding import Tokenizer
from millrace.errors import TextError
from millrace.jobs import tokenize
from millrace.text import BadDocumentError, Batch, Documents, Format, Part, Query, open_part


class Songs(Format):
    """Songs, each after a line with "# " and its title."""

    name = "songs"
    endings = (".songs",)

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        batch, line, byte_offset = Batch(query, part.size), 0, 0
        with open_part(part) as stream:
            data = b"".join(iter(lambda: stream.read(1 << 16), b""))
            for song in data.split(b"# ")[1:]:
                title, _, verses = song.decode().partition("\n")
                try:
                    if not verses:
                        raise BadDocumentError("a song without verses")
                    values = {"title": title, "text": verses}
                    texts = [values[key] for key in query.keys]
                    batch.add(texts, line, byte_offset, title)
                except BadDocumentError as error:
                    query.reject(line, byte_offset, str(error), song)
                line += song.count(b"\n")
                byte_offset += len(song) + 2
            yield batch.take(line, stream.position, stream.size)


KEYS = ["title", "text"]
SONGS = {"The mill": "turn, wheel\nturn\n", "Race": "the water\n", "Dry": "", "Night": "still\n"}


def write_songs(path: Path, songs: dict[str, str]) -> Path:
    data = "".join(f"# {title}\n{verses}" for title, verses in songs.items()).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.songs", "a.songs.gz"])
def test_a_format_of_ones_own_is_tokenized(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "songs"
    folder.mkdir()
    write_songs(folder / name, SONGS)
    write_songs(folder / "b.songs", {"Last": "home\n"})
    result = tokenize(
        [folder],
        tmp_path / "songs",
        Tokenizer("bytes"),
        format=Songs(),
        json_keys=KEYS,
        on_error="quarantine",
        workers=2,
    )
    songs = {**SONGS, "Last": "home\n"}
    lines = tmp_path / "songs.jsonl"
    rows = [{"title": title, "text": text} for title, text in songs.items() if text]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = tokenize([lines], tmp_path / "lines", Tokenizer("bytes"), json_keys=KEYS)
    for key, prefix in expected.prefixes.items():
        for ending in (".bin", ".idx"):
            ours = Path(result.prefixes[key] + ending).read_bytes()
            assert ours == Path(prefix + ending).read_bytes()
    assert result.num_documents == 4
    skipped = [(row["line"], row["reason"]) for row in result.skipped]
    assert skipped == [(6, "a song without verses")]
    quarantined = json.loads(Path(f"{tmp_path}/songs.quarantine.jsonl").read_text())
    assert quarantined["file"] == str(folder / name)


def test_a_bad_document_stops_the_job_with_its_line(tmp_path: Path) -> None:
    path = write_songs(tmp_path / "a.songs", SONGS)
    with pytest.raises(TextError, match=r"a\.songs, line 6: a song without verses"):
        tokenize([path], tmp_path / "songs", Tokenizer("bytes"), format=Songs())
