"""The datasets of a run in the instant order."""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.cache import arrays
from millrace.checks import MAX_INT64
from millrace.deferred import cached_property
from millrace.errors import ConfigError
from millrace.order import RULES_VERSION
from millrace.order.instant import InstantOrder, num_windows
from millrace.order.phases import ONE, Phases
from millrace.order.splits import Range, split_ranges
from millrace.provenance.tokenizers import TokenizerRecord
from millrace.run.instant_config import InstantConfig
from millrace.run.instant_files import SourceFile, SourceRange
from millrace.run.skips import Skips
from millrace.samples import BlendedDataset, GPTDataset
from millrace.samples.fields import SampleOptions
from millrace.samples.stored import Sources
from millrace.samples.tokens import Numbers

_MOST_NAMES = 64  # sources whose shares and files a fingerprint lists; of more it has checksums


class PhasedDataset(BlendedDataset):
    """Samples of a run in phases, in the instant order: nothing is built, and no file opened before
    a sample is drawn from it.

    Sample p of the dataset is the p-th one that no skip leaves out. All samples of a batch have one
    sequence length.

    Args:
        ranges: Tokens to draw from, by the names of sources.
        phases: Phases, the first with the weights of all sources.
        config: The configuration of the run.
        num_samples: Number of samples; None: without end.
        is_training: Whether caps, skips and the mix window count. Else the sources without tokens
            for a sample are left out: the files are opened for it.

    Attributes:
        stores: The token file of each source, by their names' order; `dataset_numbers` and
            `part_source` count them.
        datasets: What a part of the run with one sequence length draws from a source: see
            `Phases.draws`.
        skips: The samples that are left out.
    """

    source, transforms = None, []  # as of a blend
    _inputs = property(lambda self: self.stores)  # `datasets` are made when they are drawn from

    def __init__(
        self,
        ranges: Mapping[str, SourceRange],
        phases: Sequence[Any],
        config: InstantConfig,
        num_samples: int | None,
        *,
        is_training: bool,
    ) -> None:
        self._ranges = {name: ranges[name] for name in sorted(ranges)}
        self._phases, self._config, self._is_training = phases, config, is_training
        self.skips = Skips(config.skips if is_training else ())
        most = MAX_INT64 - self.skips.num_samples
        self._num_samples = most if num_samples is None else min(num_samples, most)
        self.stores: Any = [one.file for one in self._ranges.values()]
        lengths = itertools.groupby(phase.sequence_length for phase in self._phases)
        look = config.sample_options
        self.all_options = [replace(look, sequence_length=length) for length, _ in lengths]
        self.options = self.all_options[0] if len(self.all_options) == 1 else None
        num_sources, num_views = len(self.stores), len(self.all_options)
        self.datasets: Any = _OnDemand(num_sources * num_views, self._make_dataset)
        self._first_stores = np.tile(np.arange(num_sources, dtype=np.int32), num_views)
        self._shares: dict[int, Any] = {}  # of each stretch, for fingerprints

    def __len__(self) -> int:
        return self._num_samples

    @cached_property
    def order(self) -> Phases:
        """Which dataset, and which of its samples, each sample number of the run is."""
        ranges, phase = self._ranges, self._phases[0]
        if self._is_training:
            caps = {name: source.max_epochs for name, source in self._config.sources.items()}
            own: Any = {"mix_window": self._config.mix_window, "position": self.skips.position}
            return Phases(ranges, self._phases, caps=caps, **own)
        length = phase.sequence_length
        weights = {
            name: weight
            for name, weight in phase.weights.items()
            if weight > 0 and num_windows(ranges[name].num_tokens, length) >= 1
        }
        if not weights:
            raise ConfigError(
                f"no source has {2 * length} tokens in this split, which a sample of {length} "
                "needs: give the split a larger share"
            )
        return Phases(ranges, [replace(phase, weights=weights)])

    @cached_property
    def plan_checksum(self) -> str:
        """A checksum of all that the run's file says to draw: what is to come of it may change."""
        phases = [[one.until, one.weights, one.sequence_length] for one in self._phases]
        caps = {name: one.max_epochs for name, one in self._config.sources.items()}
        return arrays.fingerprint([phases, caps, self.skips.ranges, len(self)])

    # ---- batches ----

    def run_numbers(self, numbers: Numbers) -> Numbers:
        """The sample numbers of the run, skipped ones included, of samples of the dataset."""
        return self.skips.samples(numbers)

    def check_steps(self, sampler: Any, consumed_samples: int) -> None:
        """Raises ConfigError where another sequence length will start in the middle of a step."""

        def check(position: int) -> None:
            if position > consumed_samples and sampler.has_step(position):
                for start in (position, consumed_samples):
                    sampler.step_at(start)

        if self._is_training and getattr(sampler, "step_at", None):
            self._config.check_starts(check)

    def _draws(self, numbers: Numbers) -> Any:
        if len(numbers) == 0:
            # The first of all sources may have too few tokens for a sample, or no file any more.
            first = int(self.order.stretch_of(0).sources[0])
            return numbers, [(first, self.datasets[first], numbers, numbers)]
        dataset_numbers, draws = super()._draws(numbers)
        return dataset_numbers % len(self.stores), draws  # sources, whatever the sequence length

    def _options_of(self, draws: Any) -> SampleOptions:
        if self.options is not None:
            return self.options
        first, last = (draws[place][0] // len(self.stores) for place in (0, -1))
        if first < last:
            lengths = [view.sequence_length for view in self.all_options[first:]]
            raise ConfigError(
                f"the batch has samples of {lengths[0]} and of {lengths[1]} tokens, as a phase "
                "starts in it: start that phase with a batch of this loader"
            )
        view: SampleOptions = self.all_options[first]
        return view

    def sources_of(self, numbers: Numbers) -> Sources:
        sources: Sources = {}
        for number, dataset, in_dataset, _ in self._draws(numbers)[1]:
            name = self.order.names[number % len(self.stores)]
            [sources[name]] = dataset.sources_of(in_dataset).values()
        return sources

    def find(self, source: int, tokens: Range, stop: int) -> Iterator[Numbers]:
        """The samples before one that may hold some tokens of a source: see `InstantOrder.find`."""
        for stretch, end in self.order.stretches(stop):
            draws = int(stretch.drawn[source]), int(stretch.drawn_up_to(end)[source])
            if draws[0] == draws[1]:
                continue
            leaf = int(np.searchsorted(stretch.sources, source))
            dataset = self.datasets[stretch.segment * len(self.stores) + source]
            for numbers in dataset.order.find(tokens, draws):
                places = [stretch.tree.find(leaf, one - draws[0]) for one in numbers.tolist()]
                yield stretch.start + np.array(places, np.int64)

    def unskipped(self) -> "PhasedDataset":
        """The same run, without end, in which no sample is left out."""
        whole = copy.copy(self)
        whole.skips, whole._num_samples = Skips([]), MAX_INT64
        return whole

    def _make_dataset(self, number: int) -> GPTDataset:
        segment, place = divmod(number, len(self.stores))
        name, options = self.order.names[place], self.all_options[segment]
        source, choice = self._ranges[name], self._config.loss_ranges
        _ = source.file.loss_ranges  # of now: other ranges may take their place
        order: Any = InstantOrder(
            source.tokens,
            name,
            self._config.seed,
            sequence_length=options.sequence_length,
            add_extra_token=options.add_extra_token,
            position=self.order.position(number),
            mix_window=self.order.mix_window,
            sequences_in=source.file.sequences_in,
        )
        return GPTDataset(source.file.store, order=order, options=options, loss_ranges=choice)

    # ---- the past ----

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """See `Dataset`: what decides the past, by phases and sources, and how samples look."""
        consumed = len(self) if consumed_samples is None else consumed_samples
        end, phases = self.skips.sample(consumed - 1) + 1, dict[str, Any]()
        for start, number in self.order.past(end):
            if start not in self._shares:  # 10 ms for thousands of sources
                stretch = self.order.stretch_of(start)
                names = [self.order.names[place] for place in stretch.sources.tolist()]
                shares = dict(zip(names, (stretch.tree.shares / ONE).tolist(), strict=True))
                is_long = len(shares) > _MOST_NAMES
                self._shares[start] = arrays.fingerprint(shares) if is_long else shares
            phases[f"{number} from sample {start}"] = {
                "sequence_length": self.order.length_of(number),
                "shares": self._shares[start],
            }
        drawn, k = self.order.drawn_before(end), self.order.mix_window
        mixing = {"mix_window": k} if k > 1 else {}
        ranges = self._ranges.items()
        sources: Any = {name: one.identity | mixing for name, one in ranges if name in drawn}
        if len(sources) > _MOST_NAMES:
            sources = {name: arrays.fingerprint(one)[:16] for name, one in sources.items()}
        view = self._config.sample_options.identity()
        for name in ("sequence_length", "add_extra_token"):
            del view[name]
        if self._config.loss_ranges == "apply":
            view["loss_ranges"] = {name: self._ranges[name].file.loss_ranges for name in sources}
        return {
            "kind": "instant",
            "rules": RULES_VERSION,
            "seed": self._config.seed,
            "add_extra_token": self._config.add_extra_token,
            "phases": phases,
            "skips": self.skips.before(consumed),
            "sources": sources,
            "view": view,
        }


class _OnDemand(dict[int, GPTDataset]):
    """A list of datasets by their numbers, each of which is made when it is asked for."""

    def __init__(self, size: int, make: Any) -> None:
        self._size, self._make = size, make

    def __reduce__(self) -> tuple[Any, ...]:
        return _OnDemand, (self._size, self._make)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __missing__(self, number: int) -> GPTDataset:
        self[number] = self._make(number)
        return self[number]


def instant_datasets(config: InstantConfig) -> list[PhasedDataset | None]:
    """The train, valid and test datasets of a configuration; None for a split without a share.

    It looks at the size of each file, and opens none whose dtype the configuration gives.
    """
    tokenizers: list[TokenizerRecord | None] = []
    files = {name: SourceFile(name, config, tokenizers) for name in config.sources}
    first, *later = config.whole_phases
    sizes = {name: file.part[1] - file.part[0] for name, file in files.items()}
    first = replace(first, weights=config.weights(sizes))
    splits: list[dict[str, SourceRange]] = [{}, {}, {}]
    for name, file in files.items():
        start, shares = file.part[0], split_ranges(sizes[name], config.split or "1,0,0")
        for ranges, share in zip(splits, shares, strict=True):
            if share is not None:
                ranges[name] = SourceRange(file, (start + share[0], start + share[1]))
    datasets: list[PhasedDataset | None] = []
    for ranges, count in zip(splits, config.num_samples, strict=True):
        phases = [first] if datasets else [first, *later]
        one = PhasedDataset(ranges, phases, config, count, is_training=not datasets)
        datasets.append(one if ranges else None)
    if datasets[0] is not None:
        _ = datasets[0].order  # an error now, not at the first sample
    return datasets
