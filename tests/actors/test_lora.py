"""Requests with LoRA adapters say what generate() says after PEFT has merged theirs, whoever shares their batch.

Tests of actors/model/lora/store.py.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors.checkpoint.adapter_files import AdapterFiles, read_adapter
from actors.checkpoint.peft_config import AdapterRefused
from actors.config import EngineConfig, SpeculativeConfig
from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.sampling_params import PoolingParams, SamplingParams
from actors.lora_config import LoraConfig
from actors.model.lora import store
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.actors.test_multi_rank_engine import running
from tests.actors.test_pooling import pooling_request, vector_of
from tests.adapters import EVERY_LINEAR_LAYER, adapted_tokens, adapter_of, make_adapter, merged_checkpoint
from tests.engine_pair import Answer, EnginePair, engine_config
from tests.pooled import embedding_of
from tests.rank_threads import RankThreads
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


def lora_config(adapters: dict[str, Path], /, **settings: object) -> LoraConfig:
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


def test_an_adapter_that_cannot_be_loaded_ends_its_requests_alone(
    checkpoint: CheckpointOf, adapters: dict[str, Path], tmp_path: Path
) -> None:
    llama = checkpoint("llama")
    good = adapter_of(adapters["small"])
    broken = shutil.copytree(adapters["small"], tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"no safetensors")
    changed = shutil.copytree(adapters["small"], tmp_path / "changed")
    before = adapter_of(changed)
    shutil.copytree(adapters["stable"], changed, dirs_exist_ok=True)
    unfit = make_adapter(checkpoint("qwen3"), tmp_path / "unfit", r=2)
    high = make_adapter(llama, tmp_path / "high", r=16)
    outside = replace(good, directory=str(shutil.copytree(adapters["small"], tmp_path / "secret")))
    allowed = (*(str(one) for one in (adapters["small"].parent, broken, changed, unfit, high)),)
    config = with_lora(engine_config(llama), lora_config(adapters, allowed_directories=allowed))
    prompt = random_prompt(30)
    with EnginePair(config, config) as pair:
        asked = {
            "is broken": adapter_of(broken),
            "are not those that the request means": before,
            "have the shapes": adapter_of(unfit),
            "its rank is 16, and lora.max_lora_rank allows 8": adapter_of(high),
            "is not in lora.allowed_directories": outside,
            "fine": good,
        }
        for reason, adapter in asked.items():
            pair.hand_over(reason, prompt, GREEDY, replace(adapter, name=reason.replace(" ", "-")))
        pair.run()
        for reason in asked.keys() - {"fine"}:
            for engine in ("prefill", "decode"):
                last = pair.answers[reason].last[engine]
                assert reason in (last.error or "")
                assert last.end_cause is EndCause.ADAPTER_AT_FAULT
        assert pair.answers["fine"].token_ids == adapted_tokens(llama, adapters["small"], prompt, NUM_TOKENS)
        stats = pair.engines["decode"].make_stats().adapter_stats
        assert stats is not None
        assert (stats.loaded, stats.num_failed_loads) == (["fine"], 5)
        pair.assert_whole()


def test_new_weights_under_a_name_meet_no_blocks_of_the_old_ones(
    checkpoint: CheckpointOf, adapters: dict[str, Path], tmp_path: Path
) -> None:
    llama = checkpoint("llama")
    config = with_lora(engine_config(llama, block_size=8), lora_config(adapters, allowed_directories=(str(tmp_path),)))
    prompt = random_prompt(33)
    with EnginePair(config, config) as pair:
        for number, name in enumerate(("small", "stable", "small")):
            directory = shutil.copytree(adapters[name], tmp_path / "sql", dirs_exist_ok=True)
            pair.submit("decode", f"{number}", prompt, GREEDY, lora=adapter_of(directory))
            pair.run()
            assert pair.answers[f"{number}"].token_ids == adapted_tokens(llama, adapters[name], prompt, NUM_TOKENS)
        num_cached = [pair.answers[str(number)].timings("decode").num_cached_tokens for number in range(3)]
        assert num_cached == [0, 0, 32], "the old weights' blocks are good for the old weights"
        pair.submit("decode", "none", prompt, GREEDY)
        pair.run()
        assert pair.answers["none"].token_ids == greedy_tokens(llama, tuple(prompt), NUM_TOKENS)


def test_adapters_take_turns_where_an_engine_has_no_room_for_all(
    checkpoint: CheckpointOf, adapters: dict[str, Path]
) -> None:
    llama = checkpoint("llama")
    lora = lora_config(adapters, max_cpu_loras=2, adapters={"patterns": str(adapters["patterns"])})
    config = with_lora(engine_config(llama), lora, max_loras=1)
    prompt = random_prompt(20)
    with EnginePair(config, config) as pair:
        for turn in range(2):
            for name, directory in adapters.items():
                pair.hand_over(f"{name} {turn}", prompt, GREEDY, adapter_of(directory))
        pair.run()
        for name, directory in adapters.items():
            expected = adapted_tokens(llama, directory, prompt, NUM_TOKENS)
            assert [pair.answers[f"{name} {turn}"].token_ids for turn in range(2)] == [expected] * 2
        stats = pair.engines["prefill"].make_stats().adapter_stats
        assert stats is not None
        assert (len(stats.loaded), stats.num_evictions) == (2, stats.num_loads - 1)
        assert stats.num_loads >= 3
        pair.assert_whole()


def test_who_waits_for_an_adapter_holds_nobody_up(
    checkpoint: CheckpointOf, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = checkpoint("llama")
    may_load = threading.Event()

    def read_late(directory: str, limits: LoraConfig) -> AdapterFiles:
        assert may_load.wait(90), "nobody let it"
        return read_adapter(directory, limits)

    monkeypatch.setattr(store, "read_adapter", read_late)
    config = with_lora(engine_config(llama), lora_config(adapters))
    prompt = random_prompt(20)
    with EnginePair(config, config) as pair:
        pair.hand_over("adapted", prompt, GREEDY, adapter_of(adapters["small"]))
        pair.hand_over("plain", prompt, GREEDY)
        pair.run(lambda: pair.answers["plain"].is_finished)
        assert pair.answers["plain"].token_ids == greedy_tokens(llama, tuple(prompt), NUM_TOKENS)
        assert pair.answers["adapted"].token_ids == []
        may_load.set()
        pair.run()
        assert pair.answers["adapted"].token_ids == adapted_tokens(llama, adapters["small"], prompt, NUM_TOKENS)


def test_drafts_are_made_without_the_adapter_and_checked_with_it(
    checkpoint: CheckpointOf, adapters: dict[str, Path]
) -> None:
    llama = checkpoint("llama")
    config = with_lora(engine_config(llama), lora_config(adapters))
    speculative = SpeculativeConfig(method="draft_model", model=str(llama), num_tokens=3, min_acceptance=0.01)
    scheduler = config.scheduler.model_copy(update={"speculative": speculative})
    decode = config.model_copy(update={"scheduler": scheduler})
    prompt = random_prompt(20)
    with EnginePair(config, decode) as pair:
        for name, directory in adapters.items():
            pair.hand_over(name, prompt, GREEDY, adapter_of(directory))
        pair.run()
        for name, directory in adapters.items():
            assert pair.answers[name].token_ids == adapted_tokens(llama, directory, prompt, NUM_TOKENS)
        stats = pair.engines["decode"].make_stats().spec_decoding_stats
        assert stats is not None
        assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_every_rank_adds_its_part(family: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = checkpoint(family)
    adapter = make_adapter(directory, tmp_path / "adapter", seed=5)
    prompt = random_prompt(20)
    config = LoraConfig(allowed_directories=(str(tmp_path),))
    with running(directory, RankThreads, lora=config) as engine:
        for lora in (adapter_of(adapter), None, adapter_of(adapter)):
            tokens = engine.generate(prompt, NUM_TOKENS, lora=lora)
            expected = adapted_tokens(directory, adapter, prompt, NUM_TOKENS)
            assert tokens == (expected if lora else greedy_tokens(directory, tuple(prompt), NUM_TOKENS))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt2", ["c_attn", "mlp.c_proj"]),
        ("opt", ["q_proj", "out_proj", "fc1", "fc2"]),
        ("phi3", ["qkv_proj", "gate_up_proj", "down_proj"]),
        ("gemma3", EVERY_LINEAR_LAYER),
        ("mixtral", ["q_proj", "o_proj"]),
        ("llama4", EVERY_LINEAR_LAYER),
    ],
)
def test_adapters_of_other_families(family: str, targets: list[str], checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = checkpoint(family)
    adapter = make_adapter(directory, tmp_path / "adapter", seed=6, target_modules=targets)
    runner = make_runner(directory, lora=LoraConfig(adapters={"it": str(adapter)}))
    assert runner.adapters is not None
    [loaded] = runner.adapters.configured
    stepper, prompt = Stepper(runner), random_prompt(20)
    stepper.add("plain", Sequence(list(prompt)))
    stepper.add("adapted", Sequence(list(prompt), lora_name=loaded.key))
    answers = stepper.run(num_output_tokens=NUM_TOKENS, chunk=9)
    assert answers == {
        "plain": greedy_tokens(directory, tuple(prompt), NUM_TOKENS),
        "adapted": adapted_tokens(directory, adapter, prompt, NUM_TOKENS),
    }
    runner.adapters.shutdown()


def test_a_configured_adapter_that_cannot_be_loaded_keeps_the_engine_from_starting(
    checkpoint: CheckpointOf, tmp_path: Path
) -> None:
    config = with_lora(engine_config(checkpoint("llama")), LoraConfig(adapters={"sql": str(tmp_path)}))
    with pytest.raises(AdapterRefused, match=r"lora\.adapters\.sql: .*adapter_config\.json cannot be read"):
        EnginePair(config, config)


def test_an_adapter_of_the_layer_that_chooses_experts_is_refused(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = checkpoint("llama4")
    adapter = make_adapter(directory, tmp_path / "adapter", target_modules=["q_proj", "router"])
    with pytest.raises(AdapterRefused, match=r"feed_forward\.router, which in this model is no linear layer that"):
        make_runner(directory, lora=LoraConfig(adapters={"it": str(adapter)}))


def test_embeddings_are_those_of_the_merged_model(checkpoint: CheckpointOf, adapters: dict[str, Path]) -> None:
    llama, prompt = checkpoint("llama"), random_prompt(40)
    config = with_lora(engine_config(llama, block_size=8, max_num_batched_tokens=32), lora_config(adapters))
    with EnginePair(config, config) as pair:
        for name, directory in adapters.items():
            pair.answers[name] = Answer()
            request = pooling_request(name, prompt, PoolingParams(pooling="mean"))
            pair.engines["prefill"].submit(replace(request, lora=adapter_of(directory)))
        pair.run()
        for name, directory in adapters.items():
            expected = embedding_of(merged_checkpoint(llama, directory), prompt, "mean")
            assert vector_of(pair, name) == pytest.approx(expected, abs=2e-5)
