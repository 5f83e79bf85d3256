from __future__ import annotations

import pytest

from cluster.pool.ray_objects.object_names import (
    CONTROLLER_NAME,
    engine_actor_name,
    ingress_actor_name,
    is_ingress_actor_name,
    parse_engine_actor_name,
    placement_group_name,
    placement_group_prefix,
)


def test_an_engine_is_found_by_its_actors_name() -> None:
    assert parse_engine_actor_name(engine_actor_name(("decode-12", 34))) == ("decode-12", 34)


@pytest.mark.parametrize("name", [CONTROLLER_NAME, ingress_actor_name(0, 1), "somebody-elses/actor/1", "x"])
def test_other_actors_are_no_engines(name: str) -> None:
    assert parse_engine_actor_name(name) is None


def test_an_ingress_is_known_by_its_actors_name() -> None:
    assert is_ingress_actor_name(ingress_actor_name(2, 7))
    assert not is_ingress_actor_name(engine_actor_name(("decode-0", 1)))


def test_clusters_in_two_namespaces_do_not_share_placement_groups() -> None:
    name = placement_group_name("raypd", ("decode-0", 1))
    assert name.startswith(placement_group_prefix("raypd"))
    assert not placement_group_name("raypd-2", ("decode-0", 1)).startswith(placement_group_prefix("raypd"))
