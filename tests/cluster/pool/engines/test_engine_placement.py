from __future__ import annotations

from cluster.config import ClusterConfig, EngineGroupConfig
from cluster.pool.engines.engine_placement import choose_node, needs_of
from cluster.routing.engine_connection import EngineRole

P, D = EngineRole.PREFILL, EngineRole.DECODE


def test_roles_are_kept_apart_as_long_as_there_are_nodes() -> None:
    assert choose_node(P, ["a", "b"], {}) == "a"
    assert choose_node(D, ["a", "b"], {"a": [P]}) == "b"
    assert choose_node(P, ["a", "b"], {"a": [P], "b": [D]}) == "a"


def test_engines_of_a_role_are_spread() -> None:
    assert choose_node(P, ["a", "b", "c"], {"a": [P], "b": [D]}) == "c"
    assert choose_node(P, ["a", "b"], {"a": [P, P], "b": [P]}) == "b"


def test_without_nodes_none_is_preferred() -> None:
    assert choose_node(P, [], {}) is None


def test_what_an_engine_needs_is_told_with_its_labels() -> None:
    labels = {"zone": "a", "ray.io/accelerator-type": "in(H100,H200)"}
    config = ClusterConfig(decode=EngineGroupConfig(num_cpus=2, num_gpus=1, labels=labels))
    assert needs_of(config, P) == "{'CPU': 1} on one node"
    assert needs_of(config, D) == (
        "{'CPU': 2.0, 'GPU': 1.0} on one node that is labelled ray.io/accelerator-type=in(H100,H200), zone=a"
    )
