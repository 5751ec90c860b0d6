"""Samples of rows: tokenised when they are asked for, or once for all."""

import os
from functools import lru_cache, partial
from typing import Any

import numpy as np

from millrace import _native
from millrace.checks import MAX_INT64, check_choice, check_int
from millrace.encoding.row_encoders import RowEncoder, TextRows, check_encoder, encode_rows
from millrace.errors import ConfigError, TextError
from millrace.online.cached_rows import tokenized
from millrace.online.numbered_rows import Rows, folder_of, open_rows
from millrace.order import RULES_VERSION, GPTPlan, OrderInputs, PackPlan, Spans
from millrace.order.order_plans import PlanOf, build_order
from millrace.ragged import sizes_of, spread
from millrace.samples.dataset import TokenDataset
from millrace.samples.fields import SampleOptions
from millrace.samples.loss_ranges import LossRanges
from millrace.samples.stored import StoredTokens
from millrace.samples.tokens import Numbers, TokenBatch
from millrace.store import IndexedDataset

_FIRST_ROWS = 64  # whose texts choose the encoder
_EMPTY = TokenBatch(np.empty(0, np.int64), np.empty(0, np.int64))
_PLANS: dict[Any, PlanOf] = {"gpt": GPTPlan, "packs": PackPlan}


@lru_cache(maxsize=64)
def epoch_key(seed: int, epoch: int) -> int:
    """The key of `_native.swap_or_not` in an epoch."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


class RowTokens:
    """A document for each sample, cut to the capacity: a source of tokens.

    Each epoch takes the documents in a new order; without a seed, as they stand.
    """

    def __init__(
        self, rows: Rows, encoder: RowEncoder, capacity: int, count: int, on_error: str,
        seed: int | None, num_samples: int | None,
    ) -> None:  # fmt: skip
        self._rows, self._encoder, self._capacity = rows, encoder, capacity
        self._count, self._on_error = count, on_error
        self._seed = None if seed is None else check_int("seed", seed, 0)
        num_samples = count if num_samples is None else num_samples
        self._num_samples = check_int("num_samples", num_samples, 0, MAX_INT64 if count else 0)

    def __len__(self) -> int:
        return self._num_samples

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """See `TokenSource`; a part for each sample that has tokens: a document, by its number."""
        epochs, numbers = np.divmod(sample_numbers, max(self._count, 1))
        for epoch in {*epochs.tolist()} if self._seed is not None else ():
            here = epochs == epoch
            key = epoch_key(self._seed, epoch)
            numbers[here] = _native.swap_or_not(numbers[here], self._count, key, True)
        batch = self._read(numbers)
        sizes = sizes_of(batch.ends)
        has_tokens = sizes > 0
        starts = (batch.ends - sizes)[has_tokens]
        return batch.with_arrays(
            part_starts=starts, part_sequence=numbers[has_tokens], part_offset=np.zeros_like(starts)
        )

    def _read(self, numbers: Numbers) -> TokenBatch:
        """Documents by number; TextError for a bad row, with its place."""
        encoded = encode_rows(self._encoder, self._rows.rows(numbers))
        for place, reason in sorted(encoded.problems.items()):
            raise TextError(
                f"{self._rows.place(int(numbers[place]))}: {reason}. Or go on without such rows: "
                'cache="FOLDER", on_error="skip"'
            )
        for number in numbers[encoded.counts > 1].tolist():
            raise TextError(
                f"{self._rows.place(number)} becomes several documents, so that samples have no "
                'numbers before all rows are tokenised: give cache="FOLDER"'
            )
        sizes = sizes_of(encoded.ends)
        kept = np.minimum(sizes, self._capacity)
        documents, places = spread(kept)
        take = (encoded.ends - sizes)[documents] + places
        trained = None if encoded.trained is None else encoded.trained[take]
        return _EMPTY.with_arrays(
            tokens=encoded.tokens[take], ends=np.cumsum(kept), trained=trained
        )

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """The same with and without token files: a run may go on with the one or the other."""
        entries = {
            "kind": "rows",
            "rules": RULES_VERSION,
            "rows": self._rows.fingerprint(),
            "encoder": self._encoder.fingerprint(),
            "num_documents": self._count,
            "capacity": self._capacity,
            "seed": self._seed,
        }
        return entries if self._on_error == "stop" else {**entries, "on_error": self._on_error}


class StoredDocuments(RowTokens):
    """The same samples from token files, of which document `first` is the first row's."""

    def __init__(self, store: IndexedDataset, first: int, has_mask: bool, *online: Any) -> None:
        super().__init__(*online)
        self._first, self._stored = first, StoredTokens(store, self)
        self._ranges = LossRanges(self._stored) if has_mask else None

    @property
    def prefix(self) -> str:
        return self._stored.prefix

    def spans(self, numbers: Numbers) -> Spans:
        """Documents by number: their sequences, as far as the capacity goes."""
        store: Any = self._stored.store
        firsts, stops = store.document_indices[self._first + np.stack((numbers, numbers + 1))]
        samples, places = spread(stops - firsts)
        sequences = firsts[samples] + places
        bounds = np.append(0, np.cumsum(stops - firsts))
        lengths = store.sequence_lengths[sequences].astype(np.int64)
        ends = np.append(0, np.cumsum(lengths))
        before = ends[:-1] - ends[bounds[:-1]][samples]
        counts = np.clip(self._capacity - before, 0, lengths)
        return Spans(sequences, np.zeros_like(counts), counts, bounds)

    def _read(self, numbers: Numbers) -> TokenBatch:
        batch = self._stored.tokens(numbers)
        return batch if self._ranges is None else self._ranges(batch, numbers)[1]


class TextDataset(TokenDataset):
    """Samples of raw rows.

    Without an order and a cache, a sample is a document, cut or padded, which is tokenised when it
    is asked for, in the loader's threads: there is nothing to wait for, and a bad row stops the
    run. With a cache all rows are tokenised once, by a job that continues after any kill; the
    samples are the same. Orders of documents that are cut or packed need the lengths of all, so
    they always tokenise all rows once.

    Args:
        rows: Rows of `open_rows`, or a source for it.
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
        show_progress: Whether to show progress of tokenising on stderr.
        sample_options: What a sample looks like: the fields of `SampleOptions`.

    Attributes:
        rows: The rows.

    Raises:
        ConfigError: An argument of a wrong type, or options that do not go together.
        TextError: A source that cannot be read; with a cache, also a bad row.

    Example:
        >>> from millrace.encoding import Tokenizer
        >>> rows = [{"text": "mill"}, {"text": "race"}]
        >>> dataset = TextDataset(rows, TextRows(Tokenizer("bytes")), sequence_length=5)
        >>> dataset[0]["labels"].tolist(), dataset[0]["loss_mask"].tolist()
        ([105, 108, 108, 256, 0], [1.0, 1.0, 1.0, 1.0, 0.0])
    """

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
        show_progress: bool = False,
        **sample_options: Any,
    ) -> None:
        encoder, options = check_encoder("encoder", encoder), SampleOptions(**sample_options)
        check_choice("on_error", on_error, ("stop", "skip", "quarantine"))
        is_online = cache is None and order is None
        if is_online and on_error != "stop":
            raise ConfigError(f'on_error="{on_error}" needs all rows before the first: give cache')
        self.rows = rows = rows if isinstance(rows, Rows) else open_rows(rows, cache=cache)
        base, has_mask = rows.range(), not isinstance(encoder, TextRows)
        if isinstance(encoder, TextRows):
            first = base.read(np.arange(min(len(base), _FIRST_ROWS)))
            encoder = encoder.checked([row for row in first if isinstance(row, dict)])
        capacity = options.sequence_length + options.add_extra_token
        if is_online:
            online = (rows, encoder, capacity, len(rows), on_error, seed, num_samples)
            super().__init__(RowTokens(*online), options)
            return
        folder = rows.folder if cache is None else folder_of(cache)
        job: Any = {"on_error": on_error, "workers": workers, "show_progress": show_progress}
        store, _ = tokenized(base, encoder, folder, **job)
        start, stop = (
            (0, store.num_documents) if len(rows) == len(base) else (rows.start, rows.stop)
        )
        if len(rows) < len(base) != store.num_documents:
            raise ConfigError(
                f"{len(base)} rows became {store.num_documents} documents, so a part of them is "
                "not a range of documents: keep train and valid in files of their own"
            )
        if order is None:
            online = (rows, encoder, capacity, stop - start, on_error, seed, num_samples)
            super().__init__(StoredDocuments(store, start, has_mask, *online), options)
            return
        inputs = OrderInputs(
            num_sequences=len(store),
            num_tokens=store.num_tokens,
            sequences=tuple(store.document_indices[[start, stop]].tolist()),
            num_samples=num_samples,
            sequence_length=options.sequence_length,
            add_extra_token=options.add_extra_token,
            drop_last_partial_sequence=True,
            seed=check_int("seed, which this order needs,", seed, 0),
            load_lengths=partial(getattr, store, "sequence_lengths"),
        )
        if isinstance(order, str):
            order = _PLANS[check_choice("order", order, (*_PLANS,))]
        built = build_order(order, inputs, store.prefix, order_options)
        source: Any = StoredTokens(store, built)
        source = TokenDataset(source, options) if has_mask else source
        super().__init__(source, options, [LossRanges(source)] if has_mask else [])
