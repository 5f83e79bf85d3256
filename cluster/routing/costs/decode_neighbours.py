"""Predicts what a request that decodes at an engine finds there, and what it does to the prompts computed there."""

from __future__ import annotations

import math
from typing import Final

from actors.core.steps.chunk_budget import LONG_GAP, ROLE_SLACK
from cluster.routing.costs.request_facts import MAX_EXPONENT, MIN_SCALE_S, RequestFacts, miss_probability
from cluster.routing.costs.step_prediction import StepPrediction
from cluster.routing.reported_work import EngineWork

_GAP_COST: Final = 0.02
"""Long gaps cost this part of a missed aim: enough to keep decodes away from prompts where others have room."""


def decodes_beside(
    facts: RequestFacts, work: EngineWork, prediction: StepPrediction, begins_in_s: float, coming_s: float
) -> tuple[float, float]:
    """Return the number of requests that decode beside one that begins later, and their tokens.

    coming_s: the time until the last one of those has begun to decode whose prompts are not computed yet; 0: all of
              them count as there

    Until it begins those that decode now end, at the rate at which answers of the usual length do, and those that are
    coming begin one after the other, the first of which end as well. The report is a few moments old, and some of those
    that were coming have begun since; they have not ended, as those are deducted. With answers as the unit of time,
    x = begins_in_s, y = coming_s and b = the age of the report, at most 1: exp(-x) of the former are there, and of the
    latter b / (b + y) * exp(-x) + (exp(min(y - x, 0)) - exp(-x)) / (b + y).

    How long an answer takes depends on how many are there, and on whether prompts are queued, with which they share
    their steps. So the number is where it follows from itself. It is found by Steffensen's method: one step, as the
    equation is nearly linear.
    """
    num_decodes, num_context, num_coming = work.num_decodes, work.num_context_tokens, work.num_coming_decodes
    if not num_decodes or coming_s <= 0:
        return num_decodes, num_context
    num_now, age_s, wait_s = num_decodes - num_coming, facts.now_s - work.reported_at_s, work.wait_s(facts.now_s)
    queued_part = min(wait_s / begins_in_s, 1.0) if begins_in_s > 0 else 0.0
    parts = [(num_now + 1) / num_decodes]
    for _ in range(2):
        step_s = _step_s(facts, work, prediction, parts[-1], queued_part)
        answer_s = max(facts.num_output_tokens * step_s, MIN_SCALE_S)
        x = min(begins_in_s / answer_s, MAX_EXPONENT)
        y = min(max(coming_s / answer_s, MIN_SCALE_S), MAX_EXPONENT)
        begun = min(age_s / answer_s, 1.0)
        staying = math.exp(-x)
        come = (begun * staying + math.exp(min(y - x, 0.0)) - staying) / (begun + y)
        parts.append((num_now * staying + num_coming * come) / num_decodes)
    first, second, third = parts
    part, curvature = third, third - 2 * second + first
    if (third - second) * (second - first) > 0:
        # The changes have one direction: they grow for ever, up to all that are there, or else they become smaller.
        is_growing = abs(third - second) >= abs(second - first)
        part = 1.0 if is_growing else min(max(first - (second - first) ** 2 / curvature, 0.0), 1.0)
    return part * num_decodes, part * num_context


def _step_s(
    facts: RequestFacts, work: EngineWork, prediction: StepPrediction, part: float, queued_part: float
) -> float:
    """Return the seconds from one token to the next where a part of the decodes is there.

    queued_part: the part of the time for which prompts are queued, so that each step computes a chunk of one as well
    """
    num_decodes, num_context = part * work.num_decodes, part * work.num_context_tokens
    step_s = prediction.decode_step_s(num_decodes, num_context) / (1 - work.prompt_share)
    if queued_part <= 0:
        return step_s
    # Larger chunks for late prompts would be true, make each choice better, and a burst worse (docs/decisions/0054).
    limits = work.step_limits()
    steps = prediction.prefill_steps(facts.num_tokens, 0, max(num_decodes, 1.0), num_context, *limits)
    return max(queued_part * steps.seconds / steps.num_steps + (1 - queued_part) * step_s, step_s)


def delay_of_prompts(
    facts: RequestFacts,
    work: EngineWork,
    prediction: StepPrediction,
    num_decodes: float,
    num_context: float,
    step_s: float,
    share: float,
) -> tuple[float, float]:
    """Return the seconds by which a request that decodes delays the prompts computed there meanwhile, and a penalty.

    Steps with prompts take longer with one decode more, and where a bound holds them short there are more of them.
    Prompts are taken to be as long as this one, and to come at the rate at which they take their share of the
    engine's time. Each delays those that wait behind it, too. The penalty is for the probability that they miss their
    time to the first token, with the aim of this request.

    num_decodes, num_context: of those beside it; step_s: its time from one token to the next
    share:                    the part of its time that the engine will spend on prompts
    """
    wait_s = work.wait_s(facts.now_s)
    limits = work.step_limits(wait_s)
    num_tokens = facts.num_tokens
    bare_s = prediction.prefill_steps(num_tokens, 0, 0, 0, *limits).seconds
    before_s = prediction.prefill_steps(num_tokens, 0, num_decodes, num_context, *limits).seconds
    after_s = prediction.prefill_steps(num_tokens, 0, num_decodes + 1, num_context + num_tokens, *limits).seconds
    num_prompts = share * facts.num_output_tokens * step_s / max(bare_s, MIN_SCALE_S)
    added_s = max(after_s - before_s, 0.0)
    num_delayed = num_prompts * (1 + wait_s / max(before_s, MIN_SCALE_S) / 2)
    if facts.ttft_s is None:
        return num_delayed * added_s, 0.0
    ttft_s = wait_s + before_s
    later_s = ttft_s * (1 + added_s / max(before_s, MIN_SCALE_S))
    sigma = prediction.prefill_sigma
    more = miss_probability(later_s, facts.ttft_s, sigma) - miss_probability(ttft_s, facts.ttft_s, sigma)
    return num_delayed * added_s, num_prompts * facts.penalty_s * more


def part_in_time(facts: RequestFacts, work: EngineWork, prediction: StepPrediction) -> float:
    """Return the expected part of those that decode beside a request that have had their first tokens in time.

    The others have missed an aim and cannot miss it once more. Those that decode now, and those to come that are late
    already, are as reported. Those that will have begun by then have waited for the engine's queue, and are taken to
    have waited as long as this request would.
    """
    late = miss_probability(work.wait_s(facts.now_s), facts.ttft_s, prediction.prefill_sigma)
    num_late = max(work.num_late, work.num_sent_late)
    return max(1 - num_late / max(work.num_decodes, 1.0), 0.0) * (1 - late)


def mean_gap_s(facts: RequestFacts, work: EngineWork, to_come_s: float, so_far_s: float) -> float:
    """Return the mean of the gaps between tokens that each of those that decode has had, and of those to come.

    How many come is not known: what is left of an answer of the expected length, and at least half of one.

    to_come_s: the mean of those to come; so_far_s: that of those so far, if it was not reported
    """
    had, num_gaps = work.num_gaps_of_each, facts.num_output_tokens
    done = had / (had + max(num_gaps - had, num_gaps / 2))
    return done * (work.decode_gap_s or so_far_s) + (1 - done) * to_come_s


def num_meeting_aims(facts: RequestFacts, work: EngineWork, prediction: StepPrediction) -> float:
    """Return how many of those that decode at an engine, or will, are expected to meet both aims.

    The prompts that are queued there lengthen their gaps: all of them those of requests that decode now, and on average
    half of them those of requests that are queued themselves.
    """
    if not work.num_decodes:
        return 0.0
    step_s = prediction.decode_step_s(work.num_decodes, work.num_context_tokens) / (1 - work.own_prompt_share)
    part_beside = 1 - work.num_coming_decodes / work.num_decodes / 2
    queued_s = part_beside * work.wait_s(facts.now_s) / max(facts.num_output_tokens, 1)
    gap_s = mean_gap_s(facts, work, step_s + queued_s, step_s)
    kept = 1 - miss_probability(gap_s, facts.itl_s, prediction.decode_sigma)
    return work.num_decodes * kept * part_in_time(facts, work, prediction)


def gap_miss_probability(
    facts: RequestFacts, work: EngineWork, prediction: StepPrediction, step_s: float, share: float
) -> float:
    """Return what it costs that more than 1 % of a request's gaps are too long, as a probability to miss its aim.

    It is the probability that steps with prompts make them so, times _GAP_COST, since the aim is one for the mean.
    A gap is too long from LONG_GAP times the aim on. The engine mixes chunks into its steps up to ROLE_SLACK times
    that. Prompts are taken to be as long as this one, and to come at random at the rate at which they take their share
    of the engine's time.
    """
    aim_s, num_output = facts.itl_s, max(facts.num_output_tokens, 1)
    if aim_s is None or not share:
        return 0.0
    chunk = min(facts.num_tokens, max(work.max_num_batched_tokens - work.num_decodes, 1))
    num_decodes, num_context = work.num_decodes + 1, work.num_context_tokens + facts.num_tokens
    longest_s = prediction.prefill_steps(chunk, 0, num_decodes, num_context, work.max_num_batched_tokens).seconds
    gap_s = LONG_GAP * aim_s
    longest_s = min(longest_s, ROLE_SLACK * gap_s)
    num_long = share * num_output * step_s / max(longest_s, MIN_SCALE_S)
    return (_GAP_COST * miss_probability(longest_s, gap_s, prediction.decode_sigma)) * (
        1 - math.exp(-num_long / max(0.01 * num_output, 1.0))
    )
