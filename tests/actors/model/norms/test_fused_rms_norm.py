"""RMS norms are replaced by one operator only where that gives what the norm gives.

That an engine with replaced norms gives the tokens of generate() is what test_vllm_cpu_backend.py shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from actors.model.norms.fused_rms_norm import FusedRMSNorm, fuse_rms_norms
from kv_transfer.layout import KeyOrder
from tests.actors.model.linears.test_packing import load, logits_of
from tests.actors.model.stepping import make_runner
from tests.checkpoints import make_checkpoint
from tests.vllm_cpu import NEEDS_VLLM_CPU

pytestmark = NEEDS_VLLM_CPU
CheckpointOf = Callable[[str], Path]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Norms(nn.Module):
    """Stands for a model with the given norms."""

    def __init__(self, dtype: torch.dtype, **norms: nn.Module) -> None:
        super().__init__()
        self.dtype = dtype
        for name, norm in norms.items():
            for weight in norm.parameters():
                weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            setattr(self, name, norm)


class NamedRMSNorm(LlamaRMSNorm):
    """Has the form of an RMS norm, and computes something else."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = super().forward(hidden_states)
        return result - result.mean(-1, keepdim=True)


def fuse(model: Norms) -> int:
    return fuse_rms_norms(model)  # type: ignore[arg-type]  # it needs no more of a PreTrainedModel than Norms has


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 96, 768])
def test_a_norm_gives_the_same_rows_by_one_operator(dtype: torch.dtype, size: int) -> None:
    plain = LlamaRMSNorm(size, eps=1e-5)
    model = Norms(dtype, norm=plain)
    assert fuse(model) == 1
    assert isinstance(model.norm, FusedRMSNorm)
    # The heads of queries, as norms of queries and keys get them: neither contiguous nor of one row.
    inputs = torch.randn(2, 7, 3 * size, generator=torch.Generator().manual_seed(2)).to(dtype)[..., size : 2 * size]
    with torch.inference_mode():
        expected, results = plain(inputs), model.norm(inputs)
        alone = torch.cat([model.norm(row[None]) for row in inputs.reshape(-1, size)])
    assert results.shape == inputs.shape
    assert torch.equal(results.reshape(-1, size), alone), "a row's result depends on its batch"
    limit = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(results, expected, rtol=limit, atol=0.0 if dtype is not torch.float16 else 1e-7)


@pytest.mark.parametrize(
    "norm",
    [Gemma3RMSNorm(64), Qwen3NextRMSNormGated(64), NamedRMSNorm(64), LlamaRMSNorm(65)],
    ids=["one more than the weight", "with a second input", "another formula", "a size that the operator refuses"],
)
def test_a_norm_of_another_form_stays(norm: nn.Module) -> None:
    model = Norms(torch.bfloat16, norm=norm)
    assert fuse(model) == 0
    assert model.norm is norm


def test_a_norm_in_another_dtype_than_the_model_stays() -> None:
    model = Norms(torch.bfloat16, norm=LlamaRMSNorm(64))
    model.norm.float()
    assert fuse(model) == 0


def test_norms_that_share_a_module_share_its_replacement() -> None:
    norm = LlamaRMSNorm(32)
    model = Norms(torch.float32, first=norm, second=norm)
    assert fuse(model) == 1
    assert isinstance(model.first, FusedRMSNorm)
    assert model.first is model.second


@pytest.mark.parametrize(("family", "num_norms"), [("llama", 7), ("qwen3", 13)])
def test_the_norms_of_a_whole_model(family: str, num_norms: int, checkpoint: CheckpointOf) -> None:
    loaded = load(checkpoint(family), dtype="float32")
    expected, names = logits_of(loaded), set(loaded.forward.model.state_dict())
    assert fuse_rms_norms(loaded.forward.model) == num_norms
    torch.testing.assert_close(logits_of(loaded), expected, rtol=1e-5, atol=1e-5)
    assert set(loaded.forward.model.state_dict()) == names


@pytest.mark.parametrize(("backend", "is_fused"), [("vllm_cpu", True), ("torch", False)])
def test_the_backend_decides_whether_norms_are_replaced(
    backend: Literal["vllm_cpu", "torch"], is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[PreTrainedModel] = []
    monkeypatch.setattr("actors.model.loaded_runner.fuse_rms_norms", models.append)
    directory = make_checkpoint("llama", tmp_path / "wide", hidden_size=128, head_dim=32)
    order = KeyOrder.TRANSPOSED if is_fused else KeyOrder.PLAIN
    make_runner(directory, attention_backend=backend, key_order=order)
    assert bool(models) == is_fused
