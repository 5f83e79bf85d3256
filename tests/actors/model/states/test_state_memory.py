from __future__ import annotations

import pytest
import torch

from actors.model.cache.kv_groups import RecurrentState, StatePart
from actors.model.states.state_memory import StateMemory, place_layers

STATE = RecurrentState(
    (
        StatePart(0, "conv", (3, 2), torch.bfloat16),
        StatePart(0, "recurrent", (2, 5), torch.float32),
        StatePart(2, "conv", (7,), torch.bfloat16),
    )
)
"""12, 40 and 14 bytes: parts begin and end within blocks."""
BLOCK_BYTES = 16
NUM_BLOCKS = 5
SLOTS = torch.tensor([[9, 2, 7, 1, 4], [3, 8, 0, 5, 6]])


@pytest.fixture
def memory() -> StateMemory:
    cache = torch.full((10, BLOCK_BYTES // 2), 7.0, dtype=torch.bfloat16)
    return StateMemory(cache, STATE)


def _draw(layer: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        part.name: torch.randn((2, *part.shape), generator=generator).to(part.dtype)
        for part in STATE.parts
        if part.layer == layer
    }


def test_a_layers_place_is_the_blocks_that_its_parts_touch() -> None:
    placements = place_layers(STATE, BLOCK_BYTES)
    assert [(placements[layer].first_block, placements[layer].stop_block) for layer in (0, 2)] == [(0, 4), (3, 5)]
    assert [[start for start, _ in placements[layer].parts] for layer in (0, 2)] == [[0, 12], [4]]


def test_what_is_stored_is_loaded_again_for_each_request_and_layer(memory: StateMemory) -> None:
    written = {layer: _draw(layer, layer) for layer in (0, 2)}
    for layer, parts in written.items():
        memory.load(layer, SLOTS).store(parts)

    for layer, parts in written.items():
        both, second = memory.load(layer, SLOTS).parts, memory.load(layer, SLOTS[1:]).parts
        for name, tensor in parts.items():
            assert torch.equal(both[name], tensor)
            assert torch.equal(second[name], tensor[1:])


def test_storing_changes_no_other_request_and_no_other_layer(memory: StateMemory) -> None:
    before = {layer: _draw(layer, layer) for layer in (0, 2)}
    for layer, parts in before.items():
        memory.load(layer, SLOTS).store(parts)
    changed = {name: tensor[:1] + 1 for name, tensor in before[0].items()}
    memory.load(0, SLOTS[:1]).store(changed)

    now = memory.load(0, SLOTS).parts
    for name, tensor in before[0].items():
        assert torch.equal(now[name][0], changed[name][0])
        assert torch.equal(now[name][1], tensor[1])
    assert torch.equal(memory.load(2, SLOTS).parts["conv"], before[2]["conv"])


def test_what_is_loaded_is_a_copy(memory: StateMemory) -> None:
    memory.load(2, SLOTS).store(_draw(2, 5))
    memory.load(2, SLOTS[:1]).parts["conv"].zero_()
    assert torch.equal(memory.load(2, SLOTS).parts["conv"], _draw(2, 5)["conv"])
