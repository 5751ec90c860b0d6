"""The datasets of a run in the instant order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from millrace.cache import arrays
from millrace.checks import MAX_INT64
from millrace.deferred import cached_property
from millrace.errors import ConfigError
from millrace.order import RULES_VERSION, SPLITS, Spans
from millrace.order.instant import InstantOrder, MixedOrder, num_windows
from millrace.order.mixture_tree import ONE
from millrace.order.phases import Phase, Phases
from millrace.order.splits import Range
from millrace.provenance.tokenizers import TokenizerRecord
from millrace.run.instant_config import InstantConfig, check_starts
from millrace.run.instant_files import SourceFile, SourceRange, ranges_of
from millrace.run.skips import Skips
from millrace.samples import BlendedDataset, GPTDataset, TokenBatch, TokenDataset
from millrace.samples.dataset import check_numbers
from millrace.samples.fields import Batch, BatchForm, SampleOptions
from millrace.samples.stored import Sources
from millrace.samples.tokens import Numbers

_MOST_NAMES = 64  # sources whose shares and files a fingerprint lists; of more it has checksums


class PhasedDataset(TokenDataset):
    """Samples of a run in phases, in the instant order: nothing is built, and no file opened before
    a sample is drawn from it.

    Sample p of the dataset is the p-th one that no skip leaves out. All samples of a batch have one
    sequence length.

    Args:
        ranges: Tokens to draw from, by the names of sources.
        phases: Phases by their starts.
        config: The configuration of the run.
        skips: Samples that are left out.
        num_samples: Number of samples; None: without end.

    Attributes:
        stores: The token file of each source, by their names' order; `dataset_numbers` and
            `part_source` count them.
    """

    _place = "{samples} of the run"

    def __init__(
        self,
        ranges: Mapping[str, SourceRange],
        phases: Sequence[Phase],
        config: InstantConfig,
        skips: Skips,
        num_samples: int | None,
    ) -> None:
        self._ranges = {name: ranges[name] for name in sorted(ranges)}
        self._phases, self._config, self._skips = phases, config, skips
        most = MAX_INT64 - skips.num_samples
        self._num_samples = most if num_samples is None else min(num_samples, most)
        self.stores: Sequence[Any] = [one.file for one in self._ranges.values()]
        lengths = [phase.sequence_length for phase in phases]
        changes = [n for n, length in enumerate(lengths) if n == 0 or length != lengths[n - 1]]
        self._starts = [phases[number].start for number in changes]
        views = [replace(config.sample_options, sequence_length=lengths[n]) for n in changes]
        self._segments = [_Segment(self, number, view) for number, view in enumerate(views)]
        self.options = views[0] if len(views) == 1 else None
        self.source, self.transforms = None, []
        self._shares: dict[int, Any] = {}  # of each stretch, for fingerprints

    @property
    def prefix(self) -> str:
        return type(self).__name__

    def __len__(self) -> int:
        return self._num_samples

    @cached_property
    def mixture(self) -> Phases:
        """Which source, and which of its draws, each sample number is."""
        return Phases(self._ranges, self._phases)  # type: ignore[arg-type]

    # ---- batches ----

    def run_numbers(self, numbers: Numbers) -> Numbers:
        """The sample numbers of the run, skipped ones included, of samples of the dataset."""
        return self._skips.samples(numbers)

    def located(self, numbers: Numbers) -> tuple["_Segment", Numbers]:
        """The sample numbers at some positions, and what they are in."""
        samples = self._skips.samples(numbers)
        if len(self._starts) == 1 or len(samples) == 0:
            return self._segments[0], samples
        first, last = np.searchsorted(self._starts, [samples.min(), samples.max()], "right") - 1
        if first < last:
            raise ConfigError(
                f"samples {samples.min()} to {samples.max()} are of two sequence lengths: a phase "
                f"starts at {self._starts[last]}. Start it with a batch of this loader"
            )
        return self._segments[first], samples

    def check_steps(self, sampler: Any) -> None:
        """Raises ConfigError where another sequence length starts in the middle of a step."""
        if getattr(sampler, "step_at", None):
            check_starts(
                self._phases,
                self._skips,
                lambda position: sampler.has_step(position) and sampler.step_at(position),
            )

    def _batch(self, numbers: Numbers, form: BatchForm | None) -> Batch:
        segment, samples = self.located(numbers)
        return segment._batch(samples, form)

    def _tokens(self, numbers: Numbers) -> TokenBatch:
        segment, samples = self.located(numbers)
        return segment._tokens(samples)

    def _read_alone(self, read: Any, number: Numbers, *form: Any) -> None:
        segment, sample = self.located(number)
        segment._read_alone(read, sample, *form)

    def spans(self, sample_numbers: ArrayLike) -> Spans:
        """Which tokens the samples are made of; each source numbers sequences of its own."""
        segment, samples = self.located(check_numbers(sample_numbers, len(self)))
        return segment.spans(samples)

    def sources_of(self, numbers: Numbers) -> Sources:
        segment, samples = self.located(numbers)
        return segment.sources_of(samples)

    def prefetch(self, sample_numbers: ArrayLike) -> None:
        samples = self._skips.samples(check_numbers(sample_numbers, len(self)))
        segments = np.searchsorted(self._starts, samples, "right") - 1  # these may be several steps
        for number in np.unique(segments).tolist():
            self._segments[number].prefetch(samples[segments == number])

    def find(self, source: int, tokens: Range, stop: int) -> Iterator[Numbers]:
        """The samples before one that may hold some tokens of a source: see `InstantOrder.find`."""
        for stretch, end in self.mixture.stretches(stop):
            leaf, size = int(np.searchsorted(stretch.sources, source)), min(end, stop)
            if source not in stretch.sources[leaf : leaf + 1]:
                continue
            size -= stretch.start
            first = int(stretch.drawn[leaf])
            # No more than that are drawn: in a stretch, the limit is 3.4 more than the share.
            last = first + stretch.shares[leaf] * size // ONE + 5
            dataset = self._segments[self.mixture.segments[stretch.phase]].datasets[source]
            for draws in dataset.order.find(tokens, (first, last)):
                samples = (stretch.tree.find(leaf, draw - first) for draw in draws.tolist())
                places = np.fromiter(samples, np.int64)
                yield stretch.start + places[places < size]

    def unskipped(self) -> tuple["PhasedDataset", Skips]:
        """The same run, without end, in which no sample is left out; and what was."""
        whole = type(self)(self._ranges, self._phases, self._config, Skips([]), None)
        return whole, self._skips

    def make_dataset(self, segment: int, options: SampleOptions, number: int) -> GPTDataset:
        """The samples of a source in a part of the run with one sequence length."""
        name = self.mixture.names[number]
        source = self._ranges[name]
        first, end = source.tokens
        kind: Any = InstantOrder
        if source.mix_window > 1:
            sequences_in = source.file.sequences_in
            kind = partial(MixedOrder, mix_window=source.mix_window, sequences_in=sequences_in)
        order = kind(
            end - first,
            name,
            self._config.seed,
            sequence_length=options.sequence_length,
            add_extra_token=options.add_extra_token,
            first_token=first,
            position=self.mixture.position(segment, number),
        )
        choice = self._config.loss_ranges
        return GPTDataset(source.file.store, order=order, options=options, loss_ranges=choice)

    # ---- the past ----

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """See `Dataset`: what decides the past, by phases and sources, and how samples look."""
        view = self._config.sample_options.identity()
        for name in ("sequence_length", "add_extra_token"):
            del view[name]
        if self._config.loss_ranges == "apply":
            view["loss_ranges"] = "apply"
        return {
            "kind": "instant",
            "rules": RULES_VERSION,
            "seed": self._config.seed,
            "add_extra_token": self._config.add_extra_token,
            **self._past(len(self) if consumed_samples is None else consumed_samples),
            "view": view,
        }

    def _past(self, consumed_samples: int) -> dict[str, Any]:
        if consumed_samples == 0:
            return {"phases": {}, "skips": [], "sources": {}}
        end = int(self._skips.samples(np.array([consumed_samples - 1]))[0]) + 1
        phases: dict[str, Any] = {}
        for start, number in self.mixture.past(end):
            if start not in self._shares:  # 10 ms for thousands of sources
                stretch = self.mixture.stretch_of(start)
                pairs = zip(stretch.names, stretch.shares, strict=True)
                shares = {name: q / ONE for name, q in pairs}
                is_long = len(shares) > _MOST_NAMES
                self._shares[start] = arrays.fingerprint(shares) if is_long else shares
            phases[f"{number} from sample {start}"] = {
                "sequence_length": self.mixture.length_of(number),
                "shares": self._shares[start],
            }
        drawn = self.mixture.drawn_before(end)
        sources: Any = {name: one.identity for name, one in self._ranges.items() if name in drawn}
        if len(sources) > _MOST_NAMES:
            sources = {name: arrays.fingerprint(one)[:16] for name, one in sources.items()}
        skips = self._skips.before(consumed_samples)
        return {"phases": phases, "skips": skips, "sources": sources}


class _HeldOutDataset(PhasedDataset):
    """Validation or test, in one phase, of the sources that have tokens for a sample. All files are
    opened for it, at the first sample."""

    @cached_property
    def mixture(self) -> Phases:
        (phase,) = self._phases
        length = phase.sequence_length
        weights = {
            name: weight
            for name, weight in phase.weights.items()
            if num_windows(self._ranges[name].num_tokens, length) > 0
        }
        if not weights:
            raise ConfigError(
                f"no source has {2 * length} tokens in this split, which a sample of {length} "
                "needs: give the split a larger share"
            )
        return Phases(self._ranges, [replace(phase, weights=weights)])  # type: ignore[arg-type]


class _Segment(BlendedDataset):
    """A part of a run with one sequence length, by sample numbers."""

    _place = PhasedDataset._place
    _has_one_kind_of_boundaries = True

    def __init__(self, run: PhasedDataset, number: int, options: SampleOptions) -> None:
        self._run, self.options, self.stores = run, options, run.stores
        self._first_stores = np.arange(len(run.stores), dtype=np.int32)
        self.datasets: Any = _OnDemand(len(run.stores), partial(run.make_dataset, number, options))
        self.source, self.transforms = None, []

    @property
    def order(self) -> Any:
        return self._run.mixture

    def __len__(self) -> int:
        return MAX_INT64

    def _draws(self, sample_numbers: Numbers) -> Any:
        if len(sample_numbers) > 0:
            return super()._draws(sample_numbers)
        # The first of all sources may have too few tokens for a sample, or no file any more.
        first = int(self.order.stretch_of(0).sources[0])
        return sample_numbers, [(first, self.datasets[first], sample_numbers, sample_numbers)]

    def sources_of(self, numbers: Numbers) -> Sources:
        sources: Sources = {}
        for number, dataset, in_dataset, _ in self._draws(numbers)[1]:
            [sources[self.order.names[number]]] = dataset.sources_of(in_dataset).values()
        return sources


class _OnDemand:
    """A list of datasets, each of which is made when it is asked for."""

    def __init__(self, size: int, make: Any) -> None:
        self._size, self._make = size, make
        self._datasets: dict[int, GPTDataset] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _OnDemand, (self._size, self._make)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> GPTDataset:
        if number not in self._datasets:
            self._datasets[number] = self._make(number)
        return self._datasets[number]


def instant_datasets(config: InstantConfig) -> list[PhasedDataset | None]:
    """The train, valid and test datasets of a configuration; None for a split without a share.

    It looks at the size of each file, and opens none whose dtype the configuration gives.
    """
    tokenizers: list[TokenizerRecord] = []
    files = {
        name: SourceFile(name, source, config, tokenizers)
        for name, source in config.sources.items()
    }
    phases = config.run_phases({name: file.part[1] - file.part[0] for name, file in files.items()})
    ranges = {name: ranges_of(file, config.sources[name], config) for name, file in files.items()}
    datasets: list[PhasedDataset | None] = []
    for number, count in enumerate(config.num_samples):
        own = {name: one for name, each in ranges.items() if (one := each[number]) is not None}
        if not own:
            datasets.append(None)
        elif SPLITS[number] == "train":
            train = PhasedDataset(own, phases, config, Skips(config.skips), count)
            _ = train.mixture  # an error now, not at the first sample
            datasets.append(train)
        else:
            datasets.append(_HeldOutDataset(own, phases[:1], config, Skips([]), count))
    return datasets
