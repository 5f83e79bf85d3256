"""Keeps what an ingress knows of one incarnation of a simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.core.outputs.scheduler_stats import LoadReport, SchedulerStats
from actors.core.outputs.sent_work import SentWork
from actors.core.requests.request import EngineCoreRequest
from actors.costs.step_cost_model import StepCostModel
from cluster.routing.engine_connection import EngineDescriptor
from cluster.routing.prefixes.engine_blocks import EngineBlocks
from cluster.simulation.engines.simulated_engine import SimulatedEngine


@dataclass(slots=True, eq=False)
class SimulatedSession:
    """One ingress's session with one incarnation of an engine: what routers see of it.

    tell_others:          takes what this ingress has sent last, and what has left, for the other ingresses
    num_waiting_requests: requests that waited there at the newest report
    reported_at_s:        when that report came
    """

    engine: SimulatedEngine
    ingress: int
    blocks: EngineBlocks
    tell_others: Callable[[SimulatedEngine, Sequence[SentWork], Sequence[SentWork]], None]
    load_report: LoadReport | None = None
    num_waiting_requests: int = 0
    reported_at_s: float = 0.0
    num_prompt_tokens_computed: int = 0
    num_submitted_requests: int = 0
    num_unfinished_requests: int = 0
    is_open: bool = True
    step_costs: StepCostModel | None = field(init=False)
    descriptor: EngineDescriptor = field(init=False)

    def __post_init__(self) -> None:
        self.step_costs, self.descriptor = self.engine.step_costs, self.engine.descriptor

    def submit(self, request: EngineCoreRequest) -> None:
        """Send a request."""
        self.num_submitted_requests += 1
        self.num_unfinished_requests += 1
        self.engine.submit(request, self.ingress)

    def announce(self, work: SentWork) -> None:
        """Let the engine tell the other ingresses what work the request brings that was sent last."""
        self.tell_others(self.engine, [work], [])

    def announce_left(self, work: SentWork) -> None:
        """Let the engine tell the other ingresses what work a request has brought that it has no more."""
        self.tell_others(self.engine, [], [work])

    def stats(self) -> tuple[SchedulerStats, float] | None:
        """Return the counters that moves depend on, as of the newest report, and when they came; None before one."""
        report = self.load_report
        if report is None:
            return None
        counters = SchedulerStats(
            num_blocks=report.num_blocks,
            block_size=report.block_size,
            num_free_blocks=report.num_free_blocks,
            num_waiting_reqs=self.num_waiting_requests,
        )
        return counters, self.reported_at_s
