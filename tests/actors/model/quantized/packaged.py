"""Checkpoints that bitsandbytes and torchao have written. test_packages.py runs this file where these packages are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from actors.config import ModelConfig
from actors.model.loader import load_model
from tests.actors.model.quantized.checkpoints import TIE, assert_served_as_by_transformers
from tests.checkpoints import make_checkpoint


def torchao(name: str) -> TorchAoConfig:
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(getattr(quantization, name)())


FORMATS: Final[dict[str, Callable[[], Any]]] = {
    "bitsandbytes 8 bits": partial(BitsAndBytesConfig, load_in_8bit=True),
    "bitsandbytes 4 bits": partial(BitsAndBytesConfig, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "torchao 8-bit weights": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao 8-bit weights and inputs": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao FP8 weights": lambda: torchao("Float8WeightOnlyConfig"),
}

ROUNDING: Final = ("bitsandbytes 8 bits", "torchao 8-bit weights and inputs")
"""The formats that round the inputs of layers to 8 bits."""


def write(directory: Path, name: str, dtype: torch.dtype) -> Path:
    plain = make_checkpoint("llama", directory / "plain", hidden_size=64, intermediate_size=128)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype, quantization_config=FORMATS[name]())
    model.save_pretrained(directory / "quantized")
    return directory / "quantized"


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_served_as_by_transformers(name: str, tmp_path: Path) -> None:
    tie = TIE if name in ROUNDING else 0.0
    assert_served_as_by_transformers(write(tmp_path / "float32", name, torch.float32), tie)
    checkpoint = write(tmp_path / "bfloat16", name, torch.bfloat16)
    assert load_model(ModelConfig(model=str(checkpoint), device="cpu")).dtype is torch.bfloat16
