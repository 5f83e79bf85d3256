"""The Ray actor around one engine. Ray places, starts and ends its process; requests and KV never pass through Ray.

Methods that must answer while the engine is busy run in the concurrency group "control", which has a thread and an
event loop of its own; only the main event loop touches the gRPC server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.attention_report import AttentionReport
from actors.config import EngineConfig, EngineRoleName
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.adapter import Adapter
from actors.engine_profile import EngineProfile
from actors.model_facts import ModelFacts
from actors.process.cpu_binding import ComputeThreads, CpuShare, find_obstacle, read_host_cpus
from actors.process.garbage_collection import leave_out_what_is_loaded, no_collection
from actors.process.log_lines import write_log_lines
from actors.process.openmp import choose_waiting
from actors.process.sigterm_event import on_request_to_end
from actors.process.unused_triton import leave_out_triton
from actors.ranks.rank_resources import RankResources
from kv_transfer.trust.membership import Trust, TrustMaterial


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The report of a started engine to the controller.

    address:      host:port of the engine's gRPC server
    node_id:      Ray's id of the engine's node
    node_address: address of this node, by which the other nodes reach it
    phases_s:     seconds that each phase of the start took, in their order
    """

    address: str
    facts: ModelFacts
    node_id: str
    node_address: str
    phases_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The state of a running engine, read without waiting for its threads.

    stats: a snapshot, at most half a second old while the engine steps
    seconds_in_step: how long the present step has taken; 0 while the engine has nothing to do
    is_idle: whether the engine had no request when this was read
    error: why the engine thread died; None while it lives
    is_asked_to_end: whether the engine's process has got a SIGTERM
    trust_generation: generation of the secrets that the engine and all its ranks accept (TrustMaterial.generation)
    loop_busy_s: how long the event loop of the gRPC server has been busy with one callback; 0 while it answers
    """

    stats: SchedulerStats
    seconds_in_step: float
    is_idle: bool
    error: str | None
    is_asked_to_end: bool = False
    trust_generation: int = 0
    loop_busy_s: float = 0.0


class EngineActor:
    """One prefill, decode or combined engine."""

    def __init__(self, config: EngineConfig, engine_id: str, incarnation: int, resources: RankResources) -> None:
        """resources: of each further tensor-parallel rank; this actor is rank 0, and has the same resources."""
        write_log_lines()
        share = CpuShare(resources.num_cpus, float(_own_node()["Resources"].get("CPU", 0.0)))
        choose_waiting(on_own_cores=_may_hold_cores(config, resources, share))
        # Imported here: the driver and the controller handle this class without loading torch.
        with no_collection():
            leave_out_triton()
            from actors.engine_server import EngineServer
            from actors.ranks.ray_executor import RayRankLauncher

        self._trust = Trust()
        ranks = RayRankLauncher(resources)
        self._server = EngineServer(config, engine_id, incarnation, self._trust, ranks, cpu_share=share)
        self._starting: asyncio.Task[EngineReady] | None = None
        self._is_asked_to_end = on_request_to_end()

    @ray.method(concurrency_group="control")
    async def use_trust(self, material: TrustMaterial) -> int:
        """Accept these secrets from now on; the first call comes before start().

        Returns the oldest generation that the engine and its ranks have. Raises SecretUnusable or TlsUnusable.
        """
        self._trust.use(material)
        return self._trust.settled_generation

    @ray.method(concurrency_group="control")
    async def reveal_trust(self) -> TrustMaterial | None:
        """Return the secrets that the engine was given last, for a controller that has started anew."""
        return self._trust.material

    async def report_attention(self) -> AttentionReport:
        """Return which orders of keys suit the attention on this node; called before start()."""
        return await self._server.report_attention()

    async def start(self, host: str | None, key_order: str | None = None) -> EngineReady:
        """Load the model, warm up, listen at `host` or at this node's address. Returns once it can take requests.

        A second call, by another controller, gets the same answer.
        key_order: the order of keys in the KV caches of the cluster; None leaves the choice to the settings
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(host, key_order))
        return await asyncio.shield(self._starting)

    async def _start(self, host: str | None, key_order: str | None) -> EngineReady:
        node_address = _node_address()
        address = await self._server.start(host or node_address, key_order)
        leave_out_what_is_loaded()
        node_id = ray.get_runtime_context().get_node_id()
        return EngineReady(address, self._server.facts, node_id, node_address, self._server.phases.durations_s())

    async def stop(self) -> None:
        """Abort all requests, close every link, and release memory and threads."""
        await self._server.stop()

    @ray.method(concurrency_group="control")
    async def health(self) -> EngineHealth:
        """Return the engine's state; answers while a step runs.

        The controller asks repeatedly once the engine serves. The first call begins to take the rest of the KV cache's
        memory, so that the start does not wait for this memory.
        """
        server = self._server
        server.take_other_pages()
        return EngineHealth(
            stats=server.stats,
            seconds_in_step=server.seconds_in_step,
            is_idle=server.is_idle,
            error=server.error,
            is_asked_to_end=self._is_asked_to_end.is_set(),
            trust_generation=self._trust.settled_generation,
            loop_busy_s=server.loop_watch.busy_s,
        )

    @ray.method(concurrency_group="control")
    async def reset_prefix_cache(self, preempt: bool) -> bool:
        """Forget all cached blocks; returns whether that was possible."""
        return await self._server.reset_prefix_cache(preempt=preempt)

    @ray.method(concurrency_group="control")
    async def set_role(self, role: EngineRoleName) -> None:
        """Let the engine's steps follow a new role; returns before the next step begins."""
        await self._server.set_role(role)

    @ray.method(concurrency_group="control")
    async def profile(self, duration_s: float, with_trace: bool) -> EngineProfile:
        """Profile the engine for duration_s seconds. Raises ProfileUnderWay."""
        return await self._server.profile(duration_s, with_trace=with_trace)

    @ray.method(concurrency_group="control")
    async def wait_for_end(self, timeout_s: float) -> None:
        """Return after timeout_s. If the process ends before, Ray fails the call, and the caller knows at once."""
        await asyncio.sleep(timeout_s)

    @ray.method(concurrency_group="control")
    async def load_adapter(self, adapter: Adapter) -> str | None:
        """Load an adapter before any request needs it; returns why the load failed, or None."""
        return await self._server.load_adapter(adapter)

    @ray.method(concurrency_group="control")
    async def progress(self) -> str:
        """Return the present phase of the engine's start, in a few words."""
        return self._server.phases.present


def _node_address() -> str:
    """Return this node's address in its Ray cluster, by which the other nodes reach it."""
    return str(_own_node()["NodeManagerAddress"])


def _may_hold_cores(config: EngineConfig, resources: RankResources, share: CpuShare) -> bool:
    """Return whether the engine will hold cores that no other engine computes on, unless others hold too many."""
    threads = ComputeThreads(
        config.parallel.num_threads or max(1, int(share.num_cpus)),
        config.parallel.cpu_binding,
        config.parallel.tensor_parallel_size,
        resources.num_gpus > 0,
    )
    return find_obstacle(threads, share, read_host_cpus()) is None


def _own_node() -> dict[str, Any]:
    """Return what Ray says of this node."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # ray
    return next(node for node in nodes if node["NodeID"] == node_id)
