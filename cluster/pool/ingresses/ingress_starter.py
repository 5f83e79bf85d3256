"""The start of ingresses: wanted ones that are missing are started, and let clients in once the cluster serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final

from actors.model_facts import ModelFacts
from actors.process.ray_calls import RayCallFailed, ray_failures
from cluster.api.ingress_actor import IngressActor
from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.ingresses.ingress_incarnation import IngressIncarnation
from cluster.pool.ingresses.ingress_table import IngressTable
from cluster.pool.ingresses.wanted_ingresses import WantedIngresses
from cluster.pool.journal import Journal
from cluster.pool.ray_objects.head_probe import HeadProbe
from cluster.pool.ray_objects.object_names import CONTROLLER_NAME, ingress_actor_name
from cluster.pool.ray_objects.ray_actors import one_line, remote_class
from cluster.pool.ray_objects.ray_nodes import alive_nodes

logger = logging.getLogger(__name__)

_NODES_TIMEOUT_S: Final = 2.0


class IngressStarter:
    """The starts of ingresses, each in a task of its own. An ingress whose start fails is given up and tried later."""

    def __init__(
        self,
        config: ClusterConfig,
        journal: Journal,
        head: HeadProbe,
        save: Callable[[], Awaitable[None]],
        trust: ClusterTrust,
    ) -> None:
        """head: the probe of Ray's head; save: saves the controller's state; trust: the cluster's secrets"""
        self._config = config
        self._journal = journal
        self._head = head
        self._save = save
        self._trust = trust
        self.table = IngressTable(config.ingress, journal, config.restarts)
        self.wanted = WantedIngresses(config.ingress)
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._refusals: dict[int, str] = {}
        """Why an ingress's node refused the settings at the newest start, by the ingress's number."""
        self._avoided: frozenset[str] = frozenset()
        """Ids of the nodes on which no ingress may start."""

    @property
    def is_starting(self) -> bool:
        """Whether an ingress is being started."""
        return bool(self._starts)

    @property
    def refusal(self) -> str:
        """Why no ingress can ever start with these settings; empty while an ingress is up or may come up."""
        if self.table.begun() or self._starts or set(self.wanted.numbers) - set(self._refusals):
            return ""
        return "\n".join(reason for _, reason in sorted(self._refusals.items()))

    def avoid(self, node_ids: Collection[str]) -> None:
        """Start no ingress on these nodes from now on."""
        self._avoided = frozenset(node_ids)

    async def start_missing(self, now_s: float) -> None:
        """Begin to start the missing ingresses whose backoff is over; settled() waits for them.

        now_s: Unix time. Before the first open(), started ingresses do not let clients in yet.
        """
        await self._follow_nodes()
        for number in self.wanted.numbers:
            history = self.table.histories[number]
            is_there = number in self.table.by_number or number in self._starts
            if not is_there and now_s >= history.not_before_s(now_s, self._config.restarts):
                self._starts[number] = asyncio.create_task(self._start(number))

    async def _follow_nodes(self) -> None:
        """With per_node, ask Ray for the nodes; while Ray's head does not answer, the last answer holds."""
        if not (self._config.ingress.per_node and self._head.is_answering):
            return
        try:
            async with asyncio.timeout(_NODES_TIMEOUT_S):
                nodes = await alive_nodes()
        except (TimeoutError, RayCallFailed):
            return
        self.wanted.follow(nodes, self._avoided, {*self.table.by_number, *self._starts})

    async def settled(self) -> None:
        """Wait until the ingresses that are being started are up, or given up."""
        if self._starts:
            await asyncio.wait(list(self._starts.values()))

    async def open(self, facts: ModelFacts) -> None:
        """Let clients in at every ingress; ingresses that start later let clients in at once."""
        self.table.facts = facts
        await self.settled()
        await asyncio.gather(*(self._open_or_give_up(ingress, facts) for ingress in self.table.begun()))

    def cancel(self) -> None:
        """Cancel the starts that are under way."""
        for task in self._starts.values():
            task.cancel()

    async def _start(self, number: int) -> None:
        table, history = self.table, self.table.histories[number]
        history.last_incarnation += 1
        try:
            # Save before the start: a later controller must know this incarnation, and not use its number again.
            await self._save()
            with ray_failures():
                actor = self._make_actor(number, history.last_incarnation)
            ingress = table.by_number[number] = IngressIncarnation(number, history.last_incarnation, actor)
            await self._begin_or_give_up(ingress)
            if ingress.has_begun and table.facts is not None:
                await self._open_or_give_up(ingress, table.facts)
        except Exception as error:
            # After any error the number is tried again later, and `raypd status` shows the error.
            logger.exception("an ingress could not be started", extra={"ingress": number})
            if number in table.by_number:
                await table.give_up(table.by_number[number], one_line(error))
            else:
                table.add_death(number, one_line(error))
        finally:
            del self._starts[number]

    def _make_actor(self, number: int, incarnation: int) -> Any:  # Any: Ray's actor handle
        ingress = self._config.ingress
        actor = remote_class(IngressActor, concurrency_groups={"control": 4}).options(
            name=ingress_actor_name(number, incarnation),
            lifetime="detached",
            num_cpus=0,
            resources=dict(ingress.resources) or None,
            label_selector=self.wanted.selector_of(number, self._avoided) or None,
            scheduling_strategy="SPREAD",
            max_concurrency=10_000,
        )
        return actor.remote(self._config, CONTROLLER_NAME, number, incarnation)

    async def _begin_or_give_up(self, ingress: IngressIncarnation) -> None:
        timeout_s = self._config.start_timeout_s
        try:
            await ingress.join(self._trust, timeout_s)
            await ingress.use_ports(self.table.ports_for(ingress), timeout_s)
        except RayCallFailed as failed:
            if isinstance(failed.cause, InvalidConfig):
                self._refusals[ingress.number] = str(failed)
            await self.table.give_up(ingress, str(failed))
        else:
            self._refusals.pop(ingress.number, None)

    async def _open_or_give_up(self, ingress: IngressIncarnation, facts: ModelFacts) -> None:
        if ingress.is_open:
            return
        await ingress.send(self.table.membership)
        try:
            ports = await ingress.open(facts, self._config.start_timeout_s)
        except RayCallFailed as failed:
            await self.table.give_up(ingress, str(failed))
            return
        self.table.keep_ports(ingress, ports)
        address = self.table.address_of(ingress)
        self._journal.add(f"open ingress {ingress.number}, incarnation {ingress.incarnation}, at {address}")
        await self._save()
