"""The service raypd.v1.ModelService, on the input processor of the newest model version."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Final

import grpc.aio

from cluster.access.caller import current_caller
from cluster.api.grpc.conversions.embed import vectors_to_proto
from cluster.api.grpc.conversions.generate import prompt_from_proto, token_ids_from_proto
from cluster.api.grpc.list_lengths import check_tokenize
from cluster.api.protos.raypd.v1 import model_pb2, model_pb2_grpc
from cluster.api.shared.version import server_version
from cluster.errors import FieldViolation, InvalidRequest
from cluster.requests.serving import Serving
from cluster.settings.input_limits import InputLimits
from cluster.text.input_processor import InputProcessor

_Context = grpc.aio.ServicerContext[Any, Any]

_TOKENS_AT_ONCE: Final = 200_000
"""Tokens that are put into a response before the event loop gets a turn, which takes 5 ms."""


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """The methods that describe the newest served version of the model, and use its tokenizer."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def GetModel(self, request: model_pb2.GetModelRequest, context: _Context) -> model_pb2.GetModelResponse:  # noqa: N802
        """Describe the served model. Raises ModelNotFound if the request names another one."""
        del context
        return self._describe(self._input_processor(request.model))

    async def ListModels(  # noqa: N802
        self, request: model_pb2.ListModelsRequest, context: _Context
    ) -> model_pb2.ListModelsResponse:
        """Describe every model that requests may ask for."""
        del request, context
        return model_pb2.ListModelsResponse(models=[self._describe(self._input_processor(""))])

    async def Tokenize(self, request: model_pb2.TokenizeRequest, context: _Context) -> model_pb2.TokenizeResponse:  # noqa: N802
        """Return the tokens of a prompt. Raises InvalidRequest."""
        del context
        current_caller().allowance.take_request()
        input_processor = self._input_processor(request.model)
        await check_tokenize(request, input_processor.limits)
        prompt = await prompt_from_proto(request)
        if prompt is None:
            raise InvalidRequest(FieldViolation("prompt", "missing", "one of text and chat"))
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else None
        token_ids = await input_processor.tokenize(prompt, adds)
        response = model_pb2.TokenizeResponse(max_model_len=input_processor.model.max_model_len)
        for start in range(0, len(token_ids), _TOKENS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            response.token_ids.extend(token_ids[start : start + _TOKENS_AT_ONCE])
        return response

    async def Detokenize(  # noqa: N802
        self, request: model_pb2.DetokenizeRequest, context: _Context
    ) -> model_pb2.DetokenizeResponse:
        """Return the text of tokens."""
        del context
        current_caller().allowance.take_request()
        input_processor = self._input_processor(request.model)
        input_processor.check_num_to_detokenize(len(request.token_ids))
        token_ids = await token_ids_from_proto(request.token_ids)
        text = await input_processor.detokenize(token_ids, skip_special_tokens=request.skip_special_tokens)
        return model_pb2.DetokenizeResponse(text=text)

    def _input_processor(self, model: str) -> InputProcessor:
        input_processor = self._serving.newest_model().input_processor
        input_processor.check_model(model, current_caller())
        return input_processor

    def _describe(self, input_processor: InputProcessor) -> model_pb2.GetModelResponse:
        model = input_processor.model
        return model_pb2.GetModelResponse(
            model=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=input_processor.tokenizer.has_chat_template,
            server_version=server_version(),
            limits=_limits(input_processor.limits),
            model_versions=self._serving.served_versions(),
            adapters=[
                model_pb2.AdapterDescription(name=one.name, digest=one.digest)
                for one in input_processor.adapters.known_to(current_caller())
            ],
            generates=model.generates,
            vectors=None if model.pooling is None else vectors_to_proto(model.pooling),
            sampling_defaults=model_pb2.SamplingDefaults(**dataclasses.asdict(model.defaults)),
        )


def _limits(limits: InputLimits) -> model_pb2.RequestLimits:
    names = [field.name for field in model_pb2.RequestLimits.DESCRIPTOR.fields]
    return model_pb2.RequestLimits(**{name: getattr(limits, name) for name in names})
