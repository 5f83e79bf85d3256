"""Decides how much prefill a step may mix into its decodes: as much as the engine's ITL aim allows.

A request that decodes waits for the whole step, so prompts in the step lengthen its inter-token latency (ITL). The
engine's own cost model (actors/costs) predicts the step; a chunk of a prompt gets the most tokens with which the
prediction stays within a bound. The aim is one for the mean of a request's gaps, and few steps have prompts; so a gap
may take LONG_GAP times the aim. Shorter steps would cut prompts into chunks so small that all take longer
(docs/decisions/0057). The engine's role says how strict the bound is:

    both             prediction <= 2 * aim
    prefill, decode  prediction <= 3 * aim

A prefill engine computes prompts first, and requests that decode there have a bounded gap all the same. At a decode
engine prompts are few, and come when the other engines have long queues: small chunks would keep each of them, and all
that decode, for longer (docs/decisions/0059). About half of the steps that are filled up to the bound keep it.

The bound protects requests that can meet both aims: those that decode and had their first token within the engine's
aim. Where there is none of them, or at most LATE_OUTWEIGHS times as many as prompts that are late already, steps may
take ALL_LATE times as long: small chunks would make those that wait later still (docs/decisions/0054, 0056).

There is no bound, and the scheduler does what it does without this module, if the engine has no ITL aim, if the model
is not sure (StepCostModel.is_sure), in steps of engines where nothing decodes, and without chunked prefill. If not even
MIN_CHUNK_PART of the token budget fits, a step still takes so much: prefill never starves, and a prompt of
max_num_batched_tokens takes at most 1 / MIN_CHUNK_PART steps. docs/decisions/0040 has the reasons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from actors.config import EngineRoleName, SchedulerConfig
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request
from actors.core.requests.running_rows import RunningRows
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import HINGES

MIN_CHUNK_PART: Final = 1 / 16
LONG_GAP: Final = 2.0
"""The longest gap between two tokens of a request, over the aim for the mean of its gaps."""
ROLE_SLACK: Final = 1.5
"""Steps of engines that prefer one of both, prompts or decodes, may take this many times as long as a gap may."""
ALL_LATE: Final = 4.0
"""Steps in which late requests outweigh those that decode and are in time may take this many times the bound."""
LATE_OUTWEIGHS: Final = 4
"""So many requests that decode and are in time are outweighed by one prompt that is late."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The coefficients of a cost model, in seconds, as plain numbers.

    slopes: seconds of a further token in a step that has at least as many tokens as the key, the smallest key first
    """

    step: float
    decode: float
    decode_context: float
    prefill: float
    prefill_context: float
    pair: float
    slopes: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, model: StepCostModel) -> StepCosts:
        """Take the coefficients of a model."""
        cost = model.seconds_by_feature
        slope, slopes = cost["token"], [(0, cost["token"])]
        for hinge in HINGES:
            slope += cost[f"token_above_{hinge}"]
            slopes.append((hinge, slope))
        return cls(
            step=cost["step"],
            decode=cost["decode"],
            decode_context=cost["decode_context_token"],
            prefill=cost["prefill"],
            prefill_context=cost["prefill_context_token"],
            pair=cost["prefill_pair"],
            slopes=tuple(slopes),
        )

    def tokens(self, num_tokens: int) -> float:
        """Return the seconds that a step takes for its number of tokens alone."""
        seconds = 0.0
        previous = 0.0
        for hinge, slope in self.slopes:
            if num_tokens > hinge:
                seconds += (slope - previous) * (num_tokens - hinge)
                previous = slope
        return seconds

    def largest_chunk(self, num_tokens: int, num_computed_tokens: int, seconds_left: float) -> float:
        """Return the most tokens of a chunk that take at most seconds_left; 0 if that is negative, inf without a limit.

        num_tokens: tokens that the step has without the chunk
        num_computed_tokens: tokens of the prompt before the chunk

        c more tokens cost slope * c + pair * (c * num_computed_tokens + c^2 / 2), where the slope changes at each
        hinge. So the equation is a quadratic one between two hinges.
        """
        chunk = 0.0
        if seconds_left < 0:
            return chunk
        for index, (_, slope) in enumerate(self.slopes):
            end = self.slopes[index + 1][0] - num_tokens if index + 1 < len(self.slopes) else math.inf
            if end <= chunk:
                continue
            # Of the cost of x further tokens after `chunk`: linear * x + pair / 2 * x^2.
            linear = slope + self.pair * (num_computed_tokens + chunk)
            most = _solve(self.pair / 2, linear, seconds_left)
            if chunk + most < end:
                return chunk + most
            length = end - chunk
            if length == math.inf:
                return math.inf
            seconds_left -= linear * length + self.pair / 2 * length * length
            chunk = end
        return chunk


def _solve(quadratic: float, linear: float, seconds: float) -> float:
    """Return the largest x >= 0 with quadratic * x^2 + linear * x <= seconds. No argument is negative."""
    # The form that does not lose digits if the quadratic term is small.
    divisor = linear + math.sqrt(linear * linear + 4 * quadratic * max(0.0, seconds))
    if divisor > 0:
        return max(0.0, 2 * seconds / divisor)
    return 0.0 if quadratic or linear else math.inf


@dataclass(slots=True)
class StepChunkBudget:
    """The rest of one step for prompts. Decodes are counted when the first prompt asks.

    bound_s: how long the step may take by the prediction
    late_after_s: the time to the first token from which on a request is late
    num_late_prompts: prompts that are late, and have not begun to decode
    min_tokens: tokens of prompts that the step may take in any case
    """

    costs: StepCosts
    bound_s: float
    late_after_s: float
    num_late_prompts: int
    min_tokens: int
    rows: RunningRows
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    seconds_but_tokens: float = 0.0
    """The prediction without what depends on the number of tokens in the step."""
    has_decodes: bool | None = None
    last_epoch: int = 0
    """The newest row that _count_decodes() has looked at."""

    def cap(self, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many of num_new_tokens of a prompt fit into the step; 0 if the prompt waits for the next step."""
        if self.has_decodes is None:
            self._count_decodes()
        if not self.has_decodes:
            return num_new_tokens
        costs = self.costs
        fixed = self.seconds_but_tokens + costs.prefill_context * num_computed_tokens
        if not self.num_prefill_tokens:
            fixed += costs.prefill
        seconds_left = self.bound_s - fixed - costs.tokens(self.num_tokens)
        # The tolerance keeps a chunk whose prediction is the bound itself from losing a token to rounding.
        most = costs.largest_chunk(self.num_tokens, num_computed_tokens, seconds_left) + 1e-9
        num_left = max(int(min(most, num_new_tokens)), self.min_tokens - self.num_prefill_tokens, 0)
        return min(num_new_tokens, num_left)

    def take(self, request: Request, num_new_tokens: int) -> None:
        """Note that the step computes so many tokens of a request, which has a row."""
        if request.spec_token_ids:
            # Requests with drafts come before all prompts, so _count_decodes() still counts their last tokens.
            self.num_tokens += num_new_tokens - 1
            return
        if not self.has_decodes:
            return
        costs, num_computed_tokens = self.costs, request.num_computed_tokens
        if num_computed_tokens >= request.num_prompt_tokens and self.rows.epochs[request.row] <= self.last_epoch:
            return  # _count_decodes() has counted it.
        self.num_tokens += num_new_tokens
        if num_new_tokens == 1:
            self.seconds_but_tokens += costs.decode + costs.decode_context * num_computed_tokens
            return
        if not self.num_prefill_tokens:
            self.seconds_but_tokens += costs.prefill
        pairs = num_new_tokens * (num_computed_tokens + num_new_tokens / 2)
        self.seconds_but_tokens += costs.prefill_context * num_computed_tokens + costs.pair * pairs
        self.num_prefill_tokens += num_new_tokens

    def _count_decodes(self) -> None:
        rows = self.rows
        self.last_epoch = int(rows.epochs.max())
        decodes = (rows.epochs > 0) & (rows.num_computed >= rows.num_prompt)
        self.has_decodes = bool(decodes.any())
        if not self.has_decodes:
            return
        if rows.num_in_time(self.late_after_s) <= LATE_OUTWEIGHS * self.num_late_prompts:
            self.bound_s *= ALL_LATE
        due = decodes & (rows.num_expected > rows.num_computed)
        num_decodes = int(due.sum())
        self.num_tokens += num_decodes
        costs = self.costs
        self.seconds_but_tokens = (
            costs.step + costs.decode * num_decodes + costs.decode_context * int(rows.num_computed[due].sum())
        )


class ChunkBudget:
    """The engine's aim, role and cost model, from which each step's budget for prompts follows.

    Invariant: _costs is None iff steps have no bound.
    """

    def __init__(self, config: SchedulerConfig, queues: Queues) -> None:
        """Set no bound yet."""
        self._queues = queues
        self._is_chunking = config.enable_chunked_prefill
        self._min_tokens = max(1, int(config.max_num_batched_tokens * MIN_CHUNK_PART))
        self._itl_s: float | None = None
        self._ttft_s: float | None = None
        self._role: EngineRoleName = "both"
        self._model: StepCostModel | None = None
        self._costs: StepCosts | None = None
        self._bound_s = math.inf

    @property
    def bound_s(self) -> float | None:
        """The most seconds that a step with decodes and prompts should take by the prediction; None: no bound."""
        return None if self._costs is None else self._bound_s

    @property
    def late_after_s(self) -> float | None:
        """The time to the first token from which on a request is late; None: none is."""
        return self._ttft_s

    @property
    def inputs(self) -> tuple[float | None, float | None, EngineRoleName, StepCostModel | None]:
        """The aims for the inter-token latency and for the time to the first token, the role and the cost model."""
        return self._itl_s, self._ttft_s, self._role, self._model

    def set_aims(self, itl_s: float | None, ttft_s: float | None = None) -> None:
        """Aim at these from the next step on.

        itl_s:  the inter-token latency; None: no aim
        ttft_s: the time from a request's arrival to its first token; None: no aim, and no request is late
        """
        self._itl_s, self._ttft_s = itl_s, ttft_s
        self._derive()

    def set_role(self, role: EngineRoleName) -> None:
        """Mix prompts into decoding steps as engines of this role do, from the next step on."""
        self._role = role
        self._derive()

    def use_model(self, model: StepCostModel) -> None:
        """Predict steps with this model from the next step on."""
        if model is not self._model:
            self._model = model
            self._derive()

    def begin_step(self, now_s: float) -> StepChunkBudget | None:
        """Return the budget of one step; None if it has no bound."""
        rows = self._queues.running
        if self._ttft_s is not None or self._itl_s is not None:
            rows.note_decoding(now_s)
        if self._costs is None:
            return None
        late_after_s = math.inf if self._ttft_s is None else self._ttft_s
        num_late = self._queues.num_late_prompts(now_s - late_after_s)
        return StepChunkBudget(self._costs, self._bound_s, late_after_s, num_late, self._min_tokens, rows)

    def _derive(self) -> None:
        model, aim = self._model, self._itl_s
        self._costs = None
        if not self._is_chunking or aim is None or model is None or not model.is_sure:
            return
        self._bound_s = LONG_GAP * aim
        if self._role != "both":
            self._bound_s *= ROLE_SLACK
        self._costs = StepCosts.of(model)
