"""One engine in virtual time: the product's scheduler, and a model of how long its steps take.

The loop is EngineCore.step()'s, without overlap: schedule, execute, take in. Executing takes as long as StepTimes says;
meanwhile other events happen, and what they report is taken in when the step ends. An engine that has nothing to do
sleeps until something comes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from actors.core.blocks.kv_events import KVEventBatch
from actors.core.outputs.engine_core_outputs import EngineCoreOutputs
from actors.core.outputs.load_report import LoadMeter
from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput, StepBatch
from actors.core.outputs.scheduler_stats import LoadReport, SchedulerStats
from actors.core.requests.request import EngineCoreRequest, Request, RequestStatus
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import StepShape
from actors.sessions.block_messages import CachedBlocks
from actors.sessions.block_reports import BlockReports
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec
from cluster.simulation.engines.counted_tokens import WorkloadHasher, sampled_tokens
from cluster.simulation.engines.decode_run import DecodeRun, has_work, num_free_steps
from cluster.simulation.engines.simulated_scheduler import scheduler_of
from cluster.simulation.engines.step_log import StepLog
from cluster.simulation.event_queue import EventQueue
from cluster.simulation.network.shared_network import SharedNetwork
from cluster.simulation.network.simulated_transfers import Peers, SimulatedTransfers
from cluster.simulation.simulation_result import EngineTotals
from kv_transfer.link_load import LinkLoad
from kv_transfer.sides.scheduler_side import SchedulerSide
from kv_transfer.transfer_stats import TransferStats

MAX_RUN_STEPS: Final = 1024
"""The most steps that are taken at once."""
_NO_TOKENS: Final = np.zeros((0, 1), dtype=np.int64)
_NO_STEP: Final = SchedulerOutput(StepBatch.empty(), [], set())

Deliver = Callable[["SimulatedEngine", int, EngineCoreOutputs], None]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts that the engines of a simulation share.

    deliver:      takes an engine's outputs for an ingress, with its number
    peers:        finds another engine's transfers
    fast_forward: whether decode steps are taken many at once
    """

    cluster: ClusterSpec
    events: EventQueue
    network: SharedNetwork
    deliver: Deliver
    peers: Peers
    fast_forward: bool


class SimulatedEngine:
    """One incarnation of an engine.

    Invariants: at most one of _under_way and _run is set. _version grows whenever what is under way changes, so that
    the event at its earlier end is void.
    """

    def __init__(
        self, number: int, spec: EngineSpec, incarnation: int, step_costs: StepCostModel, around: Surroundings
    ) -> None:
        """number: of the engine in its cluster; step_costs: what it reports to routers"""
        self.number = number
        self.spec = spec
        self.step_costs = step_costs
        self.descriptor = EngineDescriptor(spec.engine_id, incarnation, spec.role, f"{spec.engine_id}:1")
        self.log = StepLog()
        self.is_dead = False
        self._around = around
        self._events = around.events
        self._hasher = WorkloadHasher(spec.block_size)
        self.num_taken: Counter[int] = Counter()
        """How many requests of each ingress were taken in."""
        self._link_loads: tuple[LinkLoad, ...] = ()
        self._slowness, self._stopped_until_s = 1.0, 0.0
        self._version, self._ends_s = 0, 0.0
        self._is_waking = self._is_interrupted = False
        self._alarm_s = math.inf
        """When _ring() is due, as the scheduler has a deadline then."""
        self._under_way: SchedulerOutput | None = None
        self._run: DecodeRun | None = None
        cluster = around.cluster
        self.transfers = SimulatedTransfers(
            self.descriptor.key,
            cluster,
            spec.block_size,
            events=around.events,
            network=around.network,
            peers=around.peers,
            on_progress=self._wake,
        )
        self._connector = SchedulerSide(cluster.kv_transfer, spec.block_size)
        self.scheduler = scheduler_of(self.descriptor.key, spec, cluster, self._connector, around.events.clock)
        budget = self.scheduler.chunk_budget
        budget.set_aims(spec.itl_s, spec.ttft_s)
        budget.set_role(spec.role.value)
        budget.use_model(step_costs)
        pool = self.scheduler.kv_cache_manager.block_pool
        self._meter = LoadMeter(self.scheduler.config, pool, spec.block_size, cluster.kv_bytes_per_token)

    @property
    def is_stopped(self) -> bool:
        """Whether the engine's process stands still."""
        return self._events.now_s < self._stopped_until_s

    def totals(self, served_s: float, held_s: float) -> EngineTotals:
        """Return what this incarnation has done. served_s, held_s: see EngineTotals"""
        self._advance()
        stats = self.scheduler.make_stats()
        return EngineTotals(
            self.descriptor.engine_id,
            busy_s=self.log.busy_s,
            served_s=served_s,
            num_steps=stats.num_steps,
            num_prompt_tokens=stats.num_prompt_tokens_computed,
            num_output_tokens=stats.num_output_tokens,
            num_preemptions=stats.num_preemptions,
            num_sent_bytes=self.transfers.num_sent_bytes,
            held_s=held_s,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError if the scheduler contradicts itself."""
        self._advance()
        self.scheduler.check_integrity()

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests and transfers hold."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_blocks - pool.num_free_blocks

    # -- what ingresses ask for ----------------------------------------------------------------------------------

    def submit(self, request: EngineCoreRequest, ingress: int) -> None:
        """Take a request in."""
        if self.is_dead:
            return
        self._interrupt()
        self.num_taken[ingress] += 1
        now_s = self._events.now_s
        self.scheduler.add_request(Request.from_engine_core_request(request, ingress, self._hasher, now_s=now_s))
        self._wake()

    def abort(self, request_id: str) -> None:
        """End a request, if it is here."""
        if not self.is_dead and request_id in self.scheduler.requests:
            self._interrupt()
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            self._wake()

    def num_output_tokens(self, request_id: str) -> int | None:
        """Return how many output tokens of a request its client has from here; None if the request is not here."""
        self._advance()
        request = self.scheduler.requests.get(request_id)
        return None if request is None else request.num_output_tokens

    def load_report(self) -> LoadReport:
        """Return the engine's load, with the requests of all ingresses as num_taken_requests."""
        self._advance()
        scheduler, links = self.scheduler, self.transfers.link_loads()
        if links is not self._link_loads:
            self._link_loads = links
            scheduler.remote.transfer_stats = TransferStats(link_loads=links)
        prefix = scheduler.kv_cache_manager.prefix_cache_stats
        counts, budget = (prefix, self.num_taken.total()), scheduler.chunk_budget
        bounds_s, now_s, rows = (budget.bound_s, budget.late_after_s), self._events.now_s, scheduler.running
        report = self._meter.report(scheduler.requests, scheduler.remote, rows, *counts, *bounds_s, now_s=now_s)
        ends_s = self._ends_s if self._run is None else self._run.end_of_step_s(now_s)
        return replace(report, describes_in_s=max(ends_s - now_s, 0.0))

    def stats(self) -> SchedulerStats:
        """Return the engine's counters, its load and its cost model, as the controller gets them."""
        return replace(self.scheduler.make_stats(), load_report=self.load_report(), step_costs=self.step_costs)

    @property
    def num_waiting_requests(self) -> int:
        """Requests that wait for their turn, as the engine's counters have them."""
        scheduler = self.scheduler
        return len(scheduler.requests) - len(scheduler.running) - len(scheduler.remote.loading)

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no request, and no transfer holds blocks."""
        return not self.scheduler.has_requests()

    def take_kv_events(self) -> KVEventBatch | None:
        """Return what entered and left the prefix cache since the last call."""
        self._advance()
        return self.scheduler.take_kv_events()

    def cache_snapshot(self) -> list[CachedBlocks]:
        """Return what the prefix cache has; events that were not taken are in it, and are forgotten."""
        self._advance()
        assert self.scheduler.kv_events is not None, "the cache's events are recorded"
        parts: list[CachedBlocks] = []
        reports = BlockReports(self.scheduler.kv_events, self.scheduler.kv_cache_manager, lambda _: None)
        begin: int | None = 0
        while begin is not None:
            begin = reports.send_part(begin, parts.append)
        return parts

    # -- what befalls it -----------------------------------------------------------------------------------------

    def set_role(self, role: EngineRole) -> None:
        """Serve in another role from the next step on; requests that are here go on."""
        self._interrupt()
        self.scheduler.chunk_budget.set_role(role.value)
        self.descriptor = replace(self.descriptor, role=role)

    def slow_down(self, factor: float) -> None:
        """Let steps take longer from the next one on. factor: 1 means as usual"""
        self._interrupt()
        self._slowness = factor

    def stop(self, until_s: float) -> None:
        """Stand still for a while: the step under way ends later by as much as it was interrupted."""
        self._interrupt()
        self._stopped_until_s = max(self._stopped_until_s, until_s)

    def die(self) -> None:
        """End at once. What its clients have got of requests can still be asked."""
        self._advance()
        self.is_dead = True
        self._version += 1

    # -- steps ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Begin a step if none is under way, once all else that happens now has happened."""
        if self.is_dead:
            return
        if self._run is not None:
            self._interrupt()
        elif self._under_way is None and not self._is_waking:
            self._is_waking = True
            self._events.at(max(self._events.now_s, self._stopped_until_s), self._awake)

    def _awake(self) -> None:
        self._is_waking = False
        if not self.is_dead and self._under_way is None and self._run is None:
            self._begin()

    def _begin(self) -> None:
        """Begin the next step, or steps; do what needs no step until something needs one, or nothing is left to do."""
        now_s, scheduler = self._events.now_s, self.scheduler
        if now_s < self._stopped_until_s:
            self._wake()
            return
        while True:
            if self._around.fast_forward and self._begin_run():
                return
            if not has_work(scheduler, self._connector, now_s):
                if not self.transfers.has_output or not self._take_reports(_NO_STEP):
                    break
                continue
            output = scheduler.schedule()
            metadata = output.kv_connector_metadata
            if metadata is not None and not metadata.is_empty():
                self.transfers.start_step(metadata)
            if output.total_num_scheduled_tokens:
                self._under_way = output
                self.log.begin(now_s)
                seconds = self._slowness * self.spec.step_times.step_s(_shape_of(output.batch))
                self._end_at(now_s + seconds)
                return
            if not self._take_reports(output) and output.is_empty():
                break
        deadline_s = scheduler.next_deadline()
        if deadline_s is not None and deadline_s < self._alarm_s:
            self._alarm_s = max(deadline_s, now_s)
            self._events.at(self._alarm_s, self._ring)

    def _ring(self) -> None:
        """Wake at a deadline. Only the earliest one that was asked for counts: _begin() asks for the next one."""
        if self._events.now_s == self._alarm_s:
            self._alarm_s = math.inf
            self._awake()

    def _take_reports(self, output: SchedulerOutput) -> bool:
        """Take in a step that computes nothing, and what transfers report. Returns whether anything came of it."""
        reports = self.transfers.take_output()
        results = ModelRunnerOutput([], _NO_TOKENS, kv_connector_output=reports)
        outputs = self.scheduler.update_from_output(output, results)
        self._deliver(outputs)
        return bool(outputs) or not reports.is_empty()

    def _begin_run(self) -> bool:
        """Begin many decode steps at once, if nothing else is due."""
        num_steps = num_free_steps(self.scheduler, self._connector, self.log, MAX_RUN_STEPS)
        deadline_s = self.scheduler.next_deadline() if num_steps else None
        if not num_steps or (deadline_s is not None and deadline_s <= self._events.now_s):
            return False
        self.scheduler.finished_req_ids.clear()
        self._run = run = DecodeRun(self.scheduler, num_steps, self._events.now_s, self.spec.step_times, self._slowness)
        if deadline_s is not None:
            # The first step that begins at the deadline, or later, has more to do.
            run.end_after_step_at(np.nextafter(deadline_s, 0.0))
        self.log.begin(self._events.now_s)
        self._is_interrupted = False
        self._end_at(float(run.ends_s[-1]))
        return True

    def _interrupt(self) -> None:
        """Let a run end with the step under way, and bring the scheduler to the present."""
        run = self._run
        if run is None or self.is_dead:
            return
        now_s = self._events.now_s
        num_steps = run.num_steps
        run.end_after_step_at(now_s)
        self._advance()
        self._is_interrupted = True
        if run.num_steps != num_steps:
            self._end_at(float(run.ends_s[-1]))

    def _advance(self) -> None:
        """Bring the scheduler to the present, and let a run go on."""
        if self._run is not None and not self.is_dead:
            self._run.advance_to(self._events.now_s)
            self.log.add_all(self._run.take_ends())

    def _end_at(self, time_s: float) -> None:
        self._version += 1
        self._ends_s = time_s
        self._events.at_end_of_step(time_s, self.number, self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        now_s = self._events.now_s
        if now_s < self._stopped_until_s:
            self._end_at(self._stopped_until_s)
            return
        if self._run is not None:
            self._end_run(self._run)
        else:
            self._end_step()
        self._begin()

    def _end_step(self) -> None:
        output, self._under_way = self._under_way, None
        assert output is not None, "a step that ends has begun"
        if output.kv_connector_metadata is not None:
            self.transfers.finish_step(output.kv_connector_metadata)
        self.log.add(self._events.now_s)
        self._take_in(output)

    def _take_in(self, output: SchedulerOutput) -> None:
        """Take in a step that has computed, and what transfers report."""
        reports = self.transfers.take_output()
        tokens = sampled_tokens(output.batch, self.scheduler.requests)
        results = ModelRunnerOutput(output.batch.req_ids, tokens, kv_connector_output=reports)
        self._deliver(self.scheduler.update_from_output(output, results))

    def _end_run(self, run: DecodeRun) -> None:
        self._run = None
        run.finish(self._events.now_s)
        self.log.add_all(run.take_ends())
        self.log.add(self._events.now_s)
        if run.completes_one:
            self._take_in(run.last_step())
            return
        if not self._is_interrupted:
            run.take_last()
            return
        # What has happened meanwhile is taken in before the last step's tokens, as update_from_output() does.
        self.scheduler.kv_cache_manager.end_step(run.free_step() + 1)
        results = ModelRunnerOutput([], _NO_TOKENS, kv_connector_output=self.transfers.take_output())
        outputs = self.scheduler.update_from_output(_NO_STEP, results)
        run.take_last()
        self._deliver(outputs)

    def _deliver(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for ingress, found in outputs.items():
            found.others += self.log.unopened(found.decoded)
            if found.others:
                self._around.deliver(self, ingress, found)


def _shape_of(batch: StepBatch) -> StepShape:
    if batch.num_plain == len(batch):
        return StepShape(len(batch), len(batch), int(batch.num_computed_tokens.sum()))
    return StepShape.of_batch(batch.num_new_tokens, batch.num_computed_tokens)
