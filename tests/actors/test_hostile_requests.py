"""A request that an engine's model cannot be given is refused alone. The engine, and what else runs there, goes on.

Tests of actors/core/requests/request_limits.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import numpy as np
import pytest

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.multimodal import EncoderInput, MultiModalFeature, PackedArray
from actors.core.requests.request import EngineCoreRequest, PromptEmbeds
from actors.core.requests.request_status import FinishReason
from actors.core.requests.sampling_params import PoolingParams, SamplingParams
from actors.engine_server import EngineServer
from actors.sessions.session_messages import SESSION_METHOD, Abort, Submit, encode
from cluster.errors import EngineLost
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import EngineAddress, KVTransferParams, PrefixSource, TransferPart, TransferRole
from kv_transfer.trust.grpc_proof import prove
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.secret import Purpose
from tests.engine_pair import engine_config
from tests.trusted import TRUST, member
from tests.vision import VISION_FAMILIES, VisionReference, draw_image, image_marker, place_images

TIMEOUT_S = 60.0
PROMPT = list(range(1, 41))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
REQUEST = EngineCoreRequest(request_id="bad", prompt_token_ids=PROMPT, sampling_params=GREEDY)
INFINITE, NOT_A_NUMBER = float("inf"), float("nan")
PEER = EngineAddress("prefill-9", 1, "127.0.0.1:1")


@asynccontextmanager
async def served(checkpoint: Path) -> AsyncIterator[tuple[EngineServer, EngineSession]]:
    engine = EngineServer(
        engine_config(checkpoint, transfer=KVTransferConfig(transport="tcp", link_timeout_s=60.0)), "decode-0", 1, TRUST
    )
    address = await engine.start("127.0.0.1")
    session = EngineSession(EngineDescriptor("decode-0", 1, EngineRole.BOTH, address), member(), timeout_s=TIMEOUT_S)
    await session.open()
    try:
        yield engine, session
    finally:
        await session.close()
        await engine.stop()


async def answer(session: EngineSession, request: EngineCoreRequest) -> list[EngineCoreOutput]:
    async with asyncio.timeout(TIMEOUT_S):
        return [output async for output in session.submit(request)]


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def sampled(**params: Any) -> dict[str, Any]:
    return {"sampling_params": replace(GREEDY, **params)}


def ticket(**peer: Any) -> dict[str, Any]:
    return {"kv_transfer_params": KVTransferParams("t", 0, TransferRole.CONSUMER, replace(PEER, **peer))}


BAD: dict[str, dict[str, Any]] = {
    "a token beyond the vocabulary": {"prompt_token_ids": [1, 10**6]},
    "a negative token": {"prompt_token_ids": [1, -5]},
    "a token of 41 bits": {"prompt_token_ids": [1, 2**40]},
    "an output token beyond the vocabulary": {"output_token_ids": [10**6]},
    "no prompt": {"prompt_token_ids": []},
    "a bias of an unknown token": sampled(logit_bias={10**7: 1.0}),
    "a bias of a negative token": sampled(logit_bias={-1: 1.0}),
    "an infinite bias": sampled(logit_bias={1: INFINITE}),
    "an unknown stop token": sampled(stop_token_ids=(10**7,), min_tokens=4),
    "an unknown allowed token": sampled(allowed_token_ids=(10**7,)),
    "an unknown bad word": sampled(bad_words=((10**7,),)),
    "an empty bad word": sampled(bad_words=((),)),
    "a temperature that is no number": sampled(temperature=NOT_A_NUMBER),
    "a negative temperature": sampled(temperature=-1.0),
    "top_p of 0": sampled(top_p=0.0),
    "a negative top_k": sampled(top_k=-7, temperature=1.0),
    "a negative seed": sampled(seed=-1),
    "max_tokens of -1": sampled(max_tokens=-1),
    "more logprobs than tokens": sampled(logprobs=10**6),
    "negative logprobs": sampled(logprobs=-3),
    "more prompt logprobs than tokens": sampled(prompt_logprobs=10**6),
    "a penalty that is no number": sampled(repetition_penalty=NOT_A_NUMBER),
    "a pattern of any length": sampled(repetition_max_pattern=2**30),
    "an infinite deadline": {"deadline_s": INFINITE},
    "an arrival that is no number": {"arrival_time_s": NOT_A_NUMBER},
    "a priority of 63 bits": {"priority": 2**62},
    "prompt embeddings that are too short": {
        "prompt_token_ids": [0] * 4,
        "prompt_embeds": PromptEmbeds(b"1234", 4, 48, "float32", b"digest"),
    },
    "prompt embeddings of an unknown dtype": {
        "prompt_token_ids": [0] * 4,
        "prompt_embeds": PromptEmbeds(bytes(4 * 48), 4, 48, "Tensor", b"digest"),
    },
    "prompt embeddings of another width": {
        "prompt_token_ids": [0] * 4,
        "prompt_embeds": PromptEmbeds(bytes(4 * 7 * 4), 4, 7, "float32", b"digest"),
    },
    "images for a model without": {
        "mm_features": (MultiModalFeature("a", 0, 4, 4),),
        "encoder_inputs": (EncoderInput("a", {"pixel_values": PackedArray("float32", (1,), bytes(4))}),),
    },
    "images of no feature, to be encoded elsewhere": {
        "encoder": PEER,
        "encoder_inputs": (EncoderInput("b", {"pixel_values": PackedArray("float32", (1,), bytes(4))}),),
    },
    "a vector of a model without": {"pooling_params": PoolingParams(dimensions=10**6)},
    "a peer whose ranks cannot share the heads": ticket(further_rank_addresses=("127.0.0.1:2",) * 2),
    "a peer of too many ranks": ticket(further_rank_addresses=("127.0.0.1:2",) * 5000),
    "a transfer under a name of the engine's own": {
        "kv_transfer_params": KVTransferParams("\0fetch/decode-0/1/1", 0, TransferRole.CONSUMER, PEER)
    },
    "a part of a transfer, which only ranks name": {
        "kv_transfer_params": KVTransferParams(TransferPart("t", 0, 0), 0, TransferRole.CONSUMER, PEER)
    },
    "a prefix at a peer whose ranks cannot share the heads": {
        "prefix_source": PrefixSource(replace(PEER, further_rank_addresses=("127.0.0.1:2",) * 2), 32)
    },
}


async def test_what_a_model_cannot_be_given_is_refused_alone(checkpoint: Callable[[str], Path]) -> None:
    async with served(checkpoint("llama")) as (engine, session):
        victim = replace(REQUEST, request_id="victim")
        expected = tokens(await answer(session, victim))
        assert len(expected) == 8
        for name, fields in BAD.items():
            good = asyncio.create_task(answer(session, victim))
            *_, last = await answer(session, replace(REQUEST, **fields))
            assert last.finish_reason is FinishReason.ERROR, name
            assert last.error, name
            assert tokens(await good) == expected, name
        assert engine.error is None
        await check_integrity(engine)


async def check_integrity(engine: EngineServer) -> None:
    assert engine.error is None
    assert engine._core is not None
    await asyncio.wait_for(engine._ask(engine._core.scheduler.check_integrity), TIMEOUT_S)


def packed(array: np.ndarray) -> PackedArray:
    return PackedArray(array.dtype.name, array.shape, array.tobytes())


def shown(request: EngineCoreRequest, **arrays: PackedArray) -> dict[str, Any]:
    """The request's image, made of something else."""
    image = request.encoder_inputs[0]
    return {"encoder_inputs": (EncoderInput(image.mm_hash, {**image.arrays, **arrays}),)}


def featured(request: EngineCoreRequest, **fields: Any) -> dict[str, Any]:
    """The request's image, said to be another."""
    return {"mm_features": (replace(request.mm_features[0], **fields),)}


@pytest.mark.parametrize("family", VISION_FAMILIES)
async def test_an_image_that_the_encoder_cannot_be_given_is_refused_alone(
    checkpoint: Callable[[str], Path], family: str
) -> None:
    directory = checkpoint(family)
    image = draw_image(1)
    text = f"A serving {image_marker(family)} prompts"
    placed = place_images(directory, VisionReference(directory, family).prompt(text, [image]), [image])
    good = replace(
        REQUEST,
        request_id="good",
        prompt_token_ids=placed.token_ids,
        mm_features=placed.features,
        encoder_inputs=placed.encoder_inputs,
    )
    pixels = placed.encoder_inputs[0].arrays["pixel_values"]
    feature = placed.features[0]
    numbers = packed(np.zeros((feature.num_embeds, 48), np.float32))
    bad: list[dict[str, Any]] = [
        shown(good, pixel_values=replace(pixels, dtype="nn")),
        shown(good, pixel_values=replace(pixels, dtype="int64")),
        shown(good, pixel_values=replace(pixels, data=pixels.data[:-4])),
        shown(good, pixel_values=packed(np.zeros((2, 2), np.float32))),
        shown(good, image_grid_thw=packed(np.array([[1, -2, -2]]))),
        shown(good, image_grid_thw=packed(np.array([[2**40, 2**40, 1]]))),
        shown(good, image_grid_thw=packed(np.zeros((0,), np.int64))),
        shown(good, return_dict=numbers),
        shown(good, embeddings=packed(np.zeros((1, 48), np.float32))),
        shown(good, embeddings=packed(np.zeros((feature.num_embeds, 7), np.float32))),
        shown(good, embeddings=replace(numbers, shape=(feature.num_embeds, 48, 1))),
        featured(good, num_embeds=feature.num_embeds + 1),
        featured(good, length=feature.length - 1, num_embeds=feature.length - 1),
        featured(good, length=feature.length - 1),
        featured(good, grid=(1, 1, feature.length) if feature.grid is None else None),
        featured(good, offset=10**6),
        featured(good, mm_hash="another"),
        {"encoder_inputs": (*good.encoder_inputs, EncoderInput("another", {}))},
        {"encoder_inputs": good.encoder_inputs * 2},
    ]
    async with served(directory) as (engine, session):
        expected = tokens(await answer(session, good))
        for fields in bad:
            *_, last = await answer(session, replace(good, request_id="bad", **fields))
            assert (last.finish_reason, bool(last.error)) == (FinishReason.ERROR, True), fields
        assert tokens(await answer(session, good)) == expected
        await check_integrity(engine)


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": "a\0fetch"},
        {"request_id": ""},
        {"request_id": 7},
        {"attempt": "zero"},
        {"attempt": 2**62},
        {"attempt": -1},
    ],
    ids=str,
)
async def test_a_request_without_a_name_ends_its_session_and_nothing_else(
    checkpoint: Callable[[str], Path], fields: dict[str, Any]
) -> None:
    async with served(checkpoint("llama")) as (engine, session):
        with pytest.raises(EngineLost):
            await answer(session, replace(REQUEST, **fields))
        assert engine.error is None


FRAMES = {
    "nothing": b"",
    "no MessagePack": b"\xc1",
    "nested lists": b"\x91" * 100_000,
    "a cut message": encode(Submit([REQUEST], 0.0))[:-7],
    "an unknown message": msgspec.msgpack.encode({"type": "taken"}),
    "requests that are no requests": msgspec.msgpack.encode({"type": "submit", "requests": [1], "sent_at_s": 0.0}),
    "a time that is no number": msgspec.msgpack.encode({"type": "submit", "requests": [], "sent_at_s": NOT_A_NUMBER}),
    "an abort of a negative attempt": encode(Abort([("a", -1)])),
}


async def test_what_is_no_message_ends_its_session_and_nothing_else(checkpoint: Callable[[str], Path]) -> None:
    async with served(checkpoint("llama")) as (engine, session):
        for frame in FRAMES.values():
            async with grpc.aio.insecure_channel(session.descriptor.address) as channel:
                proof = await prove(channel, member(), Purpose.SESSION, Party("decode-0", 1), TIMEOUT_S)
                method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(SESSION_METHOD)
                call = method(metadata=proof.metadata)
                await proof.confirm(call)
                await call.write(frame)
                async with asyncio.timeout(TIMEOUT_S):
                    while await call.read() is not grpc.aio.EOF:
                        pass
        assert len(tokens(await answer(session, REQUEST))) == 8
        assert engine.error is None
