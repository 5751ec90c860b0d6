"""Samples of rows: tokenised when they are asked for, or once for all."""

import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from millrace.checks import check_choice, check_int, shown
from millrace.encoding.row_encoders import RowEncoder, check_encoder, is_plain
from millrace.errors import ConfigError
from millrace.online.cached_rows import tokenized
from millrace.online.numbered_rows import Rows, folder_of, open_rows
from millrace.online.row_documents import RowDocuments, StoredDocuments
from millrace.order import RULES_VERSION, GPTPlan, OrderInputs, PackPlan
from millrace.order.order_plans import PlanOf, build_order
from millrace.samples.dataset import TokenDataset
from millrace.samples.fields import choose_options
from millrace.samples.loss_ranges import LossRanges
from millrace.samples.stored import Sources, StoredTokens
from millrace.samples.tokens import Numbers

_NUM_CHECKED = 64  # rows that are compared with the reference library, which is slow
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
        threads: Number of threads that encode on the fly; the samples do not depend on it. More
            help texts alone: templates of chats hold Python's lock.
        show_progress: Whether to show progress of tokenising on stderr.
        name: Name in metrics and messages. None: the first file of the rows, or the type of rows in
            memory.
        sample_options: What a sample looks like: the fields of `SampleOptions`.

    Attributes:
        rows: The rows.
        name: Name in metrics and messages.

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
        store, self._job_report, start, stop = tokenized(rows, encoder, folder, **job)
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
