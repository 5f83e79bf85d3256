"""Predicts what a placement of a request costs, in seconds: its own time, and the time that it takes from others.

The cost of a placement is the sum of

    wait + prefill + decode          the request's own time at its engines
    transfer + blocks + fetch        the time for which it waits for KV, or for room
    inflicted                        the seconds by which it delays each request that decodes beside it, summed
    penalty                          for the probability to miss an aim, its own and that of the others

docs/routing.md explains the terms and where each number comes from. The functions here are pure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cluster.routing.costs.decode_neighbours import (
    decodes_beside,
    delay_of_prompts,
    gap_miss_probability,
    mean_gap_s,
    part_in_time,
)
from cluster.routing.costs.request_facts import RequestFacts, miss_probability
from cluster.routing.costs.step_prediction import PrefillSteps, StepPrediction
from cluster.routing.decision import RouteTerms, Way
from cluster.routing.reported_work import EngineWork

_FEW: Final = 1e-3


class PromptCost(msgspec.Struct, frozen=True):
    """The cost of computing the prompt at one engine.

    exposed_from_s: seconds before the end of the computation at which the first chunk is done, and can be sent
    last_part:      the part of the computed tokens that the last chunk has
    sigma:          the standard deviation of the prediction's relative error
    """

    work: EngineWork
    wait_s: float
    blocks_wait_s: float
    seconds: float
    inflicted_s: float
    fetch_s: float
    penalty_s: float
    num_cached_tokens: int
    exposed_from_s: float
    last_part: float
    sigma: float

    @property
    def ends_in_s(self) -> float:
        """The time until the prompt is computed, as far as this engine decides it."""
        return self.wait_s + self.fetch_s + self.seconds


class DecodeCost(msgspec.Struct, frozen=True):
    """The cost of decoding at one engine.

    num_cached_tokens: tokens of the prompt that need not be sent there
    step_s:            the seconds from one token to the next, with the request there
    gap_miss:          what it costs that steps with prompts of others make single gaps too long, although the mean
                       keeps the aim, as a probability to miss it
    prompts_delay_s:   the seconds by which it delays prompts that are computed there meanwhile, summed; counted at
                       engines of role `prefill` only
    """

    work: EngineWork
    num_cached_tokens: int
    wait_s: float
    blocks_wait_s: float
    seconds: float
    step_s: float
    inflicted_s: float
    penalty_s: float
    gap_miss: float = 0.0
    prompts_delay_s: float = 0.0


def prompt_cost(
    facts: RequestFacts,
    work: EngineWork,
    prediction: StepPrediction,
    num_cached: int,
    fetch: tuple[int, float] | None = None,
    *,
    coming_s: float = 0.0,
    prefers_prompts: bool = False,
    ignores_roles: bool = False,
) -> PromptCost:
    """Predict the computation of the prompt at an engine.

    num_cached:      tokens of the prompt whose KV the engine has
    fetch:           the tokens that another engine has, and the seconds until they are here; they are fetched if that
                     is quicker than their computation
    coming_s:        the time until those have begun to decode here whose prompts are not computed yet; 0: all of them
                     count as there
    prefers_prompts: whether the engine's role is `prefill`, so that its steps keep ROLE_SLACK times the aim only
    ignores_roles:   whether the engine is taken to go on with prompts as it does now
    """
    wait_s, share = work.wait_s(facts.now_s), work.share(ignores_roles=ignores_roles)
    num_decodes, num_context = decodes_beside(facts, work, prediction, wait_s, coming_s)
    limits = work.step_limits(wait_s)
    # The last token is always computed: its output is the first new token.
    cached = min(num_cached, facts.num_tokens - 1)
    steps = _prompt_steps(prediction, facts.num_tokens - cached, cached, num_decodes, num_context, limits)
    if wait_s and share:
        # Prompts of a queue share steps that are full, and each ends with a step: half a step later than its own tokens
        # and those before it take, on average, if as many come behind it.
        full = prediction.prefill_steps(limits[0], 0, num_decodes, num_context, *limits)
        wait_s += min(full.seconds / full.num_steps / 2, share * wait_s)
    fetch_s = inflicted_s = penalty_s = room_s = 0.0
    if fetch is not None and fetch[0] > cached:
        there = min(fetch[0], facts.num_tokens - 1)
        shorter = _prompt_steps(prediction, facts.num_tokens - there, there, num_decodes, num_context, limits)
        if shorter.seconds + fetch[1] < steps.seconds:
            steps, cached, fetch_s = shorter, there, fetch[1]
    if num_decodes:
        step_s = prediction.decode_step_s(num_decodes, num_context) / (1 - share)
        room_s = _wait_for_room(facts, work, step_s)
        if not facts.only_own_time:
            inflicted_s = num_decodes * steps.added_s
            missing = _misses_of_each(facts, work, prediction, steps, step_s, prefers_prompts=prefers_prompts)
            penalty_s = num_decodes * facts.penalty_s * missing
    return PromptCost(
        work,
        wait_s,
        room_s,
        steps.seconds,
        inflicted_s,
        fetch_s,
        penalty_s,
        cached,
        steps.seconds * (steps.num_steps - 1) / steps.num_steps,
        steps.last_tokens / max(facts.num_tokens - cached, 1),
        prediction.prefill_sigma,
    )


def _misses_of_each(
    facts: RequestFacts,
    work: EngineWork,
    prediction: StepPrediction,
    steps: PrefillSteps,
    step_s: float,
    *,
    prefers_prompts: bool,
) -> float:
    """Return the probability with which each request that decodes beside a prompt misses its aims because of it.

    steps: those of the prompt; step_s: the time from one token to the next without it
    """
    if facts.itl_s is None:
        return 0.0
    # No gap is longer than the steps with this prompt, which the engine's aim may hold short.
    longest_s = max(steps.seconds / steps.num_steps, step_s)
    later_s = min(step_s + steps.added_s / max(facts.num_output_tokens, 1), longest_s)
    more = _more_misses(facts, work, prediction, step_s, later_s)
    in_time = part_in_time(facts, work, prediction)
    if prefers_prompts:
        # Prompts that come anyway have made their gaps too long.
        in_time *= 1 - gap_miss_probability(facts, work, prediction, step_s, work.prompt_share)
    return in_time * more


def _prompt_steps(
    prediction: StepPrediction,
    num_tokens: int,
    num_before: int,
    num_decodes: float,
    num_context: float,
    limits: tuple[float, float],
) -> PrefillSteps:
    """Predict the computation of a prompt beside an expected number of decodes, which may be a part of one.

    Less than one decode is one with that probability, or else none: steps without a decode are not held short.
    """
    if not 0 < num_decodes < 1:
        return prediction.prefill_steps(num_tokens, num_before, num_decodes, num_context, *limits)
    bare = prediction.prefill_steps(num_tokens, num_before, 0, 0, *limits)
    beside = prediction.prefill_steps(num_tokens, num_before, 1, num_context / max(num_decodes, _FEW), *limits)
    seconds = bare.seconds + num_decodes * (beside.seconds - bare.seconds)
    return PrefillSteps(seconds, beside.added_s, beside.num_steps, beside.last_tokens)


def decode_cost(
    facts: RequestFacts,
    work: EngineWork,
    prediction: StepPrediction,
    num_cached: int = 0,
    *,
    begins_in_s: float = 0.0,
    coming_s: float = 0.0,
    prefers_prompts: bool = False,
    ignores_roles: bool = False,
) -> DecodeCost:
    """Predict the decoding of a request at an engine.

    num_cached:      tokens of the prompt whose KV the engine has
    begins_in_s:     the time until the prompt is computed
    coming_s:        as in prompt_cost()
    prefers_prompts: whether the engine's role is `prefill`, so that its steps keep ROLE_SLACK times the aim only
    ignores_roles:   as in prompt_cost()
    """
    num_output = facts.num_output_tokens
    num_decodes, num_context = decodes_beside(facts, work, prediction, begins_in_s, coming_s)
    before_s = prediction.decode_step_s(num_decodes, num_context) if num_decodes else 0.0
    own_context = facts.num_tokens + num_output / 2
    bare_step_s = prediction.decode_step_s(num_decodes + 1, num_context + own_context)
    wait_s, share = work.wait_s(facts.now_s), work.share(ignores_roles=ignores_roles)
    # Prompts that come later are computed between the steps.
    step_s = bare_step_s / (1 - share)
    inflicted_s = penalty_s = 0.0
    if num_decodes and not facts.only_own_time:
        inflicted_s = num_output * num_decodes * (bare_step_s - before_s)
        if facts.itl_s is not None:
            more = _more_misses(facts, work, prediction, before_s / (1 - share), step_s)
            penalty_s = num_decodes * facts.penalty_s * part_in_time(facts, work, prediction) * more
    prompts_delay_s = 0.0
    if prefers_prompts and share:
        prompts_delay_s, more_s = delay_of_prompts(facts, work, prediction, num_decodes, num_context, step_s, share)
        penalty_s += more_s
    room_s = _wait_for_room(facts, work, step_s)
    gap_miss = gap_miss_probability(facts, work, prediction, step_s, share) if prefers_prompts else 0.0
    return DecodeCost(
        work, num_cached, wait_s, room_s, num_output * step_s, step_s, inflicted_s, penalty_s, gap_miss, prompts_delay_s
    )


def _more_misses(
    facts: RequestFacts, work: EngineWork, prediction: StepPrediction, gap_s: float, longer_s: float
) -> float:
    """Return by how much those that decode will more probably miss their aim if their gaps to come are longer."""
    sigma = prediction.decode_sigma
    before, after = (
        miss_probability(mean_gap_s(facts, work, to_come_s, gap_s), facts.itl_s, sigma)
        for to_come_s in (gap_s, longer_s)
    )
    return after - before


def usual_costs(facts: RequestFacts, work: EngineWork, prediction: StepPrediction) -> tuple[float, float]:
    """Return the seconds that a request without aims and without a cached prefix costs an engine, waits left out.

    They are those for its prompt, PromptCost.seconds + inflicted_s, and those for its decoding, DecodeCost.seconds +
    inflicted_s + blocks_wait_s, beside all that decode now. They are computed here without making the two objects.
    """
    num_decodes, num_context, num_output = work.num_decodes, work.num_context_tokens, facts.num_output_tokens
    limits = work.step_limits()
    steps = _prompt_steps(prediction, facts.num_tokens, 0, num_decodes, num_context, limits)
    bare_step_s = prediction.decode_step_s(num_decodes + 1, num_context + (facts.num_tokens + num_output / 2))
    step_s = bare_step_s / (1 - work.prompt_share)
    inflicted_s = 0.0
    if num_decodes:
        inflicted_s = num_output * num_decodes * (bare_step_s - prediction.decode_step_s(num_decodes, num_context))
    decode_s = num_output * step_s + inflicted_s + _wait_for_room(facts, work, step_s)
    return steps.seconds + num_decodes * steps.added_s, decode_s


def alone_total(facts: RequestFacts, prompt: PromptCost, decode: DecodeCost, adapter_s: float = 0.0) -> float:
    """Return the cost of one engine that does all of it."""
    ttft_s = _ttft_s(prompt, decode, adapter_s)
    total_s = ttft_s + decode.seconds + delay_of_others_s(prompt, decode)
    return total_s + _penalty(facts, prompt, decode, ttft_s, decode.step_s)


def pair_total(facts: RequestFacts, prompt: PromptCost, decode: DecodeCost, adapter_s: float = 0.0) -> float:
    """Return the cost of one engine that computes the prompt and one that decodes."""
    transfer_s, ttft_s = exposed_transfer_s(facts, prompt, decode), _ttft_s(prompt, decode, adapter_s)
    itl_s = decode.step_s + transfer_s / max(facts.num_output_tokens, 1)
    total_s = ttft_s + transfer_s + decode.seconds + delay_of_others_s(prompt, decode)
    return total_s + _penalty(facts, prompt, decode, ttft_s, itl_s)


def terms(way: Way, facts: RequestFacts, prompt: PromptCost, decode: DecodeCost, adapter_s: float = 0.0) -> RouteTerms:
    """Return all terms of a placement, which is a pair if the two costs are of different engines."""
    is_pair = prompt.work is not decode.work
    transfer_s = exposed_transfer_s(facts, prompt, decode) if is_pair else 0.0
    ttft_s = _ttft_s(prompt, decode, adapter_s)
    itl_s = decode.step_s + transfer_s / max(facts.num_output_tokens, 1)
    prefill, decoding = _prediction(prompt.work), _prediction(decode.work)
    return RouteTerms(
        way=way,
        prefill_engine_id=prompt.work.key[0] if is_pair else None,
        decode_engine_id=decode.work.key[0],
        num_cached_tokens=prompt.num_cached_tokens,
        prefill_wait_s=prompt.wait_s,
        decode_wait_s=max(decode.wait_s - prompt.wait_s, 0.0),
        prefill_s=prompt.seconds,
        decode_s=decode.seconds,
        inflicted_s=delay_of_others_s(prompt, decode),
        transfer_s=transfer_s,
        blocks_wait_s=_room_s(prompt, decode),
        fetch_s=prompt.fetch_s,
        adapter_s=adapter_s,
        miss_penalty_s=_penalty(facts, prompt, decode, ttft_s, itl_s),
        total_s=(pair_total if is_pair else alone_total)(facts, prompt, decode, adapter_s),
        ttft_s=ttft_s,
        itl_s=itl_s,
        ttft_miss_probability=_ttft_miss_probability(facts, ttft_s, prefill.prefill_sigma),
        itl_miss_probability=max(miss_probability(itl_s, facts.itl_s, decoding.decode_sigma), decode.gap_miss),
    )


def _ttft_s(prompt: PromptCost, decode: DecodeCost, adapter_s: float) -> float:
    # Prefill begins when blocks are reserved at the decode engine: after the queues of both.
    return max(prompt.wait_s, decode.wait_s) + _room_s(prompt, decode) + prompt.fetch_s + prompt.seconds + adapter_s


def delay_of_others_s(prompt: PromptCost, decode: DecodeCost) -> float:
    """Return the seconds by which a placement delays others: those that decode, and prompts."""
    return prompt.inflicted_s + decode.inflicted_s + decode.prompts_delay_s


def handoff_bytes(facts: RequestFacts, producer: EngineWork, num_cached_at_decode: int) -> float:
    """Return the bytes that a handoff moves: the KV that the decode engine lacks, and the recurrent state."""
    return _kv_bytes(facts, producer, num_cached_at_decode) + _state_bytes(producer)


def _kv_bytes(facts: RequestFacts, producer: EngineWork, num_cached_at_decode: int) -> float:
    return max(facts.num_tokens - num_cached_at_decode, 0) * producer.kv_bytes_per_token


def _state_bytes(work: EngineWork) -> float:
    """Return the bytes of a request's recurrent state, as it is sent: in whole blocks."""
    return work.num_state_blocks * work.block_size * work.kv_bytes_per_token


def exposed_transfer_s(facts: RequestFacts, prompt: PromptCost, decode: DecodeCost) -> float:
    """Return the time from the end of prefill until the last block is at the decode engine.

    Chunks are sent as soon as they are computed, after what the producer has queued; the recurrent state after the
    last.
    """
    work, consumer = prompt.work, decode.work.key[0]
    link, num_bytes = work.link_to(consumer), _kv_bytes(facts, work, decode.num_cached_tokens)
    own_s, state_s = num_bytes / link.bytes_per_s, _state_bytes(work) / link.bytes_per_s
    hidden_s = prompt.exposed_from_s
    exposed_s = max(own_s * prompt.last_part, own_s - hidden_s)
    if link.num_queued_bytes or work.num_queued_bytes:
        exposed_s = max(exposed_s, work.sent_in_s(consumer, num_bytes) - prompt.wait_s - hidden_s)
    return link.round_trip_s + exposed_s + state_s


def fetch_s(work: EngineWork, source: EngineWork, num_tokens: int) -> float:
    """Return the seconds in which an engine gets so many tokens' KV, and the state after them, from another engine."""
    num_bytes = num_tokens * source.kv_bytes_per_token + _state_bytes(source)
    return source.link_to(work.key[0]).round_trip_s + source.sent_in_s(work.key[0], num_bytes)


def _room_s(prompt: PromptCost, decode: DecodeCost) -> float:
    """Return the time until both engines have room: each holds the prompt's blocks."""
    return max(prompt.blocks_wait_s, decode.blocks_wait_s)


def _wait_for_room(facts: RequestFacts, work: EngineWork, step_s: float) -> float:
    """Return the time until enough of those that decode have ended, as they do at the rate of their expected length."""
    num_decodes = work.num_decodes
    if not num_decodes:
        return 0.0
    missing = 0.0
    if work.max_num_seqs:
        missing = num_decodes + 1 - work.max_num_seqs
    if work.num_blocks:
        num_blocks = -(-(facts.num_tokens + 1) // work.block_size) + work.num_state_blocks
        of_each = max(work.num_context_tokens / num_decodes / work.block_size, 1.0) + work.num_state_blocks
        missing = max(missing, (num_blocks - work.num_free_blocks) / of_each)
    if missing <= 0:
        return 0.0
    return missing * facts.num_output_tokens * step_s / num_decodes


def _penalty(facts: RequestFacts, prompt: PromptCost, decode: DecodeCost, ttft_s: float, itl_s: float) -> float:
    if facts.ttft_s is None and facts.itl_s is None:
        return 0.0
    missed = _ttft_miss_probability(facts, ttft_s, prompt.sigma)
    itl_missed = max(miss_probability(itl_s, facts.itl_s, _prediction(decode.work).decode_sigma), decode.gap_miss)
    # A request that misses both aims is one missed request: it need not wait for the engine with short gaps.
    missed += (1 - missed) * itl_missed
    return facts.penalty_s * missed + prompt.penalty_s + decode.penalty_s


def _ttft_miss_probability(facts: RequestFacts, ttft_s: float, sigma: float) -> float:
    """Return the probability that the client's first token is late. ttft_s: from now on"""
    return miss_probability(ttft_s, None if facts.ttft_s is None else facts.ttft_s - facts.waited_s, sigma)


def _prediction(work: EngineWork) -> StepPrediction:
    assert work.prediction is not None, "engines without predictions are not compared by cost"
    return work.prediction
