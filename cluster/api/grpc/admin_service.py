"""The service raypd.v1.AdminService, on the views of the cluster and the controller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc.aio

from cluster.api.grpc.conversions.status_messages import status_to_proto
from cluster.api.protos.raypd.v1 import admin_pb2, admin_pb2_grpc
from cluster.api.shared.admin import ClusterAdmin
from cluster.errors import FieldViolation, InvalidRequest
from cluster.observability.status import ClusterView
from cluster.routing.engine_connection import EngineRole

_Context = grpc.aio.ServicerContext[Any, Any]

_MAX_ENGINES: Final = 1024
"""The most engines of one role, as in ClusterConfig."""
_MAX_PROFILE_S: Final = 60.0


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """The methods by which operators see and change a cluster. Errors become statuses in interceptor.py.

    view: makes a view of the cluster as it is now; admin: the controller
    """

    def __init__(self, view: Callable[[], Awaitable[ClusterView]], admin: ClusterAdmin) -> None:
        self._view = view
        self._admin = admin

    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: _Context
    ) -> admin_pb2.GetStatusResponse:
        """Describe the cluster."""
        del request, context
        return status_to_proto(await self._view())

    async def Scale(self, request: admin_pb2.ScaleRequest, context: _Context) -> admin_pb2.ScaleResponse:  # noqa: N802
        """Change how many engines of each role are wanted. Raises InvalidRequest."""
        del context
        return admin_pb2.ScaleResponse(engine_ids=await self._admin.scale(_counts(request)))

    async def Drain(self, request: admin_pb2.DrainRequest, context: _Context) -> admin_pb2.DrainResponse:  # noqa: N802
        """Take an engine out of service."""
        del context
        await self._admin.drain(request.engine_id, for_good=request.for_good)
        return admin_pb2.DrainResponse()

    async def SetRole(  # noqa: N802
        self, request: admin_pb2.SetRoleRequest, context: _Context
    ) -> admin_pb2.SetRoleResponse:
        """Let an engine serve in another role. Raises InvalidRequest."""
        del context
        await self._admin.set_role(request.engine_id, _role(request.role))
        return admin_pb2.SetRoleResponse()

    async def DrainNode(  # noqa: N802
        self, request: admin_pb2.DrainNodeRequest, context: _Context
    ) -> admin_pb2.DrainNodeResponse:
        """Take everything on a node out of service."""
        del context
        return admin_pb2.DrainNodeResponse(engine_ids=await self._admin.drain_node(request.node))

    async def Update(self, request: admin_pb2.UpdateRequest, context: _Context) -> admin_pb2.UpdateResponse:  # noqa: N802
        """Replace the engines by ones that serve another checkpoint."""
        del context
        return admin_pb2.UpdateResponse(model_version=await self._admin.update(request.model))

    async def LoadAdapter(  # noqa: N802
        self, request: admin_pb2.LoadAdapterRequest, context: _Context
    ) -> admin_pb2.LoadAdapterResponse:
        """Let requests name an adapter."""
        del context
        return admin_pb2.LoadAdapterResponse(digest=await self._admin.load_adapter(request.name, request.directory))

    async def UnloadAdapter(  # noqa: N802
        self, request: admin_pb2.UnloadAdapterRequest, context: _Context
    ) -> admin_pb2.UnloadAdapterResponse:
        """Let no new request name an adapter."""
        del context
        await self._admin.unload_adapter(request.name)
        return admin_pb2.UnloadAdapterResponse()

    async def ResetPrefixCache(  # noqa: N802
        self, request: admin_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        """Clear the prefix caches of engines."""
        del context
        answers = await self._admin.reset_prefix_cache(request.engine_id, preempt=request.preempt)
        return admin_pb2.ResetPrefixCacheResponse(
            reset_engine_ids=[engine_id for engine_id, is_reset in answers.items() if is_reset],
            busy_engine_ids=[engine_id for engine_id, is_reset in answers.items() if not is_reset],
        )

    async def Profile(self, request: admin_pb2.ProfileRequest, context: _Context) -> admin_pb2.ProfileResponse:  # noqa: N802
        """Profile an engine. Raises InvalidRequest."""
        del context
        duration_s = request.duration_seconds
        if not 0 < duration_s <= _MAX_PROFILE_S:
            allowed = f"more than 0, at most {_MAX_PROFILE_S:g}"
            raise InvalidRequest(FieldViolation("duration_seconds", f"{duration_s:g}", allowed))
        profile = await self._admin.profile(request.engine_id, duration_s, with_trace=request.with_trace)
        return admin_pb2.ProfileResponse(summary=profile.summary, trace=profile.trace)

    async def RotateSecret(  # noqa: N802
        self, request: admin_pb2.RotateSecretRequest, context: _Context
    ) -> admin_pb2.RotateSecretResponse:
        """Replace the cluster's secret."""
        del request, context
        return admin_pb2.RotateSecretResponse(is_old_refused=await self._admin.rotate_secret())


def _counts(request: admin_pb2.ScaleRequest) -> dict[EngineRole, int]:
    given = {
        EngineRole.PREFILL: request.prefill if request.HasField("prefill") else None,
        EngineRole.DECODE: request.decode if request.HasField("decode") else None,
        EngineRole.BOTH: request.both if request.HasField("both") else None,
        EngineRole.ENCODE: request.encode if request.HasField("encode") else None,
    }
    counts = {role: count for role, count in given.items() if count is not None}
    if not counts:
        raise InvalidRequest(FieldViolation("prefill", "not given", "a number for one role at least"))
    for role, count in counts.items():
        if count > _MAX_ENGINES:
            raise InvalidRequest(FieldViolation(role.value, str(count), f"at most {_MAX_ENGINES}"))
    return counts


def _role(name: str) -> EngineRole:
    if name not in set(EngineRole):
        raise InvalidRequest(FieldViolation("role", repr(name), f"one of {', '.join(EngineRole)}"))
    return EngineRole(name)
