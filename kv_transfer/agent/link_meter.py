"""Measures the links on which this rank sends: what is queued for each peer, the bandwidth, and the round trip.

The bandwidth is the mean size of chunks divided by the mean time in which the data thread sent them, both as moving
averages over chunks. So a small chunk, whose time is mostly overhead, hardly changes what large ones have measured. A
chunk whose blocks were still being computed when its turn came was sent faster than its time suggests: it counts only
if it raises the bandwidth.

The figures belong to a peer's name, not to a connection: a new link to the same peer begins with what was measured.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kv_transfer.link_load import MAX_LINK_LOADS, LinkLoad

_RATE: Final = 0.1
"""How much one chunk counts in the moving averages. The first chunks count equally."""
_RISE: Final = 0.05
"""How much a longer round trip counts; a shorter one counts at once, because most of a long one is waiting."""
_MAX_PEERS: Final = 1024


@dataclass(slots=True)
class _Peer:
    """A peer's rank.

    mean_bytes, mean_s: moving averages over its chunks, of their sizes and of their times
    load:               the newest load that was made of these figures; None once they have changed
    """

    engine_id: str
    num_queued_bytes: int = 0
    num_chunks: int = 0
    mean_bytes: float = 0.0
    mean_s: float = 0.0
    round_trip_s: float = 0.0
    load: LinkLoad | None = None

    @property
    def bytes_per_s(self) -> float:
        return self.mean_bytes / self.mean_s if self.mean_s > 0 else 0.0


class LinkMeter:
    """The figures of at most 1024 peers, by their ranks' names. The object belongs to the agent's thread."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        """The peer that was used last comes last."""
        self._loads: tuple[LinkLoad, ...] | None = ()
        """The newest answer of loads(); None once it has changed."""

    def queue(self, name: str, engine_id: str, num_bytes: int) -> None:
        """Count bytes that this rank has taken on for a peer; a negative number if it need not send them any more.

        name, engine_id: of the peer's rank, and of the engine that the rank belongs to
        """
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(engine_id)
        peer.num_queued_bytes += num_bytes
        peer.load = self._loads = None
        self._peers.move_to_end(name)
        if len(self._peers) > _MAX_PEERS:
            self._forget_one()

    def on_chunk_sent(self, name: str, num_bytes: int, seconds: float, *, was_computed: bool) -> None:
        """Take in a chunk that has left. Unknown peers are ignored.

        seconds:      the time from the chunk's turn to its end
        was_computed: whether its blocks were computed when its turn came
        """
        peer = self._peers.get(name)
        if peer is None or seconds <= 0 or num_bytes <= 0:
            return
        if not was_computed and num_bytes <= peer.bytes_per_s * seconds:
            return
        peer.num_chunks += 1
        rate = max(_RATE, 1 / peer.num_chunks)
        peer.mean_bytes += rate * (num_bytes - peer.mean_bytes)
        peer.mean_s += rate * (seconds - peer.mean_s)
        peer.load = self._loads = None

    def on_round_trip(self, name: str, seconds: float) -> None:
        """Take in the time that an answer of a peer took. Unknown peers are ignored."""
        peer = self._peers.get(name)
        if peer is not None:
            is_shorter = peer.round_trip_s <= 0 or seconds < peer.round_trip_s
            peer.round_trip_s += (1.0 if is_shorter else _RISE) * (seconds - peer.round_trip_s)
            peer.load = self._loads = None

    def loads(self) -> tuple[LinkLoad, ...]:
        """Return the loads of the links between this rank and those that it used last, the latest first."""
        if self._loads is None:
            self._loads = tuple([_load_of(peer) for peer in islice(reversed(self._peers.values()), MAX_LINK_LOADS)])
        return self._loads

    def _forget_one(self) -> None:
        """Forget the peer that has been used least recently, of those for which nothing is queued."""
        idle = next((name for name, peer in self._peers.items() if not peer.num_queued_bytes), None)
        if idle is not None:
            del self._peers[idle]


def _load_of(peer: _Peer) -> LinkLoad:
    if peer.load is None:
        peer.load = LinkLoad(peer.engine_id, peer.num_queued_bytes, peer.bytes_per_s, peer.round_trip_s)
    return peer.load
