"""Writes directories of measured operators whose times are simple sums."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from actors.costs.step_shape import StepShape
from cluster.simulation.timing.model_shape import ModelShape

NUM_LAYERS: Final = 4
SHAPE: Final = ModelShape(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16, num_kv_tokens=4096)
_LAYER_US: Final = {"layernorm": 1.0, "qkv_proj": 3.0, "o_proj": 2.0, "gate_up_proj": 4.0, "down_proj": 5.0}
_MLP: Final = ("gate_up_proj", "down_proj")
_ONCE_US: Final = {"embedding": 7.0, "final_layernorm": 11.0}
_TOKENS: Final = (1, 16, 256, 1024)


def write_ops(directory: Path, *, with_experts: bool = False) -> Path:
    """Write the tables of a model; expected_us() says what they amount to."""
    directory.mkdir(parents=True, exist_ok=True)
    dense = _LAYER_US | _ONCE_US
    if with_experts:
        dense = {name: us for name, us in dense.items() if name not in _MLP}
        moe = [(tokens, num, 20.0 * num) for tokens in (1, 8, 64, 1024) for num in (1, 2, 4, 8) if num <= tokens]
        _write(directory / "moe.csv", ("tokens", "activated_experts", "time_us"), moe)
    rows = [(name, tokens, us * (1 + tokens / 100)) for name, us in dense.items() for tokens in _TOKENS]
    _write(directory / "dense.csv", ("layer", "tokens", "time_us"), rows)
    heads = [(name, num, us * num) for name, us in (("lm_head", 6.0), ("sampler", 1.0)) for num in (1, 8, 64)]
    _write(directory / "per_sequence.csv", ("layer", "sequences", "time_us"), heads)
    keys = itertools.product((0, 16, 256, 1024), (0, 16, 1024), (0, 1, 8, 64), (0, 16, 1024))
    attention = [
        (*key, attention_us(*key))
        for key in keys
        if (key[0] or not key[1]) and bool(key[2]) == bool(key[3]) and (key[0] or key[2])
    ]
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    _write(directory / "attention.csv", columns, attention)
    return directory


def attention_us(chunk: float, before: float, num_decodes: float, context: float) -> float:
    """Return the time of attention in one layer."""
    return 0.05 * chunk + 0.001 * before * bool(chunk) + 0.002 * num_decodes * context


def dense_us(num_tokens: float, num_sequences: float, *, with_experts: bool = False) -> float:
    """Return the time of all that is neither attention nor experts in a step."""
    layer_us = sum(us for name, us in _LAYER_US.items() if not (with_experts and name in _MLP))
    layer_us += _LAYER_US["layernorm"]  # A layer has two.
    return (NUM_LAYERS * layer_us + sum(_ONCE_US.values())) * (1 + num_tokens / 100) + 7.0 * num_sequences


def expected_us(shape: StepShape, chunk: float = 0.0, before: float = 0.0) -> float:
    """Return the time of a step of a model without experts. chunk: the only one; before: tokens before it"""
    context = shape.num_decode_context / shape.num_decodes if shape.num_decodes else 0.0
    attention = attention_us(chunk, before, shape.num_decodes, context)
    return dense_us(shape.num_tokens, shape.num_decodes + shape.num_prefills) + NUM_LAYERS * attention


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
