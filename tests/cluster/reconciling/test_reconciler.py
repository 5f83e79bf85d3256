"""Tests of cluster/reconciling/engine_slots.py and cluster/settings/restarts.py."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cluster.reconciling.engine_slots import EngineState, ObservedEngine, Slot, SlotHistory
from cluster.reconciling.reconciler import (
    Action,
    DrainEngine,
    RemoveEngine,
    StartEngine,
    reconcile,
    scaled_slots,
    wanted_slots,
)
from cluster.routing.engine_connection import EngineRole
from cluster.settings.restarts import RestartConfig

P0, P1, P2 = (Slot(EngineRole.PREFILL, number) for number in range(3))
D0 = Slot(EngineRole.DECODE, 0)
POLICY = RestartConfig(window_s=100.0, first_backoff_s=1.0, max_backoff_s=8.0, max_deaths=4, quarantine_s=50.0)


def run(
    wanted: list[Slot],
    observed: list[ObservedEngine],
    histories: dict[Slot, SlotHistory] | None = None,
    now_s: float = 1000.0,
) -> list[Action]:
    return reconcile(wanted, observed, histories or {}, POLICY, now_s)


def test_empty_slots_are_filled_with_a_first_incarnation() -> None:
    slots = wanted_slots({EngineRole.PREFILL: 2, EngineRole.DECODE: 1})
    assert slots == [P0, P1, D0]
    assert {(action.slot, action.incarnation) for action in run(slots, [])} == {(P0, 1), (P1, 1), (D0, 1)}


def test_nothing_is_done_when_everything_is_there() -> None:
    observed = [ObservedEngine(P0, 1, EngineState.READY), ObservedEngine(D0, 1, EngineState.STARTING)]
    assert run([P0, D0], observed) == []


def test_a_dead_engine_is_removed_before_its_slot_is_filled_again() -> None:
    assert run([P0], [ObservedEngine(P0, 3, EngineState.DEAD)]) == [RemoveEngine(P0, 3, "it is dead")]
    [start] = run([P0], [], {P0: SlotHistory(3, [900.0], "out of memory")})
    assert start == StartEngine(P0, 4, "incarnation 3 ended: out of memory")


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (EngineState.READY, DrainEngine),
        (EngineState.STARTING, RemoveEngine),
        (EngineState.PENDING, RemoveEngine),
        (EngineState.DRAINING, None),
        (EngineState.DRAINED, RemoveEngine),
        (EngineState.DEAD, RemoveEngine),
    ],
)
def test_an_engine_that_is_not_wanted_any_more_leaves_with_its_work_done(
    state: EngineState, action: type | None
) -> None:
    actions = run([P0], [ObservedEngine(P0, 1, EngineState.READY), ObservedEngine(P1, 1, state)])
    assert [type(action) for action in actions] == ([] if action is None else [action])


def test_a_drained_engine_that_is_wanted_is_replaced() -> None:
    assert run([P0], [ObservedEngine(P0, 2, EngineState.DRAINED)]) == [RemoveEngine(P0, 2, "it is drained")]
    assert run([P0], [], {P0: SlotHistory(2)}) == [StartEngine(P0, 3, "incarnation 2 has left")]


def test_each_death_is_followed_by_a_longer_wait() -> None:
    history = SlotHistory()
    waits = []
    for _ in range(3):
        history.add_death(1000.0, "boom", POLICY)
        waits.append(history.not_before_s(1000.0, POLICY))
    assert waits == [0.0, 1001.0, 1002.0]
    assert not run([P0], [], {P0: history}, now_s=1001.9)
    assert run([P0], [], {P0: history}, now_s=1002.0)


def test_an_engine_that_keeps_dying_is_quarantined_and_tried_again_later() -> None:
    history = SlotHistory(4, [960.0, 970.0, 980.0], "boom")
    history.add_death(990.0, "boom", POLICY)
    assert history.is_quarantined(1000.0, POLICY)
    assert not run([P0, D0], [ObservedEngine(D0, 1, EngineState.READY)], {P0: history}, now_s=1039.0)
    assert not history.is_quarantined(1040.0, POLICY)
    assert run([P0], [], {P0: history}, now_s=1041.0)


def test_deaths_of_long_ago_are_forgotten() -> None:
    history = SlotHistory(9, [10.0, 20.0, 30.0, 40.0], "boom")
    assert history.not_before_s(1000.0, POLICY) == 0.0
    history.add_death(1000.0, "again", POLICY)
    assert not history.is_quarantined(1000.0, POLICY)


def policies() -> st.SearchStrategy[RestartConfig]:
    """Every policy that the settings allow."""
    return st.builds(
        RestartConfig,
        window_s=st.floats(1e-3, 1e6),
        first_backoff_s=st.floats(0, 1e6),
        max_backoff_s=st.floats(0, 1e6),
        max_deaths=st.integers(1, 3000) | st.just(1),
        quarantine_s=st.floats(0, 1e6),
    )


@given(
    policy=policies(),
    steps=st.lists(st.tuples(st.booleans(), st.floats(-10.0, 10.0) | st.floats(0.0, 1e6)), max_size=12),
)
def test_whatever_the_settings_and_the_clock_a_history_answers_and_a_slot_is_tried_again(
    policy: RestartConfig, steps: list[tuple[bool, float]]
) -> None:
    history, now_s = SlotHistory(), 1e6
    for has_died, passed_s in steps:
        now_s += passed_s
        if has_died:
            history.add_death(now_s, "boom", policy)
        before = copy.deepcopy(history)
        reconcile([P0], [], {P0: history}, policy, now_s)
        not_before_s = history.not_before_s(now_s, policy)
        assert history == before, "a question changed the answer"
        # The clock goes back by ten seconds in each step at most: deaths may lie that far ahead.
        assert not_before_s <= now_s + 60.0 + max(policy.quarantine_s, policy.max_backoff_s)
        if has_died and policy.max_deaths == 1 and policy.quarantine_s > 1e-3:
            assert not_before_s >= now_s + policy.quarantine_s
    assert reconcile([P0], [], {P0: history}, policy, now_s + 2e6 + 61), "it is tried again in the end"


def test_a_slot_that_has_died_a_thousand_times_waits_as_long_as_one_may() -> None:
    policy = RestartConfig(max_deaths=3000)
    history = SlotHistory(2000, [999.0] * 2000, "boom")
    assert history.not_before_s(1000.0, policy) == 999.0 + policy.max_backoff_s


@pytest.mark.parametrize("max_deaths", [1, 2])
def test_a_quarantine_that_is_longer_than_the_window_lasts_to_its_end(max_deaths: int) -> None:
    policy = RestartConfig(window_s=10.0, max_deaths=max_deaths, quarantine_s=1000.0)
    history = SlotHistory()
    for _ in range(max_deaths):
        history.add_death(100.0, "boom", policy)
    for now_s in (100.0, 111.0, 1099.0):
        assert history.is_quarantined(now_s, policy)
        assert not reconcile([P0], [], {P0: history}, policy, now_s)
    assert reconcile([P0], [], {P0: history}, policy, 1100.0)


def test_a_death_that_came_after_the_round_had_begun_counts() -> None:
    history = SlotHistory()
    for _ in range(2):
        history.add_death(1000.9, "boom", POLICY)
    assert not run([P0], [], {P0: history}, now_s=1000.0)


def test_a_clock_that_is_set_back_keeps_no_slot_empty() -> None:
    history = SlotHistory()
    for _ in range(4):
        history.add_death(10_000.0, "boom", POLICY)
    assert not run([P0], [], {P0: history}, now_s=10_001.0)
    assert run([P0], [], {P0: history}, now_s=6_400.0)


def test_scaling_takes_the_lowest_free_numbers_and_gives_up_the_highest() -> None:
    assert scaled_slots([P0, P2, D0], {EngineRole.PREFILL: 3}) == sorted([P0, P1, P2, D0])
    assert scaled_slots([P0, P1, P2, D0], {EngineRole.PREFILL: 1}) == sorted([P0, D0])
    assert scaled_slots([P0], {EngineRole.PREFILL: 0, EngineRole.DECODE: 1}) == [D0]


@given(
    wanted=st.sets(st.sampled_from([P0, P1, P2, D0])),
    states=st.dictionaries(st.sampled_from([P0, P1, P2, D0]), st.sampled_from(list(EngineState))),
    deaths=st.dictionaries(st.sampled_from([P0, P1, P2, D0]), st.lists(st.floats(0, 100), max_size=6).map(sorted)),
)
def test_time_and_removals_lead_to_what_is_wanted(
    wanted: set[Slot], states: dict[Slot, EngineState], deaths: dict[Slot, list[float]]
) -> None:
    histories = {slot: SlotHistory(7, times) for slot, times in deaths.items()}
    engines = {slot: ObservedEngine(slot, 5, state) for slot, state in states.items()}
    now_s = 100.0
    for _ in range(20):
        for action in reconcile(wanted, engines.values(), histories, POLICY, now_s):
            match action:
                case StartEngine(slot, incarnation):
                    assert slot not in engines, "two engines in a slot"
                    engines[slot] = ObservedEngine(slot, incarnation, EngineState.READY)
                case DrainEngine(slot, incarnation):
                    engines[slot] = ObservedEngine(slot, incarnation, EngineState.DRAINED)
                case RemoveEngine(slot, incarnation):
                    assert engines.pop(slot).incarnation == incarnation
        engines = {
            slot: ObservedEngine(slot, engine.incarnation, EngineState.DRAINED)
            if engine.state is EngineState.DRAINING
            else engine
            for slot, engine in engines.items()
        }
        now_s += 60.0
    assert engines.keys() == wanted


P0_OLD, D0_OLD, P1_OLD, D1_OLD = (
    ObservedEngine(slot, 1, EngineState.READY, 1) for slot in (P0, D0, P1, Slot(EngineRole.DECODE, 1))
)


def test_an_update_replaces_one_engine_after_the_other_group_by_group() -> None:
    engines = {engine.slot: engine for engine in (D1_OLD, P1_OLD, D0_OLD, P0_OLD)}
    drained = []
    while actions := reconcile(engines, engines.values(), {}, POLICY, 1000.0, model_version=2):
        [action] = actions
        assert isinstance(action, DrainEngine)
        assert action.reason == "model version 2 replaces version 1"
        drained.append(action.slot.engine_id)
        engines[action.slot] = ObservedEngine(action.slot, 2, EngineState.READY, 2)
    assert drained == ["prefill-0", "decode-0", "prefill-1", "decode-1"]


@pytest.mark.parametrize("state", [EngineState.PENDING, EngineState.STARTING, EngineState.DRAINING])
def test_an_update_waits_until_what_it_has_begun_serves(state: EngineState) -> None:
    updated = ObservedEngine(P0, 2, state, 2)
    assert reconcile([P0, D0], [updated, D0_OLD], {}, POLICY, 1000.0, model_version=2) == []


def test_an_update_whose_new_model_does_not_come_up_goes_no_further() -> None:
    history = SlotHistory(6, [996.0, 997.0, 998.0, 999.0], "the checkpoint is incomplete")
    assert reconcile([P0, D0], [D0_OLD], {P0: history}, POLICY, 1000.0, model_version=2) == []


def test_what_is_scaled_away_leaves_before_an_update_goes_on() -> None:
    actions = reconcile([P0, D0], [P0_OLD, D0_OLD, D1_OLD], {}, POLICY, 1000.0, model_version=2)
    assert actions == [DrainEngine(D1_OLD.slot, 1, "it is not wanted any more")]
