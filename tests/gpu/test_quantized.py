"""Quantized checkpoints on a GPU, where transformers would look for kernels: their weights become plain there, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from actors.config import ModelConfig
from actors.model.loader import load_model
from tests.actors.model.quantized.checkpoints import fp8_blocks
from tests.actors.model.test_dequantizing import make_mxfp4_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_blocks_of_fp8_are_dequantized(tmp_path: Path) -> None:
    stored = load_file(fp8_blocks(tmp_path) / "model.safetensors")
    weights = load_weights(tmp_path)
    scales = {name: scale for name, scale in stored.items() if name.endswith(".weight_scale_inv")}
    assert len(scales) == 3 * 7
    for name, scale in scales.items():
        owner = name.removesuffix("_scale_inv")
        expected = stored[owner].float() * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
        torch.testing.assert_close(weights[owner], expected)


def test_mxfp4_is_dequantized(tmp_path: Path) -> None:
    expected = make_mxfp4_checkpoint(tmp_path)
    weights = load_weights(tmp_path)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Load a model, which is run then and compared with transformers' own output, and return its weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {"model": str(checkpoint), "dtype": "float32", "device": device, "weight_packing": "none"}
    loaded = load_model(ModelConfig.model_validate(settings))
    return {name: weight.detach().cpu() for name, weight in loaded.forward.model.named_parameters()}
