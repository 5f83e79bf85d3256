"""The counters of a connector, and the times of a transfer."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from kv_transfer.link_load import LinkLoad
from kv_transfer.message_ranges import MAX_KINDS, Clock, Count, Incarnation, LongText, SizeBytes, Total, WireName, Word
from kv_transfer.params import TransferRole


class LinkState(enum.Enum):
    """The states of a link; links/peer_link.py has the transitions."""

    CONNECTING = enum.auto()
    """The handshake on the control stream is under way."""
    OPEN = enum.auto()
    """The handshake has succeeded, and the data thread runs."""
    CLOSING = enum.auto()
    """The link is given up; its data thread has still to end."""
    DEAD = enum.auto()
    """The data thread has ended, or was never started."""


class TransferFailure(enum.StrEnum):
    """Why a transfer has failed, as the end that counts it sees it."""

    LINK_LOST = "link_lost"
    NO_RESERVATION = "no_reservation"
    """At a producer: the consumer did not reserve blocks in time."""
    CONSUMER_CANCELLED = "consumer_cancelled"
    """At a producer: the consumer does not want the KV any more, as its request has ended or waited too long."""
    PRODUCER_GAVE_UP = "producer_gave_up"
    CORRUPT = "corrupt"
    """At a consumer: a chunk's checksum differs from the producer's."""
    REPEATED_ID = "repeated_id"
    """At a consumer: another request has a transfer of this id."""


@dataclass(frozen=True, slots=True)
class TransferTimings:
    """Sizes and times of one transfer, as its consumer measured them on its monotonic clock.

    num_blocks: blocks, or pieces (layout.py), that were received intact; num_bytes: their bytes
    transfer_s: from the first chunk's announcement to the last block's arrival; 0 without chunks
    exposed_s:  from the arrival of FINISHED, when prefill is over, to the last block's arrival: the time that the
                client waits because of the transfer; 0 without chunks
    """

    num_blocks: Count
    num_bytes: SizeBytes
    num_chunks: Count
    transfer_s: Clock
    exposed_s: Clock


@dataclass(frozen=True, slots=True)
class LinkStats:
    """The counters of one link. A DEAD one was lost, and no link with the same peer and role has replaced it.

    Times are Unix times in seconds, so that ages are right whenever the counters are read.
    role:       of this engine on the link
    last_error: why this link, or the last one before it with the same peer and role, was lost; empty if none was
    """

    peer_engine_id: WireName
    peer_incarnation: Incarnation
    role: TransferRole
    state: LinkState
    num_active_transfers: Count
    num_bytes: SizeBytes
    opened_at_s: Clock
    last_active_at_s: Clock
    last_error: LongText


@dataclass(slots=True)
class TransferStats:
    """The counters of one connector since it started; links, active transfers and pinned blocks are as of now."""

    num_sent_bytes: Total = 0
    num_received_bytes: Total = 0
    num_sent_blocks: Total = 0
    num_received_blocks: Total = 0
    num_sent_chunks: Total = 0
    num_received_chunks: Total = 0
    num_transfers_completed: Total = 0
    num_transfers_failed: Total = 0
    num_transfers_cancelled: Total = 0
    failures: Annotated[dict[Word, Total], Meta(max_length=MAX_KINDS)] = field(default_factory=dict)
    """The transfers in num_transfers_failed by TransferFailure."""
    num_retries: Total = 0
    """Transfers that were begun for a request that had been submitted before."""
    num_stalls: Total = 0
    """Chunks that did not move before their deadline; each has ended its link."""
    num_corrupt_chunks: Total = 0
    """Received chunks whose checksum differs from the producer's."""
    num_timed_transfers: Total = 0
    """Handoffs that were loaded, whose times are summed up in transfer_s and exposed_s."""
    transfer_s: Clock = 0.0
    """The sum of TransferTimings.transfer_s."""
    exposed_s: Clock = 0.0
    """The sum of TransferTimings.exposed_s."""
    num_links_lost: Total = 0
    """Links that ended with transfers on them."""
    num_links: Total = 0
    links: Annotated[tuple[LinkStats, ...], Meta(max_length=MAX_KINDS)] = ()
    link_loads: Annotated[tuple[LinkLoad, ...], Meta(max_length=MAX_KINDS)] = ()
    """The load of the links on which this engine sends; with several ranks, of each rank's."""
    num_active_transfers: Total = 0
    num_pinned_blocks: Total = 0
    """Blocks that cannot be freed before their transfer is over, at either end."""
    oldest_pin_at_s: Clock | None = None
    """Unix time at which the oldest transfer that holds blocks began: READY at a producer, reserved at a consumer."""
    dropped_messages: Annotated[dict[Word, Total], Meta(max_length=MAX_KINDS)] = field(default_factory=dict)
    """How many messages were dropped or refused, by reason, such as "duplicate" or "unknown transfer"."""

    @property
    def mean_transfer_s(self) -> float:
        """The mean time of a timed transfer, in seconds; 0 before the first one."""
        return self.transfer_s / max(1, self.num_timed_transfers)

    @property
    def mean_exposed_s(self) -> float:
        """The mean time of a timed transfer that prefill did not hide, in seconds; 0 before the first one."""
        return self.exposed_s / max(1, self.num_timed_transfers)
