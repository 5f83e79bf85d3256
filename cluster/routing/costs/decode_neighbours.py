"""Predicts what a request that decodes at an engine finds there, and what it does to the prompts computed there."""

from __future__ import annotations

import math
from typing import Final

from actors.core.steps.chunk_budget import PROMPTS_FIRST
from cluster.routing.costs.request_facts import MAX_EXPONENT, MIN_SCALE_S, RequestFacts, miss_probability
from cluster.routing.costs.step_prediction import StepPrediction
from cluster.routing.load_book import EngineWork

_ROUNDS: Final = 2


def decodes_beside(
    facts: RequestFacts, work: EngineWork, prediction: StepPrediction, begins_in_s: float
) -> tuple[float, float]:
    """Return the number of requests that decode beside one that begins later, and their tokens.

    Until then those that decode now end, at the rate at which answers of the usual length do, and those whose prompts
    come first begin one after the other, the first of which end as well: with x = begins_in_s / an answer's seconds,
    exp(-x) of the former and (1 - exp(-x)) / x of the latter are there. How long an answer takes depends on how many
    are there: it begins with those that decode now, and the second round is near enough.
    """
    num_decodes, num_context, num_coming = work.num_decodes, work.num_context_tokens, work.num_coming_decodes
    if not num_decodes or begins_in_s <= 0:
        return num_decodes, num_context
    num_now = num_decodes - num_coming
    part = (num_now + 1) / num_decodes
    for _ in range(_ROUNDS):
        step_s = prediction.decode_step_s(part * num_decodes, part * num_context) / (1 - work.prompt_share)
        x = begins_in_s / max(facts.num_output_tokens * step_s, MIN_SCALE_S)
        x = min(max(x, MIN_SCALE_S), MAX_EXPONENT)
        staying = math.exp(-x)
        part = (num_now * staying + num_coming * (1 - staying) / x) / num_decodes
    return part * num_decodes, part * num_context


def delay_of_prompts(
    facts: RequestFacts,
    work: EngineWork,
    prediction: StepPrediction,
    num_decodes: float,
    num_context: float,
    step_s: float,
) -> tuple[float, float]:
    """Return the seconds by which a request that decodes delays the prompts computed there meanwhile, and a penalty.

    Steps with prompts take longer with one decode more, and where a bound holds them short there are more of them.
    Prompts are taken to be as long as this one, and to come at the rate at which they take their share of the
    engine's time. Each delays those that wait behind it, too. The penalty is for the probability that they miss their
    time to the first token, with the aim of this request.

    num_decodes, num_context: of those beside it; step_s: its time from one token to the next
    """
    limits = work.max_num_batched_tokens, work.mixed_step_bound_s
    num_tokens = facts.num_tokens
    bare_s = prediction.prefill_steps(num_tokens, 0, 0, 0, *limits).seconds
    before_s = prediction.prefill_steps(num_tokens, 0, num_decodes, num_context, *limits).seconds
    after_s = prediction.prefill_steps(num_tokens, 0, num_decodes + 1, num_context + num_tokens, *limits).seconds
    wait_s = work.wait_s(facts.now_s)
    num_prompts = work.prompt_share * facts.num_output_tokens * step_s / max(bare_s, MIN_SCALE_S)
    added_s = max(after_s - before_s, 0.0)
    num_delayed = num_prompts * (1 + wait_s / max(before_s, MIN_SCALE_S) / 2)
    if facts.ttft_s is None:
        return num_delayed * added_s, 0.0
    ttft_s = wait_s + before_s
    later_s = ttft_s * (1 + added_s / max(before_s, MIN_SCALE_S))
    sigma = prediction.prefill_sigma
    more = miss_probability(later_s, facts.ttft_s, sigma) - miss_probability(ttft_s, facts.ttft_s, sigma)
    return num_delayed * added_s, num_prompts * facts.penalty_s * more


def gap_miss_probability(facts: RequestFacts, work: EngineWork, prediction: StepPrediction, step_s: float) -> float:
    """Return the probability that more than 1 % of a request's gaps are too long, since steps compute prompts.

    The engine mixes chunks into its steps up to PROMPTS_FIRST times the aim. Prompts are taken to be as long as this
    one, and to come at random at the rate at which they take their share of the engine's time.
    """
    aim_s, num_output = facts.itl_s, max(facts.num_output_tokens, 1)
    if aim_s is None or not work.prompt_share:
        return 0.0
    chunk = min(facts.num_tokens, max(work.max_num_batched_tokens - work.num_decodes, 1))
    num_decodes, num_context = work.num_decodes + 1, work.num_context_tokens + facts.num_tokens
    longest_s = prediction.prefill_steps(chunk, 0, num_decodes, num_context, work.max_num_batched_tokens).seconds
    longest_s = min(longest_s, PROMPTS_FIRST * aim_s)
    num_long = work.prompt_share * num_output * step_s / max(longest_s, MIN_SCALE_S)
    return miss_probability(longest_s, aim_s, prediction.decode_sigma) * (
        1 - math.exp(-num_long / max(0.01 * num_output, 1.0))
    )
