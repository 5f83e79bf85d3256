"""Quantized checkpoints are served as transformers' own model of the same checkpoint computes.

Tests of actors/model/dequantizing.py.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

from actors.config import ModelConfig
from actors.model.config import config_rules
from actors.model.errors import UnsupportedModel
from actors.model.loader import load_model
from tests.actors.model.quantized.checkpoints import (
    TIE,
    assert_served_as_by_transformers,
    compressed_fp8,
    compressed_int4,
    compressed_int8,
    fp8_blocks,
    mxfp8,
)

CheckpointOf = Callable[[str], Path]
FORMATS: Final = [
    pytest.param(fp8_blocks, "FP8", False, id="fp8 blocks"),
    pytest.param(
        partial(compressed_fp8, rounds_inputs=False), "compressed-tensors (float-quantized)", False, id="fp8 weights"
    ),
    pytest.param(mxfp8, "MXFP8", False, id="mxfp8"),
    pytest.param(compressed_int4, "compressed-tensors (pack-quantized)", False, id="w4a16"),
    pytest.param(
        partial(compressed_fp8, rounds_inputs=True), "compressed-tensors (float-quantized)", True, id="fp8 w8a8"
    ),
    pytest.param(compressed_int8, "compressed-tensors (int-quantized)", True, id="int8 w8a8"),
]


def load(checkpoint: Path, dtype: str = "float32") -> nn.Module:
    return load_model(ModelConfig(model=str(checkpoint), dtype=dtype, device="cpu")).forward.model


IN_MORE: Final = ("fp8 weights", "mxfp8", "fp8 w8a8", "int8 w8a8")


@pytest.mark.parametrize(
    ("make", "name", "rounds_inputs"),
    [
        pytest.param(*each.values, id=str(each.id), marks=[pytest.mark.more] if each.id in IN_MORE else [])
        for each in FORMATS
    ],
)
def test_the_answers_are_those_of_transformers_and_a_line_says_what_was_done(
    make: Callable[[Path], Path], name: str, rounds_inputs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "actors.model"):
        assert_served_as_by_transformers(make(tmp_path / "checkpoint"), TIE if rounds_inputs else 0.0)
    told = [record for record in caplog.records if "quantization" in vars(record)]
    assert {vars(record)["quantization"] for record in told} == {name}
    assert all(("round their inputs" in record.message) == rounds_inputs for record in told)


@pytest.mark.parametrize(("make", "name", "rounds_inputs"), FORMATS)
def test_layers_that_round_their_inputs_stay_as_they_are_and_others_are_plain(
    make: Callable[[Path], Path], name: str, rounds_inputs: bool, tmp_path: Path
) -> None:
    model = load(make(tmp_path / "checkpoint"), "bfloat16")
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    assert ("forward" in vars(layer)) == rounds_inputs
    if rounds_inputs:
        assert isinstance(layer, nn.Linear)
        assert layer.weight.dtype is torch.bfloat16, "and it was dequantized before the first forward"
        inputs = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        assert not torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight))


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}, "optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, "gptqmodel"),
    ],
)
def test_where_a_package_is_there_but_does_not_load_transformers_message_names_it(
    settings: dict[str, object], package: str, checkpoint: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config alone refuses a checkpoint whose package is missing: tests/cluster/checks/test_model_check.py."""
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "checkpoint")
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(config_rules, "QUANTIZATION_PACKAGES", {})

    says = rf"not installed \(quantization: {settings['quant_method']}\): .*{package}"
    with pytest.raises(UnsupportedModel, match=says):
        load(directory)
