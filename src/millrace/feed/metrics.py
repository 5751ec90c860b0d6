"""Counters of a step for a dashboard, as plain numbers."""

from typing import Any

import numpy as np

from millrace.files import checksum
from millrace.samples.fields import FIELDS
from millrace.samples.tokens import Numbers


def batch_metrics(batch: Any) -> dict[str, float]:
    """Tokens, the share of them that is trained on, and a checksum; nothing without arrays."""
    items = [(name, batch.get(name)) for name in FIELDS] if isinstance(batch, dict) else []
    arrays = {k: v for k, v in items if isinstance(v, np.ndarray) and v.dtype.kind in "biuf"}
    if "tokens" not in arrays:
        return {}
    metrics: dict[str, float] = {"tokens": arrays["tokens"].size}
    if "loss_mask" in arrays:
        metrics["trained_share"] = float(arrays["loss_mask"].sum()) / max(metrics["tokens"], 1)
    # Dashboards keep numbers as float64, which is exact up to 53 bits.
    metrics["checksum"] = int(checksum(map(np.ascontiguousarray, arrays.values())), 16) >> 11
    return metrics


def step_metrics(dataset: Any, numbers: Numbers) -> dict[str, float]:
    """The same of some samples, which are read for it; and tokens and epochs by source."""
    metrics = batch_metrics(getattr(dataset, "counted", dataset.batch)(numbers))
    sources = dataset.sources_of(numbers) if hasattr(dataset, "sources_of") else {}
    for name, (count, epochs) in sources.items():
        metrics[f"tokens/{name}"] = count * (metrics["tokens"] // max(len(numbers), 1))
        if epochs is not None:
            metrics[f"epoch/{name}"] = epochs
    return metrics
