"""Requests keep to their own states, in any mixture of first chunks, further chunks and decoding.

tests/integration/test_recurrent_models.py runs transformers' modules like this.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.model.attention.batch_attention import BatchShape
from actors.model.attention.probe import GeometryProbe, KVGeometry
from actors.model.attention.torch_backend import TorchAttention
from actors.model.cache.kv_cache import make_layout
from actors.model.cache.kv_groups import RecurrentState, StatePart
from actors.model.errors import UnsupportedModel
from actors.model.states.state_memory import StateMemory
from actors.model.states.step_states import BatchStates, ModuleCache, StatefulBackend, StateProbe, with_states

SIZE, KERNEL = 3, 4
STATE = RecurrentState(
    (StatePart(1, "conv", (SIZE, KERNEL), torch.float32), StatePart(1, "recurrent", (SIZE,), torch.float32))
)
NUM_BLOCKS = 15
"""60 bytes in blocks of 4 bytes."""


def decaying_sum(hidden_states: Tensor, cache: ModuleCache) -> Tensor:
    """A module as transformers' are: a convolution of the last inputs, then a sum in which old inputs fade."""
    num_tokens = hidden_states.shape[1]
    state = cache.get_recurrent_state(1)
    assert (state is None) == (cache.get_conv_state(1) is None)
    inputs = cache.update_conv_state(hidden_states.transpose(1, 2), 1, conv_kernel_size=KERNEL)
    padded = torch.nn.functional.pad(inputs, (KERNEL, 0))
    windows = padded.unfold(-1, KERNEL, 1).sum(-1)[..., -num_tokens:]
    total = torch.zeros(len(hidden_states), SIZE) if state is None else state.clone()
    outputs = []
    for position in range(num_tokens):
        total = 0.5 * total + windows[..., position]
        outputs.append(total)
    cache.update_recurrent_state(total, 1)
    return torch.stack(outputs, dim=1)


def whole(tokens: Tensor) -> Tensor:
    return decaying_sum(tokens[None], ModuleCache(None))[0]


@pytest.mark.parametrize(
    "steps",
    [
        [([7], [0]), ([9], [7])],
        [([1, 7], [0, 0]), ([6, 2], [1, 7]), ([2, 9], [7, 9])],
        [([1, 1], [0, 0]), ([1, 1], [1, 1]), ([1, 1], [2, 2])],
        [([5, 0], [0, 0]), ([1, 3], [5, 0]), ([3, 1], [6, 3]), ([1, 1], [9, 4])],
        [([1, 0], [0, 0]), ([1, 4], [1, 0]), ([2, 1], [2, 4])],
    ],
    ids=["one chunk", "chunks", "single tokens", "mixed", "short ones"],
)
def test_any_steps_give_what_a_sequence_gives_at_once(steps: list[tuple[list[int], list[int]]]) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randn(20, SIZE, generator=generator) for _ in range(2)]
    memory = StateMemory(torch.full((40, 1), 9.0), STATE)
    slots = np.random.default_rng(0).permutation(40)[: 2 * NUM_BLOCKS].reshape(2, NUM_BLOCKS)
    computed: list[list[Tensor]] = [[], []]
    for lengths, starts in steps:
        present = [index for index, length in enumerate(lengths) if length]
        query_lens = [lengths[index] for index in present]
        shape = BatchShape(
            np.cumsum([0, *query_lens]),
            np.array([starts[index] for index in present]),
            np.zeros((len(present), 1), dtype=np.int64),
            state_blocks=slots[present],
        )
        parts = [sequences[index][starts[index] : starts[index] + lengths[index]] for index in present]
        output = BatchStates(memory, shape).run(1, torch.cat(parts)[None], decaying_sum)
        for index, part in zip(present, torch.split(output[0], query_lens), strict=True):
            computed[index].append(part)
    for index, parts in enumerate(computed):
        if parts:
            seen = torch.cat(parts)
            torch.testing.assert_close(seen, whole(sequences[index][: len(seen)]))


def test_the_probe_finds_the_parts_of_each_layers_state() -> None:
    assert StateProbe().state is None
    probe = StateProbe()
    probe.run(1, torch.ones(1, 5, SIZE), decaying_sum)
    assert probe.state == STATE
    with pytest.raises(UnsupportedModel, match="layer 1 keeps more than one recurrent state"):
        probe.run(1, torch.ones(1, 5, SIZE), decaying_sum)


def test_a_model_without_attention_has_a_cache_of_blocks_all_the_same() -> None:
    geometry = GeometryProbe("m").geometry(state=STATE)
    layout = make_layout(geometry, num_blocks=40, block_size=4, dtype=torch.float32, model_fingerprint="")
    assert (layout.state_size_bytes, layout.block_size_bytes, layout.num_state_blocks) == (60, 32, 2)
    assert geometry.irregularity == "it keeps recurrent states"

    backend = with_states(TorchAttention(torch.zeros(layout.shape), geometry, 4), geometry)
    assert isinstance(backend, StatefulBackend)
    shape = BatchShape(np.array([0, 3]), np.array([0]), np.array([[5]]), state_blocks=np.array([[7, 2]]))
    output = backend.prepare(shape).states.run(1, torch.ones(1, 3, SIZE), decaying_sum)
    torch.testing.assert_close(output[0], whole(torch.ones(3, SIZE)))


def test_a_model_without_states_keeps_its_backend() -> None:
    geometry = KVGeometry(1, 1, 8, ())
    backend = TorchAttention(torch.zeros(2, 1, 1, 2, 4, 8), geometry, 4)
    assert with_states(backend, geometry) is backend
