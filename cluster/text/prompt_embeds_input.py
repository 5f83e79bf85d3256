"""Checks prompts that are embeddings instead of tokens, and reads them for engines."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np

from actors.core.requests.request import PromptEmbeds
from cluster.parameters.generation import EmbedsPrompt
from cluster.parameters.sampling_rules import Violations
from cluster.settings.input_limits import InputLimits

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}
_TOO_LARGE: Final = {
    "float32": float("inf"),
    # Half a step above the largest bfloat16: numbers of this size and above are rounded to infinity.
    "bfloat16": float(np.array(0x7F7F8000, np.uint32).view(np.float32)),
    "float16": 65_520.0,
}
"""Numbers of at least this size are infinite in the dtype."""
_DIGEST_BYTES: Final = 16


def check_shape(prompt: EmbedsPrompt, embedding_size: int, limits: InputLimits, violations: Violations) -> None:
    """Check the shape that a prompt of embeddings names. embedding_size: the model's; 0: it takes no embeddings"""
    field, limit = "prompt_embeds", limits.max_prompt_embeds_bytes
    if embedding_size == 0:
        violations.add(field, "given", "a prompt of another kind: this model takes no embeddings")
        return
    if len(prompt.data) > limit:
        violations.add(f"{field}.data", f"{len(prompt.data)} bytes long", f"at most {limit} bytes")
    violations.require(prompt.dtype in _ITEM_BYTES, f"{field}.dtype", prompt.dtype, " or ".join(_ITEM_BYTES))
    is_width = prompt.hidden_size == embedding_size
    violations.require(is_width, f"{field}.hidden_size", prompt.hidden_size, f"the model's, which is {embedding_size}")
    violations.require(prompt.num_tokens >= 1, f"{field}.num_tokens", prompt.num_tokens, "at least 1")
    num_bytes = prompt.num_tokens * prompt.hidden_size * _ITEM_BYTES.get(prompt.dtype, 0)
    if num_bytes and len(prompt.data) != num_bytes:
        allowed = f"{num_bytes} bytes: num_tokens x hidden_size values of {prompt.dtype}"
        violations.add(f"{field}.data", f"{len(prompt.data)} bytes long", allowed)


def read_embeds(prompt: EmbedsPrompt, model_dtype: str = "float32") -> PromptEmbeds:
    """Read embeddings whose shape was checked. This takes milliseconds for megabytes.

    model_dtype: the type to which the engine casts the values
    Raises InvalidRequest if a value is not finite in that type: it would spread to every token of the output.
    """
    violations = Violations()
    is_finite = np.abs(_values(prompt)) < _TOO_LARGE[model_dtype]
    if not is_finite.all():
        row = int(np.flatnonzero(~is_finite)[0]) // prompt.hidden_size
        allowed = f"numbers that are finite in the model's dtype, which is {model_dtype}"
        violations.add("prompt_embeds.data", f"NaN, infinite or too large in row {row}", allowed)
    violations.raise_if_any()
    digest = blake2b(f"{prompt.dtype} {prompt.hidden_size} ".encode(), digest_size=_DIGEST_BYTES)
    digest.update(prompt.data)
    return PromptEmbeds(prompt.data, prompt.num_tokens, prompt.hidden_size, prompt.dtype, digest.digest())


def _values(prompt: EmbedsPrompt) -> np.ndarray:
    """Return the values as float32, [num_tokens * hidden_size]."""
    if prompt.dtype == "float32":
        return np.frombuffer(prompt.data, dtype="<f4")
    # A bfloat16 is the first half of a float32.
    bits = np.frombuffer(prompt.data, dtype="<u2").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)
