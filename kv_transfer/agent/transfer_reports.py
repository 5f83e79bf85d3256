"""What all transfers of an engine's rank report: events for its scheduler, and counters."""

from __future__ import annotations

from kv_transfer.connector.reports import KVConnectorOutput, LoadOutcome, ReceivedKV, TransferReport
from kv_transfer.transfer_stats import TransferStats


class TransferReports:
    """Belongs to the agent's thread. output: since it was last taken; stats: since the start."""

    def __init__(self) -> None:
        self.output = KVConnectorOutput()
        self.stats = TransferStats()

    def add(self, report: TransferReport) -> None:
        """Tell the scheduler."""
        self.output.reports.append(report)

    def count_dropped(self, reason: str) -> None:
        """A message was dropped."""
        dropped = self.stats.dropped_messages
        dropped[reason] = dropped.get(reason, 0) + 1

    def count_begun(self, attempt: int) -> None:
        """A transfer has begun."""
        self.stats.num_retries += attempt > 0

    def count_received(self, received: ReceivedKV) -> None:
        """A load is over."""
        stats, timings = self.stats, received.timings
        if received.outcome is LoadOutcome.FAILED:
            stats.num_transfers_failed += 1
        elif received.outcome is LoadOutcome.CANCELLED:
            stats.num_transfers_cancelled += 1
        else:
            stats.num_transfers_completed += 1
        if received.first_token_id is not None and timings is not None:
            # A handoff: what a fetch takes is all exposed, and says nothing of how well handoffs are hidden.
            stats.num_timed_transfers += 1
            stats.transfer_s += timings.transfer_s
            stats.exposed_s += timings.exposed_s
