"""The ingresses: actors of their own, any of which can be replaced at any time.

Each has a number, which it keeps over its lives, and with it its ports: clients find the next life where the last one
was. They know nothing but what they are told: who serves (numbered snapshots, sent again to whoever is behind), and
what the model is like.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Final

import ray

from actors.config import ModelFacts
from actors.process.ray_calls import FailureKind, RayCallFailed, call, ray_failures
from cluster.api.ingress_actor import IngressActor
from cluster.api.shared.ports import IngressPorts
from cluster.config import ClusterConfig
from cluster.errors import CannotStart, InvalidConfig
from cluster.observability.status import IngressView
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.engine_slots import RestartPolicy, SlotHistory
from cluster.pool.engines.engine_placement import alive_nodes
from cluster.pool.ingresses.ingress_incarnation import IngressIncarnation, SavedIngress
from cluster.pool.ingresses.wanted_ingresses import WantedIngresses
from cluster.pool.journal import Journal
from cluster.pool.ray_objects.head_probe import HeadProbe
from cluster.pool.ray_objects.object_names import CONTROLLER_NAME, ingress_actor_name
from cluster.pool.ray_objects.ray_actors import call_if_alive, end_actor, find_by_name, one_line, remote_class
from cluster.pool.trust_calls import give_trust
from cluster.routing.engine_connection import EngineDescriptor
from cluster.sessions.cluster_membership import Membership, ServedModel

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S: Final = 30.0
_PROOF_TIMEOUT_S: Final = 150.0
_NODES_TIMEOUT_S: Final = 2.0
_MAX_DEATHS_OF_ONE_PROOF: Final = 3


class IngressFleet:
    """Lives on the controller's event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        journal: Journal,
        policy: RestartPolicy,
        head: HeadProbe,
        save: Callable[[], Awaitable[None]],
        trust: ClusterTrust,
    ) -> None:
        """save: keeps for a later controller what it has to know; trust: the cluster's secret."""
        self._config = config
        self._trust = trust
        self._journal = journal
        self._policy = policy
        self._head = head
        self._save = save
        self._lives: dict[int, IngressIncarnation] = {}
        self._ports: dict[int, IngressPorts] = {}
        self._places = WantedIngresses(config.ingress)
        self._histories: defaultdict[int, SlotHistory] = defaultdict(SlotHistory)
        self._membership = Membership(0, ())
        self._facts: ModelFacts | None = None
        self._acting: set[asyncio.Task[None]] = set()
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._refusals: dict[int, str] = {}
        """Why their settings cannot be used on their node, of those whose newest start found that."""
        self._avoided: frozenset[str] = frozenset()
        """Ids of nodes where none is to be."""

    @property
    def addresses(self) -> list[str]:
        """host:port of every one that is open, in the order of their numbers."""
        return [life.address(self._ports.get(life.number), self._config.ingress.host) for life in self._open_ones()]

    @property
    def http_addresses(self) -> list[str]:
        """The same of their HTTP doors; none if they have none."""
        host, ports = self._config.ingress.host, self._ports
        addresses = [life.http_address(ports.get(life.number), host) for life in self._open_ones()]
        return [address for address in addresses if address]

    @property
    def facts(self) -> ModelFacts | None:
        """The model's, as they were opened with."""
        return self._facts

    def actors(self) -> list[Any]:
        """Ray's handle of every one."""
        return [life.actor for life in self._lives.values()]

    def missing(self) -> str:
        """What those that are not up need, if none is; empty if one is."""
        ingress = self._config.ingress
        needs = f"each needs {ingress.resources} on a node that is labelled {ingress.labels}"
        return "" if self._begun() else f"no ingress is up: {needs}"

    @property
    def refusal(self) -> str:
        """Why no ingress can start with these settings, ever; empty while one is up or may come up."""
        if self._begun() or self._starts or set(self._places.numbers) - set(self._refusals):
            return ""
        return "\n".join(reason for _, reason in sorted(self._refusals.items()))

    def views(self) -> tuple[IngressView, ...]:
        """For people."""
        views = []
        for number in sorted({*self._places.numbers, *self._lives}):
            life, history = self._lives.get(number), self._histories[number]
            if life is None:
                views.append(IngressView(number, history.last_incarnation, "waiting", last_error=history.last_error))
            else:
                views.append(life.view(self._ports.get(number), self._config.ingress.host, history.last_error))
        return tuple(views)

    async def find_places(self) -> None:
        """Look where there is to be one. Without Ray's head's word it stays as it is."""
        if not (self._config.ingress.per_node and self._head.is_answering):
            return
        try:
            async with asyncio.timeout(_NODES_TIMEOUT_S):
                nodes = await alive_nodes()
        except (TimeoutError, RayCallFailed):
            return
        self._places.follow(nodes, self._avoided, {*self._lives, *self._starts})

    def begin(self, now_s: float) -> None:
        """Start those that are missing and may be tried; settled() waits for that. Doors stay shut until open()."""
        for number in self._places.numbers:
            history = self._histories[number]
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
                    await call(life.actor.prove, prefill, decode, facts, timeout_s=_PROOF_TIMEOUT_S)
                    return
                except RayCallFailed as failed:
                    if failed.kind is FailureKind.RAISED:
                        raise CannotStart(str(failed)) from failed
                    num_deaths += 1
                    await self._give_up(life, str(failed))
                    if num_deaths == _MAX_DEATHS_OF_ONE_PROOF:
                        raise CannotStart(f"{num_deaths} ingresses died trying {decode.engine_id}") from failed
            await self.find_places()
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
                await call(life.actor.prepare, model, timeout_s=_CALL_TIMEOUT_S)
            except RayCallFailed as failed:
                if failed.kind is FailureKind.RAISED:
                    raise CannotStart(str(failed)) from failed
                logger.warning("an ingress was not prepared", extra={"ingress": life.number, "error": str(failed)})

    async def publish(self, membership: Membership) -> None:
        """Tell all of them; who does not answer is told again when it does."""
        self._membership = membership
        for life in self._lives.values():
            life.is_behind = True
        await self._for_all(self._send_membership)

    async def _for_all(self, act: Callable[[IngressIncarnation], Coroutine[None, None, None]]) -> None:
        """Do it with every ingress; those that take long go on with it while the others are not kept."""
        tasks = [asyncio.create_task(self._do(act, life)) for life in self._begun()]
        self._acting.update(tasks)
        for task in tasks:
            task.add_done_callback(self._acting.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=self._config.heartbeat_interval_s)

    async def _do(
        self, act: Callable[[IngressIncarnation], Coroutine[None, None, None]], life: IngressIncarnation
    ) -> None:
        try:
            await act(life)
        except Exception as error:
            # A bug of ours. An ingress that nobody looks after would be worse than a new one.
            logger.exception("an ingress could not be looked after", extra={"ingress": life.number})
            await self._give_up(life, f"it could not be looked after: {one_line(error)}")

    async def look(self, now_s: float, avoided: Collection[str] = ()) -> int:
        """Look after all of them: replace who died, tell who is behind. Returns the newest membership version seen."""
        self._avoided = frozenset(avoided)
        await self._for_all(self._look_at)
        for life in [life for life in self._begun() if life.node_id in avoided]:
            self._leave(life)
        await self.find_places()
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
            home = self._places.home_of(number)
            saved.append(SavedIngress(number, history, history.last_incarnation, ports, *place, home))
        return tuple(saved)

    async def restore(self, saved: Sequence[SavedIngress], membership: Membership, facts: ModelFacts | None) -> None:
        """Go on with those of an earlier controller that are there."""
        self._membership, self._facts = membership, facts
        for ingress in saved:
            self._histories[ingress.number] = ingress.history
            self._places.restore(ingress.number, ingress.home)
            if ingress.ports is not None:
                self._ports[ingress.number] = ingress.ports
            actor = await find_by_name(ray.get_actor, ingress_actor_name(ingress.number, ingress.incarnation))
            if actor is None:
                continue
            if not ingress.is_open:
                # Nobody knows how far it has come.
                await end_actor(actor)
                continue
            place = ingress.node_id, ingress.node_address
            self._lives[ingress.number] = IngressIncarnation(
                ingress.number, ingress.incarnation, actor, *place, has_begun=True, is_open=True
            )

    def _open_ones(self) -> list[IngressIncarnation]:
        return [life for _, life in sorted(self._lives.items()) if life.is_open]

    def _begun(self) -> list[IngressIncarnation]:
        return [life for life in self._lives.values() if life.has_begun]

    # -- one of them ---------------------------------------------------------------------------------------------

    async def _start(self, number: int, history: SlotHistory) -> None:
        history.last_incarnation += 1
        try:
            # First of all: a later controller must neither miss it nor give its name to another one.
            await self._save()
            with ray_failures():
                actor = self._make_actor(number, history.last_incarnation)
            life = self._lives[number] = IngressIncarnation(number, history.last_incarnation, actor)
            await self._begin_or_give_up(life)
            if life.has_begun and self._facts is not None:
                await self._open_or_give_up(life, self._facts)
        except Exception as error:
            # Whatever it is: one that did not come up is tried again later, and people see why.
            logger.exception("an ingress could not be started", extra={"ingress": number})
            if number in self._lives:
                await self._give_up(self._lives[number], one_line(error))
            else:
                self._add_death(number, one_line(error))
        finally:
            del self._starts[number]

    def _make_actor(self, number: int, incarnation: int) -> Any:  # Ray's handle
        ingress = self._config.ingress
        actor = remote_class(IngressActor, concurrency_groups={"control": 4}).options(
            name=ingress_actor_name(number, incarnation),
            lifetime="detached",
            num_cpus=0,
            resources=dict(ingress.resources) or None,
            label_selector=self._places.selector_of(number, self._avoided) or None,
            scheduling_strategy="SPREAD",
            max_concurrency=10_000,
        )
        return actor.remote(self._config, CONTROLLER_NAME, number, incarnation)

    async def _begin_or_give_up(self, life: IngressIncarnation) -> None:
        timeout_s = self._config.start_timeout_s
        try:
            life.node_id, life.node_address = await call(life.actor.place, timeout_s=timeout_s)
            await call(life.actor.use_trust, await self._trust.material(), timeout_s=timeout_s)
            ports = self._ports.get(life.number) or self._free_ports(life)
            await call(life.actor.use_ports, ports, timeout_s=timeout_s)
        except RayCallFailed as failed:
            if isinstance(failed.cause, InvalidConfig):
                self._refusals[life.number] = str(failed)
            await self._give_up(life, str(failed))
        else:
            self._refusals.pop(life.number, None)
            life.has_begun = True

    async def _open_or_give_up(self, life: IngressIncarnation, facts: ModelFacts) -> None:
        if life.is_open:
            return
        await self._send_membership(life)
        try:
            self._ports[life.number] = await call(life.actor.start, facts, timeout_s=self._config.start_timeout_s)
        except RayCallFailed as failed:
            await self._give_up(life, str(failed))
            return
        life.is_open = True
        address = life.address(self._ports[life.number], self._config.ingress.host)
        self._journal.add(f"open ingress {life.number}, incarnation {life.incarnation}, at {address}")
        await self._save()

    def _free_ports(self, life: IngressIncarnation) -> IngressPorts:
        """The configured ones, or the next ones for further ingresses on its node."""
        first = IngressPorts.of(self._config.ingress)
        if first.grpc == 0:
            return first
        others = [other for other in self._lives.values() if other is not life and other.node_id == life.node_id]
        taken = [self._ports[other.number] for other in others if other.number in self._ports]
        ports = self._ports[life.number] = first.beside(taken)
        return ports

    async def _look_at(self, life: IngressIncarnation) -> None:
        # One that still opens is busy; its start has a deadline of its own.
        if life.is_asked or not life.is_open:
            return
        life.is_asked = True
        try:
            await self._ask(life)
        finally:
            life.is_asked = False

    async def _ask(self, life: IngressIncarnation) -> None:
        timeout_s = self._config.heartbeat_timeout_s
        asked_at_s = asyncio.get_running_loop().time()
        try:
            life.health = await call(life.actor.health, timeout_s=timeout_s)
        except RayCallFailed as failed:
            if not failed.is_silence:
                await self._give_up(life, str(failed))
                return
            life.silent_since_s = asked_at_s if life.silent_since_s is None else life.silent_since_s
            if (silent_s := self._head.silence_s(life.silent_since_s)) >= timeout_s:
                await self._give_up(life, f"it has not answered for {silent_s:.0f} s")
            return
        life.silent_since_s = None
        if (change := life.change_of_business()) is not None:
            self._journal.add(change)
        if (fault := life.fault(self._config.ingress.busy_timeout_s)) is not None:
            await self._give_up(life, fault)
        # A busy one is told once it has time: to wait for that would keep it from being asked how it is.
        elif not life.is_busy:
            await self._tell(life)

    async def _tell(self, life: IngressIncarnation) -> None:
        """Tell it what it does not know yet."""
        if life.health.trust_generation < self._trust.generation:
            await give_trust(life.actor, self._trust)
        if life.is_behind or life.health.membership_version < self._membership.version:
            await self._send_membership(life)

    async def _send_membership(self, life: IngressIncarnation) -> None:
        try:
            await call(life.actor.update_membership, self._membership, timeout_s=_CALL_TIMEOUT_S)
        except RayCallFailed as failed:
            logger.warning("an ingress was not told", extra={"ingress": life.number, "error": str(failed)})
            return
        life.is_behind = False

    def _leave(self, life: IngressIncarnation) -> None:
        self._journal.add(f"drain ingress {life.number}, incarnation {life.incarnation}: its node is drained")
        # Its next life is on another node, where the ports may be another's.
        del self._lives[life.number]
        self._ports.pop(life.number, None)
        task = asyncio.create_task(self._end(life, self._config.drain_timeout_s))
        self._acting.add(task)
        task.add_done_callback(self._acting.discard)

    @staticmethod
    async def _end(life: IngressIncarnation, grace_s: float) -> None:
        await call_if_alive(life.actor.drain, grace_s, timeout_s=grace_s + 10)
        await end_actor(life.actor)

    async def _give_up(self, life: IngressIncarnation, error: str) -> None:
        if self._lives.get(life.number) is not life:
            return
        del self._lives[life.number]
        self._add_death(life.number, error)
        await end_actor(life.actor)

    def _add_death(self, number: int, error: str) -> None:
        history = self._histories[number]
        history.add_death(time.time(), error, self._policy)
        self._journal.add(f"give up ingress {number}, incarnation {history.last_incarnation}: {error}")
        logger.error("an ingress died", extra={"ingress": number, "error": error})
