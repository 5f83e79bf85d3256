"""Counts the blocks that transfers keep from being freed, and notes since when."""

from __future__ import annotations

from kv_transfer.params import TransferId


class PinnedBlocks:
    """The blocks that each transfer holds. Times are those of the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._num_blocks: dict[TransferId, int] = {}
        self._since: dict[TransferId, float] = {}
        """When each transfer began to hold blocks. Invariant: the transfers are in the order of these times."""
        self.num_blocks = 0

    @property
    def oldest_s(self) -> float | None:
        """Return the time since which the oldest transfer holds blocks; None if no transfer holds any."""
        return next(iter(self._since.values()), None)

    def begin(self, transfer_id: TransferId, now_s: float) -> None:
        """Note that a transfer holds blocks from now on. Further calls for the same transfer change nothing."""
        self._since.setdefault(transfer_id, now_s)

    def hold(self, transfer_id: TransferId, num_blocks: int) -> None:
        """Note how many blocks a transfer holds now; ignored unless the transfer has begun."""
        if transfer_id in self._since:
            self.num_blocks += num_blocks - self._num_blocks.get(transfer_id, 0)
            self._num_blocks[transfer_id] = num_blocks

    def end(self, transfer_id: TransferId) -> None:
        """Note that a transfer holds nothing any more."""
        self._since.pop(transfer_id, None)
        self.num_blocks -= self._num_blocks.pop(transfer_id, 0)
