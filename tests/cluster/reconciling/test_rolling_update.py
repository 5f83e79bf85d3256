"""An update goes on where it can, says what it waits for, and takes one engine at a time out of service."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cluster.pool.journal import Journal
from cluster.reconciling.engine_slots import EngineState, ObservedEngine, Slot, SlotHistory
from cluster.reconciling.reconciler import DrainEngine, RemoveEngine, StartEngine, reconcile
from cluster.reconciling.rolling_update import RollingUpdate, UpdateLog, find_update
from cluster.routing.engine_connection import EngineRole
from cluster.settings.restarts import RestartConfig

P0, P1 = (Slot(EngineRole.PREFILL, number) for number in range(2))
D0, D1 = (Slot(EngineRole.DECODE, number) for number in range(2))
POLICY = RestartConfig()
NOW_S = 1000.0
QUARANTINED = SlotHistory(9, [999.0] * 5, "no such checkpoint")


def serves(slot: Slot, version: int) -> ObservedEngine:
    return ObservedEngine(slot, version, EngineState.READY, version)


def without_room(slot: Slot) -> ObservedEngine:
    return ObservedEngine(slot, 2, EngineState.PENDING, 2, finds_no_room=True)


def find(observed: list[ObservedEngine], histories: dict[Slot, SlotHistory] | None = None) -> RollingUpdate:
    update = find_update([P0, D0, D1], observed, histories or {}, POLICY, NOW_S, 2)
    assert update is not None
    return update


def test_there_is_no_update_once_nobody_serves_the_old_model() -> None:
    assert find_update([P0], [serves(P0, 2)], {}, POLICY, NOW_S, 2) is None
    assert find_update([P0], [], {}, POLICY, NOW_S, 2) is None


def test_a_slot_that_found_no_room_before_does_not_hold_an_update_up() -> None:
    update = find([serves(P0, 1), serves(D0, 1), without_room(D1)])
    assert update.next == serves(P0, 1)
    assert str(update) == "0 of 3 engines serve model version 2; without decode-1 (it finds no room)"


def test_a_slot_that_finds_no_room_since_the_update_took_its_engine_stops_it_with_the_reason() -> None:
    update = find([without_room(P0), serves(D0, 1), serves(D1, 1)], {P0: SlotHistory(2, updated_to=2)})
    assert update.next is None
    assert str(update) == (
        "0 of 3 engines serve model version 2; the others stay as they are until this is solved: "
        "prefill-0 (it finds no room)"
    )


def test_a_slot_that_waits_for_room_since_a_moment_is_waited_for() -> None:
    update = find([serves(P0, 1), serves(D0, 1), ObservedEngine(D1, 2, EngineState.PENDING, 2)])
    assert (update.next, update.obstacles, update.passed_over) == (None, (), ())


def test_a_slot_that_keeps_failing_stops_an_update_whose_model_has_not_come_up_anywhere() -> None:
    update = find([serves(P0, 1), serves(D0, 1)], {D1: QUARANTINED})
    assert update.next is None
    assert update.obstacles == ("decode-1 (in quarantine: no such checkpoint)",)


def test_a_slot_that_keeps_failing_is_passed_over_once_the_new_model_serves_elsewhere() -> None:
    update = find([serves(P0, 2), serves(D0, 1)], {D1: QUARANTINED})
    assert update.next == serves(D0, 1)
    assert update.passed_over == ("decode-1 (in quarantine: no such checkpoint)",)


def test_an_engine_of_the_old_model_that_waits_for_room_is_replaced_at_once() -> None:
    waiting = ObservedEngine(D1, 1, EngineState.PENDING, 1, finds_no_room=True)
    [action] = reconcile([D0, D1], [serves(D0, 1), waiting], {}, POLICY, NOW_S, model_version=2)
    assert action == RemoveEngine(D1, 1, "it has no room yet, and model version 2 replaces version 1")


def test_what_holds_an_update_up_is_written_down_once() -> None:
    journal = Journal()
    log = UpdateLog(journal.add)
    stuck = RollingUpdate(2, 0, 3, obstacles=("prefill-0 (it finds no room)",))
    for update in (None, RollingUpdate(2, 0, 3), stuck, RollingUpdate(2, 0, 3), stuck, stuck):
        log.tell(update)
    assert [decision.text for decision in journal.decisions] == [f"update: {stuck}"]
    log.tell(RollingUpdate(2, 1, 3, obstacles=stuck.obstacles))
    assert len(journal.decisions) == 2


SLOTS = [P0, D0, P1, D1]


@given(
    states=st.dictionaries(st.sampled_from(SLOTS), st.sampled_from([EngineState.READY, EngineState.PENDING])),
    quarantined=st.sets(st.sampled_from(SLOTS)),
    has_room=st.dictionaries(st.sampled_from(SLOTS), st.booleans()),
)
def test_no_more_than_one_engine_is_out_of_service_on_account_of_an_update(
    states: dict[Slot, EngineState], quarantined: set[Slot], has_room: dict[Slot, bool]
) -> None:
    """has_room: whether the slot's next engine finds some."""
    engines = {slot: ObservedEngine(slot, 1, state, 1, state is EngineState.PENDING) for slot, state in states.items()}
    histories = {slot: SlotHistory(1) for slot in SLOTS}
    for slot in quarantined - engines.keys():
        histories[slot] = SlotHistory(1, [NOW_S] * 5, "boom")
    down_before = {slot for slot in SLOTS if slot not in engines or engines[slot].state is not EngineState.READY}
    for _ in range(30):
        for action in reconcile(SLOTS, engines.values(), histories, POLICY, NOW_S + 1, model_version=2):
            match action:
                case DrainEngine(slot):
                    histories[slot].updated_to = action.updates_to
                    del engines[slot]
                case RemoveEngine(slot):
                    del engines[slot]
                case StartEngine(slot, incarnation):
                    is_placed = has_room.get(slot, True)
                    state = EngineState.READY if is_placed else EngineState.PENDING
                    engines[slot] = ObservedEngine(slot, incarnation, state, 2, finds_no_room=not is_placed)
        down = {slot for slot in SLOTS if slot not in engines or engines[slot].state is not EngineState.READY}
        assert len(down - down_before) <= 1
    left = find_update(SLOTS, list(engines.values()), histories, POLICY, NOW_S + 1, 2)
    assert left is None or left.obstacles, "an update that has stopped says why"


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.DRAINING, EngineState.DEAD])
def test_an_engine_that_comes_up_or_leaves_is_waited_for(state: EngineState) -> None:
    update = find([serves(P0, 1), serves(D0, 2), ObservedEngine(D1, 2, state, 2)])
    assert (update.next, update.obstacles) == (None, ())
