"""Makes engines' requests from a client's request for vectors; finds every mistake of the client and names its field.

A call may have many inputs. Each input is a request of its own at the engines; all inputs are checked before the first
one is submitted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import Pooling, PoolingParams, SamplingParams
from cluster.errors import InvalidRequest
from cluster.parameters.generation import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cluster.parameters.sampling_rules import Violations
from cluster.settings.input_limits import InputLimits
from cluster.text.input_processor import InputProcessor, draw_engine_request_id
from cluster.text.model_tokenizer import share_room
from cluster.text.request_rules import WHATEVER_FITS
from cluster.vectors.vector_requests import ClassifyRequest, EmbedRequest, ScoreRequest

AnyVectorRequest = EmbedRequest | ClassifyRequest | ScoreRequest

MAX_NUMBERS: Final = 3_000_000
"""The limit of numbers in the answer to one call: they take 12 MB, and a gRPC message may have 16 MiB."""
_MAX_NAMED_INPUTS: Final = 10
"""The limit of wrong inputs that an error names."""
_POOLINGS: Final[dict[str, Pooling]] = {"last": "last", "mean": "mean", "cls": "cls"}


@dataclass(frozen=True, slots=True)
class _Input:
    """An input of a call.

    field: the input's name in the request
    pair:  the document, if `prompt` is a query and the model reads both together
    """

    field: str
    prompt: Prompt | None
    pair: Prompt | None = None


async def process_vectors(
    processor: InputProcessor, request: AnyVectorRequest, clock: Callable[[], float] = time.monotonic
) -> list[EngineCoreRequest]:
    """Validate and tokenize a request. Returns a request for each prompt, in order: a query comes before its documents.

    Raises ModelNotFound, PermissionDenied, or InvalidRequest with every violation that could be found at once.
    """
    arrival_time_s = clock()
    adapter = await processor.find_adapter(request.model, "", request.caller)
    violations = Violations()
    processor.rules.check_envelope(request.request_id, request.cache_salt, request.priority, violations)
    facts = processor.model.pooling or PoolingFacts(why_no_embeddings="raypd cannot read its hidden states")
    params = _params(request, facts, processor.model.name, violations)
    inputs = _inputs(request, params)
    is_scoring = isinstance(request, ScoreRequest)
    num_numbers_each = 1 if is_scoring else params.dimensions or facts.embedding_size or len(facts.labels)
    name = "documents" if is_scoring else "inputs"
    _check_size(name, inputs, num_numbers_each, processor.limits, violations)
    max_tokens = _max_tokens(request, processor, violations, is_pair=params.task == "score")
    violations.raise_if_any()
    template = EngineCoreRequest(
        request_id=draw_engine_request_id(request.request_id),
        prompt_token_ids=[],
        sampling_params=SamplingParams(),
        pooling_params=params,
        priority=request.caller.priority(request.priority),
        arrival_time_s=arrival_time_s,
        deadline_s=None if request.timeout_s is None else arrival_time_s + request.timeout_s,
        cache_salt=request.caller.salted(request.cache_salt),
        tenant=request.caller.tenant,
        lora=adapter,
    )
    token_ids = await _tokenize_all(processor, inputs, max_tokens)
    return [
        replace(template, request_id=f"{template.request_id}/{index}", prompt_token_ids=ids)
        for index, ids in enumerate(token_ids)
    ]


def _params(request: AnyVectorRequest, facts: PoolingFacts, model: str, violations: Violations) -> PoolingParams:
    if isinstance(request, EmbedRequest):
        return _embedding_params(request, facts, model, violations)
    params = PoolingParams(pooling=facts.pooling, activate=request.activate)
    if isinstance(request, ClassifyRequest):
        violations.require(bool(facts.labels), "model", model, "one with a classification head")
        return replace(params, task="classify")
    if not facts.labels:
        # The cosine of two vectors of length 1 is their dot product.
        violations.require(facts.embedding_size > 0, "model", model, "one that embeds, or has a head of one class")
        return replace(params, normalize=True)
    violations.require(len(facts.labels) == 1, "model", model, "one whose classification head has one class")
    return replace(params, task="score")


def _embedding_params(request: EmbedRequest, facts: PoolingFacts, model: str, violations: Violations) -> PoolingParams:
    size, dimensions = facts.embedding_size, request.dimensions
    if not size:
        violations.add("model", repr(model), f"one that embeds ({facts.why_no_embeddings})")
    elif dimensions is not None and facts.matryoshka_dimensions:
        allowed = (*facts.matryoshka_dimensions, size)
        violations.require(dimensions in allowed, "dimensions", dimensions, f"one of {', '.join(map(str, allowed))}")
    elif dimensions is not None:
        violations.require(1 <= dimensions <= size, "dimensions", dimensions, f"1 to {size}")
    pooling = facts.pooling if request.pooling is None else _POOLINGS.get(request.pooling)
    violations.require(pooling is not None, "pooling", request.pooling, f"one of {', '.join(_POOLINGS)}")
    return PoolingParams(
        pooling=pooling or facts.pooling,
        normalize=facts.normalize if request.normalize is None else request.normalize,
        dimensions=dimensions,
    )


def _inputs(request: AnyVectorRequest, params: PoolingParams) -> list[_Input]:
    if not isinstance(request, ScoreRequest):
        return [_Input(f"inputs[{index}]", prompt) for index, prompt in enumerate(request.inputs)]
    documents = [_Input(f"documents[{index}]", prompt) for index, prompt in enumerate(request.documents)]
    if params.task == "score":
        nothing = TextPrompt("")
        return [replace(one, prompt=request.query, pair=one.prompt or nothing) for one in documents]
    return [_Input("query", request.query), *documents]


def _check_size(
    name: str, inputs: Sequence[_Input], num_numbers_each: int, limits: InputLimits, violations: Violations
) -> None:
    """Check the number of inputs, their length together, and the size of the answer.

    num_numbers_each: how many numbers the answer has for each input
    """
    num_inputs = sum(one.field != "query" for one in inputs)
    if not 1 <= num_inputs <= limits.max_inputs:
        violations.add(name, f"{num_inputs} of them", f"1 to {limits.max_inputs}")
    if (num_numbers := num_inputs * num_numbers_each) > MAX_NUMBERS:
        violations.add(name, f"{num_numbers} numbers in the answer", f"at most {MAX_NUMBERS}: send fewer at a time")
    num_chars = sum(len(p.text) for one in inputs for p in (one.prompt, one.pair) if isinstance(p, TextPrompt))
    if num_chars > limits.max_prompt_chars:
        violations.add(name, f"{num_chars} characters long", f"at most {limits.max_prompt_chars} characters in all")


def _max_tokens(
    request: AnyVectorRequest, processor: InputProcessor, violations: Violations, *, is_pair: bool
) -> int | None:
    """Return the number of tokens to which each input is cut; None if no input is to be cut."""
    limit, max_model_len = request.truncate_prompt_tokens, processor.model.max_model_len
    if limit is None:
        return None
    least = processor.tokenizer.num_special_tokens(is_pair=is_pair) + 1
    is_allowed = limit == WHATEVER_FITS or least <= limit <= max_model_len
    allowed = f"{least} to {max_model_len}, or {WHATEVER_FITS} for as many as fit"
    violations.require(is_allowed, "truncate_prompt_tokens", limit, allowed)
    return max_model_len if limit == WHATEVER_FITS else limit


async def _tokenize_all(processor: InputProcessor, inputs: Sequence[_Input], max_tokens: int | None) -> list[list[int]]:
    violations, num_wrong, token_ids = Violations(), 0, []
    for one in inputs:
        try:
            token_ids.append(await _tokenize(processor, one, max_tokens))
        except InvalidRequest as error:
            for violation in error.violations:
                violations.add(f"{one.field}.{violation.field}", violation.value, violation.allowed)
            num_wrong += 1
            if num_wrong == _MAX_NAMED_INPUTS:
                break
        # A short text takes less than a millisecond, but many together would block the event loop and with it streams.
        await asyncio.sleep(0)
    violations.raise_if_any()
    return token_ids


async def _tokenize(processor: InputProcessor, one: _Input, max_tokens: int | None) -> list[int]:
    """Tokenize one input, cut to max_tokens. Raises InvalidRequest."""
    field, violations = "text", Violations()
    match one.prompt, one.pair:
        case None, _:
            violations.add("prompt", "missing", "one of text, token_ids and chat")
        case TokenPrompt(first), TokenPrompt(second) if first and second:
            if max_tokens is not None:
                lengths = share_room([len(first), len(second)], max_tokens)
                first, second = (ids[:length] for ids, length in zip((first, second), lengths, strict=True))
            return _check_tokens("token_ids", [*first, *second], processor)
        case TextPrompt(first), TextPrompt(second) if first and second:
            token_ids = await processor.tokenize_pair(first, second, max_tokens)
            return _check_tokens("text", token_ids, processor)
        case TokenPrompt(token_ids), None:
            return _check_tokens("token_ids", list(token_ids[:max_tokens]), processor)
        case TextPrompt(text), None if text and max_tokens is not None:
            return _check_tokens("text", await processor.tokenize_start(text, max_tokens), processor)
        case prompt, None:
            field = "chat" if isinstance(prompt, ChatPrompt) else "text"
            return _check_tokens(field, (await processor.tokenize(prompt))[:max_tokens], processor)
        case _:
            allowed = "text if the query is text, token ids if it is token ids: this model reads the two together"
            violations.add(field, "missing, empty or of another kind than the query", allowed)
    violations.raise_if_any()
    raise AssertionError("every case that comes here has a violation")


def _check_tokens(field: str, token_ids: list[int], processor: InputProcessor) -> list[int]:
    """Return the token ids if the model can be given them. Raises InvalidRequest.

    Unlike the prompt of a request for tokens, these may fill the whole context.
    """
    violations, model = Violations(), processor.model
    if not 1 <= len(token_ids) <= model.max_model_len:
        violations.add(field, f"{len(token_ids)} tokens long", f"1 to {model.max_model_len} tokens")
    elif min(token_ids) < 0 or max(token_ids) >= model.vocab_size:
        violations.require(False, field, token_ids, f"token ids from 0 to {model.vocab_size - 1}")
    violations.raise_if_any()
    return token_ids
