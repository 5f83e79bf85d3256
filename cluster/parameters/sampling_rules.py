"""The rules for sampling parameters: which values are allowed, and what the defaults are."""

from __future__ import annotations

import math
import reprlib
import secrets
from typing import Final, TypeVar

from actors.checkpoint.generation_defaults import NO_DEFAULTS, GenerationDefaults
from actors.core.requests.sampling_params import SamplingParams
from cluster.api.protos.sample_seeds import MAX_SEED
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.generation import SamplingOptions
from cluster.settings.input_limits import InputLimits

GREEDY_BELOW_TEMPERATURE: Final = 1e-5
"""Dividing logits by less would overflow; vLLM draws the same line."""
MAX_REPETITION_PENALTY: Final = 10.0
MAX_LOGIT_BIAS: Final = 100.0
MAX_INT32: Final = 2**31 - 1

_T = TypeVar("_T")


class Violations:
    """Collects what is wrong with one request, so that its client hears of everything at once."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def require(self, is_allowed: bool, field: str, value: object, allowed: str) -> None:
        """Take note of a violation unless is_allowed. A long value is shortened."""
        if not is_allowed:
            self.add(field, reprlib.repr(value), allowed)

    def add(self, field: str, shown: str, allowed: str) -> None:
        """Take note of a violation, in words."""
        self._found.append(FieldViolation(field, shown, allowed))

    def raise_if_any(self) -> None:
        """Raise InvalidRequest with everything that was found."""
        if self._found:
            raise InvalidRequest(*self._found)


def check_sampling(options: SamplingOptions, vocab_size: int, limits: InputLimits, violations: Violations) -> None:
    """Check everything that does not depend on the prompt's length."""
    rules = _SamplingRules(options, violations)
    rules.check_distribution(limits.max_logprobs)
    rules.check_length()
    rules.check_stops(vocab_size, limits)
    rules.check_logit_bias(vocab_size, limits.max_logit_bias)
    rules.check_token_rules(vocab_size, limits)


def resolve_sampling(
    options: SamplingOptions,
    max_tokens: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    own: GenerationDefaults = NO_DEFAULTS,
) -> SamplingParams:
    """Fill in the defaults of checked options; draw a seed if there is none.

    bad_words: their tokens; own: the model's own, which come before raypd's
    """
    temperature = _given(options.temperature, _given(own.temperature, 1.0))
    return SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW_TEMPERATURE else 0.0,
        top_k=max(0, _given(options.top_k, _given(own.top_k, 0))),
        top_p=_given(options.top_p, _given(own.top_p, 1.0)),
        min_p=_given(options.min_p, _given(own.min_p, 0.0)),
        presence_penalty=_given(options.presence_penalty, 0.0),
        frequency_penalty=_given(options.frequency_penalty, 0.0),
        repetition_penalty=_given(options.repetition_penalty, _given(own.repetition_penalty, 1.0)),
        # Drawn here and once: so every engine that ever runs this request samples the same tokens.
        seed=_given(options.seed, secrets.randbits(63)),
        max_tokens=max_tokens,
        min_tokens=_given(options.min_tokens, 0),
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        logit_bias=dict(options.logit_bias),
        allowed_token_ids=options.allowed_token_ids or (),
        bad_words=bad_words,
        structured_output=options.structured_output,
    )


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


class _SamplingRules:
    """The rules by theme; each adds what it finds to the violations. Every comparison is false for NaN."""

    def __init__(self, options: SamplingOptions, violations: Violations) -> None:
        self._options = options
        self._violations = violations

    def check_distribution(self, max_logprobs: int) -> None:
        options = self._options
        self._allow("temperature", _at_least_0(options.temperature), "a finite number, at least 0 (0 is greedy)")
        self._allow("top_k", _within(options.top_k, -1, MAX_INT32), "at least 1, or 0 (or -1) for all tokens")
        self._allow("top_p", options.top_p is None or 0 < options.top_p <= 1, "more than 0, at most 1")
        self._allow("min_p", _within(options.min_p, 0, 1), "0 to 1")
        self._allow("presence_penalty", _within(options.presence_penalty, -2, 2), "-2 to 2")
        self._allow("frequency_penalty", _within(options.frequency_penalty, -2, 2), "-2 to 2")
        penalty = options.repetition_penalty
        is_allowed = penalty is None or 0 < penalty <= MAX_REPETITION_PENALTY
        self._allow("repetition_penalty", is_allowed, f"more than 0, at most {MAX_REPETITION_PENALTY:g} (1 is none)")
        self._allow("seed", _within(options.seed, 0, MAX_SEED), f"0 to {MAX_SEED}")
        self._allow("logprobs", _within(options.logprobs, 0, max_logprobs), f"0 to {max_logprobs}")
        self._allow("prompt_logprobs", _within(options.prompt_logprobs, 0, max_logprobs), f"0 to {max_logprobs}")

    def check_length(self) -> None:
        max_tokens, min_tokens = self._options.max_tokens, self._options.min_tokens
        self._allow("max_tokens", _within(max_tokens, 1, MAX_INT32), "at least 1")
        self._allow("min_tokens", _within(min_tokens, 0, MAX_INT32), "at least 0")
        if max_tokens is not None and min_tokens is not None and max_tokens >= 1:
            self._allow("min_tokens", min_tokens <= max_tokens, f"at most max_tokens, which is {max_tokens}")

    def check_stops(self, vocab_size: int, limits: InputLimits) -> None:
        stop, token_ids = self._options.stop, self._options.stop_token_ids
        self._allow("stop", len(stop) <= limits.max_stop_strings, f"at most {limits.max_stop_strings} strings")
        are_sized = all(1 <= len(string) <= limits.max_stop_string_chars for string in stop)
        self._allow("stop", are_sized, f"strings of 1 to {limits.max_stop_string_chars} characters")
        max_token_ids = limits.max_stop_token_ids
        self._allow("stop_token_ids", len(token_ids) <= max_token_ids, f"at most {max_token_ids} tokens")
        are_tokens = all(0 <= token_id < vocab_size for token_id in token_ids)
        self._allow("stop_token_ids", are_tokens, f"token ids from 0 to {vocab_size - 1}")

    def check_logit_bias(self, vocab_size: int, max_entries: int) -> None:
        bias = self._options.logit_bias
        self._allow("logit_bias", len(bias) <= max_entries, f"at most {max_entries} tokens")
        are_tokens = all(0 <= token_id < vocab_size for token_id in bias)
        self._allow("logit_bias", are_tokens, f"token ids from 0 to {vocab_size - 1}")
        are_bounded = all(-MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS for value in bias.values())
        self._allow("logit_bias", are_bounded, f"values from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}")

    def check_token_rules(self, vocab_size: int, limits: InputLimits) -> None:
        allowed, words = self._options.allowed_token_ids, self._options.bad_words
        if allowed is not None:
            num_most = limits.max_allowed_token_ids
            self._allow("allowed_token_ids", 1 <= len(allowed) <= num_most, f"1 to {num_most} tokens")
            is_known = not allowed or (min(allowed) >= 0 and max(allowed) < vocab_size)
            self._allow("allowed_token_ids", is_known, f"token ids from 0 to {vocab_size - 1}")
        self._allow("bad_words", len(words) <= limits.max_bad_words, f"at most {limits.max_bad_words} words")
        are_sized = all(word.strip() and len(word) <= limits.max_bad_word_chars for word in words)
        self._allow("bad_words", are_sized, f"words of 1 to {limits.max_bad_word_chars} characters, not only of spaces")

    def _allow(self, name: str, is_allowed: bool, allowed: str) -> None:
        self._violations.require(is_allowed, f"sampling_params.{name}", getattr(self._options, name), allowed)


def _within(value: float | None, low: float, high: float) -> bool:
    return value is None or low <= value <= high


def _at_least_0(value: float | None) -> bool:
    return value is None or 0 <= value < math.inf
