"""The types of model_pb2_grpc.py, for grpc.aio. Made by tools/generate_protos.py: do not edit."""
# ruff: noqa
# fmt: off

from collections.abc import AsyncIterator, Awaitable

import grpc.aio

from cluster.api.protos.raypd.v1 import model_pb2

class ModelServiceStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    GetModel: grpc.aio.UnaryUnaryMultiCallable[model_pb2.GetModelRequest, model_pb2.GetModelResponse]
    ListModels: grpc.aio.UnaryUnaryMultiCallable[model_pb2.ListModelsRequest, model_pb2.ListModelsResponse]
    Tokenize: grpc.aio.UnaryUnaryMultiCallable[model_pb2.TokenizeRequest, model_pb2.TokenizeResponse]
    Detokenize: grpc.aio.UnaryUnaryMultiCallable[model_pb2.DetokenizeRequest, model_pb2.DetokenizeResponse]

class ModelServiceServicer:
    def GetModel(self, request: model_pb2.GetModelRequest, context: grpc.aio.ServicerContext[model_pb2.GetModelRequest, model_pb2.GetModelResponse]) -> Awaitable[model_pb2.GetModelResponse]: ...
    def ListModels(self, request: model_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[model_pb2.ListModelsRequest, model_pb2.ListModelsResponse]) -> Awaitable[model_pb2.ListModelsResponse]: ...
    def Tokenize(self, request: model_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[model_pb2.TokenizeRequest, model_pb2.TokenizeResponse]) -> Awaitable[model_pb2.TokenizeResponse]: ...
    def Detokenize(self, request: model_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext[model_pb2.DetokenizeRequest, model_pb2.DetokenizeResponse]) -> Awaitable[model_pb2.DetokenizeResponse]: ...

def add_ModelServiceServicer_to_server(
    servicer: ModelServiceServicer, server: grpc.aio.Server
) -> None: ...
