"""The memory of what engines can do with roles and without: averages, and when they begin anew."""

from __future__ import annotations

import math

import pytest

from cluster.routing.costs.role_memory import RoleMemory, StateRates
from cluster.routing.decision import RoleUse


def _rates(kept: float) -> StateRates:
    return StateRates(prompts=100.0, decodes=3 * kept, kept=kept, ignored=10.0)


def _note(memory: RoleMemory, kept: float, now_s: float, *, matters: bool = True) -> float:
    found = memory.averaged(_rates(kept), now_s)
    memory.note(RoleUse.KEPT, matters=matters)
    assert (found.prompts, found.ignored) == pytest.approx((100.0, 10.0))
    assert found.decodes == pytest.approx(3 * found.kept)
    return found.kept


def test_the_first_rates_of_a_load_count_as_much_as_each_other_one() -> None:
    memory = RoleMemory()
    found = [_note(memory, kept, 0.5 * number) for number, kept in enumerate((8.0, 20.0, 26.0))]
    assert found == pytest.approx([8.0, 14.0, 18.0])


def test_a_speed_that_goes_up_and_down_has_its_mean() -> None:
    memory = RoleMemory()
    found = [_note(memory, 14.0 + 10.0 * (number % 2), 0.5 * number) for number in range(100)]
    assert found[-20:] == pytest.approx([19.0] * 20, abs=1.0)


def test_a_speed_that_has_changed_for_good_is_what_counts_after_some_seconds() -> None:
    memory = RoleMemory()
    for number in range(20):
        _note(memory, 20.0, 0.5 * number)
    found = [_note(memory, 10.0, 10.0 + 0.5 * number) for number in range(20)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(10 + 10 * math.exp(-0.5 / 3), rel=0.01)
    assert found[-1] == pytest.approx(10.0, rel=0.05)


def test_rates_under_a_load_that_leaves_the_choice_open_are_forgotten() -> None:
    memory = RoleMemory()
    for number in range(20):
        _note(memory, 5.0, 0.5 * number, matters=False)
    assert _note(memory, 25.0, 10.0) == 25.0


def test_after_a_quiet_time_everything_begins_anew() -> None:
    memory = RoleMemory()
    for number in range(20):
        _note(memory, 5.0, 0.5 * number)
    found = []
    for now_s in (11.4, 11.6):
        memory.begin(now_s)
        found.append((memory.use, memory.is_new))
    assert found == [(RoleUse.KEPT, False), (RoleUse.WEIGHED, True)]
    assert _note(memory, 25.0, 11.6) == 25.0
