"""GPTQ and AWQ checkpoints. test_packages.py runs this file where gptqmodel is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file

from actors.config import ModelConfig
from actors.model.loader import load_model
from tests.actors.model.quantized.checkpoints import assert_served_as_by_transformers, awq, gptq
from tests.checkpoints import make_checkpoint

LAYER: Final = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("make", [gptq, awq])
def test_a_checkpoint_is_served_as_by_transformers(make: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "quantized")
    assert_served_as_by_transformers(checkpoint)
    # The checkpoint stands for the weights that were quantized: a number of 4 bits is off by half a step at most, by a
    # whole one if zero points are mistaken. The package rounds what it computes to 16 bits.
    plain = make_checkpoint("llama", tmp_path / "plain", hidden_size=64, intermediate_size=96)
    weight = load_file(plain / "model.safetensors")[f"{LAYER}.weight"]
    loaded = load_model(ModelConfig(model=str(checkpoint), dtype="float32", device="cpu"))
    layer = loaded.forward.model.get_submodule(LAYER)
    assert type(layer).__module__.startswith("gptqmodel."), "the package's own layer computes"
    errors = (layer(torch.eye(96)).T - weight).abs().view(64, -1, 32)
    steps = weight.view(64, -1, 32).abs().amax(dim=2, keepdim=True) / 7
    assert (errors / steps).max() < 0.6


@pytest.mark.parametrize("make", [gptq, awq])
def test_a_checkpoint_is_served_in_bfloat16(make: Callable[[Path], Path], tmp_path: Path) -> None:
    assert load_model(ModelConfig(model=str(make(tmp_path)), dtype="bfloat16", device="cpu")).dtype is torch.bfloat16
