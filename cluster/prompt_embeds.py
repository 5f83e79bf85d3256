"""Embeddings in place of a prompt's tokens: what is let in, and what an engine gets of it."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np

from actors.core.request import PromptEmbeds
from cluster.generation import EmbedsPrompt
from cluster.input_limits import InputLimits
from cluster.sampling_rules import Violations

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}
_BFLOAT16_EXPONENT: Final = 0x7F80
_DIGEST_BYTES: Final = 16


def check_shape(prompt: EmbedsPrompt, embedding_size: int, limits: InputLimits, violations: Violations) -> None:
    """Check what is said about them. embedding_size: the model's; 0 if it takes none."""
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


def read_embeds(prompt: EmbedsPrompt) -> PromptEmbeds:
    """What an engine gets of embeddings whose shape was checked: milliseconds of work where there are megabytes.

    Raises InvalidRequest if a value is not finite: it would spread to every token of the output.
    """
    violations = Violations()
    is_finite = _is_finite(prompt)
    if not is_finite.all():
        row = int(np.flatnonzero(~is_finite)[0]) // prompt.hidden_size
        violations.add("prompt_embeds.data", f"NaN or infinite in row {row}", "finite numbers")
    violations.raise_if_any()
    digest = blake2b(f"{prompt.dtype} {prompt.hidden_size} ".encode(), digest_size=_DIGEST_BYTES)
    digest.update(prompt.data)
    return PromptEmbeds(prompt.data, prompt.num_tokens, prompt.hidden_size, prompt.dtype, digest.digest())


def _is_finite(prompt: EmbedsPrompt) -> np.ndarray:
    """[num_tokens * hidden_size] bool"""
    if prompt.dtype == "float32":
        finite: np.ndarray = np.isfinite(np.frombuffer(prompt.data, dtype="<f4"))
        return finite
    bits = np.frombuffer(prompt.data, dtype="<u2")
    bounded: np.ndarray = (bits & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT
    return bounded
