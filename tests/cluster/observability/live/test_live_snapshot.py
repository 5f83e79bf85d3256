from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.observability.live import live_snapshot
from cluster.observability.live.live_snapshot import (
    MAX_IN_FLIGHT,
    MAX_KEPT_STORIES,
    MAX_KEPT_STORY_BYTES,
    MAX_STORIES,
    MAX_STORY_BYTES,
    SnapshotMaker,
)
from cluster.observability.status import ClusterView, ControllerView, Decision, EngineView, RequestView
from cluster.observability.stories.make_story import make_story
from cluster.observability.stories.request_story import RequestStory
from cluster.routing.request_record import AttemptRecord, EngineTimes, RequestRecord

NOW_S = 5000.0


class Feed:
    """Records of ended requests, as RequestRecords has them."""

    def __init__(self, *records: RequestRecord) -> None:
        self.records = list(records)

    def since(self, number: int, most: int) -> tuple[int, list[RequestRecord]]:
        return len(self.records), self.records[number:][-most:]


def ended(name: str, ended_s: float = NOW_S, **fields: Any) -> RequestRecord:
    return RequestRecord(name, "", "ingress-0", ended_s - 1.0, "stop", duration_s=1.0, **fields)


def view(now_s: float = NOW_S, **fields: Any) -> ClusterView:
    stats = SchedulerStats(num_running_reqs=1, num_waiting_reqs=4, num_blocks=100, num_free_blocks=75)
    engines = (
        EngineView("prefill-0", 1, "prefill", "ready", stats=stats, stats_at_s=now_s),
        EngineView("decode-0", 1, "decode", "ready", stats=SchedulerStats(), stats_at_s=now_s),
    )
    given = {"model": "tiny", "now_s": now_s, "membership_version": 1, "engines": engines, "requests": (), **fields}
    return ClusterView(**given)


def _maker(*records: RequestRecord, live: tuple[RequestRecord, ...] = ()) -> tuple[SnapshotMaker, Feed]:
    feed = Feed(*records)
    maker = SnapshotMaker(feed, lambda most: live[:most], ingress="ingress-0", version="1.2", now_s=NOW_S)
    return maker, feed


def _ids(data: bytes) -> list[str]:
    return [story["request_id"] for story in json.loads(data)["stories"]]


def test_a_snapshot_has_engines_figures_and_the_bottleneck_in_words() -> None:
    submitted = AttemptRecord(0.25, ("decode-0",), "prefill-0", prefill=EngineTimes(0.5, 0.25), first_token_s=1.0)
    live_record = RequestRecord("live", "t", "ingress-0", NOW_S - 3, attempts=(submitted,), in_flight_s=3.0)
    other = replace_struct(live_record, tenant="u")
    maker, _ = _maker(ended("a", ttft_s=0.25), live=(live_record, other))
    decisions = (Decision(NOW_S - 5, "started decode-0"),)
    request = RequestView("live", NOW_S - 3, "decode", "prefill-0", "decode-0", 10, 2, 1, tenant="t")
    shown = json.loads(maker.make(view(requests=(request,), controller=ControllerView(decisions=decisions))))
    assert (shown["number"], shown["model"], shown["version"], shown["ingress"]) == (1, "tiny", "1.2", "ingress-0")
    assert (shown["bottleneck"]["kind"], shown["bottleneck"]["num_requests"]) == ("prefill queue", 4)
    assert shown["bottleneck"]["where"] == ["prefill-0"]
    prefill, decode = shown["engines"]
    assert (prefill["engine_id"], prefill["num_waiting"], prefill["kv_used"]) == ("prefill-0", 4, 0.25)
    assert decode["role"] == "decode"
    assert shown["figures"]["ttft_p50_s"] == 0.25
    assert shown["decisions"] == [{"at_s": NOW_S - 5, "text": "started decode-0"}]
    [live] = shown["in_flight"]
    assert (live["request_id"], live["tenant"], live["arrived_at_s"], live["phase"]) == (
        "live",
        "t",
        NOW_S - 3,
        "decode",
    )
    assert live["spans"] == [
        ["admission", 0.0, 0.25],
        ["queue", 0.25, 0.75],
        ["prefill", 0.75, 1.0],
        ["unreported", 1.0, None],
    ]
    [story] = shown["stories"]
    assert (story["request_id"], story["outcome"], story["duration_s"]) == ("a", "stop", 1.0)


def test_each_story_comes_once_and_newcomers_get_those_of_the_last_minute() -> None:
    maker, feed = _maker(ended("old", NOW_S - 61), ended("a"))
    assert _ids(maker.make(view())) == ["a"]
    feed.records.append(ended("b", NOW_S + 1))
    assert _ids(maker.make(view(NOW_S + 1))) == ["b"]
    assert _ids(maker.make(view(NOW_S + 2))) == []
    first = maker.first()
    assert (_ids(first), json.loads(first)["is_first"], json.loads(first)["number"]) == (["a", "b"], True, 3)
    maker.make(view(NOW_S + 60.5))
    assert _ids(maker.first()) == ["b"]


def test_the_newest_stories_are_sent_and_the_rest_are_counted() -> None:
    maker, feed = _maker()
    maker.make(view())
    feed.records += [ended(f"r{number}") for number in range(MAX_STORIES + 50)]
    shown = json.loads(maker.make(view()))
    assert (len(shown["stories"]), shown["num_stories_left_out"]) == (MAX_STORIES, 50)
    assert shown["stories"][-1]["request_id"] == f"r{MAX_STORIES + 49}"
    assert shown["figures"]["num_requests"] == MAX_STORIES + 50, "the figures are of all of them"


def test_a_snapshot_is_bounded_whatever_clients_and_engines_send() -> None:
    long = "x" * 20_000
    engines = tuple(EngineView(f"decode-{n}", 1, "decode", "ready", last_error=long) for n in range(500))
    requests = tuple(RequestView(f"r{n}", NOW_S - n, "decode") for n in range(500))
    decisions = tuple(Decision(NOW_S, long) for _ in range(500))
    controller = ControllerView(decisions=decisions, error=long, update=long)
    maker, feed = _maker()
    feed.records = [ended(long + str(number)) for number in range(500)]
    data = maker.make(view(engines=engines, requests=requests, controller=controller))
    shown = json.loads(data)
    assert len(data) < MAX_STORY_BYTES + 128 * 1024
    assert len(shown["stories"]) + shown["num_stories_left_out"] == 500
    assert (len(shown["engines"]), shown["num_engines_left_out"]) == (128, 372)
    assert [one["request_id"] for one in shown["in_flight"][:2]] == ["r499", "r498"], "the oldest ones"
    assert shown["num_in_flight_left_out"] == 436
    assert len(maker.first()) < MAX_KEPT_STORY_BYTES + 128 * 1024


def test_no_more_stories_are_made_than_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(record: RequestRecord) -> RequestStory:
        made.append(record.request_id)
        return make_story(record)

    monkeypatch.setattr(live_snapshot, "make_story", counted)
    maker, feed = _maker()
    feed.records = [ended("x" * 20_000 + str(number)) for number in range(600)]
    shown = json.loads(maker.make(view()))
    assert len(made) < MAX_KEPT_STORY_BYTES / 20_000 + 1
    assert len(shown["stories"]) + shown["num_stories_left_out"] == 600
    assert shown["figures"]["num_requests"] == 600


def test_requests_in_flight_that_the_view_lacks_are_left_out_as_well() -> None:
    requests = tuple(RequestView(f"r{n}", NOW_S + n, "decode") for n in range(MAX_IN_FLIGHT))
    maker, _ = _maker()
    shown = json.loads(maker.make(replace(view(requests=requests), num_requests_left_out=300)))
    assert (len(shown["in_flight"]), shown["num_in_flight_left_out"]) == (MAX_IN_FLIGHT, 300)


def test_the_first_snapshot_has_as_many_stories_as_are_kept() -> None:
    maker, _ = _maker(*(ended(f"r{number}") for number in range(MAX_KEPT_STORIES + 9)))
    assert len(_ids(maker.make(view()))) == MAX_STORIES
    assert len(_ids(maker.first())) == MAX_KEPT_STORIES


@pytest.mark.parametrize("hostile", ["</script><script>", "\u2028\n\n", "\ud800"])
def test_ids_that_clients_chose_cannot_end_an_event(hostile: str) -> None:
    maker, _ = _maker(ended(hostile.encode("utf-8", "replace").decode()))
    assert b"\n" not in maker.make(view())
