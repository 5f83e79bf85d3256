"""Ends actors and placement groups of an earlier controller, which are found by their names."""

from __future__ import annotations

import logging
from collections.abc import Collection

import ray
from ray.util import list_named_actors
from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

from cluster.pool.ray_objects.object_names import is_ingress_actor_name, parse_engine_actor_name, placement_group_prefix

logger = logging.getLogger(__name__)


def sweep(namespace: str, actors_kept: Collection[str] = (), groups_kept: Collection[str] = ()) -> int:
    """Kill the engines and ingresses of a namespace, and release their placement groups.

    namespace: the Ray namespace that the caller is connected to
    actors_kept, groups_kept: names of actors and placement groups that stay
    Returns how many actors and placement groups were ended.
    """
    names = [name for name in list_named_actors() if _is_ours(name) and name not in actors_kept]
    for name in names:
        try:
            ray.kill(ray.get_actor(name))
        except ValueError:
            continue  # The actor has ended meanwhile.
    prefix = placement_group_prefix(namespace)
    groups = [
        group["name"]
        for group in placement_group_table().values()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED" and group["name"] not in groups_kept
    ]
    for name in groups:
        try:
            remove_placement_group(get_placement_group(name))
        except ValueError:
            continue
    if names or groups:
        logger.warning(
            "ended actors and placement groups of an earlier controller", extra={"actors": names, "groups": groups}
        )
    return len(names) + len(groups)


def _is_ours(name: str) -> bool:
    return is_ingress_actor_name(name) or parse_engine_actor_name(name) is not None
