"""The nodes on which ingresses are wanted, as nodes come and go.

Tests of cluster/pool/ray_objects/ray_nodes.py.
"""

from __future__ import annotations

from cluster.pool.ingresses.wanted_ingresses import WantedIngresses
from cluster.pool.ray_objects.ray_nodes import Node
from cluster.settings.ingress import IngressConfig


def nodes(*names: str) -> list[Node]:
    return [Node(name, f"{name}.example", name, {"CPU": 4.0}, {"zone": name}) for name in names]


def homes(wanted: WantedIngresses) -> dict[int, str]:
    return {number: wanted.home_of(number) for number in wanted.numbers}


def test_a_number_of_ingresses_may_be_anywhere_whatever_nodes_there_are() -> None:
    wanted = WantedIngresses(IngressConfig(count=2))
    wanted.follow(nodes("a", "b", "c"), avoided=(), living=())
    assert homes(wanted) == {0: "", 1: ""}


def test_every_node_has_one_and_later_ones_get_theirs() -> None:
    wanted = WantedIngresses(IngressConfig(per_node=True))
    assert homes(wanted) == {}
    wanted.follow(nodes("a", "b"), avoided=(), living=())
    wanted.follow(nodes("0", "a", "b"), avoided=(), living=(0, 1))
    assert homes(wanted) == {0: "a", 1: "b", 2: "0"}


def test_a_node_that_has_left_frees_its_number_once_its_ingress_is_gone() -> None:
    wanted = WantedIngresses(IngressConfig(per_node=True))
    wanted.follow(nodes("a", "b", "c"), avoided=(), living=())
    wanted.follow(nodes("a", "c"), avoided=(), living=(0, 1, 2))
    assert homes(wanted) == {0: "a", 1: "b", 2: "c"}, "it lives, so that node does"
    wanted.follow(nodes("a", "c"), avoided=(), living=(0, 2))
    assert homes(wanted) == {0: "a", 2: "c"}
    wanted.follow(nodes("a", "c", "d"), avoided=(), living=(0, 2))
    assert homes(wanted) == {0: "a", 1: "d", 2: "c"}


def test_a_node_that_is_drained_or_unfit_has_none() -> None:
    wanted = WantedIngresses(IngressConfig(per_node=True))
    wanted.follow(nodes("a", "b"), avoided={"a"}, living=())
    assert homes(wanted) == {0: "b"}
    for config in (
        IngressConfig(per_node=True, labels={"zone": "b"}),
        IngressConfig(per_node=True, labels={"zone": "b"}, resources={"CPU": 1}),
    ):
        wanted = WantedIngresses(config)
        wanted.follow(nodes("a", "b"), avoided=(), living=())
        assert homes(wanted) == {0: "b"}
    wanted = WantedIngresses(IngressConfig(per_node=True, resources={"door": 1}))
    wanted.follow(nodes("a"), avoided=(), living=())
    assert homes(wanted) == {}


def test_a_later_controller_has_the_same_numbers() -> None:
    wanted = WantedIngresses(IngressConfig(per_node=True))
    wanted.restore(3, "b")
    wanted.follow(nodes("a", "b"), avoided=(), living=(3,))
    assert homes(wanted) == {0: "a", 3: "b"}
