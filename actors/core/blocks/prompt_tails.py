"""The last blocks of prompts, which others with the same prompt copy instead of computing them.

What a prompt has after its last full block stands in a block that its request goes on writing: nobody can share it. But
what the prompt has put there is final, so that another request with the same prompt, a further sample of it above all,
can have a copy of the block and compute the prompt's last token alone, for its logits.

Invariant: a tail is here from when its prompt is computed until its request lets go of its blocks. What ends, or is
preempted, leaves no tail behind: keeping blocks for prompts that may come again would push full ones out of the cache.
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
    """Blocks by the name of what the prompt has in them, and by the request that holds them."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, dict[str, KVCacheBlock]] = {}
        self._names: dict[str, BlockHash] = {}

    def add(self, request_id: str, name: BlockHash, block: KVCacheBlock) -> None:
        """A request's prompt is computed, and ends in this block."""
        self._names[request_id] = name
        self._holders.setdefault(name, {})[request_id] = block

    def find(self, name: BlockHash) -> KVCacheBlock | None:
        """Return a block that has it, or None."""
        holders = self._holders.get(name)
        return None if holders is None else next(iter(holders.values()))

    def remove(self, request_id: str) -> None:
        """A request, known or not, lets go of its blocks."""
        name = self._names.pop(request_id, None)
        if name is None:
            return
        holders = self._holders[name]
        del holders[request_id]
        if not holders:
            del self._holders[name]

    def owners(self) -> set[str]:
        """The requests that have a tail here."""
        return set(self._names)
