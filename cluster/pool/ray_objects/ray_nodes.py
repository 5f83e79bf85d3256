"""The nodes of the Ray cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ray

from actors.process.ray_calls import FailureKind, RayCallFailed, ask_head

_SELECTOR: Final = re.compile(r"^!|\(")


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the Ray cluster.

    address:   the IP address by which other nodes reach the node
    resources: all Ray resources of the node, whether they are free or not
    """

    node_id: str
    address: str
    hostname: str
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def has(self, resources: Mapping[str, float], labels: Mapping[str, str]) -> bool:
        """Whether the node has at least these resources, and these labels."""
        fits = all(self.resources.get(name, 0) >= amount for name, amount in resources.items())
        # Only Ray evaluates other selectors, such as in(a,b) and !a: they count as fulfilled here.
        plain = ((name, value) for name, value in labels.items() if not _SELECTOR.search(value))
        return fits and all(self.labels.get(name) == value for name, value in plain)

    def is_called(self, name: str) -> bool:
        """Whether this is a name of the node: its address, its hostname, or at least 8 characters of its id's begin."""
        return name in {self.address, self.hostname} or (len(name) >= 8 and self.node_id.startswith(name))

    def __str__(self) -> str:
        return f"{self.address} ({self.hostname}, {self.node_id[:8]})"


async def alive_nodes() -> list[Node]:
    """Return the nodes of the Ray cluster that are alive, sorted by id.

    Raises RayCallFailed, also if Ray's head has declared the node of this process dead.
    """
    nodes = await ask_head(ray.nodes)
    if is_own_node_dead(nodes):
        raise RayCallFailed(FailureKind.DIED, "Ray's head has declared the node of this process dead")
    alive = [
        Node(str(n["NodeID"]), n["NodeManagerAddress"], n["NodeManagerHostname"], n["Resources"], n["Labels"])
        for n in nodes
        if n["Alive"]
    ]
    return sorted(alive, key=lambda node: node.node_id)


def is_own_node_dead(nodes: Iterable[Mapping[str, Any]]) -> bool:
    """Whether Ray's head has declared the node of this process dead, by an answer of ray.nodes().

    The process learns it only if the network to the node was cut, or the node's raylet was stuck, and the process can
    reach the head again: soon afterwards Ray ends all processes of the node.
    """
    dead = {node["NodeID"] for node in nodes if not node["Alive"]}
    return bool(dead) and ray.get_runtime_context().get_node_id() in dead
