"""One request on its way through a simulated cluster, from its arrival until its client has all of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic

import numpy as np

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.slo import Slo
from actors.costs.step_shape import Floats
from cluster.planning.offered_load import OfferedRequest
from cluster.requests.overload_control import AdmittedRequest
from cluster.requests.recovery_decisions import RecoveryDecisions
from cluster.routing.base import EngineT, Route
from cluster.routing.decision import Way
from cluster.routing.engine_connection import EngineKey, EngineRole
from cluster.simulation.engines.counted_tokens import CountedTokens, PromptIdentity
from cluster.simulation.engines.step_log import StepLog
from cluster.simulation.simulation_result import NEVER, Outcome, SimulatedRequest
from cluster.simulation.workloads.workload_request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class Move(Generic[EngineT]):
    """A preempted request's submission to a further engine. request: as that engine has it, under an id of its own"""

    request: EngineCoreRequest
    target: EngineT


@dataclass(slots=True, eq=False)
class RequestFlight(Generic[EngineT]):
    """A request that an ingress has admitted.

    index:      of the request in its workload
    num_tokens: output tokens that the client has got, as far as they were noted: those that an engine's decode steps
                have brought since `log` was opened come to it when it is closed
    log:        the step log of the engine that decodes it now; None if none does
    has_decoded: whether the attempt's decode engine has given a token
    submitted:  the request as its decode engine has it
    move:       None if no further engine has the request
    submitted_ids, lost_targets: all ids of the attempt, and the targets of its moves that have died
    """

    index: int
    offered: WorkloadRequest
    decisions: RecoveryDecisions
    admitted: AdmittedRequest
    route: Route[EngineT] | None = None
    num_attempts: int = 0
    num_tokens: int = 0
    first_token_s: float = NEVER
    last_token_s: float = NEVER
    num_cached_tokens: int = 0
    has_decoded: bool = False
    is_prefilling: bool = False
    submitted: EngineCoreRequest = field(init=False)
    move: Move[EngineT] | None = None
    num_moves: int = 0
    submitted_ids: list[str] = field(default_factory=list)
    lost_targets: set[EngineKey] = field(default_factory=set)
    log: StepLog | None = None
    _gaps: list[Floats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.submitted = self.decisions.request

    @property
    def request_id(self) -> str:
        """The id under which engines have the request now, but for the target of a move."""
        return self.submitted.request_id

    def begin(self, route: Route[EngineT]) -> None:
        """Begin an attempt."""
        self.route, self.submitted = route, self.decisions.request
        self.submitted_ids = [self.request_id]
        self.lost_targets = set()
        self.num_attempts += 1
        self.has_decoded = False
        self.is_prefilling = route.prefill is not None

    def take(self, output: EngineCoreOutput, log: StepLog, now_s: float) -> None:
        """Take in an output that names the request: tokens that come now, or that it has been preempted."""
        self.close_log(output.first_position)
        if output.new_token_ids:
            self._note(now_s, len(output.new_token_ids))
            if not output.finished:
                self.log = log
                log.open(self.request_id)

    def close_log(self, num_tokens: int) -> None:
        """Take in the tokens that decode steps have brought. num_tokens: of the output, in all"""
        log, self.log = self.log, None
        if log is None:
            return
        times_s = log.close(self.request_id, num_tokens - self.num_tokens)
        if len(times_s) > 1:
            self._gaps.append(np.diff(times_s))
            self.last_token_s = float(times_s[-1])
            self.num_tokens = num_tokens

    def _note(self, now_s: float, num_tokens: int) -> None:
        if self.num_tokens:
            self._gaps.append(np.array([now_s - self.last_token_s]))
        else:
            self.first_token_s = now_s
            self.admitted.begin()
        self.last_token_s = now_s
        self.num_tokens += num_tokens

    def result(self, outcome: Outcome) -> SimulatedRequest:
        """Return what became of the request."""
        offered, route = self.offered, self.route
        gaps = np.sort(np.concatenate(self._gaps)) if self._gaps else np.zeros(1)
        prefill = None if route is None else route.prefill
        decode = None if route is None else route.decode.descriptor
        way = None
        if decode is not None:
            alone = Way.DECODE_ALONE if decode.role is EngineRole.DECODE else Way.PREFILL_ALONE
            way = alone if prefill is None else Way.PREFILL_DECODE
        return SimulatedRequest(
            request_id=offered.request_id,
            arrival_s=offered.arrival_s,
            num_prompt_tokens=offered.num_prompt_tokens,
            outcome=outcome,
            first_token_s=self.first_token_s,
            end_s=self.last_token_s if outcome is Outcome.COMPLETE else NEVER,
            num_output_tokens=self.num_tokens,
            num_cached_tokens=self.num_cached_tokens,
            itl_p50_s=_quantile(gaps, 0.5),
            itl_p99_s=_quantile(gaps, 0.99),
            itl_max_s=float(gaps[-1]),
            way=way,
            prefill_engine=None if prefill is None else prefill.descriptor.engine_id,
            decode_engine=None if decode is None else decode.engine_id,
            num_attempts=self.num_attempts,
            num_moves=self.num_moves,
            ttft_aim_s=offered.ttft_s,
            itl_aim_s=offered.itl_s,
            tenant=offered.tenant,
        )


def refused(offered: WorkloadRequest) -> SimulatedRequest:
    """Return the result of a request that no ingress has admitted."""
    return SimulatedRequest(
        request_id=offered.request_id,
        arrival_s=offered.arrival_s,
        num_prompt_tokens=offered.num_prompt_tokens,
        outcome=Outcome.REFUSED,
        ttft_aim_s=offered.ttft_s,
        itl_aim_s=offered.itl_s,
        tenant=offered.tenant,
    )


def core_request(index: int, offered: WorkloadRequest, now_s: float) -> EngineCoreRequest:
    """Return a workload's request as an ingress routes and submits it. index: of the request in its workload"""
    identity = PromptIdentity(index, offered.num_prompt_tokens, offered.block_hashes)
    has_aims = offered.ttft_s is not None or offered.itl_s is not None
    return EngineCoreRequest(
        request_id=offered.request_id,
        prompt_token_ids=CountedTokens(offered.num_prompt_tokens, identity),
        sampling_params=_sampling(offered.num_output_tokens),
        arrival_time_s=now_s,
        tenant=offered.tenant,
        slo=Slo(ttft_s=offered.ttft_s, itl_s=offered.itl_s) if has_aims else None,
    )


def offered_request(ended: SimulatedRequest) -> OfferedRequest:
    """Return an ended request as the planner takes it in."""
    num_cached_tokens = min(ended.num_cached_tokens, ended.num_prompt_tokens)
    return OfferedRequest(ended.arrival_s, ended.num_prompt_tokens, num_cached_tokens, ended.num_output_tokens)


@lru_cache(maxsize=65_536)
def _sampling(num_output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)


def _quantile(ordered: Floats, part: float) -> float:
    """Return the smallest value that at least this part of the values do not exceed."""
    return float(ordered[max(int(np.ceil(part * len(ordered))) - 1, 0)])
