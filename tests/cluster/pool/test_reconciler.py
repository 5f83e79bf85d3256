from cluster.engine_connection import EngineRole
from cluster.pool.reconciler import (
    EngineState,
    ObservedEngine,
    RemoveEngine,
    Slot,
    StartEngine,
    reconcile,
    wanted_slots,
)

P0, P1 = Slot(EngineRole.PREFILL, 0), Slot(EngineRole.PREFILL, 1)
D0 = Slot(EngineRole.DECODE, 0)


def test_empty_slots_are_filled_with_a_first_incarnation() -> None:
    slots = wanted_slots({EngineRole.PREFILL: 2, EngineRole.DECODE: 1})
    assert slots == [P0, P1, D0]
    assert set(reconcile(slots, [], {})) == {StartEngine(P0, 1), StartEngine(P1, 1), StartEngine(D0, 1)}


def test_nothing_is_done_when_everything_is_there() -> None:
    observed = [ObservedEngine(P0, 1, EngineState.READY), ObservedEngine(D0, 1, EngineState.STARTING)]
    assert reconcile([P0, D0], observed, {P0: 1, D0: 1}) == []


def test_a_dead_engine_is_removed_before_its_slot_is_filled_again() -> None:
    dead = ObservedEngine(P0, 3, EngineState.DEAD)
    assert reconcile([P0], [dead], {P0: 3}) == [RemoveEngine(P0, 3)]
    assert reconcile([P0], [], {P0: 3}) == [StartEngine(P0, 4)]


def test_an_engine_that_is_not_wanted_any_more_is_removed() -> None:
    observed = [ObservedEngine(P0, 1, EngineState.READY), ObservedEngine(P1, 1, EngineState.READY)]
    assert reconcile([P0], observed, {P0: 1, P1: 1}) == [RemoveEngine(P1, 1)]
