"""Attention in kernels of our own that Triton compiles, on CUDA devices.

They read the KV cache where it is: nothing is gathered, and no buffer grows with the context. A step uploads its slots,
lengths and block tables in one copy from pinned memory, and waits for nothing. Each layer then starts at most four
kernels: write keys and values, attend with requests of few tokens and put their parts together, attend with requests of
many tokens. triton_kernels/ has the kernels, how large their tiles are, and why.

Any block size is read, powers of two or not, since a key's block is looked up for each key. Any head size up to 256 is
read, too; one that is no power of two computes with the next one, where the numbers beyond it are zeros.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from actors.model.attention.backend import AttentionNeeds, BackendName
from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.static_batch import StaticBatch
from actors.model.attention.triton_kernels.launches import choose_num_parts
from actors.model.attention.triton_kernels.step_plan import StepPlan, plan_step
from actors.model.attention.triton_kernels.tile_sizes import MAX_GROUP, MAX_HEAD_DIM, most_rows, short_rows
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
        return TritonAttention(kv_cache, needs.geometry.num_heads // needs.geometry.num_kv_heads, num_processors)


def find_uncovered(needs: AttentionNeeds) -> str | None:
    """Return what the kernels do not cover of a model, on any device, or None."""
    geometry = needs.geometry
    if (irregularity := geometry.irregularity) is not None:
        return f"{irregularity}, which only the torch backend serves"
    if needs.dtype not in _DTYPES:
        return f"it does not compute in {str(needs.dtype).removeprefix('torch.')}"
    if geometry.head_dim > MAX_HEAD_DIM:
        return f"heads have {geometry.head_dim} numbers, and {MAX_HEAD_DIM} is the most"
    group = geometry.num_heads // geometry.num_kv_heads
    max_group = min(MAX_GROUP, most_rows(geometry.head_dim, needs.dtype).long)
    if group > max_group:
        return f"{group} query heads share a KV head, and {max_group} is the most"
    if any(layer.sliding_window is not None and not layer.is_causal for layer in geometry.layers):
        return "a layer has a sliding window and attends to both sides"
    return None


class TritonAttention:
    """Holds the KV cache, and makes a TritonBatch for each step. Implements AttentionBackend."""

    def __init__(self, kv_cache: Tensor, group: int, num_processors: int) -> None:
        """Begin with a cache.

        kv_cache: contiguous; group: query heads of a KV head
        num_processors: the device's multiprocessors, which a decode step should keep busy
        """
        # The module registers the operators. It needs the package triton, which torch's builds for CPUs do not bring.
        importlib.import_module("actors.model.attention.triton_kernels.operators")
        assert kv_cache.shape[0] * kv_cache.shape[4] < 2**31, "slots are numbers of 32 bits"
        self.kv_cache = kv_cache
        self.num_processors = num_processors
        self._group = group
        self._most_rows = most_rows(kv_cache.shape[5], kv_cache.dtype)

    def prepare(self, shape: BatchShape) -> TritonBatch:
        """Plan one step, and upload the plan."""
        block_size = self.kv_cache.shape[4]
        plan = plan_step(shape, block_size=block_size, group=self._group, most_rows=self._most_rows)
        return TritonBatch.of_plan(self, plan)

    def decode(self, batch: StaticBatch, max_seq_len: int) -> TritonBatch:
        """See StaticAttention. Each request is one tile of one token."""
        is_short = self._group <= self._most_rows.short
        rows = short_rows(self._group, 1) if is_short else self._most_rows.long
        tiles = _Tiles(batch.requests, batch.query_starts[:-1], rows, max_seq_len, 1, is_short)
        requests = _Requests(batch.query_starts, batch.seq_lens, batch.block_tables)
        return TritonBatch(self, batch.slots, requests, [tiles])


class TritonBatch:
    """One step's batch: writes each layer's keys and values, then attends. Implements BatchAttention."""

    def __init__(self, backend: TritonAttention, slots: Tensor, requests: _Requests, tiles: Sequence[_Tiles]) -> None:
        """slots: [num_tokens] int32, block * block_size + offset, or -1 for a token that is not written"""
        self._kv_cache, self._num_processors = backend.kv_cache, backend.num_processors
        self._slots, self._requests, self._tiles = slots, requests, tiles

    @classmethod
    def of_plan(cls, backend: TritonAttention, plan: StepPlan) -> Self:
        """Upload a plan, and fill the blocks that begin with zeros."""
        tile_plans = [tiles for tiles in (plan.short, plan.long) if tiles is not None]
        arrays = [plan.slots, plan.begun_blocks, plan.query_starts, plan.seq_lens, plan.block_tables]
        arrays += [part for tiles in tile_plans for part in (tiles.requests, tiles.tokens)]
        slots, begun_blocks, *batch = upload(arrays, backend.kv_cache.device)
        if len(plan.begun_blocks):
            backend.kv_cache.index_fill_(0, begun_blocks.long(), 0)
        tiles = [
            _Tiles(
                batch[3 + 2 * i], batch[4 + 2 * i], plan_.rows, plan_.max_keys, plan_.max_tokens, plan_ is plan.short
            )
            for i, plan_ in enumerate(tile_plans)
        ]
        return cls(backend, slots, _Requests(batch[0], batch[1], batch[2]), tiles)

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See BatchAttention."""
        torch.ops.raypd.write_kv(self._kv_cache, key, value, self._slots, layer.index)
        num_heads, num_tokens, head_dim = query.shape
        output = query.new_empty(num_tokens, num_heads, head_dim)
        for tiles in self._tiles:
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
                self._num_parts(tiles, layer) if tiles.is_short else 1,
                layer.index,
                layer.scaling,
                layer.softcap or 0.0,
                layer.sliding_window or 0,
                layer.is_causal,
                sinks,
            )
        return output

    def _num_parts(self, tiles: _Tiles, layer: AttentionLayer) -> int:
        max_keys = tiles.max_keys
        if layer.sliding_window is not None:
            max_keys = min(max_keys, layer.sliding_window + tiles.max_tokens - 1)
        return choose_num_parts(tiles.requests.shape[0] * self._kv_cache.shape[1], max_keys, self._num_processors)


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
