"""The served model's tokenizer: it encodes texts and conversations, and has the backend that decodes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from cluster.errors import TokenizerUnusable
from cluster.parameters.generation import ChatMessage, ChatPrompt
from cluster.parameters.json_types import JSON
from cluster.text.fast_encoder import FastEncoder, NoFastEncoderError, encode_exactly

ChatTemplate = Callable[[list[dict[str, JSON]], dict[str, JSON]], str]
"""A function that makes a text of messages and of variables, which include tools."""

_RENDERING: Final = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) - {
    "add_generation_prompt",
    "continue_final_message",
    "documents",
}
"""Arguments of apply_chat_template itself, which cannot be variables of a template."""
_TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplateError(Exception):
    """The model has no chat template, or its template refuses the conversation."""


class ModelTokenizer:
    """Encodes prompts. Several threads may use it at once, because it never changes."""

    def __init__(self, backend: Tokenizer, chat_template: ChatTemplate | None = None, *, use_fastokens: bool) -> None:
        """Wrap a backend. use_fastokens: whether to encode prompts by fastokens, if that gives the same tokens"""
        # A tokenizer.json may ask for truncation or padding, which is right for training and wrong for prompts.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._chat_template = chat_template
        # The template of special tokens cannot be read, only used; its tokens may be missing in the vocabulary.
        special = [*backend.encode("").ids, *backend.encode("", "").ids]
        self.largest_token_id = max([*backend.get_vocab().values(), *special], default=-1)
        """The largest token id that a text can have; -1 if the tokenizer has no tokens at all."""
        self._fast: FastEncoder | None = None
        self.why_not_fast = ""
        """Why prompts are encoded by the tokenizers library; empty if fastokens encodes them."""
        if use_fastokens:
            try:
                self._fast = FastEncoder.of(backend)
            except NoFastEncoderError as exc:
                self.why_not_fast = str(exc)
        else:
            self.why_not_fast = "fastokens is not asked for"

    @classmethod
    def from_directory(cls, directory: Path, *, use_fastokens: bool) -> ModelTokenizer:
        """Load the tokenizer of a checkpoint; nothing is downloaded.

        Raises TokenizerUnusable if there is none, or if it is not one of the tokenizers library.
        """
        try:
            config = _config_of_tokenizer(directory)
            loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True, config=config)
        except (OSError, ValueError, ImportError) as exc:
            raise TokenizerUnusable(f"no tokenizer can be loaded from {directory}: {exc}") from exc
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise TokenizerUnusable(
                f"{type(loaded).__name__} of {directory} has no tokenizer.json and cannot be made into one; "
                "only tokenizers of the tokenizers library can decode as they stream"
            )

        def render(messages: list[dict[str, JSON]], variables: dict[str, JSON]) -> str:
            options: dict[str, Any] = {"conversation": messages, "add_generation_prompt": True} | variables
            text = loaded.apply_chat_template(tokenize=False, **options)
            assert isinstance(text, str)
            return text

        template = render if loaded.chat_template else None
        return cls(loaded.backend_tokenizer, template, use_fastokens=use_fastokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether encode_chat works."""
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a prompt."""
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=add_special_tokens)
        return encode_exactly(self.backend, text, add_special_tokens=add_special_tokens)

    def encode_plain(self, texts: list[str]) -> list[list[int]]:
        """Tokenize several texts separately, without special tokens."""
        return [encoded.ids for encoded in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Tokenize two texts that belong together, with the special tokens that the tokenizer adds."""
        return self.backend.encode(first, second).ids

    def encode_start(self, first: str, second: str | None = None, *, max_tokens: int) -> list[int]:
        """Tokenize a text, or two that belong together, and cut the tokens to max_tokens.

        The end of the text is cut, or of the longer of two, but no special token; transformers' tokenizers do the same
        with truncation=True.
        max_tokens: at least num_special_tokens()
        """
        texts = [first] if second is None else [first, second]
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        room = max_tokens - self.num_special_tokens(is_pair=second is not None)
        for encoding, length in zip(encodings, share_room([len(one.ids) for one in encodings], room), strict=True):
            encoding.truncate(length)
        return self.backend.post_process(encodings[0], encodings[1] if second is not None else None).ids

    def num_special_tokens(self, *, is_pair: bool = False) -> int:
        """Return how many special tokens the tokenizer adds to a text, or to a pair of texts."""
        return self.backend.num_special_tokens_to_add(is_pair)

    def encode_chat(self, prompt: ChatPrompt, *, add_special_tokens: bool = False) -> list[int]:
        """Tokenize a conversation and the start of the assistant's answer. Raises ChatTemplateError."""
        if self._chat_template is None:
            raise ChatTemplateError("this model has no chat template")
        if reserved := prompt.variables.keys() & _RENDERING:
            raise ChatTemplateError(f"not a variable of a chat template: {', '.join(sorted(reserved))}")
        messages: list[dict[str, JSON]] = [
            {"role": turn.role, "content": _content(turn), **turn.fields} for turn in prompt.messages
        ]
        variables = dict(prompt.variables)
        if prompt.tools:
            variables["tools"] = list(prompt.tools)
        try:
            text = self._chat_template(messages, variables)
        except _TEMPLATE_ERRORS as exc:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {exc}") from exc
        # Most templates write the special tokens themselves.
        return self.encode(text, add_special_tokens=add_special_tokens)


def _config_of_tokenizer(directory: Path) -> PreTrainedConfig | None:
    """Return as much configuration as AutoTokenizer needs if the tokenizer's files name their class; else None.

    To load the model's own configuration would import 1000 modules, which take 150 MiB and 1.5 s of processor time.
    """
    try:
        tokenizer = json.loads((directory / "tokenizer_config.json").read_bytes())
        model = json.loads((directory / "config.json").read_bytes())
        if not tokenizer.get("tokenizer_class") or "auto_map" in tokenizer or not model.get("model_type"):
            return None
        asked = {name: model[name] for name in ("model_type", "model_name", "tokenizer_class") if name in model}
    except (OSError, ValueError, AttributeError):
        return None  # AutoTokenizer will raise an error that says what is wrong with the files.
    config = PreTrainedConfig.from_dict(asked)
    config.name_or_path = str(directory)
    return config


def share_room(lengths: Sequence[int], room: int) -> list[int]:
    """Cut one length, or two, to `room` together: the longer one first, and both to about half if that is not enough.

    This is the "longest_first" of transformers and of the tokenizers library.
    """
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    shorter = min(*lengths, room // 2)
    return [shorter, room - shorter] if lengths[0] <= lengths[1] else [room - shorter, shorter]


def _content(turn: ChatMessage) -> JSON:
    """Return a turn's content as templates expect it: a text, or a list of texts and placeholders of images."""
    if not turn.parts:
        return turn.content
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in turn.parts]
