"""`SFTTokenizer`: conversations to tokens and targets, in Megatron-LM's prompt formats."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.checks import check_choice, check_path, shown
from millrace.encoding import Tokenizer
from millrace.encoding.vocabulary import package
from millrace.errors import ConfigError
from millrace.megatron.errors import ConversationError

Conversation = Sequence[Mapping[str, Any]]
IGNORE_INDEX = -100  # target of a token that is not trained on

_SYSTEM, _USER, _ASSISTANT = "<SPECIAL_10>System\n", "<SPECIAL_11>User\n", "<SPECIAL_11>Assistant\n"
_STOP = "\n<SPECIAL_12>\n"
_NANO = {"system": (_SYSTEM, "\n"), "user": (_USER, "\n"), "assistant": (_ASSISTANT, _STOP)}
_ALIGNED = {"system": (_SYSTEM, "\n"), "user": (_USER, f"\n{_ASSISTANT}"), "assistant": ("", "\n")}
_CONTENTS = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
_FORMATS: dict[str, tuple[dict[str, tuple[str, str]], int, str | None]] = {
    "nemotron-nano-v2": (_NANO, 3, "<unk>"),
    "nemotron-h-aligned": (_ALIGNED, 0, "<SPECIAL_233>"),
    "identity": ({}, 0, "<unk>"),
    "default": ({}, 0, None),
}
"""The texts around each role's content, if the format masks; how many of the assistant's first
tokens it masks; and the padding token."""


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
        ConfigError: An unknown format, or a tokenizer that lacks what it needs.
        TextError: transformers is not installed.
    """

    def __init__(self, tokenizer_path: str, prompt_format: str) -> None:
        self.path = check_path("tokenizer_path", tokenizer_path)
        self.prompt_format = check_choice("prompt_format", prompt_format, tuple(_FORMATS))
        self._turns, self._num_masked, pad = _FORMATS[prompt_format]
        library = package("transformers").AutoTokenizer
        self._library = hf = library.from_pretrained(self.path)
        self.eod, self.vocab_size = hf.eos_token_id, len(hf)
        self.unique_identifiers = {"tokenizer_path": self.path, "prompt_format": prompt_format}
        own_pad = self.eod if hf.pad_token_id is None else hf.pad_token_id
        self.pad = self.pad_id = hf.convert_tokens_to_ids(pad) if pad else own_pad
        if self.pad is None or not hf.is_fast or not (pad or hf.chat_template):
            needs = f"a fast tokenizer with {pad or 'a chat template, and a pad or EOS token'}"
            raise ConfigError(f"{prompt_format} needs {needs}, which {self.path} is not")
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "tokenizer.json")
            hf.backend_tokenizer.save(file)
            self._encoder = Tokenizer(file, special_tokens_in_text=not hf.split_special_tokens)
        self._encoder.load()  # here, once: forked workers need not check the encoder again
        added = list(hf.backend_tokenizer.get_added_tokens_decoder().values())
        texts = () if hf.split_special_tokens else ("<SPECIAL_10>", "<SPECIAL_11>")
        self._borders = tuple(text for text in texts if is_border(text, added))

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
        if self._turns:
            _check_roles(conversation)
            turns = [self._text_of(message) for message in conversation]
        else:
            template = _CONTENTS if self.prompt_format == "identity" else None
            options = {"chat_template": template, "add_generation_prompt": add_generation_prompt}
            render = self._library.apply_chat_template
            turns = [str(render(list(conversation), tokenize=False, **options))]
        ids, sizes = self._encoder.encode_batch(turns)
        # Megatron-LM encodes the conversation and each turn alone, and demands the same ids. A turn
        # that begins with a border has the same ids behind any other: there, once is enough.
        is_proven = all(text.startswith(self._borders) for text in turns[1:] if text)
        if not (is_proven or np.array_equal(self._encoder.encode_batch(["".join(turns)])[0], ids)):
            what = f"its turns have other tokens alone: {shown(turns)}"
            raise ConversationError(f"{what}. This tokenizer merges across turns")
        tokens = ids.astype(np.int64)
        targets, start = tokens.copy(), 0
        for message, size in zip(conversation if self._turns else (), sizes.tolist(), strict=False):
            num_masked = self._num_masked if message["role"].lower() == "assistant" else size
            targets[start : start + num_masked] = IGNORE_INDEX
            start += size
        return (tokens, targets) if return_target else tokens

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


def _check_roles(conversation: Conversation) -> None:
    before = conversation[-1]["role"].lower()  # as in Megatron-LM, the first turn follows the last
    for place, message in enumerate(conversation, start=1):
        role = message["role"].lower()
        if role not in ("system", "user", "tool", "assistant"):
            what = f"the role {role!r}; give system, user, assistant or tool"
            raise ConversationError(f"turn {place} has {what}")
        if role == "assistant" and (before not in ("user", "tool") or not message.get("content")):
            what = f"is empty, or follows {before}; it must follow user or tool"
            raise ConversationError(f"turn {place} of the assistant {what}")
        before = role
