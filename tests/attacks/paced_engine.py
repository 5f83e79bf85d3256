"""An engine that costs nothing: every request gets a token per tick, and every input its vector at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.routing.engine_connection import EngineConnection, EngineDescriptor, EngineRole
from cluster.sessions.cluster_membership import Membership
from cluster.sessions.request_stream import RequestStream
from kv_transfer.links.refused_messages import RefusedMessages

TICK_S = 0.02


class PacedEngine:
    """An EngineConnection of an engine that prefills and decodes. run() belongs to the event loop of its requests."""

    def __init__(self, token_ids: Sequence[int], vector_size: int) -> None:
        self._descriptor = EngineDescriptor("paced", 1, EngineRole.BOTH, "nowhere:1")
        self._token_ids = token_ids
        self._vector = [0.5] * vector_size
        self._running: dict[str, tuple[EngineCoreRequest, RequestStream, int]] = {}

    @property
    def descriptor(self) -> EngineDescriptor:
        return self._descriptor

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._running)

    def submit(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        stream = RequestStream(request)
        if request.pooling_params is None:
            self._running[request.request_id] = request, stream, len(request.output_token_ids)
        else:
            num_labels = {"classify": 2, "score": 1}.get(request.pooling_params.task, len(self._vector))
            vector = self._vector[:num_labels]
            stream.put(_output(request, [], 0, finish_reason=FinishReason.STOP, pooling_output=vector))
        return stream

    def abort(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            running[1].end()

    async def run(self) -> None:
        """Give tokens until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            for request_id, (request, stream, position) in list(self._running.items()):
                is_last = position + 1 == request.sampling_params.max_tokens
                token_id = self._token_ids[position % len(self._token_ids)]
                reason = FinishReason.LENGTH if is_last else None
                stream.put(_output(request, [token_id], position, finish_reason=reason))
                if is_last:
                    del self._running[request_id]
                else:
                    self._running[request_id] = request, stream, position + 1


class PoolOfOne:
    """The part of SessionPool that an ingress uses, with one engine that is always there."""

    def __init__(self, engine: EngineConnection) -> None:
        self._engines = [engine]
        self._change = asyncio.Event()
        self.membership = Membership(1, (engine.descriptor,))
        self.refused_messages = RefusedMessages()

    def snapshot(self) -> Sequence[EngineConnection]:
        return self._engines

    def next_change(self) -> asyncio.Event:
        return self._change

    def stats(self) -> dict[object, object]:
        return {}

    async def close(self) -> None:
        pass


def _output(
    request: EngineCoreRequest,
    token_ids: list[int],
    position: int,
    *,
    finish_reason: FinishReason | None = None,
    pooling_output: list[float] | None = None,
) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id,
        attempt=request.attempt,
        new_token_ids=token_ids,
        first_position=position,
        finish_reason=finish_reason,
        pooling_output=pooling_output,
    )
