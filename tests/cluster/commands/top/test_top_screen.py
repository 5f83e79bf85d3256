from __future__ import annotations

import msgspec
import pytest

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.commands.top.top_screen import share_rows
from cluster.commands.top.top_state import TopState
from cluster.observability.stories.make_story import make_story
from cluster.observability.stories.request_story import Phase, PhaseSpan, RequestStory
from cluster.routing.request_record import RequestRecord
from tests.cluster.commands.top.statuses import engine, request, shown, status


def _state(*engines: admin_pb2.EngineStatus, **fields: object) -> TopState:
    state = TopState()
    state.update(status(*engines, **fields), 0.0)
    return state


def _loaded() -> TopState:
    state = TopState()
    for now_s in (0, 1, 2):
        link = admin_pb2.LinkStatus(
            peer_engine_id="prefill-0", end="consumer", state="open", active_transfers=2, bytes=now_s * 1_500_000_000
        )
        decode = engine("decode-0", running=4, free_blocks=2, waiting=3, output_tokens=now_s * 120, steps=now_s * 20)
        decode.links.append(link)
        prefill = engine("prefill-0", running=1, prompt_tokens=now_s * 4000)
        decisions = [admin_pb2.Decision(age_seconds=5.0, text="started decode-0")]
        requests = [request("r1", 2.5), request("[red]r2", 0.5, "prefill")]
        state.update(status(prefill, decode, decisions=decisions, requests=requests), float(now_s))
    return state


def test_the_screen_shows_rates_and_names_what_holds_requests_back() -> None:
    text = shown(_loaded())
    lines = text.splitlines()
    assert "4,000 prompt tok/s  120 output tok/s" in lines[0]
    assert lines[1].startswith("Decode blocks: 3 requests wait for KV blocks at decode-0")
    [decode] = [line for line in lines if line.strip().startswith("decode-0  ")]
    assert decode.split()[:8] == ["decode-0", "decode", "ready", "4", "3", "0", "0", "98%"]
    assert decode.split()[8:10] == ["50.0", "ms"]
    assert "▇" in decode or "█" in decode, "its history"
    assert "prefill-0 -> decode-0  open           2  1.50 GB/s" in text
    assert "started decode-0" in text


def _ended(request_id: str, arrived_at_s: float, outcome: str = "stop") -> RequestStory:
    spans = (
        PhaseSpan(Phase.QUEUE, "prefill-0", 1, 0.0, 1.0),
        PhaseSpan(Phase.PREFILL, "prefill-0", 1, 1.0, 3.0),
        PhaseSpan(Phase.DECODE, "decode-0", 1, 3.0, 4.0),
    )
    story = make_story(RequestRecord(request_id, "t", "i", arrived_at_s, outcome, ttft_s=3.0, duration_s=4.0))
    return msgspec.structs.replace(story, spans=spans, cause="waited 1.00 s in the queue of prefill-0")


def test_the_last_finished_requests_have_their_phases_and_causes() -> None:
    state = _loaded()
    state.take_finished([_ended("older", 10.0), _ended("newer", 11.0, "failed")])
    lines = [line.rstrip() for line in shown(state, width=170).splitlines()]
    at = lines.index("last finished requests")
    newer, older = lines[at + 2 : at + 4]
    assert newer.split()[:8] == ["t/newer", "failed", "3.00", "s", "4.00", "s", "0", "░░░░░░████████████▒▒▒▒▒▒"]
    assert newer.rstrip().endswith("waited 1.00 s in the queue of prefill-0")
    assert older.split()[:2] == ["t/older", "stop"]
    for key in ("/", *"older", "enter"):
        state.press(key)
    assert "t/newer" not in shown(state)
    state.press("escape")
    state.take_finished((), "no records are kept")
    assert "no finished requests: no records are kept" in shown(state)


def test_a_long_cause_is_cut_off_before_any_other_column_is() -> None:
    state = _loaded()
    long = msgspec.structs.replace(
        _ended("older", 10.0), cause="engine prefill-0 is lost: " + 20 * "the session broke "
    )
    state.take_finished([long])
    [line] = [line for line in shown(state, width=100).splitlines() if "t/older" in line]
    assert line.split()[:7] == ["t/older", "stop", "3.00", "s", "4.00", "s", "0"]
    assert "░░░░░░████████████▒▒▒▒▒▒  engine prefill-0 is" in line
    assert len(line.rstrip()) <= 100
    assert line.rstrip().endswith("…")


def test_a_terminal_of_80_columns_leaves_columns_out_and_cuts_no_name_or_number() -> None:
    state = _loaded()
    state.take_finished([_ended("chatcmpl-0123456789012", 10.0)])
    lines = shown(state, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    [decode] = [line for line in lines if line.strip().startswith("decode-0  ")]
    assert decode.split() == [*("decode-0", "decode", "ready", "4", "3"), "98%", "50.0", "ms", "0", "120"]
    [names] = [line for line in lines if line.strip().startswith("engine ")]
    assert names.split() == ["engine", "role", "state", "run", "wait", "KV", "step", "prompt/s", "output/s"]
    [ended] = [line for line in lines if "chatcmpl-" in line]
    assert ended.startswith("t/chatcmpl-0123456789012  stop  4.00 s  ░░░██████▒▒▒  waited 1.00 s in the ")
    [live] = [line for line in lines if line.startswith("r1 ")]
    assert live.split()[:6] == ["r1", "2.5", "s", "decode", "prefill-0", "decode-0"]


def test_names_that_clients_chose_are_no_markup() -> None:
    assert "[red]r2" in shown(_loaded())


def test_an_engine_without_counters_has_dashes() -> None:
    starting = admin_pb2.EngineStatus(engine_id="decode-1", role="decode", state="starting")
    [line] = [line for line in shown(_state(engine("decode-0"), starting)).splitlines() if "decode-1" in line]
    assert line.split()[:4] == ["decode-1", "decode", "starting", "-"]


@pytest.mark.parametrize("height", [12, 20, 40])
def test_sections_fit_the_height_and_count_what_they_leave_out(height: int) -> None:
    engines = [engine(f"decode-{number}") for number in range(30)]
    state = _state(*engines, requests=[request(f"r{number}", 1.0) for number in range(50)])
    text = shown(state, height=height)
    assert len(text.splitlines()) <= height
    assert " of 30" in text


def test_a_narrow_terminal_has_no_line_that_is_too_long() -> None:
    assert max(map(len, shown(_loaded(), width=60).splitlines())) <= 60


def test_the_selected_engine_is_marked_and_the_last_line_asks() -> None:
    state = _loaded()
    state.press("j")
    state.press("d")
    lines = shown(state).splitlines()
    assert [line.split()[1] for line in lines if line.startswith(">")] == ["decode-0"]
    assert lines[-1].startswith("drain decode-0, which a new incarnation replaces? y for yes")
    state.press("n")
    state.press("r")
    assert shown(state).splitlines()[-1].startswith("role of decode-0: p prefill, d decode, b both, e encode")
    state.press("p")
    assert "let decode-0 serve as prefill? y" in shown(state)


def test_the_help_names_every_key_and_phase() -> None:
    state = _loaded()
    state.press("?")
    text = shown(state)
    assert all(word in text for word in ("drain", "sort", "pause", "quit", "prefill", "decode"))


def test_a_status_that_did_not_come_is_said_and_the_last_one_stays() -> None:
    state = _loaded()
    state.fail("no answer")
    text = shown(state)
    assert "no newer status: no answer" in text
    assert "decode-0" in text
    state.update(status(), 9.0)
    assert "no newer status" not in shown(state)


@pytest.mark.parametrize(
    ("wanted", "room", "shares"),
    [
        ([3, 2], 10, [3, 2]),
        ([30, 50], 10, [5, 5]),
        ([1, 50], 10, [1, 9]),
        ([4, 4, 4], 2, [1, 1, 0]),
        ([4, 4], 0, [0, 0]),
        ([4], -3, [0]),
        ([], 5, []),
    ],
)
def test_lines_are_shared_fairly(wanted: list[int], room: int, shares: list[int]) -> None:
    assert share_rows(wanted, room) == shares
