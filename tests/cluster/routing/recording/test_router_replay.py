"""Tests of cluster/routing/recording/router_replay.py, cluster/routing/recording/recorded_routing.py and
cluster/routing/recording/router_events.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.core.outputs.sent_work import SentWork
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.errors import InvalidRecording
from actors.recording.recording_file import RecordingFile, read_records
from actors.recording.replay import Replay
from actors.recording_config import DecisionRecordingConfig
from cluster.errors import NoEngineAvailable
from cluster.routing.recording.recorded_routing import RoutingRecorder
from cluster.routing.recording.router_events import CODEC, Announced, Chosen, Reported, Rerouted, RouterHeader, Started
from cluster.routing.recording.router_replay import replay_routers
from tests.cluster.routing.cost_setup import engine, request
from tests.cluster.routing.recording.recorded_cluster import RecordedCluster

_OF_ANOTHER = SentWork(900, 0.9, 900)


def _names(directory: Path) -> list[Path]:
    return sorted(directory.glob("ingress-*"))


def _busy_run(directory: Path) -> tuple[RecordedCluster, set[str]]:
    """Three engines, prompts with common beginnings, reports, blocks, an engine that leaves, and none at all."""
    engines = [engine("prefill-0"), engine("decode-0"), engine("both-0", num_decodes=30)]
    cluster = RecordedCluster(directory, *engines)
    followed = cluster.indexes.follow(engines[0].descriptor)
    assert followed is not None
    assert followed.on_size(10_000, 16)
    routes, used = [], set[str]()
    for number in range(30):
        wanted = request(400, first_token=7 * (number % 3))
        route = cluster.send(wanted)
        routes.append((wanted, route))
        used |= {one.descriptor.engine_id for one in (route.prefill, route.decode) if one is not None}
        if number % 4 == 0:
            for index, one in enumerate(engines):
                one.num_prompt_tokens_computed += 300
                one.reports(num_decodes=(number * 7 * (index + 1)) % 40, num_waiting_tokens=number * 11)
                cluster.book.note_report(one)
            # Another ingress burdens an engine.
            cluster.book.note_announced(engines[1], engines[1].num_submitted_requests + 1, [_OF_ANOTHER])
        if number % 4 == 1:
            cluster.book.note_announced(engines[1], 0, [], [_OF_ANOTHER])
        if number % 5 == 2:
            cluster.end(*routes.pop(0))
    cluster.indexes.forget_engine(engines[2].descriptor.key)
    cluster.engines = engines[:2]
    cluster.book.keep([one.descriptor.key for one in cluster.engines])
    cluster.send(request())
    cluster.engines = []
    with pytest.raises(NoEngineAvailable):
        cluster.send(request())
    cluster.recorder.close()
    return cluster, used


def _changed(directory: Path, change: Callable[[list[object]], None]) -> Replay:
    events = [CODEC.decode(record) for record in read_records(_names(directory)[0])]
    change(events)
    file = RecordingFile(directory, "changed", 1 << 24)
    for event in events:
        file.write(CODEC.encode(event))
    file.close()
    return replay_routers(file.path)


def test_every_route_is_chosen_again(tmp_path: Path) -> None:
    _, used = _busy_run(tmp_path)
    assert len(used) == 3, "the run uses all engines"
    replay = replay_routers(_names(tmp_path)[0])
    assert replay.difference is None
    assert replay.who == "ingress node-1"
    assert replay.num_decisions == replay.counts["Chosen"] == 32
    assert replay.counts["Started"] == 31
    assert replay.counts["Announced"] == 16
    assert replay.counts["Over"] == replay.counts["Left"] == 6


def test_a_report_that_is_missing_is_found_with_the_first_request_whose_costs_differ(tmp_path: Path) -> None:
    _busy_run(tmp_path)

    def without_one(events: list[object]) -> None:
        reports = [index for index, event in enumerate(events) if isinstance(event, Reported) and event.states]
        del events[reports[5]]

    found = _changed(tmp_path, without_one).difference
    assert found is not None
    assert found.what.startswith("request request ")


def test_an_announcement_that_is_missing_is_found(tmp_path: Path) -> None:
    _busy_run(tmp_path)

    def without_all(events: list[object]) -> None:
        events[:] = [event for event in events if not isinstance(event, Announced)]

    found = _changed(tmp_path, without_all).difference
    assert found is not None
    assert found.what.startswith("request request ")


def test_another_clock_is_found(tmp_path: Path) -> None:
    _busy_run(tmp_path)

    def later(events: list[object]) -> None:
        for index, event in enumerate(events):
            if isinstance(event, Chosen):
                events[index] = replace(event, clock_s=tuple(time_s - 5.0 for time_s in event.clock_s))

    assert _changed(tmp_path, later).difference is not None


def test_blocks_that_engines_report_are_replayed(tmp_path: Path) -> None:
    engines = [engine("both-0"), engine("both-1")]
    cluster = RecordedCluster(tmp_path, *engines)
    first = request(320, first_token=5)
    there = cluster.send(first)
    index = cluster.indexes.make(1, 16)
    index.note_engine(there.decode.descriptor.key, 1000)
    index.begin_snapshot(there.decode.descriptor.key)
    index.store(there.decode.descriptor.key, np.array([1, 2], np.uint64), np.array([0, 1], np.uint32))
    index.end_snapshot(there.decode.descriptor.key)
    index.discard(there.decode.descriptor.key, np.array([2], np.uint64))
    index.tidy()
    again = cluster.send(request(320, first_token=5))
    cluster.recorder.close()
    assert again.decode is not None
    replay = replay_routers(_names(tmp_path)[0])
    assert replay.difference is None
    assert replay.counts["IndexTold"] == 6


def test_a_prompt_is_written_once(tmp_path: Path) -> None:
    cluster = RecordedCluster(tmp_path, engine("both-0"))
    wanted = request(4000)
    cluster.end(wanted, cluster.send(wanted))
    cluster.recorder.close()
    events = [CODEC.decode(record) for record in read_records(_names(tmp_path)[0])]
    prompts = [len(event.request.prompt_token_ids) for event in events if isinstance(event, Chosen | Started)]
    assert prompts == [4000, 0]
    assert replay_routers(_names(tmp_path)[0]).difference is None


def test_an_ingress_goes_on_when_its_recording_is_full(tmp_path: Path) -> None:
    cluster = RecordedCluster(tmp_path, engine("both-0"), engine("both-1"), max_mib=1)
    for _ in range(80):
        cluster.send(request(6000))
    assert not cluster.recorder.is_open
    wanted = request(10)
    cluster.end(wanted, cluster.send(wanted))
    cluster.book.note_report(cluster.engines[0])
    cluster.indexes.make(1, 16).tidy()
    replay = replay_routers(_names(tmp_path)[0])
    assert replay.difference is None
    assert 10 < replay.num_decisions < 80


def test_without_settings_or_with_a_directory_that_cannot_be_made_nothing_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert RoutingRecorder.begin(None, "node-1", PUBLIC_KEY) is None
    (tmp_path / "file").write_text("")
    settings = DecisionRecordingConfig(directory=tmp_path / "file" / "below")
    with caplog.at_level(logging.WARNING):
        assert RoutingRecorder.begin(settings, "node-1", PUBLIC_KEY) is None
    assert caplog.records[0].message == "the ingress's routes are not recorded"


def test_what_is_no_recording_of_an_ingress_is_refused(tmp_path: Path) -> None:
    _busy_run(tmp_path)

    def other_version(events: list[object]) -> None:
        assert isinstance(events[0], RouterHeader)
        events[0] = replace(events[0], version=9)

    def headless(events: list[object]) -> None:
        del events[0]

    def twice(events: list[object]) -> None:
        events.insert(3, events[0])

    def unknown(events: list[object]) -> None:
        at = next(index for index, event in enumerate(events) if isinstance(event, Chosen))
        event = events[at]
        assert isinstance(event, Chosen)
        events[at] = replace(event, engines=(99,))

    for change, message in (
        (other_version, "it has version 9"),
        (headless, "it does not begin with the header of an ingress"),
        (twice, "record 4 is not possible here"),
        (unknown, r"record \d+ is not possible here: KeyError\(99\)"),
    ):
        with pytest.raises(InvalidRecording, match=message):
            _changed(tmp_path, change)
    (tmp_path / "z.decisions").write_bytes(b"\x03\x00\x00\x00abc")
    with pytest.raises(InvalidRecording, match="record 1 is no record of an ingress"):
        replay_routers(tmp_path / "z.decisions")


def test_who_goes_elsewhere_is_recorded_and_goes_there_again(tmp_path: Path) -> None:
    cluster = RecordedCluster(tmp_path, engine("prefill-0"), engine("decode-0"))
    waiting, routes = [request(4000, max_tokens=20) for _ in range(6)], {}
    engines, cluster.engines = cluster.engines, cluster.engines[:1]
    for one in waiting:
        routes[one.request_id] = cluster.send(one)
    cluster.engines = engines
    chosen = []
    for one in reversed(waiting):
        again = replace(one, request_id=f"{one.request_id}+1", attempt=1)
        route = cluster.router.reroute(one.request_id, again, cluster.engines)
        chosen.append(route and route.decode.descriptor.engine_id)
        if route is not None:
            engines[1].num_submitted_requests += 1
            cluster.router.on_leave(one.request_id)
            cluster.router.on_start(again, route)
    assert chosen[0] == "decode-0"
    assert None in chosen
    cluster.recorder.close()
    replay = replay_routers(_names(tmp_path)[0])
    assert replay.difference is None
    assert replay.num_decisions == replay.counts["Chosen"] + replay.counts["Rerouted"] == 12

    def as_if_it_had_stayed(events: list[object]) -> None:
        index, moved = next((index, event) for index, event in enumerate(events) if isinstance(event, Rerouted))
        events[index] = replace(moved, route=None)

    found = _changed(tmp_path, as_if_it_had_stayed).difference
    assert found is not None
    assert "the recorded route is none, this one decode-0" in found.what
