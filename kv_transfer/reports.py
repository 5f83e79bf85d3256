"""What all transfers of an engine's rank report: events for its scheduler, and counters."""

from __future__ import annotations

from kv_transfer.connector import KVConnectorOutput
from kv_transfer.stats import TransferStats


class TransferReports:
    """Belongs to the agent's thread. output: since it was last taken; stats: since the start."""

    def __init__(self) -> None:
        self.output = KVConnectorOutput()
        self.stats = TransferStats()

    def count_dropped(self, reason: str) -> None:
        """A message was dropped."""
        dropped = self.stats.dropped_messages
        dropped[reason] = dropped.get(reason, 0) + 1
