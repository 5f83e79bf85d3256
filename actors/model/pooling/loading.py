"""Finds out which vectors a loaded model gives, and checks its classification head."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.model.attention.probe import GeometryProbe
from actors.model.checks.self_check import stock_attention
from actors.model.config.config_rules import architecture_name
from actors.model.config.model_kind import ModelKind
from actors.model.errors import UnsupportedModel
from actors.model.forward import FlatForward
from actors.model.pooling.head import ClassificationHead
from actors.model.pooling.recipe import read_pooling_facts

logger = logging.getLogger(__name__)

_NUM_PROBE_TOKENS = 4


@torch.inference_mode()
def load_pooling(
    directory: Path, config: PretrainedConfig, kind: ModelKind, forward: FlatForward, *, is_causal: bool
) -> tuple[PoolingFacts | None, ClassificationHead | None]:
    """Return the vectors that the model can be asked for, and its classification head if it has one.

    Raises CheckpointError, or UnsupportedModel for a model that gives neither tokens nor vectors.
    """
    architecture = architecture_name(config)
    hidden_size = _find_hidden_size(forward, architecture)
    if hidden_size is None:
        logger.info(
            "the model gives no embeddings: raypd cannot read its hidden states", extra={"architecture": architecture}
        )
        return None, None
    facts = read_pooling_facts(directory, config, kind, hidden_size, is_causal=is_causal)
    if kind is ModelKind.CLASSIFICATION:
        head = ClassificationHead(forward.model, facts.activation)
        tokens = torch.arange(_NUM_PROBE_TOKENS, device=forward.model.device)
        with stock_attention(forward.model):
            head.check(tokens, forward.stock(tokens))
        return facts, head
    if not facts.embedding_size:
        if kind is ModelKind.EMBEDDING:
            raise UnsupportedModel(architecture, facts.why_no_embeddings)
        logger.warning("the model gives no embeddings", extra={"reason": facts.why_no_embeddings})
    return facts, None


def _find_hidden_size(forward: FlatForward, architecture: str) -> int | None:
    """Return the size of the hidden states; None if a language model does not return them as others do."""
    tokens = torch.arange(_NUM_PROBE_TOKENS, device=forward.model.device)
    taken: list[Tensor] = []
    try:
        forward(tokens, tokens, GeometryProbe(architecture), tokens[-1:], taken.append)
    except (AttributeError, TypeError):
        return None
    return int(taken[0].shape[-1]) if taken and len(taken[0]) == _NUM_PROBE_TOKENS else None
