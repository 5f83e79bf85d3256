"""Engines' transfer tables, and links between them that are as slow, as unordered and as mortal as tests want.

Everything of kv_transfer is real but threads, streams and bytes: a block is named by its id, and what a chunk holds is
read when it leaves and written when it arrives. Control and data are ordered each, and not with each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from kv_transfer.agent.transfer_table import TransferTable
from kv_transfer.block_pieces import PieceMap
from kv_transfer.config import KVTransferConfig
from kv_transfer.handoff.control_messages import Cancel, Chunk, Finished, Ready
from kv_transfer.layout import KVCacheLayout, KVGroup
from kv_transfer.links.control_streams import ControlStream
from kv_transfer.links.link_table import LinkTable
from kv_transfer.links.peer_link import LinkState, PeerLink
from kv_transfer.links.send_receive_thread import ChunkJob, DataThread
from kv_transfer.params import EngineAddress
from tests.actors.core.builders import BLOCK_SIZE

PREFILL = EngineAddress("prefill", 1, "127.0.0.1:1")
DECODE = EngineAddress("decode", 1, "127.0.0.1:2")
DEAD = EngineAddress("dead", 1, "127.0.0.1:3")
"""Takes dials and READYs, and never says a word."""

LAYOUT = KVCacheLayout(
    num_blocks=64,
    num_kv_heads=1,
    num_layers=1,
    block_size=BLOCK_SIZE,
    head_dim=1,
    dtype="float32",
    dtype_size_bytes=4,
    model_fingerprint="simulated",
)


def layout_with_states(num_state_blocks: int) -> KVCacheLayout:
    """The layout of engines whose requests keep a recurrent state of so many blocks."""
    if not num_state_blocks:
        return LAYOUT
    state = KVGroup(1, 1, 1, 0, "float32", bytes_per_request=num_state_blocks * LAYOUT.block_size_bytes)
    return replace(LAYOUT, further_groups=(state,))


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """Stands for a block's memory."""

    block_id: int
    nbytes: int = LAYOUT.block_size_bytes


class WholeBlocks:
    """A PieceMap of ends that are alike."""

    piece_tokens = BLOCK_SIZE
    pieces_per_block = peer_pieces_per_block = 1
    piece_size_bytes = LAYOUT.block_size_bytes
    runs_per_piece = peer_tp_size = 1

    def ids(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(block_ids)

    def messages(self, pieces: Sequence[int]) -> tuple[list[NamedBlock], None]:
        return [NamedBlock(piece) for piece in pieces], None


@dataclass(slots=True)
class Queue:
    """A control stream's, or a data thread's, way in."""

    pending: deque[object]

    def send(self, message: object) -> None:
        self.pending.append(message)

    put = send


@dataclass(eq=False)
class SimulatedLink:
    """From the consumer's dial until both ends know that it is dead.

    upward, downward: control messages on their way to the producer, to the consumer
    leaving, receives: chunks that a data thread has yet to send, to receive
    flying: (blocks' contents) of chunks between the two
    """

    producer: PeerLink = field(init=False)
    consumer: PeerLink = field(init=False)
    upward: deque[object] = field(default_factory=deque)
    downward: deque[object] = field(default_factory=deque)
    leaving: deque[object] = field(default_factory=deque)
    receives: deque[object] = field(default_factory=deque)
    flying: deque[list[list[int]]] = field(default_factory=deque)
    is_cut: bool = False
    is_known_to_producer: bool = False
    is_known_to_consumer: bool = False

    @classmethod
    def open(cls, producer: EngineAddress, consumer: EngineAddress) -> SimulatedLink:
        link = cls()
        link.producer = _make_end(consumer, link.downward, link.leaving, is_producer=True)
        link.consumer = _make_end(producer, link.upward, link.receives, is_producer=False)
        return link

    def cut(self) -> None:
        """Lose all that is on its way; the ends do not know yet."""
        self.is_cut = True
        self.forget_all()

    def forget_all(self) -> None:
        for queue in (self.upward, self.downward, self.leaving, self.receives):
            queue.clear()
        self.flying.clear()

    @property
    def jobs_leaving(self) -> list[ChunkJob]:
        return [cast(ChunkJob, job) for job in self.leaving]


def _make_end(peer: EngineAddress, says: deque[object], data: deque[object], *, is_producer: bool) -> PeerLink:
    link = PeerLink(
        cast(ControlStream, Queue(says)), is_producer, (peer.engine_id, peer.incarnation), None, LinkState.OPEN
    )
    link.data = cast(DataThread, Queue(data))
    link.pieces = cast(PieceMap, WholeBlocks())
    return link


@dataclass
class Endpoint:
    """One engine's end of all its links. read, write: a block's contents there."""

    address: EngineAddress
    network: Network
    table: TransferTable = field(init=False)
    read: Callable[[int], list[int]] = field(init=False)
    write: Callable[[int, list[int]], None] = field(init=False)
    num_lost: int = 0

    def __post_init__(self) -> None:
        self.table = TransferTable(self.network.config, self.network.layout, cast(LinkTable, self))

    def to_producer(self, peer: EngineAddress) -> PeerLink:
        """See LinkTable: a usable link to this producer, dialled if there is none."""
        own = (self.address.engine_id, self.address.incarnation)
        for link in self.network.links:
            ends = link.consumer.peer, link.producer.peer
            if ends == ((peer.engine_id, peer.incarnation), own) and link.consumer.is_usable:
                return link.consumer
        self.network.links.append(SimulatedLink.open(peer, self.address))
        return self.network.links[-1].consumer


@dataclass
class Network:
    """All links, and what happens on them. Each call is one event; it returns whether there was anything to do."""

    config: KVTransferConfig
    clock: Callable[[], float]
    ends: dict[str, Endpoint] = field(default_factory=dict)
    links: list[SimulatedLink] = field(default_factory=list)
    layout: KVCacheLayout = LAYOUT

    def add(self, address: EngineAddress) -> Endpoint:
        """An engine joins."""
        self.ends[address.engine_id] = end = Endpoint(address, self)
        return end

    def producer_of(self, link: SimulatedLink) -> Endpoint:
        """Not for links to the dead."""
        return self.ends[link.consumer.peer[0]]

    def consumer_of(self, link: SimulatedLink) -> Endpoint:
        """The end that dialled."""
        return self.ends[link.producer.peer[0]]

    def deliver_upward(self, link: SimulatedLink) -> bool:
        if link.is_cut or not link.upward:
            return False
        message = link.upward.popleft()
        assert isinstance(message, Ready | Cancel)
        if not self.is_dead(link):
            self.producer_of(link).table.on_consumer_message(link.producer, message, self.clock())
        return True

    def deliver_downward(self, link: SimulatedLink) -> bool:
        if link.is_cut or not link.downward:
            return False
        message = link.downward.popleft()
        assert isinstance(message, Chunk | Finished)
        self.consumer_of(link).table.on_producer_message(link.consumer, message, self.clock())
        return True

    def chunk_leaves(self, link: SimulatedLink) -> bool:
        if link.is_cut or not link.leaving:
            return False
        job = cast(ChunkJob, link.leaving.popleft())
        read = self.producer_of(link).read
        link.flying.append([read(block_id) for block_id in block_ids_of(job)])
        self.producer_of(link).table.on_chunk_moved(link.producer, job, self.clock())
        return True

    def chunk_arrives(self, link: SimulatedLink) -> bool:
        if link.is_cut or not link.flying or not link.receives:
            return False
        job = cast(ChunkJob, link.receives.popleft())
        for block_id, contents in zip(block_ids_of(job), link.flying.popleft(), strict=True):
            self.consumer_of(link).write(block_id, contents)
        self.consumer_of(link).table.on_chunk_moved(link.consumer, job, self.clock())
        return True

    def producer_hears_of_the_loss(self, link: SimulatedLink) -> bool:
        if not link.is_cut or link.is_known_to_producer:
            return False
        link.is_known_to_producer = True
        if not self.is_dead(link):
            self._end(self.producer_of(link), link.producer, link)
        return True

    def consumer_hears_of_the_loss(self, link: SimulatedLink) -> bool:
        if not link.is_cut or link.is_known_to_consumer:
            return False
        link.is_known_to_consumer = True
        self._end(self.consumer_of(link), link.consumer, link)
        return True

    def look_at_the_clock(self) -> None:
        """All agents apply their deadlines; a stuck link is closed."""
        for endpoint in self.ends.values():
            for end in endpoint.table.on_time(self.clock()):
                for link in self.links:
                    if end in (link.producer, link.consumer):
                        link.cut()

    def settle(self) -> bool:
        """Everything that can arrive arrives; returns whether anything did."""
        num_events = 0
        while any(event(link) for link in list(self.links) for event in self.events()):
            num_events += 1
        return num_events > 0

    def events(self) -> list[Callable[[SimulatedLink], bool]]:
        return [
            self.deliver_upward,
            self.deliver_downward,
            self.chunk_leaves,
            self.chunk_arrives,
            self.producer_hears_of_the_loss,
            self.consumer_hears_of_the_loss,
        ]

    @staticmethod
    def is_dead(link: SimulatedLink) -> bool:
        return link.consumer.peer[0] == DEAD.engine_id

    def _end(self, endpoint: Endpoint, end: PeerLink, link: SimulatedLink) -> None:
        end.state, end.reason = LinkState.DEAD, "cut"
        endpoint.num_lost += 1
        endpoint.table.on_link_dead(end)
        # What was said, or queued, on it since the cut goes nowhere.
        link.forget_all()


def block_ids_of(job: ChunkJob) -> list[int]:
    return [cast(NamedBlock, block).block_id for block in job.blocks]
