"""Proves that an engine is ready: sends a canary request through a real pair of engines, and checks the tokens.

The tokens are right if the decode engine gives the same ones when it runs the same prompt alone. Each of the two runs
has a cache_salt of its own, so that neither finds the other's cached blocks: the first run has to transfer KV, and the
second has to compute it.

Engines may round differently (16 bits, GPUs, different tensor parallel sizes). Two tokens that are about equally likely
may then change places, and all later tokens differ. So tokens that differ are judged by log-probabilities: the decode
engine alone reads the prompt and the pair's tokens (teacher forcing). It has to find each of these tokens about as
likely as the pair did, and no other token much more likely. In float32 on CPUs the allowed difference is that of a tie.
Elsewhere a second prompt is tried before the pair is refused, because the first may be an unlucky one for the model.

A model for vectors has nothing to hand over: each engine of the pair computes the vector of one prompt, and the vectors
are compared.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.core.requests.sampling_params import PoolingParams, SamplingParams
from actors.model_facts import ModelFacts
from cluster.errors import CanaryFailed, EngineLost
from cluster.routing.engine_connection import EngineConnection
from kv_transfer.params import KVTransferParams, TransferRole

logger = logging.getLogger(__name__)

_NUM_TOKENS = 4
_TIE: Final = 1e-3
"""The difference of log-probabilities, in nats, up to which two tokens count as equally likely in float32 on a CPU."""
_ROUNDING: Final = 0.5
"""The largest error of a token's log-probability, in nats, that rounding to 16 bits can cause."""
_NUM_LIKELIEST: Final = 20
_PART_OF_SPREAD: Final = 0.5
"""The allowed difference, as a part of the spread from the likeliest token to the one at place _NUM_LIKELIEST. Rounding
causes a small part of the spread, even in a model that finds all tokens about equally likely; wrong KV, or other
weights, cause differences as large as the spread.
"""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt whose token ids are an arithmetic progression, so that it suits any vocabulary.

    start: the first token id is vocab_size // start
    step:  the difference between one token id and the next
    """

    start: int
    step: int


_PROMPTS: Final = (_Prompt(3, 7), _Prompt(5, 11))
_MAX_VECTOR_ERROR = 0.1
"""The relative error that 16 bits and different kernels may cause; the vectors of other weights differ far more."""


async def run_canary(
    prefill: EngineConnection | None, decode: EngineConnection, facts: ModelFacts, timeout_s: float
) -> None:
    """Check one pair of engines, or one engine alone if prefill is None. Raises CanaryFailed with what went wrong."""
    name = decode.descriptor.engine_id if prefill is None else _pair_name(prefill, decode)
    try:
        async with asyncio.timeout(timeout_s):
            if not facts.generates:
                await _compare_vectors([decode] if prefill is None else [prefill, decode], facts, name)
            elif prefill is None:
                await _run_alone(decode, _request(facts, _PROMPTS[0]))
            else:
                await _compare_tokens(prefill, decode, facts, name)
    except TimeoutError as error:
        raise CanaryFailed(f"{name}: the canary request did not end within {timeout_s:.0f} s") from error
    except EngineLost as error:
        raise CanaryFailed(f"{name}: {error}") from error


async def _compare_tokens(prefill: EngineConnection, decode: EngineConnection, facts: ModelFacts, name: str) -> None:
    """Raise CanaryFailed unless the pair's tokens of one prompt are right."""
    is_exact = _is_exact(facts)
    differences = []
    for prompt in _PROMPTS[:1] if is_exact else _PROMPTS:
        difference = await _find_difference(prefill, decode, _request(facts, prompt), _TIE if is_exact else _ROUNDING)
        if difference is None:
            return
        differences.append(difference)
        logger.warning(
            "the tokens of a canary request differ between the engines of a pair",
            extra={"pair": name, "difference": difference},
        )
    raise CanaryFailed(f"{name}: {'; '.join(differences)}: the two engines do not compute the same")


async def _find_difference(
    prefill: EngineConnection, decode: EngineConnection, request: EngineCoreRequest, max_difference: float
) -> str | None:
    """Run a request on the pair and on the decode engine alone. Returns how the tokens differ, in words.

    max_difference: the allowed difference of a token's log-probability, in nats
    Returns None if the tokens are equal, or differ by no more than that.
    """
    handed_over = await _run_pair(prefill, decode, request)
    alone = await _run_alone(decode, _renamed(request))
    if len(handed_over) != _NUM_TOKENS:
        raise CanaryFailed(f"asked for {_NUM_TOKENS} tokens, got {[one.token_ids[0] for one in handed_over]}")
    token_ids, alone_ids = ([one.token_ids[0] for one in tokens] for tokens in (handed_over, alone))
    if token_ids == alone_ids:
        return None
    forced = await _read_forced(decode, request, token_ids)
    errors = [_error(theirs, ours, max_difference) for theirs, ours in zip(handed_over, forced, strict=True)]
    if all(error <= 1.0 for error in errors):  # This comparison is false for a NaN, so a NaN fails the check.
        return None
    return (
        f"tokens {token_ids} after the handoff, but {alone_ids} when {decode.descriptor.engine_id} prefills by itself; "
        f"the log-probabilities differ by {max(errors):.3g} times as much as rounding can cause"
    )


def _error(theirs: TokenLogprobs, ours: TokenLogprobs, max_difference: float) -> float:
    """Return the difference of one token's log-probabilities, as a multiple of the allowed difference.

    theirs: what the pair found
    ours:   what the decode engine alone found; after the token's own come the likeliest tokens, best first. The closer
            together these are, the smaller is the allowed difference.
    """
    best, last = ours.logprobs[1], ours.logprobs[-1]
    allowed = min(max_difference, _PART_OF_SPREAD * (best - last))
    difference = max(abs(theirs.logprobs[0] - ours.logprobs[0]), best - ours.logprobs[0])
    return difference / allowed if allowed > 0 else math.inf


def _is_exact(facts: ModelFacts) -> bool:
    """Return whether two engines round so much alike that only a tie can change a token: in float32 on CPUs."""
    is_on_cpu = facts.pairing is None or not facts.pairing.is_on_gpu
    return facts.layout.dtype == "float32" and is_on_cpu


async def _run_alone(engine: EngineConnection, request: EngineCoreRequest) -> list[TokenLogprobs]:
    tokens = await _tokens([engine.submit(request)])
    if len(tokens) != _NUM_TOKENS:
        got = [one.token_ids[0] for one in tokens]
        raise CanaryFailed(f"{engine.descriptor.engine_id}: asked for {_NUM_TOKENS} tokens, got {got}")
    return tokens


async def _read_forced(
    engine: EngineConnection, request: EngineCoreRequest, token_ids: list[int]
) -> list[TokenLogprobs]:
    """Let the engine alone read these tokens after the request's prompt.

    Returns the log-probabilities of each token, and of the likeliest tokens at its position. Raises CanaryFailed.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=_NUM_LIKELIEST)
    prompt = [*request.prompt_token_ids, *token_ids]
    async for output in engine.submit(replace(_renamed(request), prompt_token_ids=prompt, sampling_params=params)):
        if output.prompt_logprobs is not None:
            return output.prompt_logprobs[-len(token_ids) :]
        raise CanaryFailed(f"{engine.descriptor.engine_id} gave the canary request up: {output.error}")
    raise CanaryFailed(f"{engine.descriptor.engine_id} sent no log-probabilities of the canary request's tokens")


async def _run_pair(
    prefill: EngineConnection, decode: EngineConnection, request: EngineCoreRequest
) -> list[TokenLogprobs]:
    transfer_id = f"canary-{uuid.uuid4().hex}"
    # The consumer comes first, because its reservation lets the producer begin.
    consumer = decode.submit(_with_ticket(request, transfer_id, TransferRole.CONSUMER, prefill))
    producer = prefill.submit(_with_ticket(request, transfer_id, TransferRole.PRODUCER, decode))
    return await _tokens([producer, consumer])


async def _compare_vectors(engines: list[EngineConnection], facts: ModelFacts, name: str) -> None:
    vectors = [await _vector(engine, facts) for engine in engines]
    size = math.hypot(*vectors[0])
    if not 0 < size < math.inf:  # This comparison is false for a NaN, so a NaN fails the check.
        raise CanaryFailed(f"{name}: the canary request gave a vector of length {size:g}")
    if any(math.dist(vectors[0], vector) > _MAX_VECTOR_ERROR * size for vector in vectors):
        raise CanaryFailed(f"{name}: the two engines do not compute the same vector of one prompt")


async def _vector(engine: EngineConnection, facts: ModelFacts) -> list[float]:
    assert facts.pooling is not None, "a model that gives no tokens gives vectors"
    params = PoolingParams(pooling=facts.pooling.pooling)
    if not facts.pooling.embedding_size:
        params = replace(params, task="classify", activate=False)
    engine_id = engine.descriptor.engine_id
    async for output in engine.submit(replace(_request(facts), pooling_params=params)):
        if output.pooling_output is not None:
            return output.pooling_output
        raise CanaryFailed(f"{engine_id} gave the canary request up: {output.error}")
    raise CanaryFailed(f"{engine_id} gave no vector for the canary request")


def _with_ticket(
    request: EngineCoreRequest, transfer_id: str, role: TransferRole, peer: EngineConnection
) -> EngineCoreRequest:
    # Without handoff ranks: an engine whose role has just changed keeps its former rank until its transfers end, and
    # would refuse. Should a canary close a circle of engines that wait for each other, its deadline opens the circle.
    ticket = KVTransferParams(transfer_id, request.attempt, role, peer.descriptor.kv_address)
    return EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        arrival_time_s=request.arrival_time_s,
        cache_salt=request.cache_salt,
        kv_transfer_params=ticket,
    )


def _request(facts: ModelFacts, prompt: _Prompt = _PROMPTS[0]) -> EngineCoreRequest:
    """Make a request whose prompt is a little longer than two blocks, if the model's context allows."""
    # _read_forced() sends the prompt and the answer's tokens as one prompt, and asks for one token more.
    num_tokens = max(1, min(2 * facts.layout.block_size + 3, facts.max_model_len - _NUM_TOKENS - 1))
    first = facts.vocab_size // prompt.start
    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=[(first + prompt.step * index) % facts.vocab_size for index in range(num_tokens)],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=0),
    )
    return _renamed(request)


def _renamed(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request with another id, and with a cache_salt that keeps it from sharing cached blocks."""
    unique = uuid.uuid4().hex
    return replace(request, request_id=f"canary-{unique}", cache_salt=unique)


async def _tokens(streams: Iterable[AsyncIterator[EngineCoreOutput]]) -> list[TokenLogprobs]:
    """Read streams that follow each other by position. Returns each token with its log-probability.

    Raises CanaryFailed if an engine gives the request up, or if a log-probability is not finite.
    """
    outputs = chain.from_iterable([[output async for output in stream] for stream in streams])
    tokens: list[TokenLogprobs] = []
    for output in outputs:
        if output.finish_reason in {FinishReason.ERROR, FinishReason.ABORT}:
            raise CanaryFailed(f"the engine gave the canary request up: {output.error}")
        logprobs = output.logprobs or []
        if len(logprobs) != len(output.new_token_ids) or not all(math.isfinite(one.logprobs[0]) for one in logprobs):
            raise CanaryFailed(f"tokens {output.new_token_ids} have no finite log-probabilities")
        tokens += logprobs
    return tokens


def _pair_name(prefill: EngineConnection, decode: EngineConnection) -> str:
    return f"{prefill.descriptor.engine_id} -> {decode.descriptor.engine_id}"
