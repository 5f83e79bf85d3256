"""The table of ingresses: those that run, the ports of each number, and the histories of earlier incarnations."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import ray

from actors.model_facts import ModelFacts
from cluster.api.shared.ports import IngressPorts
from cluster.observability.status import IngressView
from cluster.pool.ingresses.ingress_incarnation import IngressIncarnation, SavedIngress
from cluster.pool.journal import Journal
from cluster.pool.ray_objects.object_names import ingress_actor_name
from cluster.pool.ray_objects.ray_actors import end_actor, find_by_name
from cluster.reconciling.engine_slots import SlotHistory
from cluster.sessions.cluster_membership import Membership
from cluster.settings.ingress import IngressConfig
from cluster.settings.restarts import RestartConfig

logger = logging.getLogger(__name__)


class IngressTable:
    """Every ingress by its number, and what all ingresses are told: the membership and the model's facts.

    Invariants: each number has one incarnation at most. A number keeps its ports from one incarnation to the next, so
    that clients reach the next incarnation at the same address.
    """

    def __init__(self, config: IngressConfig, journal: Journal, policy: RestartConfig) -> None:
        self._config = config
        self._journal = journal
        self._policy = policy
        self._ports: dict[int, IngressPorts] = {}
        self.by_number: dict[int, IngressIncarnation] = {}
        self.histories: defaultdict[int, SlotHistory] = defaultdict(SlotHistory)
        self.membership = Membership(0, ())
        self.facts: ModelFacts | None = None
        """The model's facts that ingresses get when they let clients in; None before the first one does."""

    def begun(self) -> list[IngressIncarnation]:
        """Return the ingresses that are up and can be called."""
        return [ingress for ingress in self.by_number.values() if ingress.has_begun]

    def addresses(self) -> list[str]:
        """Return host:port of every ingress that is open, in the order of their numbers."""
        return [self.address_of(ingress) for ingress in self._open()]

    def http_addresses(self) -> list[str]:
        """Return host:port of the HTTP API of every ingress that is open and has one."""
        addresses = [one.http_address(self._ports.get(one.number), self._config.host) for one in self._open()]
        return [address for address in addresses if address]

    def address_of(self, ingress: IngressIncarnation) -> str:
        """Return host:port of this ingress's gRPC API."""
        return ingress.address(self._ports.get(ingress.number), self._config.host)

    def _open(self) -> list[IngressIncarnation]:
        return [ingress for _, ingress in sorted(self.by_number.items()) if ingress.is_open]

    def views(self, wanted: Iterable[int]) -> tuple[IngressView, ...]:
        """Return the status of each ingress, and of each wanted number without one. wanted: the wanted numbers"""
        views = []
        for number in sorted({*wanted, *self.by_number}):
            ingress, history = self.by_number.get(number), self.histories[number]
            if ingress is None:
                views.append(IngressView(number, history.last_incarnation, "waiting", last_error=history.last_error))
            else:
                views.append(ingress.view(self._ports.get(number), self._config.host, history.last_error))
        return tuple(views)

    # -- ports ---------------------------------------------------------------------------------------------------

    def ports_for(self, ingress: IngressIncarnation) -> IngressPorts:
        """Return the ports for an ingress: those of its number, or else the configured ones or the next ones.

        The next ones are taken if another ingress on the same node has the configured ones.
        """
        if (kept := self._ports.get(ingress.number)) is not None:
            return kept
        first = IngressPorts.of(self._config)
        if first.grpc == 0:
            return first
        others = [one for one in self.by_number.values() if one is not ingress and one.node_id == ingress.node_id]
        taken = [self._ports[other.number] for other in others if other.number in self._ports]
        ports = self._ports[ingress.number] = first.beside(taken)
        return ports

    def keep_ports(self, ingress: IngressIncarnation, ports: IngressPorts) -> None:
        """Note the ports that an ingress listens on, which its number keeps."""
        self._ports[ingress.number] = ports

    # -- how incarnations end ------------------------------------------------------------------------------------

    def forget(self, ingress: IngressIncarnation) -> None:
        """Drop an ingress and the ports of its number, which may be taken on the node of the next incarnation."""
        del self.by_number[ingress.number]
        self._ports.pop(ingress.number, None)

    async def give_up(self, ingress: IngressIncarnation, error: str) -> None:
        """Note that an ingress died of this error, and end its actor. A later round starts its number again."""
        if self.by_number.get(ingress.number) is not ingress:
            return
        del self.by_number[ingress.number]
        self.add_death(ingress.number, error)
        await end_actor(ingress.actor)

    def add_death(self, number: int, error: str) -> None:
        """Note that the newest incarnation of a number died, or did not start."""
        history = self.histories[number]
        history.add_death(time.time(), error, self._policy)
        self._journal.add(f"give up ingress {number}, incarnation {history.last_incarnation}: {error}")
        logger.error("an ingress died", extra={"ingress": number, "error": error})

    # -- from one controller to the next -------------------------------------------------------------------------

    def saved(self, home_of: Callable[[int], str]) -> tuple[SavedIngress, ...]:
        """Return what a later controller has to know. home_of: returns the id of the node where a number has to run"""
        saved = []
        for number, history in self.histories.items():
            one = self.by_number.get(number)
            place = (one.node_id, one.node_address, one.is_open) if one is not None else ("", "", False)
            ports = self._ports.get(number)
            saved.append(SavedIngress(number, history, history.last_incarnation, ports, *place, home_of(number)))
        return tuple(saved)

    async def restore(self, saved: Sequence[SavedIngress]) -> None:
        """Take over the ingresses of an earlier controller that still run; those that were starting are ended."""
        for one in saved:
            self.histories[one.number] = one.history
            if one.ports is not None:
                self._ports[one.number] = one.ports
            actor = await find_by_name(ray.get_actor, ingress_actor_name(one.number, one.incarnation))
            if actor is None:
                continue
            if not one.is_open:
                # Nobody knows how far the ingress's start has come, so the ingress is ended and started anew.
                await end_actor(actor)
                continue
            place = one.node_id, one.node_address
            self.by_number[one.number] = IngressIncarnation(
                one.number, one.incarnation, actor, *place, has_begun=True, is_open=True
            )
