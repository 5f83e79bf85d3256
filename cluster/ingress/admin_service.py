"""raypd.v1.AdminService."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc.aio

from cluster.ingress.protos.raypd.v1 import admin_pb2, admin_pb2_grpc
from cluster.ingress.status_messages import status_to_proto
from cluster.status import ClusterView

_StatusContext = grpc.aio.ServicerContext[admin_pb2.GetStatusRequest, admin_pb2.GetStatusResponse]


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """view: makes a view of the cluster as it is now."""

    def __init__(self, view: Callable[[], Awaitable[ClusterView]]) -> None:
        self._view = view

    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: _StatusContext
    ) -> admin_pb2.GetStatusResponse:
        """Describe the cluster."""
        del request, context
        return status_to_proto(await self._view())
