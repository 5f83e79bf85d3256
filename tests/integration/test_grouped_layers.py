"""Models whose layers differ in their KV, or keep latents, go through everything that handles blocks as others do.

Here: checksums, host memory, and the copied tail of a prompt. test_unequal_sizes.py and test_latent_attention.py have
unequal tensor-parallel sizes and fetched prefixes; `make test-models` moves and resumes requests of every model type.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from actors.core.requests.sampling_params import SamplingParams
from kv_transfer.config import KVTransferConfig
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("shared_models")]

FAMILIES: Final = ("gemma4", "mimo", "deepseek_v2")
NUM_TOKENS: Final = 6
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_evicted_blocks_come_back_from_host_memory_and_checksums_agree(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(family)
    checked = KVTransferConfig(transport="loopback", checksum=True)
    stored = checked.model_copy(update={"cpu_cache_gib": 0.05})
    prefill = engine_config(directory, num_blocks=9, max_num_batched_tokens=64, transfer=stored)
    with EnginePair(prefill, engine_config(directory, transfer=checked)) as pair:
        for number in range(2):
            for seed in range(3):
                # Each prompt needs almost all blocks of the prefill engine, so each of them evicts the one before.
                prompt, name = random_prompt(100, seed=seed), f"r{number}-{seed}"
                pair.hand_over(name, prompt, GREEDY)
                pair.run()
                assert pair.answers[name].token_ids == greedy_tokens(directory, tuple(prompt), NUM_TOKENS)
        stats = pair.engines["prefill"].make_stats().store_stats
        assert stats is not None
        assert stats.num_loaded_blocks >= 3 * 5
        pair.assert_whole()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tail_of_a_prompt_is_copied_with_all_of_its_groups(family: str, checkpoint: Callable[[str], Path]) -> None:
    directory, prompt = checkpoint(family), random_prompt(30)
    config = engine_config(directory)
    with EnginePair(config, config) as pair:
        pair.submit("decode", "first", prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        pair.run(lambda: len(pair.answers["first"].token_ids) == 2)
        # The first request goes on writing the block in which the prompt ends.
        pair.submit("decode", "second", prompt, GREEDY)
        pair.run()
        expected = greedy_tokens(directory, tuple(prompt), 20)
        assert pair.answers["first"].token_ids == expected
        assert pair.answers["second"].token_ids == expected[:NUM_TOKENS]
        assert pair.answers["second"].timings("decode").num_cached_tokens == len(prompt) - 1
        pair.assert_whole()
