"""Runs recurrent modules over the flattened batch of a step, each request from its own state.

Requests that decode one token are computed together, as one batch of transformers' own code. A chunk of a prompt is
computed on its own, from the state that the chunk before it has left; a request's first chunk begins without a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from actors.model.attention.backend import AttentionBackend
from actors.model.attention.batch_attention import AttentionLayer, BatchAttention, BatchShape
from actors.model.attention.probe import KVGeometry
from actors.model.cache.kv_groups import RecurrentState, StatePart
from actors.model.errors import UnsupportedModel
from actors.model.states.state_memory import StateMemory
from actors.model.uploads import upload

_CONV, _RECURRENT = "conv", "recurrent"
_ONLY: Final = 0
"""The index of a layer's only state: transformers can keep several in a layer, and no served family does."""


class ModuleCache:
    """Stands in for transformers' cache in one call of one recurrent module."""

    def __init__(self, parts: dict[str, Tensor] | None) -> None:
        """Begin with a state, or without one. parts: as LayerStates.parts; the module may write into the tensors"""
        self._layer = layer = LinearAttentionLayer()
        if parts is None:
            return
        layer.has_previous_state[_ONLY] = True
        if (conv := parts.get(_CONV)) is not None:
            layer.conv_states[_ONLY], layer.is_conv_states_initialized[_ONLY] = conv, True
            layer.conv_kernel_size[_ONLY] = conv.shape[-1]
        if (recurrent := parts.get(_RECURRENT)) is not None:
            layer.recurrent_states[_ONLY], layer.is_recurrent_states_initialized[_ONLY] = recurrent, True

    def get_conv_state(self, layer_idx: int, state_idx: int = _ONLY) -> Tensor | None:
        """See transformers' Cache."""
        return self._layer.conv_states[state_idx] if self._layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = _ONLY) -> Tensor | None:
        """See transformers' Cache."""
        return self._layer.recurrent_states[state_idx] if self._layer.has_previous_state[state_idx] else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = _ONLY, *, conv_kernel_size: int | None = None
    ) -> Tensor:
        """See transformers' Cache."""
        return self._layer.update_conv_state(conv_states, state_idx, conv_kernel_size=conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = _ONLY) -> Tensor:
        """See transformers' Cache."""
        return self._layer.update_recurrent_state(recurrent_states, state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """See transformers' Cache: nothing is ever taken back here."""
        return False

    @property
    def parts(self) -> dict[str, Tensor]:
        """The state after the call."""
        found = {_CONV: self._layer.conv_states[_ONLY], _RECURRENT: self._layer.recurrent_states[_ONLY]}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


RunModule = Callable[[Tensor, ModuleCache], Tensor]
"""A recurrent module's forward: hidden states [n, num_tokens, size] of n requests, and their cache."""


class StepStates(Protocol):
    """The states of one step's requests, for every recurrent module of the model."""

    def run(self, layer: int, hidden_states: Tensor, module: RunModule) -> Tensor:
        """Run one module over the step. hidden_states: [1, num_tokens, size], of which the result has the shape."""


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The requests of a step that compute one token after others, all on the device.

    tokens: [n] int64, their places in the step; slots: [n, blocks of a slot] int64
    """

    tokens: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A request of a step that computes several tokens, or its first one.

    slots: [1, blocks of a slot] int64, on the device
    """

    tokens: slice
    slots: Tensor
    is_first: bool


class BatchStates:
    """The states of the requests of one step, in their slots. Implements StepStates."""

    def __init__(self, memory: StateMemory, shape: BatchShape) -> None:
        assert shape.state_blocks is not None, "every request of a recurrent model has a slot"
        self._memory = memory
        is_decode = (shape.query_lens == 1) & (shape.num_computed > 0)
        decoding, chunks = np.flatnonzero(is_decode), np.flatnonzero(~is_decode)
        slots, starts = shape.state_blocks, shape.query_starts
        tokens, decoding_slots, chunk_slots = upload([starts[decoding], slots[decoding], slots[chunks]], memory.device)
        self._decoding = _Decoding(tokens, decoding_slots) if len(decoding) else None
        self._chunks = [
            _Chunk(
                slice(int(starts[request]), int(starts[request + 1])),
                chunk_slots[index : index + 1],
                is_first=not shape.num_computed[request],
            )
            for index, request in enumerate(chunks.tolist())
        ]

    def run(self, layer: int, hidden_states: Tensor, module: RunModule) -> Tensor:
        """See StepStates."""
        output: Tensor | None = None
        if (decoding := self._decoding) is not None:
            inputs = hidden_states[0].index_select(0, decoding.tokens)[:, None]
            decoded = self._run(layer, decoding.slots, inputs, module, is_first=False)
            output = decoded.new_empty(1, hidden_states.shape[1], decoded.shape[-1])
            output[0].index_copy_(0, decoding.tokens, decoded[:, 0])
        for chunk in self._chunks:
            inputs = hidden_states[:, chunk.tokens]
            computed = self._run(layer, chunk.slots, inputs, module, is_first=chunk.is_first)
            if output is None:
                output = computed.new_empty(1, hidden_states.shape[1], computed.shape[-1])
            output[:, chunk.tokens] = computed
        assert output is not None, "a step has requests"
        return output

    def _run(self, layer: int, slots: Tensor, hidden_states: Tensor, module: RunModule, *, is_first: bool) -> Tensor:
        states = self._memory.load(layer, slots)
        cache = ModuleCache(None if is_first else states.parts)
        output = module(hidden_states, cache)
        states.store(cache.parts)
        return output


class StateProbe:
    """Runs modules over one sequence, and records which states they keep. Implements StepStates."""

    def __init__(self) -> None:
        self._parts: dict[int, list[StatePart]] = {}

    def run(self, layer: int, hidden_states: Tensor, module: RunModule) -> Tensor:
        """See StepStates. Raises UnsupportedModel if a layer has two recurrent modules."""
        if layer in self._parts:
            raise UnsupportedModel("the model", f"layer {layer} keeps more than one recurrent state")
        cache = ModuleCache(None)
        output = module(hidden_states, cache)
        self._parts[layer] = [
            StatePart(layer, name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in cache.parts.items()
        ]
        return output

    @property
    def state(self) -> RecurrentState | None:
        """The state of a request; None if no module keeps one."""
        parts = [part for layer in sorted(self._parts) for part in self._parts[layer]]
        return RecurrentState(tuple(parts)) if parts else None


class BatchWithStates:
    """A step's batch for attention modules, with the states for recurrent ones. Implements BatchAttention."""

    def __init__(self, attention: BatchAttention, states: StepStates) -> None:
        self._attention, self.states = attention, states

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See BatchAttention."""
        return self._attention.attend(layer, query, key, value, sinks)


class StatefulBackend:
    """An attention backend of a model that keeps recurrent states too. Implements AttentionBackend."""

    def __init__(self, attention: AttentionBackend, state: RecurrentState) -> None:
        """attention: keeps to its blocks of the cache, and leaves those of slots alone"""
        self._attention = attention
        self._memory = StateMemory(attention.kv_cache, state)

    @property
    def kv_cache(self) -> Tensor:
        """See AttentionBackend."""
        return self._attention.kv_cache

    def prepare(self, shape: BatchShape) -> BatchWithStates:
        """See AttentionBackend."""
        return BatchWithStates(self._attention.prepare(shape), BatchStates(self._memory, shape))


def with_states(attention: AttentionBackend, geometry: KVGeometry) -> AttentionBackend:
    """Return a backend for all that the model keeps: the given one, unless the model keeps recurrent states too."""
    return attention if geometry.state is None else StatefulBackend(attention, geometry.state)
