"""Kernels against attention in float32, and whole models against generate(), eagerly and as graphs.

test_handoffs.py has two engines, and models with recurrent states.
"""

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
from actors.model.model_runner import ModelRunner
from kv_transfer.layout import KeyOrder
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.checkpoints import LATENT_FAMILIES
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CheckpointOf = Callable[[str], Path]
DEVICE = torch.device("cuda", 0)
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2", "opt"),
    *("granite_swa", "nemotron", "stablelm", "falcon", "falcon_40b", "gemma3n", "gemma4", "llama4"),
)
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "granitemoe_swa", "mimo")
NUM_TOKENS = 12
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
    assert_equals_generate(runner, directory)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_groups_give_generates_tokens(family: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    runner = make_runner(directory, attention_backend="auto", device="cuda")
    assert runner.attention_backend == "triton", runner.attention_reason
    runner.warm_up()
    runner.capture_graphs(ModelConfig(model=str(directory), cuda_graph_sizes=(6,)), 16, print)
    assert "in float32" in runner.cuda_graphs, "each expert's product waits then"
    assert_equals_generate(runner, directory)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_bfloat16_give_the_same_tokens_eagerly_and_as_graphs(family: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    outputs = []
    for is_eager in (True, False):
        runner = make_runner(directory, attention_backend="auto", device="cuda", dtype="bfloat16")
        runner.warm_up()
        config = ModelConfig(model=str(directory), enforce_eager=is_eager, cuda_graph_sizes=(2, 6))
        runner.capture_graphs(config, 16, print)
        assert (runner._graphs is None) == is_eager, runner.cuda_graphs
        outputs.append(run(runner))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_latent_attention_runs_on_the_torch_backend(family: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    runner = make_runner(directory, attention_backend="auto", device="cuda")
    assert runner.attention_backend == "torch"
    assert "it has latent attention (MLA), which only the torch backend serves" in runner.attention_reason
    assert_equals_generate(runner, directory)


def assert_equals_generate(runner: ModelRunner, directory: Path) -> None:
    for name, tokens in run(runner).items():
        assert tokens == greedy_tokens(directory, tuple(random_prompt(int(name))), NUM_TOKENS)


def run(runner: ModelRunner) -> dict[str, list[int]]:
    """Compute prompts in chunks beside decodes, then decodes alone. The answers are named by their prompts' lengths."""
    stepper = Stepper(runner)
    for length in (1, 7, 16, 33, 40):
        stepper.add(str(length), Sequence(random_prompt(length)))
    return stepper.run(num_output_tokens=NUM_TOKENS, chunk=17)
