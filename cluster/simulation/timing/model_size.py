"""A model's size by its config.json: how many weights a token passes through, and how much KV it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.errors import InvalidConfig

_MAX_BYTES: Final = 1 << 24
_MAX_COUNT: Final = 1 << 30
_NUM_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_BYTES: Final = {"fp8": 1.0, "fbgemm_fp8": 1.0, "compressed-tensors": 1.0, "awq": 0.5, "gptq": 0.5, "mxfp4": 0.5}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers of weights of a decoder with grouped-query attention and MLPs of three matrices.

    num_heads, num_kv_heads, head_dim: of attention
    layer_weights:    of one layer, which every token passes through, without experts
    expert_weights:   of one expert of one layer; 0: there are no experts
    num_experts, num_chosen: experts of a layer, and those that a token passes through
    head_weights:     of the output embedding
    bytes_per_weight: of all but the embeddings, which have two bytes each
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_weights: int
    expert_weights: int
    num_experts: int
    num_chosen: int
    head_weights: int
    bytes_per_weight: float

    @property
    def weight_bytes(self) -> float:
        """The bytes of all weights, with an input and an output embedding."""
        per_layer = self.layer_weights + self.num_experts * self.expert_weights
        return self.num_layers * per_layer * self.bytes_per_weight + 2 * 2.0 * self.head_weights

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of one token's KV in all layers, two for each number."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_model_size(directory: Path) -> ModelSize:
    """Read a checkpoint's config.json. Raises InvalidConfig, which names the field."""
    path = directory / "config.json"
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MAX_BYTES))
    except OSError as error:
        raise InvalidConfig(str(path), [f"it cannot be read: {error.strerror}"]) from error
    except ValueError as error:
        raise InvalidConfig(str(path), [f"it is no JSON: {error}"]) from error
    if not isinstance(config, dict):
        raise InvalidConfig(str(path), ["it is no JSON object"])
    text_config = config.get("text_config", config)
    fields = _Fields(path, text_config if isinstance(text_config, dict) else config)
    if fields.values.get("kv_lora_rank") is not None:
        raise InvalidConfig(str(path), ["kv_lora_rank: latent attention has no estimate; give measured times"])
    return _size_of(fields, _bytes_per_weight(config))


def _size_of(fields: _Fields, bytes_per_weight: float) -> ModelSize:
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    head_dim = fields.count("head_dim", max(1, hidden // num_heads))
    intermediate = fields.count("intermediate_size")
    num_experts = max(fields.count(name, 0, least=0) for name in _NUM_EXPERTS)
    layer_weights = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
    expert_weights = num_chosen = 0
    if num_experts:
        expert_size = fields.count("moe_intermediate_size", intermediate)
        expert_weights = 3 * hidden * expert_size
        num_chosen = min(fields.count("num_experts_per_tok"), num_experts)
        shared = fields.count("n_shared_experts", 0, least=0) * expert_size
        shared += fields.count("shared_expert_intermediate_size", 0, least=0)
        layer_weights += hidden * num_experts + 3 * hidden * shared
    else:
        layer_weights += 3 * hidden * intermediate
    return ModelSize(
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer_weights=layer_weights,
        expert_weights=expert_weights,
        num_experts=num_experts,
        num_chosen=num_chosen,
        head_weights=hidden * fields.count("vocab_size"),
        bytes_per_weight=bytes_per_weight,
    )


def _bytes_per_weight(config: Mapping[str, object]) -> float:
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return _BYTES.get(str(method), 2.0)


@dataclass(frozen=True, slots=True)
class _Fields:
    path: Path
    values: Mapping[str, object]

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= _MAX_COUNT:
            raise InvalidConfig(str(self.path), [f"{name}: {value!r} is no whole number of at least {least}"])
        return value
