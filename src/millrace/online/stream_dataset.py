"""Samples of rows that can only be read in turn: a shuffle buffer, a packer, and a small state."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import MAX_INT32, check_choice, check_int, shown
from millrace.encoding.row_encoders import RowEncoder, check_encoder, encode_rows
from millrace.errors import ConfigError, ResumeError, TextError
from millrace.feed.stream_data import StreamDataset as TokenStreamDataset
from millrace.forks import Renewed
from millrace.online.text_dataset import epoch_key
from millrace.order.packed import LONG_DOCUMENTS
from millrace.samples.fields import SampleOptions
from millrace.samples.tokens import TokenBatch

PACKINGS = ("documents", "joined", "packs")
_WINDOW = 64  # rows that are read, and encoded, at a time


class _Encoded(NamedTuple):
    """A row's documents."""

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    trained: NDArray[np.bool_] | None
    problem: str | None


class _Part(NamedTuple):
    """Tokens of one document in a sample."""

    tokens: NDArray[Any]
    trained: NDArray[np.bool_] | None
    row: int
    offset: int


class _Source:
    """A source of rows that can be read from its own states."""

    def __init__(self, source: Any) -> None:
        self._source, self._has_begun = source, False
        self._has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self._first = source.state_dict() if self._has_state else 0
        if not (callable(source) or isinstance(source, Iterable)):
            raise ConfigError(
                f"source is a {type(source).__name__}; give an iterable of rows, or a function "
                "from a row number to the rows from there on"
            )
        self._takes_number = not self._has_state and callable(source) and _needs_argument(source)
        self.can_resume = not isinstance(source, Iterator) or self._has_state

    def open(self, state: Any) -> Callable[[int], tuple[Any, list[Any]]]:
        """A function that reads a number of rows, and returns the state before them, too."""
        state = self._first if state is None else state
        if not self.can_resume and (self._has_begun or state != 0):
            raise ResumeError(f"an iterator cannot begin again: {_REMEDY}")
        self._has_begun = True
        source, place = self._source, state
        if self._has_state:
            source.load_state_dict(state)
            rows = iter(source)
        elif self._takes_number:
            rows = iter(source(state))
        else:
            rows = itertools.islice(source() if callable(source) else source, state, None)

        def take(count: int) -> tuple[Any, list[Any]]:
            nonlocal place
            before, taken = place, list(itertools.islice(rows, count))
            place = source.state_dict() if self._has_state else before + len(taken)
            return before, taken

        return take


def _needs_argument(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(one.default is one.empty and one.kind < one.VAR_POSITIONAL for one in parameters)


_REMEDY = (
    "give a function from a row number to the rows from there on, or an object with state_dict and "
    "load_state_dict"
)


class _Cursor:
    """A place in a stream of rows: a window of shuffled rows, a row in it, a token of the row."""

    def __init__(self, stream: "RowStream", state: Any) -> None:
        self._stream = stream
        start = state or {"window": 0, "source": None, "row": 0, "token": 0}
        self._take = stream.source.open(start["source"])
        self.window, self.row, self.token = start["window"] - 1, 0, 0
        self._rows: list[Any] = []
        self._numbers: list[int] = []
        self._source_state: Any = start["source"]
        self._encoded: dict[int, _Encoded] = {}
        self._read_window()
        self.row, self.token = start["row"], start["token"]

    def state(self) -> dict[str, Any]:
        entries = {"window": self.window, "source": self._source_state}
        return {**entries, "row": self.row, "token": self.token}

    def _read_window(self) -> bool:
        """Goes to the next window; at the end of the source the place stays."""
        stream = self._stream
        source_state, rows = self._take(stream.window_size)
        if not rows and self.window >= 0:
            return False
        for place, row in enumerate(rows):
            if not isinstance(row, Mapping):
                number = (self.window + 1) * stream.window_size + place
                what = f"row {number} of the stream is {shown(row, 60)}"
                raise TextError(f"{what}; a dictionary is needed")
        self.window, self.row, self.token = self.window + 1, 0, 0
        self._source_state, self._encoded = source_state, {}
        places = np.arange(len(rows))
        if stream.is_shuffled:
            key = epoch_key(stream.seed, self.window)
            places = _native.swap_or_not(places, len(rows), key, True)
        self._rows = [rows[place] for place in places.tolist()]
        self._numbers = (self.window * stream.window_size + places).tolist()
        return len(rows) > 0

    def next_row(self) -> tuple[int, Any] | None:
        """The next row and its number, which is not encoded; None at the end."""
        if self.row == len(self._rows) and not self._read_window():
            return None
        self.row += 1
        return self._numbers[self.row - 1], self._rows[self.row - 1]

    def current(self) -> _Encoded | None:
        """The row that the next token is of; None at the end."""
        while True:
            if self.row == len(self._rows):
                if not self._read_window():
                    return None
                continue
            if self.row not in self._encoded:
                some = self._rows[self.row : self.row + _WINDOW]
                self._encoded = dict(enumerate(_split(self._stream.encoder, some), self.row))
            encoded = self._encoded[self.row]
            if encoded.problem is not None:
                raise TextError(f"row {self.number} of the stream: {encoded.problem}")
            if self.token < len(encoded.tokens):
                return encoded
            self.row, self.token = self.row + 1, 0

    @property
    def number(self) -> int:
        return self._numbers[self.row]

    def take(self, row: _Encoded, stop: int) -> _Part:
        """The tokens from the place on."""
        start, self.token = self.token, stop
        trained = None if row.trained is None else row.trained[start:stop]
        return _Part(row.tokens[start:stop], trained, self.number, start)


def _split(encoder: RowEncoder, rows: Sequence[Any]) -> list[_Encoded]:
    """The documents of each row."""
    tokens, ends, trained, counts, problems = encode_rows(encoder, rows)
    bounds = np.append(0, np.cumsum(counts))
    edges = np.append(0, ends)[bounds].tolist()
    return [
        _Encoded(
            tokens[edges[place] : edges[place + 1]],
            ends[bounds[place] : bounds[place + 1]] - edges[place],
            None if trained is None else trained[edges[place] : edges[place + 1]],
            problems.get(place),
        )
        for place in range(len(rows))
    ]


class RowStream(Renewed):
    """A `TokenStream` of rows: see `StreamDataset`.

    Attributes:
        source, encoder: The source, and the encoder of its rows.
        window_size: Number of rows that are read, and shuffled, at a time.
        is_shuffled, seed: Whether they are shuffled, and by which seed.
    """

    _renewed = ("_cursor", "_after")

    def __init__(self, source: Any, encoder: RowEncoder, sizes: tuple[int, int], **options: Any):
        self.source, self.encoder = _Source(source), check_encoder("encoder", encoder)
        self._capacity, self._step = sizes  # of a sample, and tokens from one to the next
        self._options = options
        check_choice("packing", options["packing"], PACKINGS)
        check_choice("long_documents", options["long_documents"], LONG_DOCUMENTS)
        self._num_rows = check_int("rows_per_sample", options["rows_per_sample"], 1, MAX_INT32)
        self.seed = check_int("seed", options["seed"], 0)
        size = check_int("shuffle_buffer", options["shuffle_buffer"], 0, MAX_INT32)
        self.is_shuffled, self.window_size = size > 1, size if size > 1 else _WINDOW
        self.renew()

    def after_fork(self) -> None:
        self._cursor: _Cursor | None = None
        self._after: Any = None  # the state that the cursor stands at

    def read(self, state: Any, count: int, own: Any = None) -> tuple[TokenBatch, Any]:
        """See `TokenStream.read`; with documents, samples at other places than `own` are empty."""
        if self._cursor is None or state != self._after:
            self._cursor = _Cursor(self, state)
        cursor, self._cursor = self._cursor, None  # after an error, the place is read again
        if self._options["packing"] == "documents":
            samples = self._documents(cursor, count, own)
        else:
            next_sample = self._joined if self._options["packing"] == "joined" else self._packed
            samples = list(itertools.takewhile(bool, (next_sample(cursor) for _ in range(count))))
        self._cursor, self._after = cursor, self._with_kind(cursor.state())
        return _batch_of(samples, self.encoder.dtype), self._after

    def _with_kind(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "tokenised": "own" if self._options["packing"] == "documents" else "all"}

    def _documents(self, cursor: _Cursor, count: int, own: Any) -> list[list[_Part]]:
        """Samples of a fixed number of rows each."""
        taken = [
            list(itertools.islice(iter(cursor.next_row, None), self._num_rows))
            for _ in range(count)
        ]
        taken = taken[: sum(map(bool, taken))]
        places = range(len(taken)) if own is None else [n for n in own if n < len(taken)]
        rows = [entry for place in places for entry in taken[int(place)]]
        encoded = dict(
            zip((n for n, _ in rows), _split(self.encoder, [r for _, r in rows]), strict=True)
        )
        samples: list[list[_Part]] = [[] for _ in taken]
        for place in places:
            room = self._capacity
            for number, _ in taken[int(place)]:
                tokens, ends, trained, problem = encoded[number]
                if problem is not None:
                    raise TextError(f"row {number} of the stream: {problem}")
                for start, stop in itertools.pairwise([0, *ends.tolist()]):
                    stop = min(stop, start + room)
                    if stop > start:
                        mask = None if trained is None else trained[start:stop]
                        samples[int(place)].append(_Part(tokens[start:stop], mask, number, start))
                        room -= stop - start
        return samples

    def _joined(self, cursor: _Cursor) -> list[_Part]:
        """The next tokens of documents one after the other, the extra one again."""
        parts, room = [], self._capacity
        while room > 0 and (row := cursor.current()) is not None:
            end = row.ends[np.searchsorted(row.ends, cursor.token, side="right")]
            parts.append(cursor.take(row, min(int(end), cursor.token + room)))
            room -= len(parts[-1].tokens)
        extra = self._capacity - self._step
        if room == 0:
            cursor.token -= extra
        return parts if self._capacity - room > extra else []

    def _packed(self, cursor: _Cursor) -> list[_Part]:
        """Whole documents, as long as the next one fits."""
        parts, room = [], self._capacity
        while room > 0 and (row := cursor.current()) is not None:
            end = int(row.ends[np.searchsorted(row.ends, cursor.token, side="right")])
            size = end - cursor.token
            if size <= room:
                parts.append(cursor.take(row, end))
                room -= size
                continue
            if size <= self._capacity or (parts and self._options["long_documents"] != "drop"):
                break
            parts += self._long_document(cursor, row, end)
            if parts and self._options["long_documents"] != "drop":
                break
        return parts

    def _long_document(self, cursor: _Cursor, row: _Encoded, end: int) -> list[_Part]:
        """What becomes of a document that is longer than a sample."""
        rule = self._options["long_documents"]
        if rule == "error":
            raise TextError(
                f"row {cursor.number} of the stream has a document of {end - cursor.token} tokens; "
                f'samples have {self._capacity}. Choose long_documents "cut", "split" or "drop"'
            )
        part = cursor.take(row, cursor.token + self._capacity)
        if rule != "split":
            cursor.token = end
        return [] if rule == "drop" else [part]

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the samples, but for the rows; ConfigError if they cannot be read again."""
        if consumed_samples and not self.source.can_resume:
            raise ConfigError(f"an iterator has no state, so this run cannot resume: {_REMEDY}")
        sizes = [self._capacity, self._step]
        entries = {"kind": "row stream", "sizes": sizes, "encoder": self.encoder.fingerprint()}
        return {**entries, **self._options}


def _batch_of(samples: list[list[_Part]], dtype: np.dtype[Any]) -> TokenBatch:
    parts = [part for sample in samples for part in sample]
    sizes = [len(part.tokens) for part in parts]
    masks = [part.trained for part in parts]
    trained = None
    if any(mask is not None for mask in masks):
        pairs = zip(masks, sizes, strict=True)
        trained = np.concatenate([np.ones(n, np.bool_) if m is None else m for m, n in pairs])
    return TokenBatch(
        np.concatenate([np.empty(0, dtype), *(part.tokens for part in parts)]),
        np.cumsum([sum(len(part.tokens) for part in sample) for sample in samples]),
        trained,
        part_starts=np.cumsum([0, *sizes])[:-1],
        part_sequence=np.array([part.row for part in parts], np.int64),
        part_offset=np.array([part.offset for part in parts], np.int64),
    )


class StreamDataset(TokenStreamDataset):
    """Samples of rows that can only be read in turn, for a `Loader`.

    The source is read in windows of `shuffle_buffer` rows, each of which is shuffled. The state of
    the loader says where a window began in the source, and how many of its rows, and tokens of the
    next one, were handed out: the window is read again after a resume, and no row is lost or
    repeated. Every rank reads all rows. With "documents" it tokenises its own; the others need the
    lengths of all, so every rank tokenises all.

    Args:
        source: A function from a row number to an iterable of the rows from there on; an object
            with `state_dict` and `load_state_dict`, such as a Hugging Face streaming dataset; or
            another iterable, of which the first rows are read again after a resume. Rows are
            dictionaries. An iterator cannot resume: a loader's `state_dict` says so.
        encoder: What makes documents of rows: `TextRows`, or another `RowEncoder`.
        packing: "documents": `rows_per_sample` rows a sample, cut or padded; "joined": documents
            one after the other, cut into samples; "packs": whole documents, until the next one
            does not fit.
        rows_per_sample: Number of rows of a sample, with "documents".
        shuffle_buffer: Number of rows that are shuffled at a time; 0: none.
        seed: Seed of the shuffles.
        long_documents: What becomes of documents that are longer than a sample, with "packs":
            "error", "cut", "split" or "drop", as with `PackPlan`.
        fingerprint: Plain values that tell these rows from others, for the loader's state.
        options: What a sample looks like.
        sample_options: The fields of `SampleOptions` in place of `options`.

    Raises:
        ConfigError: An argument of a wrong type, or outside its limits.

    Example:
        >>> from millrace import Loader
        >>> from millrace.encoding import Tokenizer
        >>> from millrace.encoding.row_encoders import TextRows
        >>> def rows(first):
        ...     return ({"text": "abcdef"[number] * 3} for number in range(first, 6))
        >>> encoder = TextRows(Tokenizer("bytes"))
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
        long_documents: str = "error",
        fingerprint: Mapping[str, Any] | None = None,
        options: SampleOptions | None = None,
        **sample_options: Any,
    ) -> None:
        if options is None or sample_options:
            options = SampleOptions(**sample_options)
        stream = RowStream(
            source,
            encoder,
            (options.sequence_length + options.add_extra_token, options.sequence_length),
            packing=packing,
            rows_per_sample=rows_per_sample,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
            long_documents=long_documents,
            rows=dict(fingerprint or {}),
        )
        super().__init__(stream, options)

    def _stream_read(self, state: Any, count: int, own: Any) -> tuple[TokenBatch, Any]:
        return self.stream.read(state, count, own)
