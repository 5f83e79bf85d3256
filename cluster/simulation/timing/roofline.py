"""Guesses the durations of steps from a model's config.json and a GPU's data sheet, where nothing was measured.

A product of matrices takes as long as reading its weights or as its arithmetic, whichever is longer (the roofline
model, Williams et al., CACM 2009); a decode's attention takes as long as reading its KV, a prompt's as its arithmetic.
A GPU reaches a part of what its data sheet says, the same part for every GPU here. Real engines can be a few times
slower than such figures, and in ways that differ by kernel: a fleet that is planned with them needs to be measured
before it serves. Every use says so in the log (WARNING).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.costs.step_shape import Floats, StepShape
from cluster.errors import InvalidConfig
from cluster.simulation.timing.gpu_data_sheets import GpuDataSheet
from cluster.simulation.timing.model_size import ModelSize
from cluster.simulation.timing.rank_exchange import RankExchange, RankLayout

WARNING: Final = (
    "NOTHING WAS MEASURED: the durations of steps are a guess from the model's size and the GPU's data sheet. Real "
    "steps can take several times as long. Give a cost model that an engine has saved, or tables of operators, before "
    "you rely on this result."
)
GUESS_ERROR: Final = 2.0
"""How many times as long, or as short, steps may be: what a plan that rests on a guess shows beside it."""
_MEMORY_PART: Final = 0.8
"""The part of the data sheet's bandwidth that kernels reach. RTX 4090 and RTX PRO 6000 reach 0.77 to 0.92."""
_COMPUTE_PART: Final = 0.7
"""The part of the data sheet's arithmetic that they reach. Those two reach 0.78 to 1.0 in large products."""
_STEP_S: Final = 1e-3
"""Seconds of a step that neither depends on: launches, sampling, and what a host does between steps."""
_USED_MEMORY: Final = 0.9
_SPARE_GB: Final = 2.0
"""Memory for activations and graphs, in 10^9 bytes."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RooflineStepTimes:
    """Guesses the steps of one engine (StepTimes). guess_step_times() makes one, and says that it is a guess."""

    size: ModelSize
    gpu: GpuDataSheet
    tensor_parallel_size: int = 1

    @property
    def num_kv_tokens(self) -> int:
        """How many tokens' KV have room beside the weights. Raises InvalidConfig if the weights have none."""
        ranks = self.tensor_parallel_size
        left = ranks * (self.gpu.memory_gb * _USED_MEMORY - _SPARE_GB) * 1e9 - self.size.weight_bytes
        if left < self.size.kv_bytes_per_token:
            need = self.size.weight_bytes / 1e9
            raise InvalidConfig("--gpu", [f"{ranks} of these GPUs have no room for {need:.0f} GB of weights"])
        return int(left / self.size.kv_bytes_per_token)

    def step_s(self, shape: StepShape) -> float:
        """Return the guessed seconds of a step."""
        fixed_s, context_s = self._parts(shape)
        return fixed_s + context_s * shape.num_decode_context

    def decode_run_s(self, shape: StepShape, num_steps: int) -> Floats:
        """Return the guessed seconds of each of num_steps steps that only decode, [num_steps]."""
        fixed_s, context_s = self._parts(shape)
        contexts: Floats = shape.num_decode_context + shape.num_decodes * np.arange(num_steps, dtype=np.float64)
        return fixed_s + context_s * contexts

    def _parts(self, shape: StepShape) -> tuple[float, float]:
        """Return the seconds that do not depend on the decodes' context, and those of a token of it."""
        size, ranks = self.size, self.tensor_parallel_size
        read = ranks * self.gpu.memory_gb_per_s * 1e9 * _MEMORY_PART
        flops = ranks * self.gpu.flops(size.bytes_per_weight) * _COMPUTE_PART
        bf16_flops = ranks * self.gpu.flops(2) * _COMPUTE_PART
        tokens, sequences = shape.num_tokens, shape.num_decodes + shape.num_prefills
        layer_s = max(size.layer_weights * size.bytes_per_weight / read, 2 * tokens * size.layer_weights / flops)
        if size.num_experts:
            active = size.num_experts * (1 - (1 - size.num_chosen / size.num_experts) ** tokens)
            read_s = active * size.expert_weights * size.bytes_per_weight / read
            layer_s += max(read_s, 2 * tokens * size.num_chosen * size.expert_weights / flops)
        head_s = max(2 * size.head_weights / read, 2 * sequences * size.head_weights / bf16_flops)
        attention_flops = 4 * shape.num_prefill_pairs * size.num_heads * size.head_dim * size.num_layers
        prefill_s = max(attention_flops / bf16_flops, shape.num_prefill_context * size.kv_bytes_per_token / read)
        layout = RankLayout(tensor_parallel_size=ranks)
        link_bytes_per_s = self.gpu.link_gb_per_s * 1e9
        exchange = RankExchange(layout, size.num_layers, size.hidden_size, bool(size.num_experts), link_bytes_per_s)
        fixed_s = _STEP_S + size.num_layers * layer_s + head_s + prefill_s + exchange.seconds(tokens, tokens)
        return fixed_s, size.kv_bytes_per_token / read


def guess_step_times(size: ModelSize, gpu: GpuDataSheet, tensor_parallel_size: int = 1) -> RooflineStepTimes:
    """Return guessed durations, and say in the log that they are guessed."""
    _log.warning(WARNING)
    return RooflineStepTimes(size, gpu, tensor_parallel_size)
