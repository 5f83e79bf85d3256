"""The engine's end of its sessions: a gRPC stream for each ingress.

A session is one client of the scheduler (client_index). When it ends, for whatever reason, everything that it had
submitted and that has not finished is aborted: nobody is left to read the answers. Nothing is told to a client, or read
from it, before it has proven the cluster's secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, EngineCoreOutputs
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.request_status import FinishReason
from actors.sessions.session_messages import (
    SESSION_METHOD,
    EngineMessage,
    Hello,
    Outputs,
    ReceivedSubmit,
    RefusedRequest,
    Taken,
    decode_client_message,
    encode,
)
from kv_transfer.links.refused_messages import RefusedMessages
from kv_transfer.message_ranges import MALFORMED
from kv_transfer.trust.grpc_proof import GrpcAcceptor
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.secret import Purpose

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5
_MAX_QUEUED_BATCHES = 20_000
_TAKEN = Taken()


class SessionEngine(Protocol):
    """The engine, as sessions use it; callable from the event loop."""

    def find_mistake(self, request: EngineCoreRequest) -> str | None:
        """Say what of a request the engine's model cannot be given, or return None."""

    def submit(self, requests: list[EngineCoreRequest], client_index: int) -> None:
        """Queue requests."""

    def abort(self, requests: list[tuple[str, int]], client_index: int) -> None:
        """Queue the end of requests."""

    @property
    def stats(self) -> SchedulerStats:
        """The newest snapshot."""


class _Session:
    """One client: what it has running, and what waits to be sent to it."""

    def __init__(self, client_index: int) -> None:
        self.client_index = client_index
        self.attempts: dict[str, int] = {}
        self.outgoing: asyncio.Queue[EngineCoreOutputs | Taken] = asyncio.Queue(_MAX_QUEUED_BATCHES)
        self._is_cut = False
        self._is_ending = False
        self.next_stats_s = 0.0

    def deliver(self, batch: EngineCoreOutputs) -> None:
        """Send a step's outputs."""
        for request_id in batch.finished_req_ids:
            self.attempts.pop(request_id, None)
        for output in batch.others:
            if output.finished:
                self.attempts.pop(output.request_id, None)
        self.send(batch)

    def send(self, message: EngineCoreOutputs | Taken) -> None:
        """Queue it for the client."""
        try:
            self.outgoing.put_nowait(message)
        except asyncio.QueueFull:
            # A client that does not read holds memory for all others: cut it off, its requests end.
            logger.warning("session cut: its client does not read", extra={"client_index": self.client_index})
            self._is_cut = True

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be sent."""
        return self._is_cut or (self._is_ending and self.outgoing.empty())

    def end(self) -> None:
        """Send what there is, and no more."""
        self._is_ending = True
        with contextlib.suppress(asyncio.QueueFull):
            self.outgoing.put_nowait(EngineCoreOutputs())  # For whoever waits for the next one.


class SessionServer:
    """Serves `/raypd.engine.v1.Engine/Session`. Lives on one event loop; `deliver` may be called from any thread."""

    def __init__(
        self,
        engine: SessionEngine,
        engine_id: str,
        incarnation: int,
        acceptor: GrpcAcceptor,
        refused_messages: RefusedMessages | None = None,
    ) -> None:
        """acceptor: the server's."""
        self._engine = engine
        self._acceptor = acceptor
        acceptor.register(Purpose.SESSION, Party(engine_id, incarnation))
        self._hello = Hello(engine_id, incarnation)
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[int, _Session] = {}
        self._client_indices = itertools.count(1)
        self._death = ""
        self._refused_messages = refused_messages or RefusedMessages()

    def handler(self) -> grpc.GenericRpcHandler:
        """The gRPC handler to register on the engine's server."""
        service, method = SESSION_METHOD.strip("/").split("/")
        return grpc.method_handlers_generic_handler(
            service,
            {
                method: grpc.stream_stream_rpc_method_handler(
                    # Messages are decoded here, not by gRPC: what is malformed ends this session, and is counted.
                    self._serve,
                    response_serializer=encode,
                )
            },
        )

    def deliver(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Take a step's outputs from the engine thread; a closed loop drops them."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._distribute, outputs)

    def hang_up(self, reason: str) -> None:
        """From any thread: the engine is dead. End every session and answer no further one."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hang_up, reason)

    def _distribute(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client_index, batch in outputs.items():
            session = self._sessions.get(client_index)
            if session is not None:
                session.deliver(batch)

    def _hang_up(self, reason: str) -> None:
        self._death = reason
        for session in self._sessions.values():
            session.end()

    async def _serve(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, EngineMessage]
    ) -> AsyncIterator[EngineMessage]:
        await self._acceptor.check(context, Purpose.SESSION)
        if self._death:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the engine died: {self._death}")
        session = _Session(next(self._client_indices))
        self._sessions[session.client_index] = session
        reader = asyncio.create_task(self._read(messages, session))
        try:
            yield self._hello
            while not (session.is_over or reader.done()):
                yield await self._next_message(session)
        finally:
            reader.cancel()
            del self._sessions[session.client_index]
            self._engine.abort(list(session.attempts.items()), session.client_index)

    async def _next_message(self, session: _Session) -> EngineMessage:
        """The next one, a batch twice a second with the engine's counters; these alone if there is nothing."""
        batch: EngineCoreOutputs | Taken
        try:
            async with asyncio.timeout_at(session.next_stats_s):
                batch = await session.outgoing.get()
        except TimeoutError:
            batch = EngineCoreOutputs()
        if isinstance(batch, Taken):
            return batch
        if (now_s := self._loop.time()) >= session.next_stats_s:
            session.next_stats_s = now_s + _HEARTBEAT_S
            batch.scheduler_stats = self._engine.stats
        return Outputs.sent(batch, time.time() - time.monotonic())

    async def _read(self, messages: AsyncIterator[bytes], session: _Session) -> None:
        """Until the client hangs up, or says what is no message: then the heartbeat's turn ends the session."""
        async for frame in messages:
            try:
                message = decode_client_message(frame)
                if isinstance(message, ReceivedSubmit):
                    self._submit(message.received(time.monotonic()), session)
                else:
                    self._engine.abort(message.requests, session.client_index)
            except MALFORMED as error:
                self._refused_messages.add("malformed session message", f"client {session.client_index}", str(error))
                return

    def _submit(self, received: list[EngineCoreRequest | RefusedRequest], session: _Session) -> None:
        """Give the engine the requests that its model can be given; the others are answered with the reason."""
        session.send(_TAKEN)
        requests: list[EngineCoreRequest] = []
        refusals: list[EngineCoreOutput] = []
        for request in received:
            if isinstance(request, RefusedRequest):
                refusals.append(self._refuse(request, session))
            elif (mistake := self._engine.find_mistake(request)) is not None:
                refused = RefusedRequest(request.request_id, request.attempt, mistake)
                refusals.append(self._refuse(refused, session))
            else:
                requests.append(request)
        session.attempts.update((request.request_id, request.attempt) for request in requests)
        self._engine.submit(requests, session.client_index)
        if refusals:
            session.send(EngineCoreOutputs(others=refusals))

    def _refuse(self, refused: RefusedRequest, session: _Session) -> EngineCoreOutput:
        self._refused_messages.add("refused request", f"client {session.client_index}", refused.reason)
        return EngineCoreOutput(
            request_id=refused.request_id,
            attempt=refused.attempt,
            new_token_ids=[],
            first_position=0,
            finish_reason=FinishReason.ERROR,
            error=refused.reason,
        )
