"""Samples of rows that can only be read in turn: a shuffle buffer, a packer, and a small state."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.checks import MAX_INT32, check_choice, check_int, shown
from millrace.encoding.row_encoders import RowEncoder, check_encoder, encode_rows
from millrace.errors import ConfigError, ResumeError, TextError
from millrace.feed.stream_data import StreamDataset as TokenStreamDataset
from millrace.forks import Renewed
from millrace.online.text_dataset import epoch_order
from millrace.samples.fields import SampleOptions
from millrace.samples.tokens import TokenBatch

_PACKINGS = ("documents", "joined", "packs")
_WINDOW = 64  # rows that are read, and encoded, at a time
_REMEDY = (
    "give a function from a row number to the rows from there on, or an object with state_dict and "
    "load_state_dict"
)


class _Source:
    """A source of rows that can be read from its own states."""

    def __init__(self, source: Any) -> None:
        if not (callable(source) or isinstance(source, Iterable)):
            raise ConfigError(
                f"source is a {type(source).__name__}; give an iterable of rows, or a function "
                "from a row number to the rows from there on"
            )
        self._source, self._has_begun = source, False
        self._has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self.first = source.state_dict() if self._has_state else 0
        self.can_resume = not isinstance(source, Iterator) or self._has_state

    def windows(self, state: Any, size: int) -> Iterator[tuple[Any, list[Any]]]:
        """So many rows at a time with the state before them; at the end, none again and again."""
        if not self.can_resume and (self._has_begun or state != 0):
            raise ResumeError(f"an iterator cannot begin again: {_REMEDY}")
        self._has_begun = True
        source = self._source
        if self._has_state:
            source.load_state_dict(state)
            rows = iter(source)
        elif callable(source):
            rows = iter(source(state))
        else:
            rows = itertools.islice(source, state, None)
        while True:
            window = list(itertools.islice(rows, size))
            after = source.state_dict() if self._has_state else state + len(window)
            yield state, window
            state = after


class _Part(NamedTuple):
    """Tokens of a row's documents, or of a piece of one."""

    tokens: NDArray[Any]
    trained: NDArray[np.bool_]
    row: int
    offset: int = 0

    def cut(self, start: int, stop: int) -> "_Part":
        return _Part(self.tokens[start:stop], self.trained[start:stop], self.row, start)


class _Row(NamedTuple):
    """A row's documents and their ends, or why it is bad."""

    whole: _Part
    ends: list[int]
    problem: str | None

    def checked(self) -> "_Row":
        if self.problem is not None:
            raise TextError(f"row {self.whole.row} of the stream: {self.problem}")
        return self


def _encode(encoder: RowEncoder, entries: Sequence[tuple[int, Any]]) -> list[_Row]:
    """The documents of rows, which stand beside their numbers."""
    tokens, ends, trained, counts, problems, _ = encode_rows(encoder, [row for _, row in entries])
    trained = np.ones(len(tokens), np.bool_) if trained is None else trained
    rows, first, documents = [], 0, iter(ends.tolist())
    for place, ((number, _), count) in enumerate(zip(entries, counts.tolist(), strict=True)):
        own = list(itertools.islice(documents, count))
        stop = own[-1] if own else first
        whole = _Part(tokens[first:stop], trained[first:stop], number)
        rows.append(_Row(whole, [end - first for end in own], problems.get(place)))
        first = stop
    return rows


class _Cursor:
    """A place in a stream of rows: a window of shuffled rows, a row in it, a token of the row."""

    def __init__(self, stream: "RowStream", state: Any) -> None:
        start = state or {"window": 0, "source": stream.source.first, "row": 0, "token": 0}
        self._stream, self._window = stream, start["window"] - 1
        self._windows = stream.source.windows(start["source"], stream.window_size)
        self._before = start["source"]
        self._entries: list[tuple[int, Any]] = []
        self._read_window()
        self._window, self.row, self.token = start["window"], start["row"], start["token"]

    def state(self) -> dict[str, Any]:
        entries = {"window": self._window, "source": self._before}
        return {**entries, "row": self.row, "token": self.token}

    def _read_window(self) -> bool:
        """Goes to the next window; at the end of the source the place stays."""
        stream = self._stream
        before, rows = next(self._windows)
        if not rows:
            return False
        first = (self._window + 1) * stream.window_size
        for number, row in enumerate(rows, first):
            if not isinstance(row, Mapping):
                what = f"row {number} of the stream is {shown(row, 60)}"
                raise TextError(f"{what}; a dictionary is needed")
        self._window, self.row, self.token, self._before = self._window + 1, 0, 0, before
        places = np.arange(len(rows))
        if stream.is_shuffled:
            places = epoch_order(len(rows), stream.seed, self._window).sources(places)
        self._entries = [(first + place, rows[place]) for place in places.tolist()]
        self._encoded: dict[int, _Row] = {}
        return True

    def next_row(self) -> Any:
        """The next row and its number, which is not encoded; None at the end."""
        if self.row >= len(self._entries) and not self._read_window():
            return None
        self.row += 1
        return self._entries[self.row - 1]

    def current(self) -> _Row | None:
        """The row that the next token is of; None at the end."""
        while self.row < len(self._entries) or self._read_window():
            if self.row not in self._encoded:
                some = self._entries[self.row : self.row + _WINDOW]
                self._encoded = dict(enumerate(_encode(self._stream.encoder, some), self.row))
            row = self._encoded[self.row].checked()
            if self.token < len(row.whole.tokens):
                return row
            self.row, self.token = self.row + 1, 0
        return None


class RowStream(Renewed):
    """A `TokenStream` of rows: see `StreamDataset`."""

    _renewed = ("_cursor", "_after")

    def __init__(self, source: Any, encoder: RowEncoder, samples: SampleOptions, options: Any):
        self.source, self.encoder = _Source(source), check_encoder("encoder", encoder)
        self._capacity = samples.sequence_length + samples.add_extra_token
        self._extra = int(samples.add_extra_token)
        self._packing = check_choice("packing", options["packing"], _PACKINGS)
        self._num_rows = check_int("rows_per_sample", options["rows_per_sample"], 1, MAX_INT32)
        self.seed = check_int("seed", options["seed"], 0)
        size = check_int("shuffle_buffer", options["shuffle_buffer"], 0, MAX_INT32)
        self.is_shuffled, self.window_size = size > 1, size if size > 1 else _WINDOW
        self._options = options
        self.renew()

    def after_fork(self) -> None:
        self._cursor: _Cursor | None = None
        self._after: Any = None  # the state that the cursor stands at

    def read(self, state: Any, count: int, own: Any = None) -> tuple[TokenBatch, Any]:
        """See `TokenStream.read`; with documents, samples at other places than `own` are empty."""
        if self._cursor is None or state != self._after:
            self._cursor = _Cursor(self, state)
        cursor, self._cursor = self._cursor, None  # after an error, the place is read again
        if self._packing == "documents":
            samples = self._documents(cursor, count, own)
        else:
            samples = list(itertools.takewhile(bool, (self._next(cursor) for _ in range(count))))
        kind = "own" if self._packing == "documents" else "all"
        self._cursor, self._after = cursor, {**cursor.state(), "tokenised": kind}
        return _batch_of(samples, self.encoder.dtype), self._after

    def _documents(self, cursor: _Cursor, count: int, own: Any) -> list[list[_Part]]:
        """Samples of a fixed number of rows each."""
        size, rows = self._num_rows, iter(cursor.next_row, None)
        entries = list(itertools.islice(rows, count * size))
        samples: list[list[_Part]] = [[] for _ in range(0, len(entries), size)]
        places = range(len(samples)) if own is None else [int(n) for n in own if n < len(samples)]
        needed = [entry for place in places for entry in entries[place * size :][:size]]
        rooms = [self._capacity] * len(samples)
        homes = [place for place in places for _ in entries[place * size :][:size]]
        for home, row in zip(homes, _encode(self.encoder, needed), strict=True):
            for start, stop in itertools.pairwise([0, *row.checked().ends]):
                part = row.whole.cut(start, min(stop, start + rooms[home]))
                if len(part.tokens):
                    samples[home].append(part)
                    rooms[home] -= len(part.tokens)
        return samples

    def _next(self, cursor: _Cursor) -> list[_Part]:
        """The next tokens of documents one after the other; packed, whole pieces of documents."""
        parts, room, is_joined = [], self._capacity, self._packing == "joined"
        while room > 0 and (row := cursor.current()) is not None:
            end = next(end for end in row.ends if end > cursor.token)
            stop = min(end, cursor.token + (room if is_joined else self._capacity))
            if stop - cursor.token > room:
                break
            parts.append(row.whole.cut(cursor.token, stop))
            cursor.token, room = stop, room - len(parts[-1].tokens)
        if not is_joined:
            return parts
        if room == 0:
            cursor.token -= self._extra  # which is the next sample's first one, too
        return parts if self._capacity - room > self._extra else []

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the samples, but for the rows; ConfigError if they cannot be read again."""
        if consumed_samples and not self.source.can_resume:
            raise ConfigError(f"an iterator has no state, so this run cannot resume: {_REMEDY}")
        sizes = [self._capacity, self._extra]
        entries = {"kind": "row stream", "sizes": sizes, "encoder": self.encoder.fingerprint()}
        return {**entries, **self._options}


def _batch_of(samples: list[list[_Part]], dtype: np.dtype[Any]) -> TokenBatch:
    parts = [part for sample in samples for part in sample]
    sizes = [len(part.tokens) for part in parts]
    trained = np.concatenate([np.empty(0, np.bool_), *(part.trained for part in parts)])
    return TokenBatch(
        np.concatenate([np.empty(0, dtype), *(part.tokens for part in parts)]),
        np.cumsum([sum(len(part.tokens) for part in sample) for sample in samples]),
        None if trained.all() else trained,
        part_starts=np.cumsum([0, *sizes])[:-1],
        part_sequence=np.array([part.row for part in parts], np.int64),
        part_offset=np.array([part.offset for part in parts], np.int64),
    )


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
            dictionaries. An iterator cannot resume: a loader's `state_dict` says so.
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
        {'window': 0, 'source': 0, 'row': 1, 'token': 3, 'tokenised': 'all'}
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
        options = SampleOptions(**sample_options)
        plain: dict[str, Any] = {
            "rows": dict(fingerprint or {}),
            "packing": packing,
            "rows_per_sample": rows_per_sample,
        }
        plain |= {"shuffle_buffer": shuffle_buffer, "seed": seed}
        super().__init__(RowStream(source, encoder, options, plain), options)

    def _read(self, state: Any, count: int, own: Any) -> tuple[TokenBatch, Any]:
        return self.stream.read(state, count, own)
