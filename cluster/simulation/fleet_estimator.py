"""Estimates how well a fleet would serve a load by a simulation: the planner's estimator.

The load is offered again and again, one copy after the other. The first copies fill the engines with requests, as many
as they would have in the long run; one copy is measured; further copies keep the load up until the measured requests
have ended, or have got so many tokens that the gaps between them are known. So a fleet that falls behind is seen to
fall behind, short loads are not served by idle engines, and nobody waits for the end of the longest answer.

A large fleet is simulated by a slice of it, under the same part of the load: engines of a role that do not divide
evenly become a few engines that are as much faster, so that the capacity of each role stays exact.

A simulation ends early once so many measured requests have missed their aims that the fleet cannot attain them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from actors.config import SchedulerConfig
from actors.core.requests.slo import Slo
from actors.costs.step_cost_model import StepCostModel
from cluster.planning.engine_work import EngineSpeed, mean_context
from cluster.planning.fleet_counts import PLANNED_ROLES, FleetCounts
from cluster.planning.fleet_estimate import PlanAims, ServiceEstimate, quantile
from cluster.planning.load_bootstrap import DrawnLoad
from cluster.planning.offered_load import OfferedRequest
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec, LinkSpec
from cluster.simulation.engines.fitted_costs import fit_step_costs
from cluster.simulation.simulation_result import Outcome, SimulatedRequest
from cluster.simulation.simulator import Simulation
from cluster.simulation.timing.kind_step_times import KindStepTimes
from cluster.simulation.workloads.workload_request import HASHED_TOKENS, WorkloadRequest
from kv_transfer.config import KVTransferConfig

_MAX_ENGINES: Final = 8
"""Larger fleets are simulated by a slice."""
_MAX_WARM_UP: Final = 4.0
"""The most copies of the load before the measured one."""
_FILL_AIMS: Final = 6.0
"""A queue has this many times the aim for the first token to grow before requests are measured."""
_MANY: Final = 1 << 30
_FAST_LINK: Final = 1e15
"""Bytes per second of a link that costs nothing."""
_PATIENCE: Final = 2.0
"""A measured request that takes this many times as long as it should has missed its aims."""
_JUDGED_TOKENS: Final = 200
"""A request that has had the time for so many tokens is judged by those that it has got."""
_MISSES_TO_END: Final = 3.0
"""A simulation ends once this many times as many requests have missed their aims as may miss them."""


class SimulationEstimator:
    """Estimates by simulating the scheduler, the router and the handoffs that serve."""

    name = "simulation"

    def __init__(self, mode: RoutingMode = RoutingMode.COST) -> None:
        """mode: how routes are chosen in the cluster"""
        self._mode = mode
        self._costs: dict[EngineSpeed, StepCostModel] = {}

    def estimate(self, fleet: FleetCounts, load: DrawnLoad, speed: EngineSpeed, aims: PlanAims) -> ServiceEstimate:
        """Estimate the service of a fleet of equal engines under a load."""
        if not load.requests:
            return ServiceEstimate(1.0)
        if not fleet.can_serve:
            return ServiceEstimate(0.0, (), math.inf, math.inf, math.inf, math.inf)
        num_slices = -(-fleet.num_engines // _MAX_ENGINES)
        # Simulated blocks are large, and states take none. Requests fill the same part of the cache as they would.
        part = _part_filled(load, speed.num_state_tokens)
        enlarged = msgspec.structs.replace(speed, num_kv_tokens=int(speed.num_kv_tokens * part))
        return _Run(self._cluster(fleet, num_slices, enlarged, aims), load, num_slices, speed, aims).estimate()

    def _cluster(self, fleet: FleetCounts, num_slices: int, speed: EngineSpeed, aims: PlanAims) -> ClusterSpec:
        engines: list[EngineSpec] = []
        for role in PLANNED_ROLES:
            num_wanted = fleet.of_role(role) / num_slices
            num_engines = max(round(num_wanted), 1) if num_wanted else 0
            engines += [
                self._engine(role, number, speed, num_wanted / num_engines, aims) for number in range(num_engines)
            ]
        return ClusterSpec(
            tuple(engines),
            LinkSpec(speed.link_bytes_per_s or _FAST_LINK, speed.link_round_trip_s / 2),
            max(speed.kv_bytes_per_token, 1),
            self._mode,
            Slo(ttft_s=aims.ttft_s, itl_s=aims.itl_s),
            # What a cluster refuses misses its aims, and what waits too long does as well: refusals change nothing.
            ingress=IngressConfig(max_requests_in_flight=_MANY, max_waiting_tokens=_MANY),
            # A request finds as much of its prompt cached as it did when it was recorded, wherever it goes.
            kv_transfer=KVTransferConfig(prefix_fetch=False),
            state_bytes=speed.num_state_tokens * speed.kv_bytes_per_token,
        )

    def _engine(self, role: EngineRole, number: int, speed: EngineSpeed, share: float, aims: PlanAims) -> EngineSpec:
        """Return an engine that stands for so many of them. share: near 1"""
        own = speed if share == 1.0 else speed.slower_by(1 / share)
        times = KindStepTimes(own.decode, own.prefill, own.mixed)
        scheduler = SchedulerConfig(
            max_num_seqs=own.max_num_seqs, max_num_batched_tokens=max(own.max_num_batched_tokens, own.max_num_seqs)
        )
        if own not in self._costs:
            self._costs[own] = fit_step_costs(times, scheduler)
        num_blocks = max(int(share * own.num_kv_tokens) // HASHED_TOKENS, 1)
        return EngineSpec(
            f"{role.value}-{number}",
            role,
            times,
            num_blocks,
            scheduler,
            step_costs=self._costs[own],
            itl_s=aims.itl_s,
            ttft_s=aims.ttft_s,
        )


class _Run:
    """One simulation of a load, of which one copy is measured: _num_warm_up requests come before it."""

    def __init__(self, spec: ClusterSpec, load: DrawnLoad, num_slices: int, speed: EngineSpeed, aims: PlanAims) -> None:
        self._slo = spec.slo
        self._requests = load.requests
        self._duration_s = num_slices * load.duration_s
        self._num_slices = num_slices
        self._aims = aims
        stay_s = self._stay_s(speed)
        fill_s = max(stay_s, _FILL_AIMS * (aims.ttft_s or 0.0))
        copies = min(fill_s / self._duration_s, _MAX_WARM_UP) if self._duration_s > 0 else 0.0
        self._num_warm_up = math.ceil(copies * len(load.requests))
        patience_s = _PATIENCE * (stay_s + (aims.ttft_s or 0.0))
        if aims.ttft_s is not None:
            patience_s = min(patience_s, aims.ttft_s + _JUDGED_TOKENS * self._full_step_s(speed))
        self._until_s = (1 + copies) * self._duration_s + patience_s
        self._most_missed = _MISSES_TO_END * (1 - aims.attainment) * len(load.requests)
        self._num_over = self._num_missed = 0
        """The first measured requests that have ended, and those of them that have missed their aims."""
        self._simulation = Simulation(spec, 0, keep_decisions=False, fast_forward=True)

    def estimate(self) -> ServiceEstimate:
        """Simulate, and sum the measured requests up."""
        first, num = self._num_warm_up, len(self._requests)
        result = self._simulation.run(self._workload(), self._until_s, is_enough=self._is_enough)
        measured = result.requests[first : first + num]
        # Once so many have missed their aims, those that have not come, or not ended, count as missed, too.
        meets = SimulatedRequest.meets if self._num_missed > self._most_missed else _meets
        met = tuple(meets(one, self._slo) for one in measured) + (False,) * (num - len(measured))
        ttft_s = sorted(one.ttft_s for one in measured)
        itl_s = sorted(one.tpot_s for one in measured if one.num_output_tokens > 1) or [0.0]
        return ServiceEstimate(
            sum(met) / num,
            met,
            quantile(ttft_s, 0.5) if ttft_s else math.inf,
            quantile(ttft_s, 0.99) if ttft_s else math.inf,
            quantile(itl_s, 0.5),
            quantile(itl_s, 0.99),
        )

    def _stay_s(self, speed: EngineSpeed) -> float:
        """Return how long a long output takes in an engine with as many requests as the aim allows."""
        return quantile(sorted(one.num_output_tokens for one in self._requests), 0.9) * self._full_step_s(speed)

    def _full_step_s(self, speed: EngineSpeed) -> float:
        """Return how long a decode step takes with as many requests as the aim allows."""
        context = mean_context(self._requests)
        batch = speed.batch_within(self._aims.itl_s, context)
        return speed.decode_step_s(batch, batch * context)

    def _workload(self) -> Iterator[WorkloadRequest]:
        """Yield requests until the measured ones have ended."""
        num = len(self._requests)
        skipped, number = -self._num_warm_up % num, 0
        while True:
            copy, at = divmod(number + skipped, num)
            begin_s = copy * self._duration_s - self._requests[skipped].arrived_at_s * self._num_slices
            yield _offered(number, self._requests[at], begin_s, self._num_slices)
            number += 1

    def _is_enough(self) -> bool:
        """Whether the measured requests have ended, or too many of them have missed their aims."""
        num = len(self._requests)
        while self._num_over < num:
            found = self._simulation.result_of(self._num_warm_up + self._num_over)
            if found is None:
                break
            self._num_over += 1
            self._num_missed += not found.meets(self._slo)
        return self._num_over == num or self._num_missed > self._most_missed


def _meets(one: SimulatedRequest, slo: Slo) -> bool:
    """Whether a request has met its aims, or has done so up to the end of the simulation."""
    if one.outcome is Outcome.UNFINISHED:
        one = msgspec.structs.replace(one, outcome=Outcome.COMPLETE)
    return one.meets(slo)


def _part_filled(load: DrawnLoad, num_state_tokens: int) -> float:
    """Return the tokens of the blocks that simulated requests take, for each token that real ones have room for.

    num_state_tokens: for as many tokens a request has room besides, for its recurrent state
    """
    lengths = [one.num_prompt_tokens + one.num_output_tokens for one in load.requests]
    num_simulated = sum(-(-length // HASHED_TOKENS) * HASHED_TOKENS for length in lengths)
    return num_simulated / (sum(lengths) + num_state_tokens * len(lengths))


def _offered(number: int, request: OfferedRequest, begin_s: float, num_slices: int) -> WorkloadRequest:
    """Return a request that finds as much of its prompt cached as the one that was recorded did.

    All prompts begin with parts of one text, so an engine has what any of them had. Of a part that fills no block the
    tokens are left out: as many are computed as were.
    """
    num_hashed, num_left_out = divmod(request.num_known_tokens, HASHED_TOKENS)
    return WorkloadRequest(
        str(number),
        max(begin_s + request.arrived_at_s * num_slices, 0.0),
        max(request.num_prompt_tokens - num_left_out, 1),
        max(request.num_output_tokens, 1),
        tuple(range(num_hashed)),
    )
