"""From a sample of a run to its documents, and from a document to its samples.

Nothing is logged while a run trains: what it draws follows from its file and its data.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import MAX_INT64, check_int, check_ints, printable, printable_lines, shown
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError, MillraceError
from millrace.inspect.description import format_origin
from millrace.provenance import read_tokenizer
from millrace.run.arguments import read_run, schedule_from
from millrace.run.build import build_datasets
from millrace.run.phased_dataset import PhasedDataset
from millrace.run.skips import Skips
from millrace.samples import BlendedDataset, TransformedDataset
from millrace.sampling import BatchSizeSchedule, GlobalBatchSampler
from millrace.store import IndexedDataset

_CHUNK_SIZE = 1 << 16  # samples that are looked at together


@dataclass(frozen=True, kw_only=True)
class TracedPart:
    """Neighbouring tokens of a sample that come from one sequence of a token file.

    Attributes:
        source: Name of the source; in Megatron-LM's order the prefix of the token file.
        document, sequence: Numbers in the token file.
        start, stop: Range of the tokens in the document.
        origin: The document's `Origin`, by name; None: the token file has no origins.
        tokens: The tokens.
        trained: Whether each token is trained on: as a label, with a loss.
        texts: The decoded tokens: pairs (trained, text) in turn. None: no tokenizer is known.
    """

    source: str
    document: int
    sequence: int
    start: int
    stop: int
    origin: dict[str, Any] | None
    tokens: list[int]
    trained: list[bool]
    texts: list[tuple[bool, str]] | None


@dataclass(frozen=True, kw_only=True)
class Visit:
    """When a sample is drawn.

    Attributes:
        sample: Its number, which skips do not move.
        position: Number of samples that are consumed before it; None: it is skipped.
        step: The step that takes it; None: it is skipped, or steps are not known.
        source, document: The document that was looked for, if one was.
        parts: What the sample is made of, if that was asked for.
    """

    sample: int
    position: int | None = None
    step: int | None = None
    source: str | None = None
    document: int | None = None
    parts: Sequence[TracedPart] = ()

    def __str__(self) -> str:
        if self.position is None:
            return f"sample {self.sample}, skipped"
        step = "" if self.step is None else f", step {self.step}"
        return f"sample {self.sample}, position {self.position}{step}"


class Trace:
    """What a split of a run draws, computed when it is asked for.

    Args:
        dataset: The samples of the split, as of `build_datasets`.
        schedule: Global batch sizes by which samples have steps; None: steps are not known.
        micro_batch_size: Number of samples of a rank's micro batch; None: not known.
        tokenizer: Tokenizer for the texts; None: the one that the sidecar of a token file names.
        num_samples: Number of samples that the run takes of the dataset; None: all of them.

    Attributes:
        names: Names of the sources, as in `TracedPart`.
        num_samples: Number of samples, the skipped ones among them.

    Raises:
        ConfigError: In all methods, what the run does not have.
        DataError: In all methods, files that are damaged, or not what they were.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        schedule: BatchSizeSchedule | None = None,
        micro_batch_size: int | None = None,
        tokenizer: Tokenizer | None = None,
        num_samples: int | None = None,
    ) -> None:
        stores = getattr(dataset, "stores", (None,))
        inner = getattr(dataset, "datasets", stores)
        if None in stores or len(inner) < len(stores) or isinstance(dataset, TransformedDataset):
            raise ConfigError(
                "datasets of token files, and blends of these, can be traced, not a "
                f"{type(dataset).__name__} of others: leave out transforms and inner blends"
            )
        self._schedule, self._micro_batch_size = schedule, micro_batch_size
        self._tokenizer, self._skips = tokenizer, Skips([])
        self._decoder, self._load = functools.cache(self._read_decoder), functools.cache(Tokenizer)
        self._num_positions = min(len(dataset), MAX_INT64 if num_samples is None else num_samples)
        if isinstance(dataset, PhasedDataset):
            dataset, self._skips = dataset.unskipped(), dataset.skips
            self.names = dataset.order.names
        else:
            self.names = [one.prefix for one in dataset.stores]
        self._dataset = dataset
        self.num_samples = self._skips.sample(self._num_positions - 1) + 1

    @classmethod
    def of(cls, run: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> "Trace":
        """The trace of the training of a run in a YAML or TOML file; see `Trace`."""
        values, config = read_run(run)
        dataset, most = build_datasets(config).train, config.num_samples[0]
        if not dataset or most == 0:
            raise ConfigError("the run has no samples to train on: give it some")
        # A sampler has steps of its own.
        schedule = schedule_from(values) if config.sampler is None else None
        options: Any = {"schedule": schedule, "micro_batch_size": values.get("micro_batch_size")}
        return cls(dataset, **options, tokenizer=tokenizer, num_samples=most)

    # ---- from samples to documents ----

    def sample(self, number: int) -> Visit:
        """A sample with its parts; a skipped one is what it would have been."""
        number = check_int("the sample", number, 0, self.num_samples - 1)
        batch = self._dataset.tokens([number])
        mask = self._dataset.batch([number])["loss_mask"][0]
        all_trained = np.append(False, mask > 0)[: len(batch.tokens)]
        zeros = np.zeros(len(batch.part_offset), np.int64)
        columns: Any = batch.part_source, batch.part_sequence, batch.part_offset
        columns = [(zeros if one is None else one).tolist() for one in columns]
        decoders = {source: self._decoder(source) for source in {*columns[0]}}
        parts, bounds = [], pairwise([*batch.part_starts.tolist(), len(batch.tokens)])
        for source, sequence, offset, bound in zip(*columns, bounds, strict=True):
            tokens, trained = batch.tokens[slice(*bound)], all_trained[slice(*bound)]
            store = self.store(source)
            document = int(store.documents_of(np.array([sequence]))[0])
            if isinstance(store, IndexedDataset):
                first, _ = store.check_documents(document, document + 1)
                start, end = store.check_sequences(first, sequence)  # bytes
                offset += (end - start) // store.dtype.itemsize
            part = TracedPart(
                source=self.names[source],
                document=document,
                sequence=sequence,
                start=offset,
                stop=offset + len(tokens),
                origin=self.origin(source, document),
                tokens=tokens.tolist(),
                trained=trained.tolist(),
                texts=_texts(decoders[source], tokens, trained),
            )
            parts.append(part)
        return self._visit(number, parts=parts)

    def step(self, number: int, rank: int | None = None, ranks: int = 1) -> list[int]:
        """The sample numbers of a step, of all ranks or of one."""
        size = 1 if rank is None else self._micro_batch_size
        if size is None:
            raise ConfigError("ranks need the micro_batch_size of the run: add it to its file")
        sampler = GlobalBatchSampler(
            self._num_positions,
            global_batch_size=self.schedule,
            micro_batch_size=size,
            data_parallel_rank=rank or 0,
            data_parallel_size=ranks,
        )
        consumed = self.schedule.consumed_at(number)
        if not sampler.has_step(consumed):
            last = sampler.num_steps() - 1
            raise ConfigError(f"there is no step {number}: give one up to {last}")
        numbers: list[int] = self._skips.samples(sampler.sample_numbers(consumed)).tolist()
        return numbers

    @property
    def schedule(self) -> BatchSizeSchedule:
        if self._schedule is None:
            raise ConfigError("steps are not known: give the run a global_batch_size, no sampler")
        return self._schedule

    def first_sample(self, step: int) -> int:
        """The sample number with which a step starts."""
        return self._skips.sample(self.schedule.consumed_at(step))

    def _read_decoder(self, source: int) -> Tokenizer | None:
        """The tokenizer of a source; None if it is not known, or no longer there."""
        store, tokenizer = self.store(source), self._tokenizer
        record = read_tokenizer(store.prefix, getattr(store, "storage", None))
        if record is None:
            return tokenizer
        if tokenizer is not None and not record.is_same([tokenizer.fingerprint]):
            wrong = f"{record} wrote {store.prefix}, not {tokenizer.path}"
            raise ConfigError(f"{wrong}: give another --tokenizer, or none")
        with contextlib.suppress(MillraceError, OSError):
            tokenizer = tokenizer or self._load(str(record.entry.get("path")))
            return tokenizer if record.is_same([tokenizer.fingerprint]) else None
        return None

    def _visit(self, sample: int, **fields: Any) -> Visit:
        position = self._skips.position(sample)
        if self._skips.sample(position) == sample:
            fields["position"] = position
            if self._schedule is not None:
                fields["step"] = self._schedule.num_steps(position + 1, drop_last=False) - 1
        return Visit(sample=sample, **fields)

    # ---- from documents to samples ----

    def store(self, source: int) -> Any:
        """The open token file of a source."""
        return self._dataset.stores[source].store

    def origin(self, source: int, document: int) -> dict[str, Any] | None:
        """Where a document came from; None without origins."""
        self._check_document(source, document)
        origin = getattr(self.store(source), "origin", lambda _: None)(document)
        return None if origin is None else dict(origin._asdict())

    def _check_document(self, source: int, document: int) -> None:
        store = self.store(source)
        count = store.num_documents if isinstance(store, IndexedDataset) else len(store)
        check_int(f"the document of {self.names[source]}", document, 0, count - 1)

    def sources(self, name: str) -> list[int]:
        """The numbers of the sources of a name; if there are none, of those that end with it."""
        for names in (self.names, [*map(os.path.basename, self.names)]):
            if name in names:
                return [number for number, one in enumerate(names) if name == one]
        raise ConfigError(f"there is no source {name}; there are {shown(self.names)}")

    def visits(self, source: str, documents: Any, until: int | None = None) -> Iterator[Visit]:
        """The samples with tokens of a document, or of several.

        Megatron-LM's order, and packs, are searched from the first sample on: about 1 million a
        second. In the instant order, the samples of a document come before those of the next one.

        Args:
            source: A name for `sources`.
            documents: Number of a document in the token file, or several numbers.
            until: Sample number at which to stop; None: the end of the run.
        """
        stop = self.num_samples if until is None else check_int("until", until, 0)
        stop = min(stop, self.num_samples)
        numbers = np.unique(check_ints("documents", np.atleast_1d(documents)))
        for place in self.sources(source):
            store = self.store(place)
            for document in numbers.tolist():
                self._check_document(place, document)
            for wanted, samples in self._candidates(place, numbers, stop):
                if len(samples) == 0:
                    continue
                sequences, _, _, bounds = self._dataset.spans(samples)
                owners = store.documents_of(sequences)
                here = np.flatnonzero(np.isin(owners, wanted))
                holders = np.repeat(samples, np.diff(bounds))[here].tolist()
                for sample, document in sorted({*zip(holders, owners[here].tolist(), strict=True)}):
                    yield self._visit(sample, source=self.names[place], document=document)

    def _candidates(
        self, source: int, documents: NDArray[np.int64], stop: int
    ) -> Iterator[tuple[Any, NDArray[np.int64]]]:
        """Some of the documents, and ascending samples before `stop` that may hold their tokens."""
        store, dataset = self.store(source), self._dataset
        if isinstance(dataset, PhasedDataset):
            for document in documents.tolist():
                sequences = store.check_documents(document, document + 1)
                start, end = store.check_sequences(*sequences)  # bytes
                tokens = start // store.dtype.itemsize, end // store.dtype.itemsize
                yield from ((document, one) for one in dataset.find(source, tokens, stop))
            return
        for first in range(0, stop, _CHUNK_SIZE):
            numbers = np.arange(first, min(first + _CHUNK_SIZE, stop))
            if isinstance(dataset, BlendedDataset):
                numbers = numbers[dataset.order.draws(numbers)[0] == source]
            yield documents, numbers


def _texts(decoder: Any, tokens: Any, trained: Any) -> list[tuple[bool, str]] | None:
    cuts = np.flatnonzero(np.diff(trained)) + 1
    runs = zip(np.split(trained, cuts), np.split(tokens, cuts), strict=True)
    return decoder and [(bool(one[0]), decoder.decode(ids)) for one, ids in runs]


def format_sample(visit: Visit) -> str:
    """A sample as text for people, with what is trained on in brackets."""
    trained = [one for part in visit.parts for one in part.trained]
    lines = [f"{visit}: {len(trained):,} tokens, {sum(trained):,} of them trained on"]
    for part in visit.parts:
        place = f"document {part.document}, tokens {part.start:,} to {part.stop:,}"
        lines.append(f"{printable(part.source)}: {place}")
        lines.append(f"  {format_origin(part.origin)}")
        marked = (f"⟦{text}⟧" if one else text for one, text in part.texts or ())
        texts = [*marked] or [f"{part.tokens} (--tokenizer FILE decodes it)"]
        lines += [f"  | {line}" for line in printable_lines("".join(texts)).splitlines()]
    return "\n".join(lines)
