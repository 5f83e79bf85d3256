"""Engines that report, and a router of them whose choices are recorded."""

from __future__ import annotations

from pathlib import Path

from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.recording_config import DecisionRecordingConfig
from cluster.routing.base import Route
from cluster.routing.cost_router import CostRouter
from cluster.routing.decision import RoutingMode
from cluster.routing.prefix_aware import PrefixAwarePair
from cluster.routing.prefixes.prefix_indexes import PrefixIndexes
from cluster.routing.recording.recorded_routing import RecordedLoadBook, RoutingRecorder
from tests.cluster.routing.cost_setup import BLOCK_SIZE, FakeEngine


class RecordedCluster:
    """The routing of one ingress."""

    def __init__(self, directory: Path, *engines: FakeEngine, max_mib: int = 4) -> None:
        settings = DecisionRecordingConfig(directory=directory, max_file_mib=max_mib)
        recorder = RoutingRecorder.begin(settings, "node-1", PUBLIC_KEY)
        assert recorder is not None
        self.recorder = recorder
        self.book = RecordedLoadBook(recorder)
        self.indexes = PrefixIndexes(1 << 20, recorder.make_index)
        index = self.indexes.make(1, BLOCK_SIZE)
        pairs = PrefixAwarePair(BLOCK_SIZE, index, hash_key=PUBLIC_KEY)
        plain = CostRouter(pairs, self.book)
        self.router = recorder.make_router(plain, index, BLOCK_SIZE, RoutingMode.COST, is_aggregated=False)
        self.engines = list(engines)
        for one in engines:
            self.book.note_report(one)

    def send(self, wanted: EngineCoreRequest) -> Route[FakeEngine]:
        """Route a request, and submit it."""
        route = self.router.choose(wanted, self.engines)
        for one in (route.prefill, route.decode):
            if one is not None:
                one.num_submitted_requests += 1
                one.num_unfinished_requests += 1
        self.router.on_start(wanted, route)
        return route

    def end(self, wanted: EngineCoreRequest, route: Route[FakeEngine]) -> None:
        """Let a request end after 20 tokens."""
        for one in (route.prefill, route.decode):
            if one is not None:
                one.num_unfinished_requests -= 1
        self.router.on_end(wanted, list(range(20)), route)
        self.router.on_leave(wanted.request_id)
