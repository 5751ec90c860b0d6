"""What a training run asks of its data."""

import dataclasses
import functools
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from millrace.checks import (
    check_choice,
    check_floats,
    check_int,
    check_local,
    check_path,
    plain_json,
    shown,
)
from millrace.errors import ConfigError
from millrace.order import SPLITS, GPTPlan, normalize
from millrace.order.blends import SURPLUS, check_surplus
from millrace.order.gpt import check_seed
from millrace.order.order_plans import PlanOf
from millrace.order.splits import VALID, Bookends, bookends_of, check_part
from millrace.samples.dataset import Dataset
from millrace.samples.fields import SampleFields, SampleOptions
from millrace.samples.loss_ranges import LOSS_CHOICES
from millrace.sampling import Sampler, SequentialSampler
from millrace.storage import Access, Storage

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A token file: its path prefix, or {"prefix": PREFIX, "part": [START, END]} for a share of its
documents."""

Blend = tuple[Sequence[Source], Sequence[float] | None]
"""Sources, and their weights; None: the datasets' lengths."""

NOT_IN_KEY = frozenset(
    {
        # How a sample looks, not which tokens it has.
        *("eod_token", "pad_token", "reset_position_ids", "eod_mask_loss", "boundaries"),
        "full_validation",  # says only that num_samples[1] must be None, which is in the key
        *("access", "storage", "cache", "trust_cache", "num_threads"),  # how, not what
        "any_tokenizer",  # which data are refused
        "loss_ranges",  # which tokens are trained on
        *("sampler", "sampler_options"),  # who takes a sample
    }
)
"""The fields that do not decide the order; all others are in the key of a configuration."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(SampleFields):
    """What the configurations of all runs have.

    Args:
        sequence_length, add_extra_token, eod_token, pad_token, reset_position_ids, eod_mask_loss,
            boundaries: See `SampleOptions`.
        seed: Seed of the order.
        num_samples: Number of samples of train, valid and test. In Megatron-LM's order it is the
            least number, and None is one epoch; in the instant order None is without end.
        split: Shares such as "969,30,1", or the fractions at which each split starts and ends.
        access: How to read token files: "mmap" or "file".
        storage: Where token files are; None: their prefixes say it.
        any_tokenizer: Whether to take token files whose sidecars name different tokenizers. In
            Megatron-LM's order they are compared when a plan is made, not when one is found in the
            cache.
        loss_ranges: See `GPTDataset`; with "apply", each token file needs ranges, perhaps none.
        sampler: What `make_sampler` makes: a class of samplers, a function, or the name of one,
            "package.module:name".
        sampler_options: Keyword arguments for it, plain JSON values.
    """

    seed: int
    num_samples: Sequence[int | None]
    split: str | Sequence[Bookends | None] | None = None
    access: Access = "mmap"
    storage: Storage | None = None
    any_tokenizer: bool = False
    loss_ranges: str = "refuse"
    sampler: Callable[..., Any] | str | None = None
    sampler_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Makes numbers and flags Python's, whose sums are exact."""
        super().__post_init__()
        _check_three("num_samples", self.num_samples)
        bookends = None if self.split is None else bookends_of(self.split)
        vars(self).update(
            num_samples=tuple(
                None if count is None else check_int(f"num_samples of {name}", count, 0)
                for name, count in zip(SPLITS, self.num_samples, strict=True)
            ),
            split=self.split if isinstance(self.split, str) else bookends,
            access=check_choice("access", self.access, get_args(Access)),
            loss_ranges=check_choice("loss_ranges", self.loss_ranges, LOSS_CHOICES),
            sampler=_imported("sampler", self.sampler),
            sampler_options=_checked_options("sampler", self.sampler, self.sampler_options),
        )

    @functools.cached_property
    def sample_options(self) -> SampleOptions:
        fields = dataclasses.fields(SampleOptions)
        return SampleOptions(**{field.name: getattr(self, field.name) for field in fields})

    def make_sampler(self, dataset: Dataset, **share: int) -> Sampler:
        """The sampler of a rank that the configuration names, or a `SequentialSampler`.

        It is `sampler.of(dataset, ...)`, `sampler(len(dataset), ...)` of a class without a method
        `of`, or `sampler(dataset, ...)` of a function, with `share` and `sampler_options`.

        Args:
            share: `micro_batch_size`, `data_parallel_rank` and `data_parallel_size`; by default
                rank 0 of 1.

        Raises:
            ConfigError: Arguments that the sampler does not take, or refuses.
        """
        make: Any = self.sampler or SequentialSampler
        first = dataset if hasattr(make, "of") or not isinstance(make, type) else len(dataset)
        share = {"data_parallel_rank": 0, "data_parallel_size": 1, **share}
        options = self.sampler_options or {}
        try:
            sampler: Sampler = getattr(make, "of", make)(first, **share, **options)
        except TypeError as error:
            what = f"sampler_options are {shown(options)}, the other arguments {shown(share)}"
            raise ConfigError(f"{what}: {error}") from None
        return sampler


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(RunConfig):
    """What to draw samples from, how many, and how they look.

    Args:
        blend: One distribution, cut into train, valid and test by `split`.
        blend_per_split: A distribution for each split; None for a split without one.
        multiple_validation_sets: Whether each prefix of the validation blend is a separate dataset.
        full_validation: Whether validation is one epoch of its data; `num_samples[1]` must be None.
        surplus: Part of each dataset's share of a blend to build beyond it.
        drop_last_partial_validation_sequence: Whether to leave out a last validation sample that
            the tokens do not fill.
        cache: Folder to keep indices in; None: they are built in memory.
        trust_cache: Whether to take the manifest in the cache folder, which must be there, without
            looking at any token file.
        num_threads: Number of threads that build indices; each needs the memory of one dataset's.
        order: Another order than Megatron-LM's: a class (see `OrderPlan`), or the name of one,
            "package.module:name".
        order_options: Keyword arguments for that order's plan, plain JSON values.

    The other arguments are those of `RunConfig`; the seed is 0 to 2**32 - 1.

    Raises:
        ConfigError: Options outside their limits, or that do not go together.
    """

    blend: Blend | None = None
    blend_per_split: Sequence[Blend | None] | None = None
    multiple_validation_sets: bool = False
    full_validation: bool = False
    surplus: float = SURPLUS
    drop_last_partial_validation_sequence: bool = True
    cache: str | os.PathLike[str] | None = None
    trust_cache: bool = False
    num_threads: int = 1
    order: PlanOf | str | None = None
    order_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        per_split = self.blend_per_split
        if (self.blend is None) == (per_split is None):
            raise ConfigError("give a blend and a split, or a blend_per_split: one of the two")
        if (self.blend is None) != (self.split is None):
            raise ConfigError(f"split is {self.split}: a blend needs one, a blend_per_split none")
        if per_split is not None:
            _check_three("blend_per_split", per_split)
        super().__post_init__()
        blends = [self._checked_blend(number) for number in range(len(SPLITS))]
        if not any(blends):
            raise ConfigError("no split has a blend; give at least one")
        vars(self).update(
            seed=check_seed(self.seed),
            surplus=check_surplus(self.surplus),
            num_threads=check_int("num_threads", self.num_threads, 1),
            blend=blends[0] if per_split is None else None,
            blend_per_split=None if per_split is None else blends,
            order=_checked_order(self.order, is_cached=self.cache is not None),
            order_options=_checked_options("order", self.order, self.order_options),
            cache=None if self.cache is None else check_local(check_path("cache", self.cache)),
        )
        if self.trust_cache and self.cache is None:
            raise ConfigError("trust_cache needs a cache folder: give cache")
        size = self.num_samples[VALID]
        if self.full_validation and size is not None:
            raise ConfigError(f"num_samples[1] is {size}: with full_validation it must be None")
        if self.multiple_validation_sets and self.blend_per_split is None:
            raise ConfigError("multiple_validation_sets needs a blend_per_split")

    def _checked_blend(self, number: int) -> Blend | None:
        """The blend of a split as plain JSON values."""
        blend, name = self.blend_of(number), SPLITS[number]
        if blend is None:
            return None
        if not _is_list(blend) or len(blend) != 2 or not _is_list(blend[0]) or not len(blend[0]):
            raise ConfigError(f"{name} blend must be (1+ prefixes, weights), not {shown(blend)}")
        sources = [_checked_source(name, source) for source in blend[0]]
        if blend[1] is None:
            return sources, None
        weights = check_floats(f"the {name} blend's weights", blend[1])
        if number == VALID and self.multiple_validation_sets:
            return sources, weights  # which are not used
        if len(weights) != len(sources):
            raise ConfigError(f"{name} blend: {len(weights)} weights for {len(sources)} prefixes")
        normalize(weights)
        is_one = self.blend_per_split is not None and len(sources) == 1
        if self.num_samples[number] is None and not is_one:
            raise ConfigError(f"{name} blend has weights, and num_samples is None: give a number")
        return sources, weights

    def blend_of(self, split: int) -> Blend | None:
        """The blend of a split, by its number in SPLITS."""
        return self.blend if self.blend_per_split is None else self.blend_per_split[split]

    @property
    def plan_of(self) -> PlanOf:
        return GPTPlan if self.order is None else self.order  # type: ignore[return-value]

    def order_key(self) -> dict[str, Any]:
        """The fields that decide the order, as plain JSON values; the token files add the rest."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in NOT_IN_KEY]
        values = {name: getattr(self, name) for name in names}
        for name in ("order", "order_options"):
            if values[name] is None:  # as in keys from before there were others
                del values[name]
        key: dict[str, Any] = json.loads(json.dumps(values, default=name_of_order))
        return key


def _check_three(name: str, entries: Any) -> None:
    if not _is_list(entries) or len(entries) != len(SPLITS):
        raise ConfigError(f"{name} must have three entries, not {shown(entries)}")


def _imported(name: str, value: Any) -> Any:
    """A class or function, or the one that a text "package.module:name" names."""
    if isinstance(value, str):
        module, _, attribute = value.partition(":")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{name} {shown(value)} cannot be imported as module:name: {error}"
            ) from None
    if value is not None and not callable(value):
        raise ConfigError(f'{name} must be a class, a function or "module:name", not {value!r}')
    return value


def _checked_options(name: str, value: Any, options: Any) -> dict[str, Any] | None:
    """The keyword arguments of what is named, plain JSON values; None without any."""
    if options is None or options == {}:
        return None
    if not isinstance(options, Mapping):
        raise ConfigError(f"{name}_options must be keyword arguments of {name}, not {options!r}")
    if value is None:
        raise ConfigError(f"{name}_options are keyword arguments of {name}: name the {name}")
    plain: dict[str, Any] = plain_json(dict(options), f"{name}_options")
    return plain


def _checked_order(order: Any, *, is_cached: bool) -> PlanOf | None:
    """The class of plans; None for Megatron-LM's."""
    if order == "instant":
        raise ConfigError("order is instant, which is a configuration of its own: InstantConfig")
    order = _imported("order", order)
    if order is None:
        return None
    if not isinstance(order, type) or "<" in order.__qualname__:
        raise ConfigError(f"order must be a class at module level, not {shown(order)}")
    missing = [name for name in ("of", "arrays", "build", "load") if not hasattr(order, name)]
    if missing:
        raise ConfigError(f"order {name_of_order(order)} has no method {', '.join(missing)}")
    if is_cached and order.__module__ == "__main__":
        raise ConfigError(f"order {name_of_order(order)} of a script has no cache: use a module")
    return order


def name_of_order(order: Any) -> str:
    """The name "package.module:name" of an order, for files and cache folders."""
    return f"{order.__module__}:{order.__qualname__}"


def source_of(source: Source) -> tuple[str, Bookends | None]:
    """The path prefix of a source, and its part; None: all of it."""
    if isinstance(source, Mapping):
        return os.fspath(source["prefix"]), source["part"]
    return os.fspath(source), None


def _checked_source(name: str, source: Any) -> Source:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if not isinstance(source, Mapping):
        raise ConfigError(f"a prefix of the {name} blend must be a path, not {source!r}")
    if source.keys() != {"prefix", "part"}:
        form = '{"prefix": PREFIX, "part": [START, END]}'
        raise ConfigError(f"a part in the {name} blend must be {form}, not {shown(dict(source))}")
    prefix = check_path(f"a prefix of the {name} blend", source["prefix"])
    return {"prefix": prefix, "part": [*check_part(source["part"])]}


def dict_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ConfigError(f"it gives {twice} twice: leave one out")
    return values


def _is_list(value: Any) -> bool:
    """Whether a value is a list, tuple or array, but not text or an array of shape ()."""
    is_text = isinstance(value, (str, bytes, os.PathLike))
    return isinstance(value, Collection) and not is_text and getattr(value, "shape", None) != ()
