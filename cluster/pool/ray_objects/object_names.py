"""The names of a cluster's actors and placement groups in Ray, by which a later controller finds them.

An actor's name is unique in its namespace, a placement group's in the whole Ray cluster: its name tells the namespace.
"""

from __future__ import annotations

from typing import Final

from cluster.routing.engine_connection import EngineKey

CONTROLLER_NAME: Final = "raypd-controller"
_ENGINE: Final = "raypd-engine"
_INGRESS: Final = "raypd-ingress"


def engine_actor_name(engine: EngineKey) -> str:
    """Return the actor name of an engine's incarnation."""
    return f"{_ENGINE}/{engine[0]}/{engine[1]}"


def ingress_actor_name(number: int, incarnation: int) -> str:
    """Return the actor name of an ingress's incarnation."""
    return f"{_INGRESS}/{number}/{incarnation}"


def parse_engine_actor_name(name: str) -> EngineKey | None:
    """Return the engine and incarnation of an actor's name; None if it is no engine's."""
    kind, _, rest = name.partition("/")
    engine_id, _, incarnation = rest.rpartition("/")
    return (engine_id, int(incarnation)) if kind == _ENGINE else None


def is_ingress_actor_name(name: str) -> bool:
    """Whether an actor of this name is an ingress."""
    return name.startswith(f"{_INGRESS}/")


def placement_group_prefix(namespace: str) -> str:
    """Return the prefix of the names of this cluster's placement groups."""
    return f"raypd/{namespace}/"


def placement_group_name(namespace: str, engine: EngineKey) -> str:
    """Return the name of the placement group of an engine's incarnation."""
    return f"{placement_group_prefix(namespace)}{engine[0]}/{engine[1]}"
