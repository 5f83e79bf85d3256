"""The engine on a simulated GPU: the GPU's branches give the right tokens, mix no devices, and wait where they must.

Tests of actors/model/graphs/recorder.py, actors/model/graphs/decode_inputs.py,
actors/model/graphs/configured_graphs.py, actors/model/attention/static_batch.py, actors/model/launched_step.py,
actors/model/tensor_parallel/group.py and actors/model/tensor_parallel/split_layers.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.own_process import run_tests

CHECKED = Path(__file__).with_name("checked.py")
FAMILIES = Path(__file__).with_name("checked_families.py")
FEATURES = Path(__file__).with_name("checked_features.py")
REPORT = Path(__file__).with_name("checked_report.py")
ORDER = Path(__file__).with_name("checked_order.py")
RANKS = Path(__file__).with_name("checked_ranks.py")
STATES = Path(__file__).with_name("checked_states.py")


def run_on_simulated_gpu(*arguments: str) -> None:
    """Run tests in a process of their own, since torch takes a device once. All of them have to pass."""
    run_tests("-p", "tests.simulated_gpu.plugin", *arguments)


@pytest.mark.more
@pytest.mark.timeout(600)
def test_the_device_notices_what_a_gpu_would_and_a_model_runs_on_it() -> None:
    run_on_simulated_gpu(str(CHECKED), "-k", "TestDevice or TestGraph or TestTransfers or TestAhead or llama")


@pytest.mark.more
@pytest.mark.timeout(600)
def test_every_dense_family_runs_on_it() -> None:
    run_on_simulated_gpu(str(CHECKED), "-k", "TestFamilies or TestExperts or TestAdapters or TestHandoff or TestWaits")


@pytest.mark.more
@pytest.mark.timeout(600)
def test_families_of_each_kind_of_layers_serve_everything_at_once() -> None:
    run_on_simulated_gpu(str(FAMILIES), "-k", "gemma2 or gpt2 or llama4")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_dense_family_serves_everything_at_once() -> None:
    run_on_simulated_gpu(str(FAMILIES))


@pytest.mark.more
@pytest.mark.timeout(600)
def test_images_grammars_and_adapters_run_on_it() -> None:
    run_on_simulated_gpu(str(FEATURES))


@pytest.mark.more
@pytest.mark.timeout(600)
def test_the_copies_of_transfers_wait_for_the_steps_that_use_their_blocks() -> None:
    run_on_simulated_gpu(str(ORDER))


@pytest.mark.more
@pytest.mark.timeout(600)
def test_ranks_run_on_it() -> None:
    run_on_simulated_gpu(str(RANKS))


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["TestHandedOver", "TestSteps"])
def test_recurrent_states_and_latent_mixtures_run_on_it(name: str) -> None:
    run_on_simulated_gpu(f"{STATES}::{name}")


@pytest.mark.more
@pytest.mark.timeout(600)
def test_the_report_of_a_gpu_is_written_on_it() -> None:
    run_on_simulated_gpu(str(REPORT))


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("tests/actors/test_lora.py", ""),
        ("tests/actors/test_draft_model.py", ""),
        ("tests/actors/test_speculation.py", ""),
        ("tests/actors/test_prompt_embeds.py", ""),
        ("tests/actors/test_logprobs.py", ""),
        ("tests/actors/test_structured_output.py", "handed_over or resumed or rank"),
        ("tests/actors/test_multi_rank_engine.py", "steps_may_overlap or drafts"),
        ("tests/integration/test_latent_attention.py", "over_chunks"),
        ("tests/integration/test_recurrent_models.py", "handoffs_in_chunks and (granite_4 or qwen3_next or lfm2)"),
    ],
)
def test_the_engines_own_tests_pass_on_it(file: str, chosen: str) -> None:
    run_on_simulated_gpu(file, "-k", chosen)
