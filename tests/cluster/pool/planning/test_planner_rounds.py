"""The planner in the controller: its ticks, the steps to its targets, operators' changes, a later controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import msgspec

from actors.core.outputs.scheduler_stats import LoadReport, SchedulerStats
from actors.costs.step_cost_model import Residuals, StepCostModel
from actors.process.bounded_process import ProcessDied
from cluster.config import ClusterConfig
from cluster.errors import EngineRefused
from cluster.planning.fleet_counts import FleetCounts
from cluster.planning.fleet_estimate import ClosedFormEstimator
from cluster.planning.offered_load import LoadWindow
from cluster.planning.plan_record import PendingChange, PlanAction, PlanMemory, PlannerMode
from cluster.pool.engines.engine_fleet import EngineFleet
from cluster.pool.ingresses.ingress_fleet import IngressFleet
from cluster.pool.journal import Journal
from cluster.pool.planning.planner_child import answer
from cluster.pool.planning.planner_rounds import PlannerRounds
from cluster.reconciling.engine_slots import EngineState, Slot
from cluster.reconciling.switch_clock import SwitchClock
from cluster.routing.engine_connection import EngineRole
from tests.cluster.planning.plan_setup import COSTS, window

PREFILL, DECODE, BOTH = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH
KINDS = ("decode", "prefill", "mixed")
SURE = StepCostModel(COSTS, tuple(Residuals(kind, 200, -0.1, 0.0, 0.1, 0.05) for kind in KINDS))
LOAD = LoadReport(number=1, num_blocks=10_000, block_size=16, max_num_batched_tokens=2048, max_num_seqs=64)


@dataclass
class FakeEngine:
    slot: Slot
    role: EngineRole
    state: EngineState = EngineState.READY
    stats: SchedulerStats | None = None

    def __post_init__(self) -> None:
        self.stats = SchedulerStats(num_blocks=10_000, block_size=16, load_report=LOAD, step_costs=SURE)

    @property
    def engine_id(self) -> str:
        return self.slot.engine_id


class FakeFleet:
    """The part of EngineFleet that the planner uses."""

    def __init__(self, *slots: Slot) -> None:
        self.engines = {slot.engine_id: FakeEngine(slot, slot.role) for slot in slots}
        self.wanted = list(slots)
        self.roles: dict[Slot, EngineRole] = {}
        self.switch_clock = SwitchClock()
        self.refuses = False

    def __iter__(self) -> Iterator[FakeEngine]:
        return iter(self.engines.values())

    def serving(self, engine_id: str) -> FakeEngine:
        return self.engines[engine_id]

    async def set_role(self, engine: FakeEngine, role: EngineRole, reason: str) -> None:
        assert reason == "the plan"
        if self.refuses:
            raise EngineRefused(engine.engine_id, "busy")
        engine.role = self.roles[engine.slot] = role


@dataclass
class FakeIngresses:
    """Ingresses that tell windows of a load."""

    windows: list[LoadWindow]
    asked: list[dict[str, int]] = field(default_factory=list)

    async def offered_load(self, newest: Mapping[str, int]) -> dict[str, list[LoadWindow]]:
        self.asked.append(dict(newest))
        return {"ingress-0": [one for one in self.windows if one.number > newest.get("ingress-0", 0)]}


class OwnThread:
    """Decides in this process. before: is called with each task, before it is decided"""

    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None
        self.is_closed = False

    def ask(self, task: bytes) -> bytes:
        self.before()
        return answer(task, lambda mode: ClosedFormEstimator())

    def close(self) -> None:
        self.is_closed = True


class Setup:
    """A planner over a prefill and a decode engine, and a load that is far too high for them."""

    def __init__(self, mode: PlannerMode = PlannerMode.ACT, rate: float = 14.0) -> None:
        newest = int((time.time() - 1.0) // 30.0) - 1
        self.fleet = FakeFleet(Slot(PREFILL, 0), Slot(DECODE, 0))
        self.ingresses = FakeIngresses([window(newest - 19 + i, rate) for i in range(20)])
        self.process, self.journal = OwnThread(), Journal()
        self.num_saved = self.num_changes = 0
        self.config = ClusterConfig.model_validate(
            {"planner": {"mode": mode.value, "max_engines": 6}, "slo": {"ttft_ms": 1000, "itl_ms": 20}}
        )
        self.rounds = self.successor()

    def successor(self) -> PlannerRounds:
        async def save() -> None:
            self.num_saved += 1

        def note() -> None:
            self.num_changes += 1

        fleet, ingresses = cast(EngineFleet, self.fleet), cast(IngressFleet, self.ingresses)
        return PlannerRounds(self.config, fleet, ingresses, self.journal, save, note, self.process)


async def test_a_target_becomes_wanted_slots_with_a_reason_in_the_journal() -> None:
    setup = Setup()
    await setup.rounds.look()
    record = setup.rounds.record
    assert record is not None
    assert record.action is PlanAction.CHANGE
    assert record.target.num_engines == 3
    assert len(setup.fleet.wanted) == 3
    assert set(setup.fleet.wanted) > {Slot(PREFILL, 0), Slot(DECODE, 0)}
    assert setup.num_saved == 2, "what the planner remembers, and the wanted slots"
    assert setup.num_changes == 1
    assert setup.journal.decisions[-1].text.startswith(f"plan {record.target} ({record.change}): ")


async def test_advice_changes_nothing() -> None:
    setup = Setup(PlannerMode.ADVISE)
    await setup.rounds.look()
    assert setup.rounds.record is not None
    assert setup.rounds.record.action is PlanAction.CHANGE
    assert setup.fleet.wanted == [Slot(PREFILL, 0), Slot(DECODE, 0)]
    assert setup.journal.decisions == ()


async def test_the_planner_decides_once_a_window_and_asks_only_for_new_ones() -> None:
    setup = Setup()
    await setup.rounds.look()
    await setup.rounds.look()
    assert setup.ingresses.asked == [{}]
    setup.rounds._next_window = 0
    await setup.rounds.look()
    assert setup.ingresses.asked[1:] == [{"ingress-0": setup.ingresses.windows[-1].number}]


async def test_roles_change_by_the_way_of_set_role_and_a_refusal_is_tried_again() -> None:
    setup = Setup()
    setup.rounds.memory = PlanMemory(
        pending=PendingChange(FleetCounts(0, 1, 1), 0.0, 1e12), num_manual_changes=0, began_s=1.0
    )
    setup.rounds._next_window = 1 << 60
    setup.fleet.refuses = True
    await setup.rounds.look()
    assert setup.fleet.engines["prefill-0"].role is PREFILL
    setup.fleet.refuses = False
    await setup.rounds.look()
    assert setup.fleet.engines["prefill-0"].role is BOTH
    assert setup.fleet.wanted == [Slot(PREFILL, 0), Slot(DECODE, 0)], "the slot keeps its name"
    await setup.rounds.look()
    assert setup.num_changes == 0


async def test_a_decision_about_a_fleet_that_an_operator_has_changed_meanwhile_is_dropped() -> None:
    setup = Setup()
    setup.process.before = setup.rounds.note_manual_change
    await setup.rounds.look()
    assert setup.rounds.record is None
    assert setup.fleet.wanted == [Slot(PREFILL, 0), Slot(DECODE, 0)]


async def test_a_later_controller_goes_on_with_the_change_under_way() -> None:
    setup = Setup()
    await setup.rounds.look()
    pending = setup.rounds.memory.pending
    assert pending is not None
    setup.fleet.wanted = [Slot(PREFILL, 0), Slot(DECODE, 0)]  # the first one died before it saved them
    later = setup.successor()
    later.memory = msgspec.json.decode(msgspec.json.encode(setup.rounds.memory), type=PlanMemory)
    await later.look()
    assert later.record is not None
    assert (later.record.action, later.record.target) == (PlanAction.HOLD, pending.target)
    assert len(setup.fleet.wanted) == 3


async def test_a_process_that_dies_changes_nothing_but_the_journal() -> None:
    setup = Setup()

    def die() -> None:
        raise ProcessDied("the process that plans the fleet has died")

    setup.process.before = die
    await setup.rounds.look()
    assert setup.rounds.record is None
    assert setup.journal.decisions[-1].text == (
        "the planner has not decided: the process that plans the fleet has died"
    )
    setup.rounds.close()
    assert setup.process.is_closed


async def test_a_new_engine_begins_in_the_role_of_its_slot_whatever_the_one_before_did() -> None:
    setup = Setup()
    setup.fleet.roles[Slot(PREFILL, 1)] = DECODE  # of an engine that has left
    setup.rounds.memory = PlanMemory(
        pending=PendingChange(FleetCounts(2, 1), 0.0, 1e12), num_manual_changes=0, began_s=1.0
    )
    setup.rounds._next_window = 1 << 60
    await setup.rounds.look()
    assert set(setup.fleet.wanted) == {
        Slot(PREFILL, 0),
        Slot(PREFILL, 1),
        Slot(DECODE, 0),
    }
    assert setup.fleet.roles == {}
