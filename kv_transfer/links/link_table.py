"""Every link of this engine's rank: opening, finding and closing them, and their statistics.

A consumer dials a link when a load first needs it, and sends Hello; a producer answers with Welcome or Refused. Each
end then starts a data thread. links/peer_link.py has the states of a link.

Invariants: a link is in the table from its Hello until it is DEAD. A consumer has at most one usable link to each
producer's incarnation. Only the consumer's end closes idle links.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from torch import Tensor

from kv_transfer.block_pieces import PieceMap
from kv_transfer.config import KVTransferConfig
from kv_transfer.device_kind import is_accelerator
from kv_transfer.errors import LinkLost, ProtocolViolation
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION, Hello, Refused, Welcome
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.checksum import checksum_of
from kv_transfer.links.control_streams import Control, ControlStream, StreamEvents
from kv_transfer.links.link_compatibility import PairingFacts
from kv_transfer.links.link_liveness import Lifeless, LinkLiveness
from kv_transfer.links.peer_link import LinkState, PeerLink, find_disagreement, find_forgery, find_welcome_mistake
from kv_transfer.links.send_receive_thread import ChunkJob, DataThread
from kv_transfer.params import EngineAddress, TransferRole
from kv_transfer.transfer_stats import LinkStats
from kv_transfer.transports.base import DataLink, Transport
from kv_transfer.transports.link_opening import Opening
from kv_transfer.trust.secret import SessionKey

_MAX_LOST: Final = 32
_MAX_LINKS_OF_CONSUMER: Final = 8
"""The most links of one consumer: it uses one, and earlier ones may still be closing."""
_MAX_CONSUMER_LINKS: Final = 1024
"""The most links of all consumers: each has a thread and a listening socket."""
_STATS_INTERVAL_S: Final = 0.5

_LinkKey = tuple[tuple[str, int], bool]
"""The peer's engine id and incarnation, and whether this end is the producer."""


class AgentEvents(StreamEvents, Protocol):
    """Takes the events of streams and data threads for the agent, from any thread."""

    def on_chunk_moved(self, link: PeerLink, job: ChunkJob) -> None:
        """Note that a chunk has left, or has arrived."""

    def on_data_dead(self, link: PeerLink, reason: str) -> None:
        """Note that the link's data thread has ended, and why."""


class _DataEvents:
    """Passes the events of one link's data thread on to the agent, with the link."""

    def __init__(self, link: PeerLink, agent: AgentEvents) -> None:
        self._link = link
        self._agent = agent

    def on_chunk_moved(self, job: ChunkJob) -> None:
        self._agent.on_chunk_moved(self._link, job)

    def on_dead(self, reason: str) -> None:
        self._agent.on_data_dead(self._link, reason)


class LinkTable:
    """The links of one rank, by control stream. The object belongs to the agent's thread."""

    def __init__(
        self,
        config: KVTransferConfig,
        identity: EngineAddress,
        layout: KVCacheLayout,
        kv_cache: Tensor,
        transport: Transport,
        control: Control,
        agent: AgentEvents,
    ) -> None:
        self._config = config
        self._identity = identity
        self._layout = layout
        self._kv_cache = kv_cache
        self._transport = transport
        self._is_on_gpu = is_accelerator(kv_cache.device)
        self._facts = PairingFacts.of_rank(layout, transport.name, checksum=config.checksum, is_on_gpu=self._is_on_gpu)
        self._control = control
        self._agent = agent
        self._links: dict[ControlStream, PeerLink] = {}
        self._lost: OrderedDict[_LinkKey, LinkStats] = OrderedDict()
        """The last lost link with each peer and in each role, at most 32; the latest comes last."""
        self._pulse = LinkLiveness(config.link_timeout_s)
        self.num_lost = 0
        """How many links have ended with transfers on them."""
        self.num_changes = 0
        """How often a link was added, removed, or changed its state."""

    @property
    def num_open(self) -> int:
        """The number of links that are open, or opening."""
        return sum(link.is_usable for link in self._links.values())

    def find(self, stream: ControlStream) -> PeerLink | None:
        """Return the link of a stream, if there is one."""
        return self._links.get(stream)

    def to_producer(self, peer: EngineAddress) -> PeerLink:
        """Return the usable link on which a producer sends to this engine; dial one if there is none."""
        key = (peer.engine_id, peer.incarnation)
        for link in self._links.values():
            if link.peer == key and not link.is_producer and link.is_usable:
                return link
        return self._dial(peer)

    def _dial(self, peer: EngineAddress) -> PeerLink:
        stream = self._control.dial(peer, self._agent)
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        link = PeerLink(stream, False, (peer.engine_id, peer.incarnation), deadline_s)
        self._add(link)
        stream.send(
            Hello(
                PROTOCOL_VERSION,
                self._identity.engine_id,
                self._identity.incarnation,
                peer.engine_id,
                peer.incarnation,
                self._transport.name,
                self._layout,
                self._config.checksum,
                self._is_on_gpu,
            )
        )
        return link

    def welcome(self, stream: ControlStream, hello: Hello) -> str | None:
        """Answer a consumer's Hello at the producer: open this end of the link, or refuse and return the reason."""
        refusal = self._find_refusal(stream, hello)
        try:
            pending = self._transport.listen(_key_of(stream)) if refusal is None else None
        except LinkLost as error:
            refusal, pending = str(error), None
        if pending is None:
            stream.send(Refused(refusal or ""))
            stream.close()
            return refusal
        link = PeerLink(stream, True, (hello.engine_id, hello.incarnation), None)
        self._add(link)
        link.pieces = PieceMap(self._layout, hello.layout, self._kv_cache, is_producer=True)
        timeout_s = self._config.connect_timeout_s
        data = self._start_data(link, lambda opening: pending.accept(timeout_s, opening))
        link.open(data, time.monotonic())
        stream.send(Welcome(pending.rendezvous, self._layout))
        link.ping(time.monotonic())
        return None

    def _find_refusal(self, stream: ControlStream, hello: Hello) -> str | None:
        identity = self._identity
        if (forgery := find_forgery(stream.proven, hello)) is not None:
            return forgery
        reason = find_disagreement(hello, identity.engine_id, identity.incarnation, self._layout, self._facts)
        if reason is not None:
            return reason
        peer, consumers = (
            (hello.engine_id, hello.incarnation),
            [link for link in self._links.values() if link.is_producer],
        )
        if sum(link.peer == peer for link in consumers) >= _MAX_LINKS_OF_CONSUMER:
            return f"this consumer has {_MAX_LINKS_OF_CONSUMER} links here already, the most that one consumer may have"
        if len(consumers) >= _MAX_CONSUMER_LINKS:
            return f"this producer has {_MAX_CONSUMER_LINKS} links to consumers already, the most that it may have"
        return None

    def open_consumer_end(self, link: PeerLink, welcome: Welcome) -> None:
        """Open the consumer's end of a link whose producer has agreed. A second Welcome changes nothing.

        Raises ProtocolViolation if the producer's layout does not agree with this end's.
        """
        if link.state is LinkState.CONNECTING:
            if (mistake := find_welcome_mistake(welcome, self._layout, self._facts)) is not None:
                raise ProtocolViolation(f"the producer's Welcome contradicts this consumer: {mistake}")
            timeout_s = self._config.connect_timeout_s
            link.pieces = PieceMap(self._layout, welcome.layout, self._kv_cache, is_producer=False)
            rendezvous = welcome.rendezvous
            key = _key_of(link.stream)
            data = self._start_data(link, lambda opening: self._transport.connect(rendezvous, timeout_s, opening, key))
            link.open(data, time.monotonic())
            self.num_changes += 1

    def _add(self, link: PeerLink) -> None:
        link.opened_s = link.last_active_s = time.monotonic()
        self._links[link.stream] = link
        self.num_changes += 1

    def _start_data(self, link: PeerLink, open_link: Callable[[Opening], DataLink]) -> DataThread:
        return DataThread(
            f"kv-link-{link.peer[0]}",
            open_link,
            _DataEvents(link, self._agent),
            is_sender=link.is_producer,
            chunk_timeout_s=self._config.chunk_timeout_s,
            max_bytes_per_s=self._config.max_bytes_per_s,
            checksum=checksum_of if self._config.checksum else None,
        )

    def close(self, link: PeerLink, reason: str, *, is_fault: bool = False) -> bool:
        """Begin to close a link; return whether it is dead already, because no data thread has to end first.

        is_fault: whether to keep the link in the statistics although no transfer was lost with it
        """
        if link.state in {LinkState.CLOSING, LinkState.DEAD}:
            return False
        link.state, link.reason, link.deadline_s = LinkState.CLOSING, reason, None
        self.num_changes += 1
        self.num_lost += bool(link.num_transfers)
        if link.num_transfers or is_fault:
            self._remember_loss(link)
        link.stream.close()
        if link.data is None:
            return True
        link.data.abort()
        return False

    def forget(self, link: PeerLink) -> None:
        """Remove a link from the table: it is DEAD, and its transport touches no memory any more."""
        link.state = LinkState.DEAD
        if self._links.get(link.stream) is link:
            del self._links[link.stream]
        self.num_changes += 1

    def surplus(self) -> list[PeerLink]:
        """Idle links to producers beyond max_links, least recently used first.

        Only the consumer's end may close an idle link: to the producer's a READY may be on its way.
        """
        if len(self._links) <= self._config.max_links:
            return []
        dialled = [link for link in self._links.values() if not link.is_producer and link.is_usable]
        idle = sorted((link for link in dialled if link.num_transfers == 0), key=lambda link: link.last_active_s)
        return idle[: max(0, len(dialled) - self._config.max_links)]

    def stats(self, epoch_s: float) -> tuple[LinkStats, ...]:
        """Return the counters of links, lost ones too. epoch_s: the Unix time of the monotonic clock's zero."""
        living = {_key(link) for link in self._links.values()}
        lost = [stats for key, stats in self._lost.items() if key not in living]
        return (*(self._stats_of(link, epoch_s) for link in self._links.values()), *lost)

    def _stats_of(self, link: PeerLink, epoch_s: float) -> LinkStats:
        before = self._lost.get(_key(link))
        return LinkStats(
            peer_engine_id=link.peer[0],
            peer_incarnation=link.peer[1],
            role=TransferRole.PRODUCER if link.is_producer else TransferRole.CONSUMER,
            state=link.state,
            num_active_transfers=link.num_transfers,
            num_bytes=link.num_bytes,
            opened_at_s=epoch_s + link.opened_s,
            last_active_at_s=epoch_s + link.last_active_s,
            last_error=link.reason or (before.last_error if before is not None else ""),
        )

    def _remember_loss(self, link: PeerLink) -> None:
        key, epoch_s = _key(link), time.time() - time.monotonic()
        self._lost.pop(key, None)
        self._lost[key] = replace(self._stats_of(link, epoch_s), state=LinkState.DEAD, num_active_transfers=0)
        if len(self._lost) > _MAX_LOST:
            self._lost.popitem(last=False)

    def overdue(self, now_s: float) -> list[PeerLink]:
        """Return the links whose handshake has missed its deadline."""
        return [link for link in self._links.values() if link.deadline_s is not None and link.deadline_s <= now_s]

    def beat(self, now_s: float) -> list[Lifeless]:
        """Check every open link, if it is time; return those that are dead (link_liveness.py)."""
        return self._pulse.beat(self._links.values(), now_s)

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which overdue() or beat() has something to do; None if there is none."""
        deadlines = [link.deadline_s for link in self._links.values()]
        deadlines.append(self._pulse.next_deadline(self._links.values()))
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def close_all(self, timeout_s: float) -> None:
        """Close every link, and wait for the data threads for timeout_s at most. Called once, at the agent's end."""
        links = list(self._links.values())
        for link in links:
            self.close(link, "this engine is shutting down")
        deadline_s = time.monotonic() + timeout_s
        for link in links:
            if link.data is not None:
                link.data.join(max(0.0, deadline_s - time.monotonic()))
        self._links.clear()


class PublishedLinks:
    """The links' statistics as they were last published.

    They are not made anew for each event of the agent: many chunks move between two changes of a link.
    """

    def __init__(self, table: LinkTable) -> None:
        self._table = table
        self._num_changes = 0
        self._next_s = 0.0
        self.links: tuple[LinkStats, ...] = ()

    def update(self, now_s: float, epoch_s: float, *, is_due: bool) -> bool:
        """Update the statistics if a link has changed, if is_due, or every 0.5 s; return whether a link has changed.

        now_s: monotonic; epoch_s: the Unix time of the monotonic clock's zero
        """
        has_changed = self._table.num_changes != self._num_changes
        if has_changed or is_due or now_s >= self._next_s:
            self._num_changes, self._next_s = self._table.num_changes, now_s + _STATS_INTERVAL_S
            self.links = self._table.stats(epoch_s)
        return has_changed


def _key_of(stream: ControlStream) -> SessionKey | None:
    """Return the key that the two ends of a proven stream share; None on a stream that is not proven."""
    return None if stream.proven is None else stream.proven.session_key


def _key(link: PeerLink) -> _LinkKey:
    return link.peer, link.is_producer
