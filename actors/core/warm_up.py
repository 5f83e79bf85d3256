"""Steps without requests of users, at an engine's start, to which the engine's cost model is fitted first.

This module makes their requests: prompts of random tokens that decode a few tokens each, in waves that go from small to
large, so that a slow engine at least sees the small ones. A wave whose first step alone would not end in time is left
out, and one that is under way when the time is over is aborted: the start exceeds its time by one step at most.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from actors.config import SchedulerConfig
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams

_NUM_OUTPUT_TOKENS: Final = 6
_SHORT: Final = 16
_NUM_DECODES: Final = (8, 64)
Wave = Sequence[int]
"""The lengths of prompts that begin together."""


class StepResult(Protocol):
    """The end of a step."""

    @property
    def is_idle(self) -> bool:
        """Whether no further step is due."""


class SteppedEngine(Protocol):
    """An engine core without other requests."""

    def submit(self, request: EngineCoreRequest) -> None:
        """Queue a request."""

    def step(self) -> StepResult:
        """Run one step."""

    def abort(self, request_id: str) -> None:
        """Queue the end of a request."""


def plan_waves(config: SchedulerConfig, max_model_len: int, num_cache_tokens: int) -> list[Wave]:
    """Return the waves for an engine: single prompts, decodes together, chunks after each other, chunks beside decodes.

    A small chunk after two large ones tells what the tokens before a chunk cost from what its attention to them does.
    num_cache_tokens: tokens for which the KV cache has room
    """
    longest = min(max_model_len - _NUM_OUTPUT_TOKENS, num_cache_tokens // 2 - _NUM_OUTPUT_TOKENS)
    budget, few, many = config.max_num_batched_tokens, *(min(count, config.max_num_seqs) for count in _NUM_DECODES)
    quarter = max(1, budget // 4)
    waves = [
        *([_SHORT], [_SHORT], [_SHORT] * few, [_SHORT] * few, [quarter], [quarter], [budget], [2 * budget + _SHORT]),
        [_SHORT] * many,
        [*([_SHORT] * few), 3 * budget],
        [4 * budget],
    ]
    lengths = [[min(length, longest) for length in wave] for wave in waves]
    return [wave for wave in lengths if min(wave) > 0 and sum(wave) + _NUM_OUTPUT_TOKENS * len(wave) < num_cache_tokens]


def num_wave_tokens(config: SchedulerConfig) -> int:
    """Return for how many tokens a cache needs room at most, so that no wave is shortened or left out."""
    return 2 * (4 * config.max_num_batched_tokens + max(_NUM_DECODES) * (_SHORT + _NUM_OUTPUT_TOKENS))


def run_waves(
    engine: SteppedEngine,
    waves: Iterable[Wave],
    vocab_size: int,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    *,
    max_step_tokens: int,
) -> None:
    """Run waves for about limit_s seconds; no request is left. clock: seconds, from any point on"""
    rng, began_s, token_s = random.Random(0), clock(), 0.0
    for number, wave in enumerate(waves):
        # Time per token falls as steps grow, so this is rather too much.
        if clock() - began_s + token_s * min(sum(wave), max_step_tokens) >= limit_s:
            continue
        names = [f"warm-up-{number}-{index}" for index in range(len(wave))]
        for name, length in zip(names, wave, strict=True):
            engine.submit(_make_request(name, rng.choices(range(vocab_size), k=length)))
        step_began_s = clock()
        is_idle, token_s = engine.step().is_idle, (clock() - step_began_s) / min(sum(wave), max_step_tokens)
        while not is_idle:
            if clock() - began_s > limit_s:
                for name in names:
                    engine.abort(name)
            is_idle = engine.step().is_idle


def _make_request(request_id: str, prompt_token_ids: list[int]) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_OUTPUT_TOKENS, ignore_eos=True)
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt_token_ids, sampling_params=params)
