"""Blocks that transfers keep from being freed, and since when."""

from __future__ import annotations


class PinnedBlocks:
    """By transfer. Times are the caller's."""

    def __init__(self) -> None:
        self._num_blocks: dict[str, int] = {}
        self._since: dict[str, float] = {}
        """Invariant: in the order of time."""
        self.num_blocks = 0

    @property
    def oldest_s(self) -> float | None:
        """Since when the oldest transfer holds blocks."""
        return next(iter(self._since.values()), None)

    def begin(self, transfer_id: str, now_s: float) -> None:
        """From now on a transfer holds blocks; once is enough."""
        self._since.setdefault(transfer_id, now_s)

    def hold(self, transfer_id: str, num_blocks: int) -> None:
        """A transfer that has begun holds so many."""
        if transfer_id in self._since:
            self.num_blocks += num_blocks - self._num_blocks.get(transfer_id, 0)
            self._num_blocks[transfer_id] = num_blocks

    def end(self, transfer_id: str) -> None:
        """A transfer holds nothing any more."""
        self._since.pop(transfer_id, None)
        self.num_blocks -= self._num_blocks.pop(transfer_id, 0)
