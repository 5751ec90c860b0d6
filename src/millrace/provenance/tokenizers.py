"""Which tokenizer, and splitter of sentences, wrote a pair, by the provenance in its sidecar.

The same ids mean other texts to another tokenizer, and nothing in a token file shows it. So the
sidecar of a pair names the tokenizer by hashes (see `millrace.encoding.Tokenizer`), which are
compared where pairs come together. So is the library that split texts into sentences, but not its
version and language. A pair without that information fits any other.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from millrace.errors import ConfigError, DataError
from millrace.storage import Storage
from millrace.store.info import read_info


class TokenizerRecord(NamedTuple):
    """What the sidecar of a pair says of the tokenizer.

    Attributes:
        entry: The entry "tokenizer" of the provenance.
        fingerprints: Hashes of the tokenizer; two with a hash in common are the same.
        sentences: Library, version and language of the splitter of sentences, and whether it keeps
            newlines; empty: unknown, or none.
    """

    prefix: str
    entry: dict[str, Any]
    fingerprints: frozenset[str]
    sentences: str = ""

    @property
    def splitter(self) -> str:
        """What is compared of `sentences`: the library, and whether it keeps newlines."""
        library, _, rest = str(self.sentences).partition(" ")
        return library + " with newlines" * rest.endswith("with newlines")

    def is_same(self, fingerprints: Iterable[str]) -> bool:
        return not self.fingerprints.isdisjoint(fingerprints)

    def __str__(self) -> str:
        name = self.entry.get("path") or self.entry.get("name") or "a tokenizer"
        return f"{name} ({min(self.fingerprints)[:12]})"


def read_tokenizer(prefix: str, storage: Storage | None = None) -> TokenizerRecord | None:
    """The tokenizer that wrote a pair; None if its sidecar is missing, damaged or does not say."""
    try:
        info = read_info(prefix, storage)
    except (OSError, DataError):
        return None
    if info is None or not isinstance(entry := info.provenance.get("tokenizer"), dict):
        return None
    others = entry.get("fingerprints")
    values = [entry.get("sha256"), *(others if isinstance(others, list) else [])]
    fingerprints = frozenset(value for value in values if isinstance(value, str))
    sentences = entry.get("sentences", "")  # of a pair that was made of others
    if name := info.provenance.get("sentences"):
        sentences = f"{name}{' with newlines' if info.provenance.get('keep_newlines') else ''}"
    return TokenizerRecord(prefix, entry, fingerprints, sentences) if fingerprints else None


def tokenizer_conflict(records: Iterable[TokenizerRecord | None]) -> str | None:
    """A sentence about the first two pairs of different tokenizers, or splitters."""
    known = [record for record in records if record is not None]
    for first, record in itertools.pairwise(known):
        if not record.is_same(first.fingerprints):
            return (
                f"{first.prefix} was tokenized with {first}, and {record.prefix} with {record}: "
                "the same ids mean different texts"
            )
    for first, record in itertools.pairwise(record for record in known if record.sentences):
        if record.splitter != first.splitter:
            return (
                f"the sentences of {first.prefix} were split by {first.sentences}, and those of "
                f"{record.prefix} by {record.sentences}: they end at different places"
            )
    return None


def check_tokenizers(records: Iterable[TokenizerRecord | None]) -> None:
    """Raises ConfigError for pairs of different tokenizers, or splitters."""
    if conflict := tokenizer_conflict(records):
        remedy = "Tokenize one of them again, or mix them as they are: any_tokenizer=True"
        raise ConfigError(f"{conflict}. {remedy} (--any-tokenizer)")


def common_tokenizer(records: Sequence[TokenizerRecord | None]) -> dict[str, Any] | None:
    """The entry of a pair made of others; None unless all name one tokenizer."""
    known = [record for record in records if record is not None]
    if not known or None in records or not all(r.is_same(known[0].fingerprints) for r in known):
        return None
    entry = {name: value for name, value in known[0].entry.items() if name != "sentences"}
    for names in ({r.sentences for r in known}, {r.splitter for r in known}):
        if len(names) == 1 and "" not in names:
            return {**entry, "sentences": names.pop()}
    return entry
