"""What a training run asks of its data."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from millrace.checks import flag, reals, shown, whole
from millrace.errors import ConfigError
from millrace.options import SampleOptions
from millrace.order import SPLITS, normalize, split_ranges
from millrace.order.blends import SURPLUS, check_surplus
from millrace.order.gpt import check_seed
from millrace.order.splits import VALID, Bookends
from millrace.store.bytes import Access

Blend = tuple[Sequence[str], Sequence[float] | None]
"""Path prefixes, and a weight for each; None: their lengths are the weights."""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """What to draw samples from, how many, and how they look.

    Args:
        sequence_length: tokens to train on in a sample.
        seed: of the order, 0 to 2**32 - 1.
        num_samples: of train, valid and test: at least so many; None: what one epoch gives.
        blend: one distribution, cut into train, valid and test by `split`.
        split: shares such as "969,30,1", or where each split starts and ends as fractions.
        blend_per_split: a distribution for each split of its own; None where there is none.
        multiple_validation_sets: each prefix of the validation blend is a dataset by itself.
        full_validation: validation is one epoch of its data; `num_samples[1]` must be None.
        surplus: what is built of each dataset beyond its share of a blend.
        drop_last_partial_validation_sequence: leave out a last validation sample that the tokens
            do not fill.
        add_extra_token, eod_token, pad_token, reset_position_ids, eod_mask_loss: see `GPTDataset`.
        access: how to read token files: "mmap" or "file".
        cache: a folder to keep index arrays in; None: they are built in memory.
        trust_cache: take the manifest in the cache folder as it is, without a look at any token
            file; it must be there.
        num_threads: that build indices side by side; each needs the memory of one dataset's.

    Raises:
        ConfigError: options outside their limits, or that do not go together.
    """

    sequence_length: int
    seed: int
    num_samples: tuple[int | None, int | None, int | None]
    blend: Blend | None = None
    split: str | Sequence[Bookends | None] | None = None
    blend_per_split: Sequence[Blend | None] | None = None
    multiple_validation_sets: bool = False
    full_validation: bool = False
    surplus: float = SURPLUS
    drop_last_partial_validation_sequence: bool = True
    add_extra_token: bool = True
    eod_token: int | None = None
    pad_token: int | None = None
    reset_position_ids: bool = False
    eod_mask_loss: bool = False
    access: Access = "mmap"
    cache: str | os.PathLike[str] | None = None
    trust_cache: bool = False
    num_threads: int = 1

    def __post_init__(self) -> None:
        if (self.blend is None) == (self.blend_per_split is None):
            raise ConfigError("give a blend and a split, or a blend_per_split: one of the two")
        if (self.blend is None) != (self.split is None):
            raise ConfigError(
                f"the split is {self.split}: a blend needs one, and with a blend_per_split there "
                "is none"
            )
        per_split = self.blend_per_split
        if per_split is not None and not (_is_list(per_split) and len(per_split) == len(SPLITS)):
            raise ConfigError(
                f"blend_per_split is {shown(per_split)}; give an entry for each of "
                f"{', '.join(SPLITS)}, None for those that you do without"
            )
        self._make_plain()
        if self.access not in get_args(Access):
            raise ConfigError(
                f"access is {shown(self.access)}; it is one of {', '.join(get_args(Access))}"
            )
        if not isinstance(self.cache, str | os.PathLike | None):
            raise ConfigError(f"cache is {shown(self.cache)}; give a folder's path, or None")
        if self.trust_cache and self.cache is None:
            raise ConfigError("trust_cache needs a cache folder: give cache")
        if self.full_validation and self.num_samples[VALID] is not None:
            raise ConfigError(
                f"full_validation takes one epoch, and num_samples asks for "
                f"{self.num_samples[VALID]} validation samples: make that None"
            )
        if self.multiple_validation_sets and self.blend_per_split is None:
            raise ConfigError("multiple_validation_sets needs a blend_per_split")
        self._check_blends()
        if self.split is not None:
            split_ranges(0, self.split)

    def _make_plain(self) -> None:
        """Numbers and flags of any type become Python's, whose sums are exact."""
        if not _is_list(self.num_samples) or len(self.num_samples) != len(SPLITS):
            raise ConfigError(
                f"num_samples is {self.num_samples}; give an entry for each of {', '.join(SPLITS)}"
            )
        plain: dict[str, Any] = {
            "num_samples": tuple(
                None if count is None else whole(f"num_samples of {name}", count, 0)
                for name, count in zip(SPLITS, self.num_samples, strict=True)
            ),
            "seed": check_seed(self.seed),
            "surplus": check_surplus(self.surplus),
            "num_threads": whole("num_threads", self.num_threads, 1),
        }
        for name in (
            "multiple_validation_sets",
            "full_validation",
            "drop_last_partial_validation_sequence",
            "trust_cache",
        ):
            plain[name] = flag(name, getattr(self, name))
        for field in dataclasses.fields(SampleOptions):
            plain[field.name] = getattr(self.sample_options, field.name)
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def _check_blends(self) -> None:
        blends = self.blend_per_split or [self.blend]
        if all(given is None for given in blends):
            raise ConfigError("no split has a blend; give at least one")
        for given in blends:
            if given is not None and (not _is_list(given) or len(given) != 2):
                raise ConfigError(
                    f"a blend is {given!r}; it must be (prefixes, weights), and the weights None "
                    "where the data's lengths decide"
                )
        for name, prefixes, weights, size in self._blends():
            if not _is_list(prefixes) or len(prefixes) == 0:
                raise ConfigError(f"the {name} blend is {prefixes!r}; a list of prefixes is needed")
            for prefix in prefixes:
                if not isinstance(prefix, (str, os.PathLike)):
                    raise ConfigError(f"the {name} blend has {prefix!r}; prefixes are paths")
            if weights is None:
                continue
            weights = reals(f"the {name} blend's weights", weights)
            if len(weights) != len(prefixes):
                raise ConfigError(
                    f"the {name} blend has {len(weights)} weights for {len(prefixes)} prefixes"
                )
            normalize(weights)
            if size is None and not (self.blend_per_split is not None and len(prefixes) == 1):
                raise ConfigError(
                    f"the {name} blend has weights, and num_samples is None: weights say how to "
                    "mix a number of samples. Give the number, or leave the weights out"
                )

    def blend_of(self, split: int) -> Blend | None:
        """The blend that a split draws from, by its number in SPLITS."""
        return self.blend if self.blend_per_split is None else self.blend_per_split[split]

    def _blends(self) -> list[tuple[str, Sequence[str], Sequence[float] | None, int | None]]:
        """(split, prefixes, weights, number of samples) of each."""
        found = []
        for number, name in enumerate(SPLITS):
            given = self.blend_of(number)
            if given is not None and not (number == VALID and self.multiple_validation_sets):
                found.append((name, *given, self.num_samples[number]))
        return found

    @functools.cached_property
    def sample_options(self) -> SampleOptions:
        return SampleOptions(
            sequence_length=self.sequence_length,
            add_extra_token=self.add_extra_token,
            eod_token=self.eod_token,
            pad_token=self.pad_token,
            reset_position_ids=self.reset_position_ids,
            eod_mask_loss=self.eod_mask_loss,
        )

    def order_key(self) -> dict[str, Any]:
        """What decides the order, apart from what is in the token files: plain JSON values."""

        def plain(given: Blend | None) -> Any:
            if given is None:
                return None
            prefixes, weights = given
            paths = [os.fspath(prefix) for prefix in prefixes]
            return [paths, None if weights is None else [float(weight) for weight in weights]]

        per_split = self.blend_per_split
        return {
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "num_samples": list(self.num_samples),
            "blend": plain(self.blend),
            "split": self.split
            if isinstance(self.split, str) or self.split is None
            else [None if ends is None else [float(end) for end in ends] for ends in self.split],
            "blend_per_split": None if per_split is None else [plain(given) for given in per_split],
            "multiple_validation_sets": self.multiple_validation_sets,
            "surplus": float(self.surplus),
            "drop_last_partial_validation_sequence": self.drop_last_partial_validation_sequence,
            "add_extra_token": self.add_extra_token,
        }


def _is_list(value: Any) -> bool:
    """Whether it has entries: a list, a tuple, an array; no text, and no array without a shape."""
    is_text = isinstance(value, (str, bytes, os.PathLike))
    return isinstance(value, Collection) and not is_text and getattr(value, "shape", None) != ()
