"""Greedy float32 tokens over a prefill and a decode engine equal transformers' generate(), token for token."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.core.requests.request import RequestStatus
from actors.core.requests.sampling_params import SamplingParams
from tests.checkpoints import FAMILIES, FURTHER_FAMILIES, LATENT_FAMILIES
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt

pytestmark = pytest.mark.usefixtures("shared_models")

_NUM_TOKENS = 8
_LONGEST = 56
_PREFIX_LENGTH = 40
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
_CheckpointOf = Callable[[str], Path]

_COMBINATIONS = [*itertools.product((8, 16, 32), (1, 2, 7), (False,)), (16, 1, True), (8, 7, True)]
"""Block size, number of chunks of the longest prompt, overlap."""
_EACH_ONCE = [(32, 2, False), (16, 1, False), (8, 7, True)]
_SETTINGS = (
    [
        pytest.param(family, *chosen, marks=[] if family == "llama" or chosen in _EACH_ONCE else pytest.mark.slow)
        for family, chosen in itertools.product(FAMILIES, _COMBINATIONS)
    ]
    + [
        pytest.param(family, *chosen, marks=pytest.mark.more)
        for family, chosen in itertools.product(FURTHER_FAMILIES, _EACH_ONCE)
    ]
    + [
        pytest.param(family, *chosen, marks=pytest.mark.slow)
        for family, chosen in itertools.product(LATENT_FAMILIES, _COMBINATIONS)
    ]
)
"""Blocks and chunks work alike in all families: one has all combinations, and every one meets each of them once."""
_SHARED_PREFIX = (
    [pytest.param(family, 8) for family in FAMILIES]
    + [pytest.param(family, 8, marks=pytest.mark.more) for family in FURTHER_FAMILIES]
    + [pytest.param(family, 8, marks=pytest.mark.slow) for family in LATENT_FAMILIES]
    + [
        pytest.param(family, 16, marks=[] if family == "llama" else pytest.mark.slow)
        for family in (*FAMILIES, *FURTHER_FAMILIES)
    ]
)
"""Blocks of 16, here and below, are for the backend that reads no smaller ones: see test_equality_by_backend.py."""
_PREEMPTED = (
    [
        pytest.param(family, 8, overlap, marks=[] if family == "llama" or overlap else pytest.mark.slow)
        for family, overlap in itertools.product(FAMILIES, (False, True))
    ]
    + [pytest.param(family, 8, True, marks=pytest.mark.more) for family in FURTHER_FAMILIES]
    + [
        pytest.param(family, 8, True, marks=pytest.mark.more if family == "deepseek_v3" else pytest.mark.slow)
        for family in LATENT_FAMILIES
    ]
    + [
        pytest.param(family, 16, True, marks=[] if family == "llama" else pytest.mark.slow)
        for family in (*FAMILIES, *FURTHER_FAMILIES)
    ]
)
"""Block size, overlap."""


def _prompts(count: int, *, shared_prefix: bool = False) -> dict[str, list[int]]:
    """Prompts from one token to the longest; with a shared prefix, all of them begin alike."""
    lengths = [_LONGEST - (index * 11) % _LONGEST for index in range(count)]
    prefix = random_prompt(_PREFIX_LENGTH, seed=99) if shared_prefix else []
    return {f"r{index}": prefix + random_prompt(length, seed=index) for index, length in enumerate(lengths)}


def _check(directory: Path, pair: EnginePair, prompts: dict[str, list[int]]) -> None:
    for request_id, prompt in prompts.items():
        pair.hand_over(request_id, prompt, _GREEDY)
    pair.run()
    for request_id, prompt in prompts.items():
        assert pair.answers[request_id].token_ids == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS), request_id
    pair.assert_whole()


@pytest.mark.parametrize(("family", "block_size", "num_chunks", "overlap"), _SETTINGS)
def test_handed_over_tokens_equal_generate(
    family: str, block_size: int, num_chunks: int, overlap: bool, checkpoint: _CheckpointOf
) -> None:
    directory = checkpoint(family)
    budget = -(-_LONGEST // num_chunks)
    config = engine_config(
        directory,
        block_size=block_size,
        max_num_seqs=min(32, budget),
        max_num_batched_tokens=budget,
        overlap=overlap,
    )
    with EnginePair(config, engine_config(directory, block_size=block_size, overlap=overlap)) as pair:
        _check(directory, pair, _prompts(1))
        pair.answers.clear()
        _check(directory, pair, {f"again-{name}": prompt for name, prompt in _prompts(16).items()})
        assert RequestStatus.WAITING_FOR_REMOTE_KVS in pair.seen_statuses


@pytest.mark.parametrize(("family", "block_size"), _SHARED_PREFIX)
def test_a_shared_prefix_is_computed_and_moved_once(family: str, block_size: int, checkpoint: _CheckpointOf) -> None:
    directory = checkpoint(family)
    prompts = _prompts(8, shared_prefix=True)
    config = engine_config(directory, block_size=block_size, max_num_batched_tokens=64)
    num_shared = _PREFIX_LENGTH // block_size
    with EnginePair(config, config) as pair:
        first = dict([next(iter(prompts.items()))])
        _check(directory, pair, first)
        pair.answers.clear()
        rest = {name: prompt for name, prompt in prompts.items() if name not in first}
        _check(directory, pair, rest)
        for request_id in rest:
            transfer = pair.answers[request_id].timings("decode").transfer
            assert transfer is not None
            assert transfer.num_blocks <= -(-len(rest[request_id]) // block_size) - num_shared, (
                "the prefix's blocks moved again"
            )
            assert pair.answers[request_id].timings("prefill").num_cached_tokens >= num_shared * block_size


@pytest.mark.parametrize(("family", "block_size", "overlap"), _PREEMPTED)
def test_preempted_requests_give_the_same_tokens(
    family: str, block_size: int, overlap: bool, checkpoint: _CheckpointOf
) -> None:
    directory = checkpoint(family)
    prompts = {f"r{index}": random_prompt(26 + index, seed=index) for index in range(4)}
    num_tokens = 40
    prefill = engine_config(directory, block_size=block_size, overlap=overlap)
    # Each request begins with 4 blocks of 8 tokens and ends with 9, or with 2 of 16 and 5: the pool holds all the
    # prompts, but not two requests' outputs.
    decode = engine_config(directory, block_size=block_size, num_blocks={8: 17, 16: 9}[block_size], overlap=overlap)
    with EnginePair(prefill, decode) as pair:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for request_id, prompt in prompts.items():
            pair.hand_over(request_id, prompt, params)
        pair.run()
        for request_id, prompt in prompts.items():
            expected = greedy_tokens(directory, tuple(prompt), num_tokens)
            assert pair.answers[request_id].token_ids == expected, request_id
        assert pair.engines["decode"].make_stats().num_preemptions > 0
        pair.assert_whole()


def test_the_decode_engine_computes_no_prompt_token_of_a_handed_over_request(checkpoint: _CheckpointOf) -> None:
    config = engine_config(checkpoint("llama"), block_size=16)
    with EnginePair(config, config) as pair:
        for request_id, prompt in _prompts(16).items():
            pair.hand_over(request_id, prompt, _GREEDY)
        pair.run()
        assert pair.engines["decode"].make_stats().num_prompt_tokens_computed == 0
        for answer in pair.answers.values():
            assert answer.timings("decode").num_prompt_tokens_computed == 0
            statuses = [change.status for change in answer.timings("decode").status_changes]
            assert statuses[:3] == [
                RequestStatus.WAITING,
                RequestStatus.WAITING_FOR_REMOTE_KVS,
                RequestStatus.WAITING,
            ]
            assert statuses[3] is RequestStatus.RUNNING


def test_sampled_tokens_depend_neither_on_the_handoff_nor_on_overlap(checkpoint: _CheckpointOf) -> None:
    directory = checkpoint("llama")
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=20, ignore_eos=True, presence_penalty=0.5)
    answers = []
    for num_neighbours, overlap in ((0, False), (5, False), (5, True)):
        config = engine_config(directory, overlap=overlap)
        with EnginePair(config, config) as pair:
            for index in range(num_neighbours):
                pair.hand_over(f"n{index}", random_prompt(20, seed=index), _GREEDY)
            pair.hand_over("r", random_prompt(33), params)
            pair.run()
            answers.append(pair.answers["r"].token_ids)
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 5
