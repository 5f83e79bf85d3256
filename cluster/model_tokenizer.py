"""The served model's tokenizer: text and conversations to tokens, and the backend that decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cluster.errors import TokenizerUnusable
from cluster.generation import ChatMessage

ChatTemplate = Callable[[list[dict[str, str]]], str]


class ChatTemplateError(Exception):
    """The model has no chat template, or its template refuses the conversation."""


class ModelTokenizer:
    """Encodes prompts. Safe to use from several threads at once: nothing in it changes."""

    def __init__(self, backend: Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        # A tokenizer.json may say to truncate or pad, which is right for training and wrong for prompts.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._chat_template = chat_template

    @classmethod
    def from_directory(cls, directory: Path) -> ModelTokenizer:
        """Load the tokenizer of a checkpoint; nothing is downloaded.

        Raises TokenizerUnusable if there is none, or if it is not one of the tokenizers library.
        """
        try:
            loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, ImportError) as exc:
            raise TokenizerUnusable(f"no tokenizer can be loaded from {directory}: {exc}") from exc
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise TokenizerUnusable(
                f"{type(loaded).__name__} of {directory} has no tokenizer.json and cannot be made into one; "
                "only tokenizers of the tokenizers library can decode as they stream"
            )

        def render(messages: list[dict[str, str]]) -> str:
            text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert isinstance(text, str)
            return text

        return cls(loaded.backend_tokenizer, render if loaded.chat_template else None)

    @property
    def has_chat_template(self) -> bool:
        """Whether encode_chat works."""
        return self._chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Tokenize a prompt, with the special tokens that the tokenizer adds."""
        return self.backend.encode(text).ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokenize a conversation and the start of the assistant's answer. Raises ChatTemplateError."""
        if self._chat_template is None:
            raise ChatTemplateError("this model has no chat template")
        try:
            text = self._chat_template([{"role": message.role, "content": message.content} for message in messages])
        except (jinja2.TemplateError, TypeError, ValueError) as exc:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {exc}") from exc
        # The template writes the special tokens itself.
        return self.backend.encode(text, add_special_tokens=False).ids
