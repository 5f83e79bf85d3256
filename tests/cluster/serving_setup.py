"""A Serving on fake engines, for the tests of Serving and of the API servers."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count

from actors.core.outputs.engine_core_outputs import RequestTimings
from actors.core.requests.request import EngineCoreRequest, RequestStatus, StatusChange
from actors.engine_profile import EngineProfile
from cluster.access.access_control import AccessControl
from cluster.access.server_tls import ServerTls
from cluster.api.grpc.server import GrpcServerSettings, IngressServer
from cluster.errors import (
    AdapterNotFound,
    ControllerUnavailable,
    EngineRefused,
    InvalidConfig,
    SecretIsInFile,
    UnknownEngine,
    UnknownNode,
)
from cluster.observability.request_records import FoundRecords, RecordQuery
from cluster.observability.status import ClusterView, ControllerView
from cluster.parameters.generation import GenerateChunk, GenerateRequest, TextPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.requests.moves.migration import MigrationPlanner
from cluster.requests.moves.rerouting import Rerouting
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.serving import Serving
from cluster.routing.base import EngineT, Route, Router
from cluster.routing.engine_connection import EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.settings.ingress import IngressConfig
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from kv_transfer.transfer_stats import TransferTimings
from tests.fakes import EOS_TOKEN_ID, VOCAB_SIZE, FakeEngine, FakePool, byte_tokenizer

MODEL = ModelDescription("tiny", max_model_len=64, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))
HELLO = GenerateRequest(prompt=TextPrompt("hello"), request_id="r", sampling=SamplingOptions(seed=3))


@dataclass
class Pair:
    """A prefill and a decode engine, and Serving on them."""

    prefill: FakeEngine
    decode: FakeEngine
    serving: Serving

    async def next_requests(self) -> tuple[EngineCoreRequest, EngineCoreRequest]:
        """Wait for the next requests to the prefill and the decode engine."""
        return await self.prefill.next_request(), await self.decode.next_request()

    @property
    def num_unfinished_requests(self) -> int:
        return self.prefill.num_unfinished_requests + self.decode.num_unfinished_requests


class RecordingRouter(LeastLoadedPair):
    """A router that notes what it is told.

    told:      starts and ends, with the engines in question, the one that decodes last
    under_way: the ids of requests that have started and not left
    """

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []
        self.under_way: list[str] = []

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        self.told.append(("start", *_engine_ids(route)))
        self.under_way.append(request.request_id)

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        self.told.append(("end", *_engine_ids(route)))

    def on_leave(self, request_id: str) -> None:
        if request_id in self.under_way:
            self.under_way.remove(request_id)


def _engine_ids(route: Route[EngineT]) -> list[str]:
    engines = (route.prefill, route.decode)
    return [engine.descriptor.engine_id for engine in engines if engine is not None]


def make_version(version: int, model: ModelDescription = MODEL, router: Router | None = None) -> ModelVersion:
    processor = InputProcessor(model, ModelTokenizer(byte_tokenizer(), use_fastokens=True), clock=lambda: 1000.0)
    return ModelVersion(version, processor, router or LeastLoadedPair())


def make_serving(
    *engines: FakeEngine,
    max_requests_in_flight: int = 100,
    max_waiting_tokens: int = 10_000,
    recovery_policy: RecoveryPolicy | None = None,
    pool: FakePool | None = None,
    versions: ModelVersions | None = None,
    migration_planner: MigrationPlanner | None = None,
    rerouting: Rerouting | None = None,
) -> Serving:
    """Serving whose clock goes on by one second with each reading. It recovers nothing unless it is told to."""
    ticks = count()
    policy = recovery_policy or RecoveryPolicy(max_attempts=1, engine_timeout_s=60.0)
    # A copy is not validated: a test's ingress may be full from its start.
    settings = IngressConfig().model_copy(
        update={
            "max_requests_in_flight": max_requests_in_flight,
            "max_waiting_tokens": max_waiting_tokens,
            "max_attempts": policy.max_attempts,
            "recovery_timeout_s": policy.engine_timeout_s,
        }
    )
    return Serving(
        versions or ModelVersions(make_version(1)),
        pool or FakePool(*engines),
        settings,
        migration_planner=migration_planner,
        rerouting=rerouting,
        retry_delay_s=1.5,
        clock=lambda: float(next(ticks)),
    )


def make_pair(max_requests_in_flight: int = 100) -> Pair:
    prefill, decode = FakeEngine("p0", EngineRole.PREFILL), FakeEngine("d0", EngineRole.DECODE)
    serving = make_serving(prefill, decode, max_requests_in_flight=max_requests_in_flight)
    return Pair(prefill, decode, serving)


def prefill_timings() -> RequestTimings:
    return RequestTimings(
        queued_s=0.25,
        prefill_s=0.5,
        num_prompt_tokens_computed=3,
        num_cached_tokens=2,
        num_preemptions=0,
        status_changes=[StatusChange(RequestStatus.WAITING, 1.0), StatusChange(RequestStatus.RUNNING, 1.25)],
        num_fetched_images=2,
    )


def decode_timings() -> RequestTimings:
    return RequestTimings(
        queued_s=0.125,
        prefill_s=0.0,
        num_prompt_tokens_computed=0,
        num_cached_tokens=1,
        num_preemptions=1,
        status_changes=[StatusChange(RequestStatus.WAITING_FOR_REMOTE_KVS, 1.125)],
        transfer=TransferTimings(num_blocks=2, num_bytes=4096, num_chunks=1, transfer_s=0.75, exposed_s=0.0625),
    )


async def collect(chunks: AsyncGenerator[GenerateChunk, None]) -> list[GenerateChunk]:
    """Every chunk until the end."""
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


def text_of(chunks: list[GenerateChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def assert_nothing_is_left(pair: Pair) -> None:
    """No engine works on anything, and Serving knows of no request."""
    assert pair.num_unfinished_requests == 0
    assert pair.serving.num_requests_in_flight == 0


class FakeAdmin:
    """A controller that remembers what it was asked; engine "d0" is the only one. found: at the other ingresses"""

    def __init__(self, found: FoundRecords | None = None) -> None:
        self.found = found or FoundRecords()
        self.asked: list[tuple[object, ...]] = []

    async def status(self) -> ControllerView:
        raise ControllerUnavailable("it is a fake")

    async def find_records(self, query: RecordQuery) -> FoundRecords:
        self.asked.append(("find_records", query))
        return self.found

    async def scale(self, counts: Mapping[EngineRole, int]) -> list[str]:
        self.asked.append(("scale", dict(counts)))
        return ["d0"]

    async def drain(self, engine_id: str, *, for_good: bool) -> None:
        self._check(engine_id)
        self.asked.append(("drain", engine_id, for_good))

    async def set_role(self, engine_id: str, role: EngineRole) -> None:
        self._check(engine_id)
        self.asked.append(("set_role", engine_id, role))

    async def reset_prefix_cache(self, engine_id: str, *, preempt: bool) -> dict[str, bool]:
        self._check(engine_id or "d0")
        self.asked.append(("reset_prefix_cache", engine_id, preempt))
        return {"d0": preempt, "p0": True}

    async def rotate_secret(self) -> bool:
        self.asked.append(("rotate_secret",))
        if self.asked.count(("rotate_secret",)) == 3:
            raise SecretIsInFile("/etc/raypd/secret")
        return self.asked.count(("rotate_secret",)) == 2

    async def profile(self, engine_id: str, duration_s: float, *, with_trace: bool) -> EngineProfile:
        self._check(engine_id)
        if self.asked and self.asked[-1][0] == "profile":
            raise EngineRefused(engine_id, "it is being profiled already")
        self.asked.append(("profile", engine_id, duration_s))
        return EngineProfile("a table", b"a trace" if with_trace else b"")

    async def drain_node(self, name: str) -> list[str]:
        if name != "host-0":
            raise UnknownNode(name, ["host-0"])
        self.asked.append(("drain_node", name))
        return ["d0"]

    async def update(self, directory: str) -> int:
        if directory != "model-2":
            raise InvalidConfig("update", [f"{directory!r} is not there"])
        self.asked.append(("update", directory))
        return 2

    async def load_adapter(self, name: str, directory: str) -> str:
        if directory != "/adapters/sql":
            raise InvalidConfig("load adapter", [f"{directory!r} is not there"])
        self.asked.append(("load_adapter", name, directory))
        return "d1"

    async def unload_adapter(self, name: str) -> None:
        if name != "sql":
            raise AdapterNotFound("name", name, ["sql"], is_enabled=True)
        self.asked.append(("unload_adapter", name))

    def _check(self, engine_id: str) -> None:
        if engine_id != "d0":
            raise UnknownEngine(engine_id, ["d0"])


def grpc_settings(
    access: AccessControl | None = None, tls: ServerTls | None = None, **settings: float | None
) -> GrpcServerSettings:
    """The settings of an ingress on a free port, with these beside the defaults."""
    config = IngressConfig.model_validate({"port": 0} | settings)
    return GrpcServerSettings(config, access or AccessControl(), tls)


def make_ingress_server(
    serving: Serving, *, port: int = 0, admin: FakeAdmin | None = None, settings: GrpcServerSettings | None = None
) -> IngressServer:
    """An ingress of a cluster without engines. settings: instead of those by default, and of port"""

    async def view() -> ClusterView:
        requests = serving.requests_in_flight()
        return ClusterView("test", time.time(), 7, (), requests, ControllerView(error="no controller"))

    return IngressServer(serving, view, admin or FakeAdmin(), settings or grpc_settings(port=port))
