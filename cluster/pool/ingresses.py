"""The ingresses: actors of their own, any of which can be replaced at any time.

Each has a number, which it keeps over its lives, and with it its ports: clients find the next life where the last one
was. They know nothing but what they are told: who serves (numbered snapshots, sent again to whoever is behind), and
what the model is like.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.config import ModelFacts
from cluster.config import ClusterConfig
from cluster.engine_connection import EngineDescriptor
from cluster.errors import CannotStart
from cluster.ingress.ports import IngressPorts
from cluster.ingress_actor import IngressActor, IngressHealth
from cluster.pool.journal import Journal
from cluster.pool.membership import Membership, ServedModel
from cluster.pool.names import CONTROLLER_NAME, ingress_actor_name
from cluster.pool.ray_calls import HeadProbe, end_actor, one_line, remote_class, within
from cluster.pool.reconciler import RestartPolicy, SlotHistory
from cluster.status import IngressView

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S: Final = 30.0
_PROOF_TIMEOUT_S: Final = 150.0
_MAX_DEATHS_OF_ONE_PROOF: Final = 3


@dataclass(frozen=True, slots=True)
class SavedIngress:
    """What a later controller has to know of an ingress. ports: None before it has any."""

    number: int
    history: SlotHistory
    incarnation: int
    ports: IngressPorts | None
    node_id: str
    node_address: str
    is_open: bool


@dataclass(slots=True)
class _Ingress:
    """One life of one ingress."""

    number: int
    incarnation: int
    actor: Any  # Ray's handle: its methods come into being at run time.
    node_id: str = ""
    node_address: str = ""
    has_begun: bool = False
    """Whether it can be asked anything."""
    is_open: bool = False
    is_asked: bool = False
    is_behind: bool = True
    """Whether it may lack the newest membership."""
    health: IngressHealth = field(default_factory=IngressHealth)


class Ingresses:
    """Lives on the controller's event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        journal: Journal,
        policy: RestartPolicy,
        head: HeadProbe,
        save: Callable[[], Awaitable[None]],
    ) -> None:
        """save: keeps for a later controller what it has to know."""
        self._config = config
        self._journal = journal
        self._policy = policy
        self._head = head
        self._save = save
        self._lives: dict[int, _Ingress] = {}
        self._ports: dict[int, IngressPorts] = {}
        self._histories: dict[int, SlotHistory] = {n: SlotHistory() for n in range(config.ingress.count)}
        self._membership = Membership(0, ())
        self._facts: ModelFacts | None = None
        self._acting: set[asyncio.Task[None]] = set()
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._avoided: frozenset[str] = frozenset()
        """Ids of nodes where none is to be."""

    @property
    def addresses(self) -> list[str]:
        """host:port of every one that is open, in the order of their numbers."""
        return [self._address(life) for _, life in sorted(self._lives.items()) if life.is_open]

    @property
    def http_addresses(self) -> list[str]:
        """The same of their HTTP doors; none if they have none."""
        addresses = [self._http_address(life) for _, life in sorted(self._lives.items()) if life.is_open]
        return [address for address in addresses if address]

    @property
    def facts(self) -> ModelFacts | None:
        """The model's, as they were opened with."""
        return self._facts

    def views(self) -> tuple[IngressView, ...]:
        """For people."""
        views = []
        for number, history in self._histories.items():
            life = self._lives.get(number)
            if life is None:
                views.append(IngressView(number, history.last_incarnation, "waiting", "", "", history.last_error))
                continue
            views.append(
                IngressView(
                    number=number,
                    incarnation=life.incarnation,
                    state="ready" if life.is_open else "starting",
                    address=self._address(life) if life.is_open else "",
                    http_address=self._http_address(life) if life.is_open else "",
                    node=life.node_address,
                    last_error=history.last_error,
                    num_requests=life.health.num_requests,
                )
            )
        return tuple(views)

    def begin(self, now_s: float) -> None:
        """Start those that are missing and may be tried; settled() waits for that. Doors stay shut until open()."""
        for number, history in self._histories.items():
            is_there = number in self._lives or number in self._starts
            if not is_there and now_s >= history.not_before_s(now_s, self._policy):
                self._starts[number] = asyncio.create_task(self._start(number, history))

    async def settled(self) -> None:
        """Wait until those that are being started are up, or given up."""
        if self._starts:
            await asyncio.wait(list(self._starts.values()))

    async def open(self, facts: ModelFacts) -> None:
        """Open the doors of all of them; later ones open theirs as they come."""
        self._facts = facts
        await self.settled()
        await asyncio.gather(*(self._open_or_give_up(life, facts) for life in self._begun()))

    async def prove(
        self, prefill: EngineDescriptor | None, decode: EngineDescriptor, facts: ModelFacts, now_s: float
    ) -> None:
        """Send a canary request through this pair, once there is an ingress. Raises CannotStart if it fails.

        An ingress that dies meanwhile says nothing about the engines: another one is asked.
        """
        num_deaths = 0
        while True:
            for life in self._begun():
                try:
                    async with asyncio.timeout(_PROOF_TIMEOUT_S):
                        return await life.actor.prove.remote(prefill, decode, facts)  # type: ignore[no-any-return]  # Ray
                except RayTaskError as failed:
                    raise CannotStart(one_line(failed)) from failed
                except (RayActorError, TimeoutError) as died:
                    num_deaths += 1
                    await self._give_up(life, one_line(died))
                    if num_deaths == _MAX_DEATHS_OF_ONE_PROOF:
                        raise CannotStart(f"{num_deaths} ingresses died trying {decode.engine_id}") from died
            self.begin(now_s)
            # Those that may not be tried yet are, by the controller's rounds.
            await asyncio.wait({asyncio.ensure_future(self.settled())}, timeout=self._config.heartbeat_interval_s)
            if not self._starts:
                await asyncio.sleep(self._config.heartbeat_interval_s)

    async def prepare(self, model: ServedModel) -> None:
        """Let all of them load what requests of this model need. Raises CannotStart if they cannot.

        One that has other troubles loads it later, with the membership that it is told.
        """
        for life in self._begun():
            try:
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    await life.actor.prepare.remote(model)
            except RayTaskError as error:
                raise CannotStart(one_line(error)) from error
            except (RayActorError, TimeoutError) as error:
                logger.warning("an ingress was not prepared", extra={"ingress": life.number, "error": one_line(error)})

    async def publish(self, membership: Membership) -> None:
        """Tell all of them; who does not answer is told again when it does."""
        self._membership = membership
        for life in self._lives.values():
            life.is_behind = True
        await self._for_all(self._send_membership)

    async def _for_all(self, act: Callable[[_Ingress], Coroutine[None, None, None]]) -> None:
        """Do it with every ingress; those that take long go on with it while the others are not kept."""
        tasks = [asyncio.create_task(act(life)) for life in self._begun()]
        self._acting.update(tasks)
        for task in tasks:
            task.add_done_callback(self._acting.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=self._config.heartbeat_interval_s)

    async def look(self, now_s: float, avoided: Collection[str] = ()) -> int:
        """Look after all of them: replace who died, tell who is behind. Returns the newest membership version seen."""
        self._avoided = frozenset(avoided)
        await self._for_all(self._look_at)
        for life in [life for life in self._begun() if life.node_id in avoided]:
            self._leave(life)
        self.begin(now_s)
        return max((life.health.membership_version for life in self._lives.values()), default=0)

    async def stop(self, grace_s: float) -> None:
        """Drain and end all of them."""
        for task in self._starts.values():
            task.cancel()
        lives, self._lives = list(self._lives.values()), {}
        await asyncio.gather(*(self._end(life, grace_s) for life in lives), *self._acting, return_exceptions=True)

    def saved(self) -> tuple[SavedIngress, ...]:
        """For a later controller."""
        saved = []
        for number, history in self._histories.items():
            life = self._lives.get(number)
            place = (life.node_id, life.node_address, life.is_open) if life is not None else ("", "", False)
            ports = self._ports.get(number)
            saved.append(SavedIngress(number, history, history.last_incarnation, ports, *place))
        return tuple(saved)

    async def restore(self, saved: Sequence[SavedIngress], membership: Membership, facts: ModelFacts | None) -> None:
        """Go on with those of an earlier controller that are there."""
        self._membership, self._facts = membership, facts
        for ingress in saved:
            self._histories[ingress.number] = ingress.history
            if ingress.ports is not None:
                self._ports[ingress.number] = ingress.ports
            try:
                name = ingress_actor_name(ingress.number, ingress.incarnation)
                actor = await asyncio.to_thread(ray.get_actor, name)
            except ValueError:
                continue
            if not ingress.is_open:
                # Nobody knows how far it has come.
                await end_actor(actor)
                continue
            place = ingress.node_id, ingress.node_address
            self._lives[ingress.number] = _Ingress(
                ingress.number, ingress.incarnation, actor, *place, has_begun=True, is_open=True
            )

    def _begun(self) -> list[_Ingress]:
        return [life for life in self._lives.values() if life.has_begun]

    # -- one of them ---------------------------------------------------------------------------------------------

    async def _start(self, number: int, history: SlotHistory) -> None:
        history.last_incarnation += 1
        try:
            # First of all: a later controller must neither miss it nor give its name to another one.
            await self._save()
            actor = self._make_actor(number, history.last_incarnation)
            life = self._lives[number] = _Ingress(number, history.last_incarnation, actor)
            await self._begin_or_give_up(life)
            if life.has_begun and self._facts is not None:
                await self._open_or_give_up(life, self._facts)
        finally:
            del self._starts[number]

    def _make_actor(self, number: int, incarnation: int) -> Any:  # Ray's handle
        ingress = self._config.ingress
        selector = dict(ingress.labels)
        if self._avoided:
            selector["ray.io/node-id"] = f"!in({','.join(sorted(self._avoided))})"
        actor = remote_class(IngressActor).options(
            name=ingress_actor_name(number, incarnation),
            lifetime="detached",
            num_cpus=0,
            resources=dict(ingress.resources) or None,
            label_selector=selector or None,
            scheduling_strategy="SPREAD",
            max_concurrency=10_000,
        )
        return actor.remote(self._config, CONTROLLER_NAME)

    async def _begin_or_give_up(self, life: _Ingress) -> None:
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                life.node_id, life.node_address = await life.actor.place.remote()
                await life.actor.use_ports.remote(self._ports.get(life.number) or self._free_ports(life))
        except (RayActorError, RayTaskError, TimeoutError) as error:
            await self._give_up(life, one_line(error))
        else:
            life.has_begun = True

    async def _open_or_give_up(self, life: _Ingress, facts: ModelFacts) -> None:
        if life.is_open:
            return
        await self._send_membership(life)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                self._ports[life.number] = await life.actor.start.remote(facts)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            await self._give_up(life, one_line(error))
            return
        life.is_open = True
        self._journal.add(f"open ingress {life.number}, incarnation {life.incarnation}, at {self._address(life)}")
        await self._save()

    def _free_ports(self, life: _Ingress) -> IngressPorts:
        """The configured ones, or the next ones for further ingresses on its node."""
        first = IngressPorts.of(self._config.ingress)
        if first.grpc == 0:
            return first
        others = [other for other in self._lives.values() if other is not life and other.node_id == life.node_id]
        taken = [self._ports[other.number] for other in others if other.number in self._ports]
        ports = self._ports[life.number] = first.beside(taken)
        return ports

    async def _look_at(self, life: _Ingress) -> None:
        # One that still opens is busy; its start has a deadline of its own.
        if life.is_asked or not life.is_open:
            return
        life.is_asked = True
        try:
            await self._ask(life)
        finally:
            life.is_asked = False

    async def _ask(self, life: _Ingress) -> None:
        timeout_s = self._config.heartbeat_timeout_s
        asked_at_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                life.health = await life.actor.health.remote()
        except TimeoutError:
            if self._head.silence_s(asked_at_s) >= timeout_s:
                await self._give_up(life, f"it has not answered for {timeout_s:.0f} s")
        except (RayActorError, RayTaskError) as died:
            await self._give_up(life, one_line(died))
        else:
            if life.is_behind or life.health.membership_version < self._membership.version:
                await self._send_membership(life)

    async def _send_membership(self, life: _Ingress) -> None:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await life.actor.update_membership.remote(self._membership)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            logger.warning("an ingress was not told", extra={"ingress": life.number, "error": one_line(error)})
            return
        life.is_behind = False

    def _leave(self, life: _Ingress) -> None:
        self._journal.add(f"drain ingress {life.number}, incarnation {life.incarnation}: its node is drained")
        # Its next life is on another node, where the ports may be another's.
        del self._lives[life.number]
        self._ports.pop(life.number, None)
        task = asyncio.create_task(self._end(life, self._config.drain_timeout_s))
        self._acting.add(task)
        task.add_done_callback(self._acting.discard)

    @staticmethod
    async def _end(life: _Ingress, grace_s: float) -> None:
        await within(life.actor.drain.remote(grace_s), grace_s + 10)
        await end_actor(life.actor)

    async def _give_up(self, life: _Ingress, error: str) -> None:
        if self._lives.get(life.number) is not life:
            return
        del self._lives[life.number]
        self._histories[life.number].add_death(time.time(), error)
        self._journal.add(f"give up ingress {life.number}, incarnation {life.incarnation}: {error}")
        logger.error("an ingress died", extra={"ingress": life.number, "error": error})
        await end_actor(life.actor)

    def _address(self, life: _Ingress) -> str:
        ports = self._ports.get(life.number)
        return f"{self._host(life)}:{0 if ports is None else ports.grpc}"

    def _http_address(self, life: _Ingress) -> str:
        ports = self._ports.get(life.number)
        return "" if ports is None or ports.http is None else f"{self._host(life)}:{ports.http}"

    def _host(self, life: _Ingress) -> str:
        host = self._config.ingress.host
        is_any = host in {"0.0.0.0", "::", "[::]"}  # named, not listened on
        return life.node_address if is_any else host
