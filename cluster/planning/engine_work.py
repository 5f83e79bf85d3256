"""Reckons the work of requests in engine-seconds: how long an engine is busy with their prompts and with their output.

Prompts that wait share steps, so a prompt takes its part of full steps. A decode step costs its fixed part whether few
or many requests share it, so the work of an output token depends on the batch: it is reckoned for the largest batch
whose steps meet the aim for the time between tokens, and which the KV cache can hold. An engine that does more than one
engine-second of work a second falls behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import FEATURES, HINGES
from cluster.planning.offered_load import LoadWindow, OfferedRequest
from cluster.routing.costs.step_prediction import StepPrediction

_STEP, _TOKEN = FEATURES.index("step"), FEATURES.index("token")
_DECODE, _DECODE_CONTEXT = FEATURES.index("decode"), FEATURES.index("decode_context_token")
_PREFILL, _PREFILL_CONTEXT = FEATURES.index("prefill"), FEATURES.index("prefill_context_token")
_PAIR: Final = FEATURES.index("prefill_pair")
_FREE_PART: Final = 0.01
"""The part of the KV cache that requests do not fill, so that running ones can grow."""


class Work(msgspec.Struct, frozen=True):
    """Work in engine-seconds: prefill_s of prompts, decode_s of output."""

    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The work of both kinds together, as one engine that does both would have it."""
        return self.prefill_s + self.decode_s


class EngineSpeed(msgspec.Struct, frozen=True):
    """How fast one engine is, and how much it holds.

    decode, prefill, mixed: coefficients of each kind of steps, in the order of step_shape.FEATURES
    max_num_batched_tokens: the most tokens of a step
    max_num_seqs:           the most running requests
    num_kv_tokens:          tokens that the KV cache holds
    num_state_tokens:       tokens whose KV takes as much of the cache as the recurrent state of one request
    kv_bytes_per_token:     bytes of KV that a handoff moves for each token
    link_bytes_per_s:       bandwidth of a link between two engines; 0: transfers cost nothing
    sigma:                  the standard deviation of the relative error of a step's prediction
    """

    decode: tuple[float, ...]
    prefill: tuple[float, ...]
    mixed: tuple[float, ...]
    max_num_batched_tokens: int
    max_num_seqs: int
    num_kv_tokens: int
    kv_bytes_per_token: int = 0
    link_bytes_per_s: float = 0.0
    link_round_trip_s: float = 0.0
    sigma: float = 0.05
    num_state_tokens: int = 0

    def slower_by(self, factor: float) -> EngineSpeed:
        """Return the speed of an engine whose steps take so many times as long."""
        kinds = [tuple(factor * cost for cost in costs) for costs in (self.decode, self.prefill, self.mixed)]
        return msgspec.structs.replace(self, decode=kinds[0], prefill=kinds[1], mixed=kinds[2])

    @property
    def prediction(self) -> StepPrediction:
        """The predictions of steps, as routing has them."""
        sigma = self.sigma
        return StepPrediction(self.decode, self.prefill, self.mixed, decode_sigma=sigma, prefill_sigma=sigma)

    def decode_step_s(self, num_decodes: float, num_context_tokens: float) -> float:
        """Return the seconds of a step in which so many requests decode; the context is summed over them."""
        costs = self.decode
        fixed_s = costs[_STEP] + _tokens_s(costs, num_decodes) + costs[_DECODE] * num_decodes
        return fixed_s + costs[_DECODE_CONTEXT] * num_context_tokens

    def prompt_s(self, num_computed_tokens: float, num_prefill_pairs: float) -> float:
        """Return the seconds that prompts take of steps which other prompts fill. Sums over prompts may be passed."""
        costs, chunk = self.prefill, self.max_num_batched_tokens
        num_steps = num_computed_tokens / chunk
        full_s = costs[_STEP] + costs[_PREFILL] + _tokens_s(costs, chunk)
        num_context_tokens = max(num_prefill_pairs / chunk - num_computed_tokens / 2, 0.0)
        return num_steps * full_s + costs[_PREFILL_CONTEXT] * num_context_tokens + costs[_PAIR] * num_prefill_pairs

    def alone_s(self, requests: Iterable[OfferedRequest]) -> list[float]:
        """Return the seconds from each request's arrival at an idle engine to its first token."""
        prediction, budget = self.prediction, self.max_num_batched_tokens
        return [
            prediction.prefill_steps(one.num_computed_tokens, one.num_known_tokens, 0, 0, budget).seconds
            for one in requests
        ]

    def transfer_s(self, num_tokens: float) -> float:
        """Return the seconds that the KV of so many tokens, and a recurrent state, take over an idle link."""
        if self.link_bytes_per_s <= 0:
            return 0.0
        num_bytes = (num_tokens + self.num_state_tokens) * self.kv_bytes_per_token
        return self.link_round_trip_s + num_bytes / self.link_bytes_per_s

    def largest_batch(self, context_tokens: float) -> int:
        """Return how many requests can run at once. context_tokens: of each of them, on average"""
        held = int(self.num_kv_tokens * (1 - _FREE_PART) // max(context_tokens + self.num_state_tokens, 1.0))
        return max(min(self.max_num_seqs, self.max_num_batched_tokens, held), 1)

    def batch_within(self, itl_s: float | None, context_tokens: float) -> int:
        """Return the largest batch whose decode steps take itl_s at most; at least 1, even if that takes longer."""
        largest = self.largest_batch(context_tokens)
        if itl_s is None or self.decode_step_s(largest, largest * context_tokens) <= itl_s:
            return largest
        low, high = 1, largest
        while high - low > 1:
            middle = (low + high) // 2
            if self.decode_step_s(middle, middle * context_tokens) <= itl_s:
                low = middle
            else:
                high = middle
        return low


class WorkPrices(msgspec.Struct, frozen=True):
    """The prices of a request's parts, at the batch that the aim allows.

    batch:            requests that decode together in an engine
    decode_step_s:    of one output token, without what its context costs
    context_token_s:  of one token of context, each time it is read
    """

    speed: EngineSpeed
    batch: int
    decode_step_s: float
    context_token_s: float

    @classmethod
    def at(cls, speed: EngineSpeed, itl_s: float | None, context_tokens: float) -> WorkPrices:
        """Return the prices. itl_s: the aim; context_tokens: of a decoding request, on average"""
        batch = speed.batch_within(itl_s, context_tokens)
        return cls(speed, batch, speed.decode_step_s(batch, 0.0) / batch, speed.decode[_DECODE_CONTEXT])

    def work_of(self, requests: Iterable[OfferedRequest]) -> Work:
        """Return the work of these requests together."""
        found = list(requests)
        decode_s = sum(
            self.decode_step_s * one.num_decode_steps + self.context_token_s * one.num_decode_context_tokens
            for one in found
        )
        prompts_s = (self.speed.prompt_s(one.num_computed_tokens, one.num_prefill_pairs) for one in found)
        return Work(sum(prompts_s), decode_s)

    def rates_of(self, windows: Sequence[LoadWindow], window_s: float) -> list[Work | None]:
        """Return the work that came in each window, in engine-seconds per second: so many engines it keeps busy.

        Requests that have not ended, and refused ones, are taken to be like those that ended lately. None: requests
        came, and none has ever ended, so their work is not known.
        """
        return [
            self._rate_of(window, _newest_ended(windows[: index + 1]) or windows, window_s)
            for index, window in enumerate(windows)
        ]

    def _rate_of(self, window: LoadWindow, recent: Sequence[LoadWindow], window_s: float) -> Work | None:
        if not window.num_offered:
            return Work()
        num_ended = sum(one.num_ended for one in recent)
        if not num_ended:
            return None
        ended_tokens = sum(one.num_ended_prompt_tokens for one in recent)
        computed, pairs = sum(one.num_computed_tokens for one in recent), sum(one.num_prefill_pairs for one in recent)
        # Prompts' lengths are known at arrival, so a change of them is seen before the first of them has ended.
        mean_tokens = (
            window.num_prompt_tokens / window.num_sized if window.num_sized else ended_tokens / max(num_ended, 1)
        )
        part = window.num_offered * mean_tokens / max(ended_tokens, 1)
        steps = sum(one.num_decode_steps for one in recent) / num_ended
        context = sum(one.num_decode_context_tokens for one in recent) / num_ended
        decode_s = window.num_offered * (self.decode_step_s * steps + self.context_token_s * context)
        return Work(self.speed.prompt_s(part * computed, part * pairs) / window_s, decode_s / window_s)


_NUM_AVERAGED: Final = 50
_MAX_WINDOWS: Final = 10
"""The number of ended requests that suffices to tell output lengths and cached parts; older windows are left out."""


def mean_context(requests: Sequence[OfferedRequest]) -> float:
    """Return the tokens before an output token, on average over output tokens; 0 without any."""
    num_steps = sum(one.num_decode_steps for one in requests)
    return sum(one.num_decode_context_tokens for one in requests) / num_steps if num_steps else 0.0


def speed_of_model(
    model: StepCostModel, max_num_batched_tokens: int, max_num_seqs: int, num_kv_tokens: int
) -> EngineSpeed:
    """Return the speed of an engine with one cost model for all kinds of its steps."""
    sigma = max((one.sigma for one in model.residuals if one.num_steps), default=0.0)
    costs = model.coefficients
    return EngineSpeed(costs, costs, costs, max_num_batched_tokens, max_num_seqs, num_kv_tokens, sigma=sigma)


def _newest_ended(windows: Sequence[LoadWindow]) -> Sequence[LoadWindow]:
    """Return the newest windows in which enough requests ended; empty if none did."""
    num_ended = 0
    for num_windows in range(1, min(len(windows), _MAX_WINDOWS) + 1):
        num_ended += windows[-num_windows].num_ended
        if num_ended >= _NUM_AVERAGED:
            return windows[-num_windows:]
    return windows[-_MAX_WINDOWS:] if num_ended else ()


def _tokens_s(costs: Sequence[float], num_tokens: float) -> float:
    hinges = zip(costs[_TOKEN + 1 : _TOKEN + 1 + len(HINGES)], HINGES, strict=True)
    return costs[_TOKEN] * num_tokens + sum(cost * max(num_tokens - hinge, 0) for cost, hinge in hinges)
