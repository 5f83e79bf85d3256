"""What a connector counts."""

from dataclasses import dataclass, field


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


@dataclass(slots=True)
class TransferStats:
    """Counters of one connector since it started; links and transfers are as of now."""

    num_sent_bytes: int = 0
    num_received_bytes: int = 0
    num_sent_blocks: int = 0
    num_received_blocks: int = 0
    num_sent_chunks: int = 0
    num_received_chunks: int = 0
    num_transfers_completed: int = 0
    num_transfers_failed: int = 0
    num_transfers_cancelled: int = 0
    num_corrupt_chunks: int = 0
    """Received chunks whose checksum was another than the producer's."""
    num_links_lost: int = 0
    num_links: int = 0
    num_active_transfers: int = 0
    dropped_messages: dict[str, int] = field(default_factory=dict)
    """Messages that were dropped, by reason (old incarnation, old attempt, unknown transfer, duplicate)."""
