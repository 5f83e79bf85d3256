import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_corpus.windows import Document
from tools.train_demo_model import (
    HeldOutLoss,
    LossRecord,
    Run,
    cosine,
    held_out_loss,
    loss_per_token,
    train,
    trapezoid,
    write_figures,
)


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


@pytest.fixture
def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    return [Document(torch.randint(3, 64, (900,), generator=generator), (), 900) for _ in range(6)]


def test_a_run_that_was_interrupted_ends_with_the_same_bytes(documents: list[Document], tmp_path: Path) -> None:
    run = Run(num_steps=24, peak_learning_rate=1e-2, learning_rate_factor=trapezoid, state_path=tmp_path / "state.pt")
    whole, first, second = small_model(), small_model(), small_model()
    losses = train(whole, documents, replace(run, state_path=None), loss_per_token)

    def loss_until_step_22(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 22:
            raise KeyboardInterrupt
        return loss_per_token(model, windows)

    steps: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        train(first, documents, run, loss_until_step_22)
    assert train(second, documents, run, loss_per_token) == losses
    for name, weights in whole.state_dict().items():
        assert torch.equal(weights, second.state_dict()[name])


def test_training_lowers_the_loss(documents: list[Document]) -> None:
    before, after = small_model(), small_model()
    train(after, documents, Run(20, 1e-2, cosine, None), loss_per_token)
    assert after.dtype == torch.bfloat16
    assert held_out_loss(after, documents).nats_per_token < held_out_loss(before, documents).nats_per_token


def test_the_learning_rate_rises_stays_and_falls() -> None:
    factors = [trapezoid(step, 1000) for step in range(1000)]
    assert factors[0] < factors[50] < 1.0
    assert set(factors[200:650]) == {1.0}
    assert 0 < factors[-1] < factors[800] < 1.0


def test_the_figures_are_kept_with_the_checkpoint(tmp_path: Path) -> None:
    write_figures(tmp_path, [LossRecord(100, 2.0), LossRecord(150, 1.50004)], {"exercises": HeldOutLoss(1.0, 0.4)})
    assert json.loads((tmp_path / "training.json").read_text()) == {
        "steps": 150,
        "tokens": 150 * 2048,
        "held_out": {"exercises": {"nats_per_token": 1.0, "bits_per_byte": 0.4}},
        "training_loss": {"100": 2.0, "150": 1.5},
    }
