"""Runs the ingress's end of a session with one engine.

One reader task puts each output into the stream of its request; one writer task sends the requests and aborts that have
come since the writer's last message. When the session breaks, or the engine is silent for longer than the timeout, all
open requests of the session fail with EngineLost at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import grpc

from actors.core.outputs.engine_core_outputs import EngineCoreOutputs
from actors.core.outputs.scheduler_stats import LoadReport, SchedulerStats
from actors.core.outputs.sent_work import SentWork
from actors.core.requests.request import EngineCoreRequest
from actors.costs.step_cost_model import StepCostModel
from actors.sessions.block_messages import CachedBlocks, KVEvents, WatchBlocks
from actors.sessions.session_messages import (
    MAX_MESSAGE_BYTES,
    SESSION_METHOD,
    Abort,
    Announce,
    Announced,
    ClientMessage,
    EngineMessage,
    Hello,
    Outputs,
    Submit,
    decode_engine_message,
    encode,
)
from cluster.errors import EngineLost
from cluster.routing.engine_connection import EngineDescriptor
from cluster.routing.load_book import LoadBook
from cluster.routing.prefixes.engine_blocks import EngineBlocks
from cluster.sessions.request_stream import RequestStream
from kv_transfer.errors import Untrusted
from kv_transfer.links.refused_messages import RefusedMessages
from kv_transfer.message_ranges import MALFORMED
from kv_transfer.trust.grpc_proof import METADATA_LIMITS, prove
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member
from kv_transfer.trust.secret import Purpose
from kv_transfer.trust.tls import open_channel, tls_advice

logger = logging.getLogger(__name__)

_CHANNEL_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    *METADATA_LIMITS,
]
_NO_MESSAGE: Final = "it sent a malformed message"
_MOST_ANNOUNCED: Final = 4096
"""The most works in a message; an engine takes 16 times as many."""
_NUM_SLICES: Final = 6
"""The number of slices into which the time is cut that an engine may stay silent."""


class EngineSession:
    """An EngineConnection over gRPC. Lives on one event loop."""

    def __init__(
        self,
        descriptor: EngineDescriptor,
        member: Member,
        timeout_s: float,
        refused_messages: RefusedMessages | None = None,
        *,
        load_book: LoadBook | None = None,
        blocks: EngineBlocks | None = None,
    ) -> None:
        """Connect to nothing yet: open() does.

        member:           the ingress's identity, which it proves to the engine
        timeout_s:        how long the engine may stay silent; it sends a heartbeat twice a second
        refused_messages: counts malformed messages of the engine; such a message ends the session
        load_book:        gets each report of the engine's work; None: nobody reads them
        blocks:           takes what the engine reports of its prefix cache; None: nothing is asked for
        """
        self._load_book = load_book
        self._blocks = blocks
        self._is_watch_due = False
        self._refused_messages = refused_messages or RefusedMessages()
        self._descriptor = descriptor
        self._member = member
        self._timeout_s = timeout_s
        self._streams: dict[str, RequestStream] = {}
        self._submissions: list[RequestStream] = []
        self._untaken: deque[list[RequestStream]] = deque()
        """The requests that were sent and that the engine has not acknowledged, one list for each message."""
        self._announced: list[SentWork] = []
        self._announced_left: list[SentWork] = []
        self._aborts: list[tuple[str, int]] = []
        self._has_outgoing = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall[ClientMessage, bytes] | None = None
        self._lost: EngineLost | None = None
        self._is_over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_s = 0.0
        self.num_submitted_requests = 0
        """How many requests were submitted on this session, which LoadReport.num_taken_requests is compared with."""
        self.last_stats: tuple[SchedulerStats, float] | None = None
        """The engine's newest counters, and the monotonic time at which they came, in seconds."""

    @property
    def descriptor(self) -> EngineDescriptor:
        """The engine at the other end."""
        return self._descriptor

    def set_descriptor(self, descriptor: EngineDescriptor) -> None:
        """Replace the description of the engine, which may have another role now."""
        self._descriptor = descriptor

    @property
    def is_lost(self) -> bool:
        """Whether the session is over."""
        return self._lost is not None

    @property
    def num_unfinished_requests(self) -> int:
        """How many requests of this ingress the engine works on."""
        return len(self._streams)

    @property
    def load_report(self) -> LoadReport | None:
        """The engine's newest report of its work; None until one has come."""
        return None if self.last_stats is None else self.last_stats[0].load_report

    @property
    def step_costs(self) -> StepCostModel | None:
        """The engine's predictions of its steps' durations; None until they have come."""
        return None if self.last_stats is None else self.last_stats[0].step_costs

    @property
    def num_prompt_tokens_computed(self) -> int:
        """How many tokens of prompts the engine has computed since its start; 0 until it has said so."""
        return 0 if self.last_stats is None else self.last_stats[0].num_prompt_tokens_computed

    @property
    def silence_s(self) -> float:
        """Seconds since the engine's last message. The session has to be open."""
        return asyncio.get_running_loop().time() - self._heard_s

    async def open(self) -> None:
        """Connect to the engine, and let both ends prove their identity. Raises EngineLost; then nothing is left open.

        Cancelling the call leaves the channel open: close() closes it.
        """
        channel = self._channel = open_channel(self._descriptor.address, _CHANNEL_OPTIONS, self._member.trust.tls)
        try:
            async with asyncio.timeout(self._timeout_s):
                hello = await self._begin_call(channel)
        except Untrusted as error:
            await self.close()
            raise EngineLost(self._descriptor.engine_id, f"{self._descriptor.address}: {error}") from error
        except MALFORMED as error:
            await self.close()
            self._count_refused(error)
            raise EngineLost(self._descriptor.engine_id, f"{_NO_MESSAGE}: {error}") from error
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            await self.close()
            reason = f"no answer from {self._descriptor.address}{tls_advice(self._member.trust.tls)}"
            raise EngineLost(self._descriptor.engine_id, reason) from error
        expected = Hello(self._descriptor.engine_id, self._descriptor.incarnation)
        if hello != expected:
            await self.close()
            raise EngineLost(self._descriptor.engine_id, f"expected {expected}, but {hello!r} answered")
        self._heard_s = asyncio.get_running_loop().time()
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._write(), self._watch_silence())]

    async def _begin_call(self, channel: grpc.aio.Channel) -> object:
        """Begin the call with a proof of identity. Returns the engine's first message.

        Raises Untrusted, AioRpcError, or one of MALFORMED.
        """
        peer = Party(self._descriptor.engine_id, self._descriptor.incarnation)
        proof = await prove(channel, self._member, Purpose.SESSION, peer, self._timeout_s)
        # Messages are decoded here, not by gRPC: a malformed one ends this session, with the reason.
        method: grpc.aio.StreamStreamMultiCallable[ClientMessage, bytes] = channel.stream_stream(
            SESSION_METHOD, request_serializer=encode
        )
        self._call = method(metadata=proof.metadata)
        await proof.confirm(self._call)
        return await self._receive(self._call)

    @staticmethod
    async def _receive(call: grpc.aio.StreamStreamCall[ClientMessage, bytes]) -> EngineMessage | None:
        """Return the engine's next message; None at the stream's end. Raises AioRpcError, or one of MALFORMED."""
        frame = await call.read()
        return decode_engine_message(frame) if isinstance(frame, bytes) else None

    async def wait_lost(self) -> None:
        """Wait until the session is over."""
        await self._is_over.wait()

    async def close(self, *, has_left: bool = False) -> None:
        """Close the connection; the engine then aborts every request of this session.

        has_left: whether the reason is that the engine was drained
        """
        self._lose("it was drained" if has_left else "the session was closed", has_left=has_left)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:  # The channel is None if the session was never opened.
            await self._channel.close()

    def submit(self, request: EngineCoreRequest) -> RequestStream:
        """Send the request. Returns the stream of its outputs, which raises EngineLost if the session breaks."""
        stream = RequestStream(request)
        if self._lost is not None:
            stream.end(self._lost)
            return stream
        assert request.request_id not in self._streams, f"{request.request_id!r} is already running here"
        self._streams[request.request_id] = stream
        self.num_submitted_requests += 1
        self._submissions.append(stream)
        self._has_outgoing.set()
        return stream

    def announce(self, work: SentWork) -> None:
        """Tell the engine what work the request brings that was submitted last; it tells the other ingresses."""
        if self._lost is None:
            self._announced.append(work)
            self._has_outgoing.set()

    def announce_left(self, work: SentWork) -> None:
        """Tell the engine what work a request has brought that it has no more; it tells the other ingresses."""
        if self._lost is None:
            self._announced_left.append(work)
            self._has_outgoing.set()

    def abort(self, request_id: str) -> None:
        """Abort the request on the engine and end its stream. Unknown and finished requests are ignored."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        stream.end()
        self._aborts.append((request_id, stream.request.attempt))
        self._has_outgoing.set()

    async def _write(self) -> None:
        call = self._call
        assert call is not None, "open() has made it"
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            submissions, self._submissions = self._submissions, []
            announced, self._announced = self._announced, []
            left, self._announced_left = self._announced_left, []
            aborts, self._aborts = self._aborts, []
            is_watch_due, self._is_watch_due = self._is_watch_due, False
            try:
                for streams in _messages(submissions):
                    self._untaken.append(streams)
                    await call.write(Submit([stream.request for stream in streams], time.monotonic()))
                for announcement in _announcements(announced, left):
                    await call.write(announcement)
                if aborts:
                    await call.write(Abort(aborts))
                if is_watch_due:
                    await call.write(WatchBlocks())
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # _read() sees the same end of the call, and ends the session.

    async def _read(self) -> None:
        loop, call = asyncio.get_running_loop(), self._call
        assert call is not None, "open() has made it"
        try:
            while not isinstance(message := await self._receive(call), Hello | None):
                self._heard_s = loop.time()
                if isinstance(message, Outputs):
                    self._distribute(message.batch)
                elif isinstance(message, KVEvents | CachedBlocks):
                    if self._blocks is not None:
                        self._blocks.take(message)
                elif isinstance(message, Announced):
                    if self._load_book is not None:
                        self._load_book.note_announced(self, message.num_submitted, message.works, message.left)
                elif self._untaken:
                    for stream in self._untaken.popleft():
                        stream.is_taken = True
                else:
                    raise ValueError("it acknowledged more messages than were sent")
            if message is not None:
                raise ValueError(f"a {type(message).__name__} came in the middle of the session")
            self._lose("it closed the session")
        except MALFORMED as error:
            self._count_refused(error)
            self._lose(f"{_NO_MESSAGE}: {error}")
        except grpc.aio.AioRpcError as error:
            self._lose(f"the session broke: {error.details()}")

    def _count_refused(self, error: Exception) -> None:
        self._refused_messages.add("malformed engine message", self._descriptor.engine_id, str(error))

    async def _watch_silence(self) -> None:
        """End the session once the engine was silent for timeout_s.

        Silence is counted in slices, so that an event loop that was busy for longer than timeout_s first reads what the
        engine sent meanwhile.
        """
        slice_s = self._timeout_s / _NUM_SLICES
        num_silent, heard_s = 0, self._heard_s
        while num_silent < _NUM_SLICES:
            await asyncio.sleep(slice_s)
            num_silent = num_silent + 1 if self._heard_s == heard_s else 0
            heard_s = self._heard_s
        self._lose(f"it was silent for {self._timeout_s:.1f} s", is_silent=True)

    def _distribute(self, batch: EngineCoreOutputs) -> None:
        if batch.scheduler_stats is not None:
            self.last_stats = batch.scheduler_stats, time.monotonic()
            if self._load_book is not None:
                self._load_book.note_report(self)
            self._ask_for_blocks(batch.scheduler_stats)
        for output in batch.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.request.attempt != output.attempt:
                continue  # This process has aborted the request meanwhile.
            stream.put(output)
            if output.finished:
                del self._streams[output.request_id]
        for request_id in batch.finished_req_ids & self._streams.keys():
            self._streams.pop(request_id).end()

    def _ask_for_blocks(self, stats: SchedulerStats) -> None:
        has_states = stats.load_report is not None and stats.load_report.num_state_blocks > 0
        if self._blocks is not None and self._blocks.on_size(stats.num_blocks, stats.block_size, has_states=has_states):
            self._is_watch_due = True
            self._has_outgoing.set()

    def _lose(self, reason: str, *, has_left: bool = False, is_silent: bool = False) -> None:
        if self._lost is not None:
            return
        self._lost = EngineLost(self._descriptor.engine_id, reason, has_left=has_left, is_silent=is_silent)
        self._is_over.set()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(self._lost)
        if streams:
            logger.warning(
                "the session with an engine broke while requests ran there",
                extra={"engine_id": self._descriptor.engine_id, "num_requests": len(streams), "reason": reason},
            )


def _messages(submissions: list[RequestStream]) -> Iterator[list[RequestStream]]:
    """Group requests into messages: small requests go together, and each request with megabytes of input goes alone.

    So no message exceeds gRPC's limit because several large requests are in it.
    """
    if together := [stream for stream in submissions if not _is_large(stream.request)]:
        yield together
    if len(together) < len(submissions):
        yield from ([stream] for stream in submissions if _is_large(stream.request))


def _announcements(works: list[SentWork], left: list[SentWork]) -> Iterator[Announce]:
    """Put works into messages, in order."""
    for start in range(0, max(len(works), len(left)), _MOST_ANNOUNCED):
        part = slice(start, start + _MOST_ANNOUNCED)
        yield Announce(works[part], left[part])


def _is_large(request: EngineCoreRequest) -> bool:
    return request.prompt_embeds is not None or bool(request.encoder_inputs)
