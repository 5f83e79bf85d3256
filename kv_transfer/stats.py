"""What a connector counts."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kv_transfer.params import TransferRole


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

    num_blocks: int
    num_bytes: int
    num_chunks: int
    transfer_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class LinkStats:
    """One link; DEAD: one that was lost, and that nothing has taken the place of.

    Times are Unix times in seconds, so that whoever reads this later knows the ages.
    role:       our end's
    last_error: what this link, or the last one before it with the same peer and role, was lost for; empty if none was
    """

    peer_engine_id: str
    peer_incarnation: int
    role: TransferRole
    state: LinkState
    num_active_transfers: int
    num_bytes: int
    opened_at_s: float
    last_active_at_s: float
    last_error: str


@dataclass(slots=True)
class TransferStats:
    """Counters of one connector since it started; links, transfers and pinned blocks are as of now."""

    num_sent_bytes: int = 0
    num_received_bytes: int = 0
    num_sent_blocks: int = 0
    num_received_blocks: int = 0
    num_sent_chunks: int = 0
    num_received_chunks: int = 0
    num_transfers_completed: int = 0
    num_transfers_failed: int = 0
    num_transfers_cancelled: int = 0
    num_retries: int = 0
    """Transfers that were begun for a request that had been submitted before."""
    num_stalls: int = 0
    """Chunks that did not move before their deadline; each took its link with it."""
    num_corrupt_chunks: int = 0
    """Received chunks whose checksum was another than the producer's."""
    num_timed_transfers: int = 0
    """Loads that transfer_s and exposed_s, as in TransferTimings, are the sums of: those that were handed over."""
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    num_links_lost: int = 0
    """Links that ended with transfers on them."""
    num_links: int = 0
    links: tuple[LinkStats, ...] = ()
    num_active_transfers: int = 0
    num_pinned_blocks: int = 0
    """Blocks that cannot be freed before their transfer is over, at either end."""
    oldest_pin_at_s: float | None = None
    """Unix time at which the oldest transfer that holds blocks began: READY at a producer, reserved at a consumer."""
    dropped_messages: dict[str, int] = field(default_factory=dict)
    """Messages that were dropped, by reason (old incarnation, old attempt, unknown transfer, duplicate)."""
