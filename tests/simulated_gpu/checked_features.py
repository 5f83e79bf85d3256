"""Images, grammars and adapters on the simulated GPU; test_simulated_gpu.py starts them in a process of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.lora_config import LoraConfig
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.actors.test_images import Case, One
from tests.actors.test_structured_output import PROMPTS, expected_tokens, params_of
from tests.adapters import adapted_tokens, adapter_of, make_adapter
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt
from tests.simulated_gpu.device import install
from tests.simulated_gpu.tensors import SIMULATION
from tests.structured import compiling_in_process

CheckpointOf = Callable[[str], Path]
DEVICE = install()
WAITS_OF_A_STEP = {"actors/model/sampling/transfers.py:wait"}
"""A step waits for what the sampler has computed, and for nothing else."""


@pytest.fixture(autouse=True)
def _no_processes() -> Iterator[None]:
    with compiling_in_process():
        yield


@pytest.mark.parametrize("overlap", [False, True])
def test_grammar_masks_are_uploaded_without_a_wait(overlap: bool, checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    expected = expected_tokens(directory)
    config = engine_config(directory, block_size=8, overlap=overlap)
    with EnginePair(config, config) as pair:
        SIMULATION.take_waits()
        for name, prompt in PROMPTS.items():
            pair.hand_over(name, prompt, params_of(name))
        pair.run()
        assert set(SIMULATION.take_waits()) == WAITS_OF_A_STEP
        assert {name: pair.answers[name].token_ids for name in PROMPTS} == expected


def test_eager_steps_with_adapters_wait_for_their_tokens_only(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = checkpoint("llama")
    adapters = {name: make_adapter(directory, tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    lora = LoraConfig(
        allowed_directories=(str(tmp_path),),
        max_lora_rank=8,
        adapters={name: str(path) for name, path in adapters.items()},
    )
    stepper = Stepper(make_runner(directory, lora=lora))
    prompt = random_prompt(20)
    for name in ("a", "b", "base"):
        key = adapter_of(adapters[name], name).key if name in adapters else None
        stepper.add(name, Sequence(prompt, lora_name=key))
    SIMULATION.take_waits()
    outputs = stepper.run(num_output_tokens=8)
    assert set(SIMULATION.take_waits()) == WAITS_OF_A_STEP
    assert outputs["base"] == greedy_tokens(directory, tuple(prompt), 8)
    for name, path in adapters.items():
        assert outputs[name] == adapted_tokens(directory, path, prompt, 8)


def test_images_are_uploaded_and_inserted_without_a_wait(checkpoint: CheckpointOf) -> None:
    case = Case(checkpoint("llava"), "llava")
    engine = One(engine_config(case.directory, block_size=8, max_num_seqs=4, max_num_batched_tokens=64))
    asked = {"one": (1,), "two": (2, 3), "text": ()}
    requests = [case.request(name, seeds) for name, seeds in asked.items()]
    SIMULATION.take_waits()
    answers = engine.run(*requests)
    assert set(SIMULATION.take_waits()) == WAITS_OF_A_STEP
    assert answers == {name: case.expected(seeds) for name, seeds in asked.items()}
    engine.core.shutdown()
