"""Datasets: sample numbers in, the arrays of a batch out."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import check_int, check_ints, shown
from millrace.deferred import cached_property
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.samples.fields import Batch, BatchForm, SampleOptions
from millrace.samples.rows import mask_losses, rows
from millrace.samples.stored import Leaves, Sources, StoredTokens, documents_of, gather
from millrace.samples.tokens import (
    Numbers,
    TokenBatch,
    TokenSource,
    check_tokens,
    fingerprint_of,
    split_at_eod,
    without_parts,
)
from millrace.samples.transforms import check_transforms, transformed

_MOST_AHEAD = 1 << 25  # tokens of samples that a storage is told of; it keeps 2**28 bytes of a file


class Dataset(Protocol):
    """Finished rows by sample number: what a blend and a loader need at least.

    With `takes_form = True`, `batch` has a second argument `form`, a `BatchForm` or None, and
    returns the arrays of that form; else its arrays are always the same. `prefix` names the dataset
    in messages. A loader logs at a resume that `plan_checksum`, a text, has changed.
    """

    def __len__(self) -> int:
        """The number of samples."""

    def batch(self, sample_numbers: ArrayLike) -> Batch:
        """The samples of these numbers: arrays by name, one row for each sample."""

    def fingerprint(self) -> dict[str, Any]:
        """What decides the samples, as plain values, for comparison with a saved state.

        A loader takes strings, numbers but NaN, None, lists, and dicts with strings as keys. An
        entry "view", wherever it stands, holds what changes masks and padding alone: a loader warns
        if it has changed, and refuses all other changes. The method may take an argument
        `consumed_samples`: see `TokenSource.fingerprint`.
        """


class TokenDataset:
    """Rows made of the tokens of any source; also a source, of the transformed tokens.

    Args:
        source: Where the tokens come from.
        options: What a sample looks like.
        transforms: Functions of the token batch, applied in their order (see `Transform`).

    Attributes:
        source: Where the tokens come from.
        options: What a sample looks like; None: the datasets of a blend differ in it.
        all_options: The options in a list; in such a blend those of its datasets.
        transforms: The transforms.

    Raises:
        ConfigError: A source without tokens, or transforms that cannot work.
    """

    takes_form = True
    _has_options_of_source = False  # whose fingerprint has them

    def __init__(
        self, source: TokenSource, options: SampleOptions | None, transforms: Iterable[Any] = ()
    ) -> None:
        if not isinstance(source, StoredTokens | TokenSource):  # a protocol's check takes 15 us
            name = type(source).__name__
            remedy = "of a stream, give its Loader a `transform`, or make a TextDataset"
            raise ConfigError(f"a {name} has no method `tokens`, of a TokenSource: {remedy}")
        self.source: Any = source
        self.options = options
        boundaries = "" if options is None else options.boundaries
        self.transforms = check_transforms(source, transforms, boundaries)
        inner = getattr(source, "all_options", [None])
        self.all_options: Sequence[Any] = inner if options is None else [options]
        # What `part_source` counts: the stored tokens, None for other sources.
        self.stores: Sequence[Any] = getattr(source, "stores", (None,))
        self._inputs: Sequence[Any] = [source]  # that prefetch

    @property
    def prefix(self) -> str:
        """The dataset's name in messages."""
        return name_of(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, sample_number: SupportsIndex) -> Batch:
        """One sample: the arrays of `batch` without their first dimension."""
        number = check_int("the sample number", sample_number)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"there is no sample {shown(number)} in 0 to {len(self) - 1}")
        return {name: array[0] for name, array in self.batch([number]).items()}

    def batch(self, sample_numbers: ArrayLike, form: BatchForm | None = None) -> Batch:
        """The samples of these numbers.

        Args:
            sample_numbers: Integers [batch], each in [0, len): a list, or an array of any integer
                dtype, byte order and stride.
            form: Which arrays the batch has. None: `tokens` int64, `labels` int64, `loss_mask`
                float32 and `position_ids` int64, each [batch, sequence_length].

        Returns:
            The arrays by name, which are the caller's own.

        Raises:
            ConfigError: Sample numbers that are not integers, or have another shape; another form;
                a field or a dtype that the tokens do not give.
            IndexError: No such sample.
            DataError: An index entry that points outside the token file, or a token id that does
                not fit the vocabulary or dtype of the form; the message names file and sample.
        """
        if form is not None and not isinstance(form, BatchForm):
            raise ConfigError(f"form is {shown(form)}; give a BatchForm, or None for all fields")
        batch: Batch = self._named(self._batch, sample_numbers, form)
        return batch

    def tokens(self, sample_numbers: ArrayLike) -> TokenBatch:
        """The transformed tokens of the samples of these numbers.

        They include the extra token. Nothing is padded or masked: a last partial sample is shorter
        than the others.

        Raises:
            ConfigError, IndexError, DataError: As `batch`.
        """
        batch: TokenBatch = self._named(self._tokens, sample_numbers)
        options = self.options
        eod = options.eod_token if options and options.boundaries == "eod" else None
        if batch.part_starts is None and eod is not None:
            batch = split_at_eod(batch, eod)
        numbers = self.run_numbers(np.array(sample_numbers, np.int64))
        return batch.with_field("sample_numbers", "sample", numbers)

    def spans(self, sample_numbers: ArrayLike) -> Any:
        """The `Spans` that the samples of these numbers are made of, not yet transformed.

        It raises the errors of `batch`, and AttributeError if the source has no `spans`.
        """
        return self.source.spans(check_numbers(sample_numbers, len(self)))

    def run_numbers(self, numbers: Numbers) -> Numbers:
        """The numbers that transforms see: those of a run, where its dataset leaves samples out."""
        inner = getattr(self.source, "run_numbers", None)
        return numbers if inner is None else inner(numbers)

    def _batch(self, numbers: Numbers, form: BatchForm | None) -> Batch:
        options = self.options
        if options is None:
            raise ConfigError("a dataset of tokens needs options: give SampleOptions")
        leaves = self.leaves(numbers) if options.boundaries == "eod" else None
        if leaves is not None:
            return gather(leaves, options, form, numbers)
        return rows(self._tokens_for(numbers, form), options, form)

    def sources_of(self, numbers: Numbers) -> Sources:
        """What some samples are drawn from."""
        inner = getattr(self.source, "sources_of", None)
        return {} if inner is None else inner(numbers)

    def leaves(self, numbers: Numbers) -> Leaves | None:
        """The samples for one call of the core; None if the core cannot read them."""
        is_stored = isinstance(self.source, StoredTokens) and not self.transforms
        return self.source.leaves(numbers) if is_stored else None

    def _tokens_for(self, numbers: Numbers, form: BatchForm | None) -> TokenBatch:
        """The tokens, with what a form needs."""
        batch = self._tokens(numbers)
        if form is None:
            return batch
        if "sample_numbers" in form.fields:
            own = self.run_numbers(numbers).copy()
            batch = batch.with_field("sample_numbers", "sample", own)
        sequences, sources = batch.part_sequence, batch.part_source
        if "document_numbers" in form.fields and sequences is not None:
            documents = documents_of(self.stores, 0 if sources is None else sources, sequences)
            batch = batch.with_field("document_numbers", "part", documents)
        if form.token_dtype == "file" and self.file_dtype is not None:
            tokens, limits = batch.tokens, np.iinfo(self.file_dtype)
            if np.any((tokens < limits.min) | (tokens > limits.max)):
                raise ConfigError(
                    f"the transformed tokens go from {tokens.min()} to {tokens.max()}; the file's "
                    f"dtype is {self.file_dtype}. Pass token_dtype='int32' or 'int64'"
                )
            batch = batch.with_arrays(tokens=tokens.astype(self.file_dtype, copy=False))
        return batch

    def _tokens(self, numbers: Numbers) -> TokenBatch:
        name, tokens = f"{type(self.source).__name__}.tokens", self.source.tokens(numbers)
        batch = check_tokens(name, tokens, len(numbers))
        is_by_eod = self.options is None or self.options.boundaries == "eod"
        if not is_by_eod and isinstance(self.source, StoredTokens) and batch.part_sequence is None:
            raise ConfigError("documents are not known: the order must return spans of sequences")
        for transform in self.transforms:
            if transform.changes_tokens and is_by_eod:
                batch = without_parts(batch)  # EOD tells documents apart, where it is now
            batch = transformed(transform, batch, self.run_numbers(numbers))
        return batch

    def _named(self, read: Callable[..., Any], sample_numbers: ArrayLike, *form: Any) -> Any:
        """What a method reads; an error names the first sample that cannot be read."""
        numbers = check_numbers(sample_numbers, len(self))
        try:
            return read(numbers, *form)
        except ConfigError:  # of the call, not of a sample
            raise
        except (MillraceError, OSError) as error:
            samples, found = f"samples {shown(numbers.tolist())}", error
            for number in numbers.tolist():
                try:
                    self._read_alone(read, np.array([number]), *form)
                except (MillraceError, OSError) as its_error:
                    samples, found = f"sample {number}", its_error
                    break
            place = f"{self.prefix}, {samples}"
            if isinstance(found, OSError):
                raise OSError(found.errno, f"{place}: {found.strerror or found}") from None
            raise type(found)(f"{place}: {found}") from None

    def _read_alone(self, read: Callable[..., Any], number: Numbers, *form: Any) -> None:
        read(number, *form)

    @cached_property
    def file_dtype(self) -> np.dtype[Any] | None:
        """The dtype of the token files; None without token files.

        Raises:
            ConfigError: Token files of several dtypes.
        """
        stores = [one for one in self.stores if one is not None]
        # The dtype of a source that is not open is known, too.
        prefixes = {getattr(one, "dtype", None) or one.store.dtype: one.prefix for one in stores}
        if len(prefixes) > 1:
            some = ", ".join(f"{prefix} {dtype}" for dtype, prefix in prefixes.items())
            raise ConfigError(f"the files have several dtypes ({some}): use 'int32' or 'int64'")
        return next(iter(prefixes), None)

    @property
    def is_remote(self) -> bool:
        """Whether `prefetch` helps: for files elsewhere, or samples that are made together."""
        return any(getattr(one, "is_remote", False) for one in self._inputs)

    @property
    def look_ahead(self) -> int:
        """Number of samples to announce, for storage that serves them side by side."""
        longest: int = max([one.sequence_length for one in self.all_options if one], default=1)
        most = max(_MOST_AHEAD // longest, 1)
        return min(max([getattr(one, "look_ahead", 0) for one in self._inputs]), most)

    def prefetch(self, sample_numbers: ArrayLike) -> None:
        """Tells the storage, or the source, that these samples are read soon, without waiting.

        It raises the errors of `batch`.
        """
        numbers = check_numbers(sample_numbers, len(self))
        if hasattr(self.source, "prefetch"):
            self.source.prefetch(numbers)

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """See `Dataset.fingerprint`.

        All transforms belong to the view, as do the options that the source does not name; those
        that change tokens belong to the order, too.
        """
        fingerprint = fingerprint_of(self.source, consumed_samples)
        if self.options is not None and not self._has_options_of_source:
            values = self.options.identity().items()
            view = {name: value for name, value in values if name not in fingerprint}
            fingerprint["view"] = view
        if order := [one.fingerprint() for one in self.transforms if one.changes_tokens]:
            fingerprint["transforms"] = order
        if entries := [one.fingerprint() for one in self.transforms]:
            fingerprint["view"] = {**fingerprint.get("view", {}), "transforms": entries}
        return fingerprint


class TransformedDataset(TokenDataset):
    """A dataset whose samples are transformed.

    Rows are made of the transformed tokens by the options of the dataset; if it has none, they are
    its own. The loss mask is 0 wherever the label is a token that is not trained on.

    Args:
        dataset: `GPTDataset`, `BlendedDataset`, or another dataset with a method `tokens` and, if a
            transform changes tokens, with `options`.
        transforms: `LossRanges`, `FillInMiddle`, `RepeatGuard` or others (see `Transform`), applied
            in their order.

    Raises:
        ConfigError: A dataset or transform that lacks what is needed, or transforms in an order
            that cannot work.
    """

    _has_options_of_source = True

    def __init__(self, dataset: Any, transforms: Iterable[Any]) -> None:
        if isinstance(dataset, TransformedDataset):
            raise ConfigError("the dataset is transformed already: give all transforms in one list")
        super().__init__(dataset, getattr(dataset, "options", None), transforms)
        self.dataset = dataset
        self.check_steps: Any = getattr(dataset, "check_steps", None)  # see `PhasedDataset`
        self._moves_tokens = any(one.changes_tokens for one in self.transforms)
        if self._moves_tokens and self.options is None:
            why = "a transform that changes tokens needs options, the same for all samples"
            raise ConfigError(f"{why}: transform each dataset of the blend alone")

    def _batch(self, numbers: Numbers, form: BatchForm | None) -> Batch:
        has_mask = form is None or "loss_mask" in form.fields
        if self.options is not None and (self._moves_tokens or has_mask):
            return super()._batch(numbers, form)
        batch = batch_of_form(self.dataset, numbers, form)
        if not has_mask:
            return batch
        # The dataset may keep the dict that it returned.
        return {**batch, "loss_mask": mask_losses(batch["loss_mask"], self._tokens(numbers))}


def is_ours(dataset: Any) -> bool:
    """Whether a dataset's rows are made of its tokens, by no method of a derived class."""
    kind = type(dataset)
    return (
        isinstance(dataset, TokenDataset)
        and kind.batch is TokenDataset.batch
        and kind.tokens is TokenDataset.tokens
        and not {"batch", "tokens"} & vars(dataset).keys()
    )


def name_of(dataset: Any) -> str:
    """A dataset's name in messages."""
    return str(getattr(dataset, "prefix", type(dataset).__name__))


def batch_of_form(dataset: Any, numbers: Numbers, form: BatchForm | None) -> Batch:
    """A batch of a form, of any dataset."""
    takes_form = form is not None and getattr(dataset, "takes_form", False)
    batch: Batch = dataset.batch(numbers, form) if takes_form else dataset.batch(numbers)
    if form is None or takes_form:
        return batch
    owner = name_of(dataset)
    if missing := [name for name in form.fields if name not in batch]:
        names = ", ".join(missing)
        raise ConfigError(f"{owner} returns {', '.join(batch)}; it has no {names}: leave it out")
    selected: Batch = {name: np.asarray(batch[name]) for name in form.fields}
    for name in ("tokens", "labels"):
        if name in selected:
            selected[name] = converted(f"{owner} returned {name}", selected[name], form)
    return selected


def converted(place: str, tokens: NDArray[Any], form: BatchForm) -> NDArray[Any]:
    if tokens.dtype.kind not in "iu":
        raise DataError(f"{place} as {tokens.dtype}; integers are needed")
    dtype = tokens.dtype if form.token_dtype == "file" else np.dtype(form.token_dtype)
    least, limit = np.iinfo(dtype).min, np.iinfo(dtype).max + 1
    if form.vocab_size is not None:
        least, limit = 0, min(form.vocab_size, limit)
    bad = tokens[(tokens < least) | (tokens > limit - 1)]
    if bad.size > 0:
        raise DataError(f"{place} with token id {bad[0]}, which is outside [{least}, {limit})")
    return tokens.astype(dtype, copy=False)


def check_numbers(values: ArrayLike, limit: int, name: str = "sample numbers") -> Numbers:
    """Numbers of samples, or of rows, as int64 [n]; an IndexError for those outside [0, limit)."""
    numbers = check_ints(name, values)
    # Python finds the ends of a short list in a fifth of NumPy's time.
    ends = numbers.tolist() if numbers.size <= 64 else [numbers.min(), numbers.max()]
    if ends and not 0 <= min(ends) <= max(ends) < limit:
        asked = f"{name} from {numbers.min()} to {numbers.max()}"
        raise IndexError(f"{asked} were asked for; there are {limit}, from 0 on")
    return numbers
