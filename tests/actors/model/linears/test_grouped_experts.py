"""Experts that are computed in groups give what transformers' loops give."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import LongcatFlashConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from actors.model.linears.grouped_experts import group_experts, looping_experts

HIDDEN, FEATURES, EXPERTS, ACTIVE = 16, 12, 6, 2


def longcat_flash() -> nn.Module:
    """Four experts with weights, and two that return their inputs."""
    config = LongcatFlashConfig(
        hidden_size=HIDDEN, expert_ffn_hidden_size=FEATURES, n_routed_experts=4, zero_expert_num=2
    )
    module: nn.Module = LongcatFlashExperts(config)  # type: ignore[no-untyped-call]  # left untyped
    return module


def dbrx() -> nn.Module:
    config = SimpleNamespace(
        hidden_size=HIDDEN, ffn_hidden_size=FEATURES, moe_num_experts=EXPERTS, ffn_act_fn={"name": "silu"}
    )
    module: nn.Module = DbrxExperts(config)  # type: ignore[no-untyped-call]  # left untyped
    return module


class Model(nn.Module):
    """A model of nothing but experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.experts(*inputs)
        return output


def draw(module: nn.Module) -> Model:
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        weight.data.normal_(std=0.5, generator=generator)
    return Model(module)


@pytest.mark.parametrize("make", [longcat_flash, dbrx])
@pytest.mark.parametrize("num_tokens", [1, 5, 60])
@torch.inference_mode()
def test_tokens_in_groups_get_what_the_loop_gives(make: Callable[[], nn.Module], num_tokens: int) -> None:
    model, generator = draw(make()), torch.Generator().manual_seed(num_tokens)
    states = torch.randn(num_tokens, HIDDEN, generator=generator)
    chosen = torch.rand(num_tokens, EXPERTS, generator=generator).topk(ACTIVE).indices
    weights = torch.rand(num_tokens, ACTIVE, generator=generator)

    def run() -> Tensor:
        output: Tensor = model(states, chosen, weights)
        return output

    expected = run()
    assert group_experts(model) == 1
    torch.testing.assert_close(run(), expected, atol=1e-5, rtol=1e-5)
    with looping_experts(model):
        assert torch.equal(run(), expected), "transformers' own forward computes"
    assert "forward" in vars(model.experts), "and then the groups again"


@torch.inference_mode()
def test_jetmoe_multiplies_the_tokens_of_each_expert_at_once() -> None:
    layer = JetMoeParallelExperts(EXPERTS, HIDDEN, FEATURES)
    model, sizes = draw(layer), [3, 0, 7, 1, 0, 4]
    inputs = torch.randn(sum(sizes), HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = layer(inputs, sizes)
    assert group_experts(model) == 1
    torch.testing.assert_close(layer(inputs, sizes), expected, atol=1e-5, rtol=1e-5)


def test_a_model_without_such_experts_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert group_experts(model) == 0
    with looping_experts(model):
        assert "forward" not in vars(model.get_submodule("0"))
