"""Describes why a request was routed as it was: what each way was expected to cost, and what decided.

These are values. The router makes them; others keep them, compare them with what came true, and print them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec


class Way(StrEnum):
    """The engines that work on a request."""

    DECODE_ALONE = "decode_alone"
    """An engine that prefers to decode does all of it, and computes the prompt in chunks beside its decodes."""
    PREFILL_DECODE = "prefill_decode"
    """One engine computes the prompt and hands its KV over to another engine, which decodes."""
    PREFILL_ALONE = "prefill_alone"
    """An engine that prefers to compute prompts does all of it. So does an engine without a preference."""


class RoutingMode(StrEnum):
    """The rule by which ways are chosen."""

    COST = "cost"
    """The way that costs least, own and inflicted; as long as the cost is not known, the rule of `disaggregate`."""
    DISAGGREGATE = "disaggregate"
    """A prefill and a decode engine wherever a pair exists."""
    AGGREGATE = "aggregate"
    """One engine does all of it, whatever its role."""


class Reason(StrEnum):
    """The rule or the fact that decided between the ways."""

    COST = "cost"
    """The chosen placement costs least."""
    TIE_DRAWN = "tie_drawn"
    """Several placements cost the same within the error of the prediction, and one was drawn."""
    ONLY_WAY = "only_way"
    """A single placement was possible."""
    MODEL_NOT_SURE = "model_not_sure"
    """An engine cannot predict its steps yet, so the rule of the mode `disaggregate` decided."""
    MODE = "mode"
    """The routing mode leaves no choice of the way."""
    REROUTED = "rerouted"
    """The prompt waited, an engine had computed its own prompts, and the placement there costs less than the wait."""
    OWN_RULE = "own_rule"
    """Requests of this kind are routed by a rule of their own, such as prompts whose vectors are wanted."""


class RoleUse(StrEnum):
    """How much the engines' roles count for a request, by the load of the last seconds."""

    WEIGHED = "weighed"
    """All placements are compared by cost, and roles are a preference."""
    KEPT = "kept"
    """One engine computes the prompt and another one decodes, as long as the first token comes in time so."""
    IGNORED = "ignored"
    """All placements are compared by cost, as if the engines had no roles."""
    OVERLOADED = "overloaded"
    """More prompts wait that will be late than requests decode that can still meet their aims: all placements are
    compared by the request's own time, as if the engines had no roles."""


class RoleChoice(msgspec.Struct, frozen=True):
    """The reason for how much roles count: the load, and the most of it that meets the aims if it lasts.

    offered_per_s: requests per second that come
    kept_per_s:    the most of them whose aims are met if all engines keep to their roles
    ignored_per_s: the same if each engine does all of its requests
    """

    use: RoleUse = RoleUse.WEIGHED
    offered_per_s: float = 0.0
    kept_per_s: float = 0.0
    ignored_per_s: float = 0.0


class RouteTerms(msgspec.Struct, frozen=True):
    """The predicted cost of one placement. All times are in seconds, and total_s is the sum of those marked with *.

    prefill_engine_id: the engine that computes the prompt and hands it over; None if the decode engine computes it
    decode_engine_id:  the engine that decodes
    num_cached_tokens: tokens of the prompt whose KV the engine that computes the prompt already has, or fetches
    """

    way: Way
    prefill_engine_id: str | None
    decode_engine_id: str
    num_cached_tokens: int = 0
    prefill_wait_s: float = 0.0
    """* Waiting until the engine that computes the prompt has computed the prompts that came before."""
    decode_wait_s: float = 0.0
    """* Waiting for prompts that the decode engine computes first, beyond the wait at the prefill engine."""
    prefill_s: float = 0.0
    """* The computation of those tokens of the prompt that are not cached, beside the decodes of that engine."""
    decode_s: float = 0.0
    """* The steps in which the request is expected to decode."""
    inflicted_s: float = 0.0
    """* The time by which the request makes others wait that decode at its engines, summed over them."""
    transfer_s: float = 0.0
    """* The part of the handoff's transfer, the queue before it included, that the prefill does not hide."""
    blocks_wait_s: float = 0.0
    """* Waiting until enough blocks are free at the decode engine."""
    fetch_s: float = 0.0
    """* The fetch of a prefix from a third engine."""
    adapter_s: float = 0.0
    """* The load of the request's adapter, at engines that have not had it."""
    miss_penalty_s: float = 0.0
    """* The penalty for the probability that this request or those beside it miss an aim."""
    total_s: float = 0.0
    ttft_s: float = 0.0
    """The predicted time to the first token."""
    itl_s: float = 0.0
    """The predicted mean time between two tokens."""
    ttft_miss_probability: float = 0.0
    itl_miss_probability: float = 0.0


class Decision(msgspec.Struct, frozen=True):
    """Why a request was routed as it was.

    chosen:          the terms of the route; None if there was nothing to predict with
    others:          the best placement of each way that was possible and not chosen, the cheapest first
    runner_up:       the cheapest placement besides the chosen one, of any way; None if there was no other
    without_roles_s: the cost of the best placement that needs no roles: the cheapest engine that does all of it, in
                     seconds; 0 if it is not known. The sum of chosen costs over the sum of these is the regret of roles
    roles:           how much the engines' roles counted; None if that was not looked at
    """

    request_id: str
    mode: RoutingMode
    reason: Reason
    chosen: RouteTerms | None = None
    others: tuple[RouteTerms, ...] = ()
    runner_up: RouteTerms | None = None
    without_roles_s: float = 0.0
    roles: RoleChoice | None = None


class LateDecision:
    """A decision that is described when it is first asked for: no request waits for the description of its route."""

    __slots__ = ("_describe", "_described")

    def __init__(self, describe: Callable[[], Decision]) -> None:
        """describe: is called at most once, and forgotten then"""
        self._describe: Callable[[], Decision] | None = describe
        self._described: Decision | None = None

    def describe(self) -> Decision:
        """Return the decision."""
        if self._described is None:
            assert self._describe is not None, "one of the two is always there"
            self._described, self._describe = self._describe(), None
        return self._described
