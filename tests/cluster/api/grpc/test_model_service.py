from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.checkpoint.generation_defaults import GenerationDefaults
from cluster.access.allowance import Allowance, AllowanceLimits
from cluster.access.caller import Caller, calling_as
from cluster.api.grpc.conversions.generate import request_from_proto
from cluster.api.grpc.model_service import ModelService
from cluster.api.protos.raypd.v1 import generate_pb2, model_pb2
from cluster.errors import AllowanceSpent, InvalidRequest, ModelNotFound
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.text.input_processor import InputProcessor
from cluster.text.model_tokenizer import ModelTokenizer
from tests.cluster.serving_setup import MODEL, make_pair, make_serving
from tests.fakes import EOS_TOKEN_ID, VOCAB_SIZE, bos_tokenizer

CONTEXT: Any = None


def service() -> ModelService:
    return ModelService(make_pair().serving)


async def test_the_model_is_described_with_its_limits_and_versions() -> None:
    (model,) = (await service().ListModels(model_pb2.ListModelsRequest(), CONTEXT)).models

    assert model == await service().GetModel(model_pb2.GetModelRequest(model="tiny"), CONTEXT)
    assert (model.max_model_len, model.vocab_size, list(model.model_versions)) == (64, VOCAB_SIZE, [1])
    assert (model.limits.max_stop_strings, model.limits.max_prompt_chars) == (16, 4_000_000)
    assert all(value > 0 for _, value in model.limits.ListFields())


async def test_text_becomes_tokens_and_tokens_text() -> None:
    text = "Grüße, 世界 🌍" * 10
    tokenized = await service().Tokenize(model_pb2.TokenizeRequest(text=text), CONTEXT)
    assert (bytes(tokenized.token_ids), tokenized.max_model_len) == (text.encode(), 64)

    request = model_pb2.DetokenizeRequest(token_ids=[*tokenized.token_ids, 256])
    assert (await service().Detokenize(request, CONTEXT)).text == text + "<eos>"
    request.skip_special_tokens = True
    assert (await service().Detokenize(request, CONTEXT)).text == text
    assert (await service().Detokenize(model_pb2.DetokenizeRequest(token_ids=[0xE4]), CONTEXT)).text == "\ufffd"


@pytest.mark.parametrize(("adds", "expected"), [(None, [EOS_TOKEN_ID, 97]), (True, [EOS_TOKEN_ID, 97]), (False, [97])])
async def test_special_tokens_are_left_out_if_they_are_not_wanted(adds: bool | None, expected: list[int]) -> None:
    pair = make_pair()
    processor = InputProcessor(MODEL, ModelTokenizer(bos_tokenizer(), use_fastokens=True))
    versions = ModelVersions(ModelVersion(1, processor, LeastLoadedPair()))
    serving = make_serving(pair.prefill, pair.decode, versions=versions)
    request = model_pb2.TokenizeRequest(text="a", add_special_tokens=adds)
    assert (await ModelService(serving).Tokenize(request, CONTEXT)).token_ids == expected


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (model_pb2.TokenizeRequest(), InvalidRequest),
        (model_pb2.TokenizeRequest(text=""), InvalidRequest),
        (model_pb2.TokenizeRequest(chat=generate_pb2.ChatMessages()), InvalidRequest),
        (model_pb2.TokenizeRequest(text="x", model="gpt"), ModelNotFound),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(request_: model_pb2.TokenizeRequest, error: type[Exception]) -> None:
    with pytest.raises(error):
        await service().Tokenize(request_, CONTEXT)


async def test_unknown_tokens_and_models_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="token ids from 0 to 256"):
        await service().Detokenize(model_pb2.DetokenizeRequest(token_ids=[VOCAB_SIZE]), CONTEXT)
    with pytest.raises(ModelNotFound):
        await service().Detokenize(model_pb2.DetokenizeRequest(model="gpt"), CONTEXT)


async def test_tokenizing_counts_as_a_request() -> None:
    caller = Caller("a", "t", allowance=Allowance("a", AllowanceLimits(requests_per_s=0.001, burst_s=1.0)))
    with calling_as(caller):
        await service().Tokenize(model_pb2.TokenizeRequest(text="x"), CONTEXT)
        with pytest.raises(AllowanceSpent):
            await service().Detokenize(model_pb2.DetokenizeRequest(token_ids=[1]), CONTEXT)


async def test_the_models_own_sampling_defaults_are_shown_and_count_for_requests() -> None:
    serving = make_pair().serving
    processor = serving.newest_model().input_processor
    processor.model = replace(processor.model, defaults=GenerationDefaults(temperature=0.6, top_k=5))

    described = await ModelService(serving).GetModel(model_pb2.GetModelRequest(), CONTEXT)

    assert described.sampling_defaults == model_pb2.SamplingDefaults(temperature=0.6, top_k=5)
    silent, explicit = generate_pb2.SamplingParams(), generate_pb2.SamplingParams(temperature=1.0, top_k=0)
    for message, expected in ((silent, (0.6, 5)), (explicit, (1.0, 0))):
        request = await request_from_proto("a", generate_pb2.GenerateRequest(text="x", sampling_params=message), None)
        params = (await processor.process(request)).sampling_params
        assert (params.temperature, params.top_k) == expected
