"""Two engines that were given different requests under one ticket never mix them: the consumer computes its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.core.requests.sampling_params import SamplingParams
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt

NUM_TOKENS = 6


def test_another_prompt_of_the_same_length_is_not_taken_over(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("llama")
    prompt, other = random_prompt(40, seed=1), random_prompt(40, seed=2)
    config = engine_config(directory)
    with EnginePair(config, config) as pair:
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        pair.hand_over("r", prompt, sampling, producer_prompt=other)
        pair.run(lambda: "decode" in pair.answers["r"].last)
        assert pair.answers["r"].token_ids == greedy_tokens(directory, tuple(prompt), NUM_TOKENS)
        pair.abort("r")
        pair.run()
        assert all(free == total for free, total in pair.num_free_blocks().values())
