"""Samples of rows: tokenised when they are asked for, or once for all."""

import os
from functools import lru_cache, partial
from typing import Any

import numpy as np

from millrace import _native
from millrace.checks import MAX_INT64, check_choice, check_int
from millrace.deferred import Deferred
from millrace.encoding.row_encoders import RowEncoder, TextRows, check_encoder, encode_rows
from millrace.errors import ConfigError, TextError
from millrace.online.cached_rows import Pair, tokenized
from millrace.online.numbered_rows import Rows, base_of, folder_of, open_rows
from millrace.order import RULES_VERSION, GPTPlan, Order, OrderInputs, PackPlan, Spans
from millrace.order.order_plans import PlanOf, build_arrays, plan_order
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


class RowOrder:
    """Rows in a new order in each epoch, a row for a sample.

    Args:
        num_rows: Number of rows.
        seed: Seed of the order; None: as they stand.
        num_samples: Number of samples; None: one epoch.
    """

    def __init__(self, num_rows: int, seed: int | None, num_samples: int | None) -> None:
        self.num_rows = num_rows
        self.seed = None if seed is None else check_int("seed", seed, 0)
        count = num_rows if num_samples is None else num_samples
        self.num_samples = check_int("num_samples", count, 0, MAX_INT64 if num_rows else 0)

    def rows(self, sample_numbers: Numbers) -> Numbers:
        """The row of each sample: int64 [batch]."""
        epochs, places = np.divmod(sample_numbers, max(self.num_rows, 1))
        if self.seed is not None:
            for epoch in {*epochs.tolist()}:
                here = epochs == epoch
                key = epoch_key(self.seed, epoch)
                places[here] = _native.swap_or_not(places[here], self.num_rows, key, True)
        return places

    def fingerprint(self) -> dict[str, Any]:
        return {"rules": RULES_VERSION, "num_rows": self.num_rows, "seed": self.seed}


@lru_cache(maxsize=64)
def epoch_key(seed: int, epoch: int) -> int:
    """The key of `_native.swap_or_not` in an epoch."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


class RowTokens:
    """A document for each sample, cut to the capacity: a source of tokens."""

    def __init__(self, rows: Rows, encoder: RowEncoder, order: RowOrder, capacity: int) -> None:
        self.rows, self.encoder, self.order, self.capacity = rows, encoder, order, capacity

    def __len__(self) -> int:
        return self.order.num_samples

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """See `TokenSource`; TextError for a bad row, with its place."""
        numbers = self.order.rows(sample_numbers)
        encoded = encode_rows(self.encoder, self.rows.rows(numbers))
        for place, reason in sorted(encoded.problems.items()):
            raise TextError(
                f"{self.rows.place(int(numbers[place]))}: {reason}. Or go on without such rows: "
                'cache="FOLDER", on_error="skip"'
            )
        for number in numbers[encoded.counts > 1].tolist():
            raise TextError(
                f"{self.rows.place(number)} becomes several documents, so that samples have no "
                'numbers before all rows are tokenised: give cache="FOLDER"'
            )
        sizes = sizes_of(encoded.ends)
        kept = np.minimum(sizes, self.capacity)
        documents, places = spread(kept)
        take = (encoded.ends - sizes)[documents] + places
        trained = None if encoded.trained is None else encoded.trained[take]
        columns = {"tokens": encoded.tokens[take], "ends": np.cumsum(kept), "trained": trained}
        return _of_documents(_EMPTY.with_arrays(**columns), numbers)

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        return {
            "kind": "rows",
            "rows": self.rows.fingerprint(),
            "encoder": self.encoder.fingerprint(),
            "capacity": self.capacity,
            **self.order.fingerprint(),
        }


def _of_documents(batch: TokenBatch, numbers: Numbers) -> TokenBatch:
    """The batch with a part for each sample that has tokens: a document, by its number."""
    sizes = sizes_of(batch.ends)
    has_tokens = sizes > 0
    starts = (batch.ends - sizes)[has_tokens]
    return batch.with_arrays(
        part_starts=starts, part_sequence=numbers[has_tokens], part_offset=np.zeros_like(starts)
    )


class StoredDocuments:
    """The same samples from token files: a source of tokens, and the order that it reads them in.

    `first`: the document of the first row; `on_error`: how bad rows were left out.
    """

    def __init__(
        self, online: RowTokens, store: IndexedDataset, first: int, has_mask: bool, on_error: str
    ) -> None:
        self._online, self._store, self._first, self._on_error = online, store, first, on_error
        self._stored = StoredTokens(store, self)
        self._ranges = LossRanges(TokenDataset(self._stored, None)) if has_mask else None

    @property
    def prefix(self) -> str:
        return self._store.prefix

    def __len__(self) -> int:
        return len(self._online)

    def spans(self, sample_numbers: Numbers) -> Spans:
        """See `Order`: all sequences of a document, as far as the capacity goes."""
        documents = self._first + self._online.order.rows(sample_numbers)
        firsts, stops = self._store.document_indices[np.stack((documents, documents + 1))]
        samples, places = spread(stops - firsts)
        sequences = firsts[samples] + places
        bounds = np.append(0, np.cumsum(stops - firsts))
        lengths = self._store.sequence_lengths[sequences].astype(np.int64)
        ends = np.append(0, np.cumsum(lengths))
        before = ends[:-1] - ends[bounds[:-1]][samples]
        counts = np.clip(self._online.capacity - before, 0, lengths)
        return Spans(sequences, np.zeros_like(counts), counts, bounds)

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """See `TokenSource`."""
        batch = self._stored.tokens(sample_numbers)
        if self._ranges is not None:
            _, batch = self._ranges(batch, sample_numbers)
        return _of_documents(batch, self._online.order.rows(sample_numbers))

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """That of the samples on the fly: a run may go on with the one or the other."""
        entries = self._online.fingerprint()
        return entries if self._on_error == "stop" else {**entries, "on_error": self._on_error}


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
        options: What a sample looks like.
        sample_options: The fields of `SampleOptions` in place of `options`, such as
            `sequence_length`.

    Attributes:
        rows: The rows.
        pair: The token files; None on the fly.

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
        options: SampleOptions | None = None,
        **sample_options: Any,
    ) -> None:
        encoder = check_encoder("encoder", encoder)
        if options is None or sample_options:
            options = SampleOptions(**sample_options)
        check_choice("on_error", on_error, ("stop", "skip", "quarantine"))
        is_online = cache is None and order is None
        if is_online and on_error != "stop":
            raise ConfigError(f'on_error="{on_error}" needs all rows before the first: give cache')
        self.rows = rows = rows if isinstance(rows, Rows) else open_rows(rows, cache=cache)
        base, *ends = base_of(rows)
        if isinstance(encoder, TextRows):
            first = base.read(np.arange(min(len(base), _FIRST_ROWS)))
            encoder = encoder.checked([row for row in first if isinstance(row, dict)])
        self.pair: Pair | None = None
        capacity = options.sequence_length + options.add_extra_token
        if is_online:
            one_each = RowOrder(len(rows), seed, num_samples)
            super().__init__(RowTokens(rows, encoder, one_each, capacity), options)
            return
        folder = rows.folder if cache is None else folder_of(cache)
        job = {"on_error": on_error, "workers": workers, "show_progress": show_progress}
        self.pair = pair = tokenized(base, encoder, folder, **job)  # type: ignore[arg-type]
        store = IndexedDataset(pair.prefix)
        start, stop = _documents(store, ends, len(base))
        if order is None:
            one_each = RowOrder(stop - start, seed, num_samples)
            online = RowTokens(rows, encoder, one_each, capacity)
            source = StoredDocuments(online, store, start, pair.has_mask, on_error)
            super().__init__(source, options)
            return
        documents = store.document_indices[[start, stop]].tolist()
        numbers = {"seed": seed, "num_samples": num_samples, "sequences": tuple(documents)}
        stored = StoredTokens(store, _order_of(order, order_options, store, options, **numbers))
        if pair.has_mask:
            inner = TokenDataset(stored, options)
            super().__init__(inner, options, [LossRanges(inner)])
        else:
            super().__init__(stored, options)


def _order_of(
    order: str | PlanOf,
    order_options: dict[str, Any] | None,
    store: IndexedDataset,
    options: SampleOptions,
    **numbers: Any,
) -> Order:
    """The order of a plan; `numbers` are its seed, number of samples and range of sequences."""
    numbers["seed"] = check_int("seed, which this order needs,", numbers["seed"], 0)
    inputs = OrderInputs(
        num_sequences=len(store),
        num_tokens=store.num_tokens,
        sequence_length=options.sequence_length,
        add_extra_token=options.add_extra_token,
        drop_last_partial_sequence=True,
        load_lengths=partial(getattr, store, "sequence_lengths"),
        **numbers,
    )
    plan_of: Any = order
    if isinstance(order, str):
        plan_of = _PLANS[check_choice("order", order, (*_PLANS,))]
    plan = plan_order(plan_of, inputs, store.prefix, order_options)
    return plan.load(inputs, Deferred.of(build_arrays(plan, inputs, store.prefix)))


def _documents(store: IndexedDataset, ends: list[int], num_rows: int) -> tuple[int, int]:
    """The documents of a range of the rows."""
    if ends == [0, num_rows]:
        return 0, store.num_documents
    if store.num_documents != num_rows:
        raise ConfigError(
            f"{num_rows} rows became {store.num_documents} documents, so a part of the rows is not "
            "a range of documents: keep train and valid in files of their own"
        )
    return ends[0], ends[1]
