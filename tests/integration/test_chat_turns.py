"""The turns of a chat: what an earlier turn has left anywhere is not computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from tests.engine_pair import engine_config
from tests.integration.idle_engines import until_all_idle
from tests.integration.local_cluster import LocalCluster, local_cluster
from tests.reference import greedy_tokens, random_prompt

_NUM_TOKENS = 20
_BLOCK_SIZE = 16


async def _answer(cluster: LocalCluster, prompt: list[int]) -> list[int]:
    sampling = SamplingOptions(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    chunks = cluster.serving.generate(GenerateRequest(prompt=TokenPrompt(prompt), sampling=sampling))
    return [token_id async for chunk in chunks for token_id in chunk.token_ids]


async def test_an_answer_comes_back_from_the_decode_engine_for_the_next_turn(
    checkpoint: Callable[[str], Path],
) -> None:
    directory = checkpoint("llama")
    config = engine_config(directory, block_size=_BLOCK_SIZE)
    config = config.model_copy(update={"kv_transfer": config.kv_transfer.model_copy(update={"transport": "auto"})})
    chat = random_prompt(30, seed=1)
    async with local_cluster(config) as cluster:
        for turn in range(4):
            answer = await _answer(cluster, chat)
            assert answer == greedy_tokens(directory, tuple(chat), _NUM_TOKENS)
            # Nobody has computed anything for the last token.
            await cluster.until_it_is_known_to_have("decode-0", [*chat, *answer[:-1]])
            chat = [*chat, *answer, *random_prompt(7, seed=10 + turn)]
        await until_all_idle(cluster.engines.values())
        prefill = cluster.engines["prefill-0"].stats
        # 4 prompts of 30, 57, 84, 111 tokens: of each answer but the last one, a block or more came from D.
        assert prefill.prefix_cache_stats.loaded >= 3 * _BLOCK_SIZE
        assert prefill.num_prompt_tokens_computed <= 111 - prefill.prefix_cache_stats.loaded + 3 * _BLOCK_SIZE
