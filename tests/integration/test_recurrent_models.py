"""Models with recurrent states give generate()'s tokens: over handoffs in chunks, beside each other, and preempted.

Tests of actors/model/states/recurrent_modules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch

from actors.config import ModelConfig, SpeculativeConfig
from actors.core.requests.sampling_params import SamplingParams
from actors.lora_config import LoraConfig
from actors.model.cache.kv_cache import make_layout
from actors.model.config.config_rules import reason_against_drafts, reason_in_config, reason_on_ranks
from actors.model.errors import UnsupportedModel
from actors.model.loaded_runner import LoadedRunner
from actors.model.loader import load_model
from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.link_compatibility import PairingFacts, find_mismatch
from kv_transfer.params import PrefixSource
from tests.checkpoints import RECURRENT_FAMILIES, family_config
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt

_BLOCK_SIZE: Final = 8
_NUM_TOKENS: Final = 12
_LENGTHS: Final = (1, 2, 17, 56)
_GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
_SOME: Final = ("granite_4_hybrid",)
"""The families that `make test` serves; `make test-more` serves all."""
_ALL: Final = [pytest.param(family, marks=[] if family in _SOME else pytest.mark.more) for family in RECURRENT_FAMILIES]

_MOVED: Final = [family for family in _ALL if family.values != ("mamba2",)]
"""A state of Mamba 2 takes so many blocks that the watermark keeps a second request out of a pool for two."""


def _layout(directory: Path) -> KVCacheLayout:
    model = load_model(ModelConfig(model=str(directory), dtype="float32", device="cpu"))
    return make_layout(model.geometry, num_blocks=1, block_size=_BLOCK_SIZE, dtype=torch.float32, model_fingerprint="")


@pytest.mark.usefixtures("shared_models")
@pytest.mark.parametrize("family", _ALL)
def test_tokens_equal_generate_over_handoffs_in_chunks(family: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(family)
    layout = _layout(directory)
    num_state_blocks = layout.num_state_blocks
    assert num_state_blocks
    # A prompt of 56 tokens is computed in three chunks or more, beside other prompts and beside decoding requests.
    config = engine_config(
        directory,
        block_size=_BLOCK_SIZE,
        num_blocks=200 + 8 * num_state_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        overlap=True,
    )
    with EnginePair(config, config) as pair:
        for round_name in ("first", "again"):
            for length in _LENGTHS:
                pair.hand_over(f"{round_name}-{length}", random_prompt(length), _GREEDY)
            pair.submit("decode", f"{round_name}-local", random_prompt(40), _GREEDY)
            pair.run()
            for length in _LENGTHS:
                answer = pair.answers[f"{round_name}-{length}"]
                assert answer.token_ids == greedy_tokens(directory, tuple(random_prompt(length)), _NUM_TOKENS)
                # A snapshot is kept after the last full block that leaves a token to compute.
                num_cached_tokens = (length - 1) // _BLOCK_SIZE * _BLOCK_SIZE if round_name == "again" else 0
                assert answer.timings("prefill").num_cached_tokens == num_cached_tokens
                assert answer.timings("decode").num_cached_tokens == 0
                transfer = answer.timings("decode").transfer
                assert transfer is not None
                num_blocks = -(-length // _BLOCK_SIZE) + num_state_blocks
                assert transfer.num_bytes == num_blocks * layout.block_size_bytes
            local = pair.answers[f"{round_name}-local"].token_ids
            assert local == greedy_tokens(directory, tuple(random_prompt(40)), _NUM_TOKENS)
        pair.assert_whole()


@pytest.mark.usefixtures("shared_models")
@pytest.mark.parametrize("family", _ALL)
def test_prefix_hits_go_on_from_snapshots(family: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(family)
    num_blocks = 100 + 12 * _layout(directory).num_state_blocks
    config = engine_config(
        directory,
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        overlap=True,
    )
    shared = random_prompt(24)
    prompts = {name: shared + random_prompt(20, seed=seed) for seed, name in enumerate(("first", "second", "third"))}
    with EnginePair(config, config) as pair:
        for name, prompt in prompts.items():
            pair.submit("decode", name, prompt, _GREEDY)
            pair.run()
        # The second prompt shows that its beginning is shared, so a snapshot is taken there.
        assert [pair.answers[name].timings("decode").num_cached_tokens for name in prompts] == [0, 0, 24]
        prompts["longer"] = prompts["third"] + pair.answers["third"].token_ids + random_prompt(3)
        pair.submit("decode", "longer", prompts["longer"], _GREEDY)
        pair.run()
        assert pair.answers["longer"].timings("decode").num_cached_tokens == 40
        # Several that are cached go on in one step, beside one that is not.
        prompts["new"] = random_prompt(30, seed=9)
        for name, prompt in prompts.items():
            pair.submit("decode", f"again-{name}", prompt, _GREEDY)
        pair.run()
        for name, prompt in prompts.items():
            right = greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)
            assert pair.answers[f"again-{name}"].token_ids == right
            assert name == "new" or pair.answers[name].token_ids == right
        assert pair.engines["decode"].make_stats().prefix_cache_stats.hits == 24 + 40 + 3 * 40 + 56
        pair.assert_whole()


@pytest.mark.usefixtures("shared_models")
@pytest.mark.parametrize("family", _ALL)
def test_a_prompt_beside_the_same_one_goes_on_from_a_snapshot_and_not_from_a_copied_tail(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(family)
    num_blocks = 100 + 8 * _layout(directory).num_state_blocks
    config = engine_config(directory, block_size=_BLOCK_SIZE, num_blocks=num_blocks, max_num_seqs=8)
    # One prompt ends in the middle of a block, the other one fills its last block.
    prompts = {"in a block": random_prompt(30), "at its end": random_prompt(32, seed=1)}
    with EnginePair(config, config) as pair:
        for name, prompt in prompts.items():
            pair.submit("decode", name, prompt, _GREEDY)
        pair.run(lambda: all(len(pair.answers[name].token_ids) >= 2 for name in prompts))
        # The first ones go on writing the blocks in which the prompts end.
        assert all(len(pair.answers[name].token_ids) < _NUM_TOKENS for name in prompts)
        for name, prompt in prompts.items():
            pair.submit("decode", f"again, {name}", prompt, _GREEDY)
        pair.run()
        for name, prompt in prompts.items():
            right = greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)
            assert pair.answers[name].token_ids == pair.answers[f"again, {name}"].token_ids == right
            assert pair.answers[f"again, {name}"].timings("decode").num_cached_tokens == 24
        pair.assert_whole()


@pytest.mark.more
@pytest.mark.usefixtures("shared_models")
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_preempted_request_gives_the_same_tokens(family: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(family)
    num_state_blocks = _layout(directory).num_state_blocks
    # Two requests find room, and not for all of their outputs.
    config = engine_config(directory, block_size=_BLOCK_SIZE, num_blocks=13 + 2 * num_state_blocks, overlap=True)
    # Recomputed states differ by up to 1e-4 in logits: of these prompts no two best tokens of any family are as close.
    prompts = {f"r{index}": random_prompt(26 + index, seed=40 + index) for index in range(4)}
    greedy = replace(_GREEDY, max_tokens=30)
    with EnginePair(config, config) as pair:
        for name, prompt in prompts.items():
            pair.hand_over(name, prompt, greedy)
        pair.run()
        for name, prompt in prompts.items():
            assert pair.answers[name].token_ids == greedy_tokens(directory, tuple(prompt), 30)
        assert pair.engines["decode"].make_stats().num_preemptions > 0
        pair.assert_whole()


@pytest.mark.more
@pytest.mark.usefixtures("shared_models")
@pytest.mark.parametrize("family", ["bamba", "mamba2", "qwen3_next", "lfm2"])
def test_a_request_goes_on_elsewhere_from_its_tokens(family: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(family)
    num_blocks = 64 + 4 * _layout(directory).num_state_blocks
    config = engine_config(directory, block_size=_BLOCK_SIZE, num_blocks=num_blocks)
    prompt = random_prompt(40)
    with EnginePair(config, config) as pair:
        pair.submit("decode", "first", prompt, _GREEDY)
        pair.run()
        known = pair.answers["first"].token_ids[:5]
        # Nothing is sent, since the other engine has kept no state after as many of these tokens.
        source = PrefixSource(pair.addresses["decode"], 1000)
        pair.submit("prefill", "moved", prompt, _GREEDY, source, output_token_ids=known)
        pair.run()
        assert pair.answers["moved"].token_ids == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)
        assert pair.engines["prefill"].make_stats().prefix_cache_stats.loaded == 0
        pair.assert_whole()


@pytest.mark.usefixtures("shared_models")
@pytest.mark.parametrize("family", _MOVED)
def test_the_state_of_a_preempted_request_moves_behind_its_blocks(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(family)
    num_state_blocks = _layout(directory).num_state_blocks
    # Both have 4 blocks when the later one stops, and 3 are left: the first one ends with 2 of these.
    config = engine_config(directory, block_size=_BLOCK_SIZE, num_blocks=11 + 2 * num_state_blocks, overlap=True)
    prompts = {"first": random_prompt(26), "stopped": random_prompt(26, seed=1)}
    first, greedy = replace(_GREEDY, max_tokens=20), replace(_GREEDY, max_tokens=30)
    with EnginePair(config, config) as pair:
        pair.submit("decode", "first", prompts["first"], first)
        pair.submit("decode", "stopped", prompts["stopped"], greedy)
        stopped = pair.answers["stopped"]
        pair.run(lambda: bool(stopped.preemptions))
        num_tokens = stopped.preemptions[0].num_computed_tokens
        assert num_tokens == 26 + len(stopped.token_ids) - 1 == 32
        source = PrefixSource(pair.addresses["decode"], num_tokens)
        pair.submit("prefill", "moved", prompts["stopped"], greedy, source, output_token_ids=stopped.token_ids)
        pair.run()
        right = greedy_tokens(directory, tuple(prompts["stopped"]), 30)
        assert pair.answers["moved"].token_ids == stopped.token_ids == right
        assert pair.answers["first"].token_ids == greedy_tokens(directory, tuple(prompts["first"]), 20)
        # Nothing was computed a second time, at either engine.
        assert pair.engines["prefill"].make_stats().prefix_cache_stats.fetched == num_tokens
        assert pair.answers["moved"].timings("prefill").num_prompt_tokens_computed == 0
        assert pair.answers["stopped"].timings("decode").num_prompt_tokens_computed == 26
        pair.assert_whole()


def test_what_does_not_go_with_states_is_refused_by_name(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("bamba")
    config = engine_config(directory)
    speculative = config.scheduler.model_copy(update={"speculative": SpeculativeConfig(num_tokens=2)})
    with pytest.raises(UnsupportedModel, match="a rejected draft's tokens cannot be taken back"):
        LoadedRunner.load(config.model, config.cache, speculative, config.parallel)
    loaded = LoadedRunner.load(config.model, config.cache, config.scheduler, config.parallel)
    with pytest.raises(UnsupportedModel, match="adapters are not served with models that keep recurrent states"):
        loaded.enable_lora(LoraConfig(), lambda: None)
    stored = KVTransferConfig(transport="loopback", cpu_cache_gib=0.05)
    engine = engine_config(directory, transfer=stored)
    with pytest.raises(UnsupportedModel, match=r"without KV stores \(unset kv_transfer.cpu_cache_gib and"):
        EnginePair(engine, engine)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_several_ranks_and_drafts_are_refused_before_anything_starts(family: str) -> None:
    config = family_config(family)
    assert reason_in_config(config) is None
    assert reason_on_ranks(config, 1) is None
    assert "does not split its recurrent layers: tensor_parallel_size is 2" in str(reason_on_ranks(config, 2))
    assert "keeps recurrent states" in str(reason_against_drafts(config))


def test_engines_that_exchange_states_need_blocks_of_one_size(checkpoint: Callable[[str], Path]) -> None:
    layout = _layout(checkpoint("bamba"))
    facts = PairingFacts.of_rank(layout, "tcp", checksum=False, is_on_gpu=False)
    larger = PairingFacts.of_rank(replace(layout, block_size=16), "tcp", checksum=False, is_on_gpu=False)
    assert find_mismatch(facts, facts, "a", "b") is None
    assert "block_size: 8 at a, 16 at b" in str(find_mismatch(facts, larger, "a", "b"))
    without = PairingFacts.of_rank(replace(layout, further_groups=()), "tcp", checksum=False, is_on_gpu=False)
    assert "further groups of layers" in str(find_mismatch(facts, without, "a", "b"))
