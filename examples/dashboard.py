"""Counters of each step for a dashboard: a file for Prometheus, and W&B with --wandb."""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from millrace import IndexedDatasetBuilder, InstantConfig, Loader, build_datasets


def write_prometheus(path: Path, metrics: dict[str, float], rank: int) -> None:
    """For the textfile collector of the node exporter, which reads whole files."""
    lines = []
    for name, value in metrics.items():
        kind, _, source = name.partition("/")
        name = f"source_{kind}" if source else kind
        source = json.dumps(source, ensure_ascii=False)  # in quotes, with escapes
        lines.append(f'millrace_{name}{{rank="{rank}",source={source}}} {value!r}\n')
    path.with_suffix(".tmp").write_text("".join(lines))
    os.replace(path.with_suffix(".tmp"), path)


def main() -> None:
    run = None
    if "--wandb" in sys.argv:
        import wandb

        run = wandb.init(project="millrace")
    with tempfile.TemporaryDirectory() as folder:
        sources = {}
        for name, weight in (("web", 3), ("code", 1)):
            sources[name] = {"prefix": f"{folder}/{name}", "weight": weight}
            with IndexedDatasetBuilder(f"{folder}/{name}", np.uint16) as builder:
                builder.add_documents(np.arange(10_000), [4_000, 1_000, 5_000])
        train = build_datasets(InstantConfig(sequence_length=64, seed=1, sources=sources)).train
        with Loader(train, micro_batch_size=8) as loader:
            for step in range(50):
                next(loader)  # and train
                if step % 10 == 9:  # as often as the dashboard needs it
                    metrics = loader.metrics()
                    write_prometheus(Path(folder, "millrace.prom"), metrics, rank=0)
                    if run is not None:
                        run.log(metrics, step=step)
        print(Path(folder, "millrace.prom").read_text())


if __name__ == "__main__":
    main()
