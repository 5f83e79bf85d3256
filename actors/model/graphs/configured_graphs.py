"""Captures the graphs of decode steps that the settings ask for, where the model and its device allow it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from actors.config import ModelConfig
from actors.model.attention.backend import AttentionBackend
from actors.model.attention.batch_plan import begun_blocks, token_slots
from actors.model.attention.static_batch import StaticAttention
from actors.model.compiled.configured_step import compile_steps
from actors.model.graphs.capture_sizes import capture_sizes
from actors.model.graphs.decode_graphs import CaptureLimits, DecodeGraphs, StaticAdapters
from actors.model.graphs.decode_inputs import DecodeStep
from actors.model.graphs.recorder import DeviceGraphRecorder
from actors.model.input_batch import StepInputs
from actors.model.loader import LoadedModel
from kv_transfer.device_kind import device_module, is_accelerator

logger = logging.getLogger(__name__)

_DRAFTS_NOTE: Final = "; steps that verify drafts run eagerly, and so does a draft model"
_GROUPED_MAJORS: Final = (9, 10)
"""The major compute capabilities on which torch multiplies groups of bfloat16 rows without asking the host."""


def capture_graphs(
    config: ModelConfig,
    model: LoadedModel,
    attention: AttentionBackend,
    adapters: StaticAdapters | None,
    say: Callable[[str], None],
    *,
    max_num_seqs: int,
    max_model_len: int,
    has_drafts: bool = False,
) -> tuple[DecodeGraphs | None, str]:
    """Capture graphs within the limits of the settings.

    say: called with how far it is
    has_drafts: whether steps may verify drafts
    Returns the graphs, or None if there are none; and what was captured, or why nothing was, in words. On a CPU the
    step of one token may be compiled instead.
    """
    if not is_accelerator(model.device):
        return None, compile_steps(
            config, model, attention, say, max_model_len=max_model_len, has_adapters=adapters is not None
        )
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
    if not graphs.sizes:
        return None, graphs.summary
    return graphs, graphs.summary + _DRAFTS_NOTE if has_drafts else graphs.summary


def _reason_against(config: ModelConfig, model: LoadedModel, attention: AttentionBackend) -> str | None:
    if config.enforce_eager:
        return "model.enforce_eager is set"
    if not model.forward.generates:
        return "the model does not generate"
    if model.vision_family is not None:
        return "the model takes images, whose positions have three numbers"
    if model.geometry.tp_size > 1:
        return "the model is split over ranks, whose collectives were never captured"
    if (reason := _reason_of_experts(model)) is not None:
        return reason
    return None if isinstance(attention, StaticAttention) else "the attention backend cannot be captured"


def _reason_of_experts(model: LoadedModel) -> str | None:
    """Return why the products of a mixture of experts cannot be captured; None if they can, or if there are none.

    transformers multiplies the rows of all experts by torch's grouped product. Where torch has no kernel for it, torch
    copies the experts' row numbers to the host (GroupedBlas.cpp and GroupedMMUtils.h in torch), and so does
    transformers' loop over experts ("eager").
    """
    implementations = {
        str(getattr(module.config, "_experts_implementation", None))
        for module in model.forward.model.modules()
        if hasattr(module, "is_transposed") and hasattr(module, "is_concatenated")
    }
    if implementations - {"grouped_mm", "batched_mm"}:
        return "the model's experts are computed one by one, after the host has read which are needed"
    if "grouped_mm" not in implementations:
        return None
    major, minor = device_module(model.device).get_device_capability(model.device)
    if model.dtype is torch.bfloat16 and major in _GROUPED_MAJORS:
        return None
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"torch asks the host for the rows of each expert in {dtype} on compute capability {major}.{minor}; "
        "it does not in bfloat16 on 9.x and 10.x"
    )


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
