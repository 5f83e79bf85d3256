"""Compiles the step of one token if the settings ask for it, and lets the model use it if it gives the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from actors.config import ModelConfig
from actors.model.attention.backend import AttentionBackend
from actors.model.attention.batch_attention import BatchAttention, BatchShape
from actors.model.forward import OneTokenForward
from actors.model.loader import LoadedModel

logger = logging.getLogger(__name__)

_TRIED_TOKENS: Final = 3
"""The number of tokens that are tried at each position."""
_Way = Callable[[Tensor, Tensor, BatchAttention, Tensor], Tensor]
"""A plain or compiled forward: of input_ids, positions, the batch, and indices."""


def compile_steps(
    config: ModelConfig,
    model: LoadedModel,
    attention: AttentionBackend,
    say: Callable[[str], None],
    *,
    max_model_len: int,
    has_adapters: bool,
) -> str:
    """Compile the step of one token of a model on the CPU, if the settings ask for it.

    Call it before any request, with the number of threads of such a step.

    say: called before it begins
    Returns what was compiled, or why nothing was, in words.
    """
    if not config.compile_one_token:
        return f"none: the model is on the {model.device.type}"
    if (reason := _reason_against(config, model, has_adapters=has_adapters)) is None:
        say("compiling the step of one token")
        reason = _compile(model, attention, max_model_len)
    step = model.forward.one_token
    if step is None:
        logger.warning("steps of one token are not compiled", extra={"reason": reason})
        return f"none: {reason}"
    return f"steps of one token, {step.elapsed_s:.0f} s"


def _reason_against(config: ModelConfig, model: LoadedModel, *, has_adapters: bool) -> str | None:
    if config.enforce_eager:
        return "model.enforce_eager is set"
    if not model.forward.generates:
        return "the model does not generate"
    if has_adapters:
        return "the engine takes adapters"
    if model.vision_family is not None:
        return "the model takes images, whose positions have three numbers"
    if model.geometry.tp_size > 1:
        return "the model is split over ranks"
    return model.geometry.irregularity


def _compile(model: LoadedModel, attention: AttentionBackend, max_model_len: int) -> str | None:
    """Let the model use a compiled step, or return why it cannot."""
    # torch's tracer is imported only where the settings ask for it: it would make every start longer.
    from actors.model.compiled.one_token_step import OneTokenStep

    try:
        with torch.inference_mode():
            step = OneTokenStep(model.forward)
            if (position := _differing_position(step, model, attention, max_model_len)) is None:
                model.forward.one_token = step
                return None
    except (RuntimeError, TypeError, AssertionError) as error:
        # What torch's tracer and compiler raise; also where there is no C++ compiler, or it fails.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return f"the compiled step has other results than the plain one (at position {position})"


def _differing_position(
    step: OneTokenForward, model: LoadedModel, attention: AttentionBackend, max_model_len: int
) -> int | None:
    """Compute steps of several tokens and positions both ways; return where logits or KV differ in a bit, or None.

    All blocks of the only request are block 0, which is left full of zeros.
    """
    block, block_size = attention.kv_cache[0], attention.kv_cache.shape[4]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(block.shape, generator=generator).to(block.dtype)
    last = max_model_len - 1
    positions = sorted({min(place, last) for place in (0, 1, block_size, 2 * block_size + 3, last // 2, last)})
    tokens = torch.randint(model.vocab_size, (_TRIED_TOKENS,), generator=generator).tolist()

    def compute(token: int, position: int, way: _Way) -> tuple[Tensor, Tensor]:
        block.copy_(drawn)
        tables = np.zeros((1, position // block_size + 1), dtype=np.int64)
        batch = attention.prepare(BatchShape(np.array([0, 1]), np.array([position]), tables))
        inputs = (torch.tensor([token]), torch.tensor([position]), batch, torch.tensor([0]))
        return way(*inputs).clone(), block.clone()

    ways: tuple[_Way, _Way] = (model.forward, step)
    try:
        for position in positions:
            for token in tokens:
                plain, compiled = (compute(token, position, way) for way in ways)
                if not all(map(torch.equal, plain, compiled)):
                    return position
        return None
    finally:
        block.zero_()
