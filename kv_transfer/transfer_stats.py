"""What a connector counts."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from kv_transfer.params import TransferRole
from kv_transfer.ranges import MAX_KINDS, Clock, Count, Incarnation, LongText, SizeBytes, Total, WireName, Word


class LinkState(enum.Enum):
    """Where a link is."""

    CONNECTING = enum.auto()
    OPEN = enum.auto()
    CLOSING = enum.auto()
    DEAD = enum.auto()


@dataclass(frozen=True, slots=True)
class TransferTimings:
    """One transfer as its consumer saw it, on the consumer's monotonic clock.

    transfer_s: from the first chunk's announcement to the last block's arrival
    exposed_s:  from the producer's word that prefill is over to the last block's arrival: what the client waited for
    """

    num_blocks: Count
    num_bytes: SizeBytes
    num_chunks: Count
    transfer_s: Clock
    exposed_s: Clock


@dataclass(frozen=True, slots=True)
class LinkStats:
    """One link; DEAD: one that was lost, and that nothing has taken the place of.

    Times are Unix times in seconds, so that whoever reads this later knows the ages.
    role:       our end's
    last_error: what this link, or the last one before it with the same peer and role, was lost for; empty if none was
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
    """Counters of one connector since it started; links, transfers and pinned blocks are as of now."""

    num_sent_bytes: Total = 0
    num_received_bytes: Total = 0
    num_sent_blocks: Total = 0
    num_received_blocks: Total = 0
    num_sent_chunks: Total = 0
    num_received_chunks: Total = 0
    num_transfers_completed: Total = 0
    num_transfers_failed: Total = 0
    num_transfers_cancelled: Total = 0
    num_retries: Total = 0
    """Transfers that were begun for a request that had been submitted before."""
    num_stalls: Total = 0
    """Chunks that did not move before their deadline; each took its link with it."""
    num_corrupt_chunks: Total = 0
    """Received chunks whose checksum was another than the producer's."""
    num_timed_transfers: Total = 0
    """Loads that transfer_s and exposed_s, as in TransferTimings, are the sums of: those that were handed over."""
    transfer_s: Clock = 0.0
    exposed_s: Clock = 0.0
    num_links_lost: Total = 0
    """Links that ended with transfers on them."""
    num_links: Total = 0
    links: Annotated[tuple[LinkStats, ...], Meta(max_length=MAX_KINDS)] = ()
    num_active_transfers: Total = 0
    num_pinned_blocks: Total = 0
    """Blocks that cannot be freed before their transfer is over, at either end."""
    oldest_pin_at_s: Clock | None = None
    """Unix time at which the oldest transfer that holds blocks began: READY at a producer, reserved at a consumer."""
    dropped_messages: Annotated[dict[Word, Total], Meta(max_length=MAX_KINDS)] = field(default_factory=dict)
    """Messages that were dropped, by reason (old incarnation, old attempt, unknown transfer, duplicate)."""

    @property
    def mean_transfer_s(self) -> float:
        """How long a timed transfer took; 0 before the first."""
        return self.transfer_s / max(1, self.num_timed_transfers)

    @property
    def mean_exposed_s(self) -> float:
        """How much of that was not hidden behind prefill."""
        return self.exposed_s / max(1, self.num_timed_transfers)
