"""An MXFP4 checkpoint is served with the weights that its 4-bit numbers and scales stand for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.config import ModelConfig
from actors.model.dequantizing import refuse_other_dtype
from actors.model.errors import UnsupportedModel
from actors.model.loader import load_model
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.checkpoints import family_config, make_checkpoint
from tests.reference import greedy_tokens, random_prompt

CheckpointOf = Callable[[str], Path]

_FP4: Final = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of four bits that the format has: a sign, two bits of exponent, one of mantissa."""
_QUANTIZED: Final = ("gate_up_proj", "down_proj")


def make_mxfp4_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Write a gpt-oss checkpoint with quantized experts; returns the experts' weights as the format defines them."""
    make_checkpoint("gpt_oss", directory, hidden_size=64, intermediate_size=64)
    weights, expected = load_file(directory / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith(_QUANTIZED)]:
        num_experts, num_inputs, num_outputs = weights.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32, 16)
        blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape[:3], generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        # A byte has two numbers, the lower four bits first; 32 numbers share a scale.
        numbers = torch.stack([_FP4[(blocks & 15).long()], _FP4[(blocks >> 4).long()]], dim=-1).flatten(-2)
        scaled = numbers * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = scaled.flatten(-2).transpose(1, 2)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    settings = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(settings))
    return expected


def test_the_weights_are_those_that_the_format_defines_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make_mxfp4_checkpoint(tmp_path)
    with caplog.at_level(logging.WARNING, "actors.model"):
        loaded = load_model(ModelConfig(model=str(tmp_path), dtype="float32", device="cpu"))
    assert len(expected) == 6
    weights = dict(loaded.forward.model.named_parameters())
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)
    [record] = [record for record in caplog.records if "quantization" in vars(record)]
    assert record.message == "the checkpoint's weights are dequantized while they are read, to the size of plain ones"
    assert vars(record)["quantization"] == "MXFP4"


def test_its_tokens_equal_generate(tmp_path: Path) -> None:
    make_mxfp4_checkpoint(tmp_path)
    stepper = Stepper(make_runner(tmp_path))
    for length in (7, 33):
        stepper.add(str(length), Sequence(random_prompt(length)))
    for name, tokens in stepper.run(num_output_tokens=8, chunk=10).items():
        assert tokens == greedy_tokens(tmp_path, tuple(random_prompt(int(name))), 8)


def test_a_plain_checkpoint_is_read_as_it_is(checkpoint: CheckpointOf, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "actors.model"):
        load_model(ModelConfig(model=str(checkpoint("gpt_oss")), dtype="float32", device="cpu"))
    assert "dequantized" not in caplog.text


def test_torchaos_layers_in_another_dtype_are_refused_with_the_setting_that_serves_them() -> None:
    config = family_config("llama", dtype=torch.bfloat16, quantization_config={"quant_method": "torchao"})
    for wanted in (None, torch.bfloat16):
        refuse_other_dtype(config, wanted)
    with pytest.raises(
        UnsupportedModel, match=r"compute in bfloat16.* model.dtype is float32: set model.dtype to auto"
    ):
        refuse_other_dtype(config, torch.float32)
    config.quantization_config = {"quant_method": "mxfp4"}
    refuse_other_dtype(config, torch.float32)
