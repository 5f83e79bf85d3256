"""One link as the agent sees it: a control stream, the handshake on it, and a data thread.

    CONNECTING -> OPEN -> CLOSING -> DEAD      a link that never opened goes from CONNECTING to CLOSING

Messages that are sent before the link is OPEN are kept until then. A link is DEAD only when its data thread has ended,
or was never started: until then its transport may still read or write blocks, so its transfers are not failed before.
A producer's end becomes OPEN at once: it is made when the producer accepts a Hello.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.block_pieces import PieceMap, share_any_kv_heads
from kv_transfer.errors import ProtocolViolation
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
from kv_transfer.links.control_streams import ControlStream
from kv_transfer.links.link_compatibility import PairingFacts, find_mismatch
from kv_transfer.links.send_receive_thread import ChunkJob, DataThread
from kv_transfer.params import TransferId
from kv_transfer.transfer_stats import LinkState
from kv_transfer.transports.base import ComputeEvent
from kv_transfer.trust.handshake import Party, Proven

__all__ = ["LinkState", "PeerLink", "find_disagreement", "find_forgery"]


@dataclass(slots=True, eq=False)
class PeerLink:
    """A link's state, of which one end is in this engine. The object belongs to the agent's thread.

    is_producer:   whether this end is the producer's
    peer:          (engine_id, incarnation) of the other end
    deadline_s:    monotonic, of the handshake; None once it is over
    reason:        why the link was closed; empty before
    unsent:        messages that wait until the link is open
    pieces:        maps blocks to what travels; None until both layouts are known
    opened_s:      monotonic; when the object was made
    last_active_s: monotonic; when a transfer last began, a message other than Ping and Pong arrived, or a chunk moved
    heard_s:       monotonic; when the peer last sent any message
    pinged_s:      monotonic; when the Ping was sent that has not been answered; None if there is none
    num_transfers: transfers on the link now
    num_bytes:     bytes of chunks that have moved so far
    """

    stream: ControlStream
    is_producer: bool
    peer: tuple[str, int]
    deadline_s: float | None
    state: LinkState = LinkState.CONNECTING
    data: DataThread | None = None
    reason: str = ""
    unsent: list[ControlMessage] = field(default_factory=list)
    pieces: PieceMap | None = None
    opened_s: float = 0.0
    last_active_s: float = 0.0
    heard_s: float = 0.0
    pinged_s: float | None = None
    num_transfers: int = 0
    num_bytes: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether a new transfer may use the link."""
        return self.state in {LinkState.CONNECTING, LinkState.OPEN}

    def check_turn(self, message: ControlMessage) -> None:
        """Raise ProtocolViolation for a message that this end does not expect from its peer in the link's state.

        A producer gets Ready and Cancel. A consumer gets Welcome or Refused first, then Chunk, ChunkSum and Finished.
        A message that arrives while the link closes passes: the transfers decide what it means to them.
        """
        if isinstance(message, Ping | Pong) or self.state not in {LinkState.CONNECTING, LinkState.OPEN}:
            return
        if self.is_producer:
            is_expected = isinstance(message, Ready | Cancel)
        elif self.state is LinkState.CONNECTING:
            is_expected = isinstance(message, Welcome | Refused)
        else:
            is_expected = isinstance(message, Chunk | ChunkSum | Finished)
        if not is_expected:
            end = "producer" if self.is_producer else "consumer"
            raise ProtocolViolation(f"{type(message).__name__} came to the {end}'s end of a link in {self.state.name}")

    def send(self, message: ControlMessage) -> None:
        """Send a message, or keep it until the link is open; a closing link drops it."""
        if self.state is LinkState.OPEN:
            self.stream.send(message)
        elif self.state is LinkState.CONNECTING:
            self.unsent.append(message)

    def ping(self, now_s: float) -> None:
        """Send Ping. The peer answers with Pong at once, which shows that it lives, and how long a round trip takes."""
        if self.pinged_s is None:
            self.pinged_s = now_s
        self.stream.send(Ping())

    def take_round_trip_s(self, now_s: float) -> float | None:
        """Note that Pong has come; return the seconds since the first Ping without answer, or None if there is none."""
        pinged_s, self.pinged_s = self.pinged_s, None
        return None if pinged_s is None else max(0.0, now_s - pinged_s)

    def withdraw(self, transfer_id: TransferId) -> bool:
        """Drop the kept messages of a transfer; return whether there were any, so that none of them was sent."""
        kept = [message for message in self.unsent if getattr(message, "transfer_id", None) != transfer_id]
        is_withdrawn = len(kept) < len(self.unsent)
        self.unsent = kept
        return is_withdrawn

    def open(self, data: DataThread, now_s: float) -> None:
        """Make the link OPEN after its handshake, and send the kept messages. data: the link's data thread"""
        self.heard_s = now_s
        self.state, self.data, self.deadline_s = LinkState.OPEN, data, None
        unsent, self.unsent = self.unsent, []
        for message in unsent:
            self.stream.send(message)

    def make_job(
        self, transfer_id: TransferId, attempt: int, index: int, pieces: Sequence[int], after: ComputeEvent | None
    ) -> ChunkJob:
        """Return a chunk for the data thread of an open link.

        index:  of the chunk in its transfer
        pieces: the chunk's blocks in this end's cache, as pieces
        after:  the point on the device's compute stream from which on they may be touched; None: at once
        """
        assert self.pieces is not None, "chunks move on open links"
        messages, staged = self.pieces.messages(pieces)
        runs_per_block = self.pieces.runs_per_piece
        return ChunkJob(transfer_id, messages, after, staged, attempt, index, runs_per_block=runs_per_block)


def find_welcome_mistake(welcome: Welcome, layout: KVCacheLayout, facts: PairingFacts) -> str | None:
    """Return why KV cannot come from a producer although it has agreed; None if it can.

    layout, facts: of this end, the consumer's. A Welcome does not have the transport and the checksum: the producer has
    compared them.
    """
    theirs = PairingFacts.of_rank(welcome.layout, facts.transport, checksum=facts.checksum, is_on_gpu=facts.is_on_gpu)
    mismatch = find_mismatch(theirs, facts, "the producer", "the consumer")
    if mismatch is None and not share_any_kv_heads(layout, welcome.layout):
        return f"the producer's rank holds KV heads {welcome.layout.kv_heads!r}, this one {layout.kv_heads!r}"
    return mismatch


def find_forgery(proven: Proven | None, hello: Hello) -> str | None:
    """Return the contradiction between a Hello's names and the names that its stream has proven; None if they agree.

    A member of the cluster must not take part in transfers, or use up links, in the name of another one.
    """
    claimed = Party(hello.engine_id, hello.incarnation)
    if proven is not None and proven.dialer == claimed:
        return None
    return f"the consumer calls itself {claimed}, and has proven to be {None if proven is None else proven.dialer}"


def find_disagreement(
    hello: Hello, engine_id: str, incarnation: int, layout: KVCacheLayout, facts: PairingFacts
) -> str | None:
    """Return why KV cannot travel between the two ends, with both values of what differs; None if it can.

    Beyond find_mismatch(), which compares the engines, this checks whether the consumer means this rank, and whether
    the two ranks have heads in common.
    layout, facts: of this end, the producer's
    """
    at_consumer, at_producer = "the consumer", "the producer"
    identity = {
        "engine": (hello.peer_engine_id, engine_id),
        "incarnation": (hello.peer_incarnation, incarnation),
    }
    reasons = [f"{name}: {a!r} at {at_consumer}, {b!r} at {at_producer}" for name, (a, b) in identity.items() if a != b]
    mismatch = find_mismatch(PairingFacts.of_hello(hello), facts, at_consumer, at_producer)
    if mismatch is not None:
        reasons.append(mismatch)
    if not reasons and not share_any_kv_heads(layout, hello.layout):
        theirs, ours = hello.layout.kv_heads, layout.kv_heads
        reasons.append(f"KV heads of the ranks: {theirs!r} at {at_consumer}, {ours!r} at {at_producer}")
    return "; ".join(reasons) or None
