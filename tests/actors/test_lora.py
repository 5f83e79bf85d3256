"""Requests with LoRA adapters say what generate() says after PEFT has merged theirs, whoever shares their batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.config import EngineConfig
from actors.core.sampling_params import SamplingParams
from actors.lora_config import LoraConfig
from tests.adapters import adapted_tokens, adapter_of, make_adapter
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt

CheckpointOf = Callable[[str], Path]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="session")
def adapters(checkpoint: CheckpointOf, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the llama checkpoint, as unlike as they can be."""
    root, llama = tmp_path_factory.mktemp("adapters"), checkpoint("llama")
    return {
        "small": make_adapter(llama, root / "small", seed=1, r=2, target_modules=["q_proj", "v_proj"]),
        "stable": make_adapter(llama, root / "stable", seed=2, r=4, use_rslora=True),
        "regex": make_adapter(
            llama, root / "regex", seed=3, r=8, target_modules=r".*\.[12]\.(self_attn|mlp)\.[a-z]+_proj"
        ),
        "patterns": make_adapter(
            llama, root / "patterns", seed=4, rank_pattern={"down_proj": 2}, alpha_pattern={"layers.1.*_proj": 3}
        ),
    }


def lora_config(adapters: dict[str, Path], **settings: object) -> LoraConfig:
    allowed = {str(directory.parent) for directory in adapters.values()}
    return LoraConfig.model_validate({"allowed_directories": tuple(allowed), "max_lora_rank": 8} | settings)


def with_lora(config: EngineConfig, lora: LoraConfig, max_loras: int = 4) -> EngineConfig:
    scheduler = config.scheduler.model_copy(update={"max_loras": max_loras})
    return config.model_copy(update={"lora": lora, "scheduler": scheduler})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_loras", [1, 4])
def test_adapters_in_one_batch_after_a_handoff(
    checkpoint: CheckpointOf, adapters: dict[str, Path], max_loras: int, overlap: bool
) -> None:
    llama = checkpoint("llama")
    config = engine_config(llama, block_size=8, max_num_batched_tokens=48, overlap=overlap)
    config = with_lora(config, lora_config(adapters), max_loras)
    prompt = random_prompt(30)
    with EnginePair(config, config) as pair:
        for name, directory in adapters.items():
            pair.hand_over(name, prompt, GREEDY, adapter_of(directory))
        pair.hand_over("none", prompt, GREEDY)
        pair.run()
        answers = {name: answer.token_ids for name, answer in pair.answers.items()}
        expected = {name: adapted_tokens(llama, directory, prompt, NUM_TOKENS) for name, directory in adapters.items()}
        assert answers == expected | {"none": greedy_tokens(llama, tuple(prompt), NUM_TOKENS)}
        assert len({tuple(tokens) for tokens in answers.values()}) == len(answers), "an adapter makes no difference"
        pair.assert_whole()
