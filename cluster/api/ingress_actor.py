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
from cluster.observability.status import ControllerView
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.cluster_membership import Membership, ServedModel
from cluster.text.torch_free import without_torch
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial

_CONTROLLER_TIMEOUT_S = 30.0
_LOCAL = "127.0.0.1"

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Verb: TypeAlias = Callable[Concatenate[OperatorVerbs, _P], Coroutine[Any, Any, _T]]


class RemoteController:
    """A ClusterAdmin: the controller's actor, by its name in this actor's namespace."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def status(self) -> ControllerView:
        """What the controller knows."""
        view: ControllerView = await self._call("status")
        return view

    async def scale(self, counts: Mapping[EngineRole, int]) -> list[str]:
        """Want so many engines of these roles from now on."""
        return await self._operate(OperatorVerbs.scale, dict(counts))

    async def drain(self, engine_id: str, *, for_good: bool) -> None:
        """Take an engine out of service once its work is done."""
        await self._operate(OperatorVerbs.drain, engine_id, for_good=for_good)

    async def set_role(self, engine_id: str, role: EngineRole) -> None:
        """Let an engine serve in another role from now on."""
        await self._operate(OperatorVerbs.set_role, engine_id, role)

    async def reset_prefix_cache(self, engine_id: str, *, preempt: bool) -> dict[str, bool]:
        """Let this engine, or every one if it is "", forget its cached blocks."""
        return await self._operate(OperatorVerbs.reset_prefix_cache, engine_id, preempt=preempt)

    async def profile(self, engine_id: str, duration_s: float, *, with_trace: bool) -> EngineProfile:
        """Profile an engine for so long."""
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
            # Looked up each time: it may have been restarted meanwhile.
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
    """How an ingress is.

    membership_version: of the snapshot that it follows
    num_requests:       in flight
    trust_generation:   which of the cluster's secrets it accepts (TrustMaterial.generation)
    busy_s:             for how long its event loop has been busy with one thing; 0 while it answers
    """

    membership_version: int = 0
    num_requests: int = 0
    trust_generation: int = 0
    busy_s: float = 0.0


def _outward_address() -> str:
    """This host's address as others see it; loopback if it has no route to anywhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of no host; UDP sends nothing here
        except OSError:
            return _LOCAL
        return str(probe.getsockname()[0])


class IngressActor:
    """One ingress. Stateless: everything that it knows comes from the controller and from its clients.

    health() runs in the concurrency group "control", which has a thread and an event loop of its own.
    """

    def __init__(self, config: ClusterConfig, controller_name: str, number: int, incarnation: int) -> None:
        """controller_name: of the controller's actor, in this actor's namespace."""
        self._trust = Trust()
        self._member = Member(Party(f"ingress-{number}", incarnation), self._trust)
        write_log_lines()
        self._config = config
        self._controller_name = controller_name

    async def place(self) -> tuple[str, str]:
        """The id and the address of the node that it is on."""
        node_id = ray.get_runtime_context().get_node_id()
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # ray
        # A local cluster's only node is 127.0.0.1, where clients on other hosts find nothing.
        return node_id, _outward_address() if address == _LOCAL else address

    async def use_trust(self, material: TrustMaterial) -> int:
        """Prove itself to engines with these secrets from now on; returns which generation it has.

        Comes before use_ports(). Raises SecretUnusable.
        """
        self._trust.use(material)
        return self._trust.generation

    async def reveal_trust(self) -> TrustMaterial | None:
        """The secrets that it was given last, for a controller that has started anew."""
        return self._trust.material

    async def use_ports(self, ports: IngressPorts) -> None:
        """Take in which ports it will listen on; comes before everything that follows.

        Raises InvalidConfig if this node has not what that needs, before any engine has loaded.
        """
        # Imported here: the driver and the controller handle this class without loading a tokenizer library.
        with no_collection(), without_torch():
            from cluster.api.process import IngressProcess

        config = self._config.model_copy(update={"ingress": ports.applied_to(self._config.ingress)})
        await refuse_bad_node(config.ingress)
        self._process = IngressProcess(config, RemoteController(self._controller_name), self._member)

    @ray.method(concurrency_group="control")
    async def health(self) -> IngressHealth:
        """How it is; answers while the event loop of everything else is busy."""
        process = self._process
        return IngressHealth(
            process.membership_version,
            process.num_requests_in_flight,
            self._trust.generation,
            process.loop_watch.busy_s,
        )

    async def prove(self, prefill: EngineDescriptor | None, decode: EngineDescriptor, facts: ModelFacts) -> None:
        """Send a canary request through this pair. Raises CanaryFailed."""
        await self._process.prove(prefill, decode, facts)

    async def prepare(self, model: ServedModel) -> None:
        """Load what requests of this model need. Raises TokenizerUnusable."""
        await self._process.prepare(model)

    async def update_membership(self, membership: Membership) -> None:
        """Follow a newer snapshot."""
        await self._process.update_membership(membership)

    async def start(self, facts: ModelFacts) -> IngressPorts:
        """Start the gRPC and the HTTP server; returns their ports."""
        ports = await self._process.start(facts)
        leave_out_what_is_loaded()
        collect_seldom()
        give_back_large_blocks()
        give_back_regularly()
        return ports

    async def drain(self, grace_s: float) -> None:
        """Stop the servers: running requests get grace_s to end, then they are aborted."""
        await self._process.drain(grace_s)
