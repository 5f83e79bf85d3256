"""The nodes that Ray's head names, and the one that this process is on."""

from __future__ import annotations

import pytest
import ray

from actors.process.ray_calls import FailureKind, RayCallFailed
from cluster.pool.ray_objects.ray_nodes import alive_nodes
from tests.cluster.pool.fake_ray import nodes_of


async def test_nodes_that_have_died_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", nodes_of(monkeypatch, own="b", alive=["c", "b"], dead=["a"]))
    assert [node.node_id for node in await alive_nodes()] == ["b", "c"]


async def test_a_process_on_a_node_that_ray_has_given_up_starts_nothing_on_any_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "nodes", nodes_of(monkeypatch, own="a", alive=["b"], dead=["a"]))
    with pytest.raises(RayCallFailed, match="declared the node of this process dead") as failed:
        await alive_nodes()
    assert failed.value.kind is FailureKind.DIED
