"""Captures the graphs of decode steps that the settings ask for, where the model and its device allow it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from actors.config import ModelConfig
from actors.model.attention.backend import AttentionBackend
from actors.model.attention.batch_plan import begun_blocks, token_slots
from actors.model.attention.static_batch import StaticAttention
from actors.model.graphs.capture_sizes import capture_sizes
from actors.model.graphs.decode_graphs import CaptureLimits, DecodeGraphs, StaticAdapters
from actors.model.graphs.decode_inputs import DecodeStep
from actors.model.graphs.recorder import DeviceGraphRecorder
from actors.model.input_batch import StepInputs
from actors.model.loader import LoadedModel
from kv_transfer.device_kind import is_accelerator

logger = logging.getLogger(__name__)


def capture_graphs(
    config: ModelConfig,
    model: LoadedModel,
    attention: AttentionBackend,
    adapters: StaticAdapters | None,
    say: Callable[[str], None],
    *,
    max_num_seqs: int,
    max_model_len: int,
) -> tuple[DecodeGraphs | None, str]:
    """Capture graphs within the limits of the settings.

    say: called with how far it is
    Returns the graphs, or None if there are none; and what was captured, or why nothing was, in words.
    """
    if not is_accelerator(model.device):
        return None, f"none: the model is on the {model.device.type}"
    sizes = capture_sizes(config.cuda_graph_sizes, max_num_seqs)
    reason = _reason_against(config, model, attention) or ("no size is configured" if not sizes else None)
    if reason is not None or not isinstance(attention, StaticAttention):
        logger.info("decode steps run eagerly", extra={"reason": reason})
        return None, f"none: {reason}"
    recorder = DeviceGraphRecorder(model.device)
    graphs = DecodeGraphs(
        model.forward,
        attention,
        recorder,
        sizes,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        adapters=adapters,
    )
    graphs.capture(CaptureLimits(config.cuda_graph_time_s, int(config.cuda_graph_memory_gib * (1 << 30))), say)
    return graphs if graphs.sizes else None, graphs.summary


def _reason_against(config: ModelConfig, model: LoadedModel, attention: AttentionBackend) -> str | None:
    if config.enforce_eager:
        return "model.enforce_eager is set"
    if not model.forward.generates:
        return "the model does not generate"
    if model.vision_family is not None:
        return "the model takes images, whose positions have three numbers"
    if model.geometry.tp_size > 1:
        return "the model is split over ranks, whose collectives were never captured"
    return None if isinstance(attention, StaticAttention) else "the attention backend cannot be captured"


def make_decode_step(inputs: StepInputs, block_size: int, adapter_slots: np.ndarray | None) -> DecodeStep:
    """Return a step in which each request computes one token, for a graph. adapter_slots: see DecodeStep"""
    blocks, offsets = token_slots(inputs.shape, block_size)
    return DecodeStep(
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        slots=blocks * block_size + offsets,
        seq_lens=inputs.shape.seq_lens,
        block_tables=inputs.shape.block_tables,
        begun_blocks=begun_blocks(inputs.shape, block_size),
        adapter_slots=adapter_slots,
    )
