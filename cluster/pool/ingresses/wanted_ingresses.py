"""The decision which ingresses are wanted, and on which node each has to run. Pure: the nodes are an argument."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cluster.pool.ray_objects.ray_nodes import Node
from cluster.settings.ingress import IngressConfig


class WantedIngresses:
    """The numbers of the wanted ingresses: ingress.count numbers, or with ingress.per_node one number for each node.

    With per_node, a number belongs to its node as long as the node exists; later another node may get the number, and
    with it the port.
    """

    def __init__(self, config: IngressConfig) -> None:
        self._config = config
        self._homes: dict[int, str] = {}
        """The id of the node to which each number belongs; empty without per_node."""

    @property
    def numbers(self) -> list[int]:
        """The numbers of the wanted ingresses."""
        return sorted(self._homes) if self._config.per_node else list(range(self._config.count))

    def home_of(self, number: int) -> str:
        """Return the id of the node where an ingress has to run; empty if any node will do."""
        return self._homes.get(number, "")

    def selector_of(self, number: int, avoided: Collection[str]) -> dict[str, str]:
        """Return Ray's label selector for the nodes where an ingress may run.

        avoided: ids of nodes where the ingress must not run
        """
        selector = dict(self._config.labels)
        if home := self.home_of(number):
            selector["ray.io/node-id"] = home
        elif avoided:
            selector["ray.io/node-id"] = f"!in({','.join(sorted(avoided))})"
        return selector

    def follow(self, nodes: Iterable[Node], avoided: Collection[str], living: Collection[int]) -> None:
        """With per_node, want one ingress on each of these nodes; otherwise do nothing.

        avoided: ids of nodes that get no ingress
        living:  numbers of the ingresses that run or start
        A number whose node is not among the nodes stays wanted while its ingress runs: the list must be incomplete.
        """
        if not self._config.per_node:
            return
        wanted = [node.node_id for node in nodes if node.node_id not in avoided and self._is_fit(node)]
        self._homes = {number: home for number, home in self._homes.items() if home in wanted or (number in living)}
        free = (number for number in range(len(self._homes) + len(wanted)) if number not in self._homes)
        homeless = [node_id for node_id in wanted if node_id not in self._homes.values()]
        self._homes |= dict(zip(list(free), homeless, strict=False))

    def restore(self, number: int, home: str) -> None:
        """Assign a number to the node to which it belonged in an earlier controller."""
        if home and self._config.per_node:
            self._homes[number] = home

    def _is_fit(self, node: Node) -> bool:
        return node.has(self._config.resources, self._config.labels)
