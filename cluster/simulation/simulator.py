"""Simulates a cluster that serves a workload: discrete events in virtual time, deterministic from a seed.

    clients -> SimulatedIngress (admission, router, recovery) -> SimulatedEngine (scheduler) <-> SharedNetwork

What decides is the product's code, unchanged, with the virtual clock passed in. Models stand for what it decides about:
steps take as long as StepTimes says, transfers share the engines' interfaces, clients send what the workload says.

Not simulated: the network between clients, ingresses and engines (messages take no time), tokenizing, fetches of
prefixes from other engines, stores of KV outside of engines, migrations of preempted requests, and a scheduler that
works while its step runs.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from actors.core.outputs.engine_core_outputs import EngineCoreOutputs
from actors.costs.step_cost_model import StepCostModel
from cluster.routing.decision import Decision
from cluster.routing.engine_connection import EngineKey
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec
from cluster.simulation.engines.counted_tokens import check_block_size
from cluster.simulation.engines.fitted_costs import fit_step_costs
from cluster.simulation.engines.simulated_engine import SimulatedEngine, Surroundings, report_for
from cluster.simulation.event_queue import EventQueue
from cluster.simulation.faults.fault import Fault, KillEngine, Partition, SlowEngine, StopEngine
from cluster.simulation.ingresses.simulated_ingress import SimulatedIngress, SimulatedSession
from cluster.simulation.network.shared_network import SharedNetwork
from cluster.simulation.network.simulated_transfers import SimulatedTransfers
from cluster.simulation.simulation_result import EngineTotals, SimulatedRequest, SimulationResult
from cluster.simulation.workloads.workload_request import WorkloadRequest

_OBJECTS_BEFORE_COLLECTION: Final = 100_000


def simulate(
    spec: ClusterSpec,
    workload: Iterable[WorkloadRequest],
    *,
    seed: int,
    faults: Iterable[Fault] = (),
    keep_decisions: bool = False,
    fast_forward: bool = True,
    until_s: float = math.inf,
) -> SimulationResult:
    """Let a cluster serve a workload, and return what became of it.

    workload:       read as it is offered, in the order of arrival
    seed:           draws which ingress a request comes to, and when engines report
    keep_decisions: keep why each route was chosen, as `raypd explain` shows it
    fast_forward:   take decode steps many at once where nothing else is due; the result is the same without
    until_s:        the simulation ends at this time, or when all requests have ended
    Raises ValueError if the workload does not fit the cluster, or is out of order.
    """
    simulation = Simulation(spec, seed, keep_decisions=keep_decisions, fast_forward=fast_forward)
    for fault in faults:
        simulation.plan_fault(fault)
    with _few_collections():
        return simulation.run(iter(workload), until_s)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Let the garbage collector run rarely, and leave the cluster's blocks alone, of which there may be millions.

    Nearly all objects of a simulation are freed by their reference counts, as they are in no cycle.
    """
    thresholds, is_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not is_frozen:
            gc.unfreeze()


@dataclass(slots=True)
class _Slot:
    """One engine of the cluster, over its incarnations. begun_s: when the present one began to serve"""

    number: int
    spec: EngineSpec
    engine: SimulatedEngine | None = None
    incarnation: int = 0
    begun_s: float = 0.0
    served_s: float = 0.0
    ended: EngineTotals | None = None


class Simulation:
    """A cluster while it is being simulated; simulate() is the whole of it."""

    def __init__(self, spec: ClusterSpec, seed: int, *, keep_decisions: bool, fast_forward: bool) -> None:
        if not spec.engines:
            raise ValueError("the cluster has no engines: name at least one")
        if len({one.block_size for one in spec.engines}) > 1:
            raise ValueError("the engines have different block sizes: give all of them one")
        self._spec = spec
        self._random = random.Random(seed)
        self._events = EventQueue()
        self._network = SharedNetwork(spec.links, self._events)
        self._transfers: dict[EngineKey, SimulatedTransfers] = {}
        self._slots = {one.engine_id: _Slot(number, one) for number, one in enumerate(spec.engines)}
        self._results: list[SimulatedRequest | None] = []
        self._num_open = 0
        self._is_offered = False
        self._decisions: list[Decision] | None = [] if keep_decisions else None
        self._ingresses = [
            SimulatedIngress(number, spec, self._events, self._on_end, self._decisions)
            for number in range(spec.num_ingresses)
        ]
        self._around = Surroundings(
            spec, self._events, self._network, self._deliver, self._transfers.get, fast_forward=fast_forward
        )
        for slot in self._slots.values():
            if slot.spec.start_s <= 0:
                self._start(slot)
            else:
                self._events.at(slot.spec.start_s, self._start, slot)

    def run(self, workload: Iterator[WorkloadRequest], until_s: float) -> SimulationResult:
        """Offer the workload, and let events happen until all requests have ended, or until a time."""
        self._offer_next(workload)
        self._events.run(until_s, lambda: self._is_offered and not self._num_open)
        for ingress in self._ingresses:
            for index, unfinished in ingress.unfinished():
                self._results[index] = unfinished
        requests = [found for found in self._results if found is not None]
        assert len(requests) == len(self._results), "each request has a result"
        totals = [self._totals(slot) for slot in self._slots.values()]
        return SimulationResult(requests, totals, self._decisions or (), self._events.now_s)

    def settle(self, seconds: float) -> None:
        """Let further time pass after run(), in which engines end what they have under way."""
        until_s = self._events.now_s + seconds
        self._events.run(until_s, lambda: False)

    def check_integrity(self) -> None:
        """Raise IntegrityError if an engine's scheduler contradicts itself."""
        for slot in self._slots.values():
            if slot.engine is not None and not slot.engine.is_dead:
                slot.engine.check_integrity()

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests and transfers hold, in all engines that live."""
        engines = [slot.engine for slot in self._slots.values() if slot.engine is not None]
        return sum(engine.num_held_blocks for engine in engines if not engine.is_dead)

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

    def _deliver(self, engine: SimulatedEngine, ingress: int, outputs: EngineCoreOutputs) -> None:
        self._ingresses[ingress].on_outputs(engine, outputs)

    # -- engines -------------------------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        slot.incarnation += 1
        slot.begun_s = self._events.now_s
        engine = SimulatedEngine(slot.number, slot.spec, slot.incarnation, self._costs_of(slot.spec), self._around)
        slot.engine = engine
        self._transfers[engine.descriptor.key] = engine.transfers
        self._network.join(engine.descriptor.key)
        self._open_sessions(engine)

    def _open_sessions(self, engine: SimulatedEngine) -> None:
        sessions = [(ingress, ingress.on_engine(engine)) for ingress in self._ingresses if not ingress.knows(engine)]
        if not sessions:
            return
        self._report(engine, sessions)
        # The first report is at once; the later ones of the engines do not come all at the same time.
        first_s = self._events.now_s + self._random.random() * self._spec.stats_interval_s
        self._events.at(first_s, self._report_again, engine, sessions)

    @staticmethod
    def _costs_of(spec: EngineSpec) -> StepCostModel:
        return fit_step_costs(spec.step_times, spec.scheduler) if spec.step_costs is None else spec.step_costs

    def _report_again(
        self, engine: SimulatedEngine, sessions: Sequence[tuple[SimulatedIngress, SimulatedSession]]
    ) -> None:
        open_sessions = [(ingress, session) for ingress, session in sessions if session.is_open]
        if engine.is_dead or not open_sessions:
            return
        if not engine.is_stopped:
            self._report(engine, open_sessions)
        self._events.at(self._events.now_s + self._spec.stats_interval_s, self._report_again, engine, open_sessions)

    def _report(self, engine: SimulatedEngine, sessions: Sequence[tuple[SimulatedIngress, SimulatedSession]]) -> None:
        report, kv_events = engine.load_report(), engine.take_kv_events()
        for ingress, session in sessions:
            own = report_for(report, engine, ingress.number)
            if self._spec.stats_delay_s > 0:
                due_s = self._events.now_s + self._spec.stats_delay_s
                self._events.at(due_s, ingress.on_report, session, own, kv_events)
            else:
                ingress.on_report(session, own, kv_events)

    def _totals(self, slot: _Slot) -> EngineTotals:
        """Return what an engine has done, in all its incarnations."""
        ended, engine = slot.ended, slot.engine
        served_s = slot.served_s
        if engine is not None and not engine.is_dead:
            served_s += self._events.now_s - slot.begun_s
        now = None if engine is None else engine.totals(served_s)
        found = [one for one in (ended, now) if one is not None]
        return EngineTotals(
            slot.spec.engine_id,
            busy_s=sum(one.busy_s for one in found),
            served_s=served_s,
            num_steps=sum(one.num_steps for one in found),
            num_prompt_tokens=sum(one.num_prompt_tokens for one in found),
            num_output_tokens=sum(one.num_output_tokens for one in found),
            num_preemptions=sum(one.num_preemptions for one in found),
            num_sent_bytes=sum(one.num_sent_bytes for one in found),
        )

    # -- faults --------------------------------------------------------------------------------------------------

    def plan_fault(self, fault: Fault) -> None:
        """Let a fault happen at its time. Raises ValueError if it names an engine that is not there."""
        named = fault.engine_ids if isinstance(fault, Partition) else {fault.engine_id}
        if unknown := sorted(named - self._slots.keys()):
            raise ValueError(f"a fault names {', '.join(unknown)}; engines are: {', '.join(self._slots)}")
        events = self._events
        match fault:
            case KillEngine():
                events.at(fault.at_s, self._kill, self._slots[fault.engine_id])
            case StopEngine():
                events.at(fault.at_s, self._stop, self._slots[fault.engine_id], fault.until_s)
            case SlowEngine():
                events.at(fault.at_s, self._slow, self._slots[fault.engine_id], fault.factor)
                events.at(fault.until_s, self._slow, self._slots[fault.engine_id], 1.0)
            case Partition():
                events.at(fault.at_s, self._cut, fault)
                events.at(fault.until_s, self._network.mend, fault.engine_ids)

    def _kill(self, slot: _Slot) -> None:
        engine = slot.engine
        if engine is None or engine.is_dead:
            return
        now_s = self._events.now_s
        engine.die()
        slot.served_s += now_s - slot.begun_s
        self._network.leave(engine.descriptor.key)
        self._events.at(now_s + self._spec.death_noticed_s, self._notice_death, engine)
        if self._spec.restart_s is not None:
            self._events.at(now_s + max(self._spec.restart_s, self._spec.death_noticed_s), self._restart, slot)

    def _notice_death(self, engine: SimulatedEngine) -> None:
        key = engine.descriptor.key
        del self._transfers[key]
        for transfers in self._transfers.values():
            transfers.on_link_lost(key)
        for ingress in self._ingresses:
            ingress.on_engine_lost(engine)

    def _restart(self, slot: _Slot) -> None:
        slot.ended = self._totals(slot)
        self._start(slot)

    def _stop(self, slot: _Slot, until_s: float) -> None:
        engine, now_s = slot.engine, self._events.now_s
        if engine is None or engine.is_dead:
            return
        engine.stop(until_s)
        links_lost_s = now_s + self._spec.kv_transfer.link_timeout_s
        if links_lost_s < until_s:
            self._events.at(links_lost_s, self._lose_links, frozenset({engine.descriptor.engine_id}))
        given_up_s = now_s + self._spec.ingress.engine_timeout_s
        if given_up_s < until_s:
            self._events.at(given_up_s, self._give_up_for_a_while, engine, until_s)

    def _give_up_for_a_while(self, engine: SimulatedEngine, until_s: float) -> None:
        if engine.is_dead:
            return
        for ingress in self._ingresses:
            ingress.on_engine_lost(engine)
        self._events.at(until_s, self._come_back, engine)

    def _come_back(self, engine: SimulatedEngine) -> None:
        if not engine.is_dead:
            self._open_sessions(engine)

    def _slow(self, slot: _Slot, factor: float) -> None:
        if slot.engine is not None and not slot.engine.is_dead:
            slot.engine.slow_down(factor)

    def _cut(self, fault: Partition) -> None:
        self._network.cut(fault.engine_ids)
        lost_s = self._events.now_s + self._spec.kv_transfer.link_timeout_s
        if lost_s < fault.until_s:
            self._events.at(lost_s, self._lose_links, fault.engine_ids)

    def _lose_links(self, engine_ids: frozenset[str]) -> None:
        """Let the links between these engines and all others break: their ends have not heard of each other."""
        self._network.lose(engine_ids)
        for key, transfers in list(self._transfers.items()):
            for other in list(self._transfers):
                if (key[0] in engine_ids) != (other[0] in engine_ids):
                    transfers.on_link_lost(other)
