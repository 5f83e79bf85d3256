"""Fits the cost model of an engine's steps online, to the steps that the engine runs.

The fit minimises relative errors: a decode step of 5 ms counts as much as a prefill step of 500 ms. Steps are sorted
into buckets by their kind and their number of tokens, and each bucket forgets its old steps at the rate at which new
ones come into it. So an engine that only decodes for an hour still knows what prefill costs. (Regimes, and the rates:
recursive least squares with a forgetting factor, 0.98 as measured on step times of vLLM on GPUs.) The steps of a
warm-up are not forgotten. They ran while the machine did nothing else, so they are taken to last longer by as much as
the steps with requests do.

A bucket keeps the sums of x x' and of x over its steps, where x are the features divided by the measured seconds: the
ideal coefficients have the product 1 with each x. The coefficients are solved from the sums of all buckets.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from actors.costs.nonnegative import solve_nonnegative
from actors.costs.step_cost_model import KINDS, Residuals, StepCostModel
from actors.costs.step_shape import FEATURES, NUM_FEATURES, Floats, StepShape, features_of_shapes

_KEPT: Final = 0.98
"""The part of a bucket's sums that stays when a step is added."""
_DRIFT_RATE: Final = 0.1
_MIN_DRIFT: Final = 0.1
"""The smallest average of log(measured / what earlier steps took) that counts as a drift."""
_DRIFT_SIGMAS: Final = 1.0
"""A drift is also this many standard deviations of single errors. An average at _DRIFT_RATE has 0.23 of that deviation,
so chance alone hardly ever looks like a drift."""
_MIN_STEPS_FOR_DRIFT: Final = 32
_MIN_STEPS_OF_BUCKET: Final = 8.0
"""Steps of a size with which later ones are compared."""
_NUM_STEPS_BESIDE_PRIOR: Final = 128
"""A kind with fewer own steps has those of a new size compared with the prior: is this machine as quick?"""
_MAX_FOLLOWED: Final = 3.0
"""Drifts that other sizes of its kind show change a bucket by no more than this factor, up or down, until it gets steps
of its own. Drifts are noticed when they come at once, and not where steps become quicker little by little: without a
limit the factors multiply (docs/decisions/0051)."""
_NUM_NEWEST: Final = 16
"""The newest errors, whose median tells how far a kind of steps has drifted."""
_NUM_KEPT_ERRORS: Final = 128
_BATCHES: Final = (16, 64)
"""Steps are taken into the sums in batches of this size, at first and later: one by one, numpy's calls would cost more
than the sums."""
_MAX_WEIGHT_OF_ERROR: Final = 0.5
"""Errors above this count less, in inverse proportion (Huber): a step that waited for the machine is no evidence."""
_PRIOR_WEIGHT: Final = 4.0
"""The weight of an earlier model's prediction at each shape of _PRIOR_SHAPES, and of a warm-up's steps of each kind and
size together, in steps."""
_RIDGES: Final = {"step": 1e-9, "decode_context_token": 1e-5, "prefill_context_token": 0.1, "prefill_pair": 0.1}
_RIDGE: Final = np.array([_RIDGES.get(name, 1e-6) for name in FEATURES])
"""Small for the constant, which so gets what the steps do not tell apart, and largest for the context. One request more
is believed to cost little as long as an engine has decoded single requests only. An engine that is believed to be quick
gets requests, and is soon known; one that is believed to be slow would get none, and the error would stay. Pairs of a
query and a key are blamed only where prompts of several lengths show it clearly: with prompts of one length, steps that
were measured on a quieter machine look like it, too, and a prompt that is four times as long seems to take ten times as
long. With a GPU's tables the ridge takes 16 % off a pair, and 1 % off steps (docs/decisions/0065). Tokens before a
chunk have the same ridge, or they would be blamed for the pairs (docs/decisions/0067)."""
_PRIOR_SHAPES: Final = (
    *(
        StepShape(num_decodes, num_decodes, num_decodes * context)
        for num_decodes in (1, 8, 64, 256)
        for context in (128, 1024, 8192)
    ),
    *(
        StepShape(chunk, num_prefills=1, num_prefill_context=before, num_prefill_pairs=chunk * (before + chunk / 2))
        for chunk in (32, 256, 2048)
        for before in (0, 2048, 8192)
    ),
    *(
        StepShape(chunk + 32, 32, 32 * 1024, 1, before, chunk * (before + chunk / 2))
        for chunk in (64, 512, 2048)
        for before in (0, 4096)
    ),
)
"""The shapes at which a new fit believes an earlier model until it has seen steps of its own."""


@dataclass(slots=True)
class _Bucket:
    """num_steps: the sum of the weights of the steps in the sums

    is_prior: whether the bucket has predictions of a prior only, and no steps
    followed: the factor by which these steps would take longer now than they took: for a prior's predictions as much
              longer as the engine's steps take than it says, else by the drifts of other sizes
    """

    gram: Floats = field(default_factory=lambda: np.zeros((NUM_FEATURES, NUM_FEATURES)))
    moment: Floats = field(default_factory=lambda: np.zeros(NUM_FEATURES))
    num_steps: float = 0.0
    is_prior: bool = True
    followed: float = 1.0

    def limit_weight(self, num_steps: float) -> None:
        """Let the steps so far count as this many at most."""
        part = min(1.0, num_steps / self.num_steps)
        self.gram *= part
        self.moment *= part
        self.num_steps *= part

    def add(self, inputs: Floats, weights: Floats) -> None:
        """Add steps, the oldest first. inputs: [n, NUM_FEATURES], features / seconds; weights: [n]"""
        kept = weights * _KEPT ** np.arange(len(weights) - 1, -1, -1)
        all_kept = _KEPT ** len(weights)
        self.gram = all_kept * self.gram + (kept[:, None] * inputs).T @ inputs
        self.moment = all_kept * self.moment + kept @ inputs
        before = all_kept * self.num_steps
        self.num_steps = before + float(kept.sum())
        if self.num_steps > 0:
            # The new steps need no factor.
            self.followed **= before / self.num_steps

    def follow(self, factor: float) -> None:
        """Believe that the steps would take `factor` times as long now, within _MAX_FOLLOWED of what they took."""
        self.follow_to(min(max(self.followed * factor, 1 / _MAX_FOLLOWED), _MAX_FOLLOWED))

    def follow_to(self, followed: float) -> None:
        """Believe that the steps would take `followed` times as long as they took."""
        factor, self.followed = followed / self.followed, followed
        self.gram /= factor**2
        self.moment /= factor

    def misfit(self, coefficients: Floats) -> float | None:
        """Return predicted / measured, on average over the steps of the bucket; None if these are too few to tell."""
        if self.num_steps < _MIN_STEPS_OF_BUCKET:
            return None
        return float(coefficients @ self.moment) / self.num_steps


@dataclass(slots=True)
class _Kind:
    """The buckets and the newest errors of one kind of steps."""

    name: str
    buckets: dict[int, _Bucket] = field(default_factory=dict)
    """By the number of bits of the steps' numbers of tokens."""
    num_steps: int = 0
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT_ERRORS))
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_NEWEST))
    """The newest steps' log(measured / what earlier steps of the same size took)."""
    mean_log: float = 0.0
    """The moving average of the changes."""
    earlier: Residuals | None = None
    """The errors of the model that the fit began with, until there are enough errors of its own."""

    def residuals(self) -> Residuals:
        num_steps = self.num_steps + (0 if self.earlier is None else self.earlier.num_steps)
        if self.earlier is not None and len(self.errors) < _NUM_NEWEST:
            return replace(self.earlier, num_steps=num_steps)
        if not self.errors:
            return Residuals(self.name, num_steps)
        errors = np.fromiter(self.errors, dtype=np.float64)
        low, median, high = (float(one) for one in np.percentile(errors, (10, 50, 90)))
        return Residuals(self.name, num_steps, low, median, high, float(np.median(np.abs(errors))))

    def note_error(self, ratio: float, misfit: float | None) -> None:
        """Take the error of a prediction.

        ratio:  measured / predicted
        misfit: predicted / measured of earlier steps of this size, by the same coefficients; None: there were too few
        """
        self.errors.append(ratio - 1)
        if misfit is None and self.earlier is not None and self.num_steps < _NUM_STEPS_BESIDE_PRIOR:
            misfit = 1.0  # A prior is what earlier steps of each size took.
        if misfit is not None and misfit > 0:
            change = min(max(math.log(ratio * misfit), -1.0), 1.0)
            self.changes.append(change)
            self.mean_log += _DRIFT_RATE * (change - self.mean_log)

    def drift(self) -> float | None:
        """Return the factor by which steps have become slower than they were; None if they have not changed.

        A model that fits some sizes badly is no drift: each step is compared with earlier ones of its size.
        """
        if self.num_steps < _MIN_STEPS_FOR_DRIFT:
            return None
        if abs(self.mean_log) <= max(_MIN_DRIFT, _DRIFT_SIGMAS * self.residuals().sigma):
            return None
        return math.exp(float(np.median(self.changes)))

    def follow(self, factor: float) -> None:
        """Believe that the steps in the sums would take `factor` times as long now."""
        self.mean_log = 0.0
        self.changes.clear()
        for bucket in self.buckets.values():
            if not bucket.is_prior:
                bucket.follow(factor)


class StepCostFit:
    """Takes the shapes and durations of steps, and gives the newest model. One thread uses it."""

    def __init__(self, prior: StepCostModel | None = None) -> None:
        """prior: a model that was fitted earlier or elsewhere to the same model on the same device

        It is believed for the kinds of steps that it knows. An engine that only decodes has a guess for prompts.
        """
        self._kinds = [_Kind(name) for name in KINDS]
        self._warm_up: list[_Bucket] = []
        self._new: list[tuple[StepShape, float]] = []
        self._model: StepCostModel | None = None
        self._num_drifts = 0
        self._coefficients = np.zeros(NUM_FEATURES)
        self._prior: Floats | None = None
        if prior is not None:
            self._believe(prior)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take in a step that computed something; a duration of 0 is ignored."""
        if shape.num_tokens <= 0 or not 0 < seconds < math.inf:
            return
        self._new.append((shape, seconds))
        self._model = None
        if len(self._new) >= _BATCHES[self._num_steps >= _BATCHES[1]]:
            self._take_in()

    def end_warm_up(self) -> None:
        """Note that the steps so far ran while the machine did nothing else. Without effect if there was a prior.

        They are what later steps are compared with, as a prior's predictions are.
        """
        if self._prior is not None:
            return
        self._take_in()
        for number, kind in enumerate(self._kinds):
            if kind.buckets:
                self._warm_up.extend(kind.buckets.values())
                self._kinds[number] = _Kind(kind.name, earlier=kind.residuals())
        for bucket in self._warm_up:
            bucket.limit_weight(_PRIOR_WEIGHT)
        if self._warm_up:
            self._prior = self._coefficients

    @property
    def num_own_steps(self) -> int:
        """How many steps the fit has seen itself, without those of a warm-up that has ended."""
        return self._num_steps + len(self._new)

    def model(self) -> StepCostModel:
        """Return the model that fits all steps so far. Its numbers of steps include those of the model before it."""
        if self._model is None:
            self._take_in()
            residuals = tuple(kind.residuals() for kind in self._kinds)
            self._model = StepCostModel(_to_tuple(self._coefficients), residuals, self._num_drifts)
        return self._model

    def lasting_model(self) -> StepCostModel:
        """Return the model for later fits to begin with: sizes that are no longer run are as they were measured.

        model() has them changed by the drifts of others. From one fit to the next these changes would add up.
        """
        model = self.model()
        return replace(model, coefficients=_to_tuple(self._solved(lasts=True)))

    @property
    def _num_steps(self) -> int:
        return sum(kind.num_steps for kind in self._kinds)

    def _believe(self, prior: StepCostModel) -> None:
        """Take in the prior's predictions as if they were steps, which own steps of the same bucket soon outweigh."""
        self._prior = self._coefficients = np.asarray(prior.coefficients)
        for kind in self._kinds:
            # Steps that mix both are the sum of what both take.
            parts = ("decode", "prefill") if kind.name == "mixed" else (kind.name,)
            if all(prior.knows(part) for part in parts):
                kind.earlier = next((one for one in prior.residuals if one.kind == kind.name), Residuals(kind.name))
        features = features_of_shapes(list(_PRIOR_SHAPES))
        for shape, inputs, predicted in zip(_PRIOR_SHAPES, features, features @ self._coefficients, strict=True):
            if predicted > 0 and self._kinds[bucket_key(shape)[0]].earlier is not None:
                self._bucket_of(shape).add(inputs[None] / predicted, np.array([_PRIOR_WEIGHT]))
        if any(kind.earlier is None for kind in self._kinds):
            self._coefficients = self._solved()

    def _bucket_of(self, shape: StepShape) -> _Bucket:
        number, size = bucket_key(shape)
        return self._kinds[number].buckets.setdefault(size, _Bucket())

    def _take_in(self) -> None:
        if not self._new:
            return
        shapes, features = [shape for shape, _ in self._new], features_of_shapes([shape for shape, _ in self._new])
        seconds = np.array([measured for _, measured in self._new])
        self._new = []
        predicted = features @ self._coefficients
        ratios = np.divide(seconds, predicted, out=np.ones_like(seconds), where=predicted > 0)
        weights = np.minimum(1.0, _MAX_WEIGHT_OF_ERROR / np.maximum(np.abs(ratios - 1), 1e-9))
        members: dict[tuple[int, int], list[int]] = {}
        # A prediction that rests on hardly any step of its kind is a guess, and its error says nothing.
        can_predict = [kind.earlier is not None or kind.num_steps >= _MIN_STEPS_OF_BUCKET for kind in self._kinds]
        for index, shape in enumerate(shapes):
            members.setdefault(bucket_key(shape), []).append(index)
            number = bucket_key(shape)[0]
            kind = self._kinds[number]
            kind.num_steps += 1
            if predicted[index] > 0 and can_predict[number]:
                kind.note_error(float(ratios[index]), self._bucket_of(shape).misfit(self._coefficients))
        for kind in self._kinds:
            if (factor := kind.drift()) is not None:
                self._num_drifts += 1
                kind.follow(factor)
        for indices in members.values():
            bucket = self._bucket_of(shapes[indices[0]])
            if bucket.is_prior:
                bucket.is_prior, bucket.followed = False, 1.0
            bucket.add(features[indices] / seconds[indices, None], weights[indices])
        self._follow_prior()
        self._coefficients = self._solved()

    def _follow_prior(self) -> None:
        """Believe that what the prior or the warm-up says takes longer by as much as the engine's own steps do.

        The prior was measured on another machine, or at another time, and the warm-up on a quiet machine. The factor is
        one to the prior itself: it goes up and down with the engine's speed, and errors of it do not add up. It is that
        of the sums to which the coefficients are fitted, so that a model that is saved and becomes a prior has both at
        one speed. Steps of kinds that the prior does not know do not count: they say how wrong its guess was, and not
        how quick the engine is.
        """
        if self._prior is None:
            return
        buckets = [bucket for kind in self._kinds if kind.earlier is not None for bucket in kind.buckets.values()]
        own = [bucket for bucket in buckets if not bucket.is_prior]
        if sum(one.num_steps for one in own) < _MIN_STEPS_OF_BUCKET:
            return
        # The factor c that minimises the sum of (c * x - 1)^2, as the coefficients do: x is predicted / measured.
        sums = sum(float(self._prior @ one.moment) for one in own)
        squares = sum(float(self._prior @ one.gram @ self._prior) for one in own)
        if sums <= 0 or squares <= 0:
            return
        for bucket in (*self._warm_up, *(bucket for bucket in buckets if bucket.is_prior)):
            bucket.follow_to(sums / squares)

    def _solved(self, *, lasts: bool = False) -> Floats:
        """Return the coefficients that fit all buckets. lasts: what they followed is undone"""
        own = [bucket for kind in self._kinds for bucket in kind.buckets.values()]
        buckets = [*self._warm_up, *own]
        coefficients = np.zeros(NUM_FEATURES)
        if not buckets:
            return coefficients
        undone = [bucket.followed if lasts and not bucket.is_prior else 1.0 for bucket in own]
        undone = [1.0] * len(self._warm_up) + undone
        gram = np.sum([factor**2 * bucket.gram for factor, bucket in zip(undone, buckets, strict=True)], axis=0)
        moment = np.sum([factor * bucket.moment for factor, bucket in zip(undone, buckets, strict=True)], axis=0)
        # Features differ by powers of ten: solve for coefficients of features whose sums of squares are 1.
        scale = np.sqrt(np.diagonal(gram))
        seen = np.flatnonzero(scale)
        scaled = gram[np.ix_(seen, seen)] / np.outer(scale[seen], scale[seen]) + np.diag(_RIDGE[seen])
        coefficients[seen] = solve_nonnegative(scaled, moment[seen] / scale[seen]) / scale[seen]
        return coefficients


def _to_tuple(coefficients: Floats) -> tuple[float, ...]:
    return tuple(float(one) for one in coefficients)


def bucket_key(shape: StepShape) -> tuple[int, int]:
    """Return the index in KINDS of the step's kind, and the number of bits of its number of tokens."""
    name = "decode" if not shape.num_prefills else "mixed" if shape.num_decodes else "prefill"
    return KINDS.index(name), int(shape.num_tokens).bit_length()
