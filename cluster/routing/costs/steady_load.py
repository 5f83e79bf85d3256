"""Predicts how many requests per second meet their aims if they keep coming: with roles kept, and without roles.

The cost of one placement compares what one request finds now. It cannot choose between two states of a whole cluster.
Where prompts and decodes are mixed on all engines, no request gains by being the first that keeps to the roles, and
where roles are kept, the first one that an engine does alone finds no prompts beside it. So the two states are
compared as a whole, at the size of the requests that come (docs/decisions/0064), by the equations of a steady load.

With roles kept, an engine for prompts computes one after the other, in full steps, and sends its KV, whichever takes
longer. At an engine that decodes r requests per second of L tokens, N = r * L * ITL of them are there (Little's law),
and the ITL is that of a step with N. Without roles, prompts lengthen these steps by the part r * (what a prompt adds to
the steps) of the time. The largest r is the one at which the ITL is the aim.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Final

import msgspec

from cluster.routing.costs.recent_load import RecentRates
from cluster.routing.costs.step_prediction import StepPrediction
from cluster.routing.decision import RoleChoice, RoleUse
from cluster.routing.reported_work import EngineWork

_MIN_GAIN: Final = 1.03
"""One state has to be better by this factor. Most figures of the equations are right within 3 %."""
_BEGINS: Final = 0.6
"""From this part of what the worse state can do, the better one is kept: below that both meet the aims."""
_MOST_KEPT, _MOST_IGNORED = 1.5, 1.15
"""Up to this many times what the better state can do. Beyond that neither meets the aims, and a load that does not last
is served best by what each request finds now. Engines for prompts have a queue that takes some time to become long."""
_DECODES_SPREAD, _MIXED_SPREAD = 0.03, 0.1
"""By this part the mean ITL has to be below the aim for nearly all requests to keep it: batches differ, and without
roles some requests meet more prompts than others."""
_NUM_ROUNDS: Final = 6
_MANY_PROMPTS: Final = 8
"""So many prompts at most share a step."""
_MAX_KINDS: Final = 16
"""Engines of so many different speeds and limits are looked at; a further one does as much as these do on average."""
_FEW_S: Final = 1e-9


class _Sizes(msgspec.Struct, frozen=True):
    """The usual request: tokens of its prompt that are computed, those that are cached, and those that it decodes."""

    num_computed: float
    num_cached: float
    num_output: float

    @property
    def num_context(self) -> float:
        """Tokens of its context while it decodes, on average."""
        return self.num_computed + self.num_cached + self.num_output / 2


class _Rates(msgspec.Struct, frozen=True):
    """The requests per second of one engine that only computes prompts, only decodes, or does all of them."""

    prompts: float
    decodes: float
    alone: float


def choose_role_use(
    offered: RecentRates, prefill: Iterable[EngineWork], decode: Iterable[EngineWork], itl_s: float
) -> RoleChoice:
    """Choose how much roles count for requests that come now.

    offered:         the load
    prefill, decode: the work of the engines of each role; all predict their steps
    itl_s:           the aim for the time between tokens
    """
    if not offered.num_requests:
        return RoleChoice()
    sizes = _Sizes(
        max(offered.num_computed_tokens / offered.num_requests, 1.0),
        max(offered.num_prompt_tokens - offered.num_computed_tokens, 0.0) / offered.num_requests,
        max(offered.num_output_tokens / offered.num_requests, 1.0),
    )
    # Engines of one kind have equal predictions.
    known: dict[object, _Rates] = {}
    average: _Rates | None = None
    prompts = decodes = alone = 0.0
    for is_prefill, works in ((True, prefill), (False, decode)):
        for work in works:
            assert work.prediction is not None, "the fleet is sure"
            kind = work.prediction.coefficients, work.max_num_batched_tokens, _most_decodes(sizes, work)
            rates = known.get(kind)
            if rates is None and len(known) >= _MAX_KINDS:
                rates = average = average or _average(list(known.values()))
            elif rates is None:
                rates = known[kind] = _rates(sizes, work, work.prediction, itl_s)
            alone += rates.alone
            if is_prefill:
                prompts += min(rates.prompts, _sent_per_s(sizes, work))
            else:
                decodes += rates.decodes
    kept, rate = min(prompts, decodes), offered.num_requests
    use = RoleUse.WEIGHED
    if kept > _MIN_GAIN * alone and _BEGINS * alone < rate < _MOST_KEPT * prompts:
        use = RoleUse.KEPT
    elif alone > _MIN_GAIN * kept and _BEGINS * kept < rate < _MOST_IGNORED * alone:
        use = RoleUse.IGNORED
    return RoleChoice(use, rate, kept, alone)


def _average(rates: list[_Rates]) -> _Rates:
    prompts, decodes, alone = (
        statistics.fmean(each) for each in zip(*((one.prompts, one.decodes, one.alone) for one in rates), strict=True)
    )
    return _Rates(prompts, decodes, alone)


def _sent_per_s(sizes: _Sizes, work: EngineWork) -> float:
    """Return the prompts per second whose KV an engine can send; infinity if its bandwidth was not measured yet.

    What was cached where the prompt is computed is taken to be cached where it is decoded, too.
    """
    num_bytes = sizes.num_computed * work.kv_bytes_per_token
    return work.most_bytes_per_s / num_bytes if work.most_bytes_per_s and num_bytes else math.inf


def _rates(sizes: _Sizes, work: EngineWork, prediction: StepPrediction, itl_s: float) -> _Rates:
    """Return what one engine can do in each state."""
    max_num_batched_tokens, most = work.max_num_batched_tokens, _most_decodes(sizes, work)
    size = min(max_num_batched_tokens, _MANY_PROMPTS * sizes.num_computed)
    size, of_each = max(size, sizes.num_computed), sizes.num_computed / max(size, sizes.num_computed)
    prompt_s = prediction.prefill_steps(size, sizes.num_cached, 0, 0, max_num_batched_tokens).seconds * of_each
    decodes = _decodes_per_s(sizes, prediction, itl_s * (1 - _DECODES_SPREAD), 0.0, most)
    added_s, alone, aim_s = prompt_s, 0.0, itl_s * (1 - _MIXED_SPREAD)
    for _ in range(_NUM_ROUNDS):
        alone = _decodes_per_s(sizes, prediction, aim_s, added_s, most)
        num_decodes = max(alone * sizes.num_output * aim_s, 1.0)
        steps = prediction.prefill_steps(
            size, sizes.num_cached, num_decodes, num_decodes * sizes.num_context, max_num_batched_tokens
        )
        added_s, beside_s = steps.added_s * of_each, steps.seconds * of_each
    return _Rates(1 / max(prompt_s, _FEW_S), decodes, min(alone, 1 / max(beside_s, _FEW_S)))


def _most_decodes(sizes: _Sizes, work: EngineWork) -> float:
    """Return how many requests an engine can decode at a time."""
    most = float(work.max_num_seqs or math.inf)
    return min(most, work.num_blocks * work.block_size / sizes.num_context) if work.num_blocks else most


def _decodes_per_s(
    sizes: _Sizes, prediction: StepPrediction, aim_s: float, added_s: float, most_decodes: float
) -> float:
    """Return the most requests per second at which the mean ITL keeps the aim.

    added_s: what the prompt of each adds to steps; most_decodes: how many can be there at a time

    A step with N decodes takes a + b * N seconds, in which b changes little with N, and N = rate * L * aim. So
    a + b * N = aim * (1 - rate * added) is solved a few times, with the b of the last N.
    """
    bare_s, rate = prediction.decode_step_s(0, 0), 0.0
    if bare_s >= aim_s:
        return 0.0
    for _ in range(_NUM_ROUNDS):
        num_decodes = max(min(rate * sizes.num_output * aim_s, most_decodes), 1.0)
        step_s = prediction.decode_step_s(num_decodes, num_decodes * sizes.num_context)
        each_s = (step_s - bare_s) / num_decodes
        rate = (aim_s - bare_s) / (aim_s * max(each_s * sizes.num_output + added_s, _FEW_S))
    if rate * sizes.num_output * aim_s <= most_decodes:
        return rate
    # The batch is full before the ITL is the aim.
    return most_decodes / (sizes.num_output * step_s + most_decodes * added_s)
