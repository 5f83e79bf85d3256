"""The checks of a request that need the model or the prompt. Those of sampling parameters are in cluster/parameters."""

from __future__ import annotations

import json
from typing import Final

from cluster.images.sources import check_images, images_of
from cluster.parameters.generation import (
    ChatPrompt,
    EmbedsPrompt,
    GenerateRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from cluster.parameters.sampling_options import MAX_INT32
from cluster.parameters.sampling_rules import Violations, check_sampling
from cluster.parameters.slo_rules import check_slo
from cluster.parameters.structured_output_rules import check_structured_output
from cluster.settings.images import ImageConfig
from cluster.settings.input_limits import InputLimits
from cluster.text.model_description import ModelDescription
from cluster.text.prompt_embeds_input import check_shape

WHATEVER_FITS: Final = -1
"""This value of truncate_prompt_tokens asks for as many tokens as the output leaves room for."""
_PROMPT_FIELDS: Final = {
    TextPrompt: "text",
    TokenPrompt: "token_ids",
    ChatPrompt: "chat",
    EmbedsPrompt: "prompt_embeds",
}


class RequestRules:
    """Refuses requests that a model, or the cluster's limits, do not allow. It keeps no state."""

    def __init__(self, model: ModelDescription, limits: InputLimits, largest_token_id: int) -> None:
        """Keep the limits. largest_token_id: the tokenizer's largest, which can be beyond the model's vocabulary"""
        self.model = model
        self.limits = limits
        self._largest_token_id = largest_token_id

    def check_before_tokenizing(self, request: GenerateRequest, images: ImageConfig | None) -> None:
        """Check everything that does not need the prompt's tokens. Raises InvalidRequest with every violation.

        images: None for a model that takes text only
        """
        limits, violations = self.limits, Violations()
        violations.require(self.model.generates, "model", self.model.name, "one that generates; this one gives vectors")
        self.check_envelope(request.request_id, request.cache_salt, request.priority, violations)
        self.check_prompt(request.prompt, violations, is_cut=request.truncate_prompt_tokens is not None)
        _check_truncation(request, violations)
        check_images(request, images, violations)
        self.check_token_ids("output_token_ids", request.output_token_ids, violations)
        check_slo(request.slo, violations)
        check_sampling(request.sampling, self.model.vocab_size, limits, violations)
        has_end = bool(self.model.eos_token_ids)
        check_structured_output(request.sampling, has_end=has_end, limits=limits, violations=violations)
        violations.raise_if_any()

    def check_envelope(self, request_id: str, salt: str, priority: int, violations: Violations) -> None:
        """Check the fields that all kinds of requests have."""
        limits = self.limits
        is_named = len(request_id) <= limits.max_request_id_chars and request_id.isascii() and request_id.isprintable()
        allowed = f"at most {limits.max_request_id_chars} printable ASCII characters"
        violations.require(is_named, "request_id", request_id, allowed)
        is_salt = len(salt.encode(errors="surrogatepass")) <= limits.max_cache_salt_bytes
        violations.require(is_salt, "cache_salt", salt, f"at most {limits.max_cache_salt_bytes} bytes")
        violations.require(abs(priority) <= MAX_INT32, "priority", priority, f"up to {MAX_INT32}")

    def check_prompt(self, prompt: Prompt | None, violations: Violations, *, is_cut: bool = False) -> None:
        """Check a prompt before it is tokenized. is_cut: whether it will be truncated until it fits"""
        match prompt:
            case None:
                violations.add("prompt", "missing", "one of text, token_ids, chat and prompt_embeds")
            case TextPrompt(text):
                violations.require(text != "", "text", text, "at least one character")
                self._check_num_chars("text", len(text), violations)
            case TokenPrompt(token_ids):
                violations.require(len(token_ids) > 0, "token_ids", token_ids, "at least one token id")
                self.check_token_ids("token_ids", token_ids, violations, is_cut=is_cut)
            case ChatPrompt() as chat:
                messages = chat.messages
                allowed = f"1 to {self.limits.max_chat_messages} messages"
                violations.require(1 <= len(messages) <= self.limits.max_chat_messages, "chat", messages, allowed)
                self._check_num_chars("chat", num_chat_chars(chat), violations)
            case EmbedsPrompt() as embeds:
                check_shape(embeds, self.model.prompt_embeds_size, self.limits, violations)

    def check_token_ids(
        self,
        field: str,
        token_ids: list[int] | tuple[int, ...],
        violations: Violations,
        *,
        is_cut: bool = False,
        is_known: bool = False,
    ) -> None:
        """Check tokens that a client gave, or that a prompt has.

        is_cut: whether they will be truncated until they fit; is_known: whether they are in the vocabulary for certain
        """
        vocab_size, max_model_len = self.model.vocab_size, self.model.max_model_len
        if len(token_ids) >= max_model_len and not is_cut:
            allowed = f"fewer than the context's {max_model_len} tokens"
            violations.add(field, f"{len(token_ids)} tokens long", allowed)
            return
        is_known = is_known or not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
        violations.require(is_known, field, token_ids, f"token ids from 0 to {vocab_size - 1}")

    def cut(self, request: GenerateRequest, token_ids: list[int]) -> list[int]:
        """Return a prompt's tokens, or only the last of them if the client asks for truncation."""
        limit, sampling = request.truncate_prompt_tokens, request.sampling
        if limit is None:
            return token_ids
        if limit == WHATEVER_FITS:
            limit = max(1, self.model.max_model_len - max(1, sampling.max_tokens or 0, sampling.min_tokens or 0))
        return token_ids[-limit:]

    def check_room(self, request: GenerateRequest, prompt_token_ids: list[int]) -> int:
        """Check the lengths of the prompt and of the output that it leaves room for; return max_tokens."""
        violations = Violations()
        field = _PROMPT_FIELDS[type(request.prompt)]
        num_prompt_tokens, max_model_len = len(prompt_token_ids), self.model.max_model_len
        if num_prompt_tokens == 0:
            violations.add(field, "0 tokens long", "a prompt of at least one token")
        # Tokens that a client gave were checked before. A check of a long text's tokens would take 0.1 ms, and is only
        # needed if the tokenizer has tokens beyond the model's vocabulary.
        is_known = isinstance(request.prompt, TokenPrompt) or self._largest_token_id < self.model.vocab_size
        self.check_token_ids(field, prompt_token_ids, violations, is_known=is_known)
        violations.raise_if_any()

        room = max_model_len - num_prompt_tokens
        asked = request.sampling.max_tokens
        min_tokens = request.sampling.min_tokens or 0
        default = self.model.defaults.max_tokens or self.limits.default_max_tokens
        max_tokens = asked if asked is not None else min(room, max(default, min_tokens))
        allowed = f"at most {room}, which a prompt of {num_prompt_tokens} tokens leaves of {max_model_len}"
        violations.require(max_tokens <= room, "sampling_params.max_tokens", max_tokens, allowed)
        violations.require(min_tokens <= room, "sampling_params.min_tokens", min_tokens, allowed)
        self._check_prompt_logprobs(request, num_prompt_tokens, violations)
        num_given = len(request.output_token_ids)
        allowed = f"fewer than max_tokens, which is {max_tokens}"
        if num_given >= max_tokens:
            violations.add("output_token_ids", f"{num_given} tokens long", allowed)
        violations.raise_if_any()
        return max_tokens

    def _check_prompt_logprobs(self, request: GenerateRequest, num_prompt_tokens: int, violations: Violations) -> None:
        num_asked, limit = request.sampling.prompt_logprobs, self.limits.max_prompt_logprobs
        if num_asked is None or request.output_token_ids:
            return
        if isinstance(request.prompt, EmbedsPrompt):
            violations.add("sampling_params.prompt_logprobs", str(num_asked), "none: the prompt has no tokens")
        is_few = (num_asked + 1) * num_prompt_tokens <= limit
        allowed = f"at most {limit} in all, that is {num_prompt_tokens} prompt tokens times one more than this"
        violations.require(is_few, "sampling_params.prompt_logprobs", num_asked, allowed)

    def _check_num_chars(self, field: str, num_chars: int, violations: Violations) -> None:
        limit = self.limits.max_prompt_chars
        if num_chars > limit:
            violations.add(field, f"{num_chars} characters long", f"at most {limit} characters")


def num_chat_chars(chat: ChatPrompt) -> int:
    """Return the number of characters of everything that a chat template gets."""
    texts = (text for message in chat.messages for text in (message.role, message.content, *message.parts))
    num_chars = sum(len(text) for text in texts if isinstance(text, str))
    others = [*(message.fields for message in chat.messages if message.fields), *chat.tools]
    return num_chars + sum(len(json.dumps(other)) for other in [*others, chat.variables] if other)


def _check_truncation(request: GenerateRequest, violations: Violations) -> None:
    field, limit = "truncate_prompt_tokens", request.truncate_prompt_tokens
    if limit is None:
        return
    is_allowed = limit == WHATEVER_FITS or 1 <= limit <= MAX_INT32
    violations.require(is_allowed, field, limit, f"at least 1, or {WHATEVER_FITS} for as many as fit")
    if isinstance(request.prompt, EmbedsPrompt) or images_of(request):
        violations.add(field, str(limit), "none: what is not text cannot be cut")
