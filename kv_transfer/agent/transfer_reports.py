"""The collected reports of all transfers of an engine's rank: events for its scheduler, and counters."""

from __future__ import annotations

from kv_transfer.connector.reports import KVConnectorOutput, LoadOutcome, ReceivedKV, TransferReport
from kv_transfer.transfer_stats import TransferFailure, TransferStats


class TransferReports:
    """Reports and counters, which every transfer adds to. The object belongs to the agent's thread.

    output: the reports since they were last taken
    stats:  the counters since the start
    """

    def __init__(self) -> None:
        self.output = KVConnectorOutput()
        self.stats = TransferStats()

    def add(self, report: TransferReport) -> None:
        """Report an event to the scheduler."""
        self.output.reports.append(report)

    def count_dropped(self, reason: str) -> None:
        """Count a message that was dropped. reason: one of a few fixed texts"""
        dropped = self.stats.dropped_messages
        dropped[reason] = dropped.get(reason, 0) + 1

    def count_begun(self, attempt: int) -> None:
        """Count a transfer that has begun: as a retry if the request was submitted before."""
        self.stats.num_retries += attempt > 0

    def count_failed(self, failure: TransferFailure) -> None:
        """Count a transfer that has failed."""
        failures = self.stats.failures
        failures[failure.value] = failures.get(failure.value, 0) + 1
        self.stats.num_transfers_failed += 1

    def count_received(self, received: ReceivedKV, failure: TransferFailure) -> None:
        """Count a load that is over, by its outcome, and a handoff's times. failure: why it has failed, if it has"""
        stats, timings = self.stats, received.timings
        if received.outcome is LoadOutcome.FAILED:
            self.count_failed(failure)
        elif received.outcome is LoadOutcome.CANCELLED:
            stats.num_transfers_cancelled += 1
        else:
            stats.num_transfers_completed += 1
        if received.first_token_id is not None and timings is not None:
            # Only handoffs are timed: nothing overlaps with a fetch, so its times would not show how well handoffs
            # overlap with prefill.
            stats.num_timed_transfers += 1
            stats.transfer_s += timings.transfer_s
            stats.exposed_s += timings.exposed_s
