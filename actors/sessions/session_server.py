"""Serves the engine's end of sessions: a gRPC stream for each ingress.

A session is one client of the scheduler (client_index). When a session ends, for whatever reason, the requests that it
submitted and that have not finished are aborted, because nobody is left to read their outputs. The server sends nothing
to a client, and reads nothing from it, before the client has proven the cluster's secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Protocol, TypeAlias

import grpc

from actors.core.blocks.kv_events import KVEventBatch
from actors.core.outputs.engine_core_outputs import EngineCoreOutput, EngineCoreOutputs
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.request_status import FinishReason
from actors.sessions.block_messages import CachedBlocks, KVEvents, WatchBlocks, event_messages
from actors.sessions.session_messages import (
    SESSION_METHOD,
    Announce,
    Announced,
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
_MAX_QUEUED_BLOCK_MESSAGES = 64
_MAX_QUEUED_SNAPSHOT_MESSAGES = 4
_TAKEN = Taken()
_GAP = KVEvents(2**62, 0)
"""A message that follows no other, so its receiver sees a gap."""


_Message: TypeAlias = EngineCoreOutputs | Taken | Announced | KVEvents | CachedBlocks


class SessionEngine(Protocol):
    """The engine as sessions use it. Its methods are called on the event loop and do not block."""

    def find_mistake(self, request: EngineCoreRequest) -> str | None:
        """Return why the engine's model cannot be given the request; None if it can."""

    def submit(self, requests: list[EngineCoreRequest], client_index: int) -> None:
        """Queue requests for the engine's thread."""

    def abort(self, requests: list[tuple[str, int]], client_index: int) -> None:
        """Queue the abort of requests, each as (request_id, attempt), for the engine's thread."""

    def stats_for(self, client_index: int) -> SchedulerStats:
        """Return the newest snapshot of the scheduler's counters, for one client."""

    def send_cached_blocks(self, begin: int, deliver: Callable[[CachedBlocks], None]) -> Awaitable[int | None]:
        """Let the engine's thread deliver all events so far, and then a part of a snapshot.

        begin:   id of the block that the part begins with
        deliver: called on the engine's thread
        Returns the begin of the next part; None after the last one, or if the engine records no events.
        """


class _Session:
    """One client: the requests that it has running, and the messages that wait to be sent to it."""

    def __init__(self, client_index: int) -> None:
        self.client_index = client_index
        self.attempts: dict[str, int] = {}
        self.outgoing: asyncio.Queue[_Message] = asyncio.Queue(_MAX_QUEUED_BATCHES)
        self.snapshot: asyncio.Task[None] | None = None
        """Sends a snapshot of the cached blocks; None if the client never asked for one, and so gets no events."""
        self.num_queued_block_messages = 0
        self.has_sent_blocks = asyncio.Event()
        self._has_missed_blocks = False
        self._is_cut = False
        self._is_ending = False
        self.next_stats_s = 0.0
        self.num_refused = 0

    def deliver(self, batch: EngineCoreOutputs) -> None:
        """Queue a step's outputs for the client, and forget the requests that they finish."""
        for request_id in batch.finished_req_ids:
            self.attempts.pop(request_id, None)
        for output in batch.others:
            if output.finished:
                self.attempts.pop(output.request_id, None)
        self.send(batch)

    def send_blocks(self, message: KVEvents | CachedBlocks) -> None:
        """Queue a message about cached blocks. A client that reads too slowly misses some, and sees that it does."""
        if self.num_queued_block_messages < _MAX_QUEUED_BLOCK_MESSAGES:
            self.num_queued_block_messages += 1
            self.send(message)
        else:
            self._has_missed_blocks = True

    def note_sent_blocks(self) -> None:
        """Note that a message about cached blocks has left the queue."""
        self.num_queued_block_messages -= 1
        self.has_sent_blocks.set()
        if self._has_missed_blocks:
            # Without this the client would notice the gap only by the engine's next event.
            self._has_missed_blocks = False
            self.send_blocks(_GAP)

    def send(self, message: _Message) -> None:
        """Queue a message for the client. If the queue is full, the session ends."""
        try:
            self.outgoing.put_nowait(message)
        except asyncio.QueueFull:
            # The messages of a client that does not read would fill the memory that all clients share.
            logger.warning("a session ends because its client does not read", extra={"client_index": self.client_index})
            self._is_cut = True

    @property
    def is_over(self) -> bool:
        """Whether no more messages are to be sent."""
        return self._is_cut or (self._is_ending and self.outgoing.empty())

    def end(self) -> None:
        """End the session after the messages that are queued."""
        self._is_ending = True
        with contextlib.suppress(asyncio.QueueFull):
            self.outgoing.put_nowait(EngineCoreOutputs())  # This wakes _next_message() if the queue is empty.


class SessionServer:
    """Serves `/raypd.engine.v1.Engine/Session`. Belongs to one event loop.

    Any thread may call deliver() and hang_up().
    """

    def __init__(
        self,
        engine: SessionEngine,
        engine_id: str,
        incarnation: int,
        acceptor: GrpcAcceptor,
        refused_messages: RefusedMessages | None = None,
    ) -> None:
        """Register with the acceptor. Has to be called on the event loop.

        acceptor:         the gRPC server's; refuses clients that do not prove the cluster's secret
        refused_messages: counts malformed messages and refused requests
        """
        self._engine = engine
        self._acceptor = acceptor
        acceptor.register(Purpose.SESSION, Party(engine_id, incarnation))
        self._hello = Hello(engine_id, incarnation)
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[int, _Session] = {}
        self._client_indices = itertools.count(1)
        self._snapshot_turn = asyncio.Lock()
        self._is_watched = False
        """Whether any client has asked for the cached blocks."""
        self._num_submitted = 0
        self._death = ""
        self._refused_messages = refused_messages or RefusedMessages()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handler to register on the engine's server."""
        service, method = SESSION_METHOD.strip("/").split("/")
        return grpc.method_handlers_generic_handler(
            service,
            {
                method: grpc.stream_stream_rpc_method_handler(
                    # Messages are decoded here, not by gRPC: a malformed one ends this session, and is counted.
                    self._serve,
                    response_serializer=encode,
                )
            },
        )

    def deliver(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Send a step's outputs, by client_index. Any thread may call this; does nothing once the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._distribute, outputs)

    def deliver_kv_events(self, batch: KVEventBatch) -> None:
        """Send events of the prefix cache to the clients that asked for them. Any thread may call this."""
        if self._is_watched and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._distribute_events, event_messages(batch))

    def hang_up(self, reason: str) -> None:
        """End every session, and refuse new ones: the engine is dead. Any thread may call this.

        reason: why the engine died, for clients that come later
        """
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hang_up, reason)

    def _distribute(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client_index, batch in outputs.items():
            session = self._sessions.get(client_index)
            if session is not None:
                session.deliver(batch)

    def _distribute_events(self, messages: list[KVEvents]) -> None:
        watching = [session for session in self._sessions.values() if session.snapshot is not None]
        for session in watching:
            for message in messages:
                session.send_blocks(message)

    def _watch(self, session: _Session) -> None:
        """Send a snapshot, and the events from now on. A snapshot under way is given up."""
        self._is_watched = True
        if session.snapshot is not None:
            session.snapshot.cancel()
        session.snapshot = asyncio.create_task(self._send_snapshot(session))

    async def _send_snapshot(self, session: _Session) -> None:
        def deliver(message: CachedBlocks) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(session.send_blocks, message)

        begin: int | None = 0
        while begin is not None:
            while session.num_queued_block_messages > _MAX_QUEUED_SNAPSHOT_MESSAGES:
                session.has_sent_blocks.clear()
                await session.has_sent_blocks.wait()
            # The parts of several clients' snapshots are made in turns, since each takes a millisecond of the engine.
            async with self._snapshot_turn:
                begin = await self._engine.send_cached_blocks(begin, deliver)

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
            if session.snapshot is not None:
                session.snapshot.cancel()
            del self._sessions[session.client_index]
            self._engine.abort(list(session.attempts.items()), session.client_index)

    async def _next_message(self, session: _Session) -> EngineMessage:
        """Wait for the next message. Twice a second a batch gets the engine's counters.

        If no message comes until counters are due, returns a batch with the counters alone.
        """
        batch: _Message
        try:
            async with asyncio.timeout_at(session.next_stats_s):
                batch = await session.outgoing.get()
        except TimeoutError:
            batch = EngineCoreOutputs()
        if isinstance(batch, KVEvents | CachedBlocks):
            session.note_sent_blocks()
        if not isinstance(batch, EngineCoreOutputs):
            return batch
        if (now_s := self._loop.time()) >= session.next_stats_s:
            session.next_stats_s = now_s + _HEARTBEAT_S
            batch.scheduler_stats = self._stats_for(session)
        return Outputs.sent(batch, time.time() - time.monotonic())

    def _stats_for(self, session: _Session) -> SchedulerStats:
        """Return the counters for a client, who counts its refused requests as requests that were taken in."""
        stats = self._engine.stats_for(session.client_index)
        if stats.load_report is None or not session.num_refused:
            return stats
        num_taken = stats.load_report.num_taken_requests + session.num_refused
        return replace(stats, load_report=replace(stats.load_report, num_taken_requests=num_taken))

    async def _read(self, messages: AsyncIterator[bytes], session: _Session) -> None:
        """Read messages until the client closes the stream or sends a malformed message.

        _serve() notices the end after its next message, a heartbeat at the latest, and ends the session.
        """
        async for frame in messages:
            try:
                message = decode_client_message(frame)
                if isinstance(message, ReceivedSubmit):
                    self._submit(message.received(time.monotonic()), session)
                elif isinstance(message, Announce):
                    self._announce(message, session)
                elif isinstance(message, WatchBlocks):
                    self._watch(session)
                else:
                    self._engine.abort(message.requests, session.client_index)
            except MALFORMED as error:
                self._refused_messages.add("malformed session message", f"client {session.client_index}", str(error))
                return

    def _submit(self, received: list[EngineCoreRequest | RefusedRequest], session: _Session) -> None:
        """Give the engine the requests that its model can be given; answer the others with the reason."""
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
        self._num_submitted += len(requests)
        if refusals:
            session.send(EngineCoreOutputs(others=refusals))

    def _announce(self, message: Announce, session: _Session) -> None:
        announced = Announced(message.works, message.left, self._num_submitted)
        for other in self._sessions.values():
            if other is not session:
                other.send(announced)

    def _refuse(self, refused: RefusedRequest, session: _Session) -> EngineCoreOutput:
        session.num_refused += 1
        self._refused_messages.add("refused request", f"client {session.client_index}", refused.reason)
        return EngineCoreOutput(
            request_id=refused.request_id,
            attempt=refused.attempt,
            new_token_ids=[],
            first_position=0,
            finish_reason=FinishReason.ERROR,
            error=refused.reason,
        )
