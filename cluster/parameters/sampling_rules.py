"""Checks sampling parameters by their declarations, and makes the parameters that engines are given."""

from __future__ import annotations

import reprlib
import secrets
from dataclasses import fields
from typing import Any, Final

from actors.checkpoint.generation_defaults import NO_DEFAULTS, GenerationDefaults
from actors.core.requests.sampling_params import SamplingParams
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.ranges import Bounds
from cluster.parameters.sampling_options import PARAMETERS, SamplingOptions
from cluster.settings.input_limits import InputLimits

GREEDY_BELOW_TEMPERATURE: Final = 1e-5
"""Lower temperatures are greedy, because logits divided by them would overflow. vLLM has the same limit."""
_RANGES: Final = [(one.name, allowed) for one in PARAMETERS.values() for allowed in one.ranges]
_FOUND_OUT: Final = {"max_tokens", "bad_words"}
"""The caller of resolve_sampling() gives these two: engines get the tokens of bad words, and always a max_tokens."""
_TO_ENGINES: Final = sorted(PARAMETERS.keys() & {one.name for one in fields(SamplingParams)} - _FOUND_OUT)
_OF_MODELS: Final = frozenset(one.name for one in fields(GenerationDefaults))


class Violations:
    """Collects the violations of one request, so that its client gets all of them in one error."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def require(self, is_allowed: bool, field: str, value: object, allowed: str) -> None:
        """Add a violation unless is_allowed. A long value is shortened."""
        if not is_allowed:
            self.add(field, reprlib.repr(value), allowed)

    def add(self, field: str, shown: str, allowed: str) -> None:
        """Add a violation. shown: the value in words; allowed: the values that are allowed, in words"""
        self._found.append(FieldViolation(field, shown, allowed))

    def raise_if_any(self) -> None:
        """Raise InvalidRequest with all violations, if there are any."""
        if self._found:
            raise InvalidRequest(*self._found)


def check_sampling(options: SamplingOptions, vocab_size: int, limits: InputLimits, violations: Violations) -> None:
    """Check the sampling parameters, apart from what depends on the prompt's length."""
    bounds = Bounds(vocab_size, limits)
    for name, allowed in _RANGES:
        value = getattr(options, name)
        if value is not None and not allowed.allows(value, bounds):
            violations.add(f"sampling_params.{name}", reprlib.repr(value), allowed.allowed(bounds))
    max_tokens, min_tokens = options.max_tokens, options.min_tokens
    if max_tokens is not None and min_tokens is not None and max_tokens >= 1:
        allowed_tokens = f"at most max_tokens, which is {max_tokens}"
        violations.require(min_tokens <= max_tokens, "sampling_params.min_tokens", min_tokens, allowed_tokens)


def resolve_sampling(
    options: SamplingOptions,
    max_tokens: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    own: GenerationDefaults = NO_DEFAULTS,
) -> SamplingParams:
    """Return the sampling parameters of checked options, with defaults, and with a seed if there is none.

    bad_words: the tokens of each bad word
    own:       the model's own defaults, which come before raypd's
    """
    values: dict[str, Any] = {"max_tokens": max_tokens, "bad_words": bad_words}
    for name in _TO_ENGINES:
        value = getattr(options, name)
        if value is None and name in _OF_MODELS:
            value = getattr(own, name)
        if value is not None:
            values[name] = value
    if values.get("temperature", GREEDY_BELOW_TEMPERATURE) < GREEDY_BELOW_TEMPERATURE:
        values["temperature"] = 0.0
    if values.get("top_k", 0) < 0:
        values["top_k"] = 0
    if options.seed is None:
        # The seed is drawn here, once, so that every engine that runs this request samples the same tokens.
        values["seed"] = secrets.randbits(63)
    return SamplingParams(**values)
