"""Megatron-LM's dataset of packed conversations, and its tokenizer of conversations."""

import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.checks import check_choice, check_int, check_path, shown
from millrace.encoding import Tokenizer
from millrace.encoding.vocabulary import package
from millrace.errors import TextError
from millrace.megatron.base import MegatronDataset
from millrace.megatron.errors import ConversationError, require
from millrace.megatron.utils import GPTDatasetConfig
from millrace.online import open_rows

__all__ = ["IGNORE_INDEX", "SFTDataset", "SFTLowLevelDataset", "SFTTokenizer"]

IGNORE_INDEX = -100
"""Target of a token that is not trained on."""

Messages = Sequence[Mapping[str, Any]]


class _Format(NamedTuple):
    pad: str | None = "<unk>"  # None: the tokenizer's own, or EOS
    turns: Mapping[str, tuple[str, str]] = {}  # texts around the content; none: nothing is masked
    num_masked: int = 0  # of the assistant's first tokens
    switches: tuple[str, ...] = ()  # removed from what the others say


_SYSTEM, _USER, _ASSISTANT = "<SPECIAL_10>System\n", "<SPECIAL_11>User\n", "<SPECIAL_11>Assistant\n"
_STOP = "\n<SPECIAL_12>\n"
_NANO = {"system": (_SYSTEM, "\n"), "user": (_USER, "\n"), "assistant": (_ASSISTANT, _STOP)}
_ALIGNED = {"system": (_SYSTEM, "\n"), "user": (_USER, f"\n{_ASSISTANT}"), "assistant": ("", "\n")}
_CONTENTS = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
_FORMATS = {
    "nemotron-nano-v2": _Format(turns=_NANO, num_masked=3, switches=("/think", "/no_think")),
    "nemotron-h-aligned": _Format("<SPECIAL_233>", _ALIGNED),
    "identity": _Format(),
    "default": _Format(pad=None),
}


class SFTTokenizer:
    """Conversations to tokens and targets, as Megatron-LM's tokenizer of this name.

    Args:
        tokenizer_path: Folder of a fast Hugging Face tokenizer.
        prompt_format: "nemotron-nano-v2" or "nemotron-h-aligned", where the assistant's turns are
            trained on; "identity" (the contents alone) or "default" (the tokenizer's own template),
            where every token is.

    Attributes:
        pad, pad_id: Id of the format's padding token. For "default" it is the tokenizer's own, or
            EOS if it has none.
        eod: Id of the EOS token, or None.
        vocab_size, unique_identifiers: Number of tokens; the arguments.

    Raises:
        ConfigError: An unknown format.
        TextError: transformers is not installed.
    """

    def __init__(self, tokenizer_path: str, prompt_format: str) -> None:
        self._format = _FORMATS[check_choice("prompt_format", prompt_format, tuple(_FORMATS))]
        path = check_path("tokenizer_path", tokenizer_path)
        self._library = hf = package("transformers").AutoTokenizer.from_pretrained(path)
        self._template = _CONTENTS if prompt_format == "identity" else hf.chat_template
        self.eod, self.vocab_size, pad = hf.eos_token_id, len(hf), self._format.pad
        own_pad = self.eod if hf.pad_token_id is None else hf.pad_token_id
        self.pad = self.pad_id = hf.convert_tokens_to_ids(pad) if pad else own_pad
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "tokenizer.json")
            hf.backend_tokenizer.save(file)
            self._encoder = Tokenizer(file, special_tokens_in_text=not hf.split_special_tokens)
        self._encoder.load()  # here, once: forked workers need not check the encoder again
        self.unique_identifiers = {"tokenizer_path": path, "prompt_format": prompt_format}

    def tokenize_conversation(
        self, conversation: Messages, return_target: bool, add_generation_prompt: bool
    ) -> Any:
        """The tokens of a conversation (int64 [n]), or its tokens and targets.

        Args:
            conversation: Messages with `role` and `content`, at least one.
            return_target: Whether to return targets, where masked tokens are IGNORE_INDEX.
            add_generation_prompt: Whether to ask the template for it; only "default" has one.

        Raises:
            ConversationError: Roles, contents or tokens that the format cannot mask.
            TextError: A text that cannot be encoded.
        """
        if turns := self._turns(conversation):
            text = "".join(turns)
        else:
            options = {"chat_template": self._template, "tokenize": False}
            prompt = {"add_generation_prompt": add_generation_prompt}
            text = self._library.apply_chat_template(list(conversation), **options, **prompt)
        ids, sizes = self._encoder.encode_batch([text, *turns])
        tokens = ids[: sizes[0]].astype(np.int64)
        if turns and not np.array_equal(tokens, ids[sizes[0] :]):
            what = f"its turns have other tokens alone: {shown(turns)}"
            raise ConversationError(f"{what}. This tokenizer merges across turns")
        targets, start = tokens.copy(), 0
        for message, size in zip(conversation, sizes[1:].tolist(), strict=False):
            is_trained = message["role"].lower() == "assistant"
            num_masked = self._format.num_masked if is_trained else size
            targets[start : start + num_masked] = IGNORE_INDEX
            start += size
        return (tokens, targets) if return_target else tokens

    def _turns(self, conversation: Messages) -> list[str]:
        """The text of each turn, in a format that masks."""
        texts: list[str] = []
        for place, message in enumerate(conversation if self._format.turns else ()):
            role, content = message["role"], message.get("content")
            kind, before = role.lower(), conversation[place - 1]["role"].lower()  # -1: the last
            is_answer = bool(content) and before in ("user", "tool")
            is_valid = is_answer if kind == "assistant" else kind in ("system", "user", "tool")
            if not is_valid or (role in self._format.turns and not isinstance(content, str)):
                rules = "a text of system, user or tool, or of an assistant behind user or tool"
                raise ConversationError(f"turn {place + 1} is {shown(message, 80)}; give {rules}")
            for switch in self._format.switches if kind != "assistant" else ():
                content = str(content).replace(switch, "")
            left, right = self._format.turns.get(role, ("", ""))
            texts.append(f"{left}{str(content).strip()}{right}" if left or right else "")
        return texts


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
            raise ConversationError(f"{place}: {error or type(error).__name__}") from error
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
        labels, num_bounds = pack[1, 1:], len(bounds)
        is_trained = (labels != pad) & (labels != IGNORE_INDEX)
        counts["trained_tokens"] = int(np.count_nonzero(is_trained))
        counts["dropped_conversations"] = len(conversations) - num_bounds + 1
        counts["untrained_lines"] = int(not is_trained.any())
        bounds[-1] = length
        if self.config.sft_release == "0.19":
            num_bounds = length + 1
            bounds = bounds if len(bounds) <= num_bounds else sorted({*bounds})
        cu_seqlens = np.full(num_bounds, length, np.int32)
        cu_seqlens[: len(bounds)] = bounds
        arrays = {
            "tokens": pack[0, :-1],
            "labels": labels,
            "loss_mask": is_trained.astype(np.float32),
            "position_ids": position_ids,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": np.asarray(np.diff(cu_seqlens).max()),
        }
        return arrays, counts
