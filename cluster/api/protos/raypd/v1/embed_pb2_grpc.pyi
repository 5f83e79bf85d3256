"""The types of embed_pb2_grpc.py, for grpc.aio. Made by tools/generate_protos.py: do not edit."""
# ruff: noqa
# fmt: off

from collections.abc import AsyncIterator, Awaitable

import grpc.aio

from cluster.api.protos.raypd.v1 import embed_pb2

class EmbedServiceStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Embed: grpc.aio.UnaryUnaryMultiCallable[embed_pb2.EmbedRequest, embed_pb2.EmbedResponse]
    Classify: grpc.aio.UnaryUnaryMultiCallable[embed_pb2.ClassifyRequest, embed_pb2.ClassifyResponse]
    Score: grpc.aio.UnaryUnaryMultiCallable[embed_pb2.ScoreRequest, embed_pb2.ScoreResponse]

class EmbedServiceServicer:
    def Embed(self, request: embed_pb2.EmbedRequest, context: grpc.aio.ServicerContext[embed_pb2.EmbedRequest, embed_pb2.EmbedResponse]) -> Awaitable[embed_pb2.EmbedResponse]: ...
    def Classify(self, request: embed_pb2.ClassifyRequest, context: grpc.aio.ServicerContext[embed_pb2.ClassifyRequest, embed_pb2.ClassifyResponse]) -> Awaitable[embed_pb2.ClassifyResponse]: ...
    def Score(self, request: embed_pb2.ScoreRequest, context: grpc.aio.ServicerContext[embed_pb2.ScoreRequest, embed_pb2.ScoreResponse]) -> Awaitable[embed_pb2.ScoreResponse]: ...

def add_EmbedServiceServicer_to_server(
    servicer: EmbedServiceServicer, server: grpc.aio.Server
) -> None: ...
