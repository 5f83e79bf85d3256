"""One ingress as the controller knows it: one life of it, and what outlives the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.ingress.ports import IngressPorts
from cluster.ingress_actor import IngressHealth
from cluster.pool.slots import SlotHistory


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
class IngressLife:
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
