"""Recurrent states and mixtures with latent attention on the simulated GPU: handed over, in chunks, from snapshots.

test_simulated_gpu.py starts the tests in a process of their own. The torch backend serves these families, without
graphs (docs/performance.md says why), so what is held here is: no mix of devices, and no wait but those that are named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch

from actors.config import EngineConfig, ModelConfig
from actors.core.requests.sampling_params import SamplingParams
from actors.model.cache.kv_cache import make_layout
from actors.model.loader import load_model
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.checkpoints import RECURRENT_FAMILIES
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt
from tests.simulated_gpu.device import install
from tests.simulated_gpu.tensors import SIMULATION

CheckpointOf = Callable[[str], Path]
DEVICE = install()
LATENT_MIXTURES: Final = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "longcat_flash")
RECURRENT_MIXTURES: Final = ("granite_4_hybrid", "nemotron_h", "qwen3_next", "qwen3_5_moe", "lfm2_moe")
MIXTURES: Final = (*LATENT_MIXTURES, *RECURRENT_MIXTURES)
REFUSED_IN_BFLOAT16: Final = ("zamba2",)
"""The check of each start refuses its small checkpoint in bfloat16, for how it rounds, on a CPU as well."""
WAITS: Final = {"actors/model/sampling/transfers.py:wait", "actors/model/launched_step.py:result"}
"""A step waits for what the sampler has computed, or for its end if it samples nothing."""
WAIT_OF_EXPERTS: Final = "aten::_grouped_mm"
"""A mixture waits here as well, in float32: torch copies the numbers of each expert's rows to the host."""
BLOCK_SIZE: Final = 8
NUM_OUTPUT_TOKENS: Final = 12
LENGTHS: Final = (1, 2, 17, 56)
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)


@pytest.fixture(autouse=True)
def _no_waits() -> None:
    SIMULATION.take_waits()


def config_of(directory: Path, dtype: str = "float32") -> EngineConfig:
    """Return the settings of engines that compute the longest prompt in three chunks, beside other requests."""
    model = ModelConfig(model=str(directory), dtype=dtype, device="cpu")
    layout = make_layout(
        load_model(model).geometry,
        num_blocks=1,
        block_size=BLOCK_SIZE,
        dtype=getattr(torch, dtype),
        model_fingerprint="",
    )
    config = engine_config(
        directory,
        block_size=BLOCK_SIZE,
        num_blocks=200 + 8 * layout.num_state_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        overlap=True,
    )
    return config.model_copy(update={"model": model})


def take_reasons() -> set[str]:
    """Return why the host has waited since the last call, where it is neither for tokens nor for a step's end."""
    return {SIMULATION.reasons[place] for place in SIMULATION.take_waits() if place not in WAITS}


def run_twice(pair: EnginePair, num_cached: Callable[[int], int]) -> dict[str, list[int]]:
    """Hand prompts over beside one that stays, two times; returns the tokens. num_cached: of a prompt's length"""
    for round_name in ("first", "again"):
        for length in LENGTHS:
            pair.hand_over(f"{round_name}-{length}", random_prompt(length), GREEDY)
        pair.submit("decode", f"{round_name}-local", random_prompt(40), GREEDY)
        pair.run()
    for length in LENGTHS:
        assert pair.answers[f"again-{length}"].timings("prefill").num_cached_tokens == num_cached(length)
    pair.assert_whole()
    return {name: answer.token_ids for name, answer in pair.answers.items()}


def num_cached(length: int) -> int:
    """Return how many tokens of a prompt are cached after it was computed: full blocks, but not its last token."""
    return (length - 1) // BLOCK_SIZE * BLOCK_SIZE


def expected_tokens(directory: Path) -> dict[str, list[int]]:
    """Return what generate() answers to the prompts of run_twice()."""
    lengths = {str(length): length for length in LENGTHS} | {"local": 40}
    return {
        f"{round_name}-{name}": greedy_tokens(directory, tuple(random_prompt(length)), NUM_OUTPUT_TOKENS)
        for round_name in ("first", "again")
        for name, length in lengths.items()
    }


class TestHandedOver:
    """Whole requests over two engines."""

    @pytest.mark.parametrize("family", [*RECURRENT_FAMILIES, *LATENT_MIXTURES])
    def test_tokens_equal_generate_and_only_experts_wait_beside_the_sampler(
        self, family: str, checkpoint: CheckpointOf
    ) -> None:
        directory = checkpoint(family)
        config = config_of(directory)
        with EnginePair(config, config) as pair:
            take_reasons()
            assert run_twice(pair, num_cached) == expected_tokens(directory)
            assert take_reasons() == ({WAIT_OF_EXPERTS} if family in MIXTURES else set())

    @pytest.mark.parametrize("family", [family for family in MIXTURES if family not in REFUSED_IN_BFLOAT16])
    def test_in_bfloat16_no_expert_waits(self, family: str, checkpoint: CheckpointOf) -> None:
        config = config_of(checkpoint(family), "bfloat16")
        with EnginePair(config, config) as pair:
            take_reasons()
            tokens = run_twice(pair, num_cached)
            assert take_reasons() == set()
        assert {len(token_ids) for token_ids in tokens.values()} == {NUM_OUTPUT_TOKENS}


class TestSteps:
    """Steps of one engine: how often it waits, and that it captures nothing."""

    @pytest.mark.parametrize("family", sorted({*RECURRENT_FAMILIES, *LATENT_MIXTURES} - {*REFUSED_IN_BFLOAT16}))
    def test_no_graph_is_captured_since_the_torch_backend_serves_them(
        self, family: str, checkpoint: CheckpointOf
    ) -> None:
        directory = checkpoint(family)
        num_blocks = config_of(directory, "bfloat16").cache.num_blocks
        assert num_blocks is not None
        runner = make_runner(directory, dtype="bfloat16", num_blocks=num_blocks)
        runner.warm_up()
        runner.capture_graphs(ModelConfig(model=str(directory), cuda_graph_sizes=(2,)), 16, lambda text: None)
        assert runner.attention_backend == "torch"
        assert runner.cuda_graphs == "none: the attention backend cannot be captured"

    @pytest.mark.parametrize("family", LATENT_MIXTURES)
    def test_a_step_waits_twice_for_each_layer_of_experts_in_float32(
        self, family: str, checkpoint: CheckpointOf
    ) -> None:
        runner = make_runner(checkpoint(family))
        modules = [type(module).__name__ for module in runner._model.forward.model.modules()]
        stepper = Stepper(runner)
        for length in LENGTHS:
            stepper.add(str(length), Sequence(random_prompt(length)))
        SIMULATION.take_waits()
        stepper.run(num_output_tokens=NUM_OUTPUT_TOKENS, chunk=17)
        num_steps = len(stepper.outputs)
        num_layers = sum(name.endswith("Experts") for name in modules)
        assert num_layers
        assert sorted(SIMULATION.take_waits().values()) == [num_steps, 2 * num_layers * num_steps]
