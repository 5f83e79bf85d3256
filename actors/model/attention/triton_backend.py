"""Attention in kernels of our own that Triton compiles, on CUDA devices.

They read the KV cache where it is: nothing is gathered, and no buffer grows with the context. A step uploads its slots,
lengths and block tables in one copy from pinned memory, and waits for nothing. Each layer then starts at most four
kernels: write keys and values, attend with requests of few tokens and put their parts together, attend with requests of
many tokens. triton_kernels/ has the kernels, how large their tiles are, and why.

Any block size is read, powers of two or not, since a key's block is looked up for each key. Any head size up to 512 is
read, too; one that is no power of two computes with the next one, where the numbers beyond it are zeros. Layers may
differ in their heads and sizes, values may be narrower or wider than keys, and a layer may read another layer's KV.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from actors.model.attention.backend import AttentionNeeds, BackendName
from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.probe import KVGeometry
from actors.model.attention.static_batch import StaticBatch
from actors.model.attention.triton_kernels.launches import CachePlace, choose_num_parts
from actors.model.attention.triton_kernels.step_plan import StepPlan, TilePlan, plan_step, plan_tiles
from actors.model.attention.triton_kernels.tile_sizes import MAX_GROUP, MAX_HEAD_DIM, MostRows, most_rows, short_rows
from actors.model.cache.group_memory import GroupMemory, group_memories
from actors.model.uploads import upload
from kv_transfer.device_kind import device_module, is_accelerator
from kv_transfer.layout import KeyOrder

_MIN_CAPABILITY = (8, 0)
"""The oldest compute capability that multiplies matrices of bfloat16, and for which a test compiles the kernels."""
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class TritonKind:
    """The backend for CUDA devices. Implements AttentionBackendKind."""

    name = BackendName.TRITON

    def key_orders(self, needs: AttentionNeeds) -> tuple[KeyOrder, ...]:
        """See AttentionBackendKind."""
        return (KeyOrder.PLAIN,)

    def find_obstacle(self, needs: AttentionNeeds) -> str | None:
        """See AttentionBackendKind."""
        if not is_accelerator(needs.device):
            return "it needs a CUDA device"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        capability = device_module(needs.device).get_device_capability(needs.device)
        if capability < _MIN_CAPABILITY:
            return f"the device has compute capability {'.'.join(map(str, capability))}, and 8.0 is the least"
        return find_uncovered(needs)

    def open(self, kv_cache: Tensor, needs: AttentionNeeds) -> TritonAttention:
        """See AttentionBackendKind."""
        num_processors = 1
        if is_accelerator(needs.device):
            num_processors = device_module(needs.device).get_device_properties(needs.device).multi_processor_count
        return TritonAttention(kv_cache, needs.geometry, needs.block_size, num_processors)


def find_uncovered(needs: AttentionNeeds) -> str | None:
    """Return what the kernels do not cover of a model, on any device, or None."""
    geometry = needs.geometry
    if geometry.state is not None or geometry.value_size == 0:
        return f"{geometry.irregularity}, which only the torch backend serves"
    if needs.dtype not in _DTYPES:
        return f"it does not compute in {str(needs.dtype).removeprefix('torch.')}"
    for kv in geometry.groups:
        head_dim, group = max(kv.key_size, kv.value_size), kv.num_heads // kv.num_kv_heads
        if head_dim > MAX_HEAD_DIM:
            return f"heads have {head_dim} numbers, and {MAX_HEAD_DIM} is the most"
        max_group = min(MAX_GROUP, most_rows(head_dim, needs.dtype).long)
        if group > max_group:
            return f"{group} query heads share a KV head, and {max_group} is the most"
    if any(layer.sliding_window is not None and not layer.is_causal for layer in geometry.layers):
        return "a layer has a sliding window and attends to both sides"
    return None


class TritonAttention:
    """Holds the KV cache, and makes a TritonBatch for each step. Implements AttentionBackend and StaticAttention.

    kv_cache: the tensor that was given
    groups:   the tiles of each group of layers
    planes:   where each layer's KV is, by the layer's index in the model
    """

    def __init__(self, kv_cache: Tensor, geometry: KVGeometry, block_size: int, num_processors: int) -> None:
        """Begin with a cache.

        kv_cache: contiguous, of the shape that KVCacheLayout.shape says
        num_processors: the device's multiprocessors, which a decode step should keep busy
        """
        # The module registers the operators. It needs the package triton, which torch's builds for CPUs do not bring.
        importlib.import_module("actors.model.attention.triton_kernels.operators")
        assert kv_cache.shape[0] * block_size < 2**31, "slots are numbers of 32 bits"
        self.kv_cache, self.block_size, self.num_processors = kv_cache, block_size, num_processors
        self.planes = geometry.layer_planes
        memories = group_memories(geometry, block_size)
        self.groups = [
            _Group(
                memory,
                _Tiling(
                    group.num_heads // group.num_kv_heads,
                    most_rows(max(group.key_size, group.value_size), kv_cache.dtype),
                ),
            )
            for group, memory in zip(geometry.groups, memories, strict=True)
        ]

    def prepare(self, shape: BatchShape) -> TritonBatch:
        """Plan one step, and upload the plan."""
        first = self.groups[0].tiling
        plan = plan_step(shape, block_size=self.block_size, group=first.group, most_rows=first.most_rows)
        tile_plans = {first: (plan.short, plan.long)}
        for tiling in {group.tiling for group in self.groups} - {first}:
            tile_plans[tiling] = plan_tiles(shape, group=tiling.group, most_rows=tiling.most_rows)
        return TritonBatch.of_plan(self, plan, tile_plans)

    def decode(self, batch: StaticBatch, max_seq_len: int) -> TritonBatch:
        """See StaticAttention. Each request is one tile of one token."""
        tiles: dict[_Tiling, list[_Tiles]] = {}
        for tiling in {group.tiling for group in self.groups}:
            is_short = tiling.group <= tiling.most_rows.short
            rows = short_rows(tiling.group, 1) if is_short else tiling.most_rows.long
            tiles[tiling] = [_Tiles(batch.requests, batch.query_starts[:-1], rows, max_seq_len, 1, is_short)]
        requests = _Requests(batch.query_starts, batch.seq_lens, batch.block_tables)
        return TritonBatch(self, batch.slots, requests, tiles)


class TritonBatch:
    """One step's batch: writes each layer's keys and values, then attends. Implements BatchAttention."""

    def __init__(
        self, backend: TritonAttention, slots: Tensor, requests: _Requests, tiles: Mapping[_Tiling, Sequence[_Tiles]]
    ) -> None:
        """slots: [num_tokens] int32, block * block_size + offset, or -1 for a token that is not written"""
        self._backend, self._kv_cache = backend, backend.kv_cache
        self._slots, self._requests, self._tiles = slots, requests, tiles

    @classmethod
    def of_plan(
        cls,
        backend: TritonAttention,
        plan: StepPlan,
        tile_plans: Mapping[_Tiling, tuple[TilePlan | None, TilePlan | None]],
    ) -> Self:
        """Upload a plan, and fill the blocks that begin with zeros. tile_plans: short and long tiles"""
        present = [
            (tiling, tiles, tiles is pair[0])
            for tiling, pair in tile_plans.items()
            for tiles in pair
            if tiles is not None
        ]
        arrays = [plan.slots, plan.begun_blocks, plan.query_starts, plan.seq_lens, plan.block_tables]
        arrays += [part for _, tiles, _ in present for part in (tiles.requests, tiles.tokens)]
        slots, begun_blocks, *batch = upload(arrays, backend.kv_cache.device)
        if len(plan.begun_blocks):
            backend.kv_cache.index_fill_(0, begun_blocks.long(), 0)
        tiles_of: dict[_Tiling, list[_Tiles]] = {tiling: [] for tiling in tile_plans}
        for i, (tiling, tiles, is_short) in enumerate(present):
            requests, tokens = batch[3 + 2 * i : 5 + 2 * i]
            tiles_of[tiling].append(_Tiles(requests, tokens, tiles.rows, tiles.max_keys, tiles.max_tokens, is_short))
        return cls(backend, slots, _Requests(batch[0], batch[1], batch[2]), tiles_of)

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See BatchAttention."""
        plane = self._backend.planes[layer.index]
        group = self._backend.groups[plane.group]
        place = group.place_of(plane.plane).numbers
        if plane.is_stored:
            torch.ops.raypd.write_kv(self._kv_cache, key, value, self._slots, place)
        num_heads, num_tokens, _ = query.shape
        output = query.new_empty(num_tokens, num_heads, value.shape[2])
        for tiles in self._tiles[group.tiling]:
            torch.ops.raypd.attend_tiles(
                output,
                query,
                self._kv_cache,
                tiles.requests,
                tiles.tokens,
                self._requests.query_starts,
                self._requests.seq_lens,
                self._requests.block_tables,
                tiles.rows,
                tiles.max_tokens,
                self._num_parts(tiles, layer, group) if tiles.is_short else 1,
                place,
                layer.scaling,
                layer.softcap or 0.0,
                layer.sliding_window or 0,
                layer.chunk_size or 0,
                layer.is_causal,
                sinks,
            )
        return output

    def _num_parts(self, tiles: _Tiles, layer: AttentionLayer, group: _Group) -> int:
        max_keys = tiles.max_keys
        for reach in (layer.sliding_window, layer.chunk_size):
            if reach is not None:
                max_keys = min(max_keys, reach + tiles.max_tokens - 1)
        num_programs = tiles.requests.shape[0] * group.memory.num_kv_heads
        return choose_num_parts(num_programs, max_keys, self._backend.num_processors)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Holds what the tiles of a step depend on.

    group: query heads of a KV head
    """

    group: int
    most_rows: MostRows


@dataclass(frozen=True, slots=True)
class _Group:
    """One group of layers: its part of a block, and how its queries are cut into tiles."""

    memory: GroupMemory
    tiling: _Tiling

    def place_of(self, plane: int) -> CachePlace:
        """Return where the keys and values of a plane are."""
        memory = self.memory
        return CachePlace(
            memory.offset + plane * memory.plane_size,
            memory.head_distance,
            memory.block_size_numbers,
            memory.block_size,
            memory.num_kv_heads,
        )


@dataclass(frozen=True, slots=True)
class _Requests:
    """A step's requests on the device; see the operator attend_tiles."""

    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of one launch, on the device; see TilePlan.

    is_short: several programs may share a tile's keys
    """

    requests: Tensor
    tokens: Tensor
    rows: int
    max_keys: int
    max_tokens: int
    is_short: bool
