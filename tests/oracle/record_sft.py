"""Records the samples of Megatron-LM's SFTDataset, of two releases, on the cases of `sft_cases`.

    python tests/oracle/record_sft.py /path/of/a/Megatron-LM/clone

needs `datasets`, transformers 4 (0.16.1 cannot use 5) and megatron-core, whose base classes serve
both releases. Of the clone it runs only the files below, as they are, from `git show`. The test's
arrays are of datasets 5.0.1 (4 and older give absent keys as None) and transformers 4.57.
"""

import importlib
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sft_cases import FORMATS, LENGTHS, LINES, write_lines, write_tokenizer

GOLDEN = Path(__file__).with_name("golden_sft.npz")
RELEASES = {"0.16": "core_v0.16.1", "0.19": "core_v0.19.0"}
OLD = ("nemotron-nano-v2", "nemotron-h-aligned")  # the formats of 0.16.1
ERRORS = ("TypeError", "ValueError", "AssertionError", "IndexError", "RuntimeError", "KeyError")
ERRORS += ("UndefinedError",)
NAMES = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen")


def flat(sample: Any) -> list[int]:
    """A sample as numbers: for each array its size and its entries."""
    arrays = [np.asarray(sample[name]).reshape(-1).astype(np.int64).tolist() for name in NAMES]
    return [number for array in arrays for number in (len(array), *array)]


def flat_samples(dataset: Any, numbers: Any) -> list[int]:
    """Samples, or in place of one the number of its error, from -1 down."""
    numbers_of_all: list[int] = []
    for number in numbers:
        try:
            numbers_of_all += flat(dataset[number])
        except Exception as error:
            numbers_of_all.append(-1 - ERRORS.index(type(error).__name__))
    return numbers_of_all


def main(clone: str) -> None:
    warnings.simplefilter("ignore")
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    def run(release: str, name: str, path: str) -> Any:
        """A module of the clone."""
        show = ["git", "-C", clone, "show", f"{RELEASES[release]}:megatron/{path}"]
        module = sys.modules[name] = types.ModuleType(name)
        source = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        exec(compile(source, path, "exec"), vars(module))
        return module

    for package in ("", ".datasets", ".tokenizer"):
        sys.modules[f"megatron.training{package}"] = types.ModuleType("package")
    golden: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, other = write_lines(folder / "lines.jsonl"), LINES[:10] + LINES[40:]
        paths = [path, write_lines(folder / "other.jsonl", other)]
        folders = [write_tokenizer(folder / "pad"), write_tokenizer(folder / "no", has_pad=False)]
        new = run("0.19", "new", "core/tokenizers/text/libraries/sft_tokenizer.py").SFTTokenizer
        for release in RELEASES:
            kinds = {"new": new}
            where = "megatron.training"
            data = run(release, f"{where}.datasets.sft_dataset", "training/datasets/sft_dataset.py")
            if release == "0.16":
                file = "training/tokenizer/multimodal_tokenizer.py"
                run(release, f"{where}.tokenizer.multimodal_tokenizer", file)
                kinds["old"] = run(
                    release, "old", "training/tokenizer/sft_tokenizer.py"
                ).SFTTokenizer
            lines = data.SFTLowLevelDataset(path)
            for prompt in FORMATS:
                kind = kinds["old" if prompt in OLD and release == "0.16" else "new"]
                tokenizer = kind(folders[" " in prompt], prompt.partition(" ")[0])
                if kind is new:  # as megatron.core's wrapper gives it
                    tokenizer.pad = tokenizer.pad_id
                    tokenizer.unique_identifiers = {"name": "new"}
                record: list[int] = []
                options = {"tokenizer": tokenizer, "random_seed": 1, "path_to_cache": None}
                resets = ("reset_position_ids", "reset_attention_mask", "create_attention_mask")
                options |= dict.fromkeys((*resets, "eod_mask_loss"), False)
                for length, size in LENGTHS:
                    config = GPTDatasetConfig(
                        **options, sequence_length=length, context_parallel_size=size
                    )
                    rows = np.arange(len(lines))
                    parts = lines, path, rows, len(rows), Split.train, config
                    record += flat_samples(data.SFTDataset(*parts), rows)
                golden[f"{release} {prompt}"] = np.array(record, np.int32)
                if prompt == "identity":
                    config = GPTDatasetConfig(
                        **options,
                        sequence_length=400,
                        context_parallel_size=1,
                        blend=(paths, [0.3, 0.7]),
                        split="6,3,1",
                    )
                    importlib.import_module("megatron.core.datasets.helpers").compile_helpers = None
                    build = BlendedMegatronDatasetBuilder(
                        data.SFTDataset, [70, 30, 10], lambda: True, config
                    )
                    record = []
                    for blend in build.build():
                        record += flat_samples(blend, range(len(blend)))
                    golden[f"{release} blend"] = np.array(record, np.int32)
    np.savez_compressed(GOLDEN, **golden)
    print(GOLDEN, GOLDEN.stat().st_size, {key: len(value) for key, value in golden.items()})


if __name__ == "__main__":
    main(sys.argv[1])
