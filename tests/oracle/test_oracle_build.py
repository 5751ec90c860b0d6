"""`build_datasets` against Megatron-LM's builder, on random configurations of `differential.py`.

Where Megatron-LM fails, adds epochs for ever, or gives a dataset without samples (see
docs/differences.md), millrace must refuse.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle_megatron as megatron
import pytest
from differential import Case, Generator, guarded, with_folder, write_files

import millrace

SAME = ("sequence_length", "drop_last_partial_validation_sequence", "reset_position_ids")
SAME += ("eod_mask_loss", "blend", "blend_per_split", "split", "multiple_validation_sets")
RENAMED = {
    "random_seed": "seed",
    "mid_level_dataset_surplus": "surplus",
    "add_extra_token_to_sequence": "add_extra_token",
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:The pad token id in the tokenizer collides with another special token id:UserWarning",
    "ignore::millrace.DuplicateDataWarning",
)


def make_case(number: int, folder: Path) -> Case:
    """Writes the token files of a case that both sides read alike.

    What is only of one side (mock data, floats, weights that are ignored, signs in a split) is
    taken out; what both must refuse stays.
    """
    draw = Generator(40, number)
    case = draw.case(mock_share=0)
    options = with_folder(case.options, folder)
    options.pop("sequences_per_dataset", None)
    options |= {"reset_attention_mask": False, "create_attention_mask": False}
    options |= {"num_dataset_builder_threads": 1, "path_to_cache": None}
    case.sizes = [None if size is None else max(size, 1) for size in case.sizes]
    if case.dtype == "float32":
        case.dtype = "uint16"
    if re.search("[-e]", options.get("split") or ""):
        options["split"] = "8,1,1"
    if not options["drop_last_partial_validation_sequence"]:
        # Megatron-LM fails an assertion if the last document of an order is empty.
        case.lengths = {
            name: [max(n, 1) for n in lengths] for name, lengths in case.lengths.items()
        }
    apart = options.get("multiple_validation_sets", False)
    if apart and (valid := options["blend_per_split"][1]) is not None:
        options["blend_per_split"][1] = valid[0], None
    options["full_validation"] = apart and options["full_validation"] and case.sizes[1] is None
    for blend in (options.get("blend"), *options.get("blend_per_split", [])):
        if blend is not None and blend[1] is not None:
            blend[1][:] = [max(weight, 0.01) for weight in blend[1]]
    write_files(case, folder)
    return dataclasses.replace(case, options=options)


def bookends_of(case: Case) -> list[tuple[float, float] | None] | None:
    """For some cases, where each split starts and ends instead of shares; there may be gaps."""
    random = np.random.default_rng(case.data_seed)
    if case.options.get("blend") is None or random.random() < 0.7:
        return None
    ends = sorted(random.random(6).tolist())
    last = None if random.random() < 0.5 else (ends[4], ends[5])
    return [(ends[0], ends[1]), (ends[2], ends[3]), last]


def build_theirs(case: Case) -> list[Any] | None:
    """The splits; None if Megatron-LM fails, or gives a dataset without samples."""
    try:
        with guarded(), np.errstate(all="ignore"):
            config = megatron.GPTDatasetConfig(**case.options)
            config.split_matrix = bookends_of(case) or config.split_matrix
            splits = megatron.build(config, case.sizes)
    except Exception:
        return None
    return splits if all(map(len, megatron.parts_of(splits))) else None


def ways_to_build(case: Case, cache: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    theirs, tokenizer = case.options, case.options["tokenizer"]
    options = {name: theirs[name] for name in SAME if name in theirs}
    options |= {name: theirs[other] for other, name in RENAMED.items()}
    options |= {"num_samples": tuple(case.sizes), "eod_token": tokenizer.eod}
    options["full_validation"] = theirs["full_validation"]
    pad, may_be_eod = tokenizer.pad_id, theirs["allow_ambiguous_pad_tokens"]
    options["pad_token"] = -1 if pad is None or (pad == tokenizer.eod and not may_be_eod) else pad
    if (bookends := bookends_of(case)) is not None:
        options["split"] = bookends
    options["access"] = "mmap" if theirs["mmap_bin_files"] else "file"
    yield "in memory", options
    options |= {"cache": cache, "num_threads": 1 + case.data_seed % 3}
    yield "into a cache", options
    yield "from the cache", options
    yield "from the cache, trusted", options | {"trust_cache": True}


@pytest.mark.parametrize("number", range(100))
def test_random_configurations_are_the_builders(number: int, tmp_path: Path) -> None:
    """A case is built by both, in every way."""
    case = make_case(number, tmp_path)
    theirs = build_theirs(case)
    for way, options in ways_to_build(case, tmp_path / "cache"):
        if theirs is None:
            with pytest.raises(millrace.MillraceError):
                millrace.build_datasets(millrace.DatasetConfig(**options))
        else:
            ours = millrace.build_datasets(millrace.DatasetConfig(**options))
            megatron.assert_same_datasets(list(ours), theirs, f"case {number}, {way}")
