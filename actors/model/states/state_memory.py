"""A request's recurrent state in blocks of the KV cache.

A request's slot is a fixed number of blocks of the pool, beside the blocks of its tokens. They need not follow each
other in memory. The slot's bytes, block after block, are the state's parts, one after the other; see StateLayout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.model.cache.kv_groups import RecurrentState, StatePart


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The place of one layer's parts in a slot.

    first_block, stop_block: the slot's blocks that have bytes of the layer
    parts: each part, with the offset of its first byte from the beginning of first_block
    """

    first_block: int
    stop_block: int
    parts: tuple[tuple[int, StatePart], ...]


def place_layers(state: RecurrentState, block_size_bytes: int) -> dict[int, LayerPlace]:
    """Return the place of each layer's parts, by the layer's index in the model."""
    offsets: dict[int, list[tuple[int, StatePart]]] = {}
    offset = 0
    for part in state.parts:
        offsets.setdefault(part.layer, []).append((offset, part))
        offset += part.size_bytes
    placements = {}
    for layer, parts in offsets.items():
        first_block = parts[0][0] // block_size_bytes
        last_offset, last = parts[-1]
        stop_block = -(-(last_offset + last.size_bytes) // block_size_bytes)
        from_here = tuple((start - first_block * block_size_bytes, part) for start, part in parts)
        placements[layer] = LayerPlace(first_block, stop_block, from_here)
    return placements


class LayerStates:
    """The parts of one layer, of some requests, out of their slots.

    parts: by name, [num_requests, *part.shape]; what is written into these tensors reaches the slots with store()
    """

    def __init__(self, blocks: Tensor, place: LayerPlace, ids: Tensor) -> None:
        """Copy the parts out of the blocks.

        blocks: [num_blocks, bytes of a block] uint8, the cache
        ids:    [num_requests, blocks of a slot] int64, on the cache's device
        """
        self._blocks, self._place = blocks, place
        self._ids = ids[:, place.first_block : place.stop_block].reshape(-1)
        self._bytes = blocks.index_select(0, self._ids).view(len(ids), -1)
        self.parts: dict[str, Tensor] = {}
        for start, part in place.parts:
            own = self._bytes[:, start : start + part.size_bytes].clone(memory_format=torch.contiguous_format)
            self.parts[part.name] = own.view(part.dtype).view(-1, *part.shape)

    def store(self, parts: dict[str, Tensor]) -> None:
        """Write parts into the slots: by name, [num_requests, *part.shape]."""
        for start, part in self._place.parts:
            own = parts[part.name].to(part.dtype).contiguous().view(len(self._bytes), -1)
            self._bytes[:, start : start + part.size_bytes] = own.view(torch.uint8)
        self._blocks.index_copy_(0, self._ids, self._bytes.view(-1, self._blocks.shape[1]))


class StateMemory:
    """The slots of one KV cache. The engine thread uses it."""

    def __init__(self, kv_cache: Tensor, state: RecurrentState) -> None:
        """kv_cache: contiguous; state: of one request"""
        self._blocks = kv_cache.view(len(kv_cache), -1).view(torch.uint8)
        self._placements = place_layers(state, self._blocks.shape[1])

    @property
    def device(self) -> torch.device:
        """The cache's device."""
        return self._blocks.device

    def load(self, layer: int, block_ids: Tensor) -> LayerStates:
        """Copy a layer's parts out of slots. block_ids: [num_requests, blocks of a slot] int64, on the device"""
        return LayerStates(self._blocks, self._placements[layer], block_ids)
