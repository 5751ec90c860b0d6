"""Batches of whole documents in the forms that trainers read: functions of the token batch.

They are for packs, whose samples have no extra token: a document has one target less than tokens,
and no target is a token of another document. `FinishedDataset(dataset, padding_free)` is a dataset
of such batches for a `Loader`. Names, shapes and dtypes are those of the trainers named below.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import check_int, shown
from millrace.errors import ConfigError, DataError
from millrace.order import Spans
from millrace.ragged import spread
from millrace.samples.dataset import converted, name_of
from millrace.samples.fields import FIELDS, Batch, BatchForm
from millrace.samples.tokens import Numbers, TokenBatch, fingerprint_of, split_at_eod

__all__ = [
    "IGNORED",
    "FinishedDataset",
    "count_targets",
    "document_starts",
    "mask_blocks",
    "megatron_packed",
    "megatron_thd",
    "padding_free",
    "torchtitan",
]

IGNORED = -100
"""The label of a token that is not trained on, of PyTorch's cross entropy."""


class FinishedDataset:
    """A dataset whose batches a function makes of the token batches of another one.

    Args:
        dataset: A dataset with a method `tokens`. Its documents are told by their places, and where
            `boundaries` are "eod", also by its `eod_token`.
        output: Function from a `TokenBatch` to the arrays of a batch by name, such as
            `padding_free`, or `functools.partial(megatron_thd, multiple=8)`.
        micro_batch_size: Number of samples that the function gets at once, where a batch is a whole
            step, as with a `BalancedSampler`: a batch is then {"micro_batches": list of what it
            returns}. None: all samples of a batch.

    Raises:
        ConfigError: A dataset without `tokens`, or with a `pad_token`, which documents do not have;
            a blend that splits at several EODs.
    """

    takes_form = True

    def __init__(
        self,
        dataset: Any,
        output: Callable[[TokenBatch], Mapping[str, Any]],
        *,
        micro_batch_size: int | None = None,
    ) -> None:
        self.dataset, self.output, self.micro_batch_size = dataset, output, micro_batch_size
        if not hasattr(dataset, "tokens") or not callable(output):
            raise ConfigError(
                f"a {type(dataset).__name__} and {getattr(output, '__name__', shown(output))} "
                "cannot make batches: give a dataset with a method `tokens` (a stream has none: "
                "give its Loader a `transform`, such as millrace.huggingface.causal_lm_batch, or "
                "make a TextDataset of the rows), and a function of a TokenBatch"
            )
        if micro_batch_size is not None:
            check_int("micro_batch_size", micro_batch_size, 1)
        views = getattr(dataset, "all_options", [getattr(dataset, "options", None)])
        if any(getattr(view, "pad_token", None) is not None for view in views):
            raise ConfigError(
                "tokens of documents are no padding: leave out the dataset's pad_token"
            )
        eods = {one.eod_token if getattr(one, "boundaries", 0) == "eod" else None for one in views}
        if len(eods) > 1:
            remedy = "give all of them the same eod_token and boundaries"
            raise ConfigError(f"the blend's datasets split at EOD {shown([*eods])}: {remedy}")
        self._eod_token: int | None = eods.pop()

    def __getattr__(self, name: str) -> Any:
        reading = ("prefetch", "is_remote", "look_ahead")
        if name not in ("prefix", *reading, "spans", "order", "source", "sources_of", "datasets"):
            raise AttributeError(f"a FinishedDataset has no {name!r}")
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, sample_numbers: ArrayLike, form: BatchForm | None = None) -> dict[str, Any]:
        """What the function makes of the samples of these numbers.

        Of the form, `vocab_size` checks the tokens, and `fields` selects arrays. Its dtype and
        sharing are refused with a ConfigError: the function decides them.
        """
        tokens = self.documents(sample_numbers)
        if form is not None:
            if form.token_dtype != "int64" or form.share_labels:
                raise ConfigError("the output makes arrays: leave out token_dtype and share_labels")
            converted(f"{name_of(self)} returned tokens", tokens.tokens, form)
        if self.micro_batch_size is None:
            return self._finished(tokens, form)
        ends = range(self.micro_batch_size, len(tokens), self.micro_batch_size)
        parts = np.split(np.arange(len(tokens)), ends)
        return {"micro_batches": [self._finished(tokens.select(part), form) for part in parts]}

    def documents(self, sample_numbers: ArrayLike) -> TokenBatch:
        """The token batch that the function gets, whose parts are documents: to `count_targets`."""
        tokens: TokenBatch = self.dataset.tokens(sample_numbers)
        if self._eod_token is None:
            return tokens
        by_eod = split_at_eod(tokens, self._eod_token)
        starts = [one for one in (tokens.part_starts, by_eod.part_starts) if one is not None]
        return by_eod.with_arrays(part_starts=np.unique(np.concatenate(starts)))

    def counted(self, sample_numbers: ArrayLike) -> Batch:
        """Tokens, labels and loss mask, by the names of `Loader.metrics`, whatever the output."""
        one = _documents(self.documents(sample_numbers))
        return {"tokens": one.tokens, "labels": one.labels, "loss_mask": one.labels != IGNORED}

    def _finished(self, tokens: TokenBatch, form: BatchForm | None) -> dict[str, Any]:
        arrays = self.output(tokens)
        if not isinstance(arrays, Mapping):
            raise ConfigError(f"the output is {shown(arrays, 60)}; a dict of arrays is needed")
        arrays = dict(arrays)
        if form is None or form.fields == FIELDS:
            return arrays
        if missing := [name for name in form.fields if name not in arrays]:
            raise ConfigError(f"the output makes {', '.join(arrays)}, and no {', '.join(missing)}")
        return {name: arrays[name] for name in form.fields}

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """That of the dataset: the form of a batch does not decide which tokens it has."""
        return fingerprint_of(self.dataset, consumed_samples)


class _Documents(NamedTuple):
    """The documents of a token batch, and their tokens as rows of the arrays of a trainer."""

    tokens: Numbers
    labels: Numbers  # the next token; IGNORED at the end of a document, or where it is not trained
    positions: Numbers
    starts: Numbers
    lengths: Numbers
    samples: Numbers  # of each document
    numbers: Numbers  # of each document in its sample
    firsts: Numbers  # place of each document's first token in its sample


def _documents(batch: TokenBatch) -> _Documents:
    tokens, lengths = batch.tokens.astype(np.int64), batch.part_counts
    starts = np.cumsum(lengths) - lengths
    trained = np.ones(len(tokens), np.bool_) if batch.trained is None else batch.trained
    labels = np.where(trained, tokens, IGNORED)
    labels[starts] = IGNORED  # no token comes before the first one of a document
    labels = np.append(labels[1:], IGNORED)[: len(tokens)]
    _, positions = spread(lengths)
    samples, numbers = spread(np.diff(batch.part_bounds))
    firsts = starts - (batch.ends - batch.sizes)[samples]
    return _Documents(tokens, labels, positions, starts, lengths, samples, numbers, firsts)


def _row_filler(sizes: Numbers, sequence_length: int) -> Callable[..., NDArray[Any]]:
    """A function that lays values of rows of these sizes out in an array [rows, sequence_length],
    whose other places are padding."""
    _check_length(sizes, sequence_length)
    places = spread(sizes)

    def fill(values: NDArray[Any], padding: Any, dtype: Any = np.int64) -> NDArray[Any]:
        array = np.full((len(sizes), sequence_length), padding, dtype)
        array[places] = values
        return array

    return fill


def _check_length(sizes: Numbers, sequence_length: int) -> None:
    if sizes.max(initial=0) > check_int("sequence_length", sequence_length, 1):
        raise DataError(
            f"a sample has {sizes.max()} tokens; rows have {sequence_length}. Give the rows a "
            "sequence_length of the packs' capacity, and the dataset add_extra_token=False"
        )


def count_targets(samples: TokenBatch | Spans) -> int:
    """The number of tokens that samples train on.

    Args:
        samples: Their tokens, of `FinishedDataset.documents`; or, where all tokens are trained on
            and no EOD splits documents, their spans, for which no rank needs to read a token.
    """
    if isinstance(samples, Spans):
        return int(np.maximum(samples.counts - 1, 0).sum())
    num_documents, trained = len(samples.part_counts), samples.trained
    if trained is None:
        return len(samples.tokens) - num_documents
    return int(np.count_nonzero(trained) - np.count_nonzero(trained[samples.part_starts]))


def padding_free(batch: TokenBatch) -> dict[str, Any]:
    """One row for `transformers` and TRL, with FlashAttention's arguments.

    Returns:
        input_ids, labels (not shifted: the model does that) and position_ids, int64 [1, tokens];
        cu_seq_lens_q and cu_seq_lens_k, int32 [documents + 1]; max_length_q and max_length_k, ints;
        seq_idx, the document of each token, int32 [1, tokens]. There is no attention_mask, which
        would make FlashAttention ignore the rest.
    """
    one = _documents(batch)
    labels = np.append(IGNORED, one.labels[:-1])[: len(one.tokens)]
    edges = np.append(one.starts, len(one.tokens)).astype(np.int32)
    longest = int(one.lengths.max(initial=0))
    numbers, _ = spread(one.lengths)
    return {
        "input_ids": one.tokens[None],
        "labels": labels[None],
        "position_ids": one.positions[None],
        **{name: edges.copy() for name in ("cu_seq_lens_q", "cu_seq_lens_k")},
        **dict.fromkeys(("max_length_q", "max_length_k"), longest),
        "seq_idx": numbers.astype(np.int32)[None],
    }


def megatron_packed(batch: TokenBatch, *, sequence_length: int, pad_token: int = 0) -> Batch:
    """Rows for Megatron-LM's SFT and its inter-document masking.

    Padding belongs to the last document of its row.

    Returns:
        tokens, labels and position_ids, int64 [batch, sequence_length]; loss_mask, float32, 0 where
        the label, then 0, is of no document; cu_seqlens, int32 [batch, sequence_length + 1], filled
        up with sequence_length; max_seqlen, int32 [batch].
    """
    one, in_rows = _documents(batch), _row_filler(batch.sizes, sequence_length)
    is_target = one.labels != IGNORED
    edges = np.full((len(batch), sequence_length + 1), sequence_length, np.int32)
    edges[:, 0] = 0
    edges[one.samples, one.numbers] = one.firsts
    last_numbers = np.maximum(np.diff(batch.part_bounds), 1) - 1
    last_firsts = edges[np.arange(len(batch)), last_numbers]
    return {
        "tokens": in_rows(one.tokens, check_int("pad_token", pad_token, 0)),
        "labels": in_rows(np.where(is_target, one.labels, 0), 0),
        "loss_mask": in_rows(is_target, 0, np.float32),
        "position_ids": in_rows(one.positions, np.arange(sequence_length) - last_firsts[:, None]),
        "cu_seqlens": edges,
        "max_seqlen": np.diff(edges, axis=1).max(axis=1, initial=0),
    }


def megatron_thd(batch: TokenBatch, *, multiple: int = 1, pad_token: int = 0) -> dict[str, Any]:
    """One row for Megatron-LM's and Transformer Engine's "thd" format, each document padded.

    Args:
        batch: The token batch.
        multiple: Number of tokens to whose multiples documents are padded: 2 * context parallel
            size, times the tensor parallel size with sequence parallelism.
        pad_token: Token of the padding.

    Returns:
        tokens, labels and position_ids, int64 [tokens]; loss_mask, float32 [tokens]; cu_seqlens and
        cu_seqlens_padded, int32 [documents + 1], of the documents without and with padding;
        max_seqlen, an int, of the padded ones; padding_mask, bool [1, tokens], true in padding.
    """
    multiple, pad_token = check_int("multiple", multiple, 1), check_int("pad_token", pad_token, 0)
    one = _documents(batch)
    padded = -(-one.lengths // multiple) * multiple
    edges, padded_edges = (np.append(0, np.cumsum(counts)) for counts in (one.lengths, padded))
    documents, positions = spread(padded)
    is_padding = positions >= one.lengths[documents]
    take = np.minimum(one.starts[documents] + positions, len(one.tokens) - 1)
    labels = np.where(is_padding, IGNORED, one.labels[take])
    return {
        "tokens": np.where(is_padding, pad_token, one.tokens[take]),
        "labels": np.where(labels == IGNORED, 0, labels),
        "loss_mask": (labels != IGNORED).astype(np.float32),
        "position_ids": positions,
        "cu_seqlens": edges.astype(np.int32),
        "cu_seqlens_padded": padded_edges.astype(np.int32),
        "max_seqlen": int(padded.max(initial=0)),
        "padding_mask": is_padding[None],
    }


def torchtitan(batch: TokenBatch, *, sequence_length: int) -> dict[str, Any]:
    """Rows for torchtitan: each document without its last token, which is only a label.

    Returns:
        input and positions, int64 [batch, sequence_length], and labels with IGNORED. Positions
        restart at each document; the padding, of token 0, is one more document.
    """
    one = _documents(batch)
    keep = np.ones(len(one.tokens), np.bool_)
    keep[one.starts + one.lengths - 1] = False
    sizes = batch.sizes - np.diff(batch.part_bounds)
    in_rows = _row_filler(sizes, sequence_length)
    padding = np.arange(sequence_length) - sizes[:, None]
    return {
        "input": in_rows(one.tokens[keep], 0),
        "positions": in_rows(one.positions[keep], padding),
        "labels": in_rows(one.labels[keep], IGNORED),
    }


def document_starts(batch: TokenBatch, *, sequence_length: int) -> Batch:
    """What masks of flex attention need.

    Returns:
        document_ids, the document of each token in its row, and starts, the first token of that
        document, both int32 [batch, sequence_length]; padding is a document of its own.
    """
    one = _documents(batch)
    _check_length(batch.sizes, sequence_length)
    starts = np.zeros((len(batch), sequence_length), np.int32)
    starts[one.samples, one.firsts] = one.firsts
    has_padding = np.flatnonzero(batch.sizes < sequence_length)
    starts[has_padding, batch.sizes[has_padding]] = batch.sizes[has_padding]
    return {
        "document_ids": np.cumsum(starts > 0, axis=1, dtype=np.int32),
        "starts": np.maximum.accumulate(starts, axis=1),
    }


def mask_blocks(starts: NDArray[np.int32], block_size: int = 128) -> Batch:
    """The blocks of flex attention's causal mask within documents, from `document_starts`.

    A query block sees the key blocks from the first token of its first document on. A block is full
    if its queries all see all its keys; the others are masked token by token. Equal to
    `torch.nn.attention.flex_attention.create_block_mask`, at the cost of its blocks.

    Returns:
        kv_num_blocks and full_kv_num_blocks [batch, 1, blocks], kv_indices and full_kv_indices
        [batch, 1, blocks, blocks], int32, as `BlockMask.from_kv_blocks` takes them; the blocks that
        are not counted follow in ascending order.
    """
    num_rows, length = starts.shape
    check_int("block_size", block_size, 1)
    if length % block_size != 0:
        raise ConfigError(f"rows of {length} tokens must be a multiple of {block_size}")
    size = length // block_size
    blocks = starts.reshape(num_rows, size, block_size)
    queries, keys = np.arange(size)[:, None], np.arange(size)
    # Starts ascend, so a block's first query sees the furthest back, and its last one the least.
    first_seen = blocks[:, :, 0, None] // block_size
    is_seen = (keys >= first_seen) & (keys <= queries)
    is_seen_whole = (keys + 1) * block_size - 1 <= queries * block_size  # by the first query
    is_full = (blocks[:, :, -1, None] <= keys * block_size) & is_seen_whole
    answer: Batch = {}
    # Reshaped, not `[:, None]`: flex attention's kernel goes from row to row by the stride of the
    # second axis, which is 0 there, so that all rows would have the blocks of the first.
    for prefix, marks in (("", is_seen & ~is_full), ("full_", is_full)):
        order = np.argsort(~marks, axis=-1, kind="stable").astype(np.int32)
        counts = marks.sum(axis=-1, dtype=np.int32)
        answer[f"{prefix}kv_num_blocks"] = counts.reshape(num_rows, 1, size)
        answer[f"{prefix}kv_indices"] = order.reshape(num_rows, 1, size, size)
    return answer
