"""A cluster that follows a script, behind a real HTTP server, for tests and pictures of the live page."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.access.access_control import AccessControl
from cluster.api.http.server import HttpServer
from cluster.observability.record_store import RecordStore
from cluster.observability.record_writer import RecordWriter
from cluster.observability.request_records import RecordQuery, RequestRecords
from cluster.observability.status import ClusterView, ControllerView, Decision, EngineView, RequestView
from cluster.observability.stopwatch import Stopwatch
from cluster.routing.request_record import AttemptRecord, EngineTimes, RequestRecord
from cluster.settings.http import HttpConfig
from kv_transfer.params import TransferRole
from kv_transfer.transfer_stats import LinkState, LinkStats, TransferStats
from tests.cluster.api.http.http_setup import chat_pair

HOSTILE = '<img src=x onerror="document.title=1">'


class ScriptedCluster:
    """Engines in pairs, links between them, and requests that a script ends.

    num_waiting, num_held: of the first prefill engine
    decode_kv_used:        of the first decode engine
    """

    def __init__(self, num_pairs: int = 2, max_records: int = 5000) -> None:
        self.num_pairs = num_pairs
        self.num_waiting = self.num_held = self.num_ended = 0
        self.decode_kv_used = 0.4
        self.in_flight: tuple[RequestView, ...] = ()
        self.live_records: tuple[RequestRecord, ...] = ()
        self.store = RecordStore(max_records, 64 << 20)
        self._began_s = time.time()

    def show_in_flight(self, arrivals: Mapping[str, float]) -> None:
        """Let these requests alone be in flight, by their Unix times of arrival: all of them decode.

        Each was in the queue of prefill-0 for 0.05 s and its prompt was computed for 0.3 s.
        """
        now_s = time.time()
        self.in_flight = tuple(
            RequestView(name, arrived_s, "decode", "prefill-0", "decode-0", 800, 9, 1)
            for name, arrived_s in arrivals.items()
        )
        attempt = AttemptRecord(
            0.002,
            ("decode-0",),
            "prefill-0",
            num_new_tokens=9,
            prefill=EngineTimes(0.05, 0.3, 800),
            first_token_s=0.352,
        )
        self.live_records = tuple(
            RequestRecord(name, "", "ingress-0", arrived_s, None, 1, 800, 9, (attempt,), in_flight_s=now_s - arrived_s)
            for name, arrived_s in arrivals.items()
        )

    def end_request(
        self,
        request_id: str,
        *,
        ended_s: float | None = None,
        queued_s: float = 0.05,
        prefill_s: float = 0.3,
        exposed_s: float = 0.02,
        decode_s: float = 1.5,
        pair: int = 0,
        failure: str = "",
    ) -> None:
        """End a request that spent these seconds; failure: why a first attempt of 0.5 s failed."""
        self.num_ended += 1
        lost_s = 0.5 if failure else 0.0
        ttft_s = lost_s + queued_s + prefill_s
        duration_s = ttft_s + exposed_s + decode_s
        names = f"decode-{pair}", f"prefill-{pair}"
        first = [AttemptRecord(0.001, (names[0],), names[1], failure=failure, ended_s=lost_s)] if failure else []
        attempt = AttemptRecord(
            lost_s + 0.002,
            (names[0],),
            names[1],
            num_new_tokens=64,
            prefill=EngineTimes(queued_s, prefill_s, 800),
            decode=EngineTimes(0.01, 0.0, 0, 0, 0, 0.2 + exposed_s, exposed_s, 40_000_000),
            first_token_s=ttft_s,
        )
        ended_s = time.time() if ended_s is None else ended_s
        self.store.put(
            RequestRecord(
                request_id,
                "",
                "ingress-0",
                ended_s - duration_s,
                "stop",
                num_prompt_tokens=800,
                num_output_tokens=64,
                attempts=(*first, attempt),
                ttft_s=ttft_s,
                itl_p50_s=decode_s / 64,
                itl_max_s=decode_s / 20,
                duration_s=duration_s,
            )
        )

    async def view(self) -> ClusterView:
        """View the cluster now: its counters grow evenly."""
        now_s = time.time()
        age_s = now_s - self._began_s
        engines = [engine for pair in range(self.num_pairs) for engine in self._pair(pair, now_s, age_s)]
        decisions = (Decision(self._began_s, "started the engines"), Decision(now_s - 3, "decode-1 took over"))
        controller = ControllerView(decisions=decisions)
        return ClusterView("demo-model", now_s, 1, tuple(engines), self.in_flight, controller)

    def _pair(self, pair: int, now_s: float, age_s: float) -> tuple[EngineView, EngineView]:
        num_bytes = int(age_s * 2e8 * (pair + 1))

        def links(peer: str, role: TransferRole) -> tuple[LinkStats, ...]:
            return (LinkStats(peer, 1, role, LinkState.OPEN, 1, num_bytes, self._began_s, now_s, ""),)

        prefill = SchedulerStats(
            num_running_reqs=2,
            num_waiting_reqs=0 if pair else self.num_waiting,
            num_held_reqs=0 if pair else self.num_held,
            num_blocks=1000,
            num_free_blocks=800 - 37 * pair,
            num_prompt_tokens_computed=int(age_s * 4000),
            num_steps=int(age_s * 10),
            transfer_stats=TransferStats(links=links(f"decode-{pair}", TransferRole.PRODUCER)),
        )
        kv_used = self.decode_kv_used if pair == 0 else 0.3
        decode = SchedulerStats(
            num_running_reqs=12,
            num_blocks=1000,
            num_free_blocks=round(1000 * (1 - kv_used)),
            num_output_tokens=int(age_s * 600),
            num_steps=int(age_s * 50),
            transfer_stats=TransferStats(links=links(f"prefill-{pair}", TransferRole.CONSUMER)),
        )
        return (
            EngineView(f"prefill-{pair}", 1, "prefill", "ready", node="10.0.0.1", stats=prefill, stats_at_s=now_s),
            EngineView(f"decode-{pair}", 1, "decode", "ready", node="10.0.0.2", stats=decode, stats_at_s=now_s),
        )


class _ScriptedRecords(RequestRecords):
    """The records of a scripted cluster, those in flight included."""

    def __init__(self, cluster: ScriptedCluster) -> None:
        super().__init__("ingress-0", cluster.store)
        self._cluster = cluster

    def live(self, in_flight: Iterable[RecordWriter]) -> list[RequestRecord]:
        del in_flight
        return list(self._cluster.live_records)

    def find(self, query: RecordQuery, in_flight: Iterable[tuple[RecordWriter, Stopwatch]]) -> list[bytes]:
        live = [one.to_bytes() for one in self._cluster.live_records if query.names(one.tenant, one.request_id)]
        return live or super().find(query, in_flight)


@asynccontextmanager
async def scripted_server(
    cluster: ScriptedCluster, access: AccessControl | None = None, port: int = 0
) -> AsyncIterator[int]:
    """Serve the page of a scripted cluster; gives the port."""
    serving = chat_pair().serving
    serving.records = _ScriptedRecords(cluster)
    server = HttpServer(
        serving, cluster.view, HttpConfig(port=port), 60.0, host="127.0.0.1", access=access, name="ingress-0"
    )
    try:
        yield await server.start()
    finally:
        await server.drain(0)
