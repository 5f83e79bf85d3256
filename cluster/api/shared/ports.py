"""The ports of an ingress. They stay the same over its incarnations, so that clients find the next one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cluster.settings.ingress import IngressConfig


@dataclass(frozen=True, slots=True)
class IngressPorts:
    """The ports of one ingress; 0 is a port that is free when the ingress starts. http: None if it serves no HTTP"""

    grpc: int
    http: int | None = None

    @classmethod
    def of(cls, config: IngressConfig) -> IngressPorts:
        """Return the configured ports."""
        return cls(config.port, None if config.http is None else config.http.port)

    def beside(self, others: Collection[IngressPorts]) -> IngressPorts:
        """Return these ports, or the next free ones after them. others: ports of other ingresses on the same node"""
        http = None if self.http is None else _next(self.http, [other.http for other in others])
        return IngressPorts(_next(self.grpc, [other.grpc for other in others]), http)

    def applied_to(self, config: IngressConfig) -> IngressConfig:
        """Return the settings of an ingress with these ports; its admin ports move as far as the ports beside them."""
        http = config.http
        if http is not None and self.http is not None:
            page_port = http.admin_port
            if page_port and self.http:
                page_port += self.http - http.port
            http = http.model_copy(update={"port": self.http, "admin_port": page_port})
        admin_port = config.admin_port
        if admin_port and self.grpc:
            admin_port += self.grpc - config.port
        return config.model_copy(update={"port": self.grpc, "admin_port": admin_port, "http": http})


def _next(first: int, taken: Collection[int | None]) -> int:
    if first == 0:
        return 0
    return next(port for port in range(first, first + len(taken) + 1) if port not in taken)
