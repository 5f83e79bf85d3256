"""Finds out, before a model is loaded, which attention backends of this machine could serve it in which order of keys.

The checkpoint's config gives the number and size of the heads. The self-check comes later, with the model's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from actors.attention_report import AttentionReport, OrderOffer
from actors.config import EngineConfig
from actors.model.attention.backend import AttentionBackendKind, AttentionNeeds
from actors.model.attention.batch_attention import AttentionLayer
from actors.model.attention.choice import KINDS
from actors.model.attention.probe import KVGeometry
from actors.model.cache.kv_groups import LayerGroup, LayerPlane, RecurrentState
from actors.model.config.config_rules import (
    count_layer_heads,
    count_layers,
    has_latents,
    keeps_served_states,
    read_config,
)
from actors.model.errors import ModelError
from actors.model.loader import choose_device
from kv_transfer.layout import KeyOrder


def report_attention(config: EngineConfig, kinds: Sequence[AttentionBackendKind] = KINDS) -> AttentionReport:
    """Return the orders of keys that the configured backend, or any backend with `auto`, reads and writes here."""
    try:
        needs = _needs(config)
    except (ModelError, AttributeError):
        # What is wrong with the checkpoint is told when the model is loaded.
        return AttentionReport(())
    offers: list[OrderOffer] = []
    obstacles: list[str] = []
    for rank, kind in enumerate(kinds):
        if config.cache.attention_backend not in ("auto", kind.name):
            continue
        for key_order in kind.key_orders(needs):
            if (obstacle := kind.find_obstacle(replace(needs, key_order=key_order))) is not None:
                obstacles.append(f"{kind.name}: {obstacle}")
                break
            offers.append(OrderOffer(kind.name.value, key_order.value, rank))
    return AttentionReport(tuple(offers), tuple(obstacles))


def _needs(config: EngineConfig) -> AttentionNeeds:
    checkpoint = read_config(Path(config.model.model), trust_remote_code=config.model.trust_remote_code)
    text = checkpoint.get_text_config(decoder=True)
    shapes = list(dict.fromkeys(_shape(text, layer) for layer in range(count_layers(text))))
    first, *others = shapes
    num_heads, num_kv_heads, key_size, value_size = first
    is_sharing = bool(getattr(text, "num_kv_shared_layers", 0))
    geometry = KVGeometry(
        num_heads,
        num_kv_heads,
        key_size,
        (AttentionLayer(index=0, scaling=1.0, softcap=None, sliding_window=None),),
        value_size=None if value_size == key_size else value_size,
        further_groups=tuple(LayerGroup(1, *shape) for shape in others),
        planes=(LayerPlane(0, 0, 0),) if is_sharing else (),
        state=RecurrentState(()) if keeps_served_states(checkpoint) else None,
    )
    dtype = _dtype(config, text)
    return AttentionNeeds(choose_device(config.model), dtype, geometry, config.cache.block_size, KeyOrder.PLAIN)


def _shape(text: PretrainedConfig, layer: int) -> tuple[int, int, int, int]:
    """Return a layer's heads, KV heads, and the widths of K and V."""
    num_heads, num_kv_heads = count_layer_heads(text, layer)
    if has_latents(text):
        return num_heads, num_kv_heads, int(text.kv_lora_rank) + int(text.qk_rope_head_dim), 0
    own = text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text
    key_size = getattr(own, "head_dim", None) or own.hidden_size // num_heads
    value_size = own.v_head_dim if text.model_type == "mimo_v2_flash" else key_size
    return num_heads, num_kv_heads, int(key_size), int(value_size)


def _dtype(config: EngineConfig, text: PretrainedConfig) -> torch.dtype:
    if config.model.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        return dtype
    named = getattr(text, "dtype", None)
    return named if isinstance(named, torch.dtype) else torch.float32
