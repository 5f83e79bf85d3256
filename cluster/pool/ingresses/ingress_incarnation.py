"""One ingress as the controller knows it: one life of it, and what outlives the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from cluster.api.ingress_actor import IngressHealth
from cluster.api.shared.ports import IngressPorts
from cluster.observability.status import IngressView
from cluster.pool.engine_slots import SlotHistory

_NOTICED_BUSY_S: Final = 2.0
"""Many times what a callback of the event loop may take."""


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
    home: str = ""
    """The id of the node where it has to be. Empty: anywhere."""


@dataclass(slots=True)
class IngressIncarnation:
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
    silent_since_s: float | None = None
    """When it was asked what it has not answered, on the event loop's clock; None while it answers."""
    health: IngressHealth = field(default_factory=IngressHealth)
    is_busy: bool = False
    """Whether its event loop had no time for others when it was last asked."""
    _longest_busy_s: float = 0.0

    def change_of_business(self) -> str | None:
        """Note whether its event loop is busy, by its newest health; returns what has changed, in words."""
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
        """Why it has to be given up, by its newest health; None if it is well."""
        if (busy_s := self.health.busy_s) < busy_timeout_s:
            return None
        return f"its event loop has been busy for {busy_s:.0f} s (ingress.busy_timeout_s is {busy_timeout_s:g})"

    def view(self, ports: IngressPorts | None, host: str, last_error: str) -> IngressView:
        """What people see of it. host: the one that is configured"""
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
        )

    def address(self, ports: IngressPorts | None, host: str) -> str:
        """host:port of its gRPC API."""
        return f"{self._host(host)}:{0 if ports is None else ports.grpc}"

    def http_address(self, ports: IngressPorts | None, host: str) -> str:
        """host:port of its HTTP API; empty if it has none."""
        return "" if ports is None or ports.http is None else f"{self._host(host)}:{ports.http}"

    def _host(self, host: str) -> str:
        is_any = host in {"0.0.0.0", "::", "[::]"}  # named, not listened on
        return self.node_address if is_any else host
