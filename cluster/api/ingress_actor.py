"""The Ray actor around one ingress: the gRPC server, the serving logic, the sessions with the engines."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import ray

from actors.engine_profile import EngineProfile
from actors.model_facts import ModelFacts
from actors.process.allocator import give_back_large_blocks, give_back_regularly
from actors.process.garbage_collection import collect_seldom, leave_out_what_is_loaded, no_collection
from actors.process.log_lines import write_log_lines
from actors.process.ray_calls import RayCallFailed, ask_head, call
from cluster.api.shared.admin import OperatorVerbs
from cluster.api.shared.ports import IngressPorts
from cluster.checks.startup_checks import refuse_bad_node
from cluster.config import ClusterConfig
from cluster.errors import ClusterError, ControllerUnavailable
from cluster.observability.request_records import FoundRecords, RecordQuery
from cluster.observability.routing_figures import NOTHING_ROUTED, RoutingSummary
from cluster.observability.status import ControllerView, RequestTraceView, ingress_name
from cluster.planning.offered_load import LoadWindow
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.cluster_membership import Membership, ServedModel
from cluster.text.torch_free import without_torch
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial

_CONTROLLER_TIMEOUT_S = 30.0
_RECORDS_TIMEOUT_S = 4.0
_LOCAL = "127.0.0.1"

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Verb: TypeAlias = Callable[Concatenate[OperatorVerbs, _P], Coroutine[Any, Any, _T]]


class RemoteController:
    """A ClusterAdmin that calls the controller's actor, by its name in this actor's namespace. See ClusterAdmin."""

    def __init__(self, name: str, ingress: str) -> None:
        """name: of the controller's actor; ingress: the name of the ingress that calls"""
        self._name = name
        self._ingress = ingress

    async def status(self) -> ControllerView:
        """Return what the controller knows of engines and ingresses."""
        view: ControllerView = await self._call("status")
        return view

    async def find_records(self, query: RecordQuery) -> FoundRecords:
        """Ask all other ingresses for the records of a request."""
        found: FoundRecords = await self._call("find_records", query, self._ingress, timeout_s=_RECORDS_TIMEOUT_S)
        return found

    async def scale(self, counts: Mapping[EngineRole, int]) -> list[str]:
        """Change how many engines of these roles are wanted."""
        return await self._operate(OperatorVerbs.scale, dict(counts))

    async def drain(self, engine_id: str, *, for_good: bool) -> None:
        """Take an engine out of service once its work is done."""
        await self._operate(OperatorVerbs.drain, engine_id, for_good=for_good)

    async def set_role(self, engine_id: str, role: EngineRole) -> None:
        """Let an engine serve in another role from now on."""
        await self._operate(OperatorVerbs.set_role, engine_id, role)

    async def reset_prefix_cache(self, engine_id: str, *, preempt: bool) -> dict[str, bool]:
        """Clear the prefix cache of an engine; "": of every engine."""
        return await self._operate(OperatorVerbs.reset_prefix_cache, engine_id, preempt=preempt)

    async def profile(self, engine_id: str, duration_s: float, *, with_trace: bool) -> EngineProfile:
        """Profile an engine for duration_s seconds."""
        timeout_s = duration_s + _CONTROLLER_TIMEOUT_S
        return await self._operate_within(
            timeout_s, OperatorVerbs.profile, engine_id, duration_s, with_trace=with_trace
        )

    async def rotate_secret(self) -> bool:
        """Replace the cluster's secret."""
        return await self._operate(OperatorVerbs.rotate_secret)

    async def drain_node(self, name: str) -> list[str]:
        """Take everything on a node out of service."""
        return await self._operate(OperatorVerbs.drain_node, name)

    async def update(self, directory: str) -> int:
        """Replace the engines by ones that serve another checkpoint."""
        return await self._operate(OperatorVerbs.update, directory)

    async def load_adapter(self, name: str, directory: str) -> str:
        """Let requests name an adapter."""
        return await self._operate(OperatorVerbs.load_adapter, name, directory)

    async def unload_adapter(self, name: str) -> None:
        """Let no new request name an adapter."""
        await self._operate(OperatorVerbs.unload_adapter, name)

    async def _operate(self, verb: _Verb[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
        return await self._operate_within(_CONTROLLER_TIMEOUT_S, verb, *arguments, **options)

    async def _operate_within(
        self, timeout_s: float, verb: _Verb[_P, _T], *arguments: _P.args, **options: _P.kwargs
    ) -> _T:
        answer: _T = await self._call("operate", verb.__name__, *arguments, timeout_s=timeout_s, **options)
        return answer

    async def _call(
        self, method: str, *arguments: Any, timeout_s: float = _CONTROLLER_TIMEOUT_S, **options: Any
    ) -> Any:
        try:
            # The actor is looked up for each call, because it may have been restarted since the last one.
            controller: Any = await ask_head(ray.get_actor, self._name)
            return await call(getattr(controller, method), *arguments, timeout_s=timeout_s, **options)
        except RayCallFailed as failed:
            if isinstance(failed.cause, ClusterError):
                raise failed.cause from failed
            if failed.cause is not None:
                raise
            raise ControllerUnavailable(str(failed).strip().splitlines()[0]) from failed


@dataclass(frozen=True, slots=True)
class IngressHealth:
    """The health of an ingress.

    membership_version: the version of the membership that the ingress follows
    num_requests:       its requests in flight
    trust_generation:   the generation of the cluster's secrets that it has (TrustMaterial.generation)
    busy_s:             how long its event loop has been busy with one callback, in seconds; 0 while it answers
    routing:            how it has routed requests
    request_trace:      the request trace that it writes; None: it writes none
    """

    membership_version: int = 0
    num_requests: int = 0
    trust_generation: int = 0
    busy_s: float = 0.0
    routing: RoutingSummary = NOTHING_ROUTED
    request_trace: RequestTraceView | None = None


def _outward_address() -> str:
    """Return this host's address on its route to other hosts; the loopback address if it has no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # an address that no host has (RFC 5737); connecting a UDP socket sends nothing
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return _LOCAL
        return str(probe.getsockname()[0])


class IngressActor:
    """One ingress as a Ray actor. It saves no state: the controller and the clients send it everything that it needs.

    health() runs in the concurrency group "control", which has a thread and an event loop of its own.
    """

    def __init__(self, config: ClusterConfig, controller_name: str, number: int, incarnation: int) -> None:
        """Keep the settings. controller_name: the name of the controller's actor, in this actor's namespace"""
        self._trust = Trust()
        self._member = Member(Party(ingress_name(number), incarnation), self._trust)
        write_log_lines()
        self._config = config
        self._controller_name = controller_name

    async def place(self) -> tuple[str, str]:
        """Return the id and the address of the actor's node."""
        node_id = ray.get_runtime_context().get_node_id()
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # ray
        # The only node of a local cluster is 127.0.0.1, which clients on other hosts cannot reach.
        return node_id, _outward_address() if address == _LOCAL else address

    async def use_trust(self, material: TrustMaterial) -> int:
        """Use these secrets as proofs to engines from now on; returns their generation.

        The controller calls this method before use_ports(). Raises SecretUnusable.
        """
        self._trust.use(material)
        return self._trust.generation

    async def reveal_trust(self) -> TrustMaterial | None:
        """Return the secrets that the ingress was given last, for a controller that was restarted."""
        return self._trust.material

    async def use_ports(self, ports: IngressPorts) -> None:
        """Take the ports to listen on. The controller calls this method before all methods below.

        Raises InvalidConfig if this node lacks something that the ingress needs, such as a file; at this time no engine
        has loaded a model yet.
        """
        # Imported here, so that the driver and the controller need not load a tokenizer library for this class.
        with no_collection(), without_torch():
            from cluster.api.process import IngressProcess

        config = self._config.model_copy(update={"ingress": ports.applied_to(self._config.ingress)})
        await refuse_bad_node(config.ingress)
        self._process = IngressProcess(
            config, RemoteController(self._controller_name, self._member.party.name), self._member
        )

    @ray.method(concurrency_group="control")
    async def health(self) -> IngressHealth:
        """Return the ingress's health; this method answers even while the main event loop is busy."""
        process = self._process
        return IngressHealth(
            process.membership_version,
            process.num_requests_in_flight,
            self._trust.generation,
            process.loop_watch.busy_s,
            process.routing_summary(),
            process.request_trace(),
        )

    async def prove(self, prefill: EngineDescriptor | None, decode: EngineDescriptor, facts: ModelFacts) -> None:
        """Send a canary request through a pair of engines. Raises CanaryFailed."""
        await self._process.prove(prefill, decode, facts)

    async def prepare(self, model: ServedModel) -> None:
        """Load the tokenizer, and what else requests of this model need. Raises TokenizerUnusable."""
        await self._process.prepare(model)

    async def update_membership(self, membership: Membership) -> None:
        """Follow a newer membership."""
        await self._process.update_membership(membership)

    async def start(self, facts: ModelFacts) -> IngressPorts:
        """Start the gRPC and the HTTP server; returns their ports."""
        ports = await self._process.start(facts)
        leave_out_what_is_loaded()
        collect_seldom()
        give_back_large_blocks()
        give_back_regularly()
        return ports

    async def find_records(self, query: RecordQuery) -> list[bytes]:
        """Return the records that this ingress has of a request."""
        return self._process.find_records(query)

    async def offered_load(self, number: int) -> list[LoadWindow]:
        """Return the complete windows of offered load from this number on, for the planner."""
        return self._process.offered_load(number)

    async def drain(self, grace_s: float) -> None:
        """Stop the servers: running requests get grace_s to end, then they are aborted."""
        await self._process.drain(grace_s)
