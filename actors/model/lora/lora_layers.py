"""Adds the products of adapters to the output of a linear layer.

The layer stays the same object: a hook adds to its output in place. With a layer whose inputs are split over ranks the
products are added before the ranks' parts are summed, through its attribute add_part.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actors.model.lora.adapter_weights import ModuleWeights
from actors.model.lora.lora_step import LoraStep, SharedPart
from actors.model.lora.targets import LoraTarget
from actors.model.tensor_parallel.split_layers import RowParallelLinear
from kv_transfer.device_kind import pin_for


class LoraContext:
    """Holds the step that is being computed, for all layers of a model; None if no token of it has an adapter."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step: LoraStep | None = None


class LoraLayer:
    """The slots of one layer.

    _a:     [num_slots * max_rank, inputs of this rank]
    _b:     [num_slots * max_rank, outputs of this rank]
    Invariant: the rows of a slot beyond its adapter's rank, and all rows of an empty slot, are zero in _a and finite
    in _b.
    """

    def __init__(
        self,
        target: LoraTarget,
        context: LoraContext,
        num_slots: int,
        max_rank: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Attach to the layer. dtype, device: of the slots, as the model's"""
        self._context = context
        self._max_rank = max_rank
        self._a = torch.zeros(num_slots * max_rank, len(target.inputs), dtype=dtype, device=device)
        self._b = torch.zeros(num_slots * max_rank, len(target.outputs), dtype=dtype, device=device)
        self._ranks = [0] * num_slots
        if isinstance(target.layer, RowParallelLinear):
            target.layer.add_part = self._add
        else:
            target.layer.register_forward_hook(self._on_output)

    def put(self, slot: int, weights: ModuleWeights | None) -> None:
        """Write an adapter's matrices into a slot. weights: None if the adapter does not change this layer"""
        first = slot * self._max_rank
        rank = 0 if weights is None else len(weights.a)
        self._ranks[slot] = rank
        if weights is not None:
            device = self._a.device
            self._a[first : first + rank].copy_(pin_for(device, weights.a), non_blocking=True)
            self._b[first : first + rank].copy_(pin_for(device, weights.b), non_blocking=True)
        self._a[first + rank : first + self._max_rank] = 0

    def _on_output(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._context.step is not None:
            self._add(inputs[0], output)

    def _add(self, inputs: Tensor, output: Tensor) -> None:
        """Add to the output. inputs: [..., num_tokens, in]; output: [..., num_tokens, out], contiguous"""
        step = self._context.step
        if step is None:
            return
        inputs = inputs.reshape(-1, inputs.shape[-1])
        output = output.view(-1, output.shape[-1])
        for run in step.runs:
            if rank := self._ranks[run.slot]:
                first = run.slot * self._max_rank
                rows = slice(first, first + rank)
                inner = inputs[run.begin : run.end] @ self._a[rows].T
                output[run.begin : run.end].addmm_(inner, self._b[rows])
        if (shared := step.shared) is not None:
            self._add_shared(shared, inputs, output)

    def _add_shared(self, part: SharedPart, inputs: Tensor, output: Tensor) -> None:
        if not part.is_recorded and not any(self._ranks[part.first_slot : part.last_slot + 1]):
            return
        rows = slice(part.first_slot * self._max_rank, (part.last_slot + 1) * self._max_rank)
        inner = inputs[part.begin : part.end] @ self._a[rows].T
        # Masked, and not multiplied by zeros and ones: infinity times 0 is NaN, so an adapter that overflows would
        # reach the tokens of other requests.
        inner.masked_fill_(part.is_foreign, 0)
        output[part.begin : part.end].addmm_(inner, self._b[rows])
