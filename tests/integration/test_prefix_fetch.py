"""An engine takes a prefix from another one's cache instead of computing it, and its tokens stay the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.core.requests.request import RequestStatus
from actors.core.requests.sampling_params import SamplingParams
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import EngineAddress, PrefixSource
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt

pytestmark = pytest.mark.usefixtures("shared_models")

_NUM_TOKENS = 8
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
_PROMPT = random_prompt(100, seed=1)
_BLOCK_SIZE = 16
_CheckpointOf = Callable[[str], Path]


def _pair(directory: Path, **transfer: object) -> EnginePair:
    settings = KVTransferConfig(transport="loopback", prefix_load_timeout_s=60.0).model_copy(update=transfer)
    config = engine_config(directory, block_size=_BLOCK_SIZE, transfer=settings)
    return EnginePair(config, config)


def _source(pair: EnginePair, engine: str, num_tokens: int = 1000) -> PrefixSource:
    return PrefixSource(pair.addresses[engine], num_tokens)


def _num_computed(pair: EnginePair, engine: str) -> int:
    return pair.engines[engine].make_stats().num_prompt_tokens_computed


def _num_fetched(pair: EnginePair, engine: str) -> int:
    stats = pair.engines[engine].make_stats().prefix_cache_stats
    assert stats.fetched <= stats.loaded, "stores bring the rest"
    return stats.fetched


def test_the_next_turn_of_a_chat_is_fetched_back_from_the_decode_engine(checkpoint: _CheckpointOf) -> None:
    directory = checkpoint("llama")
    with _pair(directory) as pair:
        pair.hand_over("turn-1", _PROMPT, _GREEDY)
        pair.run()
        # The answer's KV is on D; P has seen the prompt only.
        second = [*_PROMPT, *pair.answers["turn-1"].token_ids, *random_prompt(20, seed=2)]
        num_computed = _num_computed(pair, "prefill")
        pair.submit("prefill", "turn-2", second, _GREEDY, _source(pair, "decode", 107))
        pair.run()
        assert pair.answers["turn-2"].token_ids == greedy_tokens(directory, tuple(second), _NUM_TOKENS)
        assert RequestStatus.WAITING_FOR_REMOTE_KVS in pair.seen_statuses
        # 6 blocks of the first prompt are here, but the block in which the answer begins is not computed again.
        assert _num_computed(pair, "prefill") - num_computed == len(second) - 107 // _BLOCK_SIZE * _BLOCK_SIZE
        pair.assert_whole()


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", *(pytest.param(f, marks=pytest.mark.more) for f in ("gemma4", "mimo", "deepseek_v3"))],
)
def test_a_prefix_that_is_cached_elsewhere_is_not_computed(family: str, checkpoint: _CheckpointOf) -> None:
    directory = checkpoint(family)
    with _pair(directory) as pair:
        pair.submit("decode", "first", _PROMPT, _GREEDY, None)
        pair.run()
        pair.submit("prefill", "again", _PROMPT, _GREEDY, _source(pair, "decode"))
        pair.run()
        assert pair.answers["again"].token_ids == greedy_tokens(directory, tuple(_PROMPT), _NUM_TOKENS)
        assert _num_fetched(pair, "prefill") == len(_PROMPT) // _BLOCK_SIZE * _BLOCK_SIZE
        pair.assert_whole()
        stats = pair.engines["decode"].make_stats().transfer_stats
        assert stats is not None
        assert stats.num_sent_blocks == len(_PROMPT) // _BLOCK_SIZE


def test_a_source_that_has_less_than_was_thought_sends_what_it_has(checkpoint: _CheckpointOf) -> None:
    directory = checkpoint("llama")
    longer = [*_PROMPT[:40], *random_prompt(60, seed=3)]
    with _pair(directory) as pair:
        pair.submit("decode", "first", _PROMPT, _GREEDY, None)
        pair.run()
        pair.submit("prefill", "other", longer, _GREEDY, _source(pair, "decode"))
        pair.submit("prefill", "unknown", random_prompt(50, seed=4), _GREEDY, _source(pair, "decode"))
        pair.run()
        assert pair.answers["other"].token_ids == greedy_tokens(directory, tuple(longer), _NUM_TOKENS)
        assert _num_fetched(pair, "prefill") == 40 // _BLOCK_SIZE * _BLOCK_SIZE
        pair.assert_whole()


def test_a_source_that_is_gone_costs_no_more_than_its_deadline(checkpoint: _CheckpointOf) -> None:
    directory = checkpoint("llama")
    with _pair(directory, connect_timeout_s=2.0, prefix_load_timeout_s=1.0) as pair:
        nobody = PrefixSource(EngineAddress("nobody", 1, "nobody"), 1000)
        predecessor = PrefixSource(EngineAddress("decode-0", 0, "decode-0"), 1000)
        began_s = time.monotonic()
        for index, source in enumerate((nobody, predecessor)):
            pair.submit("prefill", f"r{index}", _PROMPT, _GREEDY, source)
        pair.run()
        assert time.monotonic() - began_s < 30
        for answer in pair.answers.values():
            assert answer.token_ids == greedy_tokens(directory, tuple(_PROMPT), _NUM_TOKENS)
        pair.assert_whole()


def test_an_abort_in_the_middle_gives_both_ends_their_blocks_back(checkpoint: _CheckpointOf) -> None:
    with _pair(checkpoint("llama"), max_chunk_bytes=1) as pair:
        pair.submit("decode", "first", _PROMPT, _GREEDY, None)
        pair.run()
        for index in range(6):
            request_id = f"r{index}"
            pair.submit("prefill", request_id, _PROMPT, _GREEDY, _source(pair, "decode"))
            deadline_s = time.monotonic() + 10
            for _ in range(index + 1):
                pair.step(deadline_s)
            pair.abort(request_id)
            pair.run()
            pair.assert_whole()
            pair.engines["prefill"].scheduler.reset_prefix_cache()


def test_nothing_is_fetched_if_that_is_switched_off_but_others_may_fetch(checkpoint: _CheckpointOf) -> None:
    directory = checkpoint("llama")
    on = engine_config(directory, transfer=KVTransferConfig(transport="loopback"))
    off = engine_config(directory, transfer=KVTransferConfig(transport="loopback", prefix_fetch=False))
    with EnginePair(on, off) as pair:
        for name in ("decode", "prefill"):
            pair.submit(name, f"first-{name}", random_prompt(100, seed=len(name)), _GREEDY, None)
        pair.run()
        pair.submit("decode", "r0", random_prompt(100, seed=len("prefill")), _GREEDY, _source(pair, "prefill"))
        pair.submit("prefill", "r1", random_prompt(100, seed=len("decode")), _GREEDY, _source(pair, "decode"))
        pair.run()
        assert _num_fetched(pair, "decode") == 0
        assert _num_fetched(pair, "prefill") == 96
        pair.assert_whole()


@pytest.mark.parametrize(
    ("family", "seed"),
    [("llama", seed) for seed in range(3)]
    + [
        pytest.param(family, seed, marks=pytest.mark.more)
        for family, seed in (("gemma4", 1), ("mimo", 2), ("deepseek_v3", 1))
    ],
)
def test_engines_that_fetch_from_each_other_under_pressure_change_no_token(
    family: str, seed: int, checkpoint: _CheckpointOf
) -> None:
    """Small pools and host tiers, mixed with handoffs and aborts: whatever is evicted meanwhile, nothing is wrong."""
    directory, draw = checkpoint(family), random.Random(seed)
    settings = KVTransferConfig(transport="loopback", prefix_load_timeout_s=1.0, cpu_cache_gib=0.0005 * (seed % 2))
    config = engine_config(
        directory, block_size=8, num_blocks=24, max_num_batched_tokens=48, overlap=seed == 2, transfer=settings
    )
    chats = [random_prompt(90, seed=index) for index in range(3)]
    aborted: set[str] = set()
    prompts: dict[str, list[int]] = {}
    with EnginePair(config, config) as pair:
        for index in range(24):
            request_id = f"r{index}"
            prompt = prompts[request_id] = draw.choice(chats)[: draw.randint(20, 90)]
            here, there = draw.sample(["prefill", "decode"], 2)
            if draw.random() < 0.3:
                pair.hand_over(request_id, prompt, _GREEDY)
            else:
                pair.submit(here, request_id, prompt, _GREEDY, _source(pair, there, draw.randint(0, 120)))
            for _ in range(draw.randint(0, 12)):
                pair.step(time.monotonic() + 0.01)
            if draw.random() < 0.2:
                aborted.add(request_id)
                pair.abort(request_id)
        pair.run()
        assert _num_fetched(pair, "prefill") + _num_fetched(pair, "decode") > 0
        for request_id in prompts.keys() - aborted:
            right = greedy_tokens(directory, tuple(prompts[request_id]), _NUM_TOKENS)
            assert pair.answers[request_id].token_ids == right, request_id
        pair.assert_whole()


def test_an_engine_without_a_prefix_cache_is_no_source(checkpoint: _CheckpointOf) -> None:
    directory = checkpoint("llama")
    cached = engine_config(directory, transfer=KVTransferConfig(transport="loopback"))
    uncached = cached.model_copy(update={"cache": cached.cache.model_copy(update={"enable_prefix_caching": False})})
    with EnginePair(cached, uncached) as pair:
        pair.submit("decode", "first", _PROMPT, _GREEDY, None)
        pair.run()
        pair.submit("prefill", "again", _PROMPT, _GREEDY, _source(pair, "decode"))
        pair.submit("decode", "back", _PROMPT, _GREEDY, _source(pair, "prefill"))
        pair.run()
        for request_id in ("first", "again", "back"):
            assert pair.answers[request_id].token_ids == greedy_tokens(directory, tuple(_PROMPT), _NUM_TOKENS)
        assert _num_fetched(pair, "prefill") == _num_fetched(pair, "decode") == 0
        pair.assert_whole()
