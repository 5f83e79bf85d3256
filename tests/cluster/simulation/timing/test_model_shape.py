"""Tests the reading of a model's shape."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from cluster.errors import InvalidConfig
from cluster.simulation.timing.model_shape import ModelShape, read_model_shape

_FIELDS = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "num_kv_tokens": 41408}


def test_a_shape_is_read_and_other_fields_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(_FIELDS | {"name": "llama"}))
    with caplog.at_level(logging.WARNING):
        shape = read_model_shape(file)
    assert {name: getattr(shape, name) for name in _FIELDS} == _FIELDS
    assert shape.kv_bytes_per_token() == 131_072
    assert "ignored fields of the model's shape: name" in caplog.text


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (json.dumps(_FIELDS | {"num_layers": 0}), "num_layers: Input should be greater than or equal to 1"),
        (json.dumps(_FIELDS | {"head_dim": 1.5}), "head_dim: "),
        (json.dumps({name: _FIELDS[name] for name in list(_FIELDS)[:3]}), "num_kv_tokens: Field required"),
        ("{", "the file: Invalid JSON"),
        ("[]", "the file: "),
    ],
)
def test_a_bad_shape_is_refused_with_its_field(tmp_path: Path, text: str, mistake: str) -> None:
    (tmp_path / "shape.json").write_text(text)
    with pytest.raises(InvalidConfig) as refused:
        read_model_shape(tmp_path / "shape.json")
    assert mistake in str(refused.value)
    with pytest.raises(InvalidConfig, match=r"none\.json: it cannot be read"):
        read_model_shape(tmp_path / "none.json")


def test_a_shape_is_a_value() -> None:
    assert ModelShape(**_FIELDS) == ModelShape(**_FIELDS)
