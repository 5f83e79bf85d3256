"""PEFT's settings: those that are served, and why the rest is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.checkpoint.peft_config import AdapterConfig, AdapterRefused

PLAIN: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "target_modules": ["q_proj"]}


def parse(**settings: Any) -> AdapterConfig:
    return AdapterConfig.parse(json.dumps(PLAIN | settings).encode(), max_rank=16)


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({"lora_alpha": 16}, 2.0),
        ({"lora_alpha": 16, "r": 4}, 4.0),
        ({"lora_alpha": 16, "r": 4, "use_rslora": True}, 8.0),
        ({"lora_alpha": 16, "rank_pattern": {"q_proj": 2}}, 8.0),
        ({"lora_alpha": 16, "alpha_pattern": {"layers.3.*q_proj": 4}}, 0.5),
        ({"lora_alpha": 16, "alpha_pattern": {"layers.4.*q_proj": 4}}, 2.0),
    ],
)
def test_scaling_is_alpha_over_rank(settings: dict[str, Any], scaling: float) -> None:
    assert parse(**settings).scaling_of("model.layers.3.self_attn.q_proj") == scaling


@pytest.mark.parametrize(
    ("target_modules", "module", "is_target"),
    [
        (["q_proj"], "model.layers.0.self_attn.q_proj", True),
        (["proj"], "model.layers.0.self_attn.q_proj", False),
        (["self_attn.q_proj"], "model.layers.0.self_attn.q_proj", True),
        (r".*\.layers\.[01]\..*q_proj", "model.layers.0.self_attn.q_proj", True),
        (r".*\.layers\.[01]\..*q_proj", "model.layers.2.self_attn.q_proj", False),
        (r"q_proj", "model.layers.2.self_attn.q_proj", False),
        ("all-linear", "model.layers.2.self_attn.q_proj", True),
    ],
)
def test_target_modules_are_endings_of_names_or_a_pattern_for_all_of_it(
    target_modules: Any, module: str, is_target: bool
) -> None:
    assert parse(target_modules=target_modules).targets(module) == is_target


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "IA3"}, "only LORA is served"),
        ({"task_type": "SEQ_CLS"}, "only CAUSAL_LM is served"),
        ({"r": 17}, "its rank is 17, and lora.max_lora_rank allows 16"),
        ({"rank_pattern": {"q_proj": 32}}, "its rank is 32"),
        ({"rank_pattern": {"q_proj": "high"}}, "which is no rank"),
        ({"alpha_pattern": {"q_proj": None}}, "which is no number"),
        ({"bias": "lora_only"}, "bias: lora_only"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "embeddings"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed base weights"),
        ({"use_something_new": True}, "it uses use_something_new, which is not served"),
        ({"target_modules": None}, "no target_modules"),
        ({"target_modules": "("}, "not a regular expression"),
        ({"r": 0}, "r: Input should be greater than or equal to 1"),
    ],
)
def test_the_rest_is_refused_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(AdapterRefused, match=reason):
        parse(**settings)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json: file: Invalid JSON"):
        AdapterConfig.parse(b"{", max_rank=16)


def test_options_that_change_nothing_are_passed_over() -> None:
    options = {"lora_dropout": 0.1, "inference_mode": True, "peft_version": "0.21.2", "fan_in_fan_out": True}
    assert parse(**options, eva_config=None, use_dora=False, init_lora_weights="gaussian") == parse()
