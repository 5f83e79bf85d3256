"""One incarnation of an ingress in the controller: its actor, the calls to it, its health and its saved state."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Final

from actors.model_facts import ModelFacts
from actors.process.ray_calls import RayCallFailed, call
from cluster.api.ingress_actor import IngressHealth
from cluster.api.shared.ports import IngressPorts
from cluster.observability.status import IngressView, ingress_name
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.ray_objects.head_probe import HeadProbe
from cluster.pool.ray_objects.heartbeat import Heartbeat
from cluster.pool.ray_objects.ray_actors import call_if_alive, end_actor
from cluster.pool.trust_calls import give_trust
from cluster.reconciling.engine_slots import SlotHistory
from cluster.sessions.cluster_membership import Membership

logger = logging.getLogger(__name__)

_MEMBERSHIP_TIMEOUT_S: Final = 30.0
_NOTICED_BUSY_S: Final = 2.0
"""How long an event loop is busy with one callback before the journal notes it: many times what a callback may take."""


@dataclass(frozen=True, slots=True)
class SavedIngress:
    """The saved state of an ingress, for a later controller. ports: None before the ingress has any"""

    number: int
    history: SlotHistory
    incarnation: int
    ports: IngressPorts | None
    node_id: str
    node_address: str
    is_open: bool
    home: str = ""
    """The id of the node where the ingress has to be; empty: any node will do."""


@dataclass(slots=True)
class IngressIncarnation:
    """One incarnation of an ingress: its actor, and its state in the controller."""

    number: int
    incarnation: int
    actor: Any  # Any: Ray defines an actor handle's methods at run time.
    node_id: str = ""
    node_address: str = ""
    has_begun: bool = False
    """Whether the ingress is up and can be called."""
    is_open: bool = False
    """Whether the ingress lets clients in."""
    is_asked: bool = False
    """Whether a health check of the ingress is under way."""
    is_behind: bool = True
    """Whether the ingress may lack the newest membership."""
    health: IngressHealth = field(default_factory=IngressHealth)
    is_busy: bool = False
    """Whether the event loop of the ingress was busy with one callback at the last health check."""
    _heartbeat: Heartbeat = field(default_factory=Heartbeat)
    _longest_busy_s: float = 0.0

    @property
    def name(self) -> str:
        """The name by which the ingress introduces itself."""
        return ingress_name(self.number)

    # -- calls of its actor --------------------------------------------------------------------------------------

    async def join(self, trust: ClusterTrust, timeout_s: float) -> None:
        """Ask the ingress which node it is on, and give it the cluster's secrets. Raises RayCallFailed."""
        self.node_id, self.node_address = await call(self.actor.place, timeout_s=timeout_s)
        await call(self.actor.use_trust, await trust.material(), timeout_s=timeout_s)

    async def use_ports(self, ports: IngressPorts, timeout_s: float) -> None:
        """Let the ingress reserve these ports; it is up afterwards. Raises RayCallFailed."""
        await call(self.actor.use_ports, ports, timeout_s=timeout_s)
        self.has_begun = True

    async def open(self, facts: ModelFacts, timeout_s: float) -> IngressPorts:
        """Let clients in. Returns the ports that the ingress listens on. Raises RayCallFailed."""
        ports: IngressPorts = await call(self.actor.start, facts, timeout_s=timeout_s)
        self.is_open = True
        return ports

    async def look(self, head: HeadProbe, timeout_s: float) -> bool:
        """Check the health of the ingress. Returns whether it has answered. Raises ActorLost."""
        health: IngressHealth | None = await self._heartbeat.ask(self.actor.health, head, timeout_s)
        if health is not None:
            self.health = health
        return health is not None

    async def catch_up(self, membership: Membership, trust: ClusterTrust) -> None:
        """Send the secrets and the membership if the ingress lacks the newest ones, by its newest health."""
        if self.health.trust_generation < trust.generation:
            await give_trust(self.actor, trust)
        if self.is_behind or self.health.membership_version < membership.version:
            await self.send(membership)

    async def send(self, membership: Membership) -> None:
        """Send the membership. If the call fails, the ingress stays marked as behind."""
        try:
            await call(self.actor.update_membership, membership, timeout_s=_MEMBERSHIP_TIMEOUT_S)
        except RayCallFailed as failed:
            logger.warning(
                "an ingress did not receive the membership", extra={"ingress": self.number, "error": str(failed)}
            )
            return
        self.is_behind = False

    async def end(self, grace_s: float) -> None:
        """Let the ingress finish its requests within grace_s seconds, then end its actor."""
        await call_if_alive(self.actor.drain, grace_s, timeout_s=grace_s + 10)
        await end_actor(self.actor)

    # -- the newest health ---------------------------------------------------------------------------------------

    def change_of_business(self) -> str | None:
        """Note whether the event loop is busy, by the newest health. Returns, in words, what has changed, or None."""
        busy_s = self.health.busy_s
        who = f"the event loop of ingress {self.number}, incarnation {self.incarnation}"
        if busy_s >= _NOTICED_BUSY_S:
            was_busy, self.is_busy = self.is_busy, True
            self._longest_busy_s = max(self._longest_busy_s, busy_s)
            return None if was_busy else f"{who} has been busy with one thing for {busy_s:.0f} s: it answers no client"
        if not self.is_busy:
            return None
        longest_s, self.is_busy, self._longest_busy_s = self._longest_busy_s, False, 0.0
        return f"{who} has time again, after more than {longest_s:.0f} s"

    def fault(self, busy_timeout_s: float) -> str | None:
        """Return why the ingress has to be given up, by its newest health; None if it is well."""
        if (busy_s := self.health.busy_s) < busy_timeout_s:
            return None
        return f"its event loop has been busy for {busy_s:.0f} s (ingress.busy_timeout_s is {busy_timeout_s:g})"

    def view(self, ports: IngressPorts | None, host: str, last_error: str) -> IngressView:
        """Return the status of the ingress for `raypd status`. host: the setting ingress.host"""
        state = "busy" if self.is_busy else "ready"
        return IngressView(
            number=self.number,
            incarnation=self.incarnation,
            state=state if self.is_open else "starting",
            address=self.address(ports, host) if self.is_open else "",
            http_address=self.http_address(ports, host) if self.is_open else "",
            node=self.node_address,
            last_error=last_error,
            num_requests=self.health.num_requests,
            busy_s=self.health.busy_s if self.is_busy else 0.0,
            routing=self.health.routing,
            request_trace=self.health.request_trace,
        )

    def address(self, ports: IngressPorts | None, host: str) -> str:
        """Return host:port of the gRPC API."""
        return f"{self._host(host)}:{0 if ports is None else ports.grpc}"

    def http_address(self, ports: IngressPorts | None, host: str) -> str:
        """Return host:port of the HTTP API; empty if the ingress has none."""
        return "" if ports is None or ports.http is None else f"{self._host(host)}:{ports.http}"

    def _host(self, host: str) -> str:
        # These addresses mean every interface, so clients need the node's own address.
        is_any = host in {"0.0.0.0", "::", "[::]"}
        return self.node_address if is_any else host
