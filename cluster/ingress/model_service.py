"""raypd.v1.ModelService."""

from __future__ import annotations

import grpc.aio

from cluster.errors import ModelNotFound
from cluster.ingress.protos.raypd.v1 import model_pb2, model_pb2_grpc
from cluster.ingress.version import server_version
from cluster.serving import Serving

_Context = grpc.aio.ServicerContext[model_pb2.GetModelRequest, model_pb2.GetModelResponse]


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """Describes the served model, in the newest version that serves."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def GetModel(self, request: model_pb2.GetModelRequest, context: _Context) -> model_pb2.GetModelResponse:  # noqa: N802
        """Describe the served model, if it is the one that is asked for."""
        del context
        input_processor = self._serving.newest_model().input_processor
        model = input_processor.model
        if request.model not in ("", model.name):
            raise ModelNotFound(request.model, model.name)
        return model_pb2.GetModelResponse(
            model=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=input_processor.tokenizer.has_chat_template,
            server_version=server_version(),
        )
