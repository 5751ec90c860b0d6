"""`SFTDataset`: a line of JSONL with packed conversations for each sample, as in Megatron-LM."""

import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch

from millrace.checks import check_choice, check_path, shown
from millrace.encoding.vocabulary import package
from millrace.errors import TextError
from millrace.megatron.base import MegatronDataset
from millrace.megatron.errors import ConversationError, require
from millrace.megatron.sft_tokenizer import IGNORE_INDEX, SFTTokenizer
from millrace.megatron.utils import GPTDatasetConfig
from millrace.storage import storage_of

__all__ = ["IGNORE_INDEX", "SFTDataset", "SFTLowLevelDataset", "SFTTokenizer"]

_BLOCK = 1 << 26  # bytes searched for newlines at a time


class SFTLowLevelDataset:
    """The messages of each line of a JSONL file; empty lines are left out.

    Args:
        dataset_path: Path of the file. A line is an object with "messages": objects with a "role".

    Raises:
        TextError: A compressed file; when a line is read, one that is no such object.
    """

    def __init__(self, dataset_path: str) -> None:
        self.path = check_path("dataset_path", dataset_path)
        self._file = file = storage_of(self.path).open(self.path, "file")
        if file.read(0, min(2, file.size)).tobytes() in (b"\x1f\x8b", b"\x28\xb5"):
            raise TextError(f"{self.path} is compressed: lines cannot be found. Decompress it")
        blocks = ((place, min(_BLOCK, file.size - place)) for place in range(0, file.size, _BLOCK))
        newlines = [np.flatnonzero(file.read(*block) == 10) + block[0] for block in blocks]
        self._ends = np.concatenate([[-1], *newlines, [file.size]])
        self._lines = np.flatnonzero(np.diff(self._ends) > 2)  # "\n" and "\r\n" are empty lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, idx: Any) -> list[dict[str, Any]]:
        row = range(len(self))[idx]
        start, stop = self._ends[self._lines[row] :][:2].tolist()
        line = self._file.read(start + 1, stop - start - 1).tobytes().removeprefix(b"\xef\xbb\xbf")
        try:
            record = package("orjson").loads(line)
        except ValueError as error:
            raise TextError(f"{self.place_of(row)} is not valid JSON: {error}") from None
        messages = record.get("messages") if isinstance(record, dict) else None
        objects: Any = messages if isinstance(messages, list) else [None]
        if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in objects):
            what = f'has no list "messages" of objects with a "role": {shown(record, 60)}'
            raise TextError(f"{self.place_of(row)} {what}. Repair or remove the line")
        return list(objects)

    def place_of(self, row: int) -> str:
        """A row's place, for messages."""
        return f"{self.path}, line {self._lines[row] + 1}"


class SFTDataset(MegatronDataset):
    """Packed conversations: sample i is line `indices[i % len(indices)]` of a JSONL file.

    Each system turn starts a conversation. What lies behind the cut at `sequence_length` is lost:
    the first such line is a warning, and `summary` counts all.

    Args:
        dataset: `SFTLowLevelDataset`, or any sequence of lists of messages.
        dataset_path, indices, num_samples, index_split: As in `MegatronDataset`.
        config: Options. `sft_release` is the release of Megatron-LM to follow; with a
            `context_parallel_size` above 1, conversations end at multiples of twice that size; the
            `tokenizer` is an `SFTTokenizer`, or has its `tokenize_conversation`, `pad` and `eod`.

    Raises:
        ConfigError: Options that packed conversations do not have.
    """

    config: GPTDatasetConfig
    _masks_pad = True  # as in Megatron-LM

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        check_choice("sft_release", config.sft_release, ("0.16", "0.17", "0.18", "0.19"))
        for name in ("reset_position_ids", "reset_attention_mask", "create_attention_mask"):
            require(not getattr(config, name), f"{name} must be False for packed conversations")
        has_eod = config.sft_release != "0.16" or config.tokenizer.eod is not None
        require(has_eod, "sft_release 0.16 appends EOD: the tokenizer needs one")
        has_lines = self.num_samples == 0 or (self.indices is not None and len(self.indices) > 0)
        require(has_lines, f"{self.dataset_path} has no lines for {self.index_split.name}")
        self._has_warned = False

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> SFTLowLevelDataset:
        return SFTLowLevelDataset(dataset_path)

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: Any) -> dict[str, torch.Tensor]:
        """A sample.

        Returns:
            `tokens`, `labels` and `position_ids` int64 and `loss_mask` float32, each
            [sequence_length]; `cu_seqlens` int32, where conversations start, and the end: for
            release 0.19 filled up to [sequence_length + 1]; `max_seqlen` int32 [].

        Raises:
            ConversationError, TextError: A line that cannot be used; the message names it.
        """
        number, length = range(len(self))[idx], self.config.sequence_length
        arrays, _ = self._pack(int(self.indices[number % len(self.indices)]))
        if self.config.sft_release == "0.19":
            bounds = arrays["cu_seqlens"]
            firsts = bounds if len(bounds) <= length + 1 else np.unique(bounds)
            arrays["cu_seqlens"] = np.full(length + 1, length, np.int32)
            arrays["cu_seqlens"][: len(firsts)] = firsts
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def summary(self) -> dict[str, int]:
        """Counts over the lines of one epoch, all of which are tokenized for it.

        Returns:
            `lines`; their `conversations`, `tokens` and `trained_tokens` in samples, the rest being
            padding; `cut_conversations` and `cut_tokens`, lost wholly or in part; `masked_tokens`,
            untrained only because they are the padding token; `untrained_lines`.
        """
        total: Counter[str] = Counter()
        for row in self.indices.tolist():
            total.update(self._pack(row, reads_all=True)[1])
        return dict(total)

    def _split_conversations(self, merged_conversations: Any) -> list[list[Any]]:
        conversations: list[list[Any]] = []
        for message in merged_conversations:
            if message["role"] == "system" or not conversations:
                conversations.append([])
            conversations[-1].append(message)
        return conversations

    def _read(self, row: int, place: str, reads_all: bool) -> tuple[list[Any], list[int], int]:
        """Tokens and targets of a line's conversations up to the cut, their sizes, each with that
        of the padding behind it, and the number of all conversations."""
        tokenizer, size = self.config.tokenizer, self.config.context_parallel_size or 1
        options = {"return_target": True, "add_generation_prompt": False}
        unit, total = 2 * size if size > 1 else 1, 0
        conversations = self._split_conversations(self.dataset[row])
        pairs, sizes = [], []
        for number, one in enumerate(conversations, start=1):
            try:
                pair = tokenizer.tokenize_conversation(one, **options)
            except Exception as error:  # also what templates and other tokenizers raise
                what = f"{place}, conversation {number}: {error or type(error).__name__}"
                raise ConversationError(what) from error
            if self.config.sft_release == "0.16" and pair[0][-1:].tolist() != [tokenizer.eod]:
                pair = [np.append(array, tokenizer.eod) for array in pair]
            pairs.append(pair)
            sizes += [len(pair[0]), -(total + len(pair[0])) % unit]
            total += sum(sizes[-2:])
            if total > self.config.sequence_length and not reads_all:
                break
        if total == 0:
            raise ConversationError(f"{place} has no tokens: remove it")
        return pairs, sizes, len(conversations)

    def _pack(self, row: int, reads_all: bool = False) -> tuple[dict[str, Any], dict[str, int]]:
        """A line's arrays, and counts, for which it need not read what is cut."""
        length, pad = self.config.sequence_length, self.config.tokenizer.pad
        place_of = getattr(self.dataset, "place_of", None)
        place = place_of(row) if place_of else f"{self.dataset_path}, row {row}"
        pairs, sizes, num_conversations = self._read(row, place, reads_all)
        is_real = np.repeat(np.arange(len(sizes)) % 2 == 0, sizes)
        rows = np.full((2, max(len(is_real), length + 1)), pad, np.int64)
        rows[:, : len(is_real)][:, is_real] = np.concatenate(pairs, axis=1)
        rows[:, length] = pad  # also where the line goes on: its next label is lost
        tokens, labels = rows[0, :length], rows[1, 1 : length + 1]
        is_trained = (labels != pad) & (labels != IGNORE_INDEX)
        ends = np.add(sizes[::2], sizes[1::2]).cumsum()
        bounds = np.append(0, ends[: ends.searchsorted(length, "right") + 1]).astype(np.int32)
        starts, places = np.repeat(bounds[:-1], np.diff(bounds)), np.arange(length)
        bounds[-1] = length
        arrays = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": is_trained.astype(np.float32),
            "position_ids": places - starts[np.minimum(places, len(starts) - 1)],
            "cu_seqlens": bounds,
            "max_seqlen": np.array(np.diff(bounds).max(), np.int32),
        }
        is_label = is_real[1:length]
        counts = {
            "lines": 1,
            "conversations": len(bounds) - 1,
            "tokens": int(is_real[:length].sum()),
            "trained_tokens": int(is_trained.sum()),
            "cut_conversations": num_conversations - int((ends - sizes[1::2] <= length).sum()),
            "cut_tokens": int(is_real[length:].sum()),
            "masked_tokens": int((is_label & (labels[: len(is_label)] == pad)).sum()),
            "untrained_lines": int(not is_trained.any()),
        }
        is_lossy = counts["cut_conversations"] or counts["untrained_lines"]
        if is_lossy and not (self._has_warned or reads_all):
            self._has_warned = True
            warnings.warn(f"{place}: {counts}; see summary()", stacklevel=3)
        return arrays, counts
