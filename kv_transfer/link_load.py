"""The load of the links on which an engine sends, one for each peer; routing predicts transfers from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from kv_transfer.message_ranges import SizeBytes, WireName

MAX_LINK_LOADS: Final = 64
"""The most links that an engine reports, so that a report stays small however many peers there are."""

BytesPerSecond: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e15)]
RoundTrip: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e6)]


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """The bytes that an engine has to send to one peer, and how fast it can: round_trip_s + bytes / bytes_per_s.

    peer:             the engine that receives; with several ranks, all of them together
    num_queued_bytes: bytes of the transfers that this engine has taken on for the peer, less those that have left
    bytes_per_s:      the measured bandwidth while bytes were moving; 0: not measured yet
    round_trip_s:     the shortest time that an answer of the peer took lately; 0: not measured yet
    """

    peer: WireName
    num_queued_bytes: SizeBytes = 0
    bytes_per_s: BytesPerSecond = 0.0
    round_trip_s: RoundTrip = 0.0


LinkLoads: TypeAlias = Annotated[tuple[LinkLoad, ...], Meta(max_length=MAX_LINK_LOADS)]


def merge_link_loads(loads: Iterable[LinkLoad]) -> tuple[LinkLoad, ...]:
    """Return one load for each peer, those with the most queued bytes first, MAX_LINK_LOADS of them at most.

    loads: of the links between single ranks; links to the same peer send at the same time, so their bandwidths add up
    """
    loads, by_peer = tuple(loads), dict[str, LinkLoad]()
    if len({load.peer for load in loads}) == len(loads):
        return _most_queued(loads)
    for load in loads:
        before = by_peer.get(load.peer, LinkLoad(load.peer))
        by_peer[load.peer] = LinkLoad(
            load.peer,
            before.num_queued_bytes + load.num_queued_bytes,
            before.bytes_per_s + load.bytes_per_s,
            max(before.round_trip_s, load.round_trip_s),
        )
    return _most_queued(by_peer.values())


def _most_queued(loads: Iterable[LinkLoad]) -> tuple[LinkLoad, ...]:
    # The sort is stable: among links with the same bytes, those that were named first stay first.
    return tuple(sorted(loads, key=attrgetter("num_queued_bytes"), reverse=True)[:MAX_LINK_LOADS])
