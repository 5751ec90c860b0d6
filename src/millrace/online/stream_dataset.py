"""Samples of rows that can only be read in turn: a shuffle buffer, a packer, and a small state."""

import itertools
import os
import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np

from millrace.checks import MAX_INT32, check_choice, check_int, plain_json, shown
from millrace.encoding.row_encoders import RowEncoder, check_encoder, encode_rows
from millrace.errors import ConfigError, ResumeError, TextError
from millrace.feed.stream_data import StreamDataset as TokenStreamDataset
from millrace.forks import Renewed
from millrace.online.numbered_rows import BLOCK
from millrace.online.row_documents import cut, documents_of, epoch_order, ranges_of
from millrace.ragged import starts_of
from millrace.samples.fields import SampleOptions, choose_options
from millrace.samples.tokens import EMPTY, Numbers, TokenBatch, concatenate

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


def _has_buffer(source: Any) -> bool:
    """Whether a dataset of Hugging Face, or one that it is made of, has a shuffle buffer."""
    pending = [getattr(source, "_ex_iterable", None)]
    for one in pending:
        if type(one).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = [getattr(one, "ex_iterable", None), *(getattr(one, "ex_iterables", None) or ())]
        pending += [each for each in inner if each is not None]
    return False


class _Place(Renewed):
    """What the streams of one source share: the source has a single place, which each moves."""

    _renewed = ("lock", "reader")

    def __init__(self) -> None:
        self.origin: list[Any] = []  # the state where the source begins, once it has begun
        self.renew()

    def after_fork(self) -> None:
        self.lock = threading.Lock()  # a loader may begin while an earlier one still reads
        self.reader = 0  # id of the stream that has moved the place last


_places: weakref.WeakKeyDictionary[Any, _Place] = weakref.WeakKeyDictionary()


class RowStream(Renewed):
    """A `TokenStream` of rows: see `StreamDataset`."""

    _renewed = ("report", "_reading", "_after")

    def __init__(self, source: Any, encoder: RowEncoder, samples: SampleOptions, options: Any):
        is_wrong = isinstance(source, str | bytes | os.PathLike | Mapping)
        if is_wrong or not (callable(source) or isinstance(source, Iterable)):
            what = f"source is a {type(source).__name__}; give an iterable of rows"
            raise ConfigError(f"{what}, or a function from a row number to the rows from there on")
        self._source = source
        self._encoder = check_encoder("encoder", encoder, samples.pad_token)
        self._capacity = samples.sequence_length + samples.add_extra_token
        self._extra, self._options = int(samples.add_extra_token), options
        self._has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        is_spent = isinstance(source, Iterator) and not self._has_state
        self._obstacle = _NO_STATE if is_spent else _LACKS_BUFFER if _has_buffer(source) else ""
        # None: what `iter` gives first, though rows may have been looked at.
        start = None if self._has_state else 0
        kind = "own" if options["packing"] == "documents" else "all"
        self._first = {"window": 0, "source": start, "row": 0, "token": 0, "tokenised": kind}
        self._place = _Place()
        with suppress(TypeError):  # a source that cannot be a key
            if self._has_state:
                self._place = _places.setdefault(source, self._place)
        self.renew()

    def after_fork(self) -> None:
        self.report = Counter[str]()
        self._reading: Iterator[Any] = iter(())  # of entries, or of samples
        self._after: Any = None  # the state behind what was read

    def read(self, state: Any, count: int, own: Any = None) -> tuple[TokenBatch, Any]:
        """See `TokenStream.read`; with documents, samples at other places than `own` are empty."""
        state, is_by_row = state or self._first, self._options["packing"] == "documents"
        for name in ("window", "row", "token"):
            check_int(f"{name}, of the stream's state,", state[name], 0)
        size = self._options["rows_per_sample"] if is_by_row else 1
        with self._place.lock:
            if state != self._after or self._place.reader != id(self):
                self._place.reader = id(self)
                self._reading = self._entries(state) if is_by_row else self._packed(state)
            self._after = None  # after an error, the place is read again
            entries: list[Any] = list(itertools.islice(self._reading, count * size))
            self._after = after = entries[-1][-1] if entries else state
        if is_by_row:
            return self._samples_of(entries, size, own), after
        runs = itertools.groupby(entries, itemgetter(0))
        samples = [batch.select(np.array([place for _, place, _ in run])) for batch, run in runs]
        return samples[0] if len(samples) == 1 else concatenate(samples or [EMPTY]), after

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
            before = {**state, "window": window, "source": source, "token": 0, "size": len(read)}
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

    def _source_state(self) -> Any:
        """A copy of the source's state: the source may go on in the dict that it gives."""
        return plain_json(self._source.state_dict(), "the state of the source")

    def _rows_from(self, state: Any) -> Iterator[Any]:
        source = self._source
        is_first = state == self._first["source"] and (self._has_state or not self._place.origin)
        if self._obstacle and not is_first:
            raise ResumeError(f"the source cannot begin again there: {self._obstacle}")
        if self._has_state:
            is_hugging_face = hasattr(source, "_ex_iterable")
            if not self._place.origin:
                rows: Iterator[Any] = iter(source)
                # Hugging Face's has a state only behind the first row; it takes None for the start.
                self._place.origin = [None if is_hugging_face else self._source_state()]
                if state is None:
                    return rows
            if is_hugging_face and state:
                source.set_epoch(state["epoch"])  # else it forgets the state of another epoch
            source.load_state_dict(plain_json(self._place.origin[0] if state is None else state))
            return iter(source)
        self._place.origin = [0]
        state = check_int("source, of the stream's state,", state, 0)
        following = source(state) if callable(source) else itertools.islice(source, state, None)
        if not isinstance(following, Iterable):
            what = f"source({state}) returned {shown(following)}"
            raise ConfigError(f"{what}; give an iterable of the rows from there on")
        return iter(following)

    def _encoded(self, entries: Sequence[_Entry]) -> tuple[TokenBatch, TextError | None]:
        """The rows before the first bad one as samples, and the problem of that one."""
        encoded = encode_rows(self._encoder, [row for _, row, _ in entries])
        counts = {"rows": len(entries), "tokens": len(encoded.tokens)}
        self.report.update({**counts, **encoded.report})
        batch = documents_of(encoded, np.array([number for number, *_ in entries], np.int64))
        if not encoded.problems:
            return batch, None
        place = min(encoded.problems)
        where = f"row {entries[place][0]} of the stream"
        return batch.select(np.arange(place)), TextError(f"{where}: {encoded.problems[place]}")

    def _samples_of(self, entries: list[_Entry], size: int, own: Any) -> TokenBatch:
        """Samples of `size` rows each; those at other places than `own` (None: all) are empty."""
        wanted = {*(range(len(entries)) if own is None else own)}
        starts = range(0, len(entries), size)
        groups = [entries[n : n + size] if n // size in wanted else [] for n in starts]
        batch, problem = self._encoded([*itertools.chain.from_iterable(groups)])
        if problem is not None:
            raise problem
        ends = np.append(0, batch.ends)[starts_of(map(len, groups))[1:]]
        batch, cuts = cut(batch.with_arrays(ends=ends), self._capacity)
        self.report.update(cuts)
        return batch

    def _packed(self, state: Any) -> Iterator[tuple[TokenBatch, int, Any]]:
        """Samples of documents one after the other, or of whole ones: a batch, the place of the
        sample there, and the state behind it."""
        entries, start = self._entries(state), state["token"]
        extra = self._extra if self._options["packing"] == "joined" else 0  # tokens shared by two
        rest: list[Any] = []  # what blocks of rows have left for the next sample
        before: dict[int, Any] = {}  # the states before rows, by the rows' numbers
        while some := list(itertools.islice(entries, BLOCK)):
            block, problem = self._encoded(some)
            before |= {number: {**after, "row": after["row"] - 1} for number, _, after in some}
            start = min([start, *block.ends[:1].tolist()])
            batch: Any = concatenate([*rest, block])
            stops = self._stops_of(batch, start, extra)
            starts, start = np.append(start, stops - extra), 0
            # The state tells of the document that ends a full sample, or else did not fit into it.
            last = stops - (stops - starts[:-1] == self._capacity)
            parts = np.searchsorted(batch.part_starts, last, "right") - 1
            tokens = batch.part_offset[parts] + starts[1:] - batch.part_starts[parts]
            samples = ranges_of(batch, starts[:-1], stops)
            pairs = zip(batch.part_sequence[parts].tolist(), tokens.tolist(), strict=True)
            for place, (number, token) in enumerate(pairs):
                yield samples, place, {**before[number], "token": token}
            if problem is not None:
                raise problem
            rest = [ranges_of(batch, starts[-1:], batch.ends[-1:])]
            before = {number: before[number] for number in rest[0].part_sequence.tolist()}
        for batch in rest:
            if len(batch.tokens) > extra:
                token = int(batch.part_offset[-1] + batch.part_counts[-1])
                yield batch, 0, {**before[int(batch.part_sequence[-1])], "token": token}

    def _stops_of(self, batch: Any, start: int, extra: int) -> Numbers:
        """Where samples from a token on end, if no later document can change that."""
        if self._options["packing"] == "joined":
            return np.arange(start + self._capacity, len(batch.tokens) + 1, self._capacity - extra)
        ends, stops = [0, *(batch.part_starts + batch.part_counts).tolist()], [start]
        while (limit := stops[-1] + self._capacity) <= ends[-1]:
            end = ends[bisect_right(ends, limit) - 1]
            stops.append(end if end > stops[-1] else limit)  # a longer document goes on
        return np.array(stops[1:], np.int64)

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
        packer = {
            "packing": check_choice("packing", packing, ("documents", "joined", "packs")),
            "rows_per_sample": check_int("rows_per_sample", rows_per_sample, 1, MAX_INT32),
            "shuffle_buffer": check_int("shuffle_buffer", shuffle_buffer, 0, MAX_INT32),
            "seed": check_int("seed", seed, 0),
            "rows": dict(fingerprint or {}),
        }
        super().__init__(RowStream(source, encoder, options, packer), options)

    def _read(self, state: Any, count: int, own: Any) -> tuple[TokenBatch, Any]:
        return self.stream.read(state, count, own)

    @property
    def report(self) -> Counter[str]:
        """Counts of the rows that this process has encoded, some of them ahead of their use, and of
        what was cut of them."""
        return Counter(self.stream.report)
