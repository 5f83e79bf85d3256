"""One engine as a process serves it: a gRPC server on an event loop, and the engine thread behind it.

The server carries services that are private to the cluster: sessions with ingresses (session_server.py), control
streams with other engines (kv_transfer.control), the encoding of images for other engines (remote_encoding.py), and
challenges (kv_transfer.trust), which a caller needs to use the others. The core is built and stepped off the event
loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import grpc
import torch

from actors.attention_report import AttentionReport
from actors.config import EngineConfig, EngineRoleName
from actors.core.loads.embedding_transfers import EmbeddingFetch
from actors.core.loads.kept_embeddings import KeptEmbeddings
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.adapter import Adapter
from actors.core.requests.multimodal import EncoderInput, PackedArray
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.request_limits import (
    DescribedArray,
    find_embeddings_mistake,
    find_image_mistake,
    find_request_mistake,
)
from actors.engine_builder import build_engine_core
from actors.engine_core import EngineCore
from actors.engine_profile import EngineProfile
from actors.engine_thread import EngineThread
from actors.errors import EncodeRefused, EngineNotStarted, ProfileUnderWay
from actors.model.attention_offers import report_attention
from actors.model.loader import choose_device
from actors.model_facts import ModelFacts
from actors.process.cpu_binding import ComputeThreads, CpuBinding, CpuShare, decide_binding, read_host_cpus
from actors.process.loop_watch import LoopWatch
from actors.process.openmp import call_in_ending_thread
from actors.process.profiling import EngineProfiler
from actors.process.start_phases import StartPhases
from actors.ranks.process_ranks import ProcessRanks
from actors.ranks.rank_launcher import RankLauncher
from actors.sessions.block_messages import CachedBlocks
from actors.sessions.block_reports import BlockReports
from actors.sessions.remote_encoding import EncodeService, RemoteEncoders
from actors.sessions.session_messages import MAX_MESSAGE_BYTES
from actors.sessions.session_server import SessionServer
from kv_transfer.device_kind import is_accelerator
from kv_transfer.links.grpc_control import GrpcControl
from kv_transfer.links.refused_messages import RefusedMessages
from kv_transfer.params import EngineAddress
from kv_transfer.trust.grpc_proof import METADATA_LIMITS, GrpcAcceptor
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.tls import listen

logger = logging.getLogger(__name__)

_SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Sessions idle between requests: their keepalive pings must not look like abuse.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # When the network cuts an ingress or a peer off, its requests must not stay here until TCP gives up.
    ("grpc.keepalive_time_ms", 5_000),
    *METADATA_LIMITS,
]


class EngineServer:
    """start() and stop() belong to one event loop; the properties may be read from any thread.

    Whatever needs the model raises EngineNotStarted until start() has returned.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine_id: str,
        incarnation: int,
        trust: Trust,
        launch_ranks: RankLauncher = ProcessRanks,
        *,
        cpu_share: CpuShare | None = None,
    ) -> None:
        """Prepare an engine.

        trust: holds the cluster's secret before start(), and follows it from then on
        cpu_share: the CPUs that Ray has reserved; None outside of Ray
        """
        self._config = config
        self._trust = trust
        self.refusals = Refusals()
        """Counts of the connections that were refused because their caller did not prove the cluster's secret."""
        self._launch_ranks = launch_ranks
        self._cpu_share = cpu_share
        if cpu_share is not None and not config.parallel.num_threads:
            parallel = config.parallel.model_copy(update={"num_threads": max(1, int(cpu_share.num_cpus))})
            self._config = config.model_copy(update={"parallel": parallel})
        self._engine_id = engine_id
        self._incarnation = incarnation
        self.phases = StartPhases()
        """The phases of the start, in words for the controller."""
        self._error: str | None = None
        self._wake = threading.Event()
        self._profiling = threading.Lock()
        self.loop_watch = LoopWatch()
        self._started_core: EngineCore | None = None
        self._thread: EngineThread | None = None
        self._facts: ModelFacts | None = None
        self._block_reports: BlockReports | None = None
        self.refused_messages = RefusedMessages()
        self._encoding: dict[tuple[int, str, int], asyncio.Task[None]] = {}
        """Requests whose images are being encoded elsewhere, by client, id and attempt."""

    async def report_attention(self) -> AttentionReport:
        """Return which orders of keys suit this machine; before start()."""
        return await call_in_ending_thread(report_attention, self._config)

    async def start(self, host: str, key_order: str | None = None) -> str:
        """Load, warm up and listen on a free port of `host`; returns host:port.

        key_order: the KeyOrder that all engines of the cluster use; None leaves the choice to the settings
        """
        if key_order is not None:
            cache = self._config.cache.model_copy(update={"key_order": key_order})
            self._config = self._config.model_copy(update={"cache": cache})
        link_timeout_s = self._config.kv_transfer.link_timeout_s
        # The same timeout as for links, so that one setting decides when a peer counts as lost.
        timeout_ms = max(1, round(link_timeout_s * 1000))
        timeouts = [("grpc.keepalive_timeout_ms", timeout_ms), ("grpc.http2.ping_timeout_ms", timeout_ms)]
        self._server = grpc.aio.server(options=[*_SERVER_OPTIONS, *timeouts])
        acceptor = GrpcAcceptor(self._trust, self.refusals)
        own = Party(self._engine_id, self._incarnation)
        self._sessions = sessions = SessionServer(
            self, self._engine_id, self._incarnation, acceptor, self.refused_messages
        )
        member = Member(self._first_rank(), self._trust)
        self._control = GrpcControl(asyncio.get_running_loop(), member, acceptor, link_timeout_s)
        kept_embeddings = KeptEmbeddings()
        self._encoders = RemoteEncoders(
            self._config.scheduler.encode_timeout_s,
            self,
            kept_embeddings,
            Member(own, self._trust),
            self._find_embeddings_mistake,
        )
        self.encode_service = EncodeService(self._encode, kept_embeddings, own, acceptor, self.refused_messages)
        handlers = (sessions.handler(), self._control.handler(), self.encode_service.handler(), acceptor.handler())
        self._server.add_generic_rpc_handlers(handlers)
        address = f"{host}:{listen(self._server, f'{host}:0', self._trust.tls)}"
        identity = EngineAddress(self._engine_id, self._incarnation, address)
        core = self._started_core = await call_in_ending_thread(
            build_engine_core,
            self._config,
            identity,
            self._control,
            self._wake.set,
            self._say,
            self._launch_ranks,
            kept_embeddings,
            trust=self._trust,
        )
        binding = await asyncio.to_thread(self._decide_binding)
        facts = core.executor.facts
        self._facts = replace(facts, cpu_threads=f"{binding}{facts.cpu_threads}")
        self._block_reports = BlockReports.of(core.scheduler, sessions.deliver_kv_events)
        self._thread = EngineThread(core, sessions.deliver, self._on_death, self._wake, binding, self._block_reports)
        self._thread.start()
        await self._server.start()
        self.loop_watch.start()
        self._say("serving")
        return address

    def _decide_binding(self) -> CpuBinding:
        """Hold cores for the engine thread, if the settings and the host allow it."""
        parallel = self._config.parallel
        threads = ComputeThreads(
            torch.get_num_threads(),
            parallel.cpu_binding,
            parallel.tensor_parallel_size,
            is_accelerator(choose_device(self._config.model)),
        )
        binding = decide_binding(threads, self._cpu_share, read_host_cpus())
        logger.info("engine computes with %s", binding, extra={"engine_id": self._engine_id})
        return binding

    def _first_rank(self) -> Party:
        """Return the party that this process is on KV links: the engine, or its rank 0."""
        is_alone = self._config.parallel.tensor_parallel_size == 1
        return Party(self._engine_id if is_alone else f"{self._engine_id}/0", self._incarnation)

    @property
    def _core(self) -> EngineCore:
        """The core that start() has built. Raises EngineNotStarted."""
        if self._started_core is None:
            raise EngineNotStarted(self._engine_id)
        return self._started_core

    async def stop(self) -> None:
        """Close every client's session, end the engine thread, and release the core."""
        if self._thread is not None:
            await self._server.stop(grace=0)
            await asyncio.to_thread(self._thread.stop)
            await self._control.close()
            for encoding in list(self._encoding.values()):
                encoding.cancel()
            await self._encoders.close()
        self._say("stopped")

    def take_other_pages(self) -> None:
        """Begin to take the memory of the KV cache that is not taken yet; does nothing before the model is loaded."""
        if self._started_core is not None:
            self._started_core.executor.take_other_pages()

    def find_mistake(self, request: EngineCoreRequest) -> str | None:
        """Say why the model cannot take a request, or return None."""
        return find_request_mistake(request, self.facts.request_limits)

    def submit(self, requests: list[EngineCoreRequest], client_index: int) -> None:
        """Queue requests of one session."""
        for request in requests:
            if request.encoder is None or not request.encoder_inputs:
                self._submit(request, client_index)
            else:
                key = client_index, request.request_id, request.attempt
                task = self._encoding[key] = asyncio.create_task(self._submit_encoded(request, client_index))
                task.add_done_callback(lambda _, key=key: self._encoding.pop(key))  # type: ignore[misc]  # mypy infers no lambda with a default

    def _submit(self, request: EngineCoreRequest, client_index: int) -> None:
        self._core.submit(request, client_index)
        self._wake.set()

    async def _submit_encoded(self, request: EngineCoreRequest, client_index: int) -> None:
        """Queue a request once an encode engine has made its images' embeddings."""
        self._submit(await self._encoders.embed(request), client_index)

    def _count_taken(self, client_index: int) -> None:
        self._core.ask(lambda: self._core.count_taken(client_index))

    def begin_fetch(self, fetch: EmbeddingFetch) -> None:
        """Begin to fetch an image's embeddings from an encode engine, for RemoteEncoders."""
        core = self._core
        core.ask(lambda: core.scheduler.remote.embeddings.begin(fetch))
        self._wake.set()

    def cancel_fetch(self, fetch: EmbeddingFetch) -> None:
        """End a fetch that begin_fetch() began, if it is not over."""
        core = self._core
        core.ask(lambda: core.scheduler.remote.embeddings.cancel(fetch))
        self._wake.set()

    def _find_embeddings_mistake(self, described: DescribedArray, num_embeds: int) -> str | None:
        images = self.facts.images
        return "the model takes no images" if images is None else find_embeddings_mistake(described, images, num_embeds)

    async def _encode(self, image: EncoderInput) -> PackedArray:
        """Encode an image for another engine. Raises EncodeRefused."""
        core = self._core
        images = self.facts.images
        if images is None or (mistake := find_image_mistake(image, images)) is not None:
            reason = "the model takes no images" if images is None else mistake
            self.refused_messages.add("refused image", "an engine", str(reason))
            raise EncodeRefused(str(reason))
        embeddings = await self._ask(lambda: core.executor.encode(image))
        assert isinstance(embeddings, PackedArray)
        return embeddings

    def abort(self, requests: list[tuple[str, int]], client_index: int) -> None:
        """Queue the end of one session's requests, as (request_id, attempt)."""
        for request_id, attempt in requests:
            encoding = self._encoding.get((client_index, request_id, attempt))
            if encoding is not None and not encoding.cancelling() and encoding.cancel():
                self._count_taken(client_index)
            self._core.abort(request_id, client_index, attempt)
        self._wake.set()

    async def send_cached_blocks(self, begin: int, deliver: Callable[[CachedBlocks], None]) -> int | None:
        """Deliver a part of a snapshot of the prefix cache, after all events so far; SessionEngine has the contract."""
        if (reports := self._block_reports) is None:
            return None
        next_begin = await self._ask(lambda: reports.send_part(begin, deliver))
        assert next_begin is None or isinstance(next_begin, int)
        return next_begin

    async def load_adapter(self, adapter: Adapter) -> str | None:
        """Load an adapter before any request needs it; returns why the load failed, or None. From any event loop."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[str | None] = loop.create_future()

        def tell(failure: str | None) -> None:
            if not over.done():
                over.set_result(failure)

        def tell_from_engine(failure: str | None) -> None:
            # The caller may have gone, and its event loop with it.
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, failure)

        self._core.preload(adapter, tell_from_engine)
        self._wake.set()
        return await over

    async def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Forget all cached blocks; returns whether that was possible. From any event loop.

        preempt: preempt running requests, which start over, instead of refusing the reset
        """
        core = self._core
        return bool(await self._ask(lambda: core.scheduler.reset_prefix_cache(reset_running_requests=preempt)))

    async def set_role(self, role: EngineRoleName) -> None:
        """Mix prompts into decoding steps as engines of this role do, from the next step on. From any event loop."""
        core = self._core
        await self._ask(lambda: core.scheduler.chunk_budget.set_role(role))

    async def profile(self, duration_s: float, *, with_trace: bool) -> EngineProfile:
        """Profile the engine for duration_s seconds. From any event loop. Raises ProfileUnderWay."""
        if not self._profiling.acquire(blocking=False):
            raise ProfileUnderWay
        try:
            profiler = EngineProfiler()
            await self._ask(profiler.begin)
            try:
                await asyncio.sleep(duration_s)
            finally:
                # The profiler is stopped even if the call is cancelled, because it slows the engine down.
                profile = await asyncio.shield(self._ask(lambda: profiler.end(with_trace=with_trace)))
            assert isinstance(profile, EngineProfile)
            return profile
        finally:
            self._profiling.release()

    def _ask(self, function: Callable[[], object]) -> asyncio.Future[object]:
        answer = asyncio.wrap_future(self._core.ask(function))
        self._wake.set()
        return answer

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts. Raises EngineNotStarted."""
        if self._facts is None:
            raise EngineNotStarted(self._engine_id)
        return self._facts

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's newest snapshot."""
        return self._with_refusals(self._thread.stats if self._thread is not None else SchedulerStats())

    def stats_for(self, client_index: int) -> SchedulerStats:
        """Return the newest snapshot, with the number of a session's requests that were taken in before it."""
        stats = SchedulerStats() if self._thread is None else self._thread.stats_for(client_index)
        return self._with_refusals(stats)

    def _with_refusals(self, stats: SchedulerStats) -> SchedulerStats:
        return replace(
            stats,
            num_refused_connections=self.refusals.total,
            refused_messages=dict(self.refused_messages.counts()),
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, not even one whose images an encode engine works on."""
        return not self._encoding and (self._thread is None or self._thread.is_idle)

    @property
    def seconds_in_step(self) -> float:
        """How long the present step has taken; 0 while there is nothing to do."""
        return self._thread.seconds_in_step if self._thread is not None else 0.0

    @property
    def error(self) -> str | None:
        """Why the engine thread died; None while it lives."""
        return self._error

    def check_integrity(self) -> None:
        """Check the scheduler's and the pool's invariants; only while the engine is idle. Raises IntegrityError."""
        self._core.scheduler.check_integrity()

    def _say(self, progress: str) -> None:
        self.phases.begin(progress)
        logger.info("engine %s", progress, extra={"engine_id": self._engine_id})

    def _on_death(self, error: BaseException) -> None:
        self._error = f"{type(error).__name__}: {error}"
        # Hang up at once, so that the clients move their requests to other engines: until then, heartbeats would report
        # a living engine.
        self._sessions.hang_up(self._error)
