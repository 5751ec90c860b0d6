"""Megatron-LM's dataset of packed conversations."""

import os
import warnings
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.checks import check_choice, check_int, shown
from millrace.errors import TextError
from millrace.megatron.base import MegatronDataset, filled_bounds
from millrace.megatron.errors import ConversationError, require
from millrace.megatron.utils import GPTDatasetConfig
from millrace.online import open_rows

__all__ = ["IGNORE_INDEX", "SFTDataset", "SFTLowLevelDataset"]

IGNORE_INDEX = -100
"""Target of a token that is not trained on."""


class SFTLowLevelDataset:
    """The messages of each line of a JSONL file; blank lines are left out.

    Args:
        dataset_path: Path of the file, or of others that `millrace.online.open_rows` reads. A line
            is an object with "messages": objects with a "role".
        cache: Folder for the index of the lines. None: a temporary one.

    Raises:
        TextError: A file whose lines have no numbers, such as a compressed one. Also when a line is
            read: for a line that is no such object, or a file that has changed.
    """

    def __init__(self, dataset_path: str, cache: str | os.PathLike[str] | None = None) -> None:
        self.rows = open_rows(dataset_path, cache=cache)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, idx: Any) -> list[dict[str, Any]]:
        row = range(len(self))[idx]
        [record] = self.rows.rows([row])
        messages = record.get("messages")
        objects: Any = messages if isinstance(messages, list) else [None]
        if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in objects):
            what = f'has no list "messages" of objects with a "role": {shown(record, 60)}'
            raise TextError(f"{self.rows.place(row)} {what}. Repair or remove the line")
        return list(objects)


class SFTDataset(MegatronDataset):
    """Packed conversations: sample i is line `indices[i % len(indices)]` of a JSONL file.

    Each system turn starts a conversation. What lies behind the cut at `sequence_length` is lost,
    which is a warning, and `summary` counts it.

    Args:
        dataset: `SFTLowLevelDataset`, or any sequence of lists of messages.
        dataset_path, indices, num_samples, index_split: As in `MegatronDataset`.
        config: Options. `sft_release` is the release of Megatron-LM to follow; with a
            `context_parallel_size` above 1, conversations end at multiples of twice that size; the
            `tokenizer` is Megatron-LM's `SFTTokenizer`, or another that has `pad`, `eod` and its
            `tokenize_conversation`.

    Raises:
        ConfigError: Options that packed conversations do not have.
    """

    config: GPTDatasetConfig
    _masks_pad = True  # as in Megatron-LM

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        check_choice("sft_release", config.sft_release, ("0.16", "0.17", "0.18", "0.19"))
        check_int("sequence_length", config.sequence_length, 1)
        self._pad = check_int("the tokenizer's pad", config.tokenizer.pad)
        size = check_int("context_parallel_size", config.context_parallel_size or 1, 1)
        self._unit = 2 * size if size > 1 else 1
        resets = ("reset_position_ids", "reset_attention_mask", "create_attention_mask")
        for name in (*resets, "fast_cache_load"):
            require(not getattr(config, name), f"{name} must be False for packed conversations")
        has_lines = self.num_samples == 0 or len(self.indices) > 0
        require(has_lines, f"{self.dataset_path} has no lines for {self.index_split.name}")

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> SFTLowLevelDataset:
        return SFTLowLevelDataset(dataset_path, config.path_to_cache)

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
        number = range(len(self))[idx]
        arrays, counts = self._pack(int(self.indices[number % len(self.indices)]))
        if counts["cut_tokens"] or counts["dropped_conversations"] or counts["untrained_lines"]:
            what = "lines are cut, or have nothing to learn from; summary() counts them"
            warnings.warn(f"{self.dataset_path}: {what}", stacklevel=2)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def summary(self) -> dict[str, int]:
        """Counts over the lines of one epoch, all of which are tokenized for it.

        Returns:
            `tokens` in samples, the rest being padding; `trained_tokens`; `cut_tokens`, behind the
            cut, of conversations that were begun; `dropped_conversations` behind those;
            `untrained_lines`.
        """
        total: Counter[str] = Counter()
        for row in self.indices.tolist():
            total.update(self._pack(row)[1])
        return dict(total)

    def _tokenized(self, conversation: list[Any], place: str) -> Any:
        """The tokens and the targets of a conversation."""
        tokenizer, options = self.config.tokenizer, {"add_generation_prompt": False}
        try:
            pair = tokenizer.tokenize_conversation(conversation, return_target=True, **options)
        except Exception as error:  # also what templates and other tokenizers raise
            raise ConversationError(f"{place}: {str(error) or type(error).__name__}") from error
        if self.config.sft_release == "0.16" and pair[0][-1:].tolist() != [tokenizer.eod]:
            pair = [np.append(array, tokenizer.eod) for array in pair]
        return pair

    def _pack(self, row: int) -> tuple[dict[str, NDArray[Any]], Counter[str]]:
        """The arrays of a line, and the counts of `summary`."""
        length, pad = self.config.sequence_length, self._pad
        rows = getattr(self.dataset, "rows", None)
        place = rows.place(row) if rows else f"{self.dataset_path}, row {row}"
        messages = self.dataset[row]
        starts = [k for k, one in enumerate(messages) if one["role"] == "system" or k == 0]
        conversations = [messages[slice(*ends)] for ends in pairwise([*starts, len(messages)])]
        pack = np.full((2, length + 1), pad, np.int64)  # tokens and targets; the last stay padding
        position_ids, bounds, counts = np.arange(length), [0], Counter[str]()
        for number, one in enumerate(conversations, start=1):
            pair = self._tokenized(one, f"{place}, conversation {number}")
            start, stop = bounds[-1], bounds[-1] + len(pair[0])
            end = min(stop, length)
            pack[:, start:end] = [array[: end - start] for array in pair]
            if stop > start:  # padding counts on behind the last token
                position_ids[start:] = np.arange(length - start)
            counts.update(tokens=end - start, cut_tokens=stop - end)
            bounds.append(stop + -stop % self._unit)
            if bounds[-1] > length:
                break
        if bounds[-1] == 0:
            raise ConversationError(f"{place} has no tokens: remove it")
        labels, is_newest = pack[1, 1:], self.config.sft_release == "0.19"
        is_trained = (labels != pad) & (labels != IGNORE_INDEX)
        counts["trained_tokens"] = int(np.count_nonzero(is_trained))
        counts["dropped_conversations"] = len(conversations) - len(bounds) + 1
        counts["untrained_lines"] = int(not is_trained.any())
        bounds[-1] = length
        arrays = {
            "tokens": pack[0, :-1],
            "labels": labels,
            "loss_mask": is_trained.astype(np.float32),
            "position_ids": position_ids,
            **filled_bounds(bounds, length + 1 if is_newest else len(bounds)),
        }
        return arrays, counts
