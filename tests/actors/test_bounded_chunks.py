"""Prompts that are cut to the chunks of an ITL aim give the tokens that they would give uncut.

Tests of actors/engine_builder.py and actors/engine_core.py, as far as they bound chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.config import EngineRoleName
from actors.core.requests.sampling_params import SamplingParams
from actors.core.steps import chunk_budget
from actors.costs.step_cost_fit import StepCostFit
from actors.costs.step_cost_model import Residuals, StepCostModel
from actors.costs.step_shape import FEATURES
from actors.engine_server import EngineServer
from kv_transfer.config import KVTransferConfig
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt
from tests.trusted import TRUST

CheckpointOf = Callable[[str], Path]
NUM_TOKENS = 12
MODEL = StepCostModel(
    tuple({"step": 1e-3, "token": 1e-4, "prefill_pair": 1e-6}.get(name, 0.0) for name in FEATURES),
    (Residuals("decode", 100), Residuals("prefill", 100), Residuals("mixed", 100)),
)


@pytest.mark.parametrize(
    ("itl_s", "role", "most"),
    [
        (None, "decode", 255),
        (1e-4, "decode", 16),
        (1.65e-3, "decode", 22),
        (1.65e-3, "both", 22),
        (1.65e-3, "prefill", 30),
    ],
)
def test_greedy_tokens_do_not_depend_on_the_budget_of_chunks(
    itl_s: float | None, role: EngineRoleName, most: int, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[int] = []
    cap = chunk_budget.StepChunkBudget.cap

    def counting(budget: chunk_budget.StepChunkBudget, num_computed: int, num_new: int) -> int:
        capped = cap(budget, num_computed, num_new)
        if budget.has_decodes:
            chunks.append(capped)
        return capped

    monkeypatch.setattr(chunk_budget.StepChunkBudget, "cap", counting)
    monkeypatch.setattr(StepCostFit, "model", lambda fit: MODEL)
    directory = checkpoint("llama")
    config = engine_config(directory).model_copy(update={"itl_s": itl_s, "role": role})
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = {f"r{index}": random_prompt(5 + 61 * index, seed=index) for index in range(4)}
    with EnginePair(config, config) as pair:
        core = pair.engines["decode"]
        core.make_stats()
        for name, prompt in prompts.items():
            pair.submit("decode", name, prompt, params, None)
        pair.run()
        for name, prompt in prompts.items():
            assert pair.answers[name].token_ids == greedy_tokens(directory, tuple(prompt), NUM_TOKENS), name
    assert max(chunks, default=0) <= most
    assert bool(chunks) is (itl_s is not None)


async def test_an_engine_follows_its_settings_and_a_change_of_its_role(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCostFit, "model", lambda fit: MODEL)
    config = engine_config(checkpoint("llama"), transfer=KVTransferConfig(transport="tcp"))
    engine = EngineServer(config.model_copy(update={"itl_s": 0.05, "role": "both"}), "both-0", 1, TRUST)
    await engine.start("127.0.0.1")
    try:
        budget = engine._core.scheduler.chunk_budget
        assert budget.bound_s == 0.1
        await engine.set_role("prefill")
        assert budget.bound_s == pytest.approx(0.15)
    finally:
        await engine.stop()
