"""The place of each group's keys and values in the memory of a KV cache, as numbers to compute addresses with.

A block is the runs of its groups, one after the other. A group's run is [num_kv_heads, num_planes, tile of K, tile of
V]; a tile is one block of one head and plane. Every tile begins at a multiple of tile_unit, so all tiles of one width
are the rows of one strided view, [n, tile], whose rows overlap if a tile is wider than the unit. A gather of blocks is
one index_select on that view then, for any group. Where all layers are alike, the unit is the tile, and nothing
overlaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from actors.model.attention.probe import KVGeometry


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """One group's part of each block. Distances and sizes are in numbers of the cache's dtype.

    offset:     from a block's beginning to the group's run
    block_size_numbers: from one block to the next
    num_kv_heads, num_planes, key_size, value_size: as in LayerGroup
    block_size: tokens of a block
    """

    offset: int
    block_size_numbers: int
    num_kv_heads: int
    num_planes: int
    key_size: int
    value_size: int
    block_size: int

    @property
    def key_tile(self) -> int:
        """Numbers of a tile of K; a tile of V follows it."""
        return self.block_size * self.key_size

    @property
    def plane_size(self) -> int:
        """Numbers of one head's tile of K and tile of V: the distance from one plane to the next."""
        return self.block_size * (self.key_size + self.value_size)

    @property
    def head_distance(self) -> int:
        """The distance from one head to the next."""
        return self.num_planes * self.plane_size

    @property
    def tile_unit(self) -> int:
        """The largest number of which the beginnings of all tiles are multiples."""
        return math.gcd(self.block_size_numbers, self.offset, self.plane_size, self.key_tile)

    @property
    def key_unit(self) -> int:
        """The largest number of which the beginnings of all keys of one token are multiples."""
        return math.gcd(self.tile_unit, self.key_size)

    @property
    def value_unit(self) -> int:
        """The largest number of which the beginnings of all values of one token are multiples."""
        return math.gcd(self.tile_unit, self.value_size)


def group_memories(geometry: KVGeometry, block_size: int) -> tuple[GroupMemory, ...]:
    """Return the memory of a model's groups, in their order in a block."""
    sizes = [
        group.num_kv_heads * group.num_planes * block_size * (group.key_size + group.value_size)
        for group in geometry.groups
    ]
    return tuple(
        GroupMemory(
            sum(sizes[:index]),
            sum(sizes),
            group.num_kv_heads,
            group.num_planes,
            group.key_size,
            group.value_size,
            block_size,
        )
        for index, group in enumerate(geometry.groups)
    )


def rows_of(kv_cache: Tensor, width: int, unit: int) -> Tensor:
    """Return the view [n, width] of a contiguous cache whose row i begins at number i * unit."""
    return kv_cache.view(-1).as_strided(((kv_cache.numel() - width) // unit + 1, width), (unit, 1))
