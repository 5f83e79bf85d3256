"""Each combination of settings and model either has graphs, or says why it has none.

Tests of actors/model/graphs/configured_graphs.py; tests/simulated_gpu/checked.py captures whole models.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from actors.config import ModelConfig
from actors.model.attention.backend import AttentionBackend
from actors.model.graphs import configured_graphs
from actors.model.graphs.configured_graphs import capture_graphs
from actors.model.loader import LoadedModel

GPU = torch.device("meta")
"""Counts as an accelerator, and needs none."""


class CapturedAttention:
    """An attention backend that a graph can record."""

    kv_cache = torch.zeros(4, 1, 1, 2, 16, 8)
    block_size = 16

    def decode(self, batch: object, max_seq_len: int) -> None:
        """Attend to nothing."""


class FakeGraphs:
    """Stands for DecodeGraphs."""

    def __init__(self, *_: object, **__: object) -> None:
        self.sizes = (1, 2)
        self.summary = "for 1, 2 requests"

    def capture(self, *_: object) -> None:
        """Capture nothing."""


class Experts(nn.Module):
    """Has the attributes that transformers gives to a mixture's experts."""

    is_transposed = False
    is_concatenated = True

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(_experts_implementation=implementation)


def model_with(
    *,
    experts: str | None = None,
    device: torch.device = GPU,
    dtype: torch.dtype = torch.bfloat16,
    tp_size: int = 1,
    vision_family: object = None,
    generates: bool = True,
) -> LoadedModel:
    modules = nn.Sequential(*([Experts(experts)] if experts else []))
    model = SimpleNamespace(
        device=device,
        dtype=dtype,
        vocab_size=5,
        vision_family=vision_family,
        geometry=SimpleNamespace(tp_size=tp_size),
        forward=SimpleNamespace(generates=generates, model=modules),
    )
    return cast(LoadedModel, model)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(capability=(9, 0))
    module.get_device_capability = lambda device: module.capability
    monkeypatch.setattr(configured_graphs, "device_module", lambda device: module)
    monkeypatch.setattr(configured_graphs, "DeviceGraphRecorder", lambda device: None)
    monkeypatch.setattr(configured_graphs, "DecodeGraphs", FakeGraphs)
    return module


def capture(
    model: LoadedModel, attention: object = None, *, has_drafts: bool = False, **settings: Any
) -> tuple[object, str]:
    return capture_graphs(
        ModelConfig.model_validate({"model": "m"} | settings),
        model,
        cast(AttentionBackend, CapturedAttention() if attention is None else attention),
        None,
        lambda text: None,
        max_num_seqs=2,
        max_model_len=64,
        has_drafts=has_drafts,
    )


@pytest.mark.parametrize(
    ("model", "attention", "settings", "reason"),
    [
        (model_with(device=torch.device("cpu")), None, {}, "the model is on the cpu"),
        (model_with(), None, {"enforce_eager": True}, "model.enforce_eager is set"),
        (model_with(), None, {"cuda_graph_sizes": (4,)}, "no size is configured"),
        (model_with(), object(), {}, "the attention backend cannot be captured"),
        (model_with(generates=False), None, {}, "the model does not generate"),
        (model_with(vision_family=object()), None, {}, "the model takes images"),
        (model_with(tp_size=2), None, {}, "the model is split over ranks"),
        (model_with(experts="eager"), None, {}, "the model's experts are computed one by one"),
        (model_with(experts="grouped_mm", dtype=torch.float16), None, {}, "in float16 on compute capability 9.0"),
    ],
)
def test_an_engine_without_graphs_says_why(
    model: LoadedModel, attention: object, settings: dict[str, Any], reason: str
) -> None:
    graphs, said = capture(model, attention, has_drafts=True, **settings)
    assert graphs is None
    assert said.startswith("none: ")
    assert reason in said


@pytest.mark.parametrize("experts", [None, "grouped_mm", "batched_mm"])
def test_dense_models_and_experts_without_waits_are_captured(experts: str | None) -> None:
    graphs, said = capture(model_with(experts=experts))
    assert isinstance(graphs, FakeGraphs)
    assert said == "for 1, 2 requests"


@pytest.mark.parametrize(
    ("capability", "is_captured"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_experts_are_captured_where_torch_has_a_kernel_for_them(
    capability: tuple[int, int], is_captured: bool, device: SimpleNamespace
) -> None:
    device.capability = capability
    graphs, said = capture(model_with(experts="grouped_mm"))
    assert (graphs is not None) == is_captured
    assert is_captured or f"compute capability {capability[0]}.{capability[1]}" in said


def test_an_engine_with_drafts_says_which_steps_are_not_replayed() -> None:
    graphs, said = capture(model_with(), has_drafts=True)
    assert graphs is not None
    assert said == "for 1, 2 requests; steps that verify drafts run eagerly, and so does a draft model"
