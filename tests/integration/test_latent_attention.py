"""Models with latent attention give generate()'s tokens over a handoff, also between engines of unequal sizes.

test_equality.py has all combinations of blocks, chunks and preemption for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from actors.core.requests.sampling_params import SamplingParams
from actors.model.config.class_facts import WITH_LATENT_ATTENTION
from kv_transfer.params import PrefixSource
from tests.checkpoints import make_checkpoint
from tests.engine_pair import EnginePair, engine_config
from tests.integration.test_unequal_sizes import Fleet
from tests.reference import greedy_tokens, random_prompt

_BLOCK_SIZE: Final = 8
_LENGTHS: Final = (1, 17, 40)
_GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
_NUM_LAYERS: Final = 2
_LATENT_SIZE: Final = 24 + 8


@pytest.mark.usefixtures("shared_models")
@pytest.mark.parametrize("family", sorted(WITH_LATENT_ATTENTION))
def test_tokens_equal_generate_over_chunks_and_prefix_hits(family: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(family)
    prefix = random_prompt(40)
    # The first prompt is computed in three chunks, which expand latents, and the second one behind the first one's KV.
    config = engine_config(directory, block_size=_BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=24, overlap=True)
    with EnginePair(config, config) as pair:
        for request_id, prompt in (("first", prefix + random_prompt(20)), ("second", prefix + random_prompt(3))):
            pair.hand_over(request_id, prompt, _GREEDY)
            pair.run()
            assert pair.answers[request_id].token_ids == greedy_tokens(directory, tuple(prompt), 6), request_id
        assert pair.answers["second"].timings("prefill").num_cached_tokens == 40
        pair.assert_whole()


@pytest.fixture(
    scope="module",
    params=["deepseek_v2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("glm4_moe_lite", "minicpm3"))],
)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = make_checkpoint(request.param, tmp_path_factory.mktemp("latent"), num_hidden_layers=_NUM_LAYERS)
    with ExitStack() as opened:
        yield Fleet(directory, 1, opened, sizes=(1, 2), block_size=_BLOCK_SIZE)


@pytest.mark.more
@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 2), (2, 1), (2, 2)])
def test_latents_reach_every_rank_of_an_engine_of_another_size(
    prefill_size: int, decode_size: int, fleet: Fleet
) -> None:
    pair = fleet.pair(prefill_size, decode_size)
    prompts = {f"r{n}": random_prompt(n, seed=10 * prefill_size + decode_size) for n in _LENGTHS}
    for request_id, prompt in prompts.items():
        pair.hand_over(request_id, prompt, _GREEDY)
    pair.run()

    for request_id, prompt in prompts.items():
        assert pair.answers[request_id].token_ids == greedy_tokens(fleet.directory, tuple(prompt), 6), request_id
        transfer = pair.answers[request_id].timings("decode").transfer
        assert transfer is not None
        num_slots = -(-len(prompt) // _BLOCK_SIZE) * _BLOCK_SIZE
        assert transfer.num_bytes == decode_size * num_slots * _NUM_LAYERS * _LATENT_SIZE * 4
    pair.assert_whole()


@pytest.mark.more
@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 2), (2, 1)])
def test_a_prefix_of_latents_is_fetched_from_an_engine_of_another_size(
    prefill_size: int, decode_size: int, fleet: Fleet
) -> None:
    pair = fleet.pair(prefill_size, decode_size)
    prompt = random_prompt(50, seed=5000 + 10 * prefill_size + decode_size)
    pair.submit("decode", "first", prompt, _GREEDY)
    pair.run()
    num_loaded = pair.engines["prefill"].make_stats().prefix_cache_stats.loaded
    pair.submit("prefill", "again", prompt, _GREEDY, PrefixSource(pair.addresses["decode"], 48))
    pair.run()

    for request_id in ("first", "again"):
        assert pair.answers[request_id].token_ids == greedy_tokens(fleet.directory, tuple(prompt), 6)
    assert pair.engines["prefill"].make_stats().prefix_cache_stats.loaded - num_loaded == 48
    pair.assert_whole()
