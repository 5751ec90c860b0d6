"""`SFTDataset` against what `record_sft.py` has recorded of Megatron-LM, and against a slow twin."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record_sft
import sft_cases as cases

import millrace.megatron as ours
from millrace.megatron.errors import ConversationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The pad token id in the tokenizer collides"),
    pytest.mark.filterwarnings("ignore:.*summary:UserWarning"),
]
GOLDEN = np.load(record_sft.GOLDEN)


def recorded(key: str) -> Iterator[str | list[list[int]]]:
    """The arrays of each sample, or the name of its error."""
    numbers = iter(GOLDEN[key].tolist())
    for first in numbers:
        if first < 0:
            yield record_sft.ERRORS[-1 - first]
        else:
            sizes = [first]
            arrays = [[next(numbers) for _ in range(first)]]
            while len(arrays) < len(record_sft.NAMES):
                sizes.append(next(numbers))
                arrays.append([next(numbers) for _ in range(sizes[-1])])
            yield arrays


def config_of(tokenizer: Any, **options: Any) -> ours.GPTDatasetConfig:
    resets = ("reset_position_ids", "reset_attention_mask", "create_attention_mask")
    fixed = dict.fromkeys((*resets, "eod_mask_loss"), False)
    return ours.GPTDatasetConfig(tokenizer=tokenizer, random_seed=1, **fixed, **options)


def dataset_of(lines: Any, tokenizer: Any, num_samples: int | None = None, **options: Any) -> Any:
    rows = np.arange(len(lines), dtype=np.int32)
    config = config_of(tokenizer, **options)
    path = getattr(lines, "path", None)
    return ours.SFTDataset(lines, path, rows, num_samples, ours.Split.train, config)


def arrays_of(sample: Any) -> list[list[int]]:
    dtypes = ("int64", "int64", "float32", "int64", "int32", "int32")
    for name, dtype in zip(record_sft.NAMES, dtypes, strict=True):
        assert str(sample[name].dtype) == f"torch.{dtype}"
    assert sample["max_seqlen"].ndim == 0
    arrays = [np.asarray(sample[name]) for name in record_sft.NAMES]
    return [array.reshape(-1).astype(np.int64).tolist() for array in arrays]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ours.SFTTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    paths = [cases.write_tokenizer(folder / str(pad), has_pad=pad) for pad in (True, False)]
    return {
        name: ours.SFTTokenizer(paths[" " in name], name.partition(" ")[0])
        for name in cases.FORMATS
    }


@pytest.mark.parametrize("prompt", cases.FORMATS)
@pytest.mark.parametrize("release", record_sft.RELEASES)
def test_golden(release: str, prompt: str, tokenizers: Any, tmp_path: Path) -> None:
    lines = ours.SFTLowLevelDataset(cases.write_lines(tmp_path / "lines.jsonl"))
    expected = recorded(f"{release} {prompt}")
    for length, size in cases.LENGTHS:
        options = {"sequence_length": length, "context_parallel_size": size}
        dataset = dataset_of(lines, tokenizers[prompt], sft_release=release, **options)
        for number in range(len(dataset)):
            theirs = next(expected)
            try:
                mine = arrays_of(dataset[number])
            except Exception as e:
                mine = type(e).__name__
            if mine!=theirs: print(release, prompt, length,size, number, theirs if isinstance(theirs,str) else "arrays", mine if isinstance(mine,str) else "arrays")
    assert 0
