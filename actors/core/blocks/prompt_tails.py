"""The last blocks of prompts, which requests with the same prompt copy instead of computing them.

The tokens of a prompt after its last full block, its tail, are in a block that the request goes on writing, so the
block cannot be shared. But the KV of the prompt's tokens in it is final: another request with the same prompt, for
instance a further sample, gets a copy of the block and computes only the prompt's last token, for its logits.

Invariant: a tail is here from when its prompt is computed until its request frees its blocks. A request that ended, or
was preempted, has no tail here: keeping blocks for prompts that may come again would push full ones out of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.core.blocks.block_pool import KVCacheBlock
from actors.core.requests.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class PartialHit:
    """A held block whose first num_tokens tokens, fewer than a block has, follow a request's prefix hit."""

    block: KVCacheBlock
    num_tokens: int


class PromptTails:
    """Blocks with the tails of prompts, by the tail's name and by the id of the request that holds the block."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, dict[str, KVCacheBlock]] = {}
        self._names: dict[str, BlockHash] = {}

    def add(self, request_id: str, name: BlockHash, block: KVCacheBlock) -> None:
        """Add the block in which a request's computed prompt ends. name: see Request.prompt_tail_name"""
        self._names[request_id] = name
        self._holders.setdefault(name, {})[request_id] = block

    def find(self, name: BlockHash) -> KVCacheBlock | None:
        """Return a block with the tail of this name, or None."""
        holders = self._holders.get(name)
        return None if holders is None else next(iter(holders.values()))

    def remove(self, request_id: str) -> None:
        """Remove the tail of a request that frees its blocks, if it has one here."""
        name = self._names.pop(request_id, None)
        if name is None:
            return
        holders = self._holders[name]
        del holders[request_id]
        if not holders:
            del self._holders[name]

    def owners(self) -> set[str]:
        """The ids of the requests that have a tail here."""
        return set(self._names)
