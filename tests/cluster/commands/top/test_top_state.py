from __future__ import annotations

import pytest

from cluster.commands.top.top_state import Action, Drain, Mode, Order, Quit, SetRole, TopState
from cluster.observability.live.bottleneck import BottleneckKind
from cluster.routing.engine_connection import EngineRole
from tests.cluster.commands.top.statuses import engine, request, status


def _state() -> TopState:
    state = TopState()
    state.update(status(), 0.0)
    return state


def _press(state: TopState, *keys: str) -> list[Action]:
    return [action for key in keys if (action := state.press(key)) is not None]


def _engine_ids(state: TopState) -> list[str]:
    return [one.engine_id for one in state.engines()]


def test_totals_become_rates_and_a_history() -> None:
    state = TopState()
    for now_s in (0.0, 1.0, 2.0):
        state.update(status(engine("decode-0", output_tokens=int(now_s * 50))), now_s)
    [one] = state.live.engines
    assert one.output_tokens_per_s == 50.0
    assert state.history("decode-0") == (0.0, 50.0, 50.0)


def test_what_holds_requests_back_is_named() -> None:
    state = TopState()
    state.update(status(engine("prefill-0", waiting=9), engine("decode-0")), 0.0)
    assert (state.bottleneck.kind, state.bottleneck.num_requests) == (BottleneckKind.PREFILL_QUEUE, 9)


def test_a_drain_is_asked_for_only_after_its_confirmation() -> None:
    state = _state()
    assert _press(state, "j", "d") == []
    assert (state.mode, state.selected) == (Mode.CONFIRM, "decode-0")
    assert _press(state, "y") == [Drain("decode-0")]
    assert state.mode is Mode.TABLE


@pytest.mark.parametrize("keys", [("d", "n"), ("d", "escape"), ("d", "d"), ("r", "x"), ("r", "d", "n"), ("r", "y")])
def test_any_other_key_changes_nothing(keys: tuple[str, ...]) -> None:
    state = _state()
    assert _press(state, *keys) == []
    assert (state.mode, state.pending, state.message) == (Mode.TABLE, None, "nothing was changed")
    assert _press(state, "y") == [], "a late yes confirms nothing"


@pytest.mark.parametrize(
    ("key", "role"),
    [("p", EngineRole.PREFILL), ("d", EngineRole.DECODE), ("b", EngineRole.BOTH), ("e", EngineRole.ENCODE)],
)
def test_a_role_is_set_after_its_confirmation(key: str, role: EngineRole) -> None:
    assert _press(_state(), "r", key, "y") == [SetRole("prefill-0", role)]


def test_a_filter_hides_engines_and_requests_and_no_key_acts_on_a_hidden_engine() -> None:
    state = TopState()
    state.update(status(requests=[request("a", 1.0), request("b", 2.0)]), 0.0)
    assert state.selected == "prefill-0"
    _press(state, "/", *"DECODEx", "backspace", "enter")
    assert _engine_ids(state) == ["decode-0"]
    assert [one.request_id for one in state.requests()] == ["b", "a"], "both decode there"
    assert _press(state, "d", "y") == [Drain("decode-0")]
    _press(state, "escape")
    assert _engine_ids(state) == ["prefill-0", "decode-0"]


def test_keys_are_letters_while_a_filter_is_written() -> None:
    state = _state()
    assert _press(state, "/", "q", "d") == []
    assert (state.filter, state.engines()) == ("qd", [])
    assert _press(state, "enter", "d", "y") == [], "no engine is selected"


@pytest.mark.parametrize(
    ("order", "engine_ids"),
    [
        (Order.NAME, ["prefill-1", "decode-0", "decode-2"]),
        (Order.WAITING, ["decode-2", "prefill-1", "decode-0"]),
        (Order.KV, ["decode-0", "decode-2", "prefill-1"]),
        (Order.TOKENS, ["prefill-1", "decode-2", "decode-0"]),
    ],
)
def test_engines_are_sorted_as_chosen(order: Order, engine_ids: list[str]) -> None:
    state = TopState()
    for now_s in (0, 1):
        engines = [
            engine("decode-0", free_blocks=10, output_tokens=now_s),
            engine("decode-2", waiting=9, output_tokens=10 * now_s),
            engine("prefill-1", waiting=1, free_blocks=90, prompt_tokens=99 * now_s),
        ]
        state.update(status(*engines), now_s)
    while state.order is not order:
        state.press("s")
    assert _engine_ids(state) == engine_ids


def test_requests_are_ordered_by_age_or_by_phase() -> None:
    state = TopState()
    state.update(status(requests=[request("new", 1.0), request("p", 5.0, "prefill"), request("old", 9.0)]), 0.0)
    assert [one.request_id for one in state.requests()] == ["old", "p", "new"]
    _press(state, "o")
    assert [one.request_id for one in state.requests()] == ["old", "new", "p"]


def test_a_pause_keeps_what_is_shown_and_the_rates_go_on() -> None:
    state = _state()
    _press(state, "p")
    state.update(status(engine("decode-7", output_tokens=0)), 1.0)
    assert _engine_ids(state) == ["prefill-0", "decode-0"]
    _press(state, "p")
    state.update(status(engine("decode-7", output_tokens=10)), 2.0)
    [one] = state.engines()
    assert one.output_tokens_per_s == 10.0


def test_the_selection_stays_on_its_engine_until_this_has_left() -> None:
    state = _state()
    _press(state, "down", "down")
    assert state.selected == "decode-0"
    state.update(status(engine("decode-0"), engine("decode-1")), 1.0)
    assert state.selected == "decode-0"
    state.update(status(engine("decode-1")), 2.0)
    assert state.selected == "decode-1"


@pytest.mark.parametrize("mode_key", ["", "?", "/", "r", "d"])
def test_ctrl_c_ends_it_whatever_the_keys_mean(mode_key: str) -> None:
    state = _state()
    _press(state, *mode_key)
    assert _press(state, "interrupt") == [Quit()]


def test_q_ends_it_and_any_key_leaves_the_help() -> None:
    state = _state()
    assert _press(state, "?", "q") == []
    assert _press(state, "q") == [Quit()]
