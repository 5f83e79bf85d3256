"""The parts of one ingress's process: sessions with the engines, the serving logic, the gRPC and the HTTP server."""

from __future__ import annotations

import asyncio
import functools
import operator
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from actors.core.requests.block_hash import BlockHashKey
from actors.model_facts import ModelFacts
from actors.process.loop_watch import LoopWatch
from cluster.access.access_control import AccessControl
from cluster.access.server_tls import ServerTls
from cluster.access.tokens import Tokens
from cluster.api.controller_watch import ControllerWatch
from cluster.api.grpc.server import GrpcServerSettings, IngressServer
from cluster.api.http.server import HttpServer
from cluster.api.model_loader import ModelLoader
from cluster.api.shared.admin import ClusterAdmin
from cluster.api.shared.ports import IngressPorts
from cluster.api.shared.version import server_version
from cluster.config import ClusterConfig
from cluster.errors import CanaryFailed, EngineLost
from cluster.observability.live.live_snapshot import MAX_IN_FLIGHT
from cluster.observability.request_records import RecordQuery
from cluster.observability.routing_figures import RoutingSummary, merged
from cluster.observability.status import (
    ClusterView,
    ControllerView,
    ModelView,
    PrefixIndexView,
    RequestTraceView,
    RequestView,
    merge_engines,
)
from cluster.observability.trace_writing.request_tracer import RequestTracer, start_tracer
from cluster.observability.tracing.request_tracing import RequestTracing
from cluster.observability.vllm_dialect import IngressLoad, VllmDialect
from cluster.planning.offered_load import LoadWindow, OfferedLoad
from cluster.planning.plan_record import PlannerMode
from cluster.requests.model_versions import ModelVersions
from cluster.requests.moves.migration import MigrationPlanner
from cluster.requests.moves.rerouting import Rerouting
from cluster.requests.serving import Serving
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineDescriptor
from cluster.routing.load_book import LoadBook
from cluster.routing.pairing import refused_pairs
from cluster.routing.prefixes.prefix_index import PrefixIndex
from cluster.routing.prefixes.prefix_indexes import PrefixIndexes
from cluster.routing.recording.recorded_routing import RecordedLoadBook, RoutingRecorder
from cluster.routing.request_record import EngineQueue
from cluster.sessions.canary import run_canary
from cluster.sessions.cluster_membership import Membership, ServedModel
from cluster.sessions.session import EngineSession
from cluster.sessions.session_pool import SessionPool
from cluster.settings.http import HttpConfig
from cluster.settings.ingress import IngressConfig
from cluster.text.adapters import AdapterDirectory
from kv_transfer.trust.membership import Member

_CANARY_TIMEOUT_S = 60.0
_CANARY_ENGINE_TIMEOUT_S = 10.0
"""An engine that has just started may stay silent for longer than one that serves."""
_TRACE_TIMEOUT_S = 2.0
"""How long a drain waits for the disk that the request trace is on."""


class IngressProcess:
    """All parts of an ingress, on one event loop.

    prepare(), prove() and update_membership() may be called before start(), which lets clients in.
    """

    def __init__(self, config: ClusterConfig, admin: ClusterAdmin, member: Member) -> None:
        """Make the parts that need no event loop. admin: the controller; member: this ingress's identity for engines"""
        self._config = config
        self._member = member
        self._admin = admin
        self._controller = ControllerWatch(admin)
        self._asking: asyncio.Task[None] | None = None
        self._versions = ModelVersions()
        self._adapters = AdapterDirectory(config.lora)
        hash_key = BlockHashKey(member.trust.block_hash_key)
        self._recorder = RoutingRecorder.begin(config.decision_recording, member.party.name, hash_key)
        self._load_book = LoadBook() if self._recorder is None else RecordedLoadBook(self._recorder)
        make_index = PrefixIndex if self._recorder is None else self._recorder.make_index
        self._indexes = PrefixIndexes(config.routing.prefix_index_mib << 20, make_index)
        self._loader = ModelLoader(
            config,
            self._versions,
            self._adapters,
            hash_key=hash_key,
            load_book=self._load_book,
            indexes=self._indexes,
            recorder=self._recorder,
        )
        self.loop_watch = LoopWatch()
        self._pool: SessionPool | None = None
        self._grpc_server: IngressServer | None = None
        self._http_server: HttpServer | None = None
        self._serving: Serving | None = None
        has_planner = config.planner.mode is not PlannerMode.NONE
        self._offered = OfferedLoad(config.planner.interval_s, time.time()) if has_planner else None
        self._tracer: RequestTracer | None = None
        self._tracing: RequestTracing | None = None

    async def prove(self, prefill: EngineDescriptor | None, decode: EngineDescriptor, facts: ModelFacts) -> None:
        """Send a canary request through a pair of engines, by sessions only for it. Raises CanaryFailed.

        prefill: None if the decode engine serves both roles
        """
        engines = [engine for engine in (prefill, decode) if engine is not None]
        sessions = [EngineSession(engine, self._member, _CANARY_ENGINE_TIMEOUT_S) for engine in engines]
        try:
            for session in sessions:
                await session.open()
            await run_canary(sessions[0] if prefill is not None else None, sessions[-1], facts, _CANARY_TIMEOUT_S)
        except EngineLost as error:
            raise CanaryFailed(str(error)) from error
        finally:
            await asyncio.gather(*(session.close() for session in sessions))

    async def prepare(self, model: ServedModel) -> None:
        """Load what requests of a model need, before its first engine serves. Raises TokenizerUnusable."""
        await self._loader.load(model)

    async def update_membership(self, membership: Membership) -> None:
        """Follow a newer membership, once the tokenizer of each model version in it is loaded; ignore an older one."""
        if membership.version <= self.membership_version:
            return
        await self._loader.load_all(membership.models)
        if membership.version > self.membership_version:
            self._adapters.register(membership.adapters)
        if membership.models and membership.version > self.membership_version:
            # This comes before engines of an old version leave, so that their requests learn that no other engine
            # serves this version.
            self._versions.keep({model.version for model in membership.models})
            self._indexes.keep({model.version for model in membership.models})
        await self._sessions().update(membership)

    @property
    def membership_version(self) -> int:
        """The version of the membership that is in force; 0: none yet. May be read from any thread."""
        return 0 if self._pool is None else self._pool.membership.version

    @property
    def num_requests_in_flight(self) -> int:
        """How many requests this ingress works on. May be read from any thread."""
        return 0 if self._serving is None else self._serving.num_requests_in_flight

    def find_records(self, query: RecordQuery) -> list[bytes]:
        """Return the records that this ingress has of a request, as RequestRecord.to_bytes()."""
        return [] if self._serving is None else self._serving.find_records(query)

    def offered_load(self, number: int) -> list[LoadWindow]:
        """Return the complete windows of offered load from this number on; none if there is no planner."""
        return [] if self._offered is None else self._offered.since(number, time.time())

    def routing_summary(self) -> RoutingSummary:
        """Sum up how this ingress has routed requests. May be called from any thread."""
        return RoutingSummary() if self._serving is None else self._serving.records.summary()

    def request_trace(self) -> RequestTraceView | None:
        """Return the counts of the request trace; None if none is written. May be called from any thread."""
        return None if self._tracer is None else self._tracer.view()

    async def start(self, facts: ModelFacts) -> IngressPorts:
        """Start the gRPC and the HTTP server; returns their ports.

        facts: the facts of the configured model, which is served if no membership has named a model
        Raises TokenizerUnusable, AddressUnavailable or InvalidConfig.
        """
        config = self._config
        self.loop_watch.start()
        if self._loader.is_empty:
            await self._loader.load(ServedModel(1, config.model.model, facts))
        serving = self._serving = Serving(
            self._versions,
            self._sessions(),
            config.ingress,
            ingress=self._member.party.name,
            offered=self._offered,
            migration_planner=self._migration_planner() if config.ingress.move_preempted else None,
            rerouting=self._rerouting(),
            request_tracer=self._start_tracer(),
            tracing=self._start_tracing(),
        )
        serving.records.queues = self._queues
        serving.metrics.refused_messages = self._sessions().refused_messages
        serving.metrics.version = server_version()
        view = functools.partial(self._view, serving)
        settings = _grpc_server_settings(config.ingress)
        if self._tracer is not None:
            serving.metrics.request_trace = self._tracer.view
        if (tls := settings.tls) is not None:
            serving.metrics.certificate_ends_at_s = lambda: tls.ends_at_s
        self._grpc_server = IngressServer(serving, view, self._admin, settings)
        port = await self._grpc_server.start()
        if config.ingress.http is None:
            return IngressPorts(port)
        self._asking = asyncio.create_task(self._controller.run())
        self._http_server = HttpServer(
            serving,
            functools.partial(self._recent_view, serving),
            config.ingress.http,
            host=config.ingress.host,
            access=settings.access,
            tls=None if settings.tls is None else settings.tls.ssl_context(),
            slow_reader_timeout_s=config.ingress.slow_reader_timeout_s,
            allowed_hosts=config.ingress.allowed_hosts,
            name=self._member.party.name,
            has_admin_port=config.ingress.has_port_for_operators,
            live_view=functools.partial(self._recent_view, serving, MAX_IN_FLIGHT),
            dialect=self._dialect(serving, config.ingress.http),
        )
        return IngressPorts(port, await self._http_server.start())

    def _dialect(self, serving: Serving, config: HttpConfig) -> VllmDialect | None:
        if "vllm" not in config.metrics_dialects:
            return None
        return VllmDialect(serving.metrics, functools.partial(self._load, serving))

    def _load(self, serving: Serving) -> IngressLoad:
        roles = {engine.key: engine.role for engine in self._sessions().membership.engines}
        stats = {key: newest for key, (newest, _) in self._sessions().stats().items() if key in roles}
        usages = [one.kv_cache_usage for key, one in stats.items() if roles[key].generates] or [0.0]
        return IngressLoad(
            serving.request_load(),
            kv_cache_usage=sum(usages) / len(usages),
            block_size=max((one.block_size for one in stats.values()), default=0),
            num_blocks=sum(one.num_blocks for one in stats.values()),
            max_adapters=0 if self._config.lora is None else self._config.lora.max_cpu_loras,
        )

    def _queues(self) -> dict[str, EngineQueue]:
        """Return the queue of each engine; of an engine's incarnations the newest one counts."""
        stats = sorted(self._sessions().stats().items(), key=operator.itemgetter(0))
        return {key[0]: EngineQueue.of(key[0], newest) for key, (newest, _) in stats}

    async def _view(self, serving: Serving) -> ClusterView:
        """View the cluster as it is now; without the controller's part if the controller does not answer in time."""
        return self._view_with(await self._controller.ask(), serving)

    async def _recent_view(self, serving: Serving, max_requests: int | None = None) -> ClusterView:
        """View the cluster with the controller's part as of its last answer. Asks no other process.

        max_requests: of the requests in flight this many are in the view, the oldest ones; None: all
        """
        return self._view_with(self._controller.newest, serving, max_requests)

    def _view_with(self, controller: ControllerView, serving: Serving, max_requests: int | None = None) -> ClusterView:
        membership, epoch_s = self._sessions().membership, time.time() - time.monotonic()
        stats = {key: (newest, epoch_s + at_s) for key, (newest, at_s) in self._sessions().stats().items()}
        requests = serving.requests_in_flight(max_requests)
        return ClusterView(
            model=self._config.model_name,
            now_s=time.time(),
            membership_version=membership.version,
            engines=merge_engines(controller.engines, membership.engines, stats),
            requests=requests,
            num_requests_left_out=serving.num_requests_in_flight - len(requests),
            controller=controller,
            refused_pairs=refused_pairs(membership.engines),
            models=self._model_views(requests),
            num_migrations=serving.num_migrations,
            routing=merged([one.routing for one in controller.ingresses] or [serving.records.summary()]),
            prefix_indexes=tuple(self._prefix_views()),
            event_loop_lag_s=self.loop_watch.longest_lag_s,
        )

    def _prefix_views(self) -> Iterator[PrefixIndexView]:
        for version, (size, reports) in sorted(self._indexes.sizes().items()):
            num_lookups, num_hits = self._indexes.hits(version)
            yield PrefixIndexView(
                version=version,
                num_blocks=size.num_blocks,
                size_bytes=size.size_bytes,
                max_bytes=size.max_bytes,
                stride=size.stride,
                num_lookups=num_lookups,
                num_hits=num_hits,
                num_events=reports.num_events,
                num_gaps=reports.num_gaps,
                num_snapshots=reports.num_snapshots,
            )

    def _model_views(self, requests: Iterable[RequestView]) -> tuple[ModelView, ...]:
        num_engines = Counter(engine.descriptor.model_version for engine in self._sessions().snapshot())
        num_requests = Counter(request.model_version for request in requests)
        return tuple(
            ModelView(
                version=model.version,
                directory=model.directory,
                num_engines=num_engines[model.version],
                num_requests=num_requests[model.version],
                last_error=self._loader.errors.get(model.version, ""),
            )
            for model in self._sessions().membership.models
        )

    async def drain(self, grace_s: float) -> None:
        """Stop the servers, and close the sessions. Requests get grace_s seconds to end; the rest are aborted."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        servers = [server for server in (self._grpc_server, self._http_server) if server is not None]
        await asyncio.gather(*(server.drain(grace_s) for server in servers))
        self._versions.close()
        if self._pool is not None:
            await self._pool.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close, _TRACE_TIMEOUT_S)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._recorder is not None:
            self._recorder.close()

    def _start_tracer(self) -> RequestTracer | None:
        settings, trust = self._config.ingress.request_trace, self._member.trust
        if settings is not None:
            key, now_s = BlockHashKey(trust.block_hash_key), time.time()
            name = self._member.party.name
            self._tracer = start_tracer(settings, name, key, now_s=now_s, monotonic_s=time.monotonic())
        return self._tracer

    def _start_tracing(self) -> RequestTracing | None:
        settings, name = self._config.ingress.tracing, self._member.party.name
        if settings is not None:
            # Imported here: OpenTelemetry comes with the extra `otel`, and takes a tenth of a second to import.
            from cluster.observability.tracing.span_export import SpanExport

            self._tracing = RequestTracing(settings, SpanExport(settings, name), name, time.monotonic)
        return self._tracing

    def _sessions(self) -> SessionPool:
        if self._pool is None:
            # The pool belongs to the running event loop, so it cannot be made earlier.
            timeout_s = self._config.ingress.engine_timeout_s
            self._pool = SessionPool(self._member, timeout_s, self._load_book, self._indexes)
        return self._pool

    def _rerouting(self) -> Rerouting | None:
        is_wanted = self._config.ingress.reroute_waiting and self._config.routing.mode is RoutingMode.COST
        return Rerouting(self._load_book) if is_wanted else None

    def _migration_planner(self) -> MigrationPlanner:
        return MigrationPlanner(self._sessions().stats, mode=self._config.routing.mode, load_book=self._load_book)


def _grpc_server_settings(config: IngressConfig) -> GrpcServerSettings:
    access = AccessControl(Tokens(config.tokens) if config.tokens is not None else None)
    return GrpcServerSettings(config, access, ServerTls(config.tls) if config.tls is not None else None)
