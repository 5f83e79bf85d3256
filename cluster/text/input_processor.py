"""From what a client asks to what an engine is given: template, tokens, limits, defaults.

Every mistake of a client is found here and named: no engine ever sees an invalid request.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from actors.checkpoint.generation_defaults import NO_DEFAULTS, GenerationDefaults
from actors.checkpoint.pooling_facts import PoolingFacts
from actors.config import ModelFacts
from actors.core.requests.adapter import Adapter
from actors.core.requests.request import EngineCoreRequest, PromptEmbeds
from cluster.access.caller import Caller
from cluster.errors import AdapterNotFound, EngineFailed, ModelNotFound
from cluster.images.prompt_images import PlacedImages, PromptImages
from cluster.images.sources import check_images, images_of
from cluster.parameters.generation import ChatPrompt, EmbedsPrompt, GenerateRequest, Prompt, TextPrompt, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.parameters.sampling_rules import Violations, check_sampling, resolve_sampling
from cluster.parameters.structured_output_rules import check_structured_output
from cluster.settings.input_limits import InputLimits
from cluster.text.adapters import AdapterDirectory
from cluster.text.bad_words import TokenSequences, check_something_is_left, tokenize_bad_words
from cluster.text.model_tokenizer import ChatTemplateError, ModelTokenizer
from cluster.text.prompt_embeds import check_shape, read_embeds
from cluster.text.tokenizing import MAX_CHARS_ALONE, MAX_CHARS_ON_EVENT_LOOP, off_event_loop

MAX_BYTES_ON_EVENT_LOOP: Final = 65_536
"""More embeddings are read on a thread."""
_MAX_DETOKENIZED: Final = 262_144
"""Or the context, if that is longer."""
_MANY_TOKENS: Final = 32_768
_MANY_MESSAGES: Final = 1000
MAX_INT32: Final = 2**31 - 1
WHATEVER_FITS: Final = -1
"""As truncate_prompt_tokens."""
_PROMPT_FIELDS: Final = {
    TextPrompt: "text",
    TokenPrompt: "token_ids",
    ChatPrompt: "chat",
    EmbedsPrompt: "prompt_embeds",
}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a door must know of the served model.

    max_model_len: most tokens of prompt and output together, such that the KV cache of every engine holds them
    vocab_size:    the model's, which can be larger than the tokenizer's
    generates:     whether it gives tokens; if not, only vectors
    pooling:       what vectors it gives; None if it gives none
    prompt_embeds_size: of one token's embedding; 0 if prompts cannot be embeddings
    dtype:         what a prompt's embeddings are cast to
    defaults:      sampling parameters of requests that do not give them
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generates: bool = True
    pooling: PoolingFacts | None = None
    prompt_embeds_size: int = 0
    dtype: str = "float32"
    defaults: GenerationDefaults = NO_DEFAULTS

    @classmethod
    def of(cls, name: str, facts: ModelFacts, defaults: GenerationDefaults = NO_DEFAULTS) -> Self:
        """What an engine says of the model that it has loaded, and the checkpoint's files of requests."""
        return cls(
            name,
            facts.max_model_len,
            facts.vocab_size,
            facts.eos_token_ids,
            facts.generates,
            facts.pooling,
            facts.prompt_embeds_size,
            facts.dtype,
            defaults,
        )


class InputProcessor:
    """Turns a client's request into an engine's."""

    def __init__(
        self,
        model: ModelDescription,
        tokenizer: ModelTokenizer,
        limits: InputLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterDirectory | None = None,
        images: PromptImages | None = None,
    ) -> None:
        """images: None for a model that takes text only"""
        self.model = model
        self.tokenizer = tokenizer
        self.images = images
        self.limits = limits or InputLimits()
        self._clock = clock
        self.adapters = adapters or AdapterDirectory()

    async def process(self, request: GenerateRequest, *, is_alone: bool = False) -> EngineCoreRequest:
        """Validate, tokenize and complete a request. Long prompts are tokenized off the event loop.

        is_alone: nobody else would notice if some longer ones are not
        Raises ModelNotFound, AdapterNotFound, EngineFailed if the adapter that made its output has
        gone, or InvalidRequest with every violation that could be found at once.
        """
        arrival_time_s = self._clock()
        adapter = await self.find_adapter(request.model, request.lora_name, request.caller)
        if adapter is not None and request.lora_digest not in ("", adapter.digest):
            reason = f"adapter {adapter.name!r} has other weights now than those that made its output so far"
            raise EngineFailed(request.request_id, reason, num_new_tokens=0, can_resume=False)
        await _let_others_go_on(request)
        self._check_before_tokenizing(request)
        await _let_others_go_on(request)
        max_chars = MAX_CHARS_ALONE if is_alone else MAX_CHARS_ON_EVENT_LOOP
        tokens = await self._tokenize(request.prompt, request.add_special_tokens, max_chars)
        prompt_token_ids = self._cut(request, tokens)
        cache_salt = request.caller.salted(request.cache_salt)
        placed = PlacedImages(prompt_token_ids)
        if self.images is not None:
            placed = await self.images.place(request, prompt_token_ids, cache_salt)
        max_tokens = self._check_room(request, placed.token_ids)
        bad_words = await self._tokenize_bad_words(request.sampling)
        return EngineCoreRequest(
            request_id=draw_engine_request_id(request.request_id),
            prompt_token_ids=placed.token_ids,
            sampling_params=resolve_sampling(request.sampling, max_tokens, bad_words, self.model.defaults),
            output_token_ids=list(request.output_token_ids),
            eos_token_ids=self.model.eos_token_ids,
            priority=request.caller.priority(request.priority),
            arrival_time_s=arrival_time_s,
            deadline_s=None if request.timeout_s is None else arrival_time_s + request.timeout_s,
            cache_salt=cache_salt,
            tenant=request.caller.tenant,
            lora=adapter,
            prompt_embeds=await _read_embeds(request.prompt, self.model.dtype),
            mm_features=placed.features,
            encoder_inputs=placed.encoder_inputs,
        )

    async def tokenize(self, prompt: Prompt, add_special_tokens: bool | None = None) -> list[int]:
        """Tokenize a prompt that need not fit into the context. Raises InvalidRequest.

        add_special_tokens: as in GenerateRequest
        """
        violations = Violations()
        if isinstance(prompt, EmbedsPrompt):
            violations.add("prompt_embeds", "given", "a prompt of another kind: embeddings have no tokens")
        else:
            self._check_prompt(prompt, violations)
        violations.raise_if_any()
        return await self._tokenize(prompt, add_special_tokens)

    async def tokenize_start(self, text: str, max_tokens: int) -> list[int]:
        """Tokenize a text, of which only the beginning may come along: see ModelTokenizer.encode_start()."""
        return await off_event_loop(len(text), lambda: self.tokenizer.encode_start(text, max_tokens=max_tokens))

    async def tokenize_pair(self, first: str, second: str, max_tokens: int | None) -> list[int]:
        """Tokenize two texts as the model reads them together; without a limit they need not fit into the context."""
        tokenizer, num_chars = self.tokenizer, len(first) + len(second)
        if max_tokens is None:
            return await off_event_loop(num_chars, lambda: tokenizer.encode_pair(first, second))
        return await off_event_loop(num_chars, lambda: tokenizer.encode_start(first, second, max_tokens=max_tokens))

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens, of 262 144 or as many as the context has. Raises InvalidRequest."""
        self.check_num_to_detokenize(len(token_ids))
        violations, vocab_size = Violations(), self.model.vocab_size
        if token_ids:
            largest = max(token_ids)
            if len(token_ids) > _MANY_TOKENS:
                await asyncio.sleep(0)
            if min(token_ids) < 0 or largest >= vocab_size:
                violations.add("token_ids", reprlib.repr(token_ids), f"token ids from 0 to {vocab_size - 1}")
        violations.raise_if_any()
        decode = self.tokenizer.backend.decode
        return await off_event_loop(len(token_ids), lambda: decode(token_ids, skip_special_tokens=skip_special_tokens))

    def check_num_to_detokenize(self, num_tokens: int) -> None:
        """Raise InvalidRequest if these are too many tokens to make a text of."""
        violations, limit = Violations(), max(self.model.max_model_len, _MAX_DETOKENIZED)
        if num_tokens > limit:
            violations.add("token_ids", f"{num_tokens} tokens long", f"at most {limit} tokens")
        violations.raise_if_any()

    def close(self) -> None:
        """No request will come any more: end what works on images."""
        if self.images is not None:
            self.images.close()

    def check_model(self, model: str, caller: Caller) -> None:
        """Raise ModelNotFound if a request for this one cannot be served."""
        if model not in ("", self.model.name) and not self.adapters.knows(model, caller):
            raise ModelNotFound(model, self.model.name)

    async def find_adapter(self, model: str, name: str, caller: Caller) -> Adapter | None:
        """The adapter that a request names by lora_name, or as its model.

        Raises ModelNotFound and AdapterNotFound, also for one that the caller may not use; InvalidRequest.
        """
        is_own_model = model in ("", self.model.name)
        if not name and is_own_model:
            return None
        if name:
            if not is_own_model and model != name:
                raise ModelNotFound(model, self.model.name)
            return await self.adapters.find(name, caller)
        try:
            return await self.adapters.find(model, caller, "model")
        except AdapterNotFound as missing:
            raise ModelNotFound(model, self.model.name) from missing

    def check_envelope(self, request_id: str, salt: str, priority: int, violations: Violations) -> None:
        """Check what all kinds of requests have."""
        limits = self.limits
        is_named = len(request_id) <= limits.max_request_id_chars and request_id.isascii() and request_id.isprintable()
        allowed = f"at most {limits.max_request_id_chars} printable ASCII characters"
        violations.require(is_named, "request_id", request_id, allowed)
        is_salt = len(salt.encode(errors="surrogatepass")) <= limits.max_cache_salt_bytes
        violations.require(is_salt, "cache_salt", salt, f"at most {limits.max_cache_salt_bytes} bytes")
        violations.require(abs(priority) <= MAX_INT32, "priority", priority, f"up to {MAX_INT32}")

    def _check_before_tokenizing(self, request: GenerateRequest) -> None:
        self.check_model(request.model, request.caller)
        limits, violations = self.limits, Violations()
        violations.require(self.model.generates, "model", self.model.name, "one that generates; this one gives vectors")
        self.check_envelope(request.request_id, request.cache_salt, request.priority, violations)
        self._check_prompt(request.prompt, violations, is_cut=request.truncate_prompt_tokens is not None)
        _check_truncation(request, violations)
        check_images(request, None if self.images is None else self.images.config, violations)
        self._check_token_ids("output_token_ids", request.output_token_ids, violations)
        check_sampling(request.sampling, self.model.vocab_size, limits, violations)
        has_end = bool(self.model.eos_token_ids)
        check_structured_output(request.sampling, has_end=has_end, limits=limits, violations=violations)
        violations.raise_if_any()

    def _check_prompt(self, prompt: Prompt | None, violations: Violations, *, is_cut: bool = False) -> None:
        match prompt:
            case None:
                violations.add("prompt", "missing", "one of text, token_ids, chat and prompt_embeds")
            case TextPrompt(text):
                violations.require(text != "", "text", text, "at least one character")
                self._check_num_chars("text", len(text), violations)
            case TokenPrompt(token_ids):
                violations.require(len(token_ids) > 0, "token_ids", token_ids, "at least one token id")
                self._check_token_ids("token_ids", token_ids, violations, is_cut=is_cut)
            case ChatPrompt() as chat:
                messages = chat.messages
                allowed = f"1 to {self.limits.max_chat_messages} messages"
                violations.require(1 <= len(messages) <= self.limits.max_chat_messages, "chat", messages, allowed)
                self._check_num_chars("chat", _num_chat_chars(chat), violations)
            case EmbedsPrompt() as embeds:
                check_shape(embeds, self.model.prompt_embeds_size, self.limits, violations)

    def _check_num_chars(self, field: str, num_chars: int, violations: Violations) -> None:
        limit = self.limits.max_prompt_chars
        if num_chars > limit:
            violations.add(field, f"{num_chars} characters long", f"at most {limit} characters")

    def _check_token_ids(
        self,
        field: str,
        token_ids: list[int] | tuple[int, ...],
        violations: Violations,
        *,
        is_cut: bool = False,
        is_known: bool = False,
    ) -> None:
        """is_cut: as many as it needs to fit will be left out. is_known: the model has all of them for certain"""
        vocab_size, max_model_len = self.model.vocab_size, self.model.max_model_len
        if len(token_ids) >= max_model_len and not is_cut:
            allowed = f"fewer than the context's {max_model_len} tokens"
            violations.add(field, f"{len(token_ids)} tokens long", allowed)
            return
        is_known = is_known or not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
        violations.require(is_known, field, token_ids, f"token ids from 0 to {vocab_size - 1}")

    def _cut(self, request: GenerateRequest, token_ids: list[int]) -> list[int]:
        limit, sampling = request.truncate_prompt_tokens, request.sampling
        if limit is None:
            return token_ids
        if limit == WHATEVER_FITS:
            limit = max(1, self.model.max_model_len - max(1, sampling.max_tokens or 0, sampling.min_tokens or 0))
        return token_ids[-limit:]

    async def _tokenize(
        self, prompt: Prompt | None, add_special_tokens: bool | None = None, max_chars: int = MAX_CHARS_ON_EVENT_LOOP
    ) -> list[int]:
        """max_chars: longer ones on a thread"""
        tokenizer = self.tokenizer
        match prompt:
            case TextPrompt(text):
                adds = add_special_tokens is not False
                return await off_event_loop(
                    len(text), lambda: tokenizer.encode(text, add_special_tokens=adds), max_chars
                )
            case ChatPrompt() as chat:
                adds, num_chars = bool(add_special_tokens), _num_chat_chars(chat)
                try:
                    return await off_event_loop(
                        num_chars, lambda: tokenizer.encode_chat(chat, add_special_tokens=adds), max_chars
                    )
                except ChatTemplateError as exc:
                    violations = Violations()
                    violations.add("chat", reprlib.repr(chat.messages), str(exc))
                    violations.raise_if_any()
                    raise
            case TokenPrompt(token_ids):
                return list(token_ids)
            case EmbedsPrompt() as embeds:
                return [0] * embeds.num_tokens
            case None:
                raise AssertionError("a request without a prompt was refused before")

    async def _tokenize_bad_words(self, options: SamplingOptions) -> TokenSequences:
        words, vocab_size = options.bad_words, self.model.vocab_size
        sequences: TokenSequences = ()
        if words:
            num_chars = 2 * sum(map(len, words))
            sequences = await off_event_loop(num_chars, lambda: tokenize_bad_words(words, self.tokenizer, vocab_size))
        check_something_is_left(options, sequences, self.model.eos_token_ids, vocab_size)
        return sequences

    def _check_room(self, request: GenerateRequest, prompt_token_ids: list[int]) -> int:
        """Check the prompt's length, and that of the output that it leaves room for; return max_tokens."""
        violations = Violations()
        field = _PROMPT_FIELDS[type(request.prompt)]
        num_prompt_tokens, max_model_len = len(prompt_token_ids), self.model.max_model_len
        if num_prompt_tokens == 0:
            violations.add(field, "0 tokens long", "a prompt of at least one token")
        # A client's own tokens have been looked at, and to look at all of a text's is a tenth of a millisecond.
        is_known = isinstance(request.prompt, TokenPrompt) or self.tokenizer.largest_token_id < self.model.vocab_size
        self._check_token_ids(field, prompt_token_ids, violations, is_known=is_known)
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


def draw_engine_request_id(request_id: str) -> str:
    """A request's id at the engines: with a random ending, so that two ingresses never give one engine the same id."""
    return f"{request_id}-{secrets.token_hex(4)}"


def _check_truncation(request: GenerateRequest, violations: Violations) -> None:
    field, limit = "truncate_prompt_tokens", request.truncate_prompt_tokens
    if limit is None:
        return
    is_allowed = limit == WHATEVER_FITS or 1 <= limit <= MAX_INT32
    violations.require(is_allowed, field, limit, f"at least 1, or {WHATEVER_FITS} for as many as fit")
    if isinstance(request.prompt, EmbedsPrompt) or images_of(request):
        violations.add(field, str(limit), "none: what is not text cannot be cut")


def _num_chat_chars(chat: ChatPrompt) -> int:
    texts = (text for message in chat.messages for text in (message.role, message.content, *message.parts))
    num_chars = sum(len(text) for text in texts if isinstance(text, str))
    others = [*(message.fields for message in chat.messages if message.fields), *chat.tools]
    return num_chars + sum(len(json.dumps(other)) for other in [*others, chat.variables] if other)


async def _let_others_go_on(request: GenerateRequest) -> None:
    """Between the pieces of what a long prompt takes: streams are not held up by all of it."""
    match request.prompt:
        case TokenPrompt(token_ids):
            is_long = len(token_ids) > _MANY_TOKENS
        case ChatPrompt(messages):
            is_long = len(messages) > _MANY_MESSAGES
        case _:
            is_long = len(request.output_token_ids) > _MANY_TOKENS
    if is_long:
        await asyncio.sleep(0)


async def _read_embeds(prompt: Prompt | None, model_dtype: str) -> PromptEmbeds | None:
    if not isinstance(prompt, EmbedsPrompt):
        return None
    if len(prompt.data) <= MAX_BYTES_ON_EVENT_LOOP:
        return read_embeds(prompt, model_dtype)
    return await asyncio.to_thread(read_embeds, prompt, model_dtype)
