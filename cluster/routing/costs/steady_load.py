"""Predicts how many requests per second meet their aims if they keep coming: with roles kept, and without roles.

The cost of one placement compares what one request finds now. It cannot choose between two states of a whole cluster.
Where prompts and decodes are mixed on all engines, no request gains by being the first that keeps to the roles, and
where roles are kept, the first one that an engine does alone finds no prompts beside it. So the two states are
compared as a whole, at the size of the requests that come (docs/decisions/0064 and 0066), by the equations of a steady
load.

At an engine that decodes r requests per second of L tokens, N = r * L * ITL of them are there (Little's law), and the
ITL is that of a step with N. Without roles, prompts lengthen these steps by the part r * (what a prompt adds to the
steps) of the time. These are means, and nine of ten requests have to keep the aim: a short answer that meets three
prompts where others meet one is late, and while prompts lengthen it, more of them come. That is the busy period of
a queue, whose mean and variance are known.

With roles kept, engines for prompts compute one after the other, in full steps, and send their KV, whichever takes
longer. What they cannot do in time goes to the others; that is not counted, as it comes when it is nearly late.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from cluster.routing.costs.recent_load import RecentRates
from cluster.routing.costs.role_memory import RoleMemory, StateRates
from cluster.routing.costs.step_prediction import StepPrediction
from cluster.routing.decision import RoleChoice, RoleUse
from cluster.routing.reported_work import EngineWork

_MIN_GAIN: Final = 1.03
"""One state has to be better by this factor. The equations err by more, but by about as much for both states."""
_GAIN_AT_FIRST: Final = 1.15
"""To ignore roles has to be better by this factor as long as a load is new: what steps take that mix prompts with many
decodes is a guess until there have been some, and an optimistic one."""
_STAYS: Final = 1.1
"""The state that was chosen last is left once the other one is better by this factor: a change makes both kinds
of requests late for as long as an answer takes."""
_KEPT_PARTS: Final = 0.4, 0.3
_IGNORED_PARTS: Final = 0.6, 0.45
"""From this part of what the worse state can do, the better one is chosen, and below the second part it is left: both
meet the aims then. What engines can do is a guess under a small load, twice the truth at times, and more so where steps
mix prompts with decodes (docs/decisions/0073). To keep roles is safe then, and to ignore them is not."""
_MOST_PROMPTS, _MOST_DECODES, _MOST_IGNORED = 3.0, 1.5, 1.15
"""Up to this many times what engines can do for prompts, for decodes, and without roles. Beyond that neither state
meets the aims, and a load that does not last is served best by what each request finds now. Engines for prompts have a
queue that takes some time to become long; what they cannot do in time goes elsewhere; and the first prompts that share
a prefix look like a larger load."""
_NINE_OF_TEN: Final = 1.2816
"""The standard deviations above the mean below which nine of ten values of a normal distribution lie."""
_LATE_PART: Final = 0.1
"""This part of the prompts may wait longer than their aim allows."""
_NUM_ROUNDS: Final = 16
"""Halvings of an interval that has the solution of an equation. 2^-16 of it is left."""
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


class _Aims(msgspec.Struct, frozen=True):
    """Seconds. ttft_s: infinity without an aim"""

    itl_s: float
    ttft_s: float


class _Rates(msgspec.Struct, frozen=True):
    """The requests per second of one engine that only computes prompts, only decodes, or does all of them.

    used: the part of the rate of prompts of which nine of ten give their first token in time
    """

    prompts: float
    used: float
    decodes: float
    alone: float


def choose_role_use(
    offered: RecentRates,
    prefill: Sequence[EngineWork],
    decode: Sequence[EngineWork],
    itl_s: float,
    ttft_s: float | None = None,
    *,
    memory: RoleMemory | None = None,
    now_s: float = 0.0,
) -> RoleChoice:
    """Choose how much roles count for requests that come now.

    offered:         the load
    prefill, decode: the work of the engines of each role; all predict their steps
    itl_s, ttft_s:   the aims for the time between tokens, and for the first token; None: that may take any time
    memory:          what was found for these aims before, which this choice is added to
    now_s:           the time, by any clock that does not go back
    """
    if not offered.num_requests:
        return RoleChoice()
    if memory is None:
        memory, gain_of_ignored = RoleMemory(), _MIN_GAIN
    else:
        memory.begin(now_s)
        gain_of_ignored = _GAIN_AT_FIRST if memory.is_new else _MIN_GAIN
    aims = _Aims(itl_s, math.inf if ttft_s is None else ttft_s)
    found = memory.averaged(_rates_of_states(offered, prefill, decode, aims), now_s)
    rate, before, chosen = offered.num_requests, memory.use, RoleUse.WEIGHED
    most_kept = min(_MOST_PROMPTS * found.prompts, _MOST_DECODES * found.decodes)
    kept, ignored = found.kept, found.ignored
    for use, (begins, ends), least_gain, most, own, other in (
        (RoleUse.KEPT, _KEPT_PARTS, _MIN_GAIN, most_kept, kept, ignored),
        (RoleUse.IGNORED, _IGNORED_PARTS, gain_of_ignored, _MOST_IGNORED * ignored, ignored, kept),
    ):
        gain = least_gain if before is RoleUse.WEIGHED else 1 / _STAYS if before is use else max(_STAYS, least_gain)
        if own > gain * other and (ends if before is use else begins) * other < rate < most:
            chosen = use
    memory.note(chosen, matters=rate > _KEPT_PARTS[1] * min(kept, ignored))
    return RoleChoice(chosen, rate, found.kept, found.ignored)


def _rates_of_states(
    offered: RecentRates, prefill: Sequence[EngineWork], decode: Sequence[EngineWork], aims: _Aims
) -> StateRates:
    """Return what the engines can do in both states, by what is known of their steps now."""
    sizes = _Sizes(
        max(offered.num_computed_tokens / offered.num_requests, 1.0),
        max(offered.num_prompt_tokens - offered.num_computed_tokens, 0.0) / offered.num_requests,
        max(offered.num_output_tokens / offered.num_requests, 1.0),
    )
    rates = _rates_of(sizes, (*prefill, *decode), aims, len(decode))
    of_prefill, of_decode = rates[: len(prefill)], rates[len(prefill) :]
    sent = [min(one.prompts, _sent_per_s(sizes, work)) for one, work in zip(of_prefill, prefill, strict=True)]
    prompts, in_time = sum(sent), sum(one.used * each for one, each in zip(of_prefill, sent, strict=True))
    decodes, alone = sum(one.decodes for one in of_decode), sum(one.alone for one in rates)
    return StateRates(prompts, decodes, min(in_time, decodes), alone)


def _rates_of(sizes: _Sizes, works: Sequence[EngineWork], aims: _Aims, num_decode: int) -> list[_Rates]:
    """Return the rates of each of these engines. num_decode: so many of them decode where roles are kept"""
    # Engines of one kind have equal predictions.
    known: dict[object, _Rates] = {}
    kinds: list[object] = []
    for work in works:
        assert work.prediction is not None, "the fleet is sure"
        kind = work.prediction.coefficients, work.max_num_batched_tokens, _most_decodes(sizes, work)
        kinds.append(kind)
        if kind not in known and len(known) < _MAX_KINDS:
            known[kind] = _SteadyEngine(sizes, work, work.prediction).rates(aims, num_decode, len(works))
    average = _average(list(known.values()))
    return [known.get(kind, average) for kind in kinds]


def _average(rates: list[_Rates]) -> _Rates:
    return _Rates(*(statistics.fmean(each) for each in zip(*map(msgspec.structs.astuple, rates), strict=True)))


def _sent_per_s(sizes: _Sizes, work: EngineWork) -> float:
    """Return the prompts per second whose KV an engine can send; infinity if its bandwidth was not measured yet.

    What was cached where the prompt is computed is taken to be cached where it is decoded, too.
    """
    num_bytes = sizes.num_computed * work.kv_bytes_per_token
    return work.most_bytes_per_s / num_bytes if work.most_bytes_per_s and num_bytes else math.inf


def _most_decodes(sizes: _Sizes, work: EngineWork) -> float:
    """Return how many requests an engine can decode at a time."""
    most = float(work.max_num_seqs or math.inf)
    return min(most, work.num_blocks * work.block_size / sizes.num_context) if work.num_blocks else most


def _most_used(num_engines: int, room: float) -> float:
    """Return the part of the time that engines can compute prompts so that nine of ten begin in time.

    num_engines: they share a queue, as each prompt goes where it begins first
    room:        how long a prompt may wait, in units of the time that one takes; infinity without an aim

    The wait of a queue with random arrivals, equal durations and c servers, by Sakasegawa's approximation: a prompt
    waits with the probability u^(sqrt(2 (c + 1)) - 1), and then 1 / (2 c (1 - u)) on average, by an exponential law.
    """
    if room <= 0 or math.isinf(room):
        return float(room > 0)
    exponent = math.sqrt(2 * (num_engines + 1)) - 1

    def late(used: float) -> float:
        return math.pow(used, exponent) * math.exp(-2 * num_engines * (1 - used) * room)

    return _highest(lambda used: late(used) <= _LATE_PART, 0.0, 1.0)


def _highest(is_low: Callable[[float], bool], low: float, high: float) -> float:
    """Return the highest value of an interval up to which a condition holds, by halving."""
    for _ in range(_NUM_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low


class _SteadyEngine:
    """One engine under a load that lasts."""

    def __init__(self, sizes: _Sizes, work: EngineWork, prediction: StepPrediction) -> None:
        self._sizes, self._prediction = sizes, prediction
        self._max_num_batched_tokens = work.max_num_batched_tokens
        self._most_decodes = _most_decodes(sizes, work)
        size = min(work.max_num_batched_tokens, _MANY_PROMPTS * sizes.num_computed)
        self._size = max(size, sizes.num_computed)
        """Tokens of the prompts that are computed at a time."""
        self._bare_s = prediction.decode_step_s(0, 0)

    def rates(self, aims: _Aims, num_decode: int, num_engines: int) -> _Rates:
        """Return what the engine can do if the load is shared by so many that decode, or so many engines in all."""
        prompt_s, _ = self._prompt_s(0.0)
        decodes, _ = self._most_per_s(aims.itl_s, num_decode, with_prompts=False)
        alone, beside_s = self._most_per_s(aims.itl_s, num_engines, with_prompts=True)
        prompt_s, beside_s = max(prompt_s, _FEW_S), max(beside_s, _FEW_S)
        used, used_beside = (
            _most_used(number, aims.ttft_s / each_s - 1)
            for number, each_s in ((max(num_engines - num_decode, 1), prompt_s), (num_engines, beside_s))
        )
        return _Rates(1 / prompt_s, used, decodes, min(alone, decodes, used_beside / beside_s))

    def _prompt_s(self, num_decodes: float) -> tuple[float, float]:
        """Return the seconds of a prompt beside so many decodes, and the part that they would not take without it."""
        context = num_decodes * self._sizes.num_context
        steps = self._prediction.prefill_steps(
            self._size, self._sizes.num_cached, num_decodes, context, self._max_num_batched_tokens
        )
        part = self._sizes.num_computed / self._size
        return part * steps.seconds, part * steps.added_s

    def _most_per_s(self, aim_s: float, num_engines: int, *, with_prompts: bool) -> tuple[float, float]:
        """Return the most requests per second of which nine of ten keep the ITL aim, and the seconds of a prompt.

        with_prompts: the engine computes the prompts of those that it decodes

        A step with N decodes takes a + b * N seconds, in which b changes little with N, and N = rate * L * ITL. So
        a + b * N = ITL * (1 - rate * added) is solved for a mean ITL, with the b of the last N, and the mean ITL is
        looked for at which the ITL of nine of ten is the aim.
        """
        num_output, bare_s, most = self._sizes.num_output, self._bare_s, self._most_decodes
        if bare_s >= aim_s:
            return 0.0, self._prompt_s(1.0)[0] if with_prompts else 0.0
        num_decodes, rate, prompt_s, added_s, step_s = 1.0, 0.0, 0.0, 0.0, bare_s

        def keeps(itl_s: float) -> bool:
            nonlocal num_decodes, rate, prompt_s, added_s, step_s
            step_s = self._prediction.decode_step_s(num_decodes, num_decodes * self._sizes.num_context)
            each_s = (step_s - bare_s) / num_decodes
            if with_prompts:
                prompt_s, added_s = self._prompt_s(num_decodes)
            rate = (itl_s - bare_s) / (itl_s * max(each_s * num_output + added_s, _FEW_S))
            num_decodes = max(min(rate * num_output * itl_s, most), 1.0)
            rest = max(1 - rate * added_s, _FEW_S)
            met_s = added_s / num_output
            # Prompts that come while a request decodes and, as they stand behind its own, while it is computed.
            more_s = rate * prompt_s * met_s / rest
            of_prompts_s = met_s * math.sqrt(rate * (num_output * step_s + prompt_s) / num_engines / rest**3)
            of_decodes_s = each_s * math.sqrt(2 / 3 * num_decodes / num_engines) / rest
            return itl_s + more_s + _NINE_OF_TEN * (of_prompts_s + of_decodes_s) <= aim_s

        itl_s = _highest(keeps, bare_s, aim_s)
        if rate * num_output * itl_s <= most:
            return rate, prompt_s
        # The batch is full before the ITL is the aim.
        step_s = self._prediction.decode_step_s(most, most * self._sizes.num_context)
        return most / (num_output * step_s + most * added_s), prompt_s
