"""The types of generate_pb2_grpc.py, for grpc.aio. Made by tools/generate_protos.py: do not edit."""
# ruff: noqa
# fmt: off

from collections.abc import AsyncIterator, Awaitable

import grpc.aio

from cluster.api.protos.raypd.v1 import generate_pb2

class GenerateServiceStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Generate: grpc.aio.UnaryStreamMultiCallable[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]
    GenerateBatch: grpc.aio.UnaryStreamMultiCallable[generate_pb2.GenerateBatchRequest, generate_pb2.GenerateBatchResponse]
    Explain: grpc.aio.UnaryUnaryMultiCallable[generate_pb2.ExplainRequest, generate_pb2.ExplainResponse]

class GenerateServiceServicer:
    def Generate(self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]) -> AsyncIterator[generate_pb2.GenerateResponse] | Awaitable[None]: ...
    def GenerateBatch(self, request: generate_pb2.GenerateBatchRequest, context: grpc.aio.ServicerContext[generate_pb2.GenerateBatchRequest, generate_pb2.GenerateBatchResponse]) -> AsyncIterator[generate_pb2.GenerateBatchResponse] | Awaitable[None]: ...
    def Explain(self, request: generate_pb2.ExplainRequest, context: grpc.aio.ServicerContext[generate_pb2.ExplainRequest, generate_pb2.ExplainResponse]) -> Awaitable[generate_pb2.ExplainResponse]: ...

def add_GenerateServiceServicer_to_server(
    servicer: GenerateServiceServicer, server: grpc.aio.Server
) -> None: ...
