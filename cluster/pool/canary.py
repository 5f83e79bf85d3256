"""Ready means proven: a request through a real prefill -> decode pair, with the right tokens.

Right means: the decode engine, asked to do the same prompt alone, says the same. A cache_salt of its own keeps each of
the two runs from the other's cached blocks, so that the first one really moves KV and the second really computes it.

A model that gives no tokens has nothing to hand over: each engine of the pair is asked for the prompt's vector.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from itertools import chain

from actors.config import ModelFacts
from actors.core.outputs import EngineCoreOutput
from actors.core.request import EngineCoreRequest, FinishReason
from actors.core.sampling_params import PoolingParams, SamplingParams
from cluster.engine_connection import EngineConnection
from cluster.errors import CanaryFailed, EngineLost
from kv_transfer.params import KVTransferParams, TransferRole

_NUM_TOKENS = 4
_MAX_VECTOR_ERROR = 0.1
"""Relative. What 16 bits and other kernels may do; other weights give vectors that have nothing in common."""


async def run_canary(
    prefill: EngineConnection | None, decode: EngineConnection, facts: ModelFacts, timeout_s: float
) -> None:
    """Prove one pair, or one combined engine if prefill is None. Raises CanaryFailed with what went wrong."""
    name = decode.descriptor.engine_id if prefill is None else _pair_name(prefill, decode)
    try:
        async with asyncio.timeout(timeout_s):
            if not facts.generates:
                await _compare_vectors([decode] if prefill is None else [prefill, decode], facts, name)
                return
            handed_over = await _run_pair(prefill, decode, facts) if prefill is not None else None
            alone = await _tokens([decode.submit(_request(facts))])
    except TimeoutError as error:
        raise CanaryFailed(f"{name}: the canary request did not end within {timeout_s:.0f} s") from error
    except EngineLost as error:
        raise CanaryFailed(f"{name}: {error}") from error
    if len(alone) != _NUM_TOKENS:
        raise CanaryFailed(f"{name}: asked for {_NUM_TOKENS} tokens, got {alone}")
    if handed_over is not None and handed_over != alone:
        raise CanaryFailed(
            f"{name}: tokens {handed_over} after the handoff, but {alone} when {decode.descriptor.engine_id} "
            "prefills by itself: the two engines do not compute the same"
        )


async def _run_pair(prefill: EngineConnection, decode: EngineConnection, facts: ModelFacts) -> list[int]:
    transfer_id = f"canary-{uuid.uuid4().hex}"
    request = _request(facts)
    # The consumer first: its reservation is what lets the producer begin.
    consumer = decode.submit(_with_ticket(request, transfer_id, TransferRole.CONSUMER, prefill))
    producer = prefill.submit(_with_ticket(request, transfer_id, TransferRole.PRODUCER, decode))
    return await _tokens([producer, consumer])


async def _compare_vectors(engines: list[EngineConnection], facts: ModelFacts, name: str) -> None:
    vectors = [await _vector(engine, facts) for engine in engines]
    size = math.hypot(*vectors[0])
    if not 0 < size < math.inf:  # a NaN fails, too
        raise CanaryFailed(f"{name}: a vector of length {size:g} came of the canary request")
    if any(math.dist(vectors[0], vector) > _MAX_VECTOR_ERROR * size for vector in vectors):
        raise CanaryFailed(f"{name}: the two engines do not compute the same vector of one prompt")


async def _vector(engine: EngineConnection, facts: ModelFacts) -> list[float]:
    assert facts.pooling is not None, "a model gives tokens or vectors"
    params = PoolingParams(pooling=facts.pooling.pooling)
    if not facts.pooling.embedding_size:
        params = replace(params, task="classify", activate=False)
    engine_id = engine.descriptor.engine_id
    async for output in engine.submit(replace(_request(facts), pooling_params=params)):
        if output.pooling_output is not None:
            return output.pooling_output
        raise CanaryFailed(f"{engine_id} gave the canary request up: {output.error}")
    raise CanaryFailed(f"{engine_id} gave no vector of the canary request")


def _with_ticket(
    request: EngineCoreRequest, transfer_id: str, role: TransferRole, peer: EngineConnection
) -> EngineCoreRequest:
    ticket = KVTransferParams(transfer_id, request.attempt, role, peer.descriptor.kv_address)
    return EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        arrival_time_s=request.arrival_time_s,
        cache_salt=request.cache_salt,
        kv_transfer_params=ticket,
    )


def _request(facts: ModelFacts) -> EngineCoreRequest:
    """A prompt of two blocks and a bit, if the model's context allows."""
    num_tokens = min(2 * facts.layout.block_size + 3, facts.max_model_len - _NUM_TOKENS)
    first, step = facts.vocab_size // 3, 7
    unique = uuid.uuid4().hex
    return EngineCoreRequest(
        request_id=f"canary-{unique}",
        prompt_token_ids=[(first + step * index) % facts.vocab_size for index in range(max(1, num_tokens))],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True),
        cache_salt=unique,
    )


async def _tokens(streams: Iterable[AsyncIterator[EngineCoreOutput]]) -> list[int]:
    """Every token of streams that follow each other by position."""
    outputs = chain.from_iterable([[output async for output in stream] for stream in streams])
    token_ids: list[int] = []
    for output in outputs:
        if output.finish_reason in {FinishReason.ERROR, FinishReason.ABORT}:
            raise CanaryFailed(f"the engine gave the canary request up: {output.error}")
        token_ids.extend(output.new_token_ids)
    return token_ids


def _pair_name(prefill: EngineConnection, decode: EngineConnection) -> str:
    return f"{prefill.descriptor.engine_id} -> {decode.descriptor.engine_id}"
