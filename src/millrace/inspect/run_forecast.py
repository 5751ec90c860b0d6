"""What the training of a run will draw, computed before it begins; and what an edit changes."""

import bisect
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.checks import differences, place_of, printable, shown, text_table
from millrace.errors import ConfigError
from millrace.inspect.shares import bands_picture
from millrace.order import normalize, plan_gpt
from millrace.run.build import copies_in, set_key
from millrace.run.config import DatasetConfig
from millrace.run.instant_config import AnyConfig, InstantConfig
from millrace.run.phased_dataset import PhasedDataset, instant_datasets
from millrace.run.plan import SplitPlan, plan_run
from millrace.sampling import BatchSizeSchedule
from millrace.shuffling.permutations import Parts

_MOST_EPOCHS, _LEAST_SHARE = 4, 0.01  # of a source; beyond them there are warnings
_MOST_ROWS = 20  # sources of a phase, and warnings of a kind, that people see


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What the training of a run will draw, by source and phase.

    Attributes:
        sources: Names of the sources; of a built order their prefixes, and there is one phase.
        starts: First sample of each phase, and the end of the run, skips included: [phases + 1].
        steps: Steps before each of them; empty: the run has no global batch size.
        sequence_lengths: Tokens to train on in a sample of each phase.
        num_tokens: Tokens of each source; 0: it is never drawn.
        samples: Samples that are trained on: [phases, sources], as the next three.
        epochs: Epochs of the source that are done at the end of the phase, with a fraction.
        repeats: Tokens that are drawn again, about, as a sequence length that does not divide the
            one before broke their epoch off: expected ones, as the next epoch is another shuffle.
        unseen: Tokens outside the windows of the epoch at the end of the phase.
        caps: Sources, and the samples from which on they take no part, as they reach max_epochs.
        windows: Samples in parts of the run: [parts, sources].
        warnings: What a careful person would want to know.
    """

    sources: list[str]
    starts: list[int]
    steps: list[int]
    sequence_lengths: list[int]
    num_tokens: Any
    samples: Any
    epochs: Any
    repeats: Any
    unseen: Any
    caps: list[tuple[str, int]]
    windows: Any
    warnings: list[str]


def forecast(
    config: AnyConfig,
    *,
    batches: BatchSizeSchedule | None = None,
    save_interval: int = 0,
    num_parts: int = 0,
) -> Forecast:
    """What the training of a run will draw.

    Args:
        config: Configuration of the run. In the instant order, sources that `part` or `split` cut
            are opened; in another one all are.
        batches: Global batch sizes; None: not known.
        save_interval: Number of steps from a checkpoint to the next one; 0: not known.
        num_parts: Number of parts of the run whose mixture is counted, for a picture.

    Raises:
        ConfigError: A run without training data, or without an end.
    """
    if isinstance(config, InstantConfig):
        if batches is not None:
            config.check_starts(batches.step_at)
        fields = _of_instant(config, num_parts)
        num_phases = len(fields["sequence_lengths"])
        if (start := config.phases[num_phases - 1].until) is not None:
            fields["warnings"].append(
                f"phase {num_phases} starts at sample {start:,}, behind the end of the run: it is "
                "never drawn. `until` counts samples, not steps or tokens"
            )
    else:
        fields = _of_built(config)
    positions = fields.pop("positions")
    steps = [] if batches is None else [batches.num_steps(one) for one in positions]
    one = Forecast(**fields, steps=steps)
    for number, count in enumerate(np.diff(steps).tolist()):
        if count < save_interval:
            one.warnings.append(
                f"phase {number} has {count:,} steps, fewer than the {save_interval:,} from a "
                "checkpoint to the next one"
            )
    lengths = itertools.combinations(one.sequence_lengths, 2)
    mix_window = math.lcm(*(new // math.gcd(old, new) for old, new in lengths))
    repeats = (
        f"phase {number}, source {one.sources[place]}: about {one.repeats[number, place]:,} tokens "
        "are drawn again, as a sequence length that does not divide the one before breaks an "
        f"epoch off. Before the run begins, `mix-window: {mix_window}` avoids it, or a smaller "
        "`part` of the source, with the rest as another one; later, both would change the past"
        for number, place in np.argwhere(one.repeats).tolist()
    )
    one.warnings.extend(_first(repeats))
    tokens = one.samples.T @ one.sequence_lengths
    much, little = one.epochs[-1] > _MOST_EPOCHS, tokens < _LEAST_SHARE * tokens.sum()
    for text, which in (
        ("more than 4 epochs of", much),
        ("less than 1 % of the tokens from", little),
    ):
        names = [one.sources[place] for place in np.flatnonzero(which).tolist()]
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        one.warnings.extend([f"{text} {', '.join(names[:3])}{more}"] * bool(names))
    return one


def _train_of(config: InstantConfig) -> PhasedDataset:
    train = instant_datasets(config)[0]
    if train is None:
        raise ConfigError("the split leaves no training data: give train a share")
    return train


def _of_instant(config: InstantConfig, num_parts: int) -> dict[str, Any]:
    train = _train_of(config)
    if config.num_samples[0] is None or len(train) == 0:
        raise ConfigError("the run has no end: give train_samples, train_iters or num_samples")
    skips, mixture = train.skips, train.order
    end = skips.sample(len(train) - 1) + 1
    starts = [0, *(phase.until for phase in config.phases[:-1] if phase.until < end)]
    shape = len(starts), len(mixture.names)
    samples, unseen, repeats = np.zeros((3, *shape), np.int64)
    total, num_tokens, *windows = np.zeros((min(num_parts, end) + 3, shape[1]), np.int64)
    # Broken off: the share of a source that was drawn of an epoch which another length ended.
    epochs, broken_off = np.zeros(shape), np.zeros(shape[1])
    edges = np.linspace(0, end, len(windows)).astype(np.int64)
    position = mixture.stretch_of(0).begins
    caps, at_cap = list[tuple[str, int]](), np.empty(0, np.int64)
    for stretch, stop in mixture.stretches(end):
        number, start, count_up_to = stretch.phase, stretch.start, stretch.drawn_up_to
        at_cap, before = np.setdiff1d(np.flatnonzero(stretch.weights), stretch.sources), at_cap
        caps += [(mixture.names[one], start) for one in np.setdiff1d(at_cap, before).tolist()]
        for edge in np.flatnonzero((edges > start) & (edges <= stop)).tolist():
            windows[edge] = total + count_up_to(edges[edge]) - stretch.drawn
        counts = count_up_to(stop) - stretch.drawn
        total += counts
        samples[number] += counts
        for first, behind in np.clip(skips.ranges, start, stop).tolist():
            samples[number] -= count_up_to(behind) - count_up_to(first)
        here, ends = np.flatnonzero(counts), mixture.ends(stretch, stop)
        position, old, new = ends, position.select(here), ends.select(here)
        sizes, length, _ = mixture.cuts(here, number)
        size, tokens = new.epoch_size(sizes), counts[here] * length
        left = old.epoch_size(sizes) - old.drawn
        is_cut = (old.window_length % length > 0) & (left > 0)
        share, left = np.where(is_cut, (old.drawn / sizes, size), (broken_off[here], left))
        repeats[number, here] += np.rint(share * np.minimum(tokens, left)).astype(np.int64)
        broken_off[here] = share * (tokens < left)
        num_tokens[here], unseen[number:, here] = sizes, sizes - size
        epochs[number:, here] = new.epoch + new.drawn / size
    return {
        "sources": mixture.names,
        "starts": [*starts, end],
        "positions": [*map(skips.position, starts), len(train)],
        "sequence_lengths": [phase.sequence_length for phase in config.whole_phases[: len(starts)]],
        "num_tokens": num_tokens,
        "samples": samples,
        "epochs": epochs,
        "repeats": repeats,
        "unseen": unseen,
        "caps": caps,
        "windows": np.diff(windows, axis=0),
        "warnings": _first(_copies(config, train)),
    }


def _copies(config: InstantConfig, train: PhasedDataset) -> Iterator[str]:
    """Tells of sources with the same tokens; of files, those of one size alone are opened."""
    sizes = Counter(file.num_tokens for file in train.stores)
    known: dict[str, list[tuple[str, Any]]] = {}
    for name, file in zip(train.order.names, train.stores, strict=True):
        if sizes[file.num_tokens] > 1:
            part, others = config.sources[name].part, known.setdefault(file.store.fingerprint, [])
            same = (other for other, (a, b) in others if a < part[1] and part[0] < b)
            if other := next(same, None):
                yield f"{name} has tokens of {other}, too: give them once, or another part"
            others.append((name, part))


def _first(texts: Iterable[str]) -> list[str]:
    """As many texts of a kind as people read, and how many more there are."""
    texts = [*texts]
    num_more = len(texts) - _MOST_ROWS
    return [*texts[:_MOST_ROWS], *[f"and {num_more:,} more like these"] * (num_more > 0)]


def _of_built(config: DatasetConfig) -> dict[str, Any]:
    plan = plan_run(config)
    split = plan.splits[0]
    if split is None:
        raise ConfigError("the split leaves no training data: give train a share")
    size, datasets = split.num_samples, split.datasets
    if config.num_samples[0] is not None:  # one prefix without weights gives whole epochs
        size = min(size, config.num_samples[0])
    weights = np.array(normalize(split.weights or split.lengths))
    samples = np.rint(weights * size).astype(np.int64)[None]
    num_tokens = [
        getattr(one.order, "num_tokens_per_epoch", one.file.record.num_tokens) for one in datasets
    ]
    return {
        "sources": [one.file.prefix for one in datasets],
        "starts": [0, size],
        "positions": [0, size],
        "sequence_lengths": [config.sequence_length],
        "num_tokens": np.array(num_tokens),
        "samples": samples,
        "epochs": samples * config.sequence_length / np.maximum(num_tokens, 1),
        **dict.fromkeys(("repeats", "unseen"), np.zeros_like(samples)),
        "caps": [],
        "windows": samples,
        "warnings": [*_first(copies_in(plan)), *_limits(config, split)],
    }


def _limits(config: DatasetConfig, split: SplitPlan) -> Iterator[str]:
    """Tells where a run ends early, or else from which number of samples on Megatron-LM's order
    would be another one."""
    wanted, is_once = config.num_samples[0] or 0, split.kind == "blend" and split.weights is None
    if is_once and split.num_samples < wanted:
        yield (
            f"the run ends after {split.num_samples:,} samples, although {wanted:,} are asked for: "
            "a blend without weights draws no sample twice, so give its prefixes weights"
        )
    if wanted == 0 or is_once or config.order is not None:
        return
    growths = []
    for dataset in split.datasets:
        plan: Any = dataset.order
        tokens, length = plan.num_tokens_per_epoch, plan.sequence_length
        has_extra, least = plan.add_extra_token, max(dataset.inputs.num_samples or 0, 1)
        more = bisect.bisect_left(
            range(least, plan.num_samples + 1),
            True,
            key=lambda count: plan_gpt(tokens, count, length, add_extra_token=has_extra) != plan,
        )
        growths.append(((least + more - 1) / least, dataset.file.prefix))
    growth, prefix = min(growths)
    yield (
        f"with more than about {int(wanted * growth):,} samples the run would have "
        f"another order from its first sample on, as {prefix} would be shuffled anew: "
        "`order: instant` keeps the past of an extended run"
    )


def forecast_change(old: AnyConfig, new: AnyConfig) -> tuple[int | None, list[str]]:
    """The first position of training at which two runs differ, and how; None: at none of both.

    All that decides the positions before it is equal, as when a loader resumes.
    """
    if isinstance(old, InstantConfig) and isinstance(new, InstantConfig):
        one, other = (_train_of(config) for config in (old, new))
        num_samples = min(_num_samples(one), _num_samples(other))
        first = bisect.bisect_left(
            range(1, num_samples + 1),
            True,
            key=lambda count: one.fingerprint(count) != other.fingerprint(count),
        )
        count = min(first + 1, num_samples)
        pair: Any = one.fingerprint(count), other.fingerprint(count)
    else:
        # Another number of samples of a dataset changes its shuffle, from the first sample on.
        pair = [_key_of(config) for config in (old, new)]
        first, num_samples = 0, int(pair[0] != pair[1])
    changes = [
        f"{place_of(path)}: {shown(before, 80)}, now {shown(after, 80)}"
        for path, before, after in differences(*pair)
    ]
    return (first if first < num_samples else None), changes


def _num_samples(train: PhasedDataset) -> int:
    """Number of samples, up to where all sources have reached their caps."""
    end = 0
    with contextlib.suppress(ConfigError):
        for _, stop in train.order.stretches(train.skips.sample(len(train) - 1) + 1):
            end = stop
    return train.skips.position(end)


def _key_of(config: AnyConfig) -> Any:
    """What decides the training samples of a run in a built order, but for its end."""
    if isinstance(config, InstantConfig):
        return {"order": "instant"}
    split, view = plan_run(config).splits[0], config.sample_options.identity()
    view["loss_ranges"] = config.loss_ranges == "apply"
    content = [] if split is None else [one.file.fingerprint for one in split.datasets]
    key = {} if split is None else set_key(config, split) | {"size": None}
    return {**key, "content": content, "view": view}


def format_forecast(one: Forecast) -> str:
    """A forecast as text for people."""
    lines = []
    for number, samples in enumerate(one.samples):
        start, end, *_ = one.starts[number:]
        length, steps = one.sequence_lengths[number], one.steps[number : number + 2]
        count = int(samples.sum())
        lines.append(
            f"phase {number}: samples {start:,} to {end:,}, {length:,} tokens each"
            + (f", steps {steps[0]:,} to {steps[1]:,}" if steps else "")
            + (f", {end - start - count:,} are skipped" if end - start > count else "")
        )
        rows = [["source", "share", "samples", "tokens", "epochs", "repeats, about", "unseen"]]
        places = np.argsort(-samples, kind="stable")[: np.count_nonzero(samples)].tolist()
        for place in places[:_MOST_ROWS]:
            part = int(samples[place])
            epochs = f"{one.epochs[number, place]:.2f}"
            rest = (f"{array[number, place]:,}" for array in (one.repeats, one.unseen))
            source, share = printable(one.sources[place]), f"{part / count:.2%}"
            rows.append([source, share, f"{part:,}", f"{part * length:,}", epochs, *rest])
        lines += [f"  {line}" for line in text_table(rows)]
        if len(places) > _MOST_ROWS:
            lines.append(f"  and {len(places) - _MOST_ROWS:,} more sources: --json has them all")
    caps = [f"{name} reaches max_epochs at sample {sample:,}" for name, sample in one.caps]
    warnings = [f"warning: {printable(text)}" for text in one.warnings]
    return "\n".join([*lines, *map(printable, _first(caps)), *warnings])


def forecast_svg(one: Forecast, name: str = "") -> str:
    """An SVG of the sources' shares over the run, with the name of its file."""
    parts = Parts("part", tuple(one.sources), one.windows, one.windows.sum(axis=0))
    return bands_picture("Mixture over the run", name, parts, "sample")
