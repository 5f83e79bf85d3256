"""What a cluster's actors and placement groups are called in Ray, so that a later controller finds them.

An actor's name is unique in its namespace, a placement group's in the whole Ray cluster: its name tells the namespace.
"""

from __future__ import annotations

from typing import Final

from cluster.routing.engine_connection import EngineKey

CONTROLLER_NAME: Final = "raypd-controller"
_ENGINE: Final = "raypd-engine"
_INGRESS: Final = "raypd-ingress"


def engine_actor_name(engine: EngineKey) -> str:
    """One life of one engine."""
    return f"{_ENGINE}/{engine[0]}/{engine[1]}"


def ingress_actor_name(number: int, incarnation: int) -> str:
    """One life of one ingress."""
    return f"{_INGRESS}/{number}/{incarnation}"


def parse_engine_actor_name(name: str) -> EngineKey | None:
    """Which life of which engine it is; None if it is no engine."""
    kind, _, rest = name.partition("/")
    engine_id, _, incarnation = rest.rpartition("/")
    return (engine_id, int(incarnation)) if kind == _ENGINE else None


def is_ingress_actor_name(name: str) -> bool:
    """Whether an actor of this name is an ingress."""
    return name.startswith(f"{_INGRESS}/")


def placement_group_prefix(namespace: str) -> str:
    """What the names of this cluster's placement groups begin with."""
    return f"raypd/{namespace}/"


def placement_group_name(namespace: str, engine: EngineKey) -> str:
    """The placement group of one life of one engine."""
    return f"{placement_group_prefix(namespace)}{engine[0]}/{engine[1]}"
