"""Converts a client's request to an engine's: chat template, tokens, limits, defaults.

Every mistake of a client is found and named here: no engine ever gets an invalid request.
"""

from __future__ import annotations

import asyncio
import reprlib
import secrets
import time
from collections.abc import Callable
from typing import Final

from actors.core.requests.adapter import Adapter
from actors.core.requests.request import EngineCoreRequest, PromptEmbeds
from cluster.access.aims import NO_AIMS, Aims
from cluster.access.caller import Caller
from cluster.errors import AdapterNotFound, EngineFailed, ModelNotFound
from cluster.images.prompt_images import PlacedImages, PromptImages
from cluster.parameters.generation import ChatPrompt, EmbedsPrompt, GenerateRequest, Prompt, TextPrompt, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.parameters.sampling_rules import Violations, resolve_sampling
from cluster.parameters.structured_output_rules import remember_schema
from cluster.settings.input_limits import InputLimits
from cluster.text.adapters import AdapterDirectory
from cluster.text.bad_words import TokenSequences, check_something_is_left, tokenize_bad_words
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ChatTemplateError, ModelTokenizer
from cluster.text.prompt_embeds_input import read_embeds
from cluster.text.request_rules import RequestRules, num_chat_chars
from cluster.text.tokenizing import MAX_CHARS_ALONE, MAX_CHARS_ON_EVENT_LOOP, off_event_loop

MAX_BYTES_ON_EVENT_LOOP: Final = 65_536
"""The most bytes of embeddings that are read on the event loop; more are read on a thread."""
_MAX_DETOKENIZED: Final = 262_144
"""The most tokens to detokenize in one call, or the context's tokens if these are more."""
_MANY_TOKENS: Final = 32_768
_MANY_MESSAGES: Final = 1000
_MAX_SCHEMA_CHARS_ON_EVENT_LOOP: Final = 2048
"""The longest JSON schema that is checked on the event loop, which takes up to 5 ms; the longest of all takes 40 ms."""


class InputProcessor:
    """Converts the requests for one model version."""

    def __init__(
        self,
        model: ModelDescription,
        tokenizer: ModelTokenizer,
        limits: InputLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterDirectory | None = None,
        images: PromptImages | None = None,
        slo: Aims = NO_AIMS,
    ) -> None:
        """Keep what requests of the model need.

        images: None for a model that takes text only
        slo:    the cluster's aims, for requests that give none and whose token has none
        """
        self.model = model
        self.tokenizer = tokenizer
        self.images = images
        self.limits = limits or InputLimits()
        self.rules = RequestRules(model, self.limits, tokenizer.largest_token_id)
        self._clock = clock
        self._slo = slo
        self.adapters = adapters or AdapterDirectory()

    async def process(self, request: GenerateRequest, *, is_alone: bool = False) -> EngineCoreRequest:
        """Validate a request, tokenize it, and fill in its defaults. Long prompts are tokenized on a thread.

        is_alone: whether no other request is open, so that longer prompts may be tokenized on the event loop too
        Raises ModelNotFound, AdapterNotFound, EngineFailed if the adapter that made the request's output has
        other weights now, or InvalidRequest with every violation that could be found at once.
        """
        arrival_time_s = self._clock()
        adapter = await self.find_adapter(request.model, request.lora_name, request.caller)
        if adapter is not None and request.lora_digest not in ("", adapter.digest):
            reason = f"adapter {adapter.name!r} has other weights now than those that made its output so far"
            raise EngineFailed(request.request_id, reason, num_new_tokens=0, can_resume=False)
        await _let_others_go_on(request)
        self.check_model(request.model, request.caller)
        await _check_long_schema(request.sampling, self.limits)
        self.rules.check_before_tokenizing(request, None if self.images is None else self.images.config)
        await _let_others_go_on(request)
        max_chars = MAX_CHARS_ALONE if is_alone else MAX_CHARS_ON_EVENT_LOOP
        tokens = await self._tokenize(request.prompt, request.add_special_tokens, max_chars)
        prompt_token_ids = self.rules.cut(request, tokens)
        cache_salt = request.caller.salted(request.cache_salt)
        placed = PlacedImages(prompt_token_ids)
        if self.images is not None:
            placed = await self.images.place(request, prompt_token_ids, cache_salt)
        max_tokens = self.rules.check_room(request, placed.token_ids)
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
            slo=request.caller.aims(request.slo, self._slo),
        )

    async def tokenize(self, prompt: Prompt, add_special_tokens: bool | None = None) -> list[int]:
        """Tokenize a prompt that need not fit into the context. Raises InvalidRequest.

        add_special_tokens: as in GenerateRequest
        """
        violations = Violations()
        if isinstance(prompt, EmbedsPrompt):
            violations.add("prompt_embeds", "given", "a prompt of another kind: embeddings have no tokens")
        else:
            self.rules.check_prompt(prompt, violations)
        violations.raise_if_any()
        return await self._tokenize(prompt, add_special_tokens)

    async def tokenize_start(self, text: str, max_tokens: int) -> list[int]:
        """Tokenize the beginning of a text, at most max_tokens: see ModelTokenizer.encode_start()."""
        return await off_event_loop(len(text), lambda: self.tokenizer.encode_start(text, max_tokens=max_tokens))

    async def tokenize_pair(self, first: str, second: str, max_tokens: int | None) -> list[int]:
        """Tokenize two texts as the model reads them together. max_tokens: None: all tokens, even beyond the context"""
        tokenizer, num_chars = self.tokenizer, len(first) + len(second)
        if max_tokens is None:
            return await off_event_loop(num_chars, lambda: tokenizer.encode_pair(first, second))
        return await off_event_loop(num_chars, lambda: tokenizer.encode_start(first, second, max_tokens=max_tokens))

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens. Raises InvalidRequest if some are unknown, or if there are too many."""
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
        """End the processes that prepare images: no further request comes."""
        if self.images is not None:
            self.images.close()

    def check_model(self, model: str, caller: Caller) -> None:
        """Raise ModelNotFound unless a caller's requests may name this model."""
        if model not in ("", self.model.name) and not self.adapters.knows(model, caller):
            raise ModelNotFound(model, self.model.name)

    async def find_adapter(self, model: str, name: str, caller: Caller) -> Adapter | None:
        """Return the adapter that a request names by lora_name, or as its model; None: it names none.

        Raises ModelNotFound or AdapterNotFound, also if the caller may not use the adapter; InvalidRequest if the
        adapter cannot be served.
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

    async def _tokenize(
        self, prompt: Prompt | None, add_special_tokens: bool | None = None, max_chars: int = MAX_CHARS_ON_EVENT_LOOP
    ) -> list[int]:
        """Tokenize a prompt; on a thread if it has more than max_chars."""
        tokenizer = self.tokenizer
        match prompt:
            case TextPrompt(text):
                adds = add_special_tokens is not False
                return await off_event_loop(
                    len(text), lambda: tokenizer.encode(text, add_special_tokens=adds), max_chars
                )
            case ChatPrompt() as chat:
                adds, num_chars = bool(add_special_tokens), num_chat_chars(chat)
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


def draw_engine_request_id(request_id: str) -> str:
    """Return a request's id for engines. Its end is random, so that two ingresses never give an engine the same id."""
    return f"{request_id}-{secrets.token_hex(4)}"


async def _let_others_go_on(request: GenerateRequest) -> None:
    """Let the event loop run before the next check of a long request, so that streams do not wait for all of them."""
    match request.prompt:
        case TokenPrompt(token_ids):
            is_long = len(token_ids) > _MANY_TOKENS
        case ChatPrompt(messages):
            is_long = len(messages) > _MANY_MESSAGES
        case _:
            is_long = len(request.output_token_ids) > _MANY_TOKENS
    if is_long:
        await asyncio.sleep(0)


async def _check_long_schema(options: SamplingOptions, limits: InputLimits) -> None:
    """Find the problems of a long JSON schema on a thread; the request's rules then know them."""
    params = options.structured_output
    if params is None or params.kind != "json_schema" or len(params.value) > limits.max_grammar_chars:
        return
    text = params.value
    if len(text) > _MAX_SCHEMA_CHARS_ON_EVENT_LOOP:
        await off_event_loop(len(text), lambda: remember_schema(text, limits), _MAX_SCHEMA_CHARS_ON_EVENT_LOOP)


async def _read_embeds(prompt: Prompt | None, model_dtype: str) -> PromptEmbeds | None:
    if not isinstance(prompt, EmbedsPrompt):
        return None
    if len(prompt.data) <= MAX_BYTES_ON_EVENT_LOOP:
        return read_embeds(prompt, model_dtype)
    return await asyncio.to_thread(read_embeds, prompt, model_dtype)
