"""Requests that share a long prompt give the tokens that they would give alone.

The backend torch reads the common part once; the others read it for each request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.core.requests.sampling_params import SamplingParams
from actors.model.attention import cascade, torch_backend
from actors.model.attention.backend import BackendName
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt

CheckpointOf = Callable[[str], Path]
NUM_TOKENS = 10
COMMON = random_prompt(420)


@pytest.mark.parametrize(("family", "overlap"), [("llama", True), ("gemma2", False)])
def test_a_long_common_prompt_is_read_once(
    family: str, overlap: bool, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    attend = cascade.attend_with_shared_prefix

    def counting(layer, queries, *others):  # type: ignore[no-untyped-def]  # the other's signature
        batches.append(len(queries))
        return attend(layer, queries, *others)

    monkeypatch.setattr(torch_backend, "attend_with_shared_prefix", counting)
    directory = checkpoint(family)
    config = engine_config(directory, overlap=overlap)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = {f"r{index}": COMMON + random_prompt(3 + 5 * index, seed=index) for index in range(6)}
    with EnginePair(config, config) as pair:
        pair.submit("decode", "first", COMMON, params, None)
        pair.run()
        for name, prompt in prompts.items():
            pair.submit("decode", name, prompt, params, None)
        pair.run()
        for name, prompt in prompts.items():
            assert pair.answers[name].token_ids == greedy_tokens(directory, tuple(prompt), NUM_TOKENS), name
        is_torch = pair.engines["decode"].executor.facts.attention_backend == BackendName.TORCH
    assert max(batches, default=0) == (len(prompts) if is_torch else 0)
