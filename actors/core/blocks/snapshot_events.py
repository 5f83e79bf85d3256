"""Tells routers after which blocks the states of a model with recurrent layers are kept.

A prefix is of use only up to a snapshot. So of such a model neither blocks of tokens nor blocks of snapshots are
events, but whole snapshots: each stands for the block after which it was taken, with that block's hash and position.
A hit is as long as the last of a prompt's blocks that is known in this way; those before it need not be known.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.core.blocks.block_pool import KVCacheBlock
from actors.core.blocks.kv_events import KVEventLog
from actors.core.blocks.state_snapshots import end_of_snapshot
from actors.core.requests.block_hash import BlockHash


class SnapshotEvents:
    """Takes what the block pool tells an event log, and tells the log of whole snapshots."""

    def __init__(self, log: KVEventLog) -> None:
        self._log = log
        self._whole: set[BlockHash] = set()
        """The hashes of the blocks after which there is a whole snapshot."""

    def store(self, block_hashes: Sequence[BlockHash], first_block: int) -> None:
        """Take in that blocks were named. All names of a snapshot come at once, with the position of its end."""
        end = end_of_snapshot(block_hashes[0])
        if end is not None:
            self._whole.add(end)
            self._log.store([end], first_block)

    def remove(self, block_hash: BlockHash) -> None:
        """Take in that a block has lost its name: a snapshot without one of its blocks is none."""
        end = end_of_snapshot(block_hash)
        if end is not None and end in self._whole:
            self._whole.remove(end)
            self._log.remove(end)

    def clear(self) -> None:
        """Take in that all blocks have lost their names."""
        self._whole.clear()
        self._log.clear()

    def reported(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Return the first block of each whole snapshot among cached blocks; its position is the snapshot's end."""
        names = [(block, block.block_hash) for block in blocks if block.block_hash is not None]
        return [block for block, name in names if end_of_snapshot(name, place=0) in self._whole]
