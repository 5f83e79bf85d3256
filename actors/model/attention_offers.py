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
from actors.model.config.config_rules import count_heads, read_config
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
    num_heads, num_kv_heads = count_heads(text)
    geometry = KVGeometry(
        num_heads,
        num_kv_heads,
        getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        (AttentionLayer(index=0, scaling=1.0, softcap=None, sliding_window=None),),
    )
    dtype = _dtype(config, text)
    return AttentionNeeds(choose_device(config.model), dtype, geometry, config.cache.block_size, KeyOrder.PLAIN)


def _dtype(config: EngineConfig, text: PretrainedConfig) -> torch.dtype:
    if config.model.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        return dtype
    named = getattr(text, "dtype", None)
    return named if isinstance(named, torch.dtype) else torch.float32
