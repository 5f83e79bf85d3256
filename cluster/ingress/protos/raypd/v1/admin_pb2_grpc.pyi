"""The types of admin_pb2_grpc.py, for grpc.aio. Made by tools/generate_protos.py: do not edit."""
# ruff: noqa
# fmt: off

from collections.abc import AsyncIterator, Awaitable

import grpc.aio

from cluster.ingress.protos.raypd.v1 import admin_pb2

class AdminServiceStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    GetStatus: grpc.aio.UnaryUnaryMultiCallable[admin_pb2.GetStatusRequest, admin_pb2.GetStatusResponse]
    Scale: grpc.aio.UnaryUnaryMultiCallable[admin_pb2.ScaleRequest, admin_pb2.ScaleResponse]
    Drain: grpc.aio.UnaryUnaryMultiCallable[admin_pb2.DrainRequest, admin_pb2.DrainResponse]
    SetRole: grpc.aio.UnaryUnaryMultiCallable[admin_pb2.SetRoleRequest, admin_pb2.SetRoleResponse]
    DrainNode: grpc.aio.UnaryUnaryMultiCallable[admin_pb2.DrainNodeRequest, admin_pb2.DrainNodeResponse]
    Update: grpc.aio.UnaryUnaryMultiCallable[admin_pb2.UpdateRequest, admin_pb2.UpdateResponse]
    LoadAdapter: grpc.aio.UnaryUnaryMultiCallable[admin_pb2.LoadAdapterRequest, admin_pb2.LoadAdapterResponse]
    UnloadAdapter: grpc.aio.UnaryUnaryMultiCallable[admin_pb2.UnloadAdapterRequest, admin_pb2.UnloadAdapterResponse]

class AdminServiceServicer:
    def GetStatus(self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[admin_pb2.GetStatusRequest, admin_pb2.GetStatusResponse]) -> Awaitable[admin_pb2.GetStatusResponse]: ...
    def Scale(self, request: admin_pb2.ScaleRequest, context: grpc.aio.ServicerContext[admin_pb2.ScaleRequest, admin_pb2.ScaleResponse]) -> Awaitable[admin_pb2.ScaleResponse]: ...
    def Drain(self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext[admin_pb2.DrainRequest, admin_pb2.DrainResponse]) -> Awaitable[admin_pb2.DrainResponse]: ...
    def SetRole(self, request: admin_pb2.SetRoleRequest, context: grpc.aio.ServicerContext[admin_pb2.SetRoleRequest, admin_pb2.SetRoleResponse]) -> Awaitable[admin_pb2.SetRoleResponse]: ...
    def DrainNode(self, request: admin_pb2.DrainNodeRequest, context: grpc.aio.ServicerContext[admin_pb2.DrainNodeRequest, admin_pb2.DrainNodeResponse]) -> Awaitable[admin_pb2.DrainNodeResponse]: ...
    def Update(self, request: admin_pb2.UpdateRequest, context: grpc.aio.ServicerContext[admin_pb2.UpdateRequest, admin_pb2.UpdateResponse]) -> Awaitable[admin_pb2.UpdateResponse]: ...
    def LoadAdapter(self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext[admin_pb2.LoadAdapterRequest, admin_pb2.LoadAdapterResponse]) -> Awaitable[admin_pb2.LoadAdapterResponse]: ...
    def UnloadAdapter(self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext[admin_pb2.UnloadAdapterRequest, admin_pb2.UnloadAdapterResponse]) -> Awaitable[admin_pb2.UnloadAdapterResponse]: ...

def add_AdminServiceServicer_to_server(
    servicer: AdminServiceServicer, server: grpc.aio.Server
) -> None: ...
