"""Samples of rows: tokenised when they are asked for, or once for all.

What is tokenised once stands in token files in the cache folder, found again by its content.
"""

import contextlib
import glob
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from millrace.cache import arrays
from millrace.cache.loss_files import read_loss_ranges
from millrace.checks import check_choice, check_int, shown
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import RowEncoder, check_encoder, is_plain
from millrace.engine import ALREADY, Progress
from millrace.errors import CacheError, ConfigError, DataError, MillraceError
from millrace.files import SAY_AFTER, file_lock
from millrace.names import JOURNAL
from millrace.online.numbered_rows import BLOCK, MemoryPart, Rows, folder_of, open_rows
from millrace.online.row_documents import RowDocuments, StoredDocuments
from millrace.order import RULES_VERSION, GPTPlan, OrderInputs, PackPlan
from millrace.order.order_plans import PlanOf, build_order
from millrace.samples.dataset import TokenDataset
from millrace.samples.fields import choose_options
from millrace.samples.loss_ranges import LossRanges
from millrace.samples.stored import Sources, StoredTokens
from millrace.samples.tokens import Numbers
from millrace.store import IndexedDataset
from millrace.text import BadDocumentError, Documents, Format, InputFile, Part, Query
from millrace.text.documents import Batch
from millrace.text.json_values import id_text, text_at
from millrace.tokenizing import tokenize

_NUM_CHECKED = 64  # rows that are compared with the reference library, which is slow
_PAUSE = 0.25  # seconds between two looks for the file that names the process of a job
_INPUT_SIZE = 1 << 23  # bytes of rows, which a worker encodes in a second
_PLANS: dict[Any, PlanOf] = {"gpt": GPTPlan, "packs": PackPlan}


def _plan_of(order: str | PlanOf | None, options: Any) -> PlanOf | None:
    """The plan of an order, which may be a name."""
    if order is None and options is not None:
        raise ConfigError(f"order_options are {shown(options)}: give order, too")
    return _PLANS[check_choice("order", order, (*_PLANS,))] if isinstance(order, str) else order


class TextDataset(TokenDataset):
    """Samples of raw rows.

    Without an order and a cache, a sample is a document, cut or padded, which is tokenised when it
    is asked for, in the loader's threads: there is nothing to wait for, and a bad row stops the
    run. With a cache all rows are tokenised once, by a job that continues after any kill; the
    samples are the same. Orders of documents that are cut or packed need the lengths of all, so
    they always tokenise all rows once.

    Args:
        rows: Rows of `open_rows`, or a source for it; an attribute, as is the name.
        encoder: What makes documents of rows: `TextRows`, or another `RowEncoder`.
        seed: Seed of the order; None: a document per sample, in the order of the rows.
        num_samples: Number of samples, through as many epochs as needed; None: one epoch.
        order: None for a document per sample; "gpt" for documents that are joined and cut, in
            Megatron-LM's order; "packs" for whole documents in rows (see `PackPlan`); or another
            `OrderPlan`.
        order_options: Options of the order's plan, such as those of `PackPlan`.
        cache: Folder for token files, where other runs find them by rows and encoder. None: that
            of the rows, where an order needs token files.
        on_error: What becomes of bad rows with a cache: "stop", "skip" or "quarantine".
        workers: Number of processes that tokenise; None: one per core, fewer for a small input.
        threads: Number of threads that encode on the fly; the samples do not depend on it. More
            help texts alone: templates of chats hold Python's lock.
        show_progress: Whether to show progress of tokenising on stderr.
        name: Name in metrics and messages. None: the first file of the rows, or the type of rows in
            memory.
        sample_options: What a sample looks like: the fields of `SampleOptions`.

    Raises:
        ConfigError: An argument of a wrong type, or options that do not go together.
        TextError: A source that cannot be read; with a cache, also a bad row.

    Example:
        >>> from millrace.encoding import Tokenizer
        >>> from millrace.online import TextRows
        >>> rows = [{"text": "mill"}, {"text": "race"}]
        >>> dataset = TextDataset(rows, TextRows(Tokenizer("bytes")), sequence_length=5)
        >>> dataset[0]["labels"].tolist(), dataset[0]["loss_mask"].tolist()
        ([105, 108, 108, 256, 0], [1.0, 1.0, 1.0, 1.0, 0.0])
    """

    _job_report: Mapping[str, int] = {}

    def __init__(
        self,
        rows: Any,
        encoder: RowEncoder,
        *,
        seed: int | None = None,
        num_samples: int | None = None,
        order: str | PlanOf | None = None,
        order_options: dict[str, Any] | None = None,
        cache: str | os.PathLike[str] | None = None,
        on_error: str = "stop",
        workers: int | None = None,
        threads: int = 1,
        show_progress: bool = False,
        name: str | None = None,
        **sample_options: Any,
    ) -> None:
        options = choose_options(None, sample_options, self)
        check_choice("on_error", on_error, ("stop", "skip", "quarantine"))
        encoder = check_encoder("encoder", encoder, options.pad_token)
        threads = check_int("threads", threads, 1, 1024)
        order = _plan_of(order, order_options)
        if order is not None or seed is not None:
            seed = check_int("seed, which this order needs," if order else "seed", seed, 0)
        is_online = cache is None and order is None
        if is_online and on_error != "stop":
            raise ConfigError(f'on_error="{on_error}" needs all rows before the first: give cache')
        self.rows = rows = rows if isinstance(rows, Rows) else open_rows(rows, cache=cache)
        self.name = rows.parts[0].locate(0)[0] if name is None else name
        if len(rows) == 0:
            raise ConfigError(f"{self.name}: there are no rows: give at least one")
        has_mask = not is_plain(encoder)
        if is_plain(encoder):
            first = rows.range().read(np.arange(min(len(rows.range()), _NUM_CHECKED)))
            encoder = encoder.checked([row for row in first if isinstance(row, dict)])
        identity = {
            "kind": "rows",
            "rules": RULES_VERSION,
            "rows": rows.fingerprint(),
            "encoder": encoder.fingerprint(),
            "capacity": (capacity := options.sequence_length + options.add_extra_token),
            **({} if on_error == "stop" else {"on_error": on_error}),
        }
        documents: Any = threads, capacity, identity, seed, num_samples
        if is_online:
            super().__init__(RowDocuments(rows, encoder, *documents), options)
            return
        folder = rows.folder if cache is None else folder_of(cache)
        job: Any = {"on_error": on_error, "workers": workers, "show_progress": show_progress}
        store, self._job_report, start, stop = _tokenized(rows, encoder, folder, **job)
        if order is None:
            stored = StoredDocuments(store, start, stop - start, has_mask)
            super().__init__(RowDocuments(stored, stored, *documents), options)
            return
        inputs = OrderInputs(
            num_sequences=len(store),
            num_tokens=store.num_tokens,
            sequence_length=options.sequence_length,
            add_extra_token=options.add_extra_token,
            drop_last_partial_sequence=True,
            load_lengths=partial(getattr, store, "sequence_lengths"),
            sequences=tuple(store.document_indices[[start, stop]].tolist()),
            num_samples=num_samples,
            seed=seed or 0,  # never None where there is an order
        )
        source = StoredTokens(store, build_order(order, inputs, store.prefix, order_options))
        super().__init__(source, options, [LossRanges(source)] if has_mask else [])

    @property
    def prefix(self) -> str:
        """See `TokenDataset`; damage of token files is named by these."""
        return self.name if isinstance(self.source, RowDocuments) else super().prefix

    def sources_of(self, numbers: Numbers) -> Sources:
        (counts,) = self.source.sources_of(numbers).values()
        return {self.name: counts}

    @property
    def report(self) -> Counter[str]:
        """Counts of the rows that this process has read, some of them ahead of their use, and what
        was cut of them. With token files, their job has counted all rows, and the plan of packs
        `long documents` and `lost tokens`."""
        counts = {**getattr(self.source, "report", {}), **self._job_report}
        plan = getattr(getattr(self.source, "order", None), "plan", None)
        if isinstance(plan, PackPlan):
            counts |= {"long documents": plan.num_long, "lost tokens": plan.num_lost_tokens}
        return Counter(counts)


# ---- token files of all rows, which are made once ----


def _tokenized(
    rows: Rows, encoder: RowEncoder, folder: str, *, show_progress: bool, **options: Any
) -> tuple[IndexedDataset, dict[str, int], int, int]:
    """Token files with the documents of some rows, made by a tokenise job unless they are there;
    the job's report; and where the documents start and stop in them.

    Of several processes one makes them, and the others wait; after a kill the next one continues.
    """
    start, stop = rows.start, rows.stop
    # All splits share the files of all rows, where each row is a document: others may skip some.
    is_shared = is_plain(encoder) and options["on_error"] == "stop"
    rows = rows.range() if is_shared else rows
    key = [rows.fingerprint(), encoder.fingerprint(), options["on_error"]]
    place = os.path.join(folder, f"rows-{arrays.fingerprint(key)[:16]}")
    if is_plain(encoder):
        json_key = encoder.key
        options |= {"append_eod": encoder.append_eod, "prepend_bos": encoder.prepend_bos}
    else:
        json_key, options["row_encoder"] = "rows", encoder
    options |= {"json_keys": [json_key], "show_progress": show_progress}
    prefix = f"{place}_{json_key}_document"
    finished = partial(_finished, place, prefix, "row_encoder" in options)
    # Without progress, the wait for the lock itself warns and names the holder.
    limit = 1 if show_progress else None
    with Progress("wait for tokens", enabled=show_progress) as progress:
        while (store := finished()) is None:
            try:
                with file_lock(f"{place}.lock", limit=limit):
                    if (store := finished()) is None:
                        _make(rows, encoder, place, **options)
                        store = IndexedDataset(prefix)
                        break
            except BlockingIOError:
                done = glob.glob(f"{glob.escape(place + JOURNAL)}/*/done.jsonl")
                size = f"{sum(map(os.path.getsize, done)):,} bytes of journal"
                progress.update(0, f"another process tokenises the rows ({size})")
            except (MillraceError, OSError) as error:
                if not _wait_for_owner(place, error) and finished() is None:
                    if isinstance(error, MillraceError):
                        raise
                    remedy = "Free space there, or give another cache; the next run continues"
                    raise CacheError(f"{place} cannot be written: {error}. {remedy}") from error
    info = store.info()
    provenance: dict[str, Any] = {} if info is None else info.provenance
    report = {**provenance.get("report", {}), "rows": len(rows), "tokens": store.num_tokens}
    if "skipped" in provenance:
        report["skipped rows"] = provenance["skipped"]["number"]
    return store, report, *((start, stop) if is_shared else (0, store.num_documents))


def _finished(place: str, prefix: str, has_mask: bool) -> IndexedDataset | None:
    """The token files of a job that is done: it has removed its journal."""
    if not os.path.exists(place + JOURNAL):
        with contextlib.suppress(DataError):
            store = IndexedDataset(prefix)
            if has_mask:
                read_loss_ranges(store)
            return store
    return None


def _wait_for_owner(place: str, error: Exception) -> bool:
    """Waits for the job of another process on a file system without locks; whether it was there."""
    num_waits = 0
    while os.path.exists(f"{place}{JOURNAL}/owner"):  # names the process of the job
        time.sleep(_PAUSE)
        num_waits += 1
        if num_waits * _PAUSE == SAY_AFTER:
            logging.getLogger("millrace").warning("waiting for the token files: %s", error)
    return num_waits > 0


def _make(rows: Rows, encoder: RowEncoder, place: str, **options: Any) -> None:
    """Runs the job."""
    inputs = _inputs_of(rows)
    options["max_document_size"] = rows.max_size
    # The job notes a tokenizer: the encoder's, or one that stands for the encoder.
    tokenizer = getattr(encoder, "tokenizer", None) or Tokenizer.from_function(
        list,
        vocabulary_size=int(np.iinfo(encoder.dtype).max),
        name=type(encoder).__name__,
        version=arrays.fingerprint(encoder.fingerprint()),
    )
    with contextlib.suppress(ConfigError):  # of files that were moved or touched since a kill
        if ALREADY not in tokenize(inputs, place, tokenizer, **options).notices:
            return
    # A finished job of which a file is damaged would give its earlier result.
    tokenize(inputs, place, tokenizer, restart=True, **options)


def _inputs_of(rows: Rows) -> list[InputFile]:
    """The files of the rows; or inputs of some rows each, if these are in memory, or not all."""
    files = [part.file for part in rows.parts]
    if None not in files and len(rows) == len(rows.range()):
        return files
    # Rows from all over, as they may be sorted by length; from few places, as groups may be large.
    count = min(len(rows), 16)
    firsts = np.linspace(0, len(rows) - count, 16, dtype=np.int64)
    sizes = [len(str(row)) for row in rows.read(np.unique(firsts[:, None] + np.arange(count)))]
    size = sum(sizes) // max(len(sizes), 1) + 1
    formats = [_RowsFormat(*block) for block in rows.blocks(_INPUT_SIZE // size + 1)]
    return [
        InputFile(path=one.path, format=one, size=size * len(one.numbers), mtime_ns=None)
        for one in formats
    ]


class _RowsFormat(Format):
    """Some rows of a part of `Rows`, as an input of a job."""

    name = "rows"

    def __init__(self, part: Any, numbers: range) -> None:
        self._part, self.numbers, self.unit = part, numbers, part.unit
        self.path, self.first_line = part.locate(numbers.start)

    def __getstate__(self) -> dict[str, Any]:
        """A worker gets its own of the rows in memory."""
        if self._part.file is not None:
            return vars(self)
        rows = self._part.read(np.array(self.numbers, np.int64))
        return {**vars(self), "_part": MemoryPart(rows), "numbers": range(len(rows))}

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        batch, (_, first) = Batch(query, part.size), self._part.locate(self.numbers.start)
        for start in range(0, len(self.numbers), BLOCK):
            numbers = self.numbers[start : start + BLOCK]
            for number, row in zip(numbers, self._part.read(np.array(numbers)), strict=True):
                line = self._part.locate(number)[1] - first
                try:
                    if isinstance(row, BadDocumentError):
                        raise row
                    texts = [row] if query.whole else [text_at(row, query.keys[0])]
                    batch.add(texts, line, id_=id_text(row.get(query.id_key)))
                except BadDocumentError as error:
                    query.reject(line, -1, str(error), repr(row).encode())
            yield batch.take(line + 1, start + len(numbers), len(self.numbers))
