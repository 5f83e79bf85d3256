"""One engine as it runs in a process of its own, with points at which it can be made to fail. See engine_process.py."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

import grpc
import psutil
import torch
from torch import Tensor

from actors import engine_server, engine_thread
from actors.config import EngineConfig, EngineRoleName
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.engine_server import EngineServer
from actors.model import loaded_runner
from kv_transfer.agent.transfer_agent import TransferAgent
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links import link_table as links
from kv_transfer.sides import worker_side
from kv_transfer.transfer_stats import TransferStats
from kv_transfer.transports import tcp
from kv_transfer.transports.base import Transport
from kv_transfer.transports.shared_pool import allocate_shared_pool
from kv_transfer.trust.membership import Trust, TrustMaterial
from tests.actors.core.chunk_bounds import ChunkBound
from tests.faults.fault_points import Fault, FaultPoints
from tests.faults.faulty_parts import FaultyTransport, faulty_agent, faulty_control, faulty_streams, with_attribute
from tests.trusted import material

_TIMEOUT_S: Final = 60.0
_CLONE_NEWNET: Final = 0x40000000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """The place where an engine runs. namespace: of the network, None for the test's own. port: 0 for a free one."""

    host: str = "127.0.0.1"
    namespace: str | None = None
    port: int = 0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One incarnation of an engine, as it is to be started.

    is_pool_shared:   its KV pool is in a memory file, so that links within a host go through shared memory
    protocol_version: what it says to its peers that it speaks; None: what it does
    """

    engine_id: str
    incarnation: int
    config: EngineConfig
    place: Place = Place()
    is_pool_shared: bool = False
    protocol_version: int | None = None
    trust: TrustMaterial = field(default_factory=material)


class EngineChild:
    """Its public methods are what the test can ask for; they come one at a time, from the process's main thread."""

    def __init__(self, fired: Connection, spec: EngineSpec) -> None:
        if spec.place.namespace is not None:
            # Before any other thread: those that are started later inherit it.
            _enter_network_namespace(spec.place.namespace)
        torch.set_num_threads(1)
        self._points = FaultPoints(fired)
        self._changed = threading.Condition()
        self._stats = SchedulerStats()
        self._num_snapshots = 0
        self._agents: list[TransferAgent] = []
        self._next_deadline: float | None = None
        """The earliest deadline of any transfer, or of a message that waits for one."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="loop", daemon=True).start()
        with ExitStack() as patches:
            self._wrap(spec, patches)
            self._server = EngineServer(spec.config, spec.engine_id, spec.incarnation, Trust(spec.trust))
            self._address = self._await(self._start(spec))
        self._watch()

    def address(self) -> str:
        """host:port, for sessions and for its peers."""
        return self._address

    def arm(self, fault: Fault) -> None:
        """Let a fault happen next."""
        self._points.arm(fault)

    def disarm(self) -> bool:
        """Let it not happen; whether it has not."""
        return self._points.disarm()

    def release(self) -> None:
        """Let a thread go on that a fault holds."""
        self._points.release()

    def link_kinds(self) -> list[str]:
        """The data links that were opened here, by class, in order."""
        return self._points.link_kinds

    def counters(self) -> dict[str, int]:
        """The engine's, and its transfers', by name, as of now."""
        self._wait(lambda: True, _TIMEOUT_S, self._counters)
        return self._counters()

    def footprint(self) -> dict[str, int]:
        """Count what the process has open."""
        return {"file descriptors": psutil.Process().num_fds(), "threads": threading.active_count()}

    def wait_for(self, expected: dict[str, int], timeout_s: float = _TIMEOUT_S) -> None:
        """Wait until the engine's counters, or its transfers', are as expected."""
        self._wait(lambda: self._differing(expected) == {}, timeout_s, lambda: self._differing(expected))

    def wait_until_whole(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait until nothing is left of any request or transfer, then check the pool's and the queues' integrity."""
        self._wait(lambda: not self._leftovers(), timeout_s, self._leftovers)
        self._server.check_integrity()

    def set_role(self, role: EngineRoleName) -> None:
        """Change the role as the engine's actor would."""
        self._await(self._server.set_role(role))

    def bound_chunks(self, bound: ChunkBound) -> None:
        """Bound the chunks of prompts beside decodes from now on, whatever the engine learns of its steps."""
        self._await(self._bound_chunks(bound))

    async def _bound_chunks(self, bound: ChunkBound) -> None:
        core = self._server._core
        assert core is not None
        await self._server._ask(lambda: bound.apply(core.scheduler))
        with_attribute(core.scheduler.chunk_budget, "use_model", lambda _: None)

    def stop(self) -> None:
        """End the engine as its actor would."""
        self._await(self._server.stop())

    async def _start(self, spec: EngineSpec) -> str:
        # gRPC binds the port that EngineServer asks for: a free one, or that of this engine's earlier incarnation.
        make_server = grpc.aio.server

        def make_server_on_port(**options: Any) -> grpc.aio.Server:
            server = make_server(**options)
            bind = server.add_insecure_port
            wanted = f"{spec.place.host}:{spec.place.port}"
            return with_attribute(server, "add_insecure_port", lambda _: bind(wanted))

        with patch.object(grpc.aio, "server", make_server_on_port):
            return await self._server.start(spec.place.host)

    def _wrap(self, spec: EngineSpec, patches: ExitStack) -> None:
        """While the engine is put together."""
        make_transport = worker_side.make_transport

        def make_faulty_transport(*args: Any) -> Transport:
            return FaultyTransport(make_transport(*args), self._points)

        def keep_agent(*args: Any) -> TransferAgent:
            self._agents.append(faulty_agent(self._points)(*args))
            return self._agents[-1]

        wrapped: list[tuple[Any, str, Any]] = [
            (worker_side, "make_transport", make_faulty_transport),
            (worker_side, "TransferAgent", keep_agent),
            (engine_server, "GrpcControl", faulty_control(self._points)),
            (loaded_runner, "allocate_kv_cache", _allocate_shared if spec.is_pool_shared else _allocate),
        ]
        for target, name, replacement in wrapped:
            patches.enter_context(patch.object(target, name, replacement))
        # Needed for as long as the process lives. Waiting for a busy engine's counters shall not take long.
        patch.object(engine_thread, "_STATS_INTERVAL_S", 0.02).start()
        patch.object(tcp, "ByteStream", faulty_streams(self._points)).start()
        if spec.protocol_version is not None:
            patch.object(links, "PROTOCOL_VERSION", spec.protocol_version).start()

    def _watch(self) -> None:
        """Hear of every snapshot that the engine thread makes, and of every event that the transfer agent handles."""
        core, agent = self._server._core, self._agents[0]
        assert core is not None
        make_stats, publish = core.make_stats, agent._publish

        def make_and_keep_stats() -> SchedulerStats:
            stats = make_stats()
            with self._changed:
                self._stats = stats
                self._num_snapshots += 1
                self._changed.notify_all()
            return stats

        def publish_and_notify(*arguments: Any) -> None:
            publish(*arguments)
            with self._changed:
                self._next_deadline = agent._transfers.next_deadline()
                self._changed.notify_all()

        with_attribute(core, "make_stats", make_and_keep_stats)
        with_attribute(agent, "_publish", publish_and_notify)

    def _counters(self) -> dict[str, int]:
        """Return the counters of the newest snapshot; lost links are as of now."""
        found = asdict(self._stats) | asdict(self._stats.transfer_stats or TransferStats())
        found["num_links_lost"] = self._agents[0]._links.num_lost
        return {name: count for name, count in found.items() if isinstance(count, int)}

    def _differing(self, expected: dict[str, int]) -> dict[str, tuple[int, int]]:
        """By counter: what it is, and what was expected."""
        found = self._counters()
        return {name: (found[name], count) for name, count in expected.items() if found[name] != count}

    def _leftovers(self) -> dict[str, object]:
        stats = self._stats
        left: dict[str, object] = {
            "the engine died": self._server.error,
            "requests": stats.num_running_reqs + stats.num_waiting_reqs + stats.num_waiting_for_remote_kvs,
            "held requests": stats.num_held_reqs,
            "blocks": stats.num_blocks - stats.num_free_blocks,
            "transfers": self._counters()["num_active_transfers"],
            "the transfers' next deadline": self._next_deadline,
        }
        return {name: count for name, count in left.items() if count}

    def _wait(self, is_so: Callable[[], bool], timeout_s: float, say: Callable[[], object]) -> None:
        """Until a snapshot from now on says so: an older one knows nothing of what clients have seen since."""
        with self._changed:
            number = self._num_snapshots
            self._server._wake.set()
            has_come = self._changed.wait_for(lambda: self._num_snapshots > number and is_so(), timeout_s)
            assert has_come, f"after {timeout_s:g} s: {say()}"

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_TIMEOUT_S)


def _allocate(layout: KVCacheLayout, device: torch.device) -> Tensor:
    return torch.zeros(layout.shape, dtype=getattr(torch, layout.dtype), device=device)


def _allocate_shared(layout: KVCacheLayout, device: torch.device) -> Tensor:
    assert device.type == "cpu"
    return allocate_shared_pool(layout)


def _enter_network_namespace(name: str) -> None:
    fd = os.open(Path("/run/netns") / name, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")
    finally:
        os.close(fd)
