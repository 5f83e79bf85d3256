"""Each token gets what its own adapter adds, and nothing of anybody else's.

Tests of actors/model/lora/slot_table.py, actors/model/lora/lora_step.py, actors/model/lora/targets.py,
actors/model/lora/adapter_weights.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from actors.model.lora.adapter_weights import ModuleWeights
from actors.model.lora.lora_layers import LoraContext, LoraLayer
from actors.model.lora.lora_step import MIN_RUN_TOKENS, NO_SLOT, plan_step
from actors.model.lora.slot_table import SlotTable
from actors.model.lora.targets import LoraTarget

NUM_IN, NUM_OUT, MAX_RANK = 12, 10, 4


def make_layer(num_slots: int) -> tuple[nn.Linear, LoraLayer, LoraContext]:
    torch.manual_seed(0)
    linear, context = nn.Linear(NUM_IN, NUM_OUT), LoraContext()
    target = LoraTarget(linear, NUM_IN, NUM_OUT, range(NUM_IN), range(NUM_OUT))
    return (
        linear,
        LoraLayer(target, context, num_slots, MAX_RANK, dtype=torch.float32, device=torch.device("cpu")),
        context,
    )


def weights(rank: int, seed: int, size: float = 1.0) -> ModuleWeights:
    generator = torch.Generator().manual_seed(seed)
    a, b = (size * torch.randn(rank, num, generator=generator) for num in (NUM_IN, NUM_OUT))
    return ModuleWeights(a, b)


@torch.inference_mode()
def run(linear: nn.Linear, context: LoraContext, inputs: Tensor, slots: list[int]) -> Tensor:
    context.step = plan_step(np.array(slots, dtype=np.int64), MAX_RANK, torch.device("cpu"))
    output: Tensor = linear(inputs[None])[0]
    context.step = None
    return output


LONG = MIN_RUN_TOKENS


@pytest.mark.parametrize(
    "slots",
    [
        [0],
        [NO_SLOT] * 3,
        [0, 1, 2, 1, 0],
        [NO_SLOT, 2, NO_SLOT, 0, NO_SLOT],
        [1] * LONG,
        [0, 1, *[2] * LONG, *[NO_SLOT] * LONG, *[1] * LONG],
        [0, *[2] * LONG, 1, 0],
        [*[1] * (LONG - 1), *[0] * LONG, 2],
    ],
)
def test_a_token_gets_what_its_own_adapter_adds(slots: list[int]) -> None:
    linear, layer, context = make_layer(3)
    adapters = {0: weights(4, 1), 1: weights(2, 2), 2: None}
    for slot, own in adapters.items():
        layer.put(slot, own)
    inputs = torch.randn(len(slots), NUM_IN)
    expected = linear(inputs).detach()
    for token, slot in enumerate(slots):
        own = adapters.get(slot)
        if own is not None:
            expected[token] += own.b.T @ (own.a @ inputs[token])
    torch.testing.assert_close(run(linear, context, inputs, slots), expected)


@pytest.mark.parametrize("num_tokens", [1, MIN_RUN_TOKENS])
def test_an_adapter_that_overflows_does_not_reach_the_tokens_of_others(num_tokens: int) -> None:
    linear, layer, context = make_layer(2)
    own = weights(2, 1)
    layer.put(0, own)
    layer.put(1, weights(4, 2, size=1e30))
    inputs = torch.randn(2 * num_tokens + 1, NUM_IN)
    slots = [*[0] * num_tokens, *[1] * num_tokens, NO_SLOT]
    inputs[num_tokens:-1] *= 1e10
    output = run(linear, context, inputs, slots)
    assert not output[num_tokens:-1].isfinite().all(), "the test shows nothing if it does not overflow"
    expected = linear(inputs[:num_tokens]) + inputs[:num_tokens] @ own.a.T @ own.b
    torch.testing.assert_close(output[:num_tokens], expected.detach())
    torch.testing.assert_close(output[-1], linear(inputs[-1]).detach())


def test_a_slot_keeps_nothing_of_the_adapter_before() -> None:
    linear, layer, context = make_layer(1)
    inputs = torch.randn(3, NUM_IN)
    layer.put(0, weights(4, 1))
    layer.put(0, own := weights(2, 2))
    expected = (linear(inputs) + inputs @ own.a.T @ own.b).detach()
    torch.testing.assert_close(run(linear, context, inputs, [0, 0, 0]), expected)
    layer.put(0, None)
    torch.testing.assert_close(run(linear, context, inputs, [0, 0, 0]), linear(inputs).detach())


def test_slots_go_to_the_adapters_of_the_step() -> None:
    slots = SlotTable(2)
    assert slots.take({"x"}) == ({"x": 0}, {"x"})
    assert slots.take({"x", "y"}) == ({"x": 0, "y": 1}, {"y"})
    assert slots.take({"x"}) == ({"x": 0}, set())
    assert slots.take({"z"}) == ({"z": 1}, {"z"}), "y was in no step for longest"
    slots.drop("x")
    assert slots.take({"y", "z"}) == ({"y": 0, "z": 1}, {"y"})
