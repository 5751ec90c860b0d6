"""`SFTTokenizer`: conversations to tokens and targets, in Megatron-LM's prompt formats."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import check_choice, check_path, shown
from millrace.deferred import cached_property
from millrace.encoding import Tokenizer
from millrace.encoding.flat_ids import split_ids
from millrace.errors import ConfigError, TextError
from millrace.megatron.errors import ConversationError

IGNORE_INDEX = -100  # target of a token that is not trained on

_SYSTEM, _USER, _ASSISTANT = "<SPECIAL_10>System\n", "<SPECIAL_11>User\n", "<SPECIAL_11>Assistant\n"
_STOP = "\n<SPECIAL_12>\n"
_NANO = {"system": (_SYSTEM, "\n"), "user": (_USER, "\n"), "assistant": (_ASSISTANT, _STOP)}
_ALIGNED = {"system": (_SYSTEM, "\n"), "user": (_USER, f"\n{_ASSISTANT}"), "assistant": ("", "\n")}
_FORMATS: dict[str, tuple[dict[str, tuple[str, str]], int, str | None]] = {
    "nemotron-nano-v2": (_NANO, 3, "<unk>"),
    "nemotron-h-aligned": (_ALIGNED, 0, "<SPECIAL_233>"),
    "identity": ({}, 0, "<unk>"),
    "default": ({}, 0, None),
}
"""The texts around a role's content, if the format masks; how many of the assistant's first tokens
it masks; and the padding token."""


class SFTTokenizer:
    """Conversations to tokens and targets, as Megatron-LM's tokenizer of this name.

    Args:
        tokenizer_path: Folder of a fast Hugging Face tokenizer.
        prompt_format: "nemotron-nano-v2" or "nemotron-h-aligned", where only the assistant's turns
            are trained on; "identity" (the contents alone) or "default" (the tokenizer's own
            template), where every token is.

    Attributes:
        pad: Id of the padding token: `<unk>`, for "nemotron-h-aligned" `<SPECIAL_233>`, for
            "default" the tokenizer's own, or its EOS if it has none. `pad_id` is the same.
        eod: Id of the EOS token, or None.

    Raises:
        ConfigError: An unknown format, or a tokenizer without the tokens or template that it needs.
        TextError: transformers is not installed.
    """

    def __init__(self, tokenizer_path: str, prompt_format: str) -> None:
        self.path = check_path("tokenizer_path", tokenizer_path)
        self.prompt_format = check_choice("prompt_format", prompt_format, tuple(_FORMATS))
        self._turns, self._num_masked, pad_text = _FORMATS[prompt_format]
        try:
            library = __import__("transformers").AutoTokenizer
        except ImportError:
            raise TextError("install transformers: pip install 'millrace[trainers]'") from None
        self._library = hf = library.from_pretrained(self.path)
        self.eod, own_pad = hf.eos_token_id, hf.pad_token_id
        own_pad = self.eod if own_pad is None else own_pad
        self.pad = self.pad_id = hf.convert_tokens_to_ids(pad_text) if pad_text else own_pad
        if self.pad is None or not hf.is_fast or not (pad_text or hf.chat_template):
            needs = pad_text or "a pad or EOS token and a chat template"
            what = f"the prompt format {prompt_format!r} needs a fast tokenizer with {needs}"
            raise ConfigError(f"{what}: {self.path} is not one")

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self._library)

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """What names the tokenizer in the descriptions of datasets."""
        kind = type(self).__qualname__
        return {"class": kind, "tokenizer_path": self.path, "prompt_format": self.prompt_format}

    def tokenize_conversation(
        self,
        conversation: Sequence[Mapping[str, Any]],
        return_target: bool,
        add_generation_prompt: bool,
    ) -> Any:
        """The tokens of a conversation (int64 [n]), or its tokens and targets.

        Args:
            conversation: Messages with `role` and `content`, at least one.
            return_target: Whether to return targets, where masked tokens are IGNORE_INDEX.
            add_generation_prompt: Whether to ask the template for it; only "default" has one.

        Raises:
            ConversationError: Roles, contents or texts that the format cannot take.
        """
        if not (self._turns and return_target):
            text = self._render(conversation, add_generation_prompt)
            tokens = self._encode([text])[0].astype(np.int64)
            return (tokens, tokens.copy()) if return_target else tokens
        # Megatron-LM encodes the conversation and each turn alone, and demands the same ids. A turn
        # that begins with a border has the same ids behind any other: there, once is enough.
        roles, turns = _roles_of(conversation), [self._text_of(one) for one in conversation]
        is_proven = all(text.startswith(self._borders) for text in turns[1:] if text)
        parts = self._encode(turns)
        tokens = np.concatenate(parts, dtype=np.int64)
        if not is_proven and not np.array_equal(self._encode(["".join(turns)])[0], tokens):
            what = f"its turns have other tokens alone: {shown(turns)}"
            raise ConversationError(f"{what}. This tokenizer merges across turns")
        targets, start = tokens.copy(), 0
        for role, part in zip(roles, parts, strict=True):
            num_masked = self._num_masked if role == "assistant" else len(part)
            targets[start : start + num_masked] = IGNORE_INDEX
            start += len(part)
        return tokens, targets

    def _render(self, conversation: Sequence[Mapping[str, Any]], has_prompt: bool) -> str:
        if self._turns:
            return "".join(map(self._text_of, conversation))
        if self.prompt_format == "identity":
            return "".join(str(message.get("content", "")) for message in conversation)
        options = {"tokenize": False, "add_generation_prompt": has_prompt}
        try:
            return str(self._library.apply_chat_template(list(conversation), **options))
        except Exception as error:  # whatever a template raises
            kind = type(error).__name__
            raise ConversationError(f"the template raises {kind}: {error}") from error

    def _text_of(self, message: Mapping[str, Any]) -> str:
        """The text of a turn in a format that masks."""
        role, content = message["role"], message.get("content")
        if role not in self._turns:
            return ""
        if not isinstance(content, str):
            raise ConversationError(f"the content of a {role} turn is {shown(content)}, not a text")
        if self._turns is _NANO and role != "assistant":
            content = content.replace("/think", "").replace("/no_think", "")
        before, after = self._turns[role]
        return before + content.strip() + after

    def _encode(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        try:
            return split_ids(*self._encoder.encode_batch(texts))
        except TextError as error:
            raise ConversationError(str(error)) from error

    @cached_property
    def _encoder(self) -> Tokenizer:
        """The ids of the library, by the fastest encoder that agrees with it."""
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "tokenizer.json")
            self._library.backend_tokenizer.save(file)
            return Tokenizer(file, special_tokens_in_text=not self._library.split_special_tokens)

    @cached_property
    def _borders(self) -> tuple[str, ...]:
        added = list(self._library.backend_tokenizer.get_added_tokens_decoder().values())
        texts = () if self._library.split_special_tokens else ("<SPECIAL_10>", "<SPECIAL_11>")
        return tuple(text for text in texts if is_border(text, added))


def is_border(text: str, added_tokens: Sequence[Any]) -> bool:
    """Whether what begins with a text has the same ids alone and behind any other text.

    That holds for an added token that is split off before all else, unless another one can reach
    across its start, or it takes what stands on its left into account.
    """
    for token in added_tokens:
        ends = (token.content[place:] for place in range(1, len(token.content)))
        looks_left = token.content.startswith(text) and (token.lstrip or token.single_word)
        if looks_left or any(text.startswith(end) or end.startswith(text) for end in ends):
            return False
    return any(token.content == text and not token.normalized for token in added_tokens)


def _roles_of(conversation: Sequence[Mapping[str, Any]]) -> list[str]:
    """The roles in lower case, if the masks can be made."""
    roles = [message["role"].lower() for message in conversation]
    for place, role in enumerate(roles):
        if role not in ("system", "user", "tool", "assistant"):
            what = f"role {role!r}; give system, user, assistant or tool"
        elif role == "assistant" and not conversation[place].get("content"):
            what = "empty content: remove it"
        # As in Megatron-LM, the first turn follows the last one.
        elif role == "assistant" and roles[place - 1] not in ("user", "tool"):
            what = f"role assistant, behind {roles[place - 1]}; it must follow user or tool"
        else:
            continue
        raise ConversationError(f"turn {place + 1} has the {what}")
    return roles
