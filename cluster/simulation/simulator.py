"""Simulates a cluster that serves a workload: discrete events in virtual time, deterministic from a seed.

    clients -> SimulatedIngress (admission, router, recovery) -> SimulatedEngine (scheduler) <-> SharedNetwork
    SimulatedFleet (reconciler) -> engines start, drain, change their roles, and leave

What decides is the product's code, unchanged, with the virtual clock passed in. Models stand for what it decides about:
steps take as long as StepTimes says, transfers share the engines' interfaces, clients send what the workload says.

Prefixes come from other engines' caches over the links, and from the host tier (kv_transfer.cpu_cache_gib).

Not simulated: the network between clients, ingresses and engines (messages take no time), tokenizing, other stores of
KV outside of engines, and a scheduler that works while its step runs.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from actors.core.outputs.engine_core_outputs import EngineCoreOutputs
from actors.core.outputs.sent_work import SentWork
from cluster.routing.decision import Decision
from cluster.simulation.cluster_spec import ClusterSpec
from cluster.simulation.engines.counted_tokens import check_block_size
from cluster.simulation.engines.simulated_engine import SimulatedEngine
from cluster.simulation.event_queue import EventQueue
from cluster.simulation.faults.fault import Fault, KillEngine, Partition, SlowEngine, StopEngine
from cluster.simulation.fleet.fleet_member import FleetMember
from cluster.simulation.fleet.orders import FleetControl, Order, ScaleRole, SetRole
from cluster.simulation.fleet.simulated_fleet import SimulatedFleet
from cluster.simulation.ingresses.simulated_ingress import SimulatedIngress
from cluster.simulation.simulation_result import SimulatedRequest, SimulationResult
from cluster.simulation.workloads.workload_request import WorkloadRequest

_OBJECTS_BEFORE_COLLECTION: Final = 100_000


def simulate(
    spec: ClusterSpec,
    workload: Iterable[WorkloadRequest],
    *,
    seed: int,
    faults: Iterable[Fault] = (),
    orders: Iterable[Order] = (),
    control: FleetControl | None = None,
    keep_decisions: bool = False,
    fast_forward: bool = True,
    until_s: float = math.inf,
) -> SimulationResult:
    """Let a cluster serve a workload, and return what became of it.

    workload:       read as it is offered, in the order of arrival
    seed:           draws which ingress a request comes to, and when engines report
    orders:         of operators, who scale roles and change them
    control:        decides about the engines as time goes by, as a planner does; None: nobody does
    keep_decisions: keep why each route was chosen, as `raypd explain` shows it
    fast_forward:   take decode steps many at once where nothing else is due; the result is the same without
    until_s:        the simulation ends at this time, or when all requests have ended
    Raises ValueError if the workload does not fit the cluster, or is out of order.
    """
    with _few_collections():
        simulation = Simulation(spec, seed, keep_decisions=keep_decisions, fast_forward=fast_forward, control=control)
        for fault in faults:
            simulation.plan_fault(fault)
        for order in orders:
            simulation.plan_order(order)
        with _frozen():
            return simulation.run(iter(workload), until_s)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Let the garbage collector run rarely.

    Nearly all objects of a simulation are freed by their reference counts, as they are in no cycle.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def _frozen() -> Iterator[None]:
    """Let the garbage collector leave what there is alone: the cluster's blocks, of which there may be millions."""
    is_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()


class Simulation:
    """A cluster while it is being simulated; simulate() is the whole of it."""

    def __init__(
        self,
        spec: ClusterSpec,
        seed: int,
        *,
        keep_decisions: bool,
        fast_forward: bool,
        control: FleetControl | None = None,
    ) -> None:
        if not spec.engines:
            raise ValueError("the cluster has no engines: name at least one")
        if len({one.block_size for one in spec.engines}) > 1:
            raise ValueError("the engines have different block sizes: give all of them one")
        self._spec = spec
        self._random = random.Random(seed)
        self._events = EventQueue()
        self._results: list[SimulatedRequest | None] = []
        self._num_open = 0
        self._is_offered = self._is_over = False
        self._is_enough: Callable[[], bool] = lambda: False
        self._decisions: list[Decision] | None = [] if keep_decisions else None
        self._ingresses = [
            SimulatedIngress(number, spec, self._events, self._on_end, self._decisions, self._announce)
            for number in range(spec.num_ingresses)
        ]
        self._fleet = SimulatedFleet(
            spec, self._events, self._ingresses, self._deliver, self._random, fast_forward=fast_forward
        )
        if control is not None:
            self._events.at(control.interval_s, self._let_control, control)

    def run(
        self,
        workload: Iterator[WorkloadRequest],
        until_s: float,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> SimulationResult:
        """Offer the workload, and let events happen until all requests have ended, or until a time.

        is_enough: asked whenever requests have ended; if it says so, the simulation ends
        """
        self._offer_next(workload)
        self._is_enough = is_enough
        self._events.run(until_s, lambda: self._is_over or (self._is_offered and not self._num_open))
        for ingress in self._ingresses:
            for index, unfinished in ingress.unfinished():
                self._results[index] = unfinished
        requests = [found for found in self._results if found is not None]
        assert len(requests) == len(self._results), "each request has a result"
        totals, points = self._fleet.totals(), self._fleet.points
        return SimulationResult(requests, totals, self._decisions or (), self._events.now_s, points)

    def result_of(self, index: int) -> SimulatedRequest | None:
        """Return what became of a request, by its number in the workload; None as long as it has not ended."""
        return self._results[index] if index < len(self._results) else None

    def settle(self, seconds: float) -> None:
        """Let further time pass after run(), in which engines end what they have under way."""
        until_s = self._events.now_s + seconds
        self._events.run(until_s, lambda: False)

    def check_integrity(self) -> None:
        """Raise IntegrityError if an engine's scheduler contradicts itself."""
        for engine in self._fleet.serving:
            engine.check_integrity()

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests and transfers hold, in all engines that live."""
        return sum(engine.num_held_blocks for engine in self._fleet.serving)

    # -- clients -------------------------------------------------------------------------------------------------

    def _offer_next(self, workload: Iterator[WorkloadRequest]) -> None:
        offered = next(workload, None)
        if offered is None:
            self._is_offered = True
            return
        if offered.arrival_s < self._events.now_s:
            raise ValueError(
                f"request {offered.request_id} comes at {offered.arrival_s} s, and the one before it at "
                f"{self._events.now_s} s: sort the workload by arrival"
            )
        check_block_size(self._spec.engines[0].block_size, has_hashes=bool(offered.block_hashes))
        self._events.at(offered.arrival_s, self._offer, offered, workload)

    def _offer(self, offered: WorkloadRequest, workload: Iterator[WorkloadRequest]) -> None:
        self._results.append(None)
        self._num_open += 1
        number = self._random.randrange(len(self._ingresses)) if len(self._ingresses) > 1 else 0
        self._ingresses[number].take(len(self._results) - 1, offered)
        self._offer_next(workload)

    def _on_end(self, index: int, result: SimulatedRequest) -> None:
        self._results[index] = result
        self._num_open -= 1
        self._is_over = self._is_enough()

    def _deliver(self, engine: SimulatedEngine, ingress: int, outputs: EngineCoreOutputs) -> None:
        self._ingresses[ingress].on_outputs(engine, outputs)

    def _announce(
        self, number: int, engine: SimulatedEngine, works: Sequence[SentWork], left: Sequence[SentWork]
    ) -> None:
        """Let an engine tell all ingresses but the one with this number what that one has sent, and what has left."""
        num_submitted, due_s = engine.num_taken.total(), self._events.now_s + self._spec.stats_delay_s
        for ingress in self._ingresses:
            if ingress.number != number and not engine.is_stopped:
                self._events.at(due_s, ingress.on_announced, engine, num_submitted, works, left)

    # -- what operators ask for ----------------------------------------------------------------------------------

    def _let_control(self, control: FleetControl) -> None:
        control.look(self._fleet, self._ingresses, self._events.now_s)
        self._events.at(self._events.now_s + control.interval_s, self._let_control, control)

    def plan_order(self, order: Order) -> None:
        """Let an operator's order come at its time."""
        match order:
            case ScaleRole():
                self._events.at(order.at_s, self._fleet.scale, {order.role: order.count})
            case SetRole():
                self._events.at(order.at_s, self._fleet.set_role, order.engine_id, order.role)

    # -- faults --------------------------------------------------------------------------------------------------

    def plan_fault(self, fault: Fault) -> None:
        """Let a fault happen at its time. Raises ValueError if it names an engine that is not there."""
        named = fault.engine_ids if isinstance(fault, Partition) else {fault.engine_id}
        members = {member.slot.engine_id: member for member in self._fleet}
        if unknown := sorted(named - members.keys()):
            raise ValueError(f"a fault names {', '.join(unknown)}; engines are: {', '.join(members)}")
        events = self._events
        match fault:
            case KillEngine():
                events.at(fault.at_s, self._fleet.kill, members[fault.engine_id])
            case StopEngine():
                events.at(fault.at_s, self._stop, members[fault.engine_id], fault.until_s)
            case SlowEngine():
                events.at(fault.at_s, self._slow, members[fault.engine_id], fault.factor)
                events.at(fault.until_s, self._slow, members[fault.engine_id], 1.0)
            case Partition():
                events.at(fault.at_s, self._cut, fault)
                events.at(fault.until_s, self._fleet.network.mend, fault.engine_ids)

    def _stop(self, member: FleetMember, until_s: float) -> None:
        engine, now_s = member.engine, self._events.now_s
        if engine is None or engine.is_dead:
            return
        engine.stop(until_s)
        links_lost_s = now_s + self._spec.kv_transfer.link_timeout_s
        if links_lost_s < until_s:
            self._events.at(links_lost_s, self._lose_links, frozenset({engine.descriptor.engine_id}))
        given_up_s = now_s + self._spec.ingress.engine_timeout_s
        if given_up_s < until_s:
            self._events.at(given_up_s, self._fleet.give_up_for_a_while, engine, until_s)

    def _slow(self, member: FleetMember, factor: float) -> None:
        if member.engine is not None and not member.engine.is_dead:
            member.engine.slow_down(factor)

    def _cut(self, fault: Partition) -> None:
        self._fleet.network.cut(fault.engine_ids)
        lost_s = self._events.now_s + self._spec.kv_transfer.link_timeout_s
        if lost_s < fault.until_s:
            self._events.at(lost_s, self._lose_links, fault.engine_ids)

    def _lose_links(self, engine_ids: frozenset[str]) -> None:
        """Let the links between these engines and all others break: their ends have not heard of each other."""
        self._fleet.network.lose(engine_ids)
        for key, transfers in list(self._fleet.transfers.items()):
            for other in list(self._fleet.transfers):
                if (key[0] in engine_ids) != (other[0] in engine_ids):
                    transfers.on_link_lost(other)
