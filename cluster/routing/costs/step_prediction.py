"""Predicts the durations of an engine's steps from step cost models: its own, and those of engines of the same kind.

An engine only knows the kinds of steps that it has run: one that only prefills knows nothing of decode steps. So each
kind of steps has a leader: the engine of a family that has run most of them. Engines of one family run the same model
with equal settings. An engine's own coefficients count where its predictions differ from the leader's by more than
their error: such an engine is faster or slower than the leader. What an engine does not know is the leader's
prediction, times the factor by which the engine is slower otherwise. Thus equal engines have equal predictions, and an
engine that has just started has good ones.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from operator import mul
from typing import Final

import msgspec

from actors.core.steps.chunk_budget import MIN_CHUNK_PART
from actors.costs.step_cost_model import (
    KINDS,
    MAX_KEPT_ERROR,
    MAX_SURE_ERROR,
    MIN_STEPS_OF_KIND,
    MIN_SURE_STEPS,
    Residuals,
    StepCostModel,
)
from actors.costs.step_shape import HINGES, StepShape, features_of_shapes

_MIN_TOLERANCE: Final = 0.1
_MAX_TOLERANCE: Final = 0.3
"""The bounds of the part by which two predictions may differ without meaning that one of the engines is slower."""
_MIN_SIGMA: Final = 0.05
_SHAPES: Final = {
    "decode": StepShape(8, 8, 8 * 512),
    "prefill": StepShape(512, num_prefills=1, num_prefill_pairs=512 * 256),
    "mixed": StepShape(264, 8, 8 * 512, 1, 0, 256 * 128),
}
"""The steps at which two models of one kind are compared."""
_FEATURES: Final = {kind: [float(one) for one in features_of_shapes([shape])[0]] for kind, shape in _SHAPES.items()}
_CHUNK: Final = HINGES[-1]
_STEP, _TOKEN, _HINGE = 0, 1, 2
_NUMBERED_HINGES: Final = tuple(enumerate(HINGES, _HINGE))
_DECODE: Final = _HINGE + len(HINGES)
_DECODE_CONTEXT, _PREFILL, _PREFILL_CONTEXT, _PAIR = range(_DECODE + 1, _DECODE + 5)

Coefficients = Sequence[float]


class PrefillSteps(msgspec.Struct, frozen=True):
    """The steps that compute a prompt.

    seconds:     of all of them
    added_s:     the part that steps with the same decodes and without the prompt would not take
    num_steps:   as many as the prompt has chunks
    last_tokens: the size of the last chunk
    """

    seconds: float
    added_s: float
    num_steps: int
    last_tokens: int


class StepPrediction:
    """The predictions for one engine."""

    __slots__ = ("_decode", "_mixed", "_prefill", "decode_sigma", "prefill_sigma")

    def __init__(
        self,
        decode: Coefficients,
        prefill: Coefficients,
        mixed: Coefficients | None,
        *,
        decode_sigma: float = _MIN_SIGMA,
        prefill_sigma: float = _MIN_SIGMA,
    ) -> None:
        """Take the coefficients of each kind of steps, in the order of step_shape.FEATURES.

        mixed:                       None: nobody has run such steps; _mixed_of() guesses them
        decode_sigma, prefill_sigma: the standard deviations of the relative errors
        """
        mixed = _mixed_of(decode, prefill) if mixed is None else mixed
        self._decode, self._prefill, self._mixed = tuple(decode), tuple(prefill), tuple(mixed)
        self.decode_sigma, self.prefill_sigma = max(decode_sigma, _MIN_SIGMA), max(prefill_sigma, _MIN_SIGMA)

    @property
    def coefficients(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """The coefficients of steps that decode, that prefill, and that do both, in the order of FEATURES."""
        return self._decode, self._prefill, self._mixed

    def decode_step_s(self, num_decodes: float, num_context_tokens: float) -> float:
        """Return the seconds of a step in which so many requests decode; the context is summed over them."""
        costs = self._decode
        decodes_s = costs[_DECODE] * num_decodes + costs[_DECODE_CONTEXT] * num_context_tokens
        return costs[_STEP] + decodes_s + _tokens_s(costs, num_decodes)

    def prefill_steps(
        self,
        num_tokens: float,
        num_before: float,
        num_decodes: float,
        num_context_tokens: float,
        max_num_batched_tokens: float,
        bound_s: float = 0.0,
    ) -> PrefillSteps:
        """Predict the computation of a prompt's last tokens, in chunks that fill steps beside the decodes.

        num_before: tokens of the prompt whose KV is there
        bound_s:    how long a step with decodes and prompts may take (actors/core/steps/chunk_budget.py); 0: no bound
        """
        costs = self._mixed if num_decodes else self._prefill
        chunk = max(max_num_batched_tokens - num_decodes, 1)
        if num_decodes and bound_s:
            middle = num_before + num_tokens / 2
            fixed_s = costs[_STEP] + costs[_PREFILL] + costs[_PREFILL_CONTEXT] * middle
            fixed_s += costs[_DECODE] * num_decodes + costs[_DECODE_CONTEXT] * num_context_tokens
            fitting = _fitting_tokens(costs, num_decodes, bound_s - fixed_s, costs[_PAIR] * middle)
            chunk = min(chunk, max(fitting, max_num_batched_tokens * MIN_CHUNK_PART, 1))
        num_steps = max(-(-num_tokens // chunk), 1)
        last = num_tokens - (num_steps - 1) * chunk
        each_s = costs[_STEP] + costs[_PREFILL] + costs[_PREFILL_CONTEXT] * (num_before + chunk * (num_steps - 1) / 2)
        seconds = num_steps * each_s + _tokens_s(costs, last + num_decodes)
        seconds += costs[_PAIR] * num_tokens * (num_before + num_tokens / 2)
        if num_steps > 1:
            seconds += (num_steps - 1) * _tokens_s(costs, chunk + num_decodes)
        if not num_decodes:
            return PrefillSteps(seconds, seconds, int(num_steps), int(last))
        decodes_s = num_steps * (costs[_DECODE] * num_decodes + costs[_DECODE_CONTEXT] * num_context_tokens)
        seconds += decodes_s
        # A mixed step takes at least as long as the step with its decodes alone: both have the same weights to read.
        alone_s = num_steps * self.decode_step_s(num_decodes, num_context_tokens)
        return PrefillSteps(max(seconds, alone_s), max(seconds - alone_s, 0.0), int(num_steps), int(last))


class StepFamily:
    """The step cost models of engines that run the same model with equal settings, by the engine that fitted them."""

    def __init__(self) -> None:
        self._models: dict[Hashable, StepCostModel] = {}
        self._leaders: dict[str, Hashable] = {}

    def put(self, engine: Hashable, model: StepCostModel | None) -> None:
        """Take an engine's newest model; None: it has none, or has left."""
        known = self._known_kinds(engine, model)
        if model is not None and known:
            self._models[engine] = replace(model, residuals=known)
        else:
            self._models.pop(engine, None)
        for kind in KINDS:
            leader = self._leaders.get(kind)
            led = 0 if leader not in self._models else _num_steps(self._models[leader], kind)
            # Twice the steps, so that two engines with about as many do not take turns to lead.
            if engine in self._models and _num_steps(self._models[engine], kind) >= max(2 * led, MIN_STEPS_OF_KIND):
                self._leaders[kind] = engine
            elif led < MIN_STEPS_OF_KIND:
                self._elect(kind)

    def prediction(self, engine: Hashable) -> StepPrediction | None:
        """Return an engine's prediction; None if no engine of the family knows decode, or none knows prefill."""
        own = self._models.get(engine)
        slowness = self._slowness(own)
        found = {kind: self._coefficients(kind, own, slowness) for kind in KINDS}
        decode, prefill = found["decode"], found["prefill"]
        if decode is None or prefill is None:
            return None
        sigmas = {kind: self._sigma(kind, own) for kind in KINDS}
        return StepPrediction(
            decode, prefill, found["mixed"], decode_sigma=sigmas["decode"], prefill_sigma=sigmas["prefill"]
        )

    def _known_kinds(self, engine: Hashable, model: StepCostModel | None) -> tuple[Residuals, ...]:
        """Return the kinds of steps that a model predicts well enough for decisions to rest on it.

        Each kind is judged by itself. An engine that has run a few steps of a kind, and predicted these badly, may
        never run another one, so that their errors stay; what it knows of other kinds counts on.
        """
        if model is None or model.num_steps < MIN_SURE_STEPS:
            return ()
        before = self._models.get(engine)
        known = []
        for one in model.residuals:
            was_known = before is not None and _num_steps(before, one.kind) >= MIN_STEPS_OF_KIND
            limit = MAX_KEPT_ERROR if was_known else MAX_SURE_ERROR
            if one.num_steps >= MIN_STEPS_OF_KIND and one.median_size <= limit:
                known.append(one)
        return tuple(known)

    def _elect(self, kind: str) -> None:
        """Make the engine with the most steps of a kind the leader; none if no engine knows the kind."""
        best = max(self._models, key=lambda engine: _num_steps(self._models[engine], kind), default=None)
        if best is None or _num_steps(self._models[best], kind) < MIN_STEPS_OF_KIND:
            self._leaders.pop(kind, None)
        else:
            self._leaders[kind] = best

    def _leader(self, kind: str) -> StepCostModel | None:
        return self._models.get(self._leaders.get(kind))

    def _slowness(self, own: StepCostModel | None) -> float:
        """Return how much slower than the leaders an engine is at what it knows, on average; 1 if that is no more."""
        if own is None:
            return 1.0
        known = [kind for kind in KINDS if _num_steps(own, kind) >= MIN_STEPS_OF_KIND and self._leader(kind) is not own]
        ratios = [self._ratio(kind, own) for kind in known]
        return sum(ratios) / len(ratios) if ratios else 1.0

    def _ratio(self, kind: str, own: StepCostModel) -> float:
        """Return an engine's prediction of a kind of steps over the leader's; 1 if they differ by an error only."""
        leader = self._leader(kind)
        if leader is None or leader is own:
            return 1.0
        there_s = _seconds(leader, kind)
        ratio = _seconds(own, kind) / there_s if there_s > 0 else 1.0
        tolerance = min(max(_residual_sigma(own, kind), _residual_sigma(leader, kind), _MIN_TOLERANCE), _MAX_TOLERANCE)
        return 1.0 if 1 / (1 + tolerance) <= ratio <= 1 + tolerance else ratio

    def _coefficients(self, kind: str, own: StepCostModel | None, slowness: float) -> Coefficients | None:
        leader = self._leader(kind)
        knows = own is not None and _num_steps(own, kind) >= MIN_STEPS_OF_KIND
        if own is not None and knows and self._ratio(kind, own) != 1.0:
            return own.coefficients
        if leader is None:
            return None
        return leader.coefficients if knows or slowness == 1.0 else [slowness * cost for cost in leader.coefficients]

    def _sigma(self, kind: str, own: StepCostModel | None) -> float:
        known = [model for model in (own, self._leader(kind)) if model is not None]
        return max((_residual_sigma(model, kind) for model in known), default=_MIN_SIGMA)


def _mixed_of(decode: Coefficients, prefill: Coefficients) -> Coefficients:
    """Guess the costs of steps that decode and prefill, as nobody has run any yet.

    An engine that only prefills has run large chunks only, and cannot tell what small ones take, as they are mixed into
    steps that decode. So a step without a chunk takes what it takes to decode, one with a chunk of _CHUNK tokens what
    prefill and the decodes take, and time grows evenly between the two.
    """
    mixed = list(decode)
    mixed[_PREFILL], mixed[_PREFILL_CONTEXT], mixed[_PAIR] = 0.0, prefill[_PREFILL_CONTEXT], prefill[_PAIR]
    large_s = prefill[_STEP] + prefill[_PREFILL] + _tokens_s(prefill, _CHUNK)
    slope = max((large_s - decode[_STEP]) / _CHUNK, 0.0)
    last_slope = prefill[_TOKEN] + sum(prefill[number] for number, _ in _NUMBERED_HINGES)
    for number, hinge in _NUMBERED_HINGES:
        mixed[number] = last_slope - slope if hinge == _CHUNK else 0.0
    mixed[_TOKEN] = slope
    return mixed


def _tokens_s(costs: Coefficients, num_tokens: float) -> float:
    seconds = costs[_TOKEN] * num_tokens
    for number, hinge in _NUMBERED_HINGES:
        if num_tokens <= hinge:
            break
        seconds += costs[number] * (num_tokens - hinge)
    return seconds


def _fitting_tokens(costs: Coefficients, num_tokens: float, seconds: float, slope: float) -> float:
    """Return the most tokens that a step takes beside num_tokens within these seconds; infinity without a limit.

    seconds: for num_tokens and the further ones, without what does not depend on their number
    slope:   what a further token costs beside its share of the step
    """
    seconds -= _tokens_s(costs, num_tokens)
    if seconds <= 0:
        return 0.0
    slope += costs[_TOKEN]
    reached = num_tokens
    for number, hinge in _NUMBERED_HINGES:
        if hinge > reached:
            length = hinge - reached
            if slope * length >= seconds:
                break
            seconds -= slope * length
            reached = hinge
        slope += costs[number]
    return reached - num_tokens + seconds / slope if slope > 0 else math.inf


def _seconds(model: StepCostModel, kind: str) -> float:
    """Return a model's prediction for the step at which models are compared."""
    return float(sum(map(mul, model.coefficients, _FEATURES[kind])))


def _num_steps(model: StepCostModel, kind: str) -> int:
    return next((one.num_steps for one in _of_kind(model, kind)), 0)


def _residual_sigma(model: StepCostModel, kind: str) -> float:
    return next((one.sigma for one in _of_kind(model, kind)), _MIN_SIGMA)


def _of_kind(model: StepCostModel, kind: str) -> Iterator[Residuals]:
    return (one for one in model.residuals if one.kind == kind)
