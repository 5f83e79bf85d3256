"""Decides which ingresses are wanted, and on which node each has to be. Pure: the nodes are an argument."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cluster.pool.ray_objects.ray_nodes import Node
from cluster.settings.ingress import IngressConfig


class WantedIngresses:
    """So many anywhere, or with per_node one on each node.

    A number then belongs to a node for as long as it is there; it, and with it the port, goes to another node later.
    """

    def __init__(self, config: IngressConfig) -> None:
        self._config = config
        self._homes: dict[int, str] = {}
        """Ids of nodes, by number."""

    @property
    def numbers(self) -> list[int]:
        """The numbers of those that are wanted."""
        return sorted(self._homes) if self._config.per_node else list(range(self._config.count))

    def home_of(self, number: int) -> str:
        """The id of the node where it has to be. Empty: anywhere."""
        return self._homes.get(number, "")

    def selector_of(self, number: int, avoided: Collection[str]) -> dict[str, str]:
        """The labels of the nodes where it may be, as Ray takes them. avoided: ids of nodes where it must not be"""
        selector = dict(self._config.labels)
        if home := self.home_of(number):
            selector["ray.io/node-id"] = home
        elif avoided:
            selector["ray.io/node-id"] = f"!in({','.join(sorted(avoided))})"
        return selector

    def follow(self, nodes: Iterable[Node], avoided: Collection[str], living: Collection[int]) -> None:
        """Want one on each of these nodes.

        avoided: ids of nodes where none is to be; living: numbers of the ingresses that there are
        A node that is not known any more keeps its ingress while that lives: then the nodes' list is wrong.
        """
        if not self._config.per_node:
            return
        wanted = [node.node_id for node in nodes if node.node_id not in avoided and self._is_fit(node)]
        self._homes = {number: home for number, home in self._homes.items() if home in wanted or (number in living)}
        free = (number for number in range(len(self._homes) + len(wanted)) if number not in self._homes)
        homeless = [node_id for node_id in wanted if node_id not in self._homes.values()]
        self._homes |= dict(zip(list(free), homeless, strict=False))

    def restore(self, number: int, home: str) -> None:
        """Let a number belong to the node that an earlier controller gave it."""
        if home and self._config.per_node:
            self._homes[number] = home

    def _is_fit(self, node: Node) -> bool:
        return node.has(self._config.resources, self._config.labels)
