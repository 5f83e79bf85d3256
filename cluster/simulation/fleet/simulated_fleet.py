"""The engines of a simulated cluster, which come and go as the product's reconciler decides.

What cluster/pool does around the reconciler is done here by events: an engine that starts serves after a while, one
that drains gets no new requests and is removed once it is idle or its time is over, one that has died is replaced. A
change of a role takes effect at once, and requests that have begun go on unchanged.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from actors.costs.step_cost_model import StepCostModel
from cluster.planning.fleet_counts import FleetCounts
from cluster.reconciling.engine_slots import EngineState, ObservedEngine, Slot, SlotHistory
from cluster.reconciling.reconciler import DrainEngine, RemoveEngine, StartEngine, reconcile, scaled_slots
from cluster.reconciling.switch_clock import SwitchClock
from cluster.routing.engine_connection import EngineKey, EngineRole
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec
from cluster.simulation.engines.fitted_costs import fit_step_costs
from cluster.simulation.engines.simulated_engine import Deliver, SimulatedEngine, Surroundings
from cluster.simulation.event_queue import EventQueue
from cluster.simulation.fleet.engine_reports import EngineReports
from cluster.simulation.fleet.fleet_member import FleetMember
from cluster.simulation.ingresses.simulated_ingress import SimulatedIngress
from cluster.simulation.network.shared_network import SharedNetwork
from cluster.simulation.network.simulated_transfers import SimulatedTransfers
from cluster.simulation.simulation_result import EngineTotals, FleetPoint

_NUM_IDLE_LOOKS: Final = 2
"""The number of idle looks in a row after which a draining engine counts as idle, as in the controller."""


class SimulatedFleet:
    """All engines, and what a controller knows of them.

    wanted:       the slots that should have one engine each
    roles:        the role of each slot whose role was changed: later engines of the slot serve in it, too
    switch_clock: how long starts and drains took
    network:      the network between the engines
    """

    def __init__(
        self,
        spec: ClusterSpec,
        events: EventQueue,
        ingresses: Sequence[SimulatedIngress],
        deliver: Deliver,
        draw: random.Random,
        *,
        fast_forward: bool,
    ) -> None:
        """Let the cluster's engines serve, those that begin later when their time comes.

        deliver: takes an engine's outputs for an ingress; draw: says when engines report
        Raises ValueError for an engine's name that no slot has.
        """
        self._spec = spec
        self._events = events
        self._ingresses = ingresses
        self._transfers: dict[EngineKey, SimulatedTransfers] = {}
        self.network = SharedNetwork(spec.links, events)
        self._reports = EngineReports(spec, events, ingresses, draw)
        self._around = Surroundings(spec, events, self.network, deliver, self._transfers.get, fast_forward=fast_forward)
        self._members = {
            slot: FleetMember(slot, number, engine)
            for number, engine in enumerate(spec.engines)
            for slot in [slot_of(engine.engine_id)]
        }
        self._of_role: dict[EngineRole, EngineSpec] = {one.role: one for one in reversed(spec.engines)}
        self.wanted: list[Slot] = list(self._members)
        self.roles: dict[Slot, EngineRole] = {}
        self.histories: dict[Slot, SlotHistory] = {}
        self.switch_clock = SwitchClock()
        self.points: list[FleetPoint] = []
        for member in self._members.values():
            self.histories[member.slot] = SlotHistory(1)
            if member.spec.start_s <= 0:
                self._bring_in_first(member)
            else:
                events.at(member.spec.start_s, self._begin_first, member)
        self._note_point()

    def __iter__(self) -> Iterator[FleetMember]:
        return iter(self._members.values())

    def member(self, engine_id: str) -> FleetMember:
        """Return the member of this name. Raises KeyError if there was never one."""
        return self._members[slot_of(engine_id)]

    @property
    def transfers(self) -> Mapping[EngineKey, SimulatedTransfers]:
        """The transfers of every engine that peers take to be alive."""
        return self._transfers

    @property
    def serving(self) -> list[SimulatedEngine]:
        """The engines that live, those that drain included."""
        engines = [member.engine for member in self if member.is_serving and member.engine is not None]
        return [engine for engine in engines if not engine.is_dead]

    def totals(self) -> list[EngineTotals]:
        """Return what each slot's engines have done, in the order in which slots were first wanted."""
        return [member.totals(self._events.now_s) for member in self]

    # -- what operators and planners ask for ---------------------------------------------------------------------

    def scale(self, counts: Mapping[EngineRole, int]) -> None:
        """Want so many engines of these roles, as `raypd scale` does."""
        self.want(scaled_slots(self.wanted, counts))

    def want(self, slots: Sequence[Slot]) -> None:
        """Want engines in these slots, and in no others."""
        for slot in set(slots) - set(self.wanted):
            self.roles.pop(slot, None)
        self.wanted = list(slots)
        self.look()

    def set_role(self, engine_id: str, role: EngineRole) -> None:
        """Let an engine that serves change its role, as `raypd set-role` does; others stay as they are."""
        member = self.member(engine_id)
        if member.state is not EngineState.READY or member.engine is None or member.engine.is_dead:
            return
        self.roles[member.slot] = role
        member.engine.set_role(role)
        for ingress in self._ingresses:
            ingress.on_role(member.engine)
        self._note_point()

    # -- the reconciler ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Let the reconciler decide, until it is content; and once more when a slot's next engine may start."""
        now_s, policy = self._events.now_s, self._spec.restarts
        while actions := reconcile(self.wanted, self._observed(), self.histories, policy, now_s):
            for action in actions:
                match action:
                    case StartEngine():
                        self._begin(action)
                    case DrainEngine():
                        self._drain(self._members[action.slot])
                    case RemoveEngine():
                        self._remove(self._members[action.slot])
        vacant = [slot for slot in self.wanted if self._is_vacant(slot)]
        if vacant:
            next_s = min(self._history(slot).not_before_s(now_s, policy) for slot in vacant)
            self._events.at(max(next_s, now_s), self.look)
        self._note_point()

    def _is_vacant(self, slot: Slot) -> bool:
        return slot not in self._members or self._members[slot].state is None

    def _observed(self) -> list[ObservedEngine]:
        return [one for member in self if (one := member.observed()) is not None]

    def _history(self, slot: Slot) -> SlotHistory:
        return self.histories.setdefault(slot, SlotHistory())

    def _begin(self, action: StartEngine) -> None:
        slot = action.slot
        if slot not in self._members:
            self._members[slot] = FleetMember(slot, len(self._members), self._new_spec(slot))
        member, history = self._members[slot], self._history(slot)
        history.last_incarnation = action.incarnation
        member.start(action.incarnation, self._events.now_s)
        seconds = self._spec.start_s
        if member.has_died and self._spec.restart_s is not None:
            seconds = max(self._spec.restart_s - self._spec.death_noticed_s, 0.0)
        member.has_died = False
        self._events.at(self._events.now_s + seconds, self._serve, member, action.incarnation)

    def _new_spec(self, slot: Slot) -> EngineSpec:
        """Return the engine of a new slot: as those of its role, or as the others if there are none."""
        like = self._of_role.get(slot.role, self._spec.engines[0])
        return replace(like, engine_id=slot.engine_id, role=slot.role, start_s=0.0)

    def _begin_first(self, member: FleetMember) -> None:
        if member.slot in self.wanted:
            self._bring_in_first(member)
            self._note_point()

    def _bring_in_first(self, member: FleetMember) -> None:
        member.start(1, self._events.now_s)
        self._bring_in(member)

    def _serve(self, member: FleetMember, incarnation: int) -> None:
        if member.state is EngineState.STARTING and member.incarnation == incarnation:
            self.switch_clock.note_start(self._events.now_s - member.held_s)
            self._bring_in(member)
            self._note_point()

    def _bring_in(self, member: FleetMember) -> None:
        """Let an engine that has started serve."""
        role = self.roles.get(member.slot, member.spec.role)
        spec = replace(member.spec, role=role) if role is not member.spec.role else member.spec
        engine = SimulatedEngine(member.number, spec, member.incarnation, self._costs_of(spec), self._around)
        member.serve(engine, self._events.now_s)
        self._transfers[engine.descriptor.key] = engine.transfers
        self.network.join(engine.descriptor.key)
        self._reports.begin(engine)

    @staticmethod
    def _costs_of(spec: EngineSpec) -> StepCostModel:
        return fit_step_costs(spec.step_times, spec.scheduler) if spec.step_costs is None else spec.step_costs

    def _drain(self, member: FleetMember) -> None:
        engine, now_s = member.engine, self._events.now_s
        assert engine is not None, "an engine that drains has served"
        member.state, member.drain_begun_s = EngineState.DRAINING, now_s
        for ingress in self._ingresses:
            ingress.on_draining(engine)
        self._events.at(now_s + self._spec.look_s, self._look_at_drain, member, engine)

    def _look_at_drain(self, member: FleetMember, engine: SimulatedEngine) -> None:
        if member.state is not EngineState.DRAINING or member.engine is not engine or engine.is_dead:
            return
        now_s = self._events.now_s
        member.num_idle_looks = member.num_idle_looks + 1 if engine.is_idle else 0
        if member.num_idle_looks < _NUM_IDLE_LOOKS and now_s < member.drain_begun_s + self._spec.longest_drain_s:
            self._events.at(now_s + self._spec.look_s, self._look_at_drain, member, engine)
            return
        self.switch_clock.note_drain(now_s - member.drain_begun_s)
        member.state = EngineState.DRAINED
        self.look()

    def _remove(self, member: FleetMember) -> None:
        """Take an engine out of its slot. Requests that it still has go on elsewhere."""
        engine = member.engine
        member.end(self._events.now_s)
        if member.state is EngineState.DRAINED and engine is not None:
            # Ingresses learn of it first: an engine that leaves has not died with its requests.
            self._tell_ingresses(engine)
            engine.die()
            self.network.leave(engine.descriptor.key)
            self._forget_transfers(engine)
        member.state = None

    # -- what befalls engines ------------------------------------------------------------------------------------

    def kill(self, member: FleetMember) -> None:
        """Let an engine die at once; everybody else notices later."""
        engine = member.engine
        if engine is None or engine.is_dead or not member.is_serving:
            return
        member.end(self._events.now_s)
        engine.die()
        self.network.leave(engine.descriptor.key)
        notice = partial(self._notice_death, member, engine)
        self._events.at(self._events.now_s + self._spec.death_noticed_s, notice)

    def _notice_death(self, member: FleetMember, engine: SimulatedEngine) -> None:
        self._forget_transfers(engine)
        self._tell_ingresses(engine)
        member.state, member.has_died = EngineState.DEAD, True
        history = self._history(member.slot)
        history.add_death(self._events.now_s, "it was killed", self._spec.restarts)
        if self._spec.restart_s is None and member.slot in self.wanted:
            self.wanted = [slot for slot in self.wanted if slot != member.slot]
        self.look()

    def give_up_for_a_while(self, engine: SimulatedEngine, until_s: float) -> None:
        """Let ingresses do without an engine that is silent, until it answers again."""
        if not engine.is_dead:
            self._tell_ingresses(engine)
            self._events.at(until_s, self._come_back, engine)

    def _come_back(self, engine: SimulatedEngine) -> None:
        if engine.is_dead:
            return
        self._reports.begin(engine)
        if any(member.engine is engine and member.state is EngineState.DRAINING for member in self):
            for ingress in self._ingresses:
                ingress.on_draining(engine)

    def _tell_ingresses(self, lost: SimulatedEngine) -> None:
        for ingress in self._ingresses:
            ingress.on_engine_lost(lost)

    def _forget_transfers(self, engine: SimulatedEngine) -> None:
        key = engine.descriptor.key
        del self._transfers[key]
        for transfers in list(self._transfers.values()):
            transfers.on_link_lost(key)

    def _note_point(self) -> None:
        """Note how many engines there are, if that has changed."""
        roles = Counter(member.role for member in self if member.is_serving)
        num_starting = sum(member.state is EngineState.STARTING for member in self)
        point = FleetPoint(self._events.now_s, FleetCounts.from_mapping(roles), num_starting)
        if self.points and self.points[-1].at_s == point.at_s:
            self.points.pop()
        if not self.points or replace(self.points[-1], at_s=point.at_s) != point:
            self.points.append(point)


def slot_of(engine_id: str) -> Slot:
    """Return the slot of an engine's name, a role and a number such as "prefill-0". Raises ValueError for others."""
    role, _, number = engine_id.rpartition("-")
    if role not in set(EngineRole) or not number.isdecimal():
        raise ValueError(f"{engine_id!r} is no engine's name: give a role and a number, such as prefill-0")
    return Slot(EngineRole(role), int(number))
