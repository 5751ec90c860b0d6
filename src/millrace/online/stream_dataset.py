"""Samples of rows that can only be read in turn: a shuffle buffer, a packer, and a small state."""

import itertools
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.checks import MAX_INT32, check_choice, check_int, plain_json, shown
from millrace.encoding.row_encoders import RowEncoder, check_encoder, encode_rows
from millrace.errors import ConfigError, ResumeError, TextError
from millrace.feed.stream_data import StreamDataset as TokenStreamDataset
from millrace.forks import Renewed
from millrace.online.numbered_rows import BLOCK
from millrace.online.row_documents import epoch_order
from millrace.ragged import starts_of
from millrace.samples.fields import SampleOptions, choose_options
from millrace.samples.tokens import EMPTY, TokenBatch

_PACKINGS = ("documents", "joined", "packs")
_NO_STATE = (
    "an iterator has no state: give a function from a row number to the rows from there on, or an "
    "object with state_dict and load_state_dict"
)
_LACKS_BUFFER = (
    "the state of a Hugging Face dataset lacks the rows in the buffer of its `shuffle`, which "
    "would be lost: give shuffle_buffer here instead"
)

_Entry = tuple[int, Any, dict[str, Any]]
"""The number of a row, the row, and the state behind it."""


class Piece(NamedTuple):
    """Some tokens of a row, from `offset` on, and which of them are trained on."""

    tokens: NDArray[Any]
    trained: NDArray[np.bool_]
    row: int  # its number
    offset: int

    @property
    def size(self) -> int:
        return len(self.tokens)

    def cut(self, start: int, stop: int) -> "Piece":
        """The tokens from `start` up to `stop` of the piece."""
        if start == 0 and stop >= len(self.tokens):
            return self  # as for most
        tokens, trained = self.tokens[start:stop], self.trained[start:stop]
        return Piece(tokens, trained, self.row, self.offset + start)


def token_batch(samples: Sequence[Sequence[Piece]]) -> TokenBatch:
    """Samples of pieces that are not empty."""
    pieces = [piece for sample in samples for piece in sample]
    bounds = starts_of(piece.size for piece in pieces)
    return EMPTY.with_arrays(
        tokens=np.concatenate([piece.tokens for piece in pieces] or [np.empty(0, np.int64)]),
        ends=bounds[starts_of(map(len, samples))[1:]],
        trained=np.concatenate([piece.trained for piece in pieces] or [np.empty(0, np.bool_)]),
        part_starts=bounds[:-1],
        part_sequence=np.array([piece.row for piece in pieces], np.int64),
        part_offset=np.array([piece.offset for piece in pieces], np.int64),
    )


def _has_buffer(source: Any) -> bool:
    """Whether a dataset of Hugging Face, or one that it is made of, has a shuffle buffer."""
    pending = [getattr(source, "_ex_iterable", None)]
    for one in pending:
        if type(one).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = [getattr(one, "ex_iterable", None), *(getattr(one, "ex_iterables", None) or ())]
        pending += [each for each in inner if each is not None]
    return False


class RowStream(Renewed):
    """A `TokenStream` of rows: see `StreamDataset`."""

    _renewed = ("report", "_lock", "_reading", "_after")

    def __init__(self, source: Any, encoder: RowEncoder, samples: SampleOptions, options: Any):
        is_wrong = isinstance(source, str | bytes | os.PathLike | Mapping)
        if is_wrong or not (callable(source) or isinstance(source, Iterable)):
            raise ConfigError(
                f"source is a {type(source).__name__}; give an iterable of rows, or a function "
                "from a row number to the rows from there on"
            )
        self._source, self._encoder = source, check_encoder("encoder", encoder)
        self._capacity = samples.sequence_length + samples.add_extra_token
        self._extra = int(samples.add_extra_token)
        check_choice("packing", options["packing"], _PACKINGS)
        for name, least in (("rows_per_sample", 1), ("seed", 0), ("shuffle_buffer", 0)):
            limit = None if name == "seed" else MAX_INT32
            options[name] = check_int(name, options[name], least, limit)
        self._options = options
        is_spent = isinstance(source, Iterator) and not self._has_state
        self._obstacle = _NO_STATE if is_spent else _LACKS_BUFFER if _has_buffer(source) else ""
        # None: what `iter` gives first, though rows may have been looked at.
        self._first: dict[str, Any] = {"window": 0, "source": None if self._has_state else 0}
        self._origin: list[Any] = []  # the state there, once the source has begun
        kind = "own" if options["packing"] == "documents" else "all"
        self._first |= {"row": 0, "token": 0, "tokenised": kind}
        self.renew()

    def after_fork(self) -> None:
        self.report = Counter[str]()
        self._lock = threading.Lock()  # a loader may begin while an earlier one still reads
        self._reading: Iterator[Any] = iter(())  # of entries, or of samples
        self._after: Any = None  # the state behind what was read

    def read(self, state: Any, count: int, own: Any = None) -> tuple[TokenBatch, Any]:
        """See `TokenStream.read`; with documents, samples at other places than `own` are empty."""
        state, is_packed = state or self._first, self._options["packing"] != "documents"
        for name in ("window", "row", "token"):
            check_int(f"{name}, of the stream's state,", state[name], 0)
        size = 1 if is_packed else self._options["rows_per_sample"]
        with self._lock:
            if state != self._after:
                self._reading = self._packed(state) if is_packed else self._entries(state)
            self._after = None  # after an error, the place is read again
            entries: list[Any] = list(itertools.islice(self._reading, count * size))
            self._after = after = entries[-1][-1] if entries else state
        samples = [one for one, _ in entries] if is_packed else self._samples_of(entries, size, own)
        return token_batch(samples), after

    def _entries(self, state: Any) -> Iterator[_Entry]:
        """The rows from a state on, in the shuffled order."""
        buffer, source, skipped = self._options["shuffle_buffer"], state["source"], state["row"]
        size, rows = buffer if buffer > 1 else BLOCK, self._rows_from(source)
        for window in itertools.count(state["window"]):
            read = list(itertools.islice(rows, size))
            had = state.get("size", 0) if window == state["window"] else 0
            if skipped > len(read) or (buffer > 1 and had not in (0, len(read))):
                raise ResumeError(
                    f"window {window} of the source had {had} rows when the state was saved, and "
                    f"has {len(read)} now, so other rows would follow: give the source as it was"
                )
            order = np.arange(len(read))
            if buffer > 1:
                order = epoch_order(len(read), self._options["seed"], window).sources(order)
            before = {**state, "window": window, "source": source, "token": 0}
            before["size"] = len(read)
            for place, entry in enumerate(order.tolist()[skipped:], skipped + 1):
                number, row = window * size + entry, read[entry]
                if not isinstance(row, Mapping):
                    what = f"row {number} of the stream is {shown(row, 60)}"
                    raise TextError(f"{what}; a dictionary is needed")
                yield number, row, {**before, "row": place}
            if not read:
                return
            source = self._source_state() if self._has_state else source + len(read)
            skipped = 0

    @property
    def _has_state(self) -> bool:
        return hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")

    def _source_state(self) -> Any:
        """A copy of the source's state: the source may go on in the dict that it gives."""
        return plain_json(self._source.state_dict(), "the state of the source")

    def _rows_from(self, state: Any) -> Iterator[Any]:
        source = self._source
        is_first = state == self._first["source"] and (self._has_state or not self._origin)
        if self._obstacle and not is_first:
            raise ResumeError(f"the source cannot begin again there: {self._obstacle}")
        if self._has_state:
            is_hugging_face = hasattr(source, "_ex_iterable")
            if not self._origin:
                rows: Iterator[Any] = iter(source)
                # Hugging Face's has a state only behind the first row; it takes None for the start.
                self._origin = [None if is_hugging_face else self._source_state()]
                if state is None:
                    return rows
            if is_hugging_face and state:
                source.set_epoch(state["epoch"])  # else it forgets the state of another epoch
            source.load_state_dict(plain_json(self._origin[0] if state is None else state))
            return iter(source)
        self._origin = [0]
        state = check_int("source, of the stream's state,", state, 0)
        following = source(state) if callable(source) else itertools.islice(source, state, None)
        if not isinstance(following, Iterable):
            what = f"source({state}) returned {shown(following)}"
            raise ConfigError(f"{what}; give an iterable of the rows from there on")
        return iter(following)

    def _encoded(self, entries: Sequence[_Entry]) -> Iterator[list[Piece]]:
        """The documents of each row that are not empty; TextError when a bad one is reached."""
        encoded = encode_rows(self._encoder, [row for _, row, _ in entries])
        counts = {"rows": len(entries), "tokens": len(encoded.tokens), **encoded.report}
        self.report.update(counts)
        tokens, trained, ends = encoded.tokens, encoded.trained, iter(encoded.ends.tolist())
        trained, stop = np.ones(len(tokens), np.bool_) if trained is None else trained, 0
        for place, count in enumerate(encoded.counts.tolist()):
            (number, *_), first, pieces = entries[place], stop, []
            if place in encoded.problems:
                raise TextError(f"row {number} of the stream: {encoded.problems[place]}")
            for end in itertools.islice(ends, count):
                pieces.append(Piece(tokens[stop:end], trained[stop:end], number, stop - first))
                stop = end
            yield [piece for piece in pieces if piece.size > 0]

    def _samples_of(self, entries: list[_Entry], size: int, own: Any) -> list[list[Piece]]:
        """Samples of `size` rows each; those at other places than `own` (None: all) are empty."""
        groups = [entries[start : start + size] for start in range(0, len(entries), size)]
        samples: list[list[Piece]] = [[] for _ in groups]
        places = [n for n in range(len(groups)) if own is None or n in own]
        homes = [place for place in places for _ in groups[place]]
        documents = self._encoded([entry for place in places for entry in groups[place]])
        for home, pieces in zip(homes, documents, strict=True):
            for piece in pieces:
                room = self._capacity - sum(one.size for one in samples[home])
                self.report["cut documents"] += piece.size > room
                self.report["tokens behind the cut"] += max(piece.size - room, 0)
                samples[home] += [piece.cut(0, room)] if room > 0 else []
        return samples

    def _documents(self, state: Any) -> Iterator[tuple[Piece, dict[str, Any]]]:
        """The documents from a state on, each with the state before its row."""
        entries, token = self._entries(state), state["token"]
        while some := list(itertools.islice(entries, BLOCK)):
            for (_, _, after), pieces in zip(some, self._encoded(some), strict=True):
                before = {**after, "row": after["row"] - 1}
                for piece in pieces:
                    if (start := max(token - piece.offset, 0)) < piece.size:
                        yield piece.cut(start, piece.size), before
                token = 0

    def _packed(self, state: Any) -> Iterator[tuple[list[Piece], dict[str, Any]]]:
        """Samples of documents one after the other, or of whole ones, with the states behind."""
        is_joined, capacity = self._options["packing"] == "joined", self._capacity
        extra = self._extra if is_joined else 0  # tokens that the next sample has, too
        pieces: list[Piece] = []
        room, end = capacity, state
        for document, before in self._documents(state):
            place, size = 0, document.size
            while place < size:
                piece = document.cut(place, place + (room if is_joined else capacity))
                if piece.size > room:  # never where documents are joined
                    yield pieces, {**before, "token": piece.offset}
                    pieces, room = [], capacity
                pieces.append(piece)
                room, place = room - piece.size, place + piece.size
                if room == 0:
                    place -= extra
                    yield pieces, {**before, "token": document.offset + place}
                    pieces, room = [], capacity
            end = {**before, "token": document.offset + size}
        if capacity - room > extra:
            yield pieces, end

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the samples, but for the rows; ConfigError if they cannot be read again."""
        if consumed_samples and self._obstacle:
            raise ConfigError(f"this run could not resume: {self._obstacle}")
        sizes = [self._capacity, self._extra]
        entries = {"kind": "row stream", "sizes": sizes, "encoder": self._encoder.fingerprint()}
        return {**entries, **self._options}


class StreamDataset(TokenStreamDataset):
    """Samples of rows that can only be read in turn, for a `Loader`.

    The source is read in windows of `shuffle_buffer` rows, each of which is shuffled. The loader's
    state says where a window began in the source, and what of it was handed out: after a resume it
    is read again, and no row is lost or repeated. Every rank reads all rows. With "documents" it
    tokenises its own; the others need the lengths of all, so every rank tokenises all.

    Args:
        source: A function from a row number to an iterable of the rows from there on; an object
            with `state_dict` and `load_state_dict`, such as a Hugging Face streaming dataset; or
            another iterable, of which the first rows are read again after a resume. Rows are
            dictionaries. An iterator cannot resume, nor a Hugging Face dataset with a shuffle of
            its own: a loader's `state_dict` says so.
        encoder: What makes documents of rows: `TextRows`, or another `RowEncoder`.
        packing: "documents": `rows_per_sample` rows a sample, cut or padded; "joined": documents
            one after the other, cut into samples; "packs": whole documents, until the next one
            does not fit; one that is longer than a sample goes on in the next.
        rows_per_sample: Number of rows of a sample, with "documents".
        shuffle_buffer: Number of rows that are shuffled at a time; 0: none.
        seed: Seed of the shuffles.
        fingerprint: Plain values that tell these rows from others, for the loader's state.
        sample_options: What a sample looks like: the fields of `SampleOptions`.

    Raises:
        ConfigError: An argument of a wrong type, or outside its limits.

    Example:
        >>> from millrace import Loader
        >>> from millrace.encoding import Tokenizer
        >>> from millrace.encoding.row_encoders import TextRows
        >>> rows, encoder = [{"text": "aaa"}, {"text": "bbb"}], TextRows(Tokenizer("bytes"))
        >>> dataset = StreamDataset(rows, encoder, packing="joined", sequence_length=7)
        >>> loader = Loader(dataset, micro_batch_size=1)
        >>> bytes(next(loader)["tokens"][0].astype(np.uint8))
        b'aaa\\x00bbb'
        >>> loader.state_dict()["stream"]["state"]
        {'window': 0, 'source': 0, 'row': 1, 'token': 3, 'tokenised': 'all', 'size': 2}
    """

    stream: RowStream

    def __init__(
        self,
        source: Any,
        encoder: RowEncoder,
        *,
        packing: str = "documents",
        rows_per_sample: int = 1,
        shuffle_buffer: int = 0,
        seed: int = 0,
        fingerprint: Mapping[str, Any] | None = None,
        **sample_options: Any,
    ) -> None:
        options = choose_options(None, sample_options, self)
        if not isinstance(fingerprint, Mapping | None):
            raise ConfigError(f"fingerprint is {shown(fingerprint)}; give a dict of plain values")
        packer = {"packing": packing, "rows_per_sample": rows_per_sample}
        packer |= {"shuffle_buffer": shuffle_buffer, "seed": seed, "rows": dict(fingerprint or {})}
        super().__init__(RowStream(source, encoder, options, packer), options)

    def _read(self, state: Any, count: int, own: Any) -> tuple[TokenBatch, Any]:
        return self.stream.read(state, count, own)

    @property
    def report(self) -> Counter[str]:
        """Counts of the rows that this process has encoded, some of them ahead of their use, and of
        what was cut of them."""
        return Counter(self.stream.report)
