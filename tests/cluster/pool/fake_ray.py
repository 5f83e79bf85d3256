"""Ray actors without Ray: objects whose methods are called with .remote(), and which can die, hang and answer late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    RayError,
    RaySystemError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

CANNOT_START: dict[str, Exception] = {
    "no environment": RuntimeEnvSetupError("no such package"),
    "no node": ActorUnschedulableError("no node has this label"),
    "no worker": RaySystemError("the worker process did not register"),  # type: ignore[no-untyped-call]  # ray
    "no group": ActorPlacementGroupRemoved("its placement group was removed"),
    "crash": WorkerCrashedError(),
    "plain": RayError("something unforeseen"),
}
"""The errors that Ray raises, at the first call, for an actor that it cannot start."""
UNAVAILABLE = ActorUnavailableError("the network is away", b"\x00" * 16)


class FakeMethod:
    """One method of a fake actor."""

    def __init__(self, actor: FakeActor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """Begin the call."""
        return asyncio.ensure_future(self._actor.call(self._name, *arguments, **options))


class FakeActor:
    """The handle of an actor around any object with async methods."""

    def __init__(self, thing: object) -> None:
        self.thing = thing
        self.is_hanging = False
        self.failure: Exception | None = None
        """The error that Ray raises in place of an answer, if any."""
        self._death = asyncio.Event()

    def __getattr__(self, name: str) -> FakeMethod:
        return FakeMethod(self, name)

    def die(self) -> None:
        """Die as by kill -9: calls under way and later ones fail."""
        self._death.set()

    @property
    def is_dead(self) -> bool:
        return self._death.is_set()

    async def ended(self) -> None:
        """Wait until it is dead."""
        async with asyncio.timeout(60):
            await self._death.wait()

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """The answer of its method; RayActorError if it dies first."""
        dying = asyncio.ensure_future(self._death.wait())
        working = asyncio.ensure_future(self._work(name, *arguments, **options))
        try:
            await asyncio.wait({dying, working}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise ActorDiedError()
            return working.result()
        finally:
            dying.cancel()
            working.cancel()

    async def _work(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self.is_hanging:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        try:
            return await getattr(self.thing, name)(*arguments, **options)
        except Exception as error:
            raise RayTaskError(name, "", error) from error  # type: ignore[no-untyped-call]  # ray


class FakeRay:
    """The part of Ray that the pool's files use: actors by name. `started` has all that was started, oldest first."""

    def __init__(self, monkeypatch: Any, make: Callable[..., object]) -> None:
        """make: what stands behind an actor, from its class's arguments. Made on the loop that everything lives on."""
        self._make = make
        self._loop = asyncio.get_running_loop()
        self.by_name: dict[str, FakeActor] = {}
        self.started: list[str] = []
        self.failures: dict[str, Exception] = {}
        """The errors with which the calls of started actors fail, by the actors' names."""
        self.options_of: dict[str, dict[str, Any]] = {}
        """The options that each was to be started with."""
        for module in ("cluster.pool.ingresses.ingress_starter", "cluster.pool.engines.engine_incarnation"):
            monkeypatch.setattr(f"{module}.remote_class", lambda cls, **options: self)
        monkeypatch.setattr(ray, "get_actor", self.get_actor)
        monkeypatch.setattr(ray, "kill", self.kill)
        monkeypatch.setattr(ray, "nodes", list)

    def options(self, *, name: str, **options: Any) -> _Starter:
        self.options_of[name] = options
        return _Starter(self, name)

    def start(self, name: str, *arguments: Any) -> FakeActor:
        """A new actor. Its name must be free, as in Ray."""
        if name in self.by_name and not self.by_name[name].is_dead:
            raise ValueError(f"the name {name!r} is taken")
        self.started.append(name)
        actor = self.by_name[name] = FakeActor(self._make(*arguments))
        actor.failure = self.failures.get(name)
        return actor

    def get_actor(self, name: str) -> FakeActor:
        """Ray's: ValueError if there is none."""
        if name not in self.by_name or self.by_name[name].is_dead:
            raise ValueError(name)
        return self.by_name[name]

    def kill(self, actor: FakeActor) -> None:
        """Ray's, from any thread."""
        self._loop.call_soon_threadsafe(actor.die)

    @property
    def alive(self) -> list[str]:
        """The names of those that live."""
        return sorted(name for name, actor in self.by_name.items() if not actor.is_dead)


class _Starter:
    def __init__(self, fake: FakeRay, name: str) -> None:
        self._fake = fake
        self._name = name

    def remote(self, *arguments: Any) -> FakeActor:
        return self._fake.start(self._name, *arguments)


def nodes_of(
    monkeypatch: Any, *, own: str, alive: Collection[str] = (), dead: Collection[str] = ()
) -> Callable[[], list[dict[str, Any]]]:
    """Return a function in place of ray.nodes(), with nodes of these ids. own: the id of this process's node"""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: own))
    return lambda: [_node(name, name in alive) for name in (*alive, *dead)]


def _node(node_id: str, is_alive: bool) -> dict[str, Any]:
    address = {"NodeManagerAddress": f"10.0.0.{ord(node_id)}", "NodeManagerHostname": node_id}
    return {"NodeID": node_id, "Alive": is_alive, "Resources": {}, "Labels": {}, **address}
