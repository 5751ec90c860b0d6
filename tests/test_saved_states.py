"""States that earlier versions have saved resume, and what they wrote is read.

`saved_states.json` was written by version 0.1.0.dev0 of November 2026, before the rooms were
rebuilt: `python -m tests.test_saved_states` writes the file again, with today's states.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace
from millrace.jobs import shuffle

STATES = Path(__file__).with_name("saved_states.json")
EOD = 1


def write_data(folder: Path) -> None:
    random = np.random.default_rng(7)
    for name in ("a", "b"):
        with millrace.IndexedDatasetBuilder(folder / name, np.uint16) as builder:
            for length in random.integers(1, 90, 60).tolist():
                builder.add_document(np.append(random.integers(2, 500, length), EOD))
    sharded(folder)  # before the mask, which a shuffle refuses
    millrace.write_loss_ranges(folder / "a", [(0, 0, 1), (3, 1, 2)])


def gpt(folder: Path, name: str = "a", **options: Any) -> millrace.GPTDataset:
    data = millrace.IndexedDataset(folder / name)
    return millrace.GPTDataset(
        data, sequence_length=16, seed=5, num_samples=300, eod_token=EOD, **options
    )


def sharded(folder: Path) -> millrace.ShardedDataset:
    to = folder / "shuffled"
    if not to.exists():
        inputs = [(1.0, folder / "a.bin"), (1.5, folder / "b.bin")]
        shuffle(None, to, input_list=inputs, seq_len=16, num_shards=3, dtype="uint16")
    return millrace.ShardedDataset(to, eod_token=EOD, reset_position_ids=True)


def configured(folder: Path, **options: Any) -> Any:
    config = millrace.DatasetConfig(
        sequence_length=16,
        seed=9,
        num_samples=(200, 20, 0),
        blend=([str(folder / "a"), str(folder / "b")], [0.3, 0.7]),
        split="90,10,0",
        **options,
    )
    return millrace.build_datasets(config).train


FILL = millrace.FillInMiddle(
    rate=0.5, prefix_token=501, middle_token=502, suffix_token=503, eod_token=EOD, seed=11
)


def masked(dataset: millrace.GPTDataset) -> millrace.TransformedDataset:
    return millrace.TransformedDataset(
        dataset, [millrace.LossRanges(dataset), millrace.RepeatGuard(max_period=2)]
    )


def batches_from(consumed: int) -> Any:
    return ({"tokens": np.arange(n, n + 4)} for n in range(consumed, 400, 4))


DATASETS: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys(("gpt", "cyclic", "full_validation"), gpt),
    "gpt_options": lambda folder: gpt(
        folder, reset_position_ids=True, eod_mask_loss=True, add_extra_token=False
    ),
    "blend": lambda at: millrace.BlendedDataset([gpt(at), gpt(at, "b")], [0.25, 0.75], 300),
    "blend_of_lengths": lambda folder: millrace.BlendedDataset([gpt(folder), gpt(folder, "b")]),
    "configured": configured,
    "cached": lambda folder: configured(folder, cache=str(folder / "cache")),
    "sharded": sharded,
    "transformed": lambda folder: millrace.TransformedDataset(gpt(folder), [FILL]),
    "masked": lambda folder: masked(gpt(folder)),
    "external": lambda _: millrace.ExternalBatches(batches_from, samples_per_step=4),
}
RAMP_UP = millrace.RampUp(4, 4, 40, 12)
SAMPLERS: dict[str, Callable[[], Any]] = {
    "gpt_options": lambda: millrace.GlobalBatchSampler(
        300, micro_batch_size=2, global_batch_size=RAMP_UP, data_parallel_size=2
    ),
    "cyclic": lambda: millrace.CyclicSampler(300, micro_batch_size=4, data_sharding=False),
    "full_validation": lambda: millrace.FullValidationSampler(300, data_parallel_size=2),
}


def loader_of(name: str, folder: Path) -> millrace.Loader:
    dataset = DATASETS[name](folder)
    if name in SAMPLERS:
        return millrace.Loader(dataset, sampler=SAMPLERS[name]())
    return millrace.Loader(dataset, micro_batch_size=None if name == "external" else 4)


def checksums(batch: dict[str, Any]) -> dict[str, int]:
    return {name: zlib.crc32(np.ascontiguousarray(array)) for name, array in batch.items()}


def saved(loader: millrace.Loader) -> dict[str, Any]:
    for _ in range(5):
        next(loader)
    return {"state": loader.state_dict(), "next": checksums(next(loader))}


@pytest.mark.parametrize("name", DATASETS)
def test_a_state_of_an_earlier_version_resumes(name: str, tmp_path: Path) -> None:
    write_data(tmp_path)
    entry = json.loads(STATES.read_text())[name]
    with loader_of(name, tmp_path) as loader:
        loader.load_state_dict(entry["state"])
        assert checksums(next(loader)) == entry["next"]
    with loader_of(name, tmp_path) as loader:
        assert saved(loader) == entry  # and the states of today are the same


def main() -> None:
    import tempfile

    states = {}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for name in DATASETS:
            with loader_of(name, Path(folder)) as loader:
                states[name] = saved(loader)
    lines = [f"{json.dumps(name)}: {json.dumps(state)}" for name, state in states.items()]
    STATES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
