"""`SFTDataset` against what `record_sft.py` has recorded of Megatron-LM, and against slow twins."""

import gzip
import itertools
import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record_sft
import sft_cases as cases
import torch
from hypothesis import given, settings, strategies as st

import millrace.megatron as ours
from millrace.errors import ConfigError, TextError
from millrace.megatron.errors import ConversationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The pad token id in the tokenizer collides"),
    pytest.mark.filterwarnings("ignore:.*summary:UserWarning"),
]
GOLDEN = np.load(record_sft.GOLDEN)
REPAIRED = {("0.16", "TypeError"), ("0.16", "IndexError"), ("0.16", "ValueError")}
REPAIRED |= {("0.19", "RuntimeError")}
"""Errors of Megatron-LM in whose place there may be a sample (`docs/differences.md`)."""


def recorded(key: str) -> Iterator[str | list[list[int]]]:
    """The arrays of each sample, or the name of its error."""
    numbers = iter(GOLDEN[key].tolist())
    for first in numbers:
        if first < 0:
            yield record_sft.ERRORS[-1 - first]
        else:
            sizes = itertools.chain([first], itertools.repeat(None))
            yield [
                [next(numbers) for _ in range(next(numbers) if size is None else size)]
                for _, size in zip(record_sft.NAMES, sizes, strict=False)
            ]


def config_of(tokenizer: Any, **options: Any) -> ours.GPTDatasetConfig:
    resets = ("reset_position_ids", "reset_attention_mask", "create_attention_mask")
    fixed = dict.fromkeys((*resets, "eod_mask_loss"), False)
    return ours.GPTDatasetConfig(tokenizer=tokenizer, random_seed=1, **{**fixed, **options})


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
    kinds = [(name, paths[" " in name], name.partition(" ")[0]) for name in cases.FORMATS]
    return {name: ours.SFTTokenizer(path, prompt) for name, path, prompt in kinds}


def twin(
    pairs: Iterable[Any], length: int, size: int, pad: int, eod: int, release: str
) -> list[list[int]]:
    """The arrays of a sample, token by token."""
    rows: list[list[int]] = [[], [], []]  # tokens, targets, positions
    bounds = [0]
    for pair in pairs:
        ids, targets = map(list, pair)
        if release == "0.16" and ids[-1:] != [eod]:
            ids, targets = [*ids, eod], [*targets, eod]
        for row, values in zip(rows, (ids, targets, range(len(ids))), strict=True):
            row.extend(values)
        while size > 1 and len(rows[0]) % (2 * size):
            for row, value in zip(rows, (pad, pad, rows[2][-1] + 1), strict=True):
                row.append(value)
        bounds.append(len(rows[0]))
        if len(rows[0]) > length:
            break
    tokens, targets, positions = (row[:length] for row in rows)
    tokens += [pad] * (length + 1 - len(tokens))
    targets += [pad] * (length + 1 - len(targets))
    while len(positions) < length:
        positions.append(positions[-1] + 1)
    bounds[-1] = length
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    if release == "0.19":
        used = bounds if len(bounds) <= length + 1 else sorted({*bounds})
        bounds = used + [length] * (length + 1 - len(used))
    mask = [int(target not in (pad, ours.IGNORE_INDEX)) for target in targets[1:]]
    return [tokens[:-1], targets[1:], mask, positions, bounds, [longest]]


@pytest.mark.parametrize("prompt", cases.FORMATS)
@pytest.mark.parametrize("release", record_sft.RELEASES)
def test_samples_are_megatrons(release: str, prompt: str, tokenizers: Any, tmp_path: Path) -> None:
    lines = ours.SFTLowLevelDataset(cases.write_lines(tmp_path / "lines.jsonl"))
    expected, tokenizer, num_equal = recorded(f"{release} {prompt}"), tokenizers[prompt], 0
    for length, size in cases.LENGTHS:
        options = {"sequence_length": length, "context_parallel_size": size}
        dataset = dataset_of(lines, tokenizer, sft_release=release, **options)
        for number, theirs in zip(range(len(dataset)), expected, strict=False):
            if not isinstance(theirs, str):
                assert arrays_of(dataset[number]) == theirs, (length, size, number)
                num_equal += 1
                continue
            try:
                sample = arrays_of(dataset[number])
            except ConversationError:
                continue
            assert (release, theirs) in REPAIRED
            conversations = dataset._split_conversations(lines[number])
            pairs = (tokenizer.tokenize_conversation(one, True, False) for one in conversations)
            rules = length, size, tokenizer.pad, tokenizer.eod, release
            assert sample == twin(pairs, *rules), (length, size, number)
    assert next(expected, None) is None
    assert num_equal > 80


@pytest.mark.parametrize("release", record_sft.RELEASES)
def test_blends_are_megatrons(release: str, tokenizers: Any, tmp_path: Path) -> None:
    others = cases.LINES[:10] + cases.LINES[40:]
    paths = [cases.write_lines(tmp_path / "lines.jsonl")]
    paths.append(cases.write_lines(tmp_path / "other.jsonl", others))
    options = {"blend": (paths, [0.3, 0.7]), "split": "6,3,1", "sft_release": release}
    config = config_of(tokenizers["identity"], sequence_length=400, **options)
    build = ours.BlendedMegatronDatasetBuilder
    blends = build(ours.SFTDataset, [70, 30, 10], lambda: True, config).build()
    expected = recorded(f"{release} blend")
    for blend in blends:
        for number, theirs in zip(range(len(blend)), expected, strict=False):
            if isinstance(theirs, str):
                assert (release, theirs) in REPAIRED or theirs == "IndexError"
            else:
                assert arrays_of(blend[number]) == theirs
    assert next(expected, None) is None


class Numbers:
    """A tokenizer of numbers: those below 0 are masked."""

    pad, eod, vocab_size, unique_identifiers = 1, 2, 100, ()

    def tokenize_conversation(self, conversation: Any, **_: bool) -> Any:
        ids = np.array([int(n) for m in conversation for n in m["content"].split()], np.int64)
        return abs(ids), np.where(ids < 0, ours.IGNORE_INDEX, ids)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_packs_are_the_twins(data: Any) -> None:
    numbers = st.lists(st.integers(-9, 9).filter(bool), max_size=9)
    line = data.draw(st.lists(numbers, min_size=1, max_size=9).filter(any))
    release = data.draw(st.sampled_from(["0.16", "0.17", "0.18", "0.19"]))
    length, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    messages = [{"role": "system", "content": " ".join(map(str, one))} for one in line]
    options = {"sequence_length": length, "context_parallel_size": size, "sft_release": release}
    dataset = dataset_of([messages], Numbers(), num_samples=3, **options)
    pairs = [Numbers().tokenize_conversation([message]) for message in messages]
    sample = arrays_of(dataset[2])
    assert sample == twin(pairs, length, size, Numbers.pad, Numbers.eod, release)
    counts = dataset.summary()
    num_ends = sum(2 not in ids[-1:] for ids, _ in pairs) if release == "0.16" else 0
    assert counts["tokens"] + counts["cut_tokens"] == sum(len(ids) for ids, _ in pairs) + num_ends
    assert counts["trained_tokens"] == sum(sample[2])
    assert counts["untrained_lines"] == (not any(sample[2]))


STRADDLING = ("\n<SPECIAL_11>", "!<", "<SPECIAL_11>User")
KINDS = ({}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True})
PIECES = (
    "<SPECIAL_11>",
    "<SPECIAL_10>",
    "<SPECIAL_1",
    "1>",
    "User",
    "!",
    "\n",
    " ",
    "a",
    "é",
    "<unk>",
)


@pytest.mark.parametrize("more", [(), *((text,) for text in STRADDLING)])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_turns_are_encoded_as_in_the_conversation(kind: int, more: Any, tmp_path: Path) -> None:
    """One encoding of each turn, where a border proves it, against the library's own of both."""
    path = cases.write_tokenizer(tmp_path, more, **KINDS[kind])
    prompts = [ours.SFTTokenizer(path, prompt) for prompt in cases.FORMATS[:2]]
    has_borders = kind in (0, 2) and more not in [STRADDLING[:1], STRADDLING[1:2]]
    assert [len(one._borders) == 2 for one in prompts] == [has_borders] * 2
    contents = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)

    @given(st.lists(contents, min_size=1, max_size=4))
    @settings(max_examples=20, deadline=None, database=None)
    def check(texts: list[str]) -> None:
        turns = [t for text in texts for t in (f"user: {text}", f"assistant: {text}")]
        conversation = cases.chat(f"system: {texts[0]}", *turns)
        for one in prompts:
            rendered = [one._text_of(message) for message in conversation]
            whole, *alone = one._library(["".join(rendered), *rendered])["input_ids"]
            if [*itertools.chain(*alone)] != whole:
                with pytest.raises(ConversationError, match="other tokens alone"):
                    one.tokenize_conversation(conversation, True, False)
                continue
            tokens, targets = one.tokenize_conversation(conversation, True, False)
            roles = [m["role"] for m, ids in zip(conversation, alone, strict=True) for _ in ids]
            places = [place for ids in alone for place in range(len(ids))]
            is_masked = (np.array(roles) != "assistant") | (np.array(places) < one._num_masked)
            assert tokens.tolist() == whole
            assert (targets == ours.IGNORE_INDEX).tolist() == is_masked.tolist()

    check()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "line 3 is not valid JSON"),
        ('["messages"]', 'line 3 has no list "messages"'),
        ('{"messages": {"role": "user"}}', 'line 3 has no list "messages"'),
        ('{"messages": [{"content": "a"}]}', 'line 3 has no list "messages"'),
        ('{"messages": []}', "line 3 has no tokens"),
        (
            json.dumps({"messages": cases.chat("user: a", "assistant: ")}),
            "line 3, conversation 1: turn 2",
        ),
        (
            json.dumps({"messages": [*cases.LINES[0], {"role": "system", "content": 5}]}),
            "conversation 2",
        ),
        (json.dumps({"messages": cases.chat("user: a", "cook: b")}), "has the role 'cook'"),
    ],
)
def test_errors_name_file_and_line(
    line: str, message: str, tokenizers: Any, tmp_path: Path
) -> None:
    path, good = tmp_path / "x.jsonl", json.dumps({"messages": cases.LINES[0]})
    path.write_bytes(b"\xef\xbb\xbf" + f"{good}\r\n\r\n{line}\n\n{good}".encode())
    lines = ours.SFTLowLevelDataset(str(path))
    dataset = dataset_of(lines, tokenizers["nemotron-nano-v2"], sequence_length=99)
    assert len(dataset) == 3
    assert lines[0] == lines[-1] == cases.LINES[0]
    with pytest.raises(TextError, match=rf"x\.jsonl, .*{message}"):
        dataset[1]


def test_what_is_lost_is_counted(tokenizers: Any) -> None:
    lines = [cases.of_lengths(5, 5), cases.of_lengths(8, 3, 4), cases.chat("system: <unk>")]
    dataset = dataset_of(lines, tokenizers["identity"], num_samples=4, sequence_length=10)
    dataset[0]
    with pytest.warns(UserWarning, match="row 1: .*'cut_tokens': 1, .*summary") as warned:
        _ = dataset[1], dataset[1]
    assert len(warned) == 1
    # The first token is no label; nor is <unk>, the padding token of this format.
    assert [*dataset.summary().values()] == [3, 5, 21, 18, 2, 5, 0, 1]
    messages = cases.chat("user: a", "assistant: b<|endoftext|>")
    with pytest.warns(UserWarning, match="is masked wherever it occurs"):
        of_eos = dataset_of([messages], tokenizers["default without pad"], sequence_length=60)
    assert of_eos.summary()["masked_tokens"] == 1


def test_workers_give_the_same_batches(tokenizers: Any) -> None:
    lines = [line for line in cases.LINES[:9] if line]
    dataset = dataset_of(lines, tokenizers["nemotron-h-aligned"], sequence_length=300)
    expected = [arrays_of(dataset[number]) for number in range(len(dataset))]
    loader = torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=2)
    batches = [batch[name] for batch in loader for name in record_sft.NAMES[:1]]
    assert torch.cat(batches).tolist() == [arrays[0] for arrays in expected]
    copy = pickle.loads(pickle.dumps(dataset))
    assert [arrays_of(copy[number]) for number in range(len(copy))] == expected


def test_what_cannot_work_is_refused(tokenizers: Any, tmp_path: Path) -> None:
    one, fixed = [cases.LINES[0]], {"tokenizer": tokenizers["identity"], "sequence_length": 8}
    for name in ("reset_position_ids", "reset_attention_mask", "create_attention_mask"):
        with pytest.raises(AssertionError, match=name):
            dataset_of(one, **{**fixed, name: True})
    with pytest.raises(ConfigError, match="sft_release"):
        dataset_of(one, **fixed, sft_release="0.20")
    with pytest.raises(AssertionError, match="has no lines"):
        dataset_of([], **fixed)
    with pytest.raises(IndexError):
        dataset_of(one, **fixed)[1]
    with pytest.raises(ConfigError, match="prompt_format"):
        ours.SFTTokenizer(str(tmp_path), "chatml")
    path = cases.write_tokenizer(tmp_path / "bare")
    config = tmp_path / "bare" / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match="chat template"):
        ours.SFTTokenizer(path, "default")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(TextError, match="Decompress"):
        ours.SFTLowLevelDataset(str(tmp_path / "x.jsonl.gz"))
