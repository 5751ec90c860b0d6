"""What the packs of a run hold, and how even the work of the ranks is: as a table and a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from millrace.checks import check_int, printable, text_table
from millrace.errors import ConfigError
from millrace.inspect.shares import picture, polyline, text
from millrace.option_class import take_options
from millrace.order.packed import PackedOrder
from millrace.run.build import build_run
from millrace.run.config import DatasetConfig
from millrace.sampling import DocumentCosts, imbalance, least_imbalance
from millrace.sampling.balanced import deal

_MOST_BATCHES = 200  # global batches that are dealt: the first of an epoch
_MOST_PACKS = 1 << 20  # of a global batch; more take minutes


@dataclass(frozen=True, kw_only=True)
class PackDescription:
    """The packs of one dataset of a run in numbers.

    Attributes:
        split: "train", "valid" or "test".
        prefix: Path prefix of the token file.
        plan: What is known of the packs, as in `millrace.order.PackPlan`.
        fill: Share of the packs' tokens that documents take.
        drawn, dealt, least: Of some global batches, the work of the dearest rank over the mean: as
            the packs are drawn, as a `BalancedSampler` deals them, and at least for any deal.
        drawn_in_step, dealt_in_step: The same for ranks that wait for each other after each micro
            batch, as with FSDP and pipelines.
    """

    split: str
    prefix: str
    plan: dict[str, Any]
    fill: float
    drawn: list[float]
    dealt: list[float]
    least: list[float]
    drawn_in_step: list[float]
    dealt_in_step: list[float]


def describe_packs(
    config: DatasetConfig, *, ranks: int = 8, micro_batches: int = 4
) -> list[PackDescription]:
    """The packs of each dataset of a run, which are built if they are not in its cache.

    Args:
        config: Configuration of a run whose order packs documents.
        ranks: Number of data-parallel ranks that a global batch is dealt to.
        micro_batches: Number of packs of each rank in a global batch.

    Raises:
        ConfigError: A run with another order, or a number below 1.
    """
    ranks = check_int("ranks", ranks, 1, _MOST_PACKS)
    share = check_int("micro_batches", micro_batches, 1, _MOST_PACKS)
    plan, datasets = build_run(config)
    present = [one for one in datasets if one is not None]
    return [
        _describe(split.name, dataset, ranks, share, config.sampler_options or {})
        for split, data in zip(plan.present_splits, present, strict=True)
        for dataset in (data if isinstance(data, list) else getattr(data, "datasets", [data]))
    ]


def _describe(
    split: str, dataset: Any, ranks: int, share: int, options: Mapping[str, Any]
) -> PackDescription:
    if not isinstance(dataset.order, PackedOrder):
        raise ConfigError(
            f"the order of {dataset.prefix} packs no documents: name order: "
            "millrace.order:PackPlan in the run, or inspect its token files"
        )
    plan, size = dataset.order.plan, ranks * share
    num_batches = min(_MOST_BATCHES, min(plan.num_packs, len(dataset)) // size)
    costs_of = DocumentCosts.of(dataset, **take_options(DocumentCosts, {**options}))
    costs = costs_of(np.arange(num_batches * size)).reshape(num_batches, size)
    lockstep = options.get("lockstep", False)
    dealt = [batch[deal(batch, num_ranks=ranks, lockstep=lockstep)] for batch in costs]
    return PackDescription(
        split=split,
        prefix=dataset.prefix,
        plan=asdict(plan),
        fill=plan.num_tokens / (plan.num_packs * plan.capacity),
        drawn=[imbalance(batch, ranks) for batch in costs],
        dealt=[imbalance(batch, ranks) for batch in dealt],
        least=[least_imbalance(batch, ranks) for batch in costs],
        drawn_in_step=[imbalance(batch, ranks, share) for batch in costs],
        dealt_in_step=[imbalance(batch, ranks, share) for batch in dealt],
    )


def format_packs(descriptions: Sequence[PackDescription]) -> str:
    """The packs as a table for people, and below it what was lost."""
    names = "dataset packs documents docs/pack fill drawn dealt least in-step-drawn in-step-dealt"
    rows = [names.split()]
    lost = []
    for one in descriptions:
        plan, name = one.plan, f"{one.split}: {printable(one.prefix)}"
        counts = f"{plan['num_packs']:,}", f"{plan['num_pieces']:,}"
        mean = f"{plan['num_pieces'] / plan['num_packs']:.1f}"
        parts = one.drawn, one.dealt, one.least, one.drawn_in_step, one.dealt_in_step
        ends = [f"{np.mean(part):.3f}" if part else "-" for part in parts]
        rows.append([name, *counts, mean, f"{one.fill:.2%}", *ends])
        if plan["num_long"]:
            lost.append(
                f"{name}: {plan['num_long']:,} documents longer than {plan['capacity']:,} tokens "
                f"({plan['long_documents']}), {plan['num_lost_tokens']:,} tokens lost"
            )
    note = (
        "drawn, dealt, least: work of the dearest rank over the mean, in the mean of batches; "
        "in-step: of ranks that wait for each other after each micro batch"
    )
    return "\n".join([*text_table(rows), note, *lost])


def packs_svg(descriptions: Sequence[PackDescription], title: str = "") -> str:
    """An SVG of the work of the dearest rank over the mean, batch by batch, of the first dataset
    that fills a global batch: as drawn, as dealt, and the least of any deal."""
    one = next((one for one in descriptions if one.drawn), None)
    if one is None:
        raise ConfigError("no dataset has enough packs for a global batch of all ranks")
    curves = {"as drawn": one.drawn, "as dealt": one.dealt, "least": one.least}
    most = max(*one.drawn, 1.01)
    lines = []
    for row, (name, values) in enumerate(curves.items()):
        lines += polyline(row, name, [(value - 1) / (most - 1) for value in values])
    scale = [
        text(62, 284 - 220 * part, f"{1 + part * (most - 1):.2f}", anchor="end")
        for part in (0, 0.5, 1)
    ]
    about = f"{title + ': ' if title else ''}{one.prefix}, {len(one.drawn)} global batches"
    return picture("Work of the dearest rank over the mean", about, [*lines, *scale])
