"""Every name of the modules that `millrace.megatron` replaces, and the import hook."""

import ast
import dataclasses
import inspect
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import oracle_megatron as oracle
import pytest

import millrace.megatron as ours
from millrace.megatron import errors

GUIDE = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text(encoding="utf-8")
FINALISERS = ("__del__",)  # not called by name; ours keep files mapped as long as arrays live


GPT = oracle.config_of(None, ours.GPTDatasetConfig, random_seed=1, sequence_length=8)


def missing_names() -> set[tuple[str, str]]:
    """The (module, name) pairs of the guide's table."""
    table = re.findall(r"^\| (`\w+`|all) \| (`.*`) \| ", GUIDE, re.MULTILINE)
    names = set()
    for where, cell in table:
        modules = oracle.MODULES if where == "all" else [where.strip("`")]
        names |= {(module, name) for module in modules for name in re.findall(r"`([\w.]+)`", cell)}
    return names


def defined_names(module: ModuleType) -> Iterator[str]:
    """The names that a module defines at its top level, without those it imports by name."""
    assert module.__file__ is not None
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            star = sys.modules[str(node.module)]
            yield from (name for name in vars(star) if not name.startswith("_"))


def every_name() -> list[tuple[str, str]]:
    return [
        (module, name)
        for module in oracle.MODULES
        for name in defined_names(oracle.module_of_megatron(module))
    ]


def parameters(function: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # compiled
        return None


def assert_same_parameters(where: str, mine: Any, theirs: Any) -> None:
    expected = parameters(theirs)
    if expected is None:
        return
    given = parameters(mine)
    assert given is not None, where
    extra = given[len(expected) :]
    assert [p.name for p in given[: len(expected)]] == [p.name for p in expected], where
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in extra), where


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The members that a class of Megatron-LM defines itself, after their decorators."""
    for name, member in vars(kind).items():
        inner = getattr(member, "__func__", getattr(member, "__wrapped__", member))
        is_theirs = str(getattr(inner, "__module__", "")).startswith("megatron.")
        if is_theirs or isinstance(member, property) or not name.startswith("_"):
            yield name, getattr(kind, name)


@pytest.mark.parametrize(("module", "name"), every_name())
def test_each_name_exists_or_is_listed_as_missing(module: str, name: str) -> None:
    missing = missing_names()
    if (module, name) in missing:
        assert name not in ours.__all__
        return
    assert name in ours.__all__
    theirs, mine = vars(oracle.module_of_megatron(module))[name], getattr(ours, name)
    if not inspect.isclass(theirs):
        if inspect.isroutine(theirs):
            assert_same_parameters(name, mine, theirs)
            assert mine.__doc__
        elif isinstance(theirs, (str, bytes, int)):
            assert mine == theirs
        return
    assert mine.__name__ == theirs.__name__
    for method, member in methods(theirs):
        where = f"{name}.{method}"
        if (module, where) in missing:
            assert not hasattr(mine, method), where
        elif method not in FINALISERS:
            assert hasattr(mine, method), where
            if inspect.isroutine(member):
                assert_same_parameters(where, getattr(mine, method), member)


def test_names_listed_as_missing_exist_in_megatron() -> None:
    for module, name in missing_names():
        there: Any = oracle.module_of_megatron(module)
        if name == "logger" and not hasattr(there, name):
            continue
        for part in name.split("."):
            there = getattr(there, part)


@pytest.mark.parametrize("mapped", [True, False])
def test_each_way_of_reading_has_its_own_class(tmp_path: Path, mapped: bool) -> None:
    prefix = oracle.write_sequences(
        tmp_path / "data", np.arange(9), np.random.default_rng(0), np.int32, (0, 12)
    )
    kinds = {True: "_MMapBinReader", False: "_FileBinReader"}
    used, other = getattr(ours, kinds[mapped]), getattr(ours, kinds[not mapped])
    dataset = ours.IndexedDataset(str(prefix), mmap=mapped)
    assert isinstance(dataset.bin_reader, used)
    assert isinstance(dataset.bin_reader, ours._BinReader)
    assert not isinstance(dataset.bin_reader, other)
    # They can be made directly, as in Megatron-LM.
    for kind in (used, other):
        reader = kind(f"{prefix}.bin")
        np.testing.assert_array_equal(reader.read(np.int32, 8, 28 * 4), dataset[8])
        with pytest.raises(errors.DataAssertionError, match=r"data\.bin has 144 bytes"):
            reader.read(np.int32, 8, 29 * 4)
    index = ours._IndexReader(f"{prefix}.idx", False)
    assert (index.sequence_count, index.document_count) == (9, 4)
    np.testing.assert_array_equal(index.sequence_lengths, np.arange(9))


def test_a_reader_that_was_replaced_is_used(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lengths = np.full(9, 20)
    first, second = (
        oracle.write_sequences(tmp_path / name, lengths, random, np.int32, (0, 900))
        for name in ("first", "second")
    )
    config = dataclasses.replace(GPT, path_to_cache=str(tmp_path / "cache"))

    def samples(prefix: Path, bin_path: Path) -> list[Any]:
        low = ours.IndexedDataset(str(prefix))
        low.bin_reader = ours._FileBinReader(f"{bin_path}.bin")
        indices = np.arange(9, dtype=np.int32)
        dataset = ours.GPTDataset(low, str(prefix), indices, 20, ours.Split.train, config)
        return [dataset[number]["tokens"].tolist() for number in range(20)]

    assert samples(first, second) == samples(second, second) != samples(first, first)


def test_object_stores_are_refused(tmp_path: Path) -> None:
    for refused in (
        lambda: ours.IndexedDataset("s3://bucket/data"),
        lambda: ours.IndexedDataset("ftp://bucket/data", mmap=False, object_storage_config=1),
        lambda: ours.IndexedDataset(str(tmp_path / "data"), mmap=False, s3_config=1),
        lambda: ours.GPTDataset.build_low_level_dataset("s3://bucket/data", GPT),
    ):
        with pytest.raises(AssertionError, match="Copy the pair to a file system"):
            refused()


PROGRAM = """
import numpy
import megatron.core.datasets.utils
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, _MMapBinReader
from megatron.core.datasets.multimodal_dataset import MockMultimodalDataset
from megatron.core.datasets.utils import Split, compile_helpers, get_blend_from_list


class Tokenizer:
    eod, pad, vocab_size = 0, 1, 1000
    unique_identifiers = {"class": "Tokenizer"}


if __name__ == "__main__":
    for name in ("a", "b"):
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=numpy.uint16)
        for length in range(1, 50):
            builder.add_document([str(number) for number in range(length)], [length])
        builder.finalize(f"{name}.idx")
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        blend=get_blend_from_list([30, "a", 0.7, "b"]),
        split="9,1,0",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(
        GPTDataset, [20, 4, 0], lambda: True, config
    ).build()
    assert isinstance(train, BlendedDataset) and test is None
    assert isinstance(train.datasets[0].dataset.bin_reader, _MMapBinReader)
    assert issubclass(MockMultimodalDataset, MockGPTDataset)
    assert callable(helpers.build_mapping)  # T5 calls it
    assert megatron.core.datasets.utils.Split is Split
    names = (type(train), type(train.datasets[0]), _MMapBinReader, Split, helpers.build_sample_idx)
    print(*[name.__module__ for name in names])
    print([train[number]["tokens"].tolist() for number in range(20)])
"""


@pytest.mark.filterwarnings("ignore")
def test_the_hook_of_the_guide_serves_an_unmodified_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [hook] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    for side in ("ours", "theirs"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "program.py").write_text(PROGRAM)
    (tmp_path / "ours" / "sitecustomize.py").write_text(hook)
    command = [sys.executable, "-W", "ignore", "program.py"]
    options: Any = {"cwd": tmp_path / "ours", "capture_output": True, "text": True}
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": "."}, **options)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path / "theirs")
    runpy.run_path("program.py", run_name="__main__")
    names, samples = done.stdout.splitlines()
    their_names, their_samples = capsys.readouterr().out.splitlines()
    rooms = ("blended", "gpt", "bin_readers", "utils", "helpers")
    assert names.split() == [f"millrace.megatron.{room}" for room in rooms]
    assert all(name.startswith("megatron.core.") for name in their_names.split())
    assert samples == their_samples
