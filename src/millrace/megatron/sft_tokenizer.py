"""`SFTTokenizer`: conversations to tokens and targets, in Megatron-LM's prompt formats."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from millrace.checks import check_choice, shown
from millrace.encoding import Tokenizer
from millrace.encoding.vocabulary import package, sha256
from millrace.megatron.errors import ConversationError

Conversation = Sequence[Mapping[str, Any]]
IGNORE_INDEX = -100  # target of a token that is not trained on


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
        vocab_size, unique_identifiers: Number of tokens; what decides the ids, as plain values.

    Raises:
        ConfigError: An unknown format.
        TextError: transformers is not installed.
    """

    def __init__(self, tokenizer_path: str, prompt_format: str) -> None:
        self._format = _FORMATS[check_choice("prompt_format", prompt_format, tuple(_FORMATS))]
        self._library = hf = package("transformers").AutoTokenizer.from_pretrained(tokenizer_path)
        self._template = _CONTENTS if prompt_format == "identity" else hf.chat_template
        self.eod, self.vocab_size, pad = hf.eos_token_id, len(hf), self._format.pad
        own_pad = self.eod if hf.pad_token_id is None else hf.pad_token_id
        self.pad = self.pad_id = hf.convert_tokens_to_ids(pad) if pad else own_pad
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "tokenizer.json")
            hf.backend_tokenizer.save(file)
            self._encoder = Tokenizer(file, special_tokens_in_text=not hf.split_special_tokens)
        self._encoder.load()  # here, once: forked workers need not check the encoder again
        rules = [self._encoder.fingerprint, prompt_format, self._template, hf.special_tokens_map]
        versions = self._encoder.versions
        self.unique_identifiers = {"sha256": sha256(str(rules).encode()), "versions": versions}

    def tokenize_conversation(
        self, conversation: Conversation, return_target: bool, add_generation_prompt: bool
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

    def _turns(self, conversation: Conversation) -> list[str]:
        """The text of each turn, in a format that masks."""
        texts: list[str] = []
        for place, message in enumerate(conversation if self._format.turns else ()):
            role, content = message["role"], message.get("content")
            kind, before = role.lower(), conversation[place - 1]["role"].lower()  # -1: the last
            is_answer = bool(content) and before in ("user", "tool")
            is_valid = is_answer if kind == "assistant" else kind in ("system", "user", "tool")
            if not is_valid or (role in self._format.turns and not isinstance(content, str)):
                rules = "system, user, tool, or an assistant that answers user or tool with a text"
                raise ConversationError(f"turn {place + 1} is {shown(message, 80)}; give {rules}")
            for switch in self._format.switches if kind != "assistant" else ():
                content = str(content).replace(switch, "")
            left, right = self._format.turns.get(role, ("", ""))
            texts.append(f"{left}{str(content).strip()}{right}" if left or right else "")
        return texts
