"""Kernels against attention in float32, and whole models against generate(), eagerly and as graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.config import ModelConfig
from actors.model.attention.backend import AttentionNeeds
from actors.model.attention.backend_check import find_fault
from actors.model.attention.batch_attention import AttentionLayer
from actors.model.attention.probe import KVGeometry
from actors.model.attention.triton_backend import TritonKind
from kv_transfer.layout import KeyOrder
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.checkpoints import LATENT_FAMILIES
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CheckpointOf = Callable[[str], Path]
DEVICE = torch.device("cuda", 0)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2", "opt")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYERS = (
    AttentionLayer(0, 0.1, None, None),
    AttentionLayer(1, 0.1, 30.0, 24),
    AttentionLayer(2, 0.1, None, 24, has_sinks=True),
    AttentionLayer(3, 0.1, None, None, chunk_size=64),
)


# Each case compiles some thirty kernels, so not every combination is tried: the interpreter computes them all.
@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "block_size"),
    [
        *((dtype, size, (8, 2), 16) for dtype in DTYPES for size in (64, 80, 96, 112, 128, 192, 256, 512)),
        *((torch.bfloat16, 128, heads, size) for heads in ((8, 8), (32, 2)) for size in (16, 24, 128)),
    ],
)
def test_kernels_compute_what_float32_does(
    dtype: torch.dtype, head_dim: int, heads: tuple[int, int], block_size: int
) -> None:
    geometry = KVGeometry(heads[0], heads[1], head_dim, LAYERS)
    needs = AttentionNeeds(DEVICE, dtype, geometry, block_size, KeyOrder.PLAIN)
    if (obstacle := TritonKind().find_obstacle(needs)) is not None:
        pytest.skip(obstacle)
    assert find_fault(TritonKind(), needs) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_eager", [False, True])
def test_tokens_equal_generate(family: str, is_eager: bool, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    runner = make_runner(directory, attention_backend="auto", device="cuda")
    assert runner.attention_backend == "triton", runner.attention_reason
    runner.warm_up()
    config = ModelConfig(model=str(directory), enforce_eager=is_eager, cuda_graph_sizes=(2, 6))
    runner.capture_graphs(config, 16, print)
    assert (runner._graphs is None) == is_eager, "the log says why nothing was captured"
    stepper = Stepper(runner)
    for length in (1, 7, 16, 33, 40):
        stepper.add(str(length), Sequence(random_prompt(length)))
    for name, tokens in stepper.run(num_output_tokens=12, chunk=17).items():
        assert tokens == greedy_tokens(directory, tuple(random_prompt(int(name))), 12)


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_latent_attention_runs_on_the_torch_backend(family: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    runner = make_runner(directory, attention_backend="auto", device="cuda")
    assert runner.attention_backend == "torch"
    assert "it has latent attention (MLA), which only the torch backend serves" in runner.attention_reason
    stepper = Stepper(runner)
    for length in (1, 7, 16, 33, 40):
        stepper.add(str(length), Sequence(random_prompt(length)))
    for name, tokens in stepper.run(num_output_tokens=12, chunk=17).items():
        assert tokens == greedy_tokens(directory, tuple(random_prompt(int(name))), 12)
