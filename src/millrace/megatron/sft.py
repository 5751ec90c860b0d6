"""`SFTDataset`: a line of JSONL with packed conversations for each sample, as in Megatron-LM."""

import operator
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.checks import check_choice, check_path, shown
from millrace.errors import TextError
from millrace.megatron.base import MegatronDataset
from millrace.megatron.errors import ConversationError, require
from millrace.megatron.sft_tokenizer import IGNORE_INDEX, SFTTokenizer
from millrace.megatron.utils import GPTDatasetConfig
from millrace.samples.tokens import Numbers, TokenBatch, concatenate
from millrace.storage import storage_of
from millrace.text.formats import separated_records
from millrace.text.json_values import BadDocumentError, parse_json

__all__ = ["IGNORE_INDEX", "SFTDataset", "SFTLowLevelDataset", "SFTTokenizer"]

_BLOCK = 1 << 26  # bytes searched for newlines at a time


class SFTLowLevelDataset:
    """The messages of each line of a JSONL file; empty lines are left out.

    Args:
        dataset_path: Path of the file. A line is an object with "messages", a list of objects, each
            with a "role".

    Raises:
        TextError: A compressed file. When a line is read: one that is no such object.
    """

    def __init__(self, dataset_path: str) -> None:
        self.path = check_path("dataset_path", dataset_path)
        self._file = file = storage_of(self.path).open(self.path, "file")
        if file.read(0, min(2, file.size)).tobytes() in (b"\x1f\x8b", b"\x28\xb5"):
            raise TextError(f"{self.path} is compressed: lines cannot be found. Decompress it")
        newlines = [
            np.flatnonzero(file.read(place, min(_BLOCK, file.size - place)) == 10) + place
            for place in range(0, file.size, _BLOCK)
        ]
        self._ends = np.concatenate([[-1], *newlines, [file.size]])
        self._lines = np.flatnonzero(np.diff(self._ends) > 2)  # "\n" and "\r\n" are empty lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, idx: Any) -> list[dict[str, Any]]:
        row = range(len(self))[idx]
        start, stop = self._ends[self._lines[row] :][:2].tolist()
        line = self._file.read(start + 1, stop - start - 1).tobytes().removeprefix(b"\xef\xbb\xbf")
        try:
            try:
                record = separated_records.loads(line)
            except ValueError:
                record = parse_json(line)  # which says what is wrong
        except BadDocumentError as error:
            raise TextError(f"{self.place_of(row)}: {error}") from None
        messages = record.get("messages") if isinstance(record, dict) else None
        is_list = isinstance(messages, list)
        if not is_list or not all(isinstance(one, dict) and "role" in one for one in messages):
            what = f'has no list "messages" of objects with a "role": {shown(record, 60)}'
            raise TextError(f"{self.place_of(row)} {what}. Repair or remove the line")
        return list(messages)

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

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        check_choice("sft_release", config.sft_release, ("0.16", "0.17", "0.18", "0.19"))
        for name in ("reset_position_ids", "reset_attention_mask", "create_attention_mask"):
            require(not getattr(config, name), f"{name} must be False for packed conversations")
        has_lines = self.indices is not None and len(self.indices) > 0
        split = f"the {self.index_split.name} split of {self.dataset_path}"
        require(has_lines or self.num_samples == 0, f"{split} has no lines; give it a share")
        self._has_warned = False

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> SFTLowLevelDataset:
        return SFTLowLevelDataset(dataset_path)

    def _allows_ambiguous_pad(self) -> bool:
        return True  # as Megatron-LM, which masks the pad token wherever it occurs

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: Any) -> dict[str, torch.Tensor]:
        """A sample.

        Returns:
            `tokens`, `labels` and `position_ids` int64 and `loss_mask` float32, each
            [sequence_length]; `cu_seqlens` int32, where the conversations start, and the end:
            [conversations + 1], for release 0.19 filled up to [sequence_length + 1]; `max_seqlen`
            int32 [].

        Raises:
            ConversationError, TextError: A line that cannot be used; the message names it.
        """
        tokens, targets, position_ids, bounds, _ = self._pack(self._row_of(operator.index(idx)))
        cu_seqlens, length = bounds, self.config.sequence_length
        if self.config.sft_release == "0.19":
            cu_seqlens = np.full(length + 1, length, np.int32)
            firsts = bounds if len(bounds) <= length + 1 else np.unique(bounds)
            cu_seqlens[: len(firsts)] = firsts
        arrays = {
            "tokens": tokens[:-1],
            "labels": targets[1:],
            "loss_mask": self._is_trained(targets)[1:].astype(np.float32),
            "position_ids": position_ids,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": np.diff(bounds).max(keepdims=True)[0, ...],
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """The samples for a `TokenDataset`, with their padding: a part is a conversation."""
        batches = []
        for number in sample_numbers.tolist():
            tokens, targets, _, bounds, _ = self._pack(self._row_of(number))
            ends, starts = np.array([len(tokens)]), np.setdiff1d(bounds[:-1], len(tokens) - 1)
            batches.append(TokenBatch(tokens, ends, self._is_trained(targets), starts))
        return concatenate(batches)

    def fingerprint(self) -> dict[str, Any]:
        """See `TokenSource.fingerprint`."""
        names = ("sequence_length", "sft_release", "context_parallel_size")
        return {
            "kind": "sft",
            "rows": [int(self.indices[0]), int(self.indices[-1]), len(self.indices), len(self)],
            "tokenizer": dict(self.config.tokenizer.unique_identifiers),
            **{name: getattr(self.config, name) for name in names},
        }

    def summary(self) -> dict[str, int]:
        """Counts over the lines of one epoch, all of which are tokenized for it.

        Returns:
            `lines`; their `conversations`, `tokens`, `padding` and `trained_tokens` in samples;
            `cut_conversations` and `cut_tokens`, which are lost wholly or in part; `masked_tokens`
            that are not trained on only because they are the padding token; `untrained_lines`.
        """
        total: Counter[str] = Counter()
        for row in self.indices.tolist():
            total.update(self._pack(row, reads_all=True)[-1])
        return dict(total)

    def _row_of(self, number: int) -> int:
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no sample {number}; the dataset has 0 to {len(self) - 1}")
        return int(self.indices[number % len(self.indices)])

    def _split_conversations(self, merged_conversations: Any) -> list[list[Any]]:
        conversations: list[list[Any]] = []
        for message in merged_conversations:
            if message["role"] == "system" or not conversations:
                conversations.append([])
            conversations[-1].append(message)
        return conversations

    def _is_trained(self, targets: Numbers) -> NDArray[np.bool_]:
        is_trained: NDArray[np.bool_] = targets != self.config.tokenizer.pad
        return is_trained & (targets != IGNORE_INDEX)

    def _pairs(self, conversations: Any, place: str) -> Iterator[list[NDArray[np.int64]]]:
        """Tokens and targets of each conversation of a line."""
        tokenizer = self.config.tokenizer
        for number, one in enumerate(conversations, start=1):
            try:
                options = {"return_target": True, "add_generation_prompt": False}
                pair = list(tokenizer.tokenize_conversation(one, **options))
            except ConversationError as error:
                raise ConversationError(f"{place}, conversation {number}: {error}") from error
            if self.config.sft_release == "0.16" and pair[0][-1:].tolist() != [tokenizer.eod]:
                pair = [np.append(array, tokenizer.eod) for array in pair]
            yield pair

    def _pack(self, row: int, reads_all: bool = False) -> tuple[Any, ...]:
        """A line as a sample: its tokens and targets, one more than the sequence length, position
        ids, bounds of the conversations (int32), and counts, which need not read what is cut."""
        length, pad = self.config.sequence_length, self.config.tokenizer.pad
        parallel = self.config.context_parallel_size or 1
        unit = 2 * parallel if parallel > 1 else 1
        place = getattr(self.dataset, "place_of", f"{self.dataset_path}, row {{}}".format)(row)
        conversations = self._split_conversations(self.dataset[row])
        pairs, sizes, total = [], [], 0
        for pair in self._pairs(conversations, place):
            pairs.append(pair)
            sizes += [len(pair[0]), -(total + len(pair[0])) % unit]
            total += sum(sizes[-2:])
            if total > length and not reads_all:
                break
        if total == 0:
            raise ConversationError(f"{place} has no tokens: remove it")
        is_real = np.repeat(np.arange(len(sizes)) % 2 == 0, sizes)
        rows = np.full((2, max(total, length + 1)), pad)
        rows[:, :total][:, is_real] = np.concatenate(pairs, axis=1)
        rows[:, length] = pad
        tokens, targets = rows[:, : length + 1]
        ends = np.add(sizes[::2], sizes[1::2]).cumsum()
        bounds = np.append(0, ends[: ends.searchsorted(length, "right") + 1]).astype(np.int32)
        starts, numbers = np.repeat(bounds[:-1], np.diff(bounds)), np.arange(length)
        position_ids = numbers - starts[np.minimum(numbers, len(starts) - 1)]
        bounds[-1] = length
        is_token, is_trained = is_real[:length], self._is_trained(targets)[1:]
        is_pad = targets[1 : len(is_token)] == pad
        num_whole = np.count_nonzero(ends - sizes[1::2] <= length)
        counts = {
            "lines": 1,
            "conversations": len(bounds) - 1,
            "tokens": np.count_nonzero(is_token),
            "padding": length - np.count_nonzero(is_token),
            "trained_tokens": np.count_nonzero(is_trained),
            "cut_conversations": len(conversations) - num_whole,
            "cut_tokens": np.count_nonzero(is_real[length:]),
            "masked_tokens": np.count_nonzero(is_pad & is_token[1:]),
            "untrained_lines": int(not is_trained.any()),
        }
        if not self._has_warned and (counts["cut_conversations"] or counts["untrained_lines"]):
            self._has_warned = True
            warnings.warn(f"{place}: {counts}; see summary()", stacklevel=2)
        return tokens, targets, position_ids, bounds, counts
