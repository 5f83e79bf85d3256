"""Checks of a model's files before anything starts: every mistake is a line, and nothing is imported for it twice.

Tests of cluster/checks/model_probe.py, cluster/text/torch_free.py, actors/model/config/setting_rules.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import CONFIG_MAPPING

from actors.config import ModelConfig
from actors.lora_config import LoraConfig
from cluster.checks.model_check import find_adapter_mistakes, find_model_mistakes
from tests.actors.model.config.test_support import REFUSED
from tests.checkpoints import family_config, train_tokenizer

NAME = "parallel.tensor_parallel_size"


def find(directory: Path, size: int = 1, **settings: object) -> list[str]:
    model = ModelConfig.model_validate({"model": str(directory), "load_format": "dummy"} | settings)
    return find_model_mistakes(model, {NAME: size})


DRAFT = "scheduler.speculative.model"


def find_with_draft(directory: Path, draft: Path) -> list[str]:
    model = ModelConfig.model_validate({"model": str(directory), "load_format": "dummy"})
    return find_model_mistakes(model, {NAME: 1}, {DRAFT: str(draft)})


def write_config(directory: Path, **config: object) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    train_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize(
    ("config", "size", "mistake"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 2, None),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 8, None),
        ({"num_attention_heads": 8}, 4, None),
        ({"num_attention_heads": 16}, 6, "its 16 attention heads cannot be shared evenly by 6 ranks"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 24}, 3, "its 8 attention heads cannot"),
        ({"num_attention_heads": 16, "num_key_value_heads": 3, "head_dim": 8}, 4, "its 3 KV heads cannot be shared by"),
        ({"num_attention_heads": 8}, 1, None),
    ],
)
def test_heads_that_ranks_cannot_share_are_a_mistake(
    tmp_path: Path, config: dict[str, object], size: int, mistake: str | None
) -> None:
    found = find(write_config(tmp_path, hidden_size=4096, **config), size)
    if mistake is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"{NAME} = {size}: llama cannot be served so: {mistake}")


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object, not a list"),
        ('{"model_type": "llama", "text_config": "x"}', "text_config must be an object, not a string"),
        ('{"hidden_size": 64}', "cannot be used: Unrecognized model"),
        ('{"model_type": "nothing-like-it"}', "nothing-like-it"),
        ('{"model_type": "llama", "hidden_size": "64"}', "Field 'hidden_size' expected int, got str"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5}', "not a multiple of the number of att"),
        ('{"model_type": "llama", "hidden_act": "frob"}', "an activation that transformers does not know .*'frob'"),
        (
            '{"model_type": "llama", "rope_parameters": {"rope_type": "frob", "rope_theta": 1e4}}',
            "a rotary embedding that transformers does not know .*'frob'",
        ),
        (
            '{"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}',
            "LlamaForTokenClassification cannot be served: a model with this head is not served",
        ),
        (
            '{"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}',
            r"\(awq\), which transformers reads with gptqmodel: not installed; .* 'gptqmodel<7\.7' .* or serve",
        ),
        (
            '{"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}',
            r"quantized \(gptq\), which transformers reads with optimum and gptqmodel: not installed; `pip install ",
        ),
        (
            '{"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}',
            "reads with hqq: not installed, and not tested with raypd; serve the checkpoint without quantiz",
        ),
        (
            '{"model_type": "llama", "quantization_config": {"quant_method": "torchao"}}',
            r"quantized \(torchao\), .* with torchao: not installed; `pip install 'raypd\[quantized\]'` installs it",
        ),
        ('{"model_type": "dots3_note_text"}', "latent attention"),
        ('{"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}, "architectures": ["Y"]}', None),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, mistake: str | None) -> None:
    write_config(tmp_path)
    (tmp_path / "config.json").write_text(text)
    found = find(tmp_path)
    if mistake is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith("model.model: ")
        assert "\n" not in found[0]
        assert re.search(mistake, found[0]), found[0]


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_an_engine_refuses_by_its_config_is_refused_before_anything_starts(
    model_type: str, tmp_path: Path
) -> None:
    settings, reason = REFUSED[model_type]
    CONFIG_MAPPING[model_type](**settings).save_pretrained(tmp_path)
    train_tokenizer().save(str(tmp_path / "tokenizer.json"))

    [mistake] = find(tmp_path)

    assert mistake.startswith("model.model: ")
    assert reason in mistake


def test_quantized_weights_are_refused_on_several_ranks_only(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_config(tmp_path, hidden_size=64, num_attention_heads=4, quantization_config=fp8)

    assert find(tmp_path) == []
    [mistake] = find(tmp_path, 2)
    assert mistake.startswith(f"{NAME} = 2: llama cannot be served so: its weights are quantized (fp8)")


def test_stores_are_refused_by_their_settings_where_a_model_keeps_recurrent_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family_config("bamba").save_pretrained(tmp_path)
    train_tokenizer().save(str(tmp_path / "tokenizer.json"))
    model = ModelConfig.model_validate({"model": str(tmp_path), "load_format": "dummy"})
    names = ("kv_transfer.cpu_cache_gib", "decode.kv_transfer.stores")

    assert find_model_mistakes(model, {NAME: 1}) == []
    [mistake] = find_model_mistakes(model, {NAME: 1}, stores=names)
    assert mistake.startswith(f"{', '.join(names)}: bamba cannot be served so: it keeps recurrent states, without")
    monkeypatch.delitem(sys.modules, "transformers")
    assert find_model_mistakes(model, {NAME: 1}, stores=names) == [mistake], "a child process says the same"


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("llama", None),
        ("gpt_oss", None),
        ("gemma3n", None),
        ("gemma4", "its keys and values, or its layers, differ in their shape, so its blocks travel whole"),
        ("mimo", "its keys and values, or its layers, differ"),
        ("deepseek_v3", "its latent attention (MLA) keeps no values, so its blocks travel whole"),
        ("bamba", "it keeps recurrent states, so its blocks travel whole; give all engines the same block size"),
    ],
)
def test_blocks_of_other_sizes_are_refused_where_they_cannot_be_cut(
    family: str, says: str | None, tmp_path: Path
) -> None:
    family_config(family).save_pretrained(tmp_path)
    train_tokenizer().save(str(tmp_path / "tokenizer.json"))
    model = ModelConfig.model_validate({"model": str(tmp_path), "load_format": "dummy"})
    sizes = {"cache.block_size": 16, "decode.cache.block_size": 32}

    assert find_model_mistakes(model, {NAME: 1}, block_sizes=dict.fromkeys(sizes, 16)) == []
    found = find_model_mistakes(model, {NAME: 1}, block_sizes=sizes)
    if says is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith("cache.block_size = 16, decode.cache.block_size = 32: ")
        assert f"cannot be served so: {says}" in found[0]


def test_stores_go_with_models_whose_layers_differ(tmp_path: Path) -> None:
    family_config("gemma4").save_pretrained(tmp_path)
    train_tokenizer().save(str(tmp_path / "tokenizer.json"))
    model = ModelConfig.model_validate({"model": str(tmp_path), "load_format": "dummy"})
    assert find_model_mistakes(model, {NAME: 1}, stores=("kv_transfer.cpu_cache_gib",)) == []


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    [mistake] = find(tmp_path / "nowhere")
    assert (
        mistake == f"model.model: '{tmp_path}/nowhere' does not exist; it must be a checkpoint in Hugging Face format"
    )
    [mistake] = find(tmp_path)
    assert mistake.startswith(f"model.model: {str(tmp_path)!r} is not a checkpoint")
    write_config(tmp_path)
    [mistake] = find(tmp_path, load_format="auto")
    assert "has no *.safetensors" in mistake
    (tmp_path / "tokenizer.json").unlink()
    [mistake] = find(tmp_path)
    assert "has no tokenizer" in mistake


def test_weights_that_are_cut_short_are_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    write_config(tmp_path)
    whole = (checkpoint("llama") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-10])

    [mistake] = find(tmp_path, load_format="auto")

    assert "by its header it should have" in mistake


def test_a_child_process_says_the_same_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CONFIG_MAPPING["mamba"]().save_pretrained(tmp_path)
    expected = find(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers")

    assert find(tmp_path) == expected != []


def test_other_work_is_done_while_a_child_process_looks_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path)
    model = ModelConfig.model_validate({"model": str(tmp_path), "load_format": "dummy"})
    calls: list[str] = []
    look = partial(find_model_mistakes, model, {NAME: 1}, meanwhile=lambda: calls.append("called"))

    assert look() == []
    assert calls == [], "this process has transformers, so it looks by itself"
    monkeypatch.delitem(sys.modules, "transformers")
    assert look() == []
    assert calls == ["called"]


def test_an_error_of_other_work_is_raised_once_the_child_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path)
    model = ModelConfig.model_validate({"model": str(tmp_path), "load_format": "dummy"})
    monkeypatch.delitem(sys.modules, "transformers")

    def fail() -> None:
        raise RuntimeError("no Ray")

    # Other tests of this process may have started processes that last longer, such as multiprocessing's fork server.
    before = psutil.Process().children()

    with pytest.raises(RuntimeError, match="no Ray"):
        find_model_mistakes(model, {NAME: 1}, meanwhile=fail)
    assert set(psutil.Process().children()) <= set(before)


def test_the_child_process_starts_with_a_copy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's own environment moves in memory when other work sets a variable, also while a child starts."""
    write_config(tmp_path)
    model = ModelConfig.model_validate({"model": str(tmp_path), "load_format": "dummy"})
    monkeypatch.delitem(sys.modules, "transformers")
    is_set, run, environments = threading.Event(), subprocess.run, []

    def run_later(*args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        assert is_set.wait(10)
        environments.append(options["env"])
        return run(*args, **options)

    monkeypatch.setattr(subprocess, "run", run_later)

    def set_variable() -> None:
        monkeypatch.setenv("RAYPD_TEST_OF_MEANWHILE", "1")
        is_set.set()

    assert find_model_mistakes(model, {NAME: 1}, meanwhile=set_variable) == []
    [environment] = environments
    assert "RAYPD_TEST_OF_MEANWHILE" in os.environ.keys() - environment.keys()
    assert environment["PATH"] == os.environ["PATH"]


def test_the_child_process_does_not_load_torch() -> None:
    question = json.dumps({"model": {"model": str(Path(__file__).parent), "load_format": "dummy"}, "sizes": {}})
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cluster.checks.model_probe"],
        input=question,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert json.loads(done.stdout)
    assert not [line for line in done.stderr.splitlines() if line.endswith("| torch")]


@pytest.mark.parametrize(
    ("config", "mistake"),
    [
        ({"vocab_size": 500}, None),
        ({"vocab_size": 400}, "llama cannot be the draft model: it has 400 tokens, and the target model has 500"),
        ({"vocab_size": 500, "hidden_size": "64"}, "Field 'hidden_size' expected int, got str"),
        (
            {"vocab_size": 500, "model_type": "mamba"},
            "mamba cannot be the draft model: it has layers of a kind that is not served",
        ),
        (
            {"vocab_size": 500, "architectures": ["LlamaModel"]},
            "LlamaModel cannot be the draft model: it gives no tokens",
        ),
        (
            {"vocab_size": 500, "quantization_config": {"quant_method": "awq"}},
            "llama cannot be the draft model: its weights are q",
        ),
    ],
)
def test_a_draft_model_is_looked_at_as_the_model_is(
    tmp_path: Path, config: dict[str, object], mistake: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    target = write_config(tmp_path / "target", vocab_size=500)
    draft = write_config(tmp_path / "draft", **config)
    (draft / "tokenizer.json").unlink()

    found = find_with_draft(target, draft)

    if mistake is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"{DRAFT}: ")
        assert mistake in found[0]
    monkeypatch.delitem(sys.modules, "transformers")
    assert find_with_draft(target, draft) == found, "a child process says the same"


def test_a_draft_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    [mistake] = find_with_draft(write_config(tmp_path), tmp_path / "nowhere")
    assert mistake.startswith(f"{DRAFT}: '{tmp_path}/nowhere' does not exist")


def test_an_adapter_is_looked_at_before_any_engine_starts(tmp_path: Path) -> None:
    lora = LoraConfig(adapters={"sql": str(tmp_path), "chat": str(tmp_path / "nothing")}, max_lora_rank=8)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 9, "target_modules": ["q_proj"]}')
    high, missing = find_adapter_mistakes(lora)
    assert high == "lora.adapters.sql: its rank is 9, and lora.max_lora_rank allows 8"
    assert missing.startswith("lora.adapters.chat: ")
    assert missing.endswith("nothing/adapter_config.json cannot be read: No such file or directory")
    assert find_adapter_mistakes(None) == []
