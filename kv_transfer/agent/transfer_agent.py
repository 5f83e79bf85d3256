"""The transfer agent: one thread that owns every link and every transfer of this engine's rank.

Everything that happens is an event on one queue: what the engine's steps ask for, messages, the ends of streams, chunks
that moved. The agent feeds the events to the transfers' machines and carries their instructions out. Reports for the
scheduler are collected until take_output(). The agent never waits for the engine thread, nor the engine thread for the
agent, except in stop().

Invariant: a transfer on a link is failed only when that link's data thread has ended, or was never started, so that no
block is reported as free while a transport may still touch it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kv_transfer.agent.transfer_table import TransferTable
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerProgress
from kv_transfer.errors import KVTransferError, ProtocolViolation
from kv_transfer.handoff.control_messages import (
    Cancel,
    Chunk,
    ChunkSum,
    ControlMessage,
    Finished,
    Hello,
    Ping,
    Pong,
    Ready,
    Refused,
    Welcome,
)
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.control_streams import Control, ControlStream
from kv_transfer.links.link_table import LinkTable, PublishedLinks
from kv_transfer.links.peer_link import PeerLink
from kv_transfer.links.refused_messages import RefusedMessages
from kv_transfer.links.send_receive_thread import ChunkJob
from kv_transfer.params import EngineAddress
from kv_transfer.transports.base import ComputeEvent, Transport

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Step:
    metadata: KVConnectorMetadata
    after: ComputeEvent | None


@dataclass(frozen=True, slots=True)
class _Computed:
    progress: tuple[ProducerProgress, ...]
    after: ComputeEvent | None


@dataclass(frozen=True, slots=True)
class _Message:
    stream: ControlStream
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class _Malformed:
    stream: ControlStream
    reason: str


@dataclass(frozen=True, slots=True)
class _StreamClosed:
    stream: ControlStream
    reason: str


@dataclass(frozen=True, slots=True)
class _ChunkMoved:
    link: PeerLink
    job: ChunkJob


@dataclass(frozen=True, slots=True)
class _DataDead:
    link: PeerLink
    reason: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Event = _Step | _Computed | _Message | _Malformed | _StreamClosed | _ChunkMoved | _DataDead | _Stop


class TransferAgent:
    """The agent of one rank. The engine thread calls start_step(), finish_step(), take_output() and stop().

    Streams and data threads call the on_ methods from their own threads. The links, the transfers and everything else
    belong to the agent's thread, but for the output and the error.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        identity: EngineAddress,
        layout: KVCacheLayout,
        kv_cache: Tensor,
        transport: Transport,
        control: Control,
        on_progress: Callable[[], None],
    ) -> None:
        """on_progress: called on the agent's thread when take_output() has something new."""
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._on_progress = on_progress
        self._links = LinkTable(config, identity, layout, kv_cache, transport, control, self)
        self._transfers = TransferTable(config, layout, self._links)
        self._output_lock = threading.Lock()
        self._output = KVConnectorOutput()
        self._error: BaseException | None = None
        self._refused_messages = RefusedMessages()
        self._has_refused = False
        self._link_stats = PublishedLinks(self._links)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        control.serve(self)
        self._thread.start()

    # -- from the engine thread ----------------------------------------------------------------------------------

    def start_step(self, metadata: KVConnectorMetadata, after: ComputeEvent | None = None) -> None:
        """Queue what a step asks for. after: see TransferTable.on_step()."""
        self._events.put(_Step(metadata, after))

    def finish_step(self, progress: tuple[ProducerProgress, ...], after: ComputeEvent | None = None) -> None:
        """Queue what a step's forward pass computes; it is computed once the device has passed `after`."""
        self._events.put(_Computed(progress, after))

    def take_output(self) -> KVConnectorOutput:
        """Return the reports since the last call. Raises KVTransferError if the agent has died."""
        if self._error is not None:
            raise KVTransferError(f"the transfer agent died: {self._error}") from self._error
        with self._output_lock:
            output, self._output = self._output, KVConnectorOutput(stats=self._output.stats)
        return output

    def stop(self) -> None:
        """Close every link and end the thread; wait a few seconds for it at most."""
        self._events.put(_Stop())
        self._thread.join(_STOP_TIMEOUT_S)

    # -- from streams and data threads ---------------------------------------------------------------------------

    def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
        """Queue a message; see StreamEvents."""
        self._events.put(_Message(stream, message))

    def on_malformed(self, stream: ControlStream, reason: str) -> None:
        """Queue that something came which is no message; see StreamEvents."""
        self._events.put(_Malformed(stream, reason))

    def on_closed(self, stream: ControlStream, reason: str) -> None:
        """Queue the end of a stream; see StreamEvents."""
        self._events.put(_StreamClosed(stream, reason))

    def on_chunk_moved(self, link: PeerLink, job: ChunkJob) -> None:
        """Queue that a data thread has moved a chunk."""
        self._events.put(_ChunkMoved(link, job))

    def on_data_dead(self, link: PeerLink, reason: str) -> None:
        """Queue that a data thread has ended."""
        self._events.put(_DataDead(link, reason))

    # -- the agent's own thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._handle_until_stopped()
        except BaseException as error:
            # A broken invariant ends the engine: its thread finds the error in take_output().
            logger.exception("the transfer agent died")
            self._error = error
            self._on_progress()
        finally:
            self._links.close_all(_STOP_TIMEOUT_S)

    def _publish(self, now_s: float) -> None:
        """Hand the transfers' reports to the engine thread, and wake it if there is anything new."""
        epoch_s = time.time() - now_s
        news = self._transfers.take_output(self._links.num_open, epoch_s)
        have_links_changed = self._link_stats.update(now_s, epoch_s, is_due=not news.is_empty())
        has_news = have_links_changed or self._has_refused or not news.is_empty()
        self._has_refused = False
        assert news.stats is not None, "every output has them"
        news.stats.links = self._link_stats.links
        with self._output_lock:
            self._output.merge(news)
        if has_news:
            self._on_progress()

    def _handle_until_stopped(self) -> None:
        while True:
            event = self._next_event()
            if isinstance(event, _Stop):
                break
            now_s = time.monotonic()
            if event is not None:
                self._handle(event, now_s)
            self._on_time(now_s)
            self._publish(now_s)

    def _next_event(self) -> _Event | None:
        """Wait for the next event and return it; None when a deadline has come."""
        deadlines = [d for d in (self._links.next_deadline(), self._transfers.next_deadline()) if d is not None]
        timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _handle(self, event: _Event, now_s: float) -> None:
        match event:
            case _Step(metadata, after):
                self._transfers.on_step(metadata, now_s, after)
                for link, breach in self._transfers.take_breaches():
                    self._end_for_breach(link, breach)
            case _Computed(progress, after):
                self._transfers.on_computed(progress, after)
            case _Message(stream, message):
                self._on_message(stream, message, now_s)
            case _Malformed(stream, reason):
                self._on_malformed(stream, reason)
            case _StreamClosed(stream, reason):
                if (closed := self._links.find(stream)) is not None:
                    self._close(closed, reason)
            case _ChunkMoved(link, job):
                self._guarded(link, lambda: self._transfers.on_chunk_moved(link, job, now_s))
            case _DataDead(link, reason):
                if link.data is not None and link.data.is_stalled:
                    self._transfers.count_stall()
                self._close(link, reason)
                self._links.forget(link)
                self._transfers.on_link_dead(link)
            case _Stop():
                raise AssertionError("the loop ends with it")

    def _on_message(self, stream: ControlStream, message: ControlMessage, now_s: float) -> None:
        link = self._links.find(stream)
        if isinstance(message, Hello):
            self._on_hello(stream, link, message)
            return
        if link is None:
            self._transfers.count_dropped("message on a closed link")
            return
        link.heard_s = now_s
        if not isinstance(message, Ping | Pong):
            link.last_active_s = now_s
        self._guarded(link, lambda: self._on_link_message(link, message, now_s))

    def _on_hello(self, stream: ControlStream, link: PeerLink | None, message: Hello) -> None:
        """Answer the first Hello of a stream. A further one is counted and not answered; the stream's link goes on."""
        if link is not None:
            self._count_refused("second hello", link.peer[0], "a stream has one link, and one Hello")
        elif (refusal := self._links.welcome(stream, message)) is not None:
            self._count_refused("hello refused", message.engine_id, refusal)

    def _on_malformed(self, stream: ControlStream, reason: str) -> None:
        link = self._links.find(stream)
        self._count_refused("malformed message", "unknown" if link is None else link.peer[0], reason)
        if link is not None:
            self._close(link, f"malformed message: {reason}", is_fault=True)

    def _on_link_message(self, link: PeerLink, message: ControlMessage, now_s: float) -> None:
        """Give a message to the part that it is for. Raises ProtocolViolation."""
        link.check_turn(message)
        match message:
            case Ping():
                link.stream.send(Pong())
            case Pong():
                self._transfers.on_pong(link, now_s)
            case Welcome():
                self._links.open_consumer_end(link, message)
            case Refused(reason):
                self._close(link, f"refused: {reason}")
            case Ready() | Cancel():
                self._transfers.on_consumer_message(link, message, now_s)
            case Chunk() | ChunkSum() | Finished():
                self._transfers.on_producer_message(link, message, now_s)

    def _guarded(self, link: PeerLink, action: Callable[[], None]) -> None:
        """Do something that a peer has caused; if the peer breaks the protocol, its link is closed."""
        try:
            action()
        except ProtocolViolation as error:
            self._end_for_breach(link, error)

    def _end_for_breach(self, link: PeerLink, error: ProtocolViolation) -> None:
        self._count_refused("protocol violation", link.peer[0], str(error))
        self._close(link, str(error), is_fault=True)

    def _count_refused(self, kind: str, origin: str, reason: str) -> None:
        self._refused_messages.add(kind, origin, reason)
        self._has_refused = True
        self._transfers.count_dropped(kind)

    def _on_time(self, now_s: float) -> None:
        for link in self._links.overdue(now_s):
            self._close(link, "the handshake took too long")
        for link in self._transfers.on_time(now_s):
            self._close(link, "the producer did not answer a cancel in time")
        for link in self._links.surplus():
            self._close(link, "the link was idle, and the limit of links was exceeded")
        for lifeless in self._links.beat(now_s):
            self._close(lifeless.link, lifeless.reason, is_fault=True)

    def _close(self, link: PeerLink, reason: str, *, is_fault: bool = False) -> None:
        """Begin to close a link; a link without a data thread is dead at once."""
        if self._links.close(link, reason, is_fault=is_fault):
            self._links.forget(link)
            self._transfers.on_link_dead(link)
